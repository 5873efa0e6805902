# SPDX-License-Identifier: Apache-2.0
"""Recordings: one SQLite file per run, written while it is watched, read without root."""
