# SPDX-License-Identifier: Apache-2.0
"""Memory of another process, read only.

``process_vm_readv`` is asked first; where a container's system call filter or a missing
capability refuses it, ``/proc/PID/mem``, which is guarded by another check. Three things
are told apart: not permitted (:class:`~profinferd.agent.errors.MachineError`), nothing
there (:class:`AbsentMemory`), and no such process any more
(:class:`~profinferd.agent.errors.TargetEnded`).
"""

from __future__ import annotations

import ctypes
import errno
import os

from ..errors import TargetEnded, TargetError
from .process import not_permitted

MAX_READ = 64 << 20


class AbsentMemory(TargetError):
    """No readable memory at that address."""


class _Iovec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


_libc = ctypes.CDLL(None, use_errno=True)
_readv = _libc.process_vm_readv
_readv.argtypes = (
    ctypes.c_int,
    ctypes.POINTER(_Iovec), ctypes.c_ulong,
    ctypes.POINTER(_Iovec), ctypes.c_ulong, ctypes.c_ulong,
)  # fmt: skip
_readv.restype = ctypes.c_ssize_t


def read_memory(pid: int, addr: int, count: int) -> bytes:
    """Exactly ``count`` bytes at ``addr`` of process ``pid``.

    Raises AbsentMemory when not all of them are readable memory, MachineError when we
    may not look, TargetEnded when the process is gone, ValueError for a count that is
    negative or above 64 MiB.
    """
    if not 0 <= count <= MAX_READ:
        raise ValueError(f"{count} bytes cannot be read at once")
    if count == 0:
        return b""
    if addr < 0 or addr + count > 1 << 64:
        raise _absent(pid, addr, count)
    data, error = _by_readv(pid, addr, count)
    if error in (errno.EPERM, errno.EACCES, errno.ENOSYS):
        data, error = _by_file(pid, addr, count)
    if error in (errno.EPERM, errno.EACCES):
        raise not_permitted(pid, "the memory")
    if error in (errno.ESRCH, errno.ENOENT):
        raise TargetEnded(f"process {pid} ended while its memory was read")
    if error or len(data) != count:
        raise _absent(pid, addr, count)
    return data


def _absent(pid: int, addr: int, count: int) -> AbsentMemory:
    return AbsentMemory(f"process {pid} has no {count} readable bytes at 0x{addr:x}")


def _by_readv(pid: int, addr: int, count: int) -> tuple[bytes, int]:
    buffer = ctypes.create_string_buffer(count)
    here = _Iovec(ctypes.addressof(buffer), count)
    there = _Iovec(addr, count)
    got = _readv(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
    if got < 0:
        return b"", ctypes.get_errno()
    return buffer.raw[:got], 0


def _by_file(pid: int, addr: int, count: int) -> tuple[bytes, int]:
    try:
        fd = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        return b"", error.errno or errno.EIO
    try:
        data = os.pread(fd, count, addr) if addr < 1 << 63 else b""
    except OSError as error:
        return b"", error.errno or errno.EIO
    finally:
        os.close(fd)
    # A process whose memory is gone reads as empty, not as an error.
    if not data and not os.path.exists(f"/proc/{pid}"):
        return b"", errno.ESRCH
    return data, 0
