# SPDX-License-Identifier: Apache-2.0
"""Checks for a machine with a device; not part of ``make test``."""
