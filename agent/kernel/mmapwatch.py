# SPDX-License-Identifier: Apache-2.0
"""Code that any process maps, as the kernel announces it (perf's side band, PERF_RECORD_MMAP2).

A dummy event on each processor, with nothing to count, carries a record for every file that is
mapped executable: at exec, by the dynamic loader, at dlopen. The kernel writes them where they
happen; we read when it suits us, and a machine where nothing starts costs nothing.
"""

from __future__ import annotations

import errno
import mmap
import os
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..errors import MachineError
from . import bpfsys, reasons
from .cpuevents import READ_ENABLED, Pulses

PAGES = 16
"""Of each processor's ring, a power of two: some 500 records."""
_SOFTWARE, _DUMMY = 1, 9
_MMAP, _MMAP2 = 1 << 8, 1 << 23
_RECORD_LOST, _RECORD_MMAP2 = 2, 10
_HEAD, _TAIL = 1024, 1032  # places in the control page
_BODY = struct.Struct("=IIQQQIIQQII")
_PROT_EXEC = 4


@dataclass(frozen=True, slots=True)
class Mapped:
    """A file that a process has mapped executable; ``generation`` tells reuses of an inode apart."""

    pid: int
    dev: str  # as in /proc/PID/maps
    inode: int
    generation: int


class _CpuRing:
    def __init__(self, fd: int) -> None:
        self.fd = fd
        try:
            self._memory = mmap.mmap(
                fd, (1 + PAGES) * mmap.PAGESIZE, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE
            )
        except OSError:
            os.close(fd)
            raise
        self._size = PAGES * mmap.PAGESIZE

    def waiting(self) -> bool:
        head, tail = struct.unpack_from("=QQ", self._memory, _HEAD)
        return bool(head != tail)

    def read(self) -> bytes:
        """Everything that waits, in order."""
        head, tail = struct.unpack_from("=QQ", self._memory, _HEAD)
        if head == tail:
            return b""
        begin, end = tail % self._size, head % self._size
        base = mmap.PAGESIZE
        if begin < end:
            data = self._memory[base + begin : base + end]
        else:
            data = self._memory[base + begin : base + self._size] + self._memory[base : base + end]
        struct.pack_into("=Q", self._memory, _TAIL, head)
        return data

    def close(self) -> None:
        self._memory.close()
        os.close(self.fd)


class MmapWatch:
    """Opens the events at once. Raises MachineError where the kernel or a privilege forbids it."""

    def __init__(self, online: Path = Path("/sys/devices/system/cpu/online")) -> None:
        self._online = online
        self._rings: dict[int, _CpuRing] = {}
        self._pulses = Pulses()
        self.lost = 0
        """Records that found no room so far: somebody has to look for himself."""
        failure: OSError | None = None
        try:
            for cpu in _cpus(online):
                try:
                    self._rings[cpu] = _CpuRing(_open(cpu))
                except OSError as error:
                    if error.errno != errno.ENODEV:  # it went offline meanwhile
                        failure = error
                        break
        except BaseException:
            self.close()
            raise
        if failure is not None or not self._rings:
            self.close()
            number = failure.errno or 0 if failure is not None else errno.ENODEV
            what = "mappings of new code cannot be watched"
            if number in (errno.EPERM, errno.EACCES):
                raise reasons.refused(what, number, reasons.FOR_LOADING)
            raise MachineError(f"{what}: {bpfsys.strerror(number)}")

    def read(self) -> list[Mapped]:
        """What was mapped since the last time; :attr:`lost` grows when that is not all."""
        out: list[Mapped] = []
        for ring in self._rings.values():
            if ring.waiting():
                out.extend(self._records(ring.read()))
        return out

    def _records(self, data: bytes) -> Iterator[Mapped]:
        at, end = 0, len(data)
        while at + 8 <= end:
            kind, _, size = struct.unpack_from("=IHH", data, at)
            if size < 8 or at + size > end:
                self.lost += 1  # torn: not believed any further
                return
            if kind == _RECORD_MMAP2 and size >= 8 + _BODY.size:
                pid, _, _, _, _, major, minor, inode, generation, prot, _ = _BODY.unpack_from(data, at + 8)
                if inode and prot & _PROT_EXEC:
                    yield Mapped(pid, f"{major:02x}:{minor:02x}", inode, generation)
            elif kind == _RECORD_LOST and size >= 24:
                self.lost += struct.unpack_from("=Q", data, at + 16)[0]
            at += size

    def descriptors(self) -> list[int]:
        """They become readable when there is something to read."""
        return [ring.fd for ring in self._rings.values()]

    def renew(self) -> bool:
        """Have the events of exactly the processors that are online now (case C57); whether some were
        offline meanwhile, or are new: what was mapped on them has not been announced."""
        online = frozenset(_cpus(self._online))
        changed = self._pulses.stopped({cpu: ring.fd for cpu, ring in self._rings.items()})
        changed |= online ^ self._rings.keys()
        for cpu in changed & self._rings.keys():
            self._rings.pop(cpu).close()
        for cpu in changed & online:
            with suppress(OSError):  # it is offline again, or no descriptor is left: the next time
                self._rings[cpu] = _CpuRing(_open(cpu))
        return bool(changed)

    def close(self) -> None:
        """May be called twice."""
        while self._rings:
            self._rings.popitem()[1].close()


def _open(cpu: int) -> int:
    attributes = struct.pack(
        "=IIQQQQQIIQ", _SOFTWARE, 64, _DUMMY, 0, 0, READ_ENABLED, _MMAP | _MMAP2, 1, 0, 0
    )
    return bpfsys.perf_event_open(attributes, -1, cpu)


def _cpus(online: Path) -> list[int]:
    try:
        text = online.read_text().strip()
    except OSError:
        return sorted(os.sched_getaffinity(0))
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found
