# SPDX-License-Identifier: Apache-2.0
"""Scheduler, page faults and barriers of one watched process: from the kernel's records to the model."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from .causes import FRESH_SECONDS, LOOK_SECONDS, Causes
from .cores import kind_numbers, online_cpus
from .errors import ProfinferError
from .kernel.causes import Records
from .kernel.programs import GgmlPrograms, possible_cpus
from .kernel.residency import resident_bytes
from .model.addresses import ANON, FILE, MODEL, STACK, Area, Piece, layer_of
from .model.barriers import BarrierStore
from .model.causebudget import FAULTS, WAITS
from .model.causes import Cause, Faults, ModelMemory, Quota, Taker, Threads
from .model.graphwork import Mark
from .model.paging import FaultStore
from .model.session import Session, Settled
from .model.snapshot import Lost, Snapshot
from .model.threadsums import Setting, ThreadSums
from .model.tokens import Phase
from .model.waiting import CallWaits
from .target.gguf import GgufError, read_tensors
from .target.modelfile import ModelFile, locked_bytes, open_models
from .target.process import Mapping as Mapped
from .target.process import Process, read_maps
from .target.quota import GroupTimes, group_times
from .tasks import gone, threads_of

COUNT_SECONDS = 0.03
"""How old a look at the threads may be from which their waits are counted."""
MAPS_SECONDS = 0.2
"""Least time between two looks at the target's mappings when addresses are unknown."""
MAPS_SHARE = 0.005
"""Of our time that these looks may take: some processes have thousands of mappings, and ever new ones."""
RESIDENCY_SECONDS = 5.0
RESIDENCY_SHARE = 0.002
"""Of our time that looking at the model's residency may take: large files are looked at rarely."""
POLICIES = {0: "other", 1: "fifo", 2: "rr", 3: "batch", 5: "idle", 6: "deadline"}
UNSEEN = ("nothing", "token")
"""Levels of the budget at which nobody knows when graphs run."""
FAULT_AROUND = "/sys/kernel/debug/fault_around_bytes"


@dataclass(frozen=True, slots=True)
class CauseCounts:
    """Of one target: ``waits`` of its threads that ended, ``records`` of them, page ``faults``."""

    waits: int = 0
    records: int = 0
    faults: int = 0


