# SPDX-License-Identifier: Apache-2.0
"""What has been added up so far: calls, graphs, kernels. Sums only ever grow.

Times are ns and costs are integers, held as Python numbers: exact, and never overflowing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from .opwork import Execution, Measured, measure
from .plans import GraphFacts, Ints, OpKey, Plan
from .snapshot import OTHER_STATUS
from .tokens import Phase

#: Label sets kept apart; what comes after is added to "other".
MAX_OPS = 2000
MAX_GRAPHS = 1024
MAX_STATUSES = 16

OTHER_OP = OpKey("other", "other", "other", "other")
CPU = "CPU"


@dataclass(slots=True)
class OpTotal:
    """Kernels of one (key, backend, phase). ``calls`` are those whose time is known;
    ``untimed`` ran too, but between them and the next kernel something was not seen."""

    calls: int = 0
    ns: int = 0
    flops: int = 0
    bytes: int = 0
    flops_known: bool = True
    bytes_known: bool = True
    untimed: int = 0


@dataclass(slots=True)
class GraphTotal:
    """Executions of one graph in one phase on one backend.

    ``ns`` is the graph's own duration on that backend, ``whole_ns`` that of the outermost
    level seen around it. ``sampled`` executions have op records; ``setup_ns`` and
    ``untimed_ns`` are of those. ``executed`` .. ``uncovered`` describe the execution
    with the most uncovered nodes. ``failed``: of ``count``, those in calls that failed.
    """

    count: int = 0
    sampled: int = 0
    ns: int = 0
    whole_ns: int = 0
    setup_ns: int = 0
    setups: int = 0
    untimed_ns: int = 0
    failed: int = 0
    warmup: int = 0
    split: bool = False
    enqueued: bool = False
    executed: int | None = None
    fused: int | None = None
    uncovered: int | None = None
    nodes: int | None = None
    topology: str | None = None
    tokens: int | None = None
    rows: int | None = None
    kv_length: int | None = None

    def describe(self, graph: GraphFacts) -> None:
        """Remember what the graph is; the plan may be forgotten before the sums are."""
        self.nodes, self.topology = graph.n_nodes, graph.topology
        self.tokens, self.kv_length = graph.n_tokens, graph.kv_length
        self.rows = graph.rows if graph.pooled is None else graph.pooled

    def cover(self, seen: Measured) -> None:
        """Account the nodes of one execution whose records are complete."""
        if self.uncovered is None or seen.missing > self.uncovered:
            self.executed, self.fused = seen.executed, seen.fused
            self.uncovered = seen.missing


@dataclass(slots=True)
class CountTime:
    """A count and the ns that belong to it."""

    count: int = 0
    ns: int = 0


@dataclass(slots=True)
class Routed:
    """Kernels whose number of experts is known, and the bytes they moved together."""

    calls: int = 0
    bytes: int = 0


@dataclass(slots=True)
class Recent:
    """What the nodes of one plan have collected since they were last folded."""

    calls: Ints
    ns: Ints
    untimed: dict[int, int] = field(default_factory=dict)
    routed: dict[int, Routed] = field(default_factory=dict)


@dataclass(slots=True)
class NodeSums:
    """Per slot of a plan (see :class:`Plan`): timed kernels and their ns, in one phase.

    ``recent`` is not in them yet, and exists only while there is something in it.
    """

    calls: Ints
    ns: Ints
    recent: Recent | None = None


def _zeros(size: int) -> Ints:
    return np.zeros(size, dtype=np.int64)


class OpTotals:
    """Kernels by (key, backend, phase), fed with executions, bounded in every direction."""

    def __init__(self) -> None:
        self.totals: dict[tuple[OpKey, str, Phase], OpTotal] = {}
        self._sums: dict[tuple[int, int, Phase], NodeSums] = {}

    def add(self, plan: Plan, execution: Execution, phase: Phase) -> Measured:
        """Add one execution up."""
        seen = measure(plan, execution)
        key = (execution.tgid, execution.hash, phase)
        sums = self._sums.get(key)
        if sums is None:
            sums = self._sums[key] = NodeSums(_zeros(2 * plan.n), _zeros(2 * plan.n))
        recent = sums.recent
        if recent is None:
            recent = sums.recent = Recent(_zeros(2 * plan.n), _zeros(2 * plan.n))
        # Nodes of one execution are distinct, so plain indexing adds each of them.
        recent.calls[seen.slots] += 1
        recent.ns[seen.slots] += seen.ns
        for slot in seen.untimed.tolist():
            recent.untimed[slot] = recent.untimed.get(slot, 0) + 1
        if plan.by_experts and execution.experts:
            self._routed(plan, recent, execution, seen)
        return seen

    @staticmethod
    def _routed(plan: Plan, recent: Recent, execution: Execution, seen: Measured) -> None:
        timed = set(seen.slots.tolist())
        for node, experts in execution.experts.items():
            if node in plan.by_experts and node in timed:
                cost = plan.expert_bytes(node, experts)
                if cost is not None:
                    part = recent.routed.setdefault(node, Routed())
                    part.calls += 1
                    part.bytes += cost

    def fold(self, plan: Plan, tgid: int) -> None:
        """Move what a plan's nodes have collected into the totals."""
        for phase in Phase:
            sums = self._sums.get((tgid, plan.facts.hash, phase))
            if sums is not None and sums.recent is not None:
                recent, sums.recent = sums.recent, None
                sums.calls += recent.calls
                sums.ns += recent.ns
                self._fold(plan, recent, phase)

    def forget(self, plan: Plan, tgid: int) -> None:
        """Fold, and give up the per-node sums."""
        self.fold(plan, tgid)
        for phase in Phase:
            self._sums.pop((tgid, plan.facts.hash, phase), None)

    def nodes(self, plan: Plan, tgid: int) -> dict[Phase, NodeSums]:
        """Per-node sums of a remembered graph, folded: ``calls`` and ``ns`` are all."""
        self.fold(plan, tgid)
        found: dict[Phase, NodeSums] = {}
        for phase in Phase:
            sums = self._sums.get((tgid, plan.facts.hash, phase))
            if sums is not None:
                found[phase] = sums
        return found

    def _fold(self, plan: Plan, recent: Recent, phase: Phase) -> None:
        slots = np.flatnonzero(recent.calls)
        calls, ns = recent.calls[slots], recent.ns[slots]
        flops, moved = plan.price(slots)
        group = plan.group[slots]
        calls_of, ns_of = _zeros(len(plan.keys)), _zeros(len(plan.keys))
        np.add.at(calls_of, group, calls)
        np.add.at(ns_of, group, ns)
        for number in np.unique(group).tolist():
            total = self._total(plan.keys[number], phase)
            total.calls += int(calls_of[number])
            total.ns += int(ns_of[number])
        # Products of costs and counts can exceed 64 bits: add them up in Python.
        for slot, of, count, f, b in zip(
            slots.tolist(), group.tolist(), calls.tolist(), flops.tolist(), moved.tolist(),
            strict=True,
        ):  # fmt: skip
            total = self._total(plan.keys[of], phase)
            if f < 0:
                total.flops_known = False
            else:
                total.flops += f * count
            part = recent.routed.get(slot)
            if part is not None:
                total.bytes += part.bytes
                count = max(count - part.calls, 0)
            if b >= 0:
                total.bytes += b * count
            elif count:
                total.bytes_known = False
        for slot, count in recent.untimed.items():
            self._total(plan.keys[int(plan.group[slot])], phase).untimed += count

    def _total(self, key: OpKey, phase: Phase) -> OpTotal:
        full = (key, CPU, phase)
        total = self.totals.get(full)
        if total is None:
            if len(self.totals) >= MAX_OPS:
                full = (OTHER_OP, CPU, phase)
            total = self.totals.setdefault(full, OpTotal())
        return total


