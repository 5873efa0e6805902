# SPDX-License-Identifier: Apache-2.0
"""The programs for scheduler, page faults and barriers, once for all watched processes.

What is kept of one process is :mod:`.targetcauses`'s. What this machine does not offer is left out with
a note; nothing here ends an attachment.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from .cores import core_kinds, kind_numbers, online_cpus
from .errors import ProfinferError
from .kernel.causes import BarrierPrograms, FaultPrograms, Part, Records, SchedPrograms
from .kernel.programs import GgmlPrograms, Probe, possible_cpus
from .model.causebudget import FAULTS, WAITS
from .model.causes import CoreKind
from .target.facts import FileInfo

if TYPE_CHECKING:
    from .targetcauses import TargetCauses

TS_EXITED = 2  # enum thread_state
SHARED = ("targets", "threads", "graph_clocks")
LOOK_SECONDS = 1.0
FRESH_SECONDS = 0.1
P = TypeVar("P", bound=Part)


@dataclass(frozen=True, slots=True)
class CauseOptions:
    """What is wanted. ``barriers`` cost two probe hits more per op and thread: trace level only.

    ``room``: how many times the usual room the rings have, a power of two.
    """

    sched: bool = True
    faults: bool = True
    barriers: bool = False
    room: int = 1


@dataclass(frozen=True, slots=True)
class CauseSizes:
    """What the programs may take; None: as their objects say. ``spans_bytes``, ``faults_bytes``: rings.
    ``minor_per_second``: minor faults of a process that get a record; the others are counted alone."""

    spans_bytes: int | None = None
    faults_bytes: int | None = None
    threads: int | None = None
    minor_per_second: int | None = None


class Causes:
    """The programs, once for all targets. Close it after the last one."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.sched: SchedPrograms | None = None
        self.faults: FaultPrograms | None = None
        self.barriers: BarrierPrograms | None = None
        self.kinds: tuple[CoreKind, ...] = ()
        self.targets: list[TargetCauses] = []
        self._next_look = 0.0
        self._rows: tuple[Records, int] | None = None
        self._strange: set[int] = set()
        self._switches = 0
        self._switches_at: int | None = None

    @classmethod
    def load(
        cls,
        programs: GgmlPrograms,
        options: CauseOptions | None = None,
        btf_path: str | None = None,
        sizes: CauseSizes | None = None,
    ) -> Causes:
        """Load and attach what ``options`` want and this machine has; the rest is in ``notes``."""
        options, sizes = options or CauseOptions(), sizes or CauseSizes()
        self = cls()
        self.kinds = core_kinds()
        try:
            shared = programs.map_descriptors(SHARED)
        except LookupError:
            if options.sched or options.faults:
                self.notes.append("scheduler and page faults are not watched with --loader bcc")
            return self
        if options.sched:
            self.sched = self._try(
                "the scheduler",
                lambda: SchedPrograms(
                    shared,
                    btf_path=btf_path,
                    room=options.room,
                    entries=_given(spans=sizes.spans_bytes, sched_threads=sizes.threads),
                ),
            )
            if self.sched is not None:
                kinds = kind_numbers(self.kinds, possible_cpus())
                self.sched = self._attach("the scheduler", self.sched, lambda p: p.attach(kinds))
                self._count_switches()
        if self.sched is not None:
            shared["sched_threads"] = self.sched.map("sched_threads").fd
        if options.faults:
            self.faults = self._try(
                "page faults",
                lambda: FaultPrograms(
                    shared,
                    room=options.room,
                    rodata=_given(max_per_second=sizes.minor_per_second),
                    entries=_given(faults=sizes.faults_bytes),
                ),
            )
            if self.faults is not None:
                self.faults = self._attach("page faults", self.faults, lambda p: p.attach(online_cpus()))
        if options.barriers:
            self.barriers = self._try(
                "barriers", lambda: BarrierPrograms(shared, programs.method, room=options.room)
            )
        return self

    def _try(self, what: str, load: Callable[[], P]) -> P | None:
        try:
            return load()
        except (ProfinferError, OSError) as error:
            self.notes.append(f"{what} cannot be watched: {_reason(error)}")
            return None

    def _attach(self, what: str, part: P, attach: Callable[[P], None]) -> P | None:
        try:
            attach(part)
        except (ProfinferError, OSError) as error:
            part.close()
            self.notes.append(f"{what} cannot be watched: {_reason(error)}")
            return None
        return part

    def attach_barriers(self, file: FileInfo, pid: int) -> None:
        """Probe the ops and barriers of one file of a target. Raises TargetError or MachineError."""
        if self.barriers is None:
            return
        names = self.barriers.types.constants()
        levels = {"op": names["BP_OP"], "barrier": names["BP_ARRIVE"]}
        probes = [
            Probe(levels[hook.level], hook.site.offset, hook.site.moved, False)
            for hook in file.hooks
            if hook.level in levels
        ]
        if any(probe.level == names["BP_ARRIVE"] for probe in probes):
            self.barriers.attach(file.open_path, pid, probes)

    def tend(self) -> None:
        """Detach what no target wants: a program costs every process of this machine its call, whoever
        is watched."""
        if not self.targets:
            return
        for part, programs in ((WAITS, self.sched), (FAULTS, self.faults)):
            if programs is not None and not any(part in target.watched for target in self.targets):
                programs.detach()
                self._count_switches()

    def ready(self, part: str) -> bool:
        """Whether what watches ``part`` is attached; attaches it where it was taken off."""
        try:
            if part == WAITS and self.sched is not None:
                if not self.sched.attached:
                    self._count_switches()
                    self.sched.attach(kind_numbers(self.kinds, possible_cpus()))
                return True
            if part == FAULTS and self.faults is not None:
                if not self.faults.cpus:
                    self.faults.attach(online_cpus())
                return True
        except (ProfinferError, OSError) as error:
            programs = self.sched if part == WAITS else self.faults
            if programs is not None:
                programs.detach()  # of some that go together, all or none
            what = "the scheduler" if part == WAITS else "page faults"
            note = f"{what} cannot be watched again: {_reason(error)}"
            if note not in self.notes:
                self.notes.append(note)
        return False

    def attached(self, part: str) -> bool:
        """Whether programs are there that run whoever causes it."""
        if part == WAITS:
            return self.sched is not None and self.sched.attached
        return self.faults is not None and bool(self.faults.cpus)

    def parts(self) -> frozenset[str]:
        """What can be watched here."""
        there = ((WAITS, self.sched), (FAULTS, self.faults))
        return frozenset(part for part, programs in there if programs is not None)

    def hits(self) -> dict[str, int]:
        """By part, how often something was looked at, of all targets: cheap enough for every drain."""
        found = {}
        if self.sched is not None:
            found[WAITS] = self.sched.stats().get("switches", 0)
        if self.faults is not None:
            found[FAULTS] = self.faults.stats().get("faults", 0)
        return found

    def switches(self) -> int | None:
        """Switches between threads, of all processes of this machine, at which a program of ours was run;
        None where the scheduler is not watched."""
        if self.sched is None:
            return None
        self._count_switches()
        return self._switches

    def _count_switches(self) -> None:
        """To be called before programs come or go, too."""
        now, attached = _switches_here(), self.sched is not None and self.sched.attached
        if attached and self._switches_at is not None and now is not None:
            self._switches += max(0, now - self._switches_at)
        self._switches_at = now

    def drain(self) -> dict[str, Records]:
        """New records by kind (as recordings name them), of all targets; kinds without any are left
        out. To be called after the events of the ggml programs were drained."""
        parts: dict[str, Part | None] = {
            "sched_spans": self.sched,
            "page_faults": self.faults,
            "barriers": self.barriers,
        }
        drained = {name: part.drain() for name, part in parts.items() if part is not None}
        return {name: records for name, records in drained.items() if len(records)}

    def pump(self) -> None:
        """Drain, and tell every target what is its own."""
        self._rows = None  # what was looked up before is older than these
        records = self.drain()
        own = {tgid for some in records.values() for tgid in np.unique(some["tgid"]).tolist()}
        for target in self.targets:
            if target.process.pid in own:
                target.feed(records)
            else:
                target.settle()

    def fill(self) -> float:
        """Share of the fullest ring that waits to be drained."""
        parts = (self.sched, self.faults, self.barriers)
        return max((part.fill() for part in parts if part is not None), default=0.0)

    def tick(self, now: float) -> None:
        """To be called about once a second. CPUs that came online have no fault events yet (case
        C57); threads that are gone have their entries still."""
        if now < self._next_look:
            return
        self._next_look = now + LOOK_SECONDS
        if self.attached(FAULTS) and self.faults is not None:
            cpus = online_cpus()
            with contextlib.suppress(ProfinferError):  # tried again in a second
                if self.faults.close_stopped() or frozenset(cpus) != self.faults.cpus:
                    self.faults.attach(cpus)
        if self.sched is None:
            return
        rows, _ = self.thread_rows(0.0)
        for target in self.targets:
            target.sweep(rows[rows["tgid"] == target.process.pid])
        own = [target.process.pid for target in self.targets]
        strange = rows[~np.isin(rows["tgid"], own)]
        # One that is new may be on its way to become a target; the others were let go of, or are gone.
        left = strange[np.isin(strange["tgid"], list(self._strange)) | (strange["state"] == TS_EXITED)]
        self._strange = set(strange["tgid"].tolist())
        self.forget_threads(left["tid"].tolist())

    def forget_threads(self, tids: Sequence[int]) -> None:
        """Delete entries of threads; what counts of them is in their targets' own sums."""
        self._rows = None
        if self.sched is not None:
            self.sched.forget(tids)

    def thread_rows(self, fresh_s: float = FRESH_SECONDS) -> tuple[Records, int]:
        """struct sched_thread of every thread, of all targets, and when that was (ns): one look at the
        kernel's table serves all targets that are described at the same time."""
        if self.sched is None:
            raise ValueError("the scheduler is not watched")
        if self._rows is None or time.monotonic_ns() - self._rows[1] > fresh_s * 1e9:
            now_ns = time.monotonic_ns()
            self._rows = self.sched.threads(), now_ns
        return self._rows

    def entries(self) -> dict[str, int]:
        """Entries of the maps whose size depends on what targets do."""
        found = {}
        if self.sched is not None:
            found["sched_threads"] = self.sched.entries()
        if self.faults is not None:
            found["fault_counts"] = self.faults.entries()
        return found

    def lost(self) -> dict[str, int]:
        """Records that found no room, by kind."""
        out: dict[str, int] = {}
        if self.sched is not None:
            out["sched_spans"] = self.sched.stats()["lost_spans"]
        if self.faults is not None:
            out["page_faults"] = self.faults.stats()["lost"]
        if self.barriers is not None:
            out["barriers"] = self.barriers.stats()["lost"]
        return out

    def close(self) -> None:
        """Detach and unload everything. May be called twice."""
        for part in (self.barriers, self.faults, self.sched):
            if part is not None:
                part.close()
        self.barriers = self.faults = self.sched = None


def _given(**sizes: int | None) -> dict[str, int]:
    return {name: size for name, size in sizes.items() if size is not None}


def _reason(error: ProfinferError | OSError) -> str:
    return error.what if isinstance(error, ProfinferError) else error.strerror or str(error)


def _switches_here() -> int | None:
    """Switches between threads since this machine was started."""
    try:
        with open("/proc/stat", "rb") as file:
            line = next((line for line in file if line.startswith(b"ctxt ")), b"")
        return int(line.split()[1])
    except (OSError, ValueError, IndexError):
        return None
