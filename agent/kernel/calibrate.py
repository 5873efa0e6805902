# SPDX-License-Identifier: Apache-2.0
"""Measuring what probes cost on this machine (design D6): about a second, quick a tenth of it.

Figures come from the very programs that are attached to targets, on a process of our own.
Each sample is a difference of two calls one right after the other, in time of a core, the kinds take
turns, and medians are taken: what else the machine does meanwhile is not in them, or meets all alike.
"""

from __future__ import annotations

import dataclasses
import platform
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from pathlib import Path

from ..errors import MachineError
from . import calibration
from .bench import Bench
from .calibration import Calibration, Figure, HitCost, median_figure
from .causeprices import measure_causes
from .programs import GgmlPrograms
from .victim import Victim
from .victim_graph import KERNELS
from .watch import Seen, Watch

Progress = Callable[[str], None]

FULL_SAMPLES, FULL_SECONDS = 25, 0.4
QUICK_SAMPLES, QUICK_SECONDS = 7, 0.025
CYCLES, CYCLE_SECONDS = 8, 0.5
PLAUSIBLE_STALL_NS, MOST_CYCLES, MOST_CYCLE_SECONDS = 5e6, 40, 4.0
"""A cycle stalls a target for less (section 5: about 5 ms with a hundred sites, these are two). The
few cycles of a busy machine, or of one whose hypervisor runs others, may say a tenth of a second, and
that would be kept; of more cycles the interval leaves such ones out."""
_FEWEST, _FEWEST_CYCLES = 3, 2
"""Samples that are taken however long they take."""
_EMULATED, _EMULATED_QUICK = 2048, 512
"""Hits of about a microsecond to a sample."""
_STEPPED = 128
"""Hits of about twenty microseconds."""
_IDLE = 0.02
"""Seconds that the victim is watched after a cycle, for comparison."""

_Task = tuple[str, str, str, int]
"""Arguments of ``Bench.sample``."""