class CallTotals:
    """Calls that returned by (phase, status), and how many never did."""

    def __init__(self) -> None:
        self.totals: dict[tuple[Phase, int], CountTime] = {}
        self.unreturned = 0
        self._statuses: set[int] = {0}

    def add(self, phase: Phase, status: int | None, ns: int) -> None:
        """One call; status None: it never returned."""
        if status is None:
            self.unreturned += 1
            return
        if status not in self._statuses:
            if len(self._statuses) < MAX_STATUSES:
                self._statuses.add(status)
            else:
                status = OTHER_STATUS
        total = self.totals.setdefault((phase, status), CountTime())
        total.count += 1
        total.ns += ns


class GraphTotals:
    """Executions by (hash, phase, backend); hash None gathers what no longer fits."""

    def __init__(self) -> None:
        self.totals: dict[tuple[int | None, Phase, str], GraphTotal] = {}
        #: Outermost graphs by (phase, backend): count and ns; and how many have op records.
        self.whole: dict[tuple[Phase, str], CountTime] = {}
        self.sampled: dict[tuple[Phase, str], int] = {}

    def entry(self, hash: int, phase: Phase, backend: str) -> GraphTotal:
        """The sum to add to."""
        key: tuple[int | None, Phase, str] = (hash, phase, backend)
        total = self.totals.get(key)
        if total is None:
            if len(self.totals) >= MAX_GRAPHS:
                key = (None, phase, backend)
            total = self.totals.setdefault(key, GraphTotal())
        return total

    def cover(
        self, hash: int, phases: Iterable[Phase], backend: str, executed: int, fused: int, uncovered: int
    ) -> None:
        """What became of the nodes of a graph in some phases."""
        for phase in phases:
            total = self.totals.get((hash, phase, backend))
            if total is not None and (total.uncovered is None or uncovered >= total.uncovered):
                total.executed, total.fused, total.uncovered = executed, fused, uncovered

    def outermost(self, phase: Phase, backend: str, ns: int, sampled: bool) -> None:
        """One graph as its caller sees it, for the counters."""
        total = self.whole.setdefault((phase, backend), CountTime())
        total.count += 1
        total.ns += ns
        self.sampled[(phase, backend)] = self.sampled.get((phase, backend), 0) + sampled
