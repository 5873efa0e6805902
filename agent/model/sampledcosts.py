# SPDX-License-Identifier: Apache-2.0
"""FLOPs and bytes of the graphs whose op seconds are estimated (design D11, D12).

They follow from the shapes of the very graphs whose seconds were attributed, so that their
quotients mean something: what ran waits here until its seconds are.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from .plans import OpKey, Plan
from .totals import MAX_OPS, OTHER_OP

_MAX_PLANS = 16
"""Shapes that wait by themselves: it is known only later which of their nodes are fused."""
_MAX_KINDS = 128


@dataclass(slots=True)
class Cost:
    """Nominal work of one op; a figure counts only while it is known."""

    flops: int = 0
    bytes: int = 0
    flops_known: bool = True
    bytes_known: bool = True

    def add(self, flops: int, moved: int, times: int) -> None:
        """``times`` executions; -1: not known."""
        if flops < 0:
            self.flops_known = False
        else:
            self.flops += flops * times
        if moved < 0:
            self.bytes_known = False
        else:
            self.bytes += moved * times

    def join(self, other: Cost) -> None:
        """Add what another one has."""
        self.flops += other.flops
        self.bytes += other.bytes
        self.flops_known &= other.flops_known
        self.bytes_known &= other.bytes_known


@dataclass(slots=True)
class _Waiting:
    """Of one (topology, phase). ``experts``: by node, (executions, bytes) that were observed."""

    plans: OrderedDict[int, tuple[Plan, int]] = field(default_factory=OrderedDict)
    priced: dict[OpKey, Cost] = field(default_factory=dict)
    experts: dict[int, tuple[int, int]] = field(default_factory=dict)


class SampledCosts:
    """Bounded in every direction: many shapes are priced as they fall out, the kinds of graph
    that were not seen for longest are given up."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[tuple[str, str], _Waiting] = OrderedDict()
        self._fused: OrderedDict[str, frozenset[int]] = OrderedDict()
        self._totals: dict[tuple[OpKey, str], Cost] = {}

    def ran(self, topology: str, phase: str, plan: Plan) -> None:
        """One execution whose seconds will be attributed sooner or later."""
        waiting = self._of(topology, phase)
        _, count = waiting.plans.pop(plan.facts.hash, (plan, 0))
        waiting.plans[plan.facts.hash] = (plan, count + 1)
        if len(waiting.plans) > _MAX_PLANS:
            _, (oldest, count) = waiting.plans.popitem(last=False)
            self._price(waiting, topology, oldest, count)

    def routed(self, topology: str, phase: str, plan: Plan, experts: Mapping[int, int]) -> None:
        """Distinct experts that the MUL_MAT_IDs of one summed execution used, by node."""
        book = self._of(topology, phase).experts
        for node, used in experts.items():
            moved = plan.expert_bytes(node, used) if node in plan.by_experts else None
            if moved is not None:
                count, before = book.get(node, (0, 0))
                book[node] = (count + 1, before + moved)

    def fuses(self, topology: str, called: npt.NDArray[np.bool_], fused: npt.NDArray[np.bool_]) -> None:
        """Of one reading, by node: ``called``, and ``fused``: its kernel ran the next node too.

        What was not called says nothing: a graph whose probes came or went meanwhile.
        """
        alone = np.flatnonzero(called & ~fused).tolist()
        heads = self._fused.get(topology, frozenset()).difference(alone)
        self._fused[topology] = heads.union(np.flatnonzero(fused).tolist())
        self._fused.move_to_end(topology)
        if len(self._fused) > _MAX_KINDS:
            self._fused.popitem(last=False)

    def commit(self, topology: str, phase: str) -> None:
        """All seconds of this kind of graph were attributed."""
        waiting = self._waiting.get((topology, phase))
        if waiting is None:
            return
        plans, waiting.plans = waiting.plans, OrderedDict()
        for plan, count in plans.values():
            self._price(waiting, topology, plan, count)
        priced, waiting.priced = waiting.priced, {}
        for key, cost in priced.items():
            full = (key, phase)
            if full not in self._totals and len(self._totals) >= MAX_OPS:
                full = (OTHER_OP, phase)
            self._totals.setdefault(full, Cost()).join(cost)

    def total(self, key: OpKey, phase: str) -> Cost | None:
        """Of the attributed executions; None before the first."""
        return self._totals.get((key, phase))

    def _of(self, topology: str, phase: str) -> _Waiting:
        waiting = self._waiting.get((topology, phase))
        if waiting is None:
            waiting = self._waiting[topology, phase] = _Waiting()
            if len(self._waiting) > _MAX_KINDS:
                self._waiting.popitem(last=False)
        self._waiting.move_to_end((topology, phase))
        return waiting

    def _price(self, waiting: _Waiting, topology: str, plan: Plan, count: int) -> None:
        for key, flops, moved in graph_costs(plan, self._fused.get(topology, ()), waiting.experts):
            waiting.priced.setdefault(key, Cost()).add(flops, moved, count)


def graph_costs(
    plan: Plan, fused: Iterable[int], experts: Mapping[int, tuple[int, int]]
) -> list[tuple[OpKey, int, int]]:
    """(key, FLOPs, bytes) of each kernel of one execution; -1 where it is not known.

    ``fused``: nodes whose kernel runs the next node too; ``experts``: bytes of MUL_MAT_ID as
    they were observed, (how often, bytes together) by node.
    """
    heads = {i for i in fused if 0 <= i < plan.n - 1}
    expected = np.flatnonzero(np.diff(plan.before) > 0).tolist()
    slots = [plan.n + i if i in heads else i for i in expected if i - 1 not in heads]
    if not slots:
        return []
    chosen = np.asarray(slots, dtype=np.int64)
    flops, moved = plan.price(chosen)
    keys = [plan.keys[int(g)] for g in plan.group[chosen]]
    bytes_of = moved.tolist()
    for place, slot in enumerate(slots):
        if slot in experts:
            times, together = experts[slot]
            bytes_of[place] = round(together / times)
    return list(zip(keys, flops.tolist(), bytes_of, strict=True))
