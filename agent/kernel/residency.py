# SPDX-License-Identifier: Apache-2.0
"""How much of a file is in the page cache: cachestat (Linux 6.5), else mincore."""

from __future__ import annotations

import ctypes
import mmap
import os
import struct

_CACHESTAT = 451  # the same number on every architecture
_WINDOW = 1 << 30  # bytes looked at in one mincore call

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64
]  # fmt: skip
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


def resident_bytes(fd: int) -> int | None:
    """Bytes of the open file that are in memory; None where the kernel does not tell us.

    cachestat wants the file's owner or CAP_FOWNER, mincore likewise (it says "all" to others,
    who are told nothing here).
    """
    size = os.fstat(fd).st_size
    pages = by_cachestat(fd)
    if pages is None:
        pages = by_mincore(fd, size)
    return None if pages is None else min(pages * mmap.PAGESIZE, size)


def by_cachestat(fd: int) -> int | None:
    """Pages of the file in memory, by cachestat; None where it is not allowed or not there."""
    range_ = ctypes.create_string_buffer(struct.pack("=QQ", 0, 0), 16)  # to the end
    answer = ctypes.create_string_buffer(40)
    result = _libc.syscall(
        ctypes.c_long(_CACHESTAT), ctypes.c_long(fd), ctypes.byref(range_), ctypes.byref(answer),
        ctypes.c_long(0),
    )  # fmt: skip
    return None if result else int(struct.unpack_from("=Q", answer, 0)[0])


def by_mincore(fd: int, size: int) -> int | None:
    """Pages of the file in memory, by mincore on a mapping of our own that is never touched."""
    status = os.fstat(fd)
    if os.geteuid() not in (0, status.st_uid) and not os.access(f"/proc/self/fd/{fd}", os.W_OK):
        return None
    found = 0
    for offset in range(0, size, _WINDOW):
        length = min(_WINDOW, size - offset)
        base = _libc.mmap(None, length, mmap.PROT_READ, mmap.MAP_SHARED, fd, offset)
        if base in (None, ctypes.c_void_p(-1).value):
            return None
        vector = ctypes.create_string_buffer(-(-length // mmap.PAGESIZE))
        try:
            if _libc.mincore(base, length, vector):
                return None
        finally:
            _libc.munmap(base, length)
        found += sum(vector.raw.translate(_LOW_BIT))
    return found


_LOW_BIT = bytes(i & 1 for i in range(256))
