# SPDX-License-Identifier: Apache-2.0
"""The daemon: finds engines on the whole machine, watches them, and tells who asks."""