class TargetCauses:
    """Scheduler, faults and barriers of one target. Close it."""

    def __init__(
        self,
        causes: Causes,
        process: Process,
        sinks: Sequence[Callable[[Mapping[str, Records]], None]] = (),
        programs: GgmlPrograms | None = None,
    ) -> None:
        """The target must be in the map "targets" of ``programs`` by now, which may be left out where
        :meth:`watch` is not needed. ``sinks`` are told of its records, by kind."""
        self.process = process
        self.watched = frozenset(part for part in causes.parts() if causes.ready(part))
        """Waits, page faults: of what there is here, what is not shed."""
        self._programs = programs
        # Since when (ns), and the graph clock then.
        self._away = {part: (time.monotonic_ns(), 0) for part in causes.parts() - self.watched}
        self._unwatched = dict.fromkeys((WAITS, FAULTS), 0)
        self._clock_unwatched = 0
        self._counted: dict[int, int] = {}
        self._episodes = self._spans = 0
        self.sinks = sinks
        self.causes = causes
        tgid = process.pid
        self._sums = ThreadSums(tgid)
        self._faults = FaultStore(tgid)
        self._waits: CallWaits | None = None
        self._barriers = BarrierStore(tgid, kind_numbers(causes.kinds, possible_cpus()))
        self._session: Session | None = None
        self._early: list[Mapping[str, Records]] = []
        self._graphs: set[int] = set()
        self._models: list[ModelFile] = []
        self._without_directory: set[int] = set()
        self._maps_at = self._residency_at = 0.0
        self._resident: int | None = None
        self._lost_spans = 0
        self._quota_then = self._quota_now = group_times(tgid)
        self._quota_at = 0.0
        self._fault_around = _number_in(FAULT_AROUND) if causes.faults is not None else None
        self.notes: list[str] = []
        with contextlib.suppress(OSError):  # a table is full: then later faults and switches begin entries
            if causes.sched is not None:
                causes.sched.seed(tgid, _states(tgid), time.monotonic_ns())
            if causes.faults is not None:
                causes.faults.begin(tgid)
        if causes.faults is not None:
            self._read_maps()
        causes.targets.append(self)

    # ---- what is watched ------------------------------------------------------------------

    def watch(self, parts: Collection[str]) -> None:
        """Watch these parts and no others, as far as they can be watched here."""
        wanted = frozenset(parts) & self.causes.parts()
        back = frozenset(part for part in wanted - self.watched if self.causes.ready(part))
        gone = self.watched - wanted
        if self._programs is None or not (back or gone):
            return
        now = time.monotonic_ns()
        before, self.watched = self.watched, (self.watched | back) - gone
        names = self._programs.types.constants()
        flags = {WAITS: names["TG_NO_WAITS"], FAULTS: names["TG_NO_FAULTS"]}
        away = self.causes.parts() - self.watched
        self._programs.leave_out(self.process.pid, sum(flags[part] for part in away))
        if WAITS in gone:
            self._set_waits_aside(now)
        elif WAITS in back:
            self._take_waits_up(now)
        if FAULTS in gone:
            self._away[FAULTS] = (now, 0)
        elif FAULTS in back:
            self._unwatched[FAULTS] += now - self._away.pop(FAULTS, (now, 0))[0]
        if before - self.watched:
            self.causes.tend()

    def _set_waits_aside(self, now_ns: int) -> None:
        """No program touches the entries of its threads any more: what they say is kept here."""
        sched = self.causes.sched
        if sched is None:
            return
        clock = sched.clock(self.process.pid, now_ns) or 0
        rows, _ = self._rows(0.0)
        self._count(rows)
        self._lost_spans += int(rows["lost"].sum())
        self.causes.forget_threads(self._sums.set_aside(rows, now_ns, clock))
        self._counted.clear()
        self._away[WAITS] = (now_ns, clock)
        if self._waits is not None:
            self._waits.away(now_ns)

    def _take_waits_up(self, now_ns: int) -> None:
        """Switches begin entries from now on; of threads that are not switched, as at first."""
        sched = self.causes.sched
        if sched is None:
            return
        sched.seed(self.process.pid, _states(self.process.pid), now_ns)
        since, clock = self._away.pop(WAITS, (now_ns, 0))
        self._unwatched[WAITS] += now_ns - since
        self._clock_unwatched += max(0, (sched.clock(self.process.pid, now_ns) or 0) - clock)
        if self._waits is not None:
            self._waits.back(now_ns)

    def unwatched_ns(self, part: str) -> int:
        """How long a part was not watched so far."""
        away = self._away.get(part)
        return self._unwatched[part] + (max(0, time.monotonic_ns() - away[0]) if away else 0)

    def counts(self) -> CauseCounts:
        """What was looked at so far."""
        causes = self.causes
        if WAITS in self.watched and causes.sched is not None:
            self._count(self._rows(COUNT_SECONDS)[0])
        found = causes.faults.counts(self.process.pid) if causes.faults is not None else None
        return CauseCounts(self._episodes, self._spans, found["minor"] + found["major"] if found else 0)

    def _count(self, rows: Records) -> None:
        """Add the waits of these threads that ended since the last time."""
        waits = rows["waits"].astype(np.int64)
        for tid, count in zip(
            rows["tid"].tolist(), (waits.sum(axis=1) - waits[:, Cause.WAKEUP]).tolist(), strict=True
        ):
            before = self._counted.get(tid, 0)
            # Another thread may have the number of one that ended.
            self._episodes += count - before if count >= before else count
            self._counted[tid] = count

    def busy_ns(self) -> int:
        """How long graphs of it have run on the CPU, those that run now included."""
        sched = self.causes.sched
        return 0 if sched is None else sched.clock(self.process.pid, time.monotonic_ns()) or 0

    # ---- records --------------------------------------------------------------------------

    def bind(self, session: Session) -> None:
        """The session whose calls and graphs waits are joined with."""
        self._session = session
        self._waits = CallWaits(self.process.pid, session.plans)
        if WAITS in self._away:
            self._waits.away(self._away[WAITS][0])
        session.listeners.append(self._settled)
        for records in self._early:
            self._take(records)
        self._early.clear()

    def feed(self, records: Mapping[str, Records]) -> None:
        """One drain of :meth:`Causes.drain`, before the session is fed with that of the events.
        Records of other targets are passed over."""
        own = {name: some[some["tgid"] == self.process.pid] for name, some in records.items()}
        records = {name: some for name, some in own.items() if len(some)}
        self._spans += len(records.get("sched_spans", ()))
        for sink in self.sinks if records else ():
            sink(records)
        faults = records.get("page_faults")
        if faults is not None:
            self._prepare(faults)
            self._faults.take(faults, time.monotonic_ns())
        else:
            self.settle()
        if self._waits is None:
            self._early = [*self._early[-64:], records]
        else:
            self._take(records)

    def settle(self) -> None:
        """Nothing came: what was held back may be told by now."""
        if self._faults.holds:
            self._learn_graphs()
            if self._faults.wants_maps and time.monotonic() >= self._maps_at:
                self._read_maps()
            self._faults.settle(time.monotonic_ns())

    def _take(self, records: Mapping[str, Records]) -> None:
        if self._waits is not None:
            if "sched_spans" in records:
                self._waits.take_spans(records["sched_spans"])
            if "page_faults" in records:
                self._waits.take_faults(records["page_faults"])
        if "barriers" in records:
            self._barriers.take(records["barriers"])

    def _settled(self, settled: Settled, phase: Phase, mark: Mark) -> None:
        call, work = settled.call, settled.work
        if self._waits is not None:
            self._waits.call(call, phase, sum(tokens.tokens for tokens in settled.tokens))
        if self.causes.barriers is not None and self._session is not None:
            for root in call.graphs:
                for run in (root, *root.inner):
                    if run.seq in work:
                        plan = self._session.plans.get(run.tgid, run.hash)
                        self._barriers.run(run, plan, work[run.seq].hits, phase)

    # ---- addresses ------------------------------------------------------------------------

    def _learn_graphs(self) -> None:
        if self._session is None or self.causes.faults is None:
            return
        for tgid, graph in self._session.graphs():
            if tgid == self.process.pid and graph.hash not in self._graphs and len(self._graphs) < 4096:
                self._graphs.add(graph.hash)
                self._faults.book.add_graph(graph)

    def _prepare(self, faults: Records) -> None:
        """Mappings that faults speak of and that are not known yet."""
        self._learn_graphs()
        mine = faults["addr"][faults["tgid"] == self.process.pid]
        now = time.monotonic()
        if now >= self._maps_at and not self._faults.book.knows(mine):
            self._read_maps()
        for number in {
            area.file for a in mine.tolist() if (area := self._faults.book.area(a)) and area.kind == MODEL
        }:
            self._read_directory(number)

    def _read_maps(self) -> None:
        begun, at_ns = time.monotonic(), time.monotonic_ns()
        self._maps_at = begun + MAPS_SECONDS
        try:
            maps = read_maps(self.process.pid)
            self._models += open_models(self.process.pid, maps, self._models)
        except (ProfinferError, OSError):
            return  # what was known of it stays
        self._faults.book.set_areas(_areas(maps, self._models), at_ns)
        now = time.monotonic()
        self._maps_at = now + max(MAPS_SECONDS, (now - begun) / MAPS_SHARE)

    def _read_directory(self, number: int) -> None:
        """The tensors of a model file, once, when the first fault in it came."""
        if number in self._without_directory or number >= len(self._models):
            return
        self._without_directory.add(number)
        model = self._models[number]
        try:
            tensors = read_tensors(model.fd)
        except (GgufError, OSError) as error:
            self.notes.append(f"tensors of {model.name} are named by graphs alone: {error}")
            return
        pieces = [Piece(t.offset, t.end, t.name, layer_of(t.name)) for t in tensors]
        self._faults.book.set_file(number, pieces)

    # ---- once a second, and figures -------------------------------------------------------

    def sweep(self, rows: Records) -> None:
        """Of its threads' entries, those of threads that are gone are added up and deleted."""
        pid, sched = self.process.pid, self.causes.sched
        aside = self._sums.aside()
        if sched is None or not (len(rows) or aside):
            return
        left = gone(pid, [*rows["tid"].tolist(), *aside], threads_of(pid))
        if left:
            # Read anew: one that was still there when these were read has run since.
            ended = sched.threads(left)
            self._count(ended)
            self._lost_spans += int(ended["lost"].sum())
            self.causes.forget_threads(self._sums.end(ended))
            self._sums.end_aside(left)
            for tid in left:
                self._counted.pop(tid, None)

    def describe(self, snapshot: Snapshot, *, graphs: bool = True) -> Snapshot:
        """The snapshot with ``threads`` and ``faults``. ``graphs``: whether graphs can be seen at all."""
        notes = (*snapshot.notes, *self.causes.notes, *self.notes)
        if self.causes.sched is not None:
            notes = (*notes, *self._unseen(snapshot, graphs))
        kinds = {**snapshot.lost.by_kind, **self.lost()}
        snapshot = dataclasses.replace(snapshot, lost=Lost(sum(kinds.values()), kinds))
        threads = self._threads() if graphs else None
        return dataclasses.replace(snapshot, threads=threads, faults=self._fault_figures(), notes=notes)

    def _unseen(self, snapshot: Snapshot, graphs: bool) -> Iterator[str]:
        """Why waits are not known, or not all of them: they count while graphs run."""
        if not graphs:
            yield "threads: waits count while graphs run, which nothing in this process tells"
        elif snapshot.budget is not None and snapshot.budget.level in UNSEEN:
            yield "threads: waits count while graphs run; that level is shed now, and so they stand still"

    def lost(self) -> dict[str, int]:
        """Records of this target that found no room, by kind."""
        causes, out = self.causes, {}
        if causes.sched is not None:
            out["sched_spans"] = self._lost_spans + int(self._rows()[0]["lost"].sum())
        if causes.faults is not None:
            out["page_faults"] = (causes.faults.counts(self.process.pid) or {}).get("lost", 0)
        if causes.barriers is not None:
            out["barriers"] = causes.barriers.stats()["lost"]
        return out

    def _rows(self, fresh_s: float = FRESH_SECONDS) -> tuple[Records, int]:
        rows, now_ns = self.causes.thread_rows(fresh_s)
        return rows[rows["tgid"] == self.process.pid], now_ns

    def _threads(self) -> Threads | None:
        sched, waits = self.causes.sched, self._waits
        if sched is None:
            return None
        rows, now = self._rows()
        clock = sched.clock(self.process.pid, now) or 0
        threads = self._sums.figures(
            rows,
            now_ns=now,
            clock_ns=clock,
            kinds=self.causes.kinds,
            leaders=waits.leaders if waits else (),
            settings={int(tid): _setting(int(tid)) for tid in rows["tid"][rows["work_run_ns"] > 0]},
        )
        traced = self.causes.barriers is not None
        return Threads(
            work_seconds=max(0, self._clock_watched(clock)) / 1e9,
            threads=threads,
            takers=_with_ourselves(waits.takers()) if waits else (),
            phases=waits.phases() if waits else (),
            ops=waits.ops() if waits else (),
            cores=self.causes.kinds,
            quota=_quota(self._quota_then, self._group_times()),
            online_cpus=len(online_cpus()),
            records=waits.records if waits else 0,
            unwatched_seconds=self.unwatched_ns(WAITS) / 1e9,
            barriers=self._barriers.threads() if traced else None,
            op_barriers=self._barriers.ops() if traced else None,
        )

    def _clock_watched(self, clock: int) -> int:
        """Of the graph clock, what passed while waits were watched."""
        away = self._away.get(WAITS)
        return (clock if away is None else away[1]) - self._clock_unwatched

    def _group_times(self) -> GroupTimes | None:
        """Of the control group: a dozen files, for figures that tell of seconds."""
        now = time.monotonic()
        if now >= self._quota_at:
            self._quota_at = now + LOOK_SECONDS
            self._quota_now = group_times(self.process.pid)
        return self._quota_now

    def _fault_figures(self) -> Faults | None:
        programs = self.causes.faults
        if programs is None:
            return None
        self._learn_graphs()
        totals = programs.counts(self.process.pid)
        figures = self._faults.figures(totals, model=self._model(), fault_around=self._fault_around)
        return dataclasses.replace(figures, unwatched_seconds=self.unwatched_ns(FAULTS) / 1e9)

    def _model(self) -> ModelMemory | None:
        """How the model's files are in memory now."""
        book = self._faults.book
        book.refresh()
        if not self._models:
            # Read into memory and closed, as far as graphs show weights at all.
            name = self._session.target.target.model if self._session is not None else None
            if not book.outside or name is None:
                return None
            return ModelMemory(name, None, 0, None, locked_bytes(self.process.pid), "read")
        self._look_at_residency()
        mapped, locked = book.mapped(MODEL), locked_bytes(self.process.pid)
        loading = "mmap"
        if not mapped:
            loading = "read"
        elif locked is not None and 10 * locked >= 9 * mapped:
            loading = "mlock"
        elif book.outside > book.inside:
            loading = "copied"
        largest = max(self._models, key=lambda model: model.size)
        size = sum(model.size for model in self._models)
        return ModelMemory(largest.name, size, mapped, self._resident, locked, loading)

    def _look_at_residency(self) -> None:
        now = time.monotonic()
        if now < self._residency_at:
            return
        found = [resident_bytes(model.fd) for model in self._models]
        self._resident = sum(n for n in found if n is not None) if None not in found else None
        took = time.monotonic() - now
        self._residency_at = now + max(RESIDENCY_SECONDS, took / RESIDENCY_SHARE)

    def finish(self) -> None:
        """Nothing more will come: the last look at everything."""
        self._residency_at = self._quota_at = 0.0
        self._learn_graphs()
        if self._faults.wants_maps:
            self._read_maps()
        self._faults.settle(1 << 62)
        if self.causes.sched is not None:
            self.sweep(self._rows(0.0)[0])

    def close(self) -> None:
        """Let go of the model's files, and of what the kernel keeps of it. May be called twice."""
        causes = self.causes
        if self in causes.targets:
            causes.targets.remove(self)
            if causes.sched is not None:
                causes.forget_threads(self._rows(0.0)[0]["tid"].tolist())
            if causes.faults is not None:
                causes.faults.forget(self.process.pid)
            causes.tend()
        while self._models:
            os.close(self._models.pop().fd)


