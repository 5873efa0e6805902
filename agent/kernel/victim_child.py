# SPDX-License-Identifier: Apache-2.0
"""The process whose functions are probed when probes are measured: it calls what it is told to.

Run as a script, with nothing imported from the project:
``python -I -S victim_child.py CODE_FD CODE_SIZE DATA_FD DATA_SIZE``. It maps the code private
and executable (as a library is, and as MemoryDenyWriteExecute allows) and the data shared,
says where both are, and then answers each request on its standard input (five u64: offset of a
function, four arguments) with four u64: when the call began and ended (ns of
CLOCK_MONOTONIC), what it returned, and what it took of a core (ns of this thread).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import struct
import sys
import time

_PR_SET_PDEATHSIG = 1


def main(code_fd: int, code_size: int, data_fd: int, data_size: int) -> int:
    """Serve until the input ends; returns the exit status."""
    libc = ctypes.CDLL(None, use_errno=True)
    # A function may be told to run until its data say stop: who could say so must be alive.
    libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
    ]  # fmt: skip
    code = libc.mmap(None, code_size, mmap.PROT_READ | mmap.PROT_EXEC, mmap.MAP_PRIVATE, code_fd, 0)
    if code in (None, ctypes.c_void_p(-1).value):
        return ctypes.get_errno() or 1
    flags = mmap.MAP_SHARED | mmap.MAP_POPULATE  # op programs read only what is present
    data = mmap.mmap(data_fd, data_size, flags, mmap.PROT_READ | mmap.PROT_WRITE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(data))
    kind = ctypes.CFUNCTYPE(ctypes.c_uint64, *[ctypes.c_uint64] * 4)
    functions: dict[int, ctypes._CFunctionType] = {}
    os.write(1, struct.pack("=4Q", code, address, 0, 0))
    while len(request := os.read(0, 40)) == 40:
        at, *arguments = struct.unpack("=5Q", request)
        function = functions.setdefault(at, kind(code + at))
        begun, before = time.monotonic_ns(), time.thread_time_ns()
        result = function(*arguments)
        spent = time.thread_time_ns() - before
        os.write(1, struct.pack("=4Q", begun, time.monotonic_ns(), result, spent))
    return 0


if __name__ == "__main__":
    # Not through the interpreter's end: there is nothing to clean up, and someone waits.
    os._exit(main(*map(int, sys.argv[1:5])))
