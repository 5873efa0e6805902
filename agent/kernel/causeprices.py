# SPDX-License-Identifier: Apache-2.0
"""Measuring what watching waits and page faults costs on this machine (design D6).

These programs run where a thread changes cores or meets a missing page, some microseconds of the
kernel's own work that nobody can have without the other: a difference of two runs would be one of
noise. So the kernel itself times them (its run-time statistics, on for this moment only), on a process
of ours that waits and faults as often as it is told. Its clock readings count along, some 30 ns each.
"""

from __future__ import annotations

import os
import select
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from ..cores import online_cpus
from ..errors import MachineError
from . import bpfsys
from .calibration import HitCost, median_figure
from .causes import FaultPrograms, Part, SchedPrograms
from .programs import GgmlPrograms
from .waits_child import FAULT, WAIT

_CHILD = Path(__file__).with_name("waits_child.py")
_PATIENCE = 10.0
SAMPLES, ROUNDS, PAGES = 7, 300, 256
LEAST_NS = 50.0
_SHARED = ("targets", "threads", "graph_clocks")
_SWITCHES, _WAKEUPS = 2, 2
"""In a round: it leaves and comes, and it wakes and is woken."""


class Waiting:
    """A process of ours that waits and faults when it is told. Close it. Raises MachineError."""

    def __init__(self) -> None:
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_CHILD)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0,
            )  # fmt: skip
        except OSError as error:
            raise MachineError("cannot make a process that waits", "") from error

    @property
    def pid(self) -> int:
        """Its process id, and its one thread's."""
        return self._process.pid

    def ready(self) -> None:
        """Wait until it has started."""
        self._answer()

    def do(self, what: int, count: int) -> int:
        """Have it done so often; returns ns that it took."""
        stream = self._process.stdin
        if stream is None:
            raise ValueError("started without pipes")
        try:
            stream.write(struct.pack("=2Q", what, count))
        except BrokenPipeError as error:
            raise self._died() from error
        return self._answer()

    def _answer(self) -> int:
        stream = self._process.stdout
        if stream is None:
            raise ValueError("started without pipes")
        until = time.monotonic() + _PATIENCE
        answer = b""
        while len(answer) < 8:
            ready, _, _ = select.select([stream], [], [], max(0.0, until - time.monotonic()))
            part = stream.read(8 - len(answer)) if ready else b""
            if not part:
                raise self._died()
            answer += part
        return int(struct.unpack("=Q", answer)[0])

    @staticmethod
    def _died() -> MachineError:
        return MachineError("the process on which waits are measured has ended or is silent", "")

    def close(self) -> None:
        """End it, and with it the peer that it has."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def measure_causes(programs: GgmlPrograms, btf_path: str | None = None) -> tuple[HitCost, ...]:
    """What there is to measure here, in a fifth of a second: of kinds ``wait``, ``wait_record``,
    ``other_switch`` and ``fault`` (see ``calibration.HitCost``). Nothing where the kernel does not time
    programs for us, or these cannot be loaded. ``programs`` must watch nothing that is of worth."""
    found: list[HitCost] = []
    try:
        stats = bpfsys.enable_stats()
    except OSError:
        return ()
    try:
        with Waiting() as victim:
            victim.ready()
            shared = programs.map_descriptors(_SHARED)
            for measure in (_waits, _faults):
                try:
                    found += measure(programs, shared, victim, btf_path)
                except (MachineError, OSError):
                    continue  # this machine does not have them, so nobody will ask
    except (MachineError, LookupError):
        return ()
    finally:
        os.close(stats)
    return tuple(found)


def _waits(
    programs: GgmlPrograms, shared: dict[str, int], victim: Waiting, btf_path: str | None
) -> Sequence[HitCost]:
    # Every wait of a compute thread gets a record here, however short.
    rodata = {"min_blocked_ns": 0, "min_wakeup_ns": 0}
    with SchedPrograms(shared, btf_path=btf_path, rodata=rodata) as sched:
        sched.attach([])
        try:
            unseen = _samples(sched, lambda: victim.do(WAIT, ROUNDS))
            programs.set_target(victim.pid, layout=0, mode=0)
            seen = _samples(sched, lambda: victim.do(WAIT, ROUNDS))
            _have_graphs(sched, victim.pid)
            before = sched.stats()["spans"]
            told = _samples(sched, lambda: victim.do(WAIT, ROUNDS))
            if sched.stats()["spans"] - before < SAMPLES * ROUNDS:
                raise MachineError("waits of a process of ours were not recorded")
        finally:
            programs.forget_target(victim.pid)
            sched.map("graph_clocks").delete(struct.pack("=I", victim.pid))

    def round_of(sample: dict[str, float]) -> float:
        return _SWITCHES * sample["on_switch"] + _WAKEUPS * sample["on_wakeup"]

    # A few hundredths of a microsecond at least, whatever else went on while it was timed.
    records = [max(LEAST_NS, round_of(b) - round_of(a)) for a, b in zip(seen, told, strict=True)]
    others = [one["on_switch"] + one["on_wakeup"] for one in unseen]
    return (
        HitCost("wait", "", "", median_figure([round_of(one) for one in seen])),
        HitCost("wait_record", "", "", median_figure(records)),
        HitCost("other_switch", "", "", median_figure(others)),
    )


def _have_graphs(sched: SchedPrograms, pid: int) -> None:
    """As if a graph of the process ran from now on, and its thread, which waits for orders, computed it."""
    value = np.zeros(1, sched.types.dtype("graph_clock"))
    value["since"], value["open"] = time.monotonic_ns(), 1
    sched.map("graph_clocks").update(struct.pack("=I", pid), value.tobytes())
    (row,) = sched.threads([pid])
    row = row.copy()
    row["compute"] = 1
    sched.map("sched_threads").update(struct.pack("=I", pid), row.tobytes())


def _faults(
    programs: GgmlPrograms, shared: dict[str, int], victim: Waiting, btf_path: str | None
) -> Sequence[HitCost]:
    with FaultPrograms(shared, btf_path=btf_path) as faults:
        faults.attach(online_cpus())
        programs.set_target(victim.pid, layout=0, mode=0)
        try:
            seen = _samples(faults, lambda: victim.do(FAULT, PAGES))
        finally:
            programs.forget_target(victim.pid)
    return (HitCost("fault", "", "", median_figure([one["on_minor"] for one in seen])),)


def _samples(part: Part, action: Callable[[], object]) -> list[dict[str, float]]:
    """ns of one run, by program; those that did not run are left out."""
    found = []
    for _ in range(SAMPLES):
        before = part.run_times()
        action()
        after = part.run_times()
        part.drain()
        runs = {name: (after[name][0] - ns, after[name][1] - n) for name, (ns, n) in before.items()}
        sample = {name: ns / n for name, (ns, n) in runs.items() if n}
        if not sample:
            raise MachineError("the kernel does not time its programs")
        found.append(sample)
    return found
