# SPDX-License-Identifier: Apache-2.0
"""Op figures of a target whose ops are summed in bursts (design D5, D7, D12).

Joins what the session knows of every graph that ran (its phase, its plan) with the sums that
the kernel keeps while op probes are armed. Seconds and calls come from the ratio estimator;
FLOPs and bytes follow from the shapes of the very graphs whose seconds were attributed, so
that their quotients mean something.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .calls import GraphRun
from .plans import OpKey, Plan
from .ratio import KindTotal
from .records import Flag
from .sampling import Execution, Sampler
from .tokens import Phase

Sums = npt.NDArray[Any]

_MAX_TOPOLOGIES = 1024


class _Group(NamedTuple):
    """What a node counts as when its kernel runs it alone, and when it runs the next one too."""

    alone: OpKey
    fused: OpKey


@dataclass(slots=True)
class SampledOp:
    """One (key, phase): estimates over all attributed graphs; None: not known."""

    seconds: float = 0.0
    variance: float = 0.0
    calls: float = 0.0
    flops: int = 0
    bytes: int = 0
    flops_known: bool = True
    bytes_known: bool = True


@dataclass(frozen=True, slots=True)
class Ran:
    """One CPU graph that ended; ``summed``: into the slot that its graph has now."""

    run: GraphRun
    plan: Plan | None
    phase: Phase
    summed: bool


@dataclass(frozen=True, slots=True)
class Coverage:
    """Of one summed graph: nodes that ran, that were fused into another, that did not show."""

    executed: int
    fused: int
    uncovered: int


@dataclass(slots=True)
class _Served:
    plan: Plan
    calls: npt.NDArray[np.uint32]
    fused: npt.NDArray[np.uint32]


@dataclass(slots=True)
class _Waiting:
    """Graphs of one (topology, phase) whose seconds are not attributed yet, by plan."""

    plans: dict[int, tuple[Plan, int]] = field(default_factory=dict)
    unknown: int = 0
    attributed: float = 0.0


class SampledOps:
    """Sums of one target. Order as in :class:`Sampler`."""

    def __init__(self) -> None:
        self._sampler = Sampler()
        self._served: dict[int, _Served] = {}
        self._slot_of: dict[tuple[int, int], int] = {}
        self._ran: list[Execution] = []
        self._waiting: dict[tuple[str, str], _Waiting] = {}
        self._fused: dict[str, frozenset[int]] = {}
        self._costs: dict[tuple[OpKey, str], SampledOp] = {}
        self.fresh: list[Ran] = []
        """Graphs that ended since the caller last emptied it."""

    # ---- slots --------------------------------------------------------------------------

    def give(self, slot: int, tgid: int, plan: Plan, sums: Sums) -> None:
        """``slot`` now serves this graph; ``sums`` are its elements at this moment."""
        keys = [
            _Group(plan.keys[int(plan.group[i])], plan.keys[int(plan.group[plan.n + i])])
            for i in range(plan.n)
        ]
        self._sampler.give(slot, plan.facts.topology, keys, sums)
        self._served[slot] = _Served(plan, sums["calls"].copy(), sums["fused"].copy())
        self._slot_of[tgid, plan.facts.hash] = slot

    def take(self, slot: int, tgid: int, hash_: int) -> None:
        """``slot`` serves nothing any more; it was read."""
        self._sampler.take(slot)
        self._served.pop(slot, None)
        self._slot_of.pop((tgid, hash_), None)

    # ---- what ran -----------------------------------------------------------------------

    def graph_ran(self, run: GraphRun, plan: Plan | None, phase: Phase) -> None:
        """A CPU graph ended, summed or not."""
        slot = self._slot_of.get((run.tgid, run.hash)) if run.flags & Flag.SUMMED else None
        topology = plan.facts.topology if plan is not None else ""
        whole = run.end is not None and not run.end_flags & Flag.DISARMED
        self.fresh.append(Ran(run, plan, phase, slot is not None))
        if slot is not None:
            topology = self._served[slot].plan.facts.topology
        self._ran.append(Execution(topology, phase.value, run.ns / 1e9, slot, whole))
        waiting = self._waiting.setdefault((topology, phase.value), _Waiting())
        if plan is None:
            waiting.unknown += 1
        else:
            known, count = waiting.plans.get(run.hash, (plan, 0))
            waiting.plans[run.hash] = (known, count + 1)

    def flush(self) -> None:
        """Hand the executions on; before sums are read."""
        ran, self._ran = self._ran, []
        self._sampler.ran(ran)

    def read(self, slot: int, sums: Sums) -> Coverage | None:
        """The slot's elements after a burst; None when nothing was added to them."""
        served = self._served[slot]
        plan = served.plan
        new = (sums["calls"] - served.calls) > 0
        fused = (sums["fused"] - served.fused) > 0
        served.calls, served.fused = sums["calls"].copy(), sums["fused"].copy()
        self._sampler.read(slot, sums)
        if not new.any():
            return None
        if len(self._fused) < _MAX_TOPOLOGIES or plan.facts.topology in self._fused:
            self._fused[plan.facts.topology] = frozenset(np.flatnonzero(fused).tolist())
        expected = np.diff(plan.before) > 0
        halves = np.zeros(plan.n, dtype=np.bool_)
        halves[1:] = fused[:-1]
        missing = expected & ~new & ~halves
        return Coverage(int(new.sum()), int(halves.sum()), int(missing.sum()))

    def end_burst(self) -> None:
        """Attribute what was read, and with it the work of the graphs concerned."""
        self.flush()
        self._sampler.end_burst()
        for kind in self._sampler.kinds():
            waiting = self._waiting.get((kind.topology, kind.phase))
            if waiting is not None and kind.attributed_seconds > waiting.attributed:
                waiting.attributed = kind.attributed_seconds
                self._commit(kind, waiting)

    def _commit(self, kind: KindTotal, waiting: _Waiting) -> None:
        fused = self._fused.get(kind.topology, frozenset())
        plans, waiting.plans = waiting.plans, {}
        waiting.unknown = 0
        for plan, count in plans.values():
            for key, flops, moved in graph_costs(plan, fused):
                entry = self._costs.setdefault((key, kind.phase), SampledOp())
                if flops < 0:
                    entry.flops_known = False
                else:
                    entry.flops += flops * count
                if moved < 0:
                    entry.bytes_known = False
                else:
                    entry.bytes += moved * count

    def finish(self) -> None:
        """The end of the session: also the rest goes to ops that were sampled."""
        self.flush()
        self._sampler.finish()
        for kind in self._sampler.kinds():
            waiting = self._waiting.get((kind.topology, kind.phase))
            if waiting is not None and kind.attributed_seconds > waiting.attributed:
                waiting.attributed = kind.attributed_seconds
                self._commit(kind, waiting)

    # ---- figures ------------------------------------------------------------------------

    def phases(self) -> dict[str, KindTotal]:
        """Counters per phase over all graphs; what waits for a burst is in them as pending."""
        return self._sampler.phases()

    def ops(self) -> dict[tuple[OpKey, str], SampledOp]:
        """Figures by (key, phase). A phase that was never sampled is not in them."""
        found: dict[tuple[OpKey, str], SampledOp] = {}
        for phase, total in self._sampler.phases().items():
            for op in total.ops:
                if op.calls <= 0 or not isinstance(op.key, _Group):
                    continue
                part = min(1.0, op.fused / op.calls)
                for key, share in ((op.key.fused, part), (op.key.alone, 1.0 - part)):
                    if share <= 0:
                        continue
                    entry = found.get((key, phase))
                    if entry is None:
                        cost = self._costs.get((key, phase), SampledOp(flops_known=False, bytes_known=False))
                        entry = found[key, phase] = SampledOp(
                            flops=cost.flops, bytes=cost.bytes,
                            flops_known=cost.flops_known, bytes_known=cost.bytes_known,
                        )  # fmt: skip
                    entry.seconds += op.seconds * share
                    # Different groups of one key come from the same bursts: add the errors.
                    entry.variance = (entry.variance**0.5 + op.stderr * share) ** 2
                    entry.calls += op.calls * share
        return found


def graph_costs(plan: Plan, fused: Iterable[int]) -> list[tuple[OpKey, int, int]]:
    """(key, FLOPs, bytes) of each kernel of one execution; -1 where no formula is known.

    ``fused``: nodes whose kernel runs the next node too.
    """
    heads = {i for i in fused if 0 <= i < plan.n - 1}
    expected = np.flatnonzero(np.diff(plan.before) > 0).tolist()
    slots = [plan.n + i if i in heads else i for i in expected if i - 1 not in heads]
    if not slots:
        return []
    chosen = np.asarray(slots, dtype=np.int64)
    flops, moved = plan.price(chosen)
    keys = [plan.keys[int(g)] for g in plan.group[chosen]]
    return list(zip(keys, flops.tolist(), moved.tolist(), strict=True))
