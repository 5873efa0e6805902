# SPDX-License-Identifier: Apache-2.0
"""The process on which it is measured what watching waits and page faults costs: it does what it is told.

Run as a script, with nothing imported from the project: ``python -I -S waits_child.py``. It forks a
peer and keeps with it to one CPU, so that each round of ``wait`` is exactly one wait of its own: it
writes to the peer, sleeps until that has answered, and each of the two wakes the other. Requests are
two u64 on its standard input, what and how often; each is answered with one, the ns that it took.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import struct
import time

WAIT, FAULT = 1, 2
_PR_SET_PDEATHSIG = 1


def _peer(come: int, go: int) -> int:
    """Answer every byte, until the other end is closed."""
    while os.read(come, 1):
        os.write(go, b"x")
    return 0


def main() -> int:
    """Serve until the input ends; returns the exit status."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    (to_read, to_write), (from_read, from_write) = os.pipe(), os.pipe()
    if os.fork() == 0:
        os.close(to_write)
        os.close(from_read)
        os._exit(_peer(to_read, from_write))
    os.close(to_read)
    os.close(from_write)
    read, write, page = os.read, os.write, mmap.PAGESIZE
    write(1, struct.pack("=Q", 0))
    while len(request := read(0, 16)) == 16:
        what, count = struct.unpack("=2Q", request)
        if what == WAIT:
            begun = time.monotonic_ns()
            for _ in range(count):
                write(to_write, b"x")
                read(from_read, 1)
            took = time.monotonic_ns() - begun
        else:
            with mmap.mmap(-1, count * page) as fresh:
                begun = time.monotonic_ns()
                for at in range(0, count * page, page):
                    fresh[at] = 1
                took = time.monotonic_ns() - begun
        write(1, struct.pack("=Q", took))
    return 0


if __name__ == "__main__":
    os._exit(main())
