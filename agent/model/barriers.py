# SPDX-License-Identifier: Apache-2.0
"""Who waits for whom at the barriers of traced graphs.

Every thread runs every op; an op's wall time is from its entry on thread 0 to the next one's
(design D4), a thread's work in it ends when it last arrives at a barrier before its next op. It
waits for its peers until the last of them has arrived. What follows is nobody's waiting: the way
through the barrier, and the probes that tell us all this.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from .calls import GraphRun
from .causes import BarrierShare, OpBarrier
from .plans import OpKey, Plan
from .records import OP_FUSED, OP_NODE_MASK, Records
from .tokens import Phase

MAX_HELD = 1 << 19
MAX_THREADS = 256
MAX_KEYS = 512
PREEMPTED, PAGING, SLOW_CORE, WORK = "preempted", "paging", "slow_core", "work"
_MOST_NS = 1 << 50
_FIELDS = ("begin", "arrived", "ready_ns", "paging_ns", "blocked_ns", "late_ns")

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(slots=True)
class _Share:
    ops: int = 0
    wall: int = 0
    work: int = 0
    idle: int = 0
    blocked: int = 0
    ready: int = 0
    paging: int = 0
    late: int = 0
    late_ns: int = 0


@dataclass(slots=True)
class _OpSum:
    ops: int = 0
    threads: int = 0
    wall: int = 0
    work: int = 0
    idle: int = 0
    blocked: int = 0
    late: Counter[str] = field(default_factory=Counter)


class BarrierStore:
    """Barriers of one process. ``kinds[cpu]``: kind of core, a higher number is a slower one."""

    def __init__(self, tgid: int, kinds: Sequence[int] = ()) -> None:
        self.tgid = tgid
        #: Graph executions whose records did not fit together.
        self.unmatched = 0
        self.matched = 0
        self._kinds = np.array(kinds, np.int64)
        self._held: list[Records] = []
        self._count = 0
        self._threads: dict[int, _Share] = {}
        self._ops: dict[tuple[OpKey, Phase], _OpSum] = {}

    def take(self, records: Records) -> None:
        """New records of ring "barriers"; those of other processes are passed over."""
        mine = records[records["tgid"] == self.tgid]
        if not len(mine):
            return
        self._held.append(mine)
        self._count += len(mine)
        while self._count > MAX_HELD and len(self._held) > 1:
            self._count -= len(self._held.pop(0))

    def run(self, run: GraphRun, plan: Plan | None, hits: Records | None, phase: Phase) -> None:
        """A traced execution that is over, with its op records."""
        if plan is None or hits is None or len(hits) < 2 or run.end is None or not self._held:
            return
        records = self._held[0] if len(self._held) == 1 else np.concatenate(self._held)
        inside = (records["begin"] >= run.begin) & (records["arrived"] <= run.end)
        # What began before this graph belongs to no later one.
        rest = records[records["begin"] > run.end]
        self._held, self._count = [rest], len(rest)
        records = records[inside & (records["arrived"] >= records["begin"])]
        own = records[records["tid"] == run.tid]
        own = own[np.argsort(own["begin"], kind="stable")]
        # The last op has no barrier after it; one inside it may have been taken for that.
        n = len(hits) - 1
        if len(own) < n or len(own) > n + 1:
            self.unmatched += 1
            return
        self.matched += 1
        self._add(records, own[:n], hits, plan, phase)

    def _add(self, records: Records, own: Records, hits: Records, plan: Plan, phase: Phase) -> None:
        n = len(own)
        word, ts = hits["node"].astype(np.int64), hits["ts"].astype(np.int64)
        node, fused = word[:n] & OP_NODE_MASK, (word[:n] & OP_FUSED) != 0
        wall = np.clip(ts[1 : n + 1] - ts[:n], 0, _MOST_NS)
        tids = sorted({int(t) for t in np.unique(records["tid"])})[:MAX_THREADS]
        order = np.argsort(own["tensor"], kind="stable")
        sorted_tensors = own["tensor"][order]
        seen = {name: np.zeros((len(tids), n), np.int64) for name in _FIELDS}
        there = np.zeros((len(tids), n), np.bool_)
        cpus = np.zeros((len(tids), n), np.int64)
        for row, tid in enumerate(tids):
            its = records[records["tid"] == tid]
            place = np.minimum(np.searchsorted(sorted_tensors, its["tensor"]), n - 1)
            good = sorted_tensors[place] == its["tensor"]
            op, its = order[place[good]], its[good]
            there[row, op] = True
            cpus[row, op] = its["cpu"]
            for name in _FIELDS:
                seen[name][row, op] = np.minimum(its[name], np.uint64(_MOST_NS)).astype(np.int64)
        work = np.where(there, np.clip(seen["arrived"] - seen["begin"], 0, wall), 0)
        everybody = seen["arrived"].max(axis=0, initial=0)
        idle = np.where(there, np.clip(everybody - seen["arrived"], 0, wall - work), 0)
        blocked = np.minimum(seen["blocked_ns"], idle)
        whole = np.asarray(there.all(axis=0))
        last, lateness = _late(seen["arrived"], whole)
        why = self._why(seen, cpus, last, lateness)
        self._by_thread(tids, there, wall, work, idle, blocked, seen, last, lateness)
        ok = node < plan.n
        group = plan.group[np.where(ok, node + plan.n * (fused & (node + 1 < plan.n)), 0)]
        for number in np.unique(group[ok]):
            some = ok & (group == number)
            key = (plan.keys[int(number)], phase)
            if key not in self._ops and len(self._ops) >= MAX_KEYS:
                continue
            total = self._ops.setdefault(key, _OpSum())
            total.ops += int(some.sum())
            total.threads = max(total.threads, int(there[:, some].sum(axis=0).max(initial=0)))
            total.wall += int(wall[some].sum())
            total.work += int(work[:, some].sum())
            total.idle += int(idle[:, some].sum())
            total.blocked += int(blocked[:, some].sum())
            for reason, where in why.items():
                ns = int(lateness[where & some].sum())
                if ns:
                    total.late[reason] += ns

    def _why(self, seen: dict[str, Ints], cpus: Ints, last: Ints, lateness: Ints) -> dict[str, Bools]:
        """Ops by why their last thread was late."""
        each = np.arange(len(last))
        # A thread that lost its core at one barrier is late for the next op.
        before = np.zeros_like(seen["late_ns"])
        before[:, 1:] = seen["late_ns"][:, :-1]
        unready = 2 * (seen["ready_ns"] + before)[last, each] >= lateness
        paging = 2 * seen["paging_ns"][last, each] >= lateness
        slow = np.zeros(len(last), np.bool_)
        if len(self._kinds):
            kinds = self._kinds[np.minimum(cpus, len(self._kinds) - 1)]
            slow = kinds[last, each] > kinds.min(axis=0)
        return {
            PAGING: paging,
            PREEMPTED: unready & ~paging,
            SLOW_CORE: slow & ~unready & ~paging,
            WORK: ~slow & ~unready & ~paging,
        }

    def _by_thread(
        self, tids: list[int], there: Bools, wall: Ints, work: Ints, idle: Ints, blocked: Ints,
        seen: dict[str, Ints], last: Ints, lateness: Ints,
    ) -> None:  # fmt: skip
        for row, tid in enumerate(tids):
            if tid not in self._threads and len(self._threads) >= MAX_THREADS:
                continue
            share = self._threads.setdefault(tid, _Share())
            on = there[row]
            was_last = (last == row) & (lateness > 0)
            share.ops += int(on.sum())
            share.wall += int(wall[on].sum())
            share.work += int(work[row].sum())
            share.idle += int(idle[row].sum())
            share.blocked += int(blocked[row].sum())
            share.ready += int(seen["ready_ns"][row].sum())
            share.paging += int(seen["paging_ns"][row].sum())
            share.late += int(was_last.sum())
            share.late_ns += int(lateness[was_last].sum())

    def threads(self) -> tuple[BarrierShare, ...]:
        """By thread."""
        return tuple(
            BarrierShare(
                tid, s.ops, s.wall / 1e9, s.work / 1e9, s.idle / 1e9, s.blocked / 1e9,
                s.ready / 1e9, s.paging / 1e9, s.late, s.late_ns / 1e9,
            )
            for tid, s in sorted(self._threads.items())
        )  # fmt: skip

    def ops(self) -> tuple[OpBarrier, ...]:
        """By kind of op, those in which most is lost first."""
        rows = [
            OpBarrier(
                key.op, key.dtype, key.role, phase.value, s.ops, s.threads, s.wall / 1e9,
                s.work / 1e9, s.idle / 1e9, s.blocked / 1e9,
                {name: ns / 1e9 for name, ns in sorted(s.late.items())},
            )
            for (key, phase), s in self._ops.items()
        ]  # fmt: skip
        return tuple(sorted(rows, key=lambda one: -one.idle_seconds))


def _late(arrived: Ints, whole: Bools) -> tuple[Ints, Ints]:
    """(the last thread of each op, by how much later than the median of the others)."""
    threads, n = arrived.shape
    if threads < 2 or not n:
        return np.zeros(n, np.int64), np.zeros(n, np.int64)
    last = arrived.argmax(axis=0)
    others = np.sort(arrived, axis=0)[:-1]
    lateness = arrived[last, np.arange(n)] - np.median(others, axis=0).astype(np.int64)
    return last, np.where(whole, np.maximum(lateness, 0), 0)
