# SPDX-License-Identifier: Apache-2.0
"""Graphs that ran, added up: per graph, and per kernel once the graph is known."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .calls import GraphRun
from .losses import Losses
from .opwork import Execution
from .placement import Placements
from .plancache import PlanCache
from .plans import Plan
from .records import Flag, Level
from .sampled import SampledOps
from .tokens import Phase
from .totals import CPU, GraphTotal, GraphTotals, OpTotals

#: Executions of a graph that is not known after so long are lost.
_RESOLVE_NS = 10_000_000_000
_MAX_PENDING = 1024
_MAX_PENDING_HITS = 1 << 18
_MAX_BACKENDS = 8
UNKNOWN_BACKEND = "unknown"
MIXED_BACKENDS = "mixed"


@dataclass(slots=True, eq=False)
class _Pending:
    execution: Execution
    phase: Phase
    since: int


@dataclass(frozen=True, slots=True)
class Mark:
    """What is special about the call that a graph ran in."""

    failed: bool = False
    warmup: bool = False


def placement(root: GraphRun, backend: Callable[[int], str]) -> tuple[list[GraphRun], str]:
    """Which splits of a graph another backend took, and the name of where the whole ran."""
    cpu = [r for r in (root, *root.inner) if r.level == Level.CPU]
    # A backend that computes here runs a CPU graph inside; another only takes work.
    away = [
        r
        for r in (root, *root.inner)
        if r.level == Level.BACKEND
        and not any(r.begin <= c.begin and (c.end or 0) <= (r.end or 0) for c in cpu)
    ]
    names = {backend(r.object) for r in away} | ({CPU} if cpu else set())
    if names == {CPU} and root.level == Level.SCHED and sum(r.n_nodes for r in cpu) < root.n_nodes:
        return away, MIXED_BACKENDS  # the rest ran where nobody looks (yet)
    if len(names) == 1:
        return away, names.pop()
    return away, MIXED_BACKENDS if names else UNKNOWN_BACKEND


class GraphWork:
    """Sums per graph and per op. ``backends`` names backend objects by address."""

    def __init__(self, plans: PlanCache, losses: Losses, backends: Mapping[int, str]) -> None:
        self.graphs = GraphTotals()
        self.ops = OpTotals()
        #: Work of some backend had only been started when its call returned (case C08).
        self.enqueued = False
        #: Set where ops are summed in bursts; told of every CPU graph.
        self.sampled: SampledOps | None = None
        self._plans = plans
        self._losses = losses
        self._named = backends
        #: Asked for the name of a backend at an address, once each.
        self.namer: Callable[[int], str | None] = lambda object: None
        self.placements = Placements()
        self._numbered: dict[int, str] = {}
        self._pending: OrderedDict[tuple[int, int], list[_Pending]] = OrderedDict()
        self._n_pending = 0
        self._pending_hits = 0

    @property
    def pending(self) -> int:
        """Executions whose graph is not known yet."""
        return self._n_pending

    def describe(self, run: GraphRun) -> None:
        """Make a graph known, if its descriptors came with this execution."""
        if run.flags & Flag.DESCRIBED:
            cut = bool(run.flags & Flag.CUT)
            if self._plans.build(run.tgid, run.hash, run.seq, run.n_nodes, cut=cut):
                for (tgid, _), plan in self._plans.evict():
                    self.ops.forget(plan, tgid)
                self._resolve(run.tgid, run.hash)
        elif run.hash and not run.flags & Flag.FAULT and self._plans.get(run.tgid, run.hash) is None:
            self._plans.want(run.tgid, run.hash, known=bool(run.flags & Flag.KNOWN))

    def add(self, root: GraphRun, work: Mapping[int, Execution], phase: Phase, mark: Mark, now: int) -> None:
        """One outermost graph with the splits inside it; ``work`` by seq of CPU splits."""
        cpu = [r for r in (root, *root.inner) if r.level == Level.CPU]
        away, name = placement(root, self.backend)
        sampled = False
        for run in cpu:
            entry = self._enter(run, root, phase, CPU, mark)
            if self.sampled is not None:
                plan = self._plans.get(run.tgid, run.hash)
                self.sampled.graph_ran(run, plan, phase, work[run.seq].experts)
            sampled |= self._execute(run, work[run.seq], entry, phase, now)
        for run in away:
            self.enqueued = True
            self._enter(run, root, phase, self.backend(run.object), mark).enqueued = True
        if away and not mark.failed:
            for run in (*cpu, *away):
                place = CPU if run.level == Level.CPU else self.backend(run.object)
                plan = self._plans.get(run.tgid, run.hash)
                self.placements.ran(run.tgid, run.hash, phase, place, plan)
        if all(run.hash != root.hash for run in (*cpu, *away)):
            self._enter(root, root, phase, name, mark)
        self.graphs.entry(root.hash, phase, name).whole_ns += root.ns
        self.graphs.outermost(phase, name, root.ns, sampled)

    def backend(self, object: int) -> str:
        """A bounded name for a backend object."""
        name = self._named.get(object) or self._numbered.get(object)
        if name is None:
            if len(self._numbered) >= _MAX_BACKENDS:
                return "other"
            name = self.namer(object) or f"backend_{len(self._numbered)}"
            self._numbered[object] = name
        return name

    def tidy(self, now: int) -> None:
        """Give up on graphs that stay unknown."""
        while self._pending:
            key, waiting = next(iter(self._pending.items()))
            if (
                self._n_pending <= _MAX_PENDING
                and self._pending_hits <= _MAX_PENDING_HITS
                and now - waiting[0].since <= _RESOLVE_NS
            ):
                break
            self._give_up(key)

    def finish(self) -> None:
        """Give up on all graphs that are unknown."""
        for key in list(self._pending):
            self._give_up(key)

    def fold(self) -> None:
        """Bring the op totals up to date."""
        for tgid, plan in self._plans.plans():
            self.ops.fold(plan, tgid)

    # --------------------------------------------------------------------------

    def _enter(self, run: GraphRun, root: GraphRun, phase: Phase, backend: str, mark: Mark) -> GraphTotal:
        entry = self.graphs.entry(run.hash, phase, backend)
        entry.count += 1
        entry.ns += run.ns
        entry.failed += mark.failed
        entry.warmup += mark.warmup
        entry.split = run is not root and run.hash != root.hash
        if entry.nodes is None:
            plan = self._plans.get(run.tgid, run.hash)
            if plan is not None:
                entry.describe(plan.facts)
            else:
                entry.nodes = run.n_nodes or None
        return entry

    def _execute(
        self, run: GraphRun, execution: Execution, entry: GraphTotal, phase: Phase, now: int
    ) -> bool:
        """Add the kernels of one CPU split; whether any were recorded."""
        if run.flags & Flag.SUMMED:
            entry.sampled += 1
            return True
        if execution.hits is None and not run.flags & Flag.TRACED:
            return False
        entry.sampled += 1
        plan = self._plans.get(run.tgid, run.hash)
        if plan is not None:
            self._measure(plan, execution, entry, phase)
            return True
        if execution.hits is not None:
            # Own the records: a slice would keep the whole drained array alive.
            execution.hits = execution.hits.copy()
            self._pending_hits += len(execution.hits)
        waiting = self._pending.setdefault((run.tgid, run.hash), [])
        waiting.append(_Pending(execution, phase, now))
        self._n_pending += 1
        return True

    def _measure(self, plan: Plan, execution: Execution, entry: GraphTotal, phase: Phase) -> None:
        seen = self.ops.add(plan, execution, phase)
        self._losses.add("op_records", seen.bad)
        entry.untimed_ns += seen.untimed_ns
        if seen.setup_ns is not None:
            entry.setup_ns += seen.setup_ns
            entry.setups += 1
        if not execution.partial:
            entry.cover(seen)
        if entry.topology is None:
            entry.describe(plan.facts)

    def _resolve(self, tgid: int, hash: int) -> None:
        plan = self._plans.get(tgid, hash)
        waiting = self._pop(tgid, hash)
        if plan is None:
            return
        for item in waiting:
            entry = self.graphs.entry(hash, item.phase, CPU)
            self._measure(plan, item.execution, entry, item.phase)

    def _give_up(self, key: tuple[int, int]) -> None:
        self._losses.add("graph", len(self._pop(*key)))

    def _pop(self, tgid: int, hash: int) -> list[_Pending]:
        waiting = self._pending.pop((tgid, hash), [])
        self._n_pending -= len(waiting)
        self._pending_hits -= sum(
            len(item.execution.hits) for item in waiting if item.execution.hits is not None
        )
        return waiting
