# SPDX-License-Identifier: Apache-2.0
"""Where the threads of a process spend CPU time: samples of their clocks, with stacks.

One event per thread (``cpu-clock``, which every kernel has), each with a small buffer of its
own. Stacks are followed by frame pointers, as the kernel does it: where code is built without
them, only the innermost function is certain.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
from collections import Counter
from typing import TypeAlias

from ..tasks import gone, threads_of
from .perfsys import (
    SAMPLE_CALLCHAIN,
    SAMPLE_IP,
    SAMPLE_TID,
    SOFTWARE,
    TYPE_SOFTWARE,
    EventSpec,
    open_thread_event,
)
from .ring import fence

PAGES = 8
"""Of one thread's buffer; a power of two. At 99 samples a second that is more than 2 s."""
MAX_THREADS = 256
MAX_DEPTH = 64
MAX_STACKS = 1 << 14
_HEAD, _TAIL = 1024, 1032  # in the first page
_LOST, _SAMPLE = 2, 9
_CONTEXT_MAX = (1 << 64) - 4095  # from here on an entry says which space follows
_CONTEXT_KERNEL, _CONTEXT_USER = (1 << 64) - 128, (1 << 64) - 512
_CLOCK = EventSpec("cpu-clock", TYPE_SOFTWARE, SOFTWARE["cpu-clock"])

Stack: TypeAlias = tuple[bool, tuple[int, ...]]
"""(whether it ended in the operating system, user addresses from the innermost outwards)."""


class Sampler:
    """Samples all threads of ``pid``. Close it."""

    def __init__(self, pid: int, hertz: int = 99) -> None:
        self.hertz = hertz
        self.stacks: Counter[Stack] = Counter()
        self.samples = 0
        self.lost = 0
        self.refused: OSError | None = None
        """Why a thread has no event; None: all have."""
        self._pid = pid
        self._rings: dict[int, tuple[int, mmap.mmap]] = {}

    @property
    def threads(self) -> int:
        """Threads that are sampled now."""
        return len(self._rings)

    def look(self) -> None:
        """Take what there is, and find threads that are new or gone."""
        present = threads_of(self._pid)
        for _, ring in self._rings.values():
            self._drain(ring)
        for tid in gone(self._pid, self._rings, present):
            self._drop(tid)
        for tid in sorted(present - set(self._rings))[: MAX_THREADS - len(self._rings)]:
            self._open(tid)

    def _open(self, tid: int) -> None:
        try:
            fd = open_thread_event(
                _CLOCK, tid, hertz=self.hertz, sample=SAMPLE_IP | SAMPLE_TID | SAMPLE_CALLCHAIN
            )
        except ProcessLookupError:
            return  # it has ended
        except OSError as error:
            self.refused = error
            return
        try:
            self._rings[tid] = (fd, mmap.mmap(fd, (1 + PAGES) * mmap.PAGESIZE))
        except OSError as error:
            self.refused = error
            os.close(fd)

    def _drain(self, ring: mmap.mmap) -> None:
        head, tail = struct.unpack_from("=QQ", ring, _HEAD)
        fence()
        size, base = PAGES * mmap.PAGESIZE, mmap.PAGESIZE
        data = ring[base + tail % size : base + size] + ring[base : base + tail % size]
        self._take(data[: min(head - tail, size)])
        fence()
        struct.pack_into("=Q", ring, _TAIL, head)

    def _take(self, data: bytes) -> None:
        """Records one after the other; a broken one ends it, and what it hides is lost."""
        at = 0
        while at + 8 <= len(data):
            kind, _, size = struct.unpack_from("=IHH", data, at)
            if size < 8 or at + size > len(data):
                self.lost += 1
                return
            if kind == _LOST and size >= 24:
                self.lost += struct.unpack_from("=Q", data, at + 16)[0]
            elif kind == _SAMPLE and size >= 32:
                self._sample(data[at : at + size])
            at += size

    def _sample(self, record: bytes) -> None:
        ip, _, _, count = struct.unpack_from("=QIIQ", record, 8)
        count = min(count, (len(record) - 32) // 8)
        chain = struct.unpack_from(f"={count}Q", record, 32)
        in_kernel, user, space = False, [], _CONTEXT_USER
        for address in chain:
            if address >= _CONTEXT_MAX:
                space = address
                in_kernel |= space == _CONTEXT_KERNEL
            elif space == _CONTEXT_USER:
                user.append(address)
        if not chain:
            user = [ip]
        stack = (in_kernel, tuple(user[:MAX_DEPTH]))
        self.samples += 1
        if stack not in self.stacks and len(self.stacks) >= MAX_STACKS:
            stack = (in_kernel, stack[1][:1])  # the innermost function is still right
            if stack not in self.stacks and len(self.stacks) >= 2 * MAX_STACKS:
                stack = (in_kernel, ())
        self.stacks[stack] += 1

    def _drop(self, tid: int) -> None:
        fd, ring = self._rings.pop(tid)
        ring.close()
        os.close(fd)

    def close(self) -> None:
        """Take the rest and stop sampling. May be called twice."""
        for tid in list(self._rings):
            with contextlib.suppress(ValueError):
                self._drain(self._rings[tid][1])
            self._drop(tid)
