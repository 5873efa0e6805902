# SPDX-License-Identifier: Apache-2.0
"""Clocks from a made-up sysfs: machines with cpufreq or thermal counters were not at hand."""

from __future__ import annotations

from pathlib import Path

from profinferd.agent.kernel.clocks import NO_FREQUENCY, ClockWatch, running_on
from profinferd.agent.model.clockdata import Cooling, CoreClock


def write(path: Path, text: object) -> None:
    """A file of sysfs or /proc."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def cpu(sys: Path, number: int, now: int, limit: int, most: int = 2_400_000) -> None:
    """One CPU, frequencies in kHz."""
    for name, value in (("scaling_cur_freq", now), ("scaling_max_freq", limit), ("cpuinfo_max_freq", most)):
        write(sys / f"devices/system/cpu/cpu{number}/cpufreq/{name}", value)


def task(proc: Path, tid: int, state: str, number: int, name: str = "x") -> None:
    """A thread of process 7 that was last on a CPU."""
    rest = " ".join(["0"] * 35)
    write(proc / f"7/task/{tid}/stat", f"{tid} ({name}) {state} {rest} {number} 0 0")


def test_only_cores_on_which_it_runs(tmp_path: Path) -> None:
    sys, proc = tmp_path / "sys", tmp_path / "proc"
    cpu(sys, 0, 1_200_000, 1_200_000)
    cpu(sys, 1, 400_000, 2_400_000)  # idle
    task(proc, 7, "R", 0, "evil) S 1 (")
    task(proc, 8, "S", 1)
    watch = ClockWatch(7, sys=sys, proc=proc)
    watch.look()
    cpu(sys, 0, 1_000_000, 1_100_000)
    watch.look()
    clocks = watch.clocks()
    assert clocks.cores == (CoreClock(0, 2, 1100.0, 2400.0, 1100.0),)
    assert (clocks.throttle_events, clocks.cooling, clocks.reason) == (None, (), None)


def test_heat(tmp_path: Path) -> None:
    """Events since we came; a package's count is told by each of its cores. A fan is no slowing."""
    sys, proc = tmp_path / "sys", tmp_path / "proc"
    folder = sys / "devices/system/cpu"

    def counts(cores: tuple[int, int], package: int) -> None:
        for number, count in enumerate(cores):
            write(folder / f"cpu{number}/thermal_throttle/core_throttle_count", count)
            write(folder / f"cpu{number}/thermal_throttle/package_throttle_count", package)

    counts((10, 20), 100)
    for number, (name, state) in enumerate((("cpufreq-cpu0", 3), ("pwm-fan", 2), ("Processor", 0))):
        for file, value in (("type", name), ("cur_state", state), ("max_state", 10)):
            write(sys / f"class/thermal/cooling_device{number}/{file}", value)
    watch = ClockWatch(7, sys=sys, proc=proc)
    assert watch.clocks().throttle_events == 0
    counts((11, 22), 104)
    clocks = watch.clocks()
    assert clocks.throttle_events == 1 + 2 + 4
    assert clocks.cooling == (Cooling("cpufreq-cpu0", 3, 10),)


def test_nothing_to_read_is_absent_with_a_reason(tmp_path: Path) -> None:
    watch = ClockWatch(7, sys=tmp_path, proc=tmp_path)
    watch.look()
    clocks = watch.clocks()
    assert (clocks.cores, clocks.throttle_events) == ((), None)
    assert clocks.reason == NO_FREQUENCY


def test_broken_files_are_passed_over(tmp_path: Path) -> None:
    cpu(tmp_path, 0, 0, 0)
    write(tmp_path / "7/task/1/stat", "1 (x) R 0")
    write(tmp_path / "7/task/2/stat", "")
    assert list(running_on(7, tmp_path)) == []
    task(tmp_path, 3, "R", 0)
    watch = ClockWatch(7, sys=tmp_path, proc=tmp_path)
    watch.look()
    assert watch.clocks().cores == ()
