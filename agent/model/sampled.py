# SPDX-License-Identifier: Apache-2.0
"""Op figures of a target whose ops are summed in bursts (design D5, D7, D12).

Joins what the session knows of every graph that ran (its phase, its plan) with the sums that
the kernel keeps while op probes are armed. A slot of the sums is a graph's own, or a spare
one: there graphs are added up that were never met before, whatever they turn out to be. What
a spare slot holds counts if it was graphs of one topology and, but for a tenth, one phase;
else nobody can tell whose it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .calls import GraphRun
from .plans import OpKey, Plan
from .ratio import KindTotal
from .records import Flag
from .sampledcosts import SampledCosts
from .sampling import Execution, Sampler
from .tokens import Phase
from .totals import MAX_OPS, OTHER_OP

Sums = npt.NDArray[Any]

_MAX_LENT = 4096
_MAX_GROUPS = 4096
_ONE_PHASE = 0.9
"""Share of the seconds in a spare slot that must be of one phase."""


class _Group(NamedTuple):
    """What a node counts as when its kernel runs it alone, and when it runs the next one too."""

    alone: OpKey
    fused: OpKey


@dataclass(slots=True)
class SampledOp:
    """One (key, phase): estimates over all attributed graphs. None: not known."""

    seconds: float = 0.0
    stderr: float = 0.0
    calls: float = 0.0
    flops: int | None = None
    bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Ran:
    """One CPU graph that ended. ``whole``: its probes were there all the time, if it was summed."""

    run: GraphRun
    plan: Plan | None
    phase: Phase
    whole: bool

    @property
    def summed(self) -> bool:
        """Its ops were added up, whether or not its probes stayed to the end."""
        return self.run.slot is not None


@dataclass(frozen=True, slots=True)
class Coverage:
    """Of a graph that was summed in these phases: nodes that ran, that were fused into another,
    that should have run and did not show."""

    hash: int
    phases: frozenset[Phase]
    executed: int
    fused: int
    uncovered: int


@dataclass(slots=True)
class _Own:
    plan: Plan
    calls: npt.NDArray[np.uint32]
    fused: npt.NDArray[np.uint32]
    phases: set[Phase] = field(default_factory=set)  # of whole executions since the last reading


@dataclass(slots=True)
class _Spare:
    ran: list[Ran] = field(default_factory=list)
    spoiled: bool = False


class SampledOps:
    """Sums of one target. At the end of a burst: all graphs that ran, then :meth:`read` or
    :meth:`read_spare` for each slot, then :meth:`end_burst`."""

    def __init__(self) -> None:
        self._sampler = Sampler()
        self._costs = SampledCosts()
        self._own: dict[int, _Own] = {}
        self._spare: dict[int, _Spare] = {}
        self._known: dict[_Group, _Group] = {}
        self._ran: list[Execution] = []
        self._attributed: dict[tuple[str, str], float] = {}
        self._ops: dict[tuple[OpKey, str], SampledOp] = {}
        self._seen: dict[tuple[str, _Group], tuple[float, float, float]] = {}
        self._setup: dict[tuple[str, str], float] = {}
        self.fresh: list[Ran] = []
        """Graphs that ended since the caller last emptied it."""

    # ---- slots --------------------------------------------------------------------------

    def give(self, slot: int, plan: Plan, sums: Sums) -> None:
        """``slot`` is this graph's own now; ``sums`` are its elements at this moment."""
        self._sampler.give(slot, plan.facts.topology, self._groups(plan), sums)
        self._own[slot] = _Own(plan, sums["calls"].copy(), sums["fused"].copy())

    def lend(self, slot: int) -> None:
        """``slot`` is a spare one now; its elements are zero, and are made so after each reading."""
        self._spare[slot] = _Spare()

    def take(self, slot: int) -> None:
        """``slot`` serves nothing any more; it was read."""
        if self._spare.pop(slot, None) is None:
            self._sampler.take(slot)
            del self._own[slot]

    def _groups(self, plan: Plan) -> list[_Group]:
        """Of each node. Names come from the target, so there is an end to how many are told apart."""
        groups: list[_Group] = []
        for i in range(plan.n):
            alone, fused = int(plan.group[i]), int(plan.group[plan.n + i])
            group = _Group(plan.keys[alone], plan.keys[fused])
            if len(self._known) >= _MAX_GROUPS and group not in self._known:
                group = _Group(OTHER_OP, OTHER_OP)
            groups.append(self._known.setdefault(group, group))
        return groups

    # ---- what ran -----------------------------------------------------------------------

    def graph_ran(self, run: GraphRun, plan: Plan | None, phase: Phase, experts: Mapping[int, int]) -> None:
        """A CPU graph ended, summed or not. ``experts`` of MUL_MAT_ID, by node."""
        ran = Ran(run, plan, phase, run.end is not None and not run.end_flags & Flag.DISARMED)
        self.fresh.append(ran)
        if plan is not None and experts:
            self._costs.routed(plan.facts.topology, phase.value, plan, experts)
        own = self._own.get(run.slot) if run.slot is not None else None
        spare = self._spare.get(run.slot) if run.slot is not None else None
        if own is not None and own.plan.facts.hash == run.hash:
            if ran.whole:
                own.phases.add(phase)
            self._pass(ran, own.plan, run.slot)
        elif spare is not None and not spare.spoiled:
            spare.ran.append(ran)
            if len(spare.ran) > _MAX_LENT and run.slot is not None:
                self.spoil(run.slot)
        else:
            self._pass(ran, plan, None)

    def _pass(self, ran: Ran, plan: Plan | None, slot: int | None) -> None:
        topology = plan.facts.topology if plan is not None else ""
        self._ran.append(Execution(topology, ran.phase.value, ran.run.ns / 1e9, slot, ran.whole))
        if plan is not None:
            self._costs.ran(topology, ran.phase.value, plan)

    def _drop(self, spare: _Spare) -> None:
        """Its executions count as not summed."""
        lost, spare.ran = spare.ran, []
        for ran in lost:
            self._pass(ran, ran.plan, None)

    def flush(self) -> None:
        """Hand the executions on."""
        ran, self._ran = self._ran, []
        self._sampler.ran(ran)

    # ---- reading ------------------------------------------------------------------------

    def read(self, slot: int, sums: Sums) -> list[Coverage]:
        """The elements of a graph's own slot, when no execution writes to them."""
        self.flush()
        own = self._own[slot]
        new = (sums["calls"] - own.calls) > 0
        fused = (sums["fused"] - own.fused) > 0
        own.calls, own.fused = sums["calls"].copy(), sums["fused"].copy()
        phases, own.phases = frozenset(own.phases), set()
        self._sampler.read(slot, sums)
        if not phases:
            return []
        self._costs.fuses(own.plan.facts.topology, new, fused)
        return [_cover(own.plan, phases, new, fused)]

    def spoil(self, slot: int) -> None:
        """What was added to a spare slot since it was last read means nothing."""
        self._spare[slot].spoiled = True
        self._drop(self._spare[slot])

    def spare_nodes(self, slot: int) -> int | None:
        """How many elements of a spare slot were used since it was last read; None: not known."""
        spare = self._spare[slot]
        return None if spare.spoiled else max((ran.run.n_nodes for ran in spare.ran), default=0)

    def read_spare(self, slot: int, sums: Sums) -> list[Coverage]:
        """The first :meth:`spare_nodes` elements of a spare slot; the caller clears them then."""
        spare = self._spare[slot]
        spare.spoiled = False
        found = _speaks_for(spare.ran)
        if found is None or found[0].n > len(sums):
            self._drop(spare)
            self.flush()
            return []
        plan, phase = found
        sums = sums[: plan.n]
        ran, spare.ran = spare.ran, []
        self.flush()
        self._sampler.give(slot, plan.facts.topology, self._groups(plan), np.zeros_like(sums))
        for one in ran:
            if one.phase is phase:
                self._pass(one, one.plan or plan, slot)
            else:
                self._pass(one, one.plan, None)
        self.flush()
        self._sampler.read(slot, sums)
        self._sampler.take(slot)
        new, fused = sums["calls"] > 0, sums["fused"] > 0
        self._costs.fuses(plan.facts.topology, new, fused)
        plans = {r.plan.facts.hash: r.plan for r in ran if r.plan and r.whole and r.phase is phase}
        return [_cover(one_plan, frozenset((phase,)), new, fused) for one_plan in plans.values()]

    def end_burst(self) -> None:
        """Attribute what was read, and with it the work of the graphs concerned."""
        self.flush()
        self._sampler.end_burst()
        self._settle()

    def finish(self) -> None:
        """The end of the session: also the rest goes to ops that were sampled."""
        self.flush()
        self._sampler.finish()
        self._settle()

    def _settle(self) -> None:
        attributed: dict[tuple[str, str], float] = {}
        self._setup = {}
        for kind in self._sampler.kinds():
            key = (kind.topology, kind.phase)
            attributed[key] = kind.attributed_seconds
            if kind.attributed_seconds > self._attributed.get(key, 0.0):
                self._costs.commit(*key)
            if kind.bursts and kind.seconds > 0:
                self._setup[key] = kind.setup_seconds / kind.seconds
        self._attributed = attributed
        for op in self._ops.values():
            op.stderr = 0.0
        for phase, total in self._sampler.phases().items():
            for item in total.ops:
                group = item.key
                if isinstance(group, _Group) and item.calls > 0:
                    before = self._seen.get((phase, group), (0.0, 0.0, 0.0))
                    self._seen[phase, group] = (item.seconds, item.calls, item.fused)
                    seconds, calls, fused = (
                        max(0.0, now - old)
                        for now, old in zip((item.seconds, item.calls, item.fused), before, strict=True)
                    )
                    # What was added is divided, for good: parts of a changing total could shrink.
                    share = min(1.0, fused / calls) if calls > 0 else 0.0
                    whole = min(1.0, item.fused / item.calls)
                    self._add(group.fused, phase, seconds * share, calls * share, item.stderr * whole)
                    share, whole = 1.0 - share, 1.0 - whole
                    self._add(group.alone, phase, seconds * share, calls * share, item.stderr * whole)
        for (op_key, phase), op in self._ops.items():
            cost = self._costs.total(op_key, phase)
            op.flops = cost.flops if cost is not None and cost.flops_known else None
            op.bytes = cost.bytes if cost is not None and cost.bytes_known else None

    def _add(self, key: OpKey, phase: str, seconds: float, calls: float, stderr: float) -> None:
        op = self._ops.get((key, phase))
        if op is None:
            if calls <= 0:
                return
            if len(self._ops) >= MAX_OPS:
                key = OTHER_OP
            op = self._ops.setdefault((key, phase), SampledOp())
        op.seconds += seconds
        op.calls += calls
        # Different groups of one key come from the same bursts: errors add up.
        op.stderr += stderr

    # ---- figures ------------------------------------------------------------------------

    def phases(self) -> dict[str, KindTotal]:
        """Counters per phase over all graphs; what waits for a burst is in them as pending."""
        return self._sampler.phases()

    def ops(self) -> dict[tuple[OpKey, str], SampledOp]:
        """Figures by (key, phase), none of which ever shrinks but the errors. A phase that was
        never sampled is not in them."""
        return self._ops

    def setup_share(self, topology: str | None, phase: str) -> float | None:
        """Setup of this kind of graph, as far as it is attributed, by all its seconds."""
        return self._setup.get((topology, phase)) if topology is not None else None


def _speaks_for(ran: Sequence[Ran]) -> tuple[Plan, Phase] | None:
    """Whose sums a spare slot holds, from the executions in it; None: nobody can tell."""
    plans = {one.plan.facts.topology: one.plan for one in ran if one.plan is not None}
    if len(plans) != 1:
        return None
    (plan,) = plans.values()
    if any(one.run.n_nodes != plan.n for one in ran):
        return None
    seconds: dict[Phase, float] = {}
    for one in ran:
        seconds[one.phase] = seconds.get(one.phase, 0.0) + one.run.ns
    phase = max(seconds, key=lambda p: seconds[p])
    return (plan, phase) if seconds[phase] >= _ONE_PHASE * sum(seconds.values()) else None


def _cover(
    plan: Plan, phases: frozenset[Phase], new: npt.NDArray[np.bool_], fused: npt.NDArray[np.bool_]
) -> Coverage:
    expected = np.diff(plan.before) > 0
    executed = expected & new
    halves = np.zeros(plan.n, dtype=np.bool_)
    halves[1:] = fused[:-1]
    halves &= expected & ~new
    missing = expected & ~executed & ~halves
    return Coverage(plan.facts.hash, phases, int(executed.sum()), int(halves.sum()), int(missing.sum()))
