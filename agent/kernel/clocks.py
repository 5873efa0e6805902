# SPDX-License-Identifier: Apache-2.0
"""How fast the cores run that a process computes on, and whether heat slows them: from sysfs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from ..model.clockdata import Clocks, Cooling, CoreClock

SYS = Path("/sys")
PROC = Path("/proc")
_COOLS_CPUS = ("cpufreq", "Processor", "intel_powerclamp", "cpu-idle")
"""How the types of cooling devices begin that slow cores; fans and screens are others."""
MAX_TASKS = 1024
NO_FREQUENCY = (
    "this system does not tell how fast its cores run (a virtual machine, or a kernel without cpufreq)"
)


class ClockWatch:
    """Looks now and then at the cores on which a process runs at that moment."""

    def __init__(self, pid: int, *, sys: Path = SYS, proc: Path = PROC) -> None:
        self._pid = pid
        self._cpus = sys / "devices/system/cpu"
        self._cooling = sys / "class/thermal"
        self._proc = proc
        self._sums: dict[int, tuple[int, float]] = {}
        self._throttled = self._throttle_count()
        self._known = any(self._cpus.glob("cpu[0-9]*/cpufreq/scaling_cur_freq"))

    def look(self) -> None:
        """One look. A core that nobody runs on idles at a low frequency, which says nothing."""
        if not self._known:
            return
        for cpu in sorted(set(running_on(self._pid, self._proc))):
            mhz = _mhz(self._cpus / f"cpu{cpu}/cpufreq/scaling_cur_freq")
            if mhz is not None:
                count, total = self._sums.get(cpu, (0, 0.0))
                self._sums[cpu] = (count + 1, total + mhz)

    def clocks(self) -> Clocks:
        """What was seen so far."""
        cores = []
        for cpu, (count, total) in sorted(self._sums.items()):
            folder = self._cpus / f"cpu{cpu}/cpufreq"
            most = _mhz(folder / "cpuinfo_max_freq")
            if most:
                limit = _mhz(folder / "scaling_max_freq")
                cores.append(CoreClock(cpu, count, total / count, most, limit))
        # Where nothing counted at first, nothing does later: a look costs a millisecond.
        now = None if self._throttled is None else self._throttle_count()
        events = None if now is None or self._throttled is None else max(0, now - self._throttled)
        return Clocks(tuple(cores), tuple(self._coolings()), events, None if self._known else NO_FREQUENCY)

    def _throttle_count(self) -> int | None:
        """Of all cores; a package's count is told by each of its cores, so the largest stands for it."""
        cores = [_number(p) for p in self._cpus.glob("cpu[0-9]*/thermal_throttle/core_throttle_count")]
        packages = [_number(p) for p in self._cpus.glob("cpu[0-9]*/thermal_throttle/package_throttle_count")]
        found = [n for n in cores if n is not None]
        whole = [n for n in packages if n is not None]
        return sum(found) + max(whole, default=0) if found or whole else None

    def _coolings(self) -> Iterator[Cooling]:
        for device in sorted(self._cooling.glob("cooling_device[0-9]*")):
            try:
                name = (device / "type").read_text().strip()
            except OSError:
                continue
            state, most = _number(device / "cur_state"), _number(device / "max_state")
            if name.startswith(_COOLS_CPUS) and state and most:
                yield Cooling("".join(c for c in name if c.isprintable())[:40], state, most)


def running_on(pid: int, proc: Path = PROC) -> Iterable[int]:
    """CPUs on which a thread of the process runs, or waits to."""
    for number, task in enumerate((proc / str(pid) / "task").glob("[0-9]*")):
        if number >= MAX_TASKS:
            return
        try:
            # The name may hold anything, brackets too: what counts follows the last one.
            fields = (task / "stat").read_text(errors="replace").rpartition(")")[2].split()
            if fields[0] == "R":
                yield int(fields[36])
        except (OSError, ValueError, IndexError):
            continue  # it has ended


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _mhz(path: Path) -> float | None:
    khz = _number(path)
    return None if khz is None or khz <= 0 else khz / 1e3
