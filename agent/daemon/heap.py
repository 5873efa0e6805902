# SPDX-License-Identifier: Apache-2.0
"""Memory that the C library keeps for later, which a service that runs for months does not need."""

from __future__ import annotations

import ctypes
from contextlib import suppress

_M_TRIM_THRESHOLD, _M_ARENA_MAX = -1, -8  # of glibc's malloc.h
_KEPT_BYTES = 64 << 10


def keep_little() -> None:
    """One heap for all threads: ours are few and small, heaps are not. What is free at its end goes
    back to the system."""
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_ARENA_MAX, 1)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def trim() -> None:
    """Give back what is free, wherever it lies: after work that comes rarely."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
