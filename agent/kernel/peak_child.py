# SPDX-License-Identifier: Apache-2.0
"""The process that runs the machine code of ``peak_code``, with as many threads as it is told.

Run as a script, with nothing imported from the project:
``python -I -S peak_child.py CODE_FD CODE_SIZE MEMORY_BYTES``. It answers each line of JSON on its
standard input, ``{"kind", "at", "threads", "rounds", "repeats"}``, with one line: a list of
the seconds that each repeat took, from the first thread's begin to the last one's end.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

_PR_SET_PDEATHSIG = 1
_BLOCK = 4 * 512
_MADV_DONTNEED = 4
_ARRAYS = {"read": 1, "triad": 3}


class Memory:
    """What is read: one array, or three of equal size, of which each thread has a part."""

    def __init__(self, size: int) -> None:
        self._map = mmap.mmap(-1, max(size, mmap.PAGESIZE), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._size = size

    def give_back(self) -> None:
        """Let the pages go, so that who touches them next has them near."""
        self._map.madvise(_MADV_DONTNEED)

    def part(self, arrays: int, index: int, count: int) -> tuple[list[int], int]:
        """(addresses, bytes) of part ``index`` of ``count``, of each of so many arrays."""
        each = self._size // arrays // 64 * 64
        size = self._size // arrays // count // _BLOCK * _BLOCK
        return [self._base + n * each + index * size for n in range(arrays)], size

    def touch(self, arrays: int, index: int, count: int) -> None:
        """Write a part."""
        at, size = self.part(arrays, index, count)
        for base in at:
            ctypes.memset(base, 1, size)


class Run:
    """One task: every thread calls the function again and again, all beginning together."""

    def __init__(self, task: dict[str, Any], function: Callable[..., None], memory: Memory) -> None:
        self._task, self._function, self._memory = task, function, memory
        self._count, self._repeats = int(task["threads"]), int(task["repeats"])
        self._barrier = threading.Barrier(self._count)
        self._begun = [[0] * self._count for _ in range(self._repeats)]
        self._ended = [[0] * self._count for _ in range(self._repeats)]
        self._failed = False

    def seconds(self) -> list[float] | None:
        """Of each repeat; None when a thread failed."""
        threads = [threading.Thread(target=self._work, args=(n,)) for n in range(self._count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._failed:
            return None
        return [(max(e) - min(b)) / 1e9 for b, e in zip(self._begun, self._ended, strict=True)]

    def _work(self, index: int) -> None:
        try:
            arguments = self._arguments(index)
            for begun, ended in zip(self._begun, self._ended, strict=True):
                self._barrier.wait()
                begun[index] = time.monotonic_ns()
                self._function(*arguments)
                ended[index] = time.monotonic_ns()
        except BaseException:
            self._failed = True  # told by the exit status of the process
            self._barrier.abort()
            raise

    def _arguments(self, index: int) -> tuple[int, int, int, int]:
        rounds, arrays = int(self._task["rounds"]), _ARRAYS.get(self._task["kind"])
        if arrays is None:
            return rounds, 0, 0, 0
        self._memory.touch(arrays, index, self._count)
        at, size = self._memory.part(arrays, index, self._count)
        return (at[0], size // 4, rounds, 0) if arrays == 1 else (at[0], at[1], at[2], size)


def main(code_fd: int, code_size: int, memory_bytes: int) -> int:
    """Serve until the input ends; returns the exit status."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
    ]  # fmt: skip
    code = libc.mmap(None, code_size, mmap.PROT_READ | mmap.PROT_EXEC, mmap.MAP_PRIVATE, code_fd, 0)
    if code in (None, ctypes.c_void_p(-1).value):
        return ctypes.get_errno() or 1
    memory = Memory(memory_bytes)
    kind = ctypes.CFUNCTYPE(None, *[ctypes.c_uint64] * 4)  # gives up the interpreter's lock
    for line in sys.stdin:
        task = json.loads(line)
        if task["kind"] in _ARRAYS:
            memory.give_back()  # its parts are others than they were
        seconds = Run(task, kind(code + task["at"]), memory).seconds()
        if seconds is None:
            return 1
        print(json.dumps(seconds), flush=True)
    return 0


if __name__ == "__main__":
    os._exit(main(*map(int, sys.argv[1:4])))
