# SPDX-License-Identifier: Apache-2.0
"""From the kernel's sums per thread (``struct sched_thread``) to figures."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from .causes import READY, Cause, CoreKind, Thread
from .records import Records

#: Threads that have ended and are still shown one by one; older ones are one entry, thread 0.
MAX_ENDED = 64
MAX_CORE_KINDS = 8

RUNNING, OFF, EXITED = 0, 1, 2  # enum thread_state
WANTED_NS = 1_000_000


@dataclass(frozen=True, slots=True)
class Setting:
    """How a thread may be scheduled, as the system says it now."""

    policy: str | None = None
    nice: int | None = None
    cpus: tuple[int, ...] | None = None


@dataclass(slots=True)
class _Sums:
    """Everything in ns; by cause in the order of :class:`Cause`."""

    run: list[int]
    work_run: int
    wait: list[int]
    work_wait: list[int]
    waits: list[int]
    migrations: int
    kind_changes: int
    wake_max: int
    compute: bool
    alive: bool

    def add(self, other: _Sums) -> None:
        for mine, its in (
            (self.run, other.run),
            (self.wait, other.wait),
            (self.work_wait, other.work_wait),
            (self.waits, other.waits),
        ):
            for i, value in enumerate(its):
                mine[i] += value
        self.work_run += other.work_run
        self.migrations += other.migrations
        self.kind_changes += other.kind_changes
        self.wake_max = max(self.wake_max, other.wake_max)


class ThreadSums:
    """The threads of one process, those that ended included: no figure ever falls."""

    def __init__(self, tgid: int) -> None:
        self.tgid = tgid
        self._ended: OrderedDict[int, _Sums] = OrderedDict()
        self._older: _Sums | None = None
        self._was_compute: set[int] = set()
        self._aside: dict[int, _Sums] = {}

    def set_aside(self, rows: Records, now_ns: int, clock_ns: int) -> list[int]:
        """Its threads are not watched from now on: what they are until then is kept. Returns the tids,
        whose entries may go; later ones of the same threads are added."""
        rows = rows[rows["tgid"] == self.tgid]
        tids = []
        for row in rows:
            tid = int(row["tid"])
            tids.append(tid)
            sums = _sums(row, now_ns, clock_ns, alive=True)
            sums.compute |= tid in self._was_compute
            self._with_aside(tid, sums)
            self._aside[tid] = sums
        return tids

    def _with_aside(self, tid: int, sums: _Sums) -> None:
        """Add what was kept of it, which is no longer kept."""
        if (kept := self._aside.pop(tid, None)) is not None:
            sums.add(kept)
            sums.compute |= kept.compute

    def aside(self) -> list[int]:
        """Threads of which something is kept."""
        return list(self._aside)

    def end_aside(self, tids: Collection[int]) -> None:
        """These ended while they were not watched."""
        for tid in tids:
            sums = self._aside.pop(tid, None)
            if sums is not None:
                sums.alive = False
                self._end(tid, sums)
        self._bound_ended()

    def end(self, rows: Records) -> list[int]:
        """Threads that are gone: their last sums. Returns the tids, whose entries may go."""
        rows = rows[rows["tgid"] == self.tgid]
        gone = []
        for row in rows:
            tid = int(row["tid"])
            gone.append(tid)
            sums = _sums(row, None, 0, alive=False)
            self._with_aside(tid, sums)
            self._end(tid, sums)
        self._bound_ended()
        return gone

    def _end(self, tid: int, sums: _Sums) -> None:
        sums.compute |= tid in self._was_compute
        self._was_compute.discard(tid)
        if not sums.compute:
            return
        again = self._ended.pop(tid, None)
        if again is not None:
            sums.add(again)
        self._ended[tid] = sums

    def _bound_ended(self) -> None:
        while len(self._ended) > MAX_ENDED:
            _, oldest = self._ended.popitem(last=False)
            if self._older is None:
                self._older = oldest
            else:
                self._older.add(oldest)

    def figures(
        self,
        rows: Records,
        *,
        now_ns: int,
        clock_ns: int,
        kinds: Sequence[CoreKind],
        leaders: Collection[int] = (),
        settings: Mapping[int, Setting] | None = None,
    ) -> tuple[Thread, ...]:
        """Compute threads, ended ones last. ``clock_ns``: how long graphs have run until ``now_ns``."""
        found: list[Thread] = []
        rows = rows[rows["tgid"] == self.tgid]
        present = set(rows["tid"].tolist())
        for tid, kept in self._aside.items():
            if tid not in present and (kept.compute or tid in leaders):
                found.append(_thread(tid, kept, kinds, tid in leaders, (settings or {}).get(tid)))
        for row in rows:
            tid = int(row["tid"])
            sums = _sums(row, now_ns, clock_ns, alive=True)
            if (before := self._aside.get(tid)) is not None:
                sums.add(before)
                sums.compute |= before.compute
            if tid in self._was_compute or tid in leaders:
                sums.compute = True
            if sums.compute and int(row["state"]) != EXITED:
                # What was shown once is shown until it ends: a counter does not go away.
                self._was_compute.add(tid)
                found.append(_thread(tid, sums, kinds, tid in leaders, (settings or {}).get(tid)))
        found.sort(key=lambda one: (not one.leader, one.tid))
        found += [_thread(tid, sums, kinds, tid in leaders, None) for tid, sums in self._ended.items()]
        if self._older is not None:
            found.append(_thread(0, self._older, kinds, False, None))
        return tuple(found)


def _sums(row: Records, now_ns: int | None, clock_ns: int, *, alive: bool) -> _Sums:
    """Of one entry; with ``now_ns``, the present state until now is in it."""
    run, wait, work_wait = (row[name].tolist() for name in ("run_ns", "wait_ns", "work_wait_ns"))
    sums = _Sums(
        run, int(row["work_run_ns"]), wait, work_wait, row["work_waits"].tolist(),
        int(row["migrations"]), int(row["kind_changes"]), int(row["wake_max_ns"]),
        bool(row["compute"]), alive,
    )  # fmt: skip
    if now_ns is None:
        # It may have gone before it was ever switched, which is when the kernel decides this.
        _decide(sums, int(row["clock_since"]) - int(row["clock_begun"]))
        return sums
    since, clock_since = int(row["since"]), int(row["clock_since"])
    state, cause = int(row["state"]), int(row["cause"])
    passed = max(now_ns - since, 0)
    worked = min(max(clock_ns - clock_since, 0), passed)
    if state == RUNNING:
        run[0 if len(run) < 2 else _last_kind(row)] += passed
        sums.work_run += worked
    elif state == OFF and cause <= Cause.UNKNOWN:
        woken = int(row["woken"])
        if woken and not Cause(cause).ready:
            blocked = max(woken - since, 0)
            at_work = min(max(int(row["clock_woken"]) - clock_since, 0), blocked)
            wait[cause] += blocked
            work_wait[cause] += at_work
            cause, passed, worked = Cause.WAKEUP, max(passed - blocked, 0), max(worked - at_work, 0)
        wait[cause] += passed
        work_wait[cause] += worked
    _decide(sums, clock_ns - int(row["clock_begun"]))
    return sums


def _decide(sums: _Sums, clock_ns: int) -> None:
    """Whether a thread computes, by what it wanted while graphs ran for ``clock_ns``: as the kernel
    decides it at a switch, which a thread that spins may not have."""
    if not sums.compute:
        wanted = sums.work_run + sum(sums.work_wait[c] for c in READY)
        sums.compute = wanted >= WANTED_NS and 4 * wanted >= max(clock_ns, 0)


def _last_kind(row: Records) -> int:
    """Kind of the core that it mostly ran on: where it runs now is not in the entry."""
    return int(row["run_ns"].argmax())


def _thread(
    tid: int, sums: _Sums, kinds: Sequence[CoreKind], leader: bool, setting: Setting | None
) -> Thread:
    setting = setting or Setting()
    return Thread(
        tid=tid,
        leader=leader,
        alive=sums.alive,
        run_seconds=sum(sums.run) / 1e9,
        work_run_seconds=sums.work_run / 1e9,
        seconds={c.label: sums.work_wait[c] / 1e9 for c in Cause if sums.work_wait[c]},
        waits={c.label: sums.waits[c] for c in Cause if sums.waits[c]},
        migrations=sums.migrations,
        kind_changes=sums.kind_changes,
        wakeup_max_seconds=sums.wake_max / 1e9,
        cores={kind.name: sums.run[i] / 1e9 for i, kind in enumerate(kinds[:MAX_CORE_KINDS])},
        policy=setting.policy,
        nice=setting.nice,
        cpus=setting.cpus,
    )
