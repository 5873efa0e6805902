# SPDX-License-Identifier: Apache-2.0
"""The child that finds out whether this kernel kills filtered processes at return probes.

Linux 6.11 sends a returning function through a system call of its own (335) and, until fixes
of early 2025, asked the process's seccomp filter about it: every sandboxed process died at
its first return probe. This child forbids itself the numbers around that call, which no
program uses, calls a function in the memory file of its first argument, and ends.

Run as a script, with nothing imported from the project: ``python -I -S sandboxed.py FD``.
Exit status 0: alive; 3: this kernel has no seccomp filters; a signal: the answer is yes.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import sys

NO_SECCOMP = 3

_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 22, 38
_KILL, _ALLOW = 0x80000000, 0x7FFF0000
_LOAD, _AT_LEAST, _RETURN = 0x20, 0x35, 0x06
_FIRST, _END = 335, 424  # an unused stretch of the system call tables, but for 335 and 336


def filter_program() -> bytes:
    """Classic BPF: kill at system calls in [_FIRST, _END), allow the rest."""
    return b"".join(
        struct.pack("=HBBI", *step)
        for step in (
            (_LOAD, 0, 0, 0),  # the number of the system call
            (_AT_LEAST, 0, 2, _FIRST),
            (_AT_LEAST, 1, 0, _END),
            (_RETURN, 0, 0, _KILL),
            (_RETURN, 0, 0, _ALLOW),
        )
    )


def main(descriptor: int) -> int:
    """Map the function, lock the door, call it."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    access = mmap.PROT_READ | mmap.PROT_EXEC
    address = libc.mmap(
        None, ctypes.c_size_t(mmap.PAGESIZE), access, mmap.MAP_PRIVATE, descriptor, ctypes.c_long(0)
    )
    if address is None or address == ctypes.c_void_p(-1).value:
        return 4
    function = ctypes.CFUNCTYPE(None)(address)
    steps = filter_program()
    code = ctypes.create_string_buffer(steps, len(steps))
    program = ctypes.create_string_buffer(struct.pack("=H6xQ", len(steps) // 8, ctypes.addressof(code)), 16)
    zero = ctypes.c_ulong(0)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), zero, zero, zero)
    if libc.prctl(_PR_SET_SECCOMP, ctypes.c_ulong(2), ctypes.byref(program), zero, zero):
        return NO_SECCOMP
    function()
    return 0


if __name__ == "__main__":
    os._exit(main(int(sys.argv[1])))
