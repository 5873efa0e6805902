# SPDX-License-Identifier: Apache-2.0
"""What processes use of the machine, from /proc."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

_TICK = os.sysconf("SC_CLK_TCK")
_PROC = Path("/proc")


def cpu_ns(pid: int) -> int:
    """Processor time of all threads so far, in ns.

    The scheduler's own count where the kernel has it, for ``stat`` counts in ticks of 10 ms;
    threads that ended are in ``stat`` alone.
    """
    total = 0
    for task in (_PROC / str(pid) / "task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            try:
                total += int((task / "schedstat").read_text().split()[0])
            except FileNotFoundError:
                return _stat_ns(pid)
    return total


def _stat_ns(pid: int) -> int:
    fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * 1_000_000_000 // _TICK


def peak_kib(pid: int) -> int:
    """Largest resident size so far (VmHWM)."""
    for line in (_PROC / str(pid) / "status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1])
    raise LookupError(f"no VmHWM for process {pid}")


@dataclass(frozen=True, slots=True)
class Machine:
    """Seconds of all processors since boot: spent, and taken by the hypervisor."""

    busy: float
    stolen: float

    @classmethod
    def now(cls) -> Machine:
        fields = (_PROC / "stat").read_text().split("\n", 1)[0].split()[1:]
        user, nice, system, _, _, irq, softirq, steal = (int(f) / _TICK for f in fields[:8])
        return cls(user + nice + system + irq + softirq, steal)