def _tasks(quick: bool, calls_at: Collection[str]) -> list[_Task]:
    """What is measured; ``calls_at``: sites at which calls are."""
    tasks: list[_Task] = []
    for site in ("emulated",) if quick else ("emulated", "stepped"):
        hits = _STEPPED if site == "stepped" else _EMULATED_QUICK if quick else _EMULATED
        pairs = hits // 2 if site == "stepped" else hits // 8
        tasks += [("op", site, mode, hits // KERNELS) for mode in ("trace", "sum")]
        tasks += [("other_thread", site, "", hits), ("graph", site, "", pairs)]
        if site in calls_at:
            tasks.append(("call", site, "", pairs))
    if not quick:
        tasks.append(("walk", "emulated", "", 8))
    return tasks


def measure(
    method: str = "auto",
    *,
    quick: bool = False,
    programs: GgmlPrograms | None = None,
    btf_path: str | None = None,
    progress: Progress = lambda line: None,
) -> Calibration:
    """Measure now, in about 1.5 s; ``quick`` (no stepped sites, calls or cycles) in 0.15 s, 0.4 s
    with perf uprobes, whose closing takes most of that. With ``perf``, calls at stepped sites
    are left out.

    ``programs`` are used if they are given (``method`` is theirs then) and left as they were,
    but for the counters of ``stats()``, which have counted our hits too; their rings are
    drained, so they may watch nothing else yet. Raises MachineError.
    """
    begun = time.monotonic()
    with ExitStack() as stack:
        # Its interpreter starts while the kernel verifies the programs.
        victim = stack.enter_context(Victim(Bench.data_size()))
        if programs is None:
            progress("measuring what probes cost here: loading the programs")
            programs = stack.enter_context(GgmlPrograms.load(method, btf_path=btf_path))
        bench = stack.enter_context(Bench(programs, victim))
        progress(f"attaching to a process of our own ({programs.method})")
        # Closing a perf uprobe takes a tenth of a second, and a call has two at each site: that
        # of calls which is left out costs less than the graph's beside it.
        calls_at = () if quick else ("emulated",) if programs.method == "perf" else ("emulated", "stepped")
        bench.open(stepped=not quick, calls_at=calls_at)
        progress("measuring hits")
        hits = _hits(bench, _tasks(quick, calls_at), quick)
        bench.verify()
        wait = stall = None
        if not quick:
            progress("measuring arming and disarming")
            wait, stall = _cycles(bench)
            progress("measuring waits and page faults")
            hits += measure_causes(programs, btf_path)
    return Calibration(
        method=programs.method,
        kernel=platform.release(),
        machine=calibration.machine_name(),
        programs=calibration.programs_digest(programs.method),
        made_at=time.time(),
        seconds=time.monotonic() - begun,
        quick=quick,
        ns_per_hit=hits,
        ns_per_cycle_wait=wait,
        ns_per_cycle_stall=stall,
    )


def calibrate(
    folder: Path,
    method: str = "auto",
    *,
    quick: bool = False,
    programs: GgmlPrograms | None = None,
    btf_path: str | None = None,
    progress: Progress = lambda line: None,
) -> Calibration:
    """The figures kept in ``folder`` if they hold here, else measured and kept.

    A folder that cannot be written is told to ``progress``: the figures are good all the same.
    """
    with ExitStack() as stack:
        if programs is not None:
            method = programs.method
        elif method == "auto":
            # Which way is best, only loading tells.
            programs = stack.enter_context(GgmlPrograms.load(method, btf_path=btf_path))
            method = programs.method
        if (kept := calibration.load(folder, method, quick=quick)) is not None:
            return kept
        found = measure(method, quick=quick, programs=programs, btf_path=btf_path, progress=progress)
    try:
        calibration.store(folder, found)
    except MachineError as error:
        progress(error.what)
    return found


def _hits(bench: Bench, tasks: list[_Task], quick: bool) -> tuple[HitCost, ...]:
    values: list[list[float]] = [[] for _ in tasks]
    most, seconds = (QUICK_SAMPLES, QUICK_SECONDS) if quick else (FULL_SAMPLES, FULL_SECONDS)
    until = time.monotonic() + seconds
    for sample in range(most):
        for task, some in zip(tasks, values, strict=True):
            some.append(bench.sample(*task))
        if sample + 1 >= _FEWEST and time.monotonic() >= until:
            break
    return tuple(
        HitCost(kind, site, mode, median_figure(some))
        for (kind, site, mode, _), some in zip(tasks, values, strict=True)
    )


def _cycles(bench: Bench) -> tuple[Figure, Figure]:
    """(wait, stall) of arming and disarming two op probes."""
    cycles: list[Seen] = []
    idle: list[Seen] = []
    until = time.monotonic() + CYCLE_SECONDS
    with Watch(bench.victim) as watch:
        before = watch.look()
        while True:
            if len(cycles) >= CYCLES or (len(cycles) >= _FEWEST_CYCLES and time.monotonic() >= until):
                stall = _stall(cycles, idle)
                patient = len(cycles) < MOST_CYCLES and time.monotonic() < until + MOST_CYCLE_SECONDS
                if stall.high <= PLAUSIBLE_STALL_NS or not patient:
                    break
            bench.arm()
            bench.disarm()
            after = watch.look()
            cycles.append(after - before)
            time.sleep(_IDLE)
            before = watch.look()
            idle.append(before - after)
    return median_figure([seen.at for seen in cycles]), stall


def _stall(cycles: Sequence[Seen], idle: Sequence[Seen]) -> Figure:
    """A victim stands still now and then for other reasons: how much of a cycle's time that is, looks
    at it between the cycles (``idle``) tell. That share wanders, and what is left may be less than
    nothing: the upper end of the interval is what it would be without any other reason.
    """
    usual = sum(seen.stalled for seen in idle) / sum(seen.at for seen in idle)
    stall = median_figure([seen.stalled - usual * seen.at for seen in cycles])
    all_of_it = median_figure([seen.stalled for seen in cycles])
    return dataclasses.replace(stall, high=max(stall.high, all_of_it.ns))