def _areas(maps: Sequence[Mapped], models: Sequence[ModelFile]) -> list[Area]:
    """The mappings by kind."""
    numbers = {one.file_id: number for number, one in enumerate(models)}
    found = []
    for m in maps:
        number = numbers.get(m.file_id) if m.inode else None
        if number is not None:
            found.append(Area(m.start, m.end, MODEL, m.offset, number))
        elif m.inode:
            found.append(Area(m.start, m.end, FILE, m.offset))
        else:
            found.append(Area(m.start, m.end, STACK if m.path.startswith("[stack") else ANON))
    return found


def _states(pid: int) -> dict[int, bool]:
    """The threads of a process, and whether each runs or is ready now."""
    found = {}
    try:
        names = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return {}
    for name in names:
        with contextlib.suppress(OSError, IndexError), open(f"/proc/{pid}/task/{name}/stat", "rb") as file:
            found[int(name)] = file.read().rpartition(b")")[2].split()[0] == b"R"
    return found


def _setting(tid: int) -> Setting:
    """How a thread may be scheduled; nothing of one that has ended."""
    try:
        policy = os.sched_getscheduler(tid) & ~os.SCHED_RESET_ON_FORK
        return Setting(
            POLICIES.get(policy),
            os.getpriority(os.PRIO_PROCESS, tid),
            tuple(sorted(os.sched_getaffinity(tid))),
        )
    except OSError:
        return Setting()


def _quota(then: GroupTimes | None, now: GroupTimes | None) -> Quota | None:
    """The quota, and throttling since ``then``; None when the control group is not known."""
    if then is None or now is None:
        return None
    return Quota(
        now.cores,
        _since(then.throttled_seconds, now.throttled_seconds),
        _since(then.throttled_periods, now.throttled_periods),
        _since(then.periods, now.periods),
    )


N = TypeVar("N", int, float)


def _since(then: N | None, now: N | None) -> N | None:
    return None if then is None or now is None or now < then else now - then


def _number_in(path: str) -> int | None:
    try:
        with open(path, encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError):
        return None  # debugfs is not mounted, or not for us


def _with_ourselves(takers: tuple[Taker, ...]) -> tuple[Taker, ...]:
    """Whoever reads this must not be told to move a process that he does not know of."""
    return tuple(dataclasses.replace(t, watcher=True) if t.pid == os.getpid() else t for t in takers)
