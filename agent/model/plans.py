# SPDX-License-Identifier: Apache-2.0
"""Graphs as the sums need them: for every node what its kernel counts as, and costs.

A :class:`Graph` is a rich object; a :class:`Plan` adds small arrays to it. Both live in a
bounded cache, since every prompt length and every 256 tokens of context are new graphs.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from . import costs
from .graph import Graph, Incomplete, TypeTraits, build_graph
from .records import Records

_UNKNOWN = -1
_MAX_COST = 1 << 60
_MAX_PARTS = 4096
_MAX_TRIES = 3


class OpKey(NamedTuple):
    """What an op counts as; all are bounded labels. ``kernel``: native, repack, fused_mul …"""

    op: str
    dtype: str
    role: str
    kernel: str


@dataclass(slots=True)
class Plan:
    """One graph, prepared for adding up.

    ``before[i]`` is how many nodes before node i must run a kernel. Slot i is node i alone,
    slot n + i is node i fused with the next; ``group`` names each slot's key.
    """

    graph: Graph
    n: int
    before: npt.NDArray[np.int64]
    keys: list[OpKey]
    group: npt.NDArray[np.int32]
    by_experts: frozenset[int]
    _flops: npt.NDArray[np.int64]
    _bytes: npt.NDArray[np.int64]
    _priced: npt.NDArray[np.bool_]
    _experts: dict[tuple[int, int], int] = field(default_factory=dict)

    @classmethod
    def of(cls, graph: Graph) -> Plan:
        """The plan of a graph; costs are worked out when a kernel was first seen."""
        n = len(graph.nodes)
        before = np.zeros(n + 1, dtype=np.int64)
        np.cumsum(graph.expected, out=before[1:])
        keys: dict[OpKey, int] = {}
        group = np.zeros(2 * n, dtype=np.int32)
        for i, node in enumerate(graph.nodes):
            key = OpKey(node.op, node.dtype, node.role, node.kernel)
            group[i] = keys.setdefault(key, len(keys))
            if i + 1 < n:
                key = key._replace(kernel=f"fused_{graph.nodes[i + 1].op.lower()}")
                group[n + i] = keys.setdefault(key, len(keys))
        routed = frozenset(i for i, node in enumerate(graph.nodes) if node.op == "MUL_MAT_ID")
        return cls(
            graph, n, before, list(keys), group, routed,
            np.full(2 * n, _UNKNOWN, dtype=np.int64),
            np.full(2 * n, _UNKNOWN, dtype=np.int64),
            np.zeros(2 * n, dtype=np.bool_),
        )  # fmt: skip

    def price(
        self, slots: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """FLOPs and bytes of one execution of each slot; -1 where no formula is known."""
        for slot in slots[~self._priced[slots]].tolist():
            fused, index = divmod(slot, self.n)
            cost = costs.cost(self.graph, index, fused=bool(fused))
            self._flops[slot] = _clamp(cost.flops)
            self._bytes[slot] = _clamp(cost.bytes)
            self._priced[slot] = True
        return self._flops[slots], self._bytes[slots]

    def expert_bytes(self, node: int, experts: int) -> int | None:
        """Bytes of MUL_MAT_ID at ``node`` when it used so many distinct experts."""
        key = (node, experts)
        known = self._experts.get(key)
        if known is None:
            known = _clamp(costs.bytes_moved(self.graph, node, experts=experts))
            if len(self._experts) < _MAX_PARTS:
                self._experts[key] = known
        return None if known == _UNKNOWN else known


def _clamp(cost: int | None) -> int:
    """Shapes come from the target: an impossible product must not overflow the sums."""
    return _UNKNOWN if cost is None else min(max(cost, 0), _MAX_COST)


@dataclass(slots=True)
class _Tables:
    ops: Sequence[str]
    types: Sequence[TypeTraits | None] | None
    unary: Sequence[str]
    glu: Sequence[str]


class PlanCache:
    """Plans by (tgid, hash), least recently used first; and the descriptors on their way."""

    def __init__(
        self,
        ops: Sequence[str],
        types: Sequence[TypeTraits | None] | None,
        unary: Sequence[str],
        glu: Sequence[str],
        limit: int,
    ) -> None:
        self._tables = _Tables(ops, types, unary, glu)
        self._limit = max(limit, 1)
        self._plans: OrderedDict[tuple[int, int], Plan] = OrderedDict()
        self._parts: OrderedDict[int, list[Records]] = OrderedDict()
        self._held = 0
        self._tries: OrderedDict[tuple[int, int], int] = OrderedDict()
        self._asked: OrderedDict[tuple[int, int], None] = OrderedDict()
        self.confirmed: list[tuple[int, int]] = []
        self.resend: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self._plans)

    def get(self, tgid: int, hash: int) -> Plan | None:
        """The plan of a hash, if it is known and still remembered."""
        plan = self._plans.get((tgid, hash))
        if plan is not None:
            self._plans.move_to_end((tgid, hash))
        return plan

    def plans(self) -> list[tuple[int, Plan]]:
        """(tgid, plan) of all remembered ones."""
        return [(tgid, plan) for (tgid, _), plan in self._plans.items()]

    def take(self, descs: Records) -> None:
        """Descriptors as they arrive; those that no graph asks for fall out again."""
        if not len(descs):
            return
        for seq, part in group_by_seq(descs):
            # A copy: the slice would keep the whole drained array alive.
            self._parts.setdefault(seq, []).append(part.copy())
            self._held += len(part)
        while self._parts and (self._held > 16 * _MAX_PARTS or len(self._parts) > 256):
            _, old = self._parts.popitem(last=False)
            self._held -= sum(len(part) for part in old)

    def build(self, tgid: int, hash: int, seq: int, n_nodes: int, *, cut: bool) -> bool:
        """Make the plan of a graph whose descriptors were sent as ``seq``; True if it is new.

        What is incomplete is asked for again; so is, a few times, a graph with nodes whose
        memory could not be read (case C10): it is used as it is meanwhile.
        """
        parts = self._parts.pop(seq, [])
        self._held -= sum(len(part) for part in parts)
        key = (tgid, hash)
        if not parts:
            self._again(key)
            return False
        graph = build_graph(
            np.concatenate(parts), n_nodes, self._tables.ops, self._tables.types,
            hash=hash, unary=self._tables.unary, glu=self._tables.glu, cut=cut,
        )  # fmt: skip
        if isinstance(graph, Incomplete):
            self._again(key)
            return False
        if not graph.faults or not self._again(key):
            self.confirmed.append(key)
            self._tries.pop(key, None)
        self._asked.pop(key, None)
        old = self._plans.get(key)
        if old is not None and old.graph.faults <= graph.faults:
            self._plans.move_to_end(key)
            return False
        self._plans[key] = Plan.of(graph)
        self._plans.move_to_end(key)
        return True

    def evict(self) -> list[tuple[tuple[int, int], Plan]]:
        """What no longer fits; the caller folds its sums."""
        gone = []
        while len(self._plans) > self._limit:
            gone.append(self._plans.popitem(last=False))
        return gone

    def want(self, tgid: int, hash: int) -> None:
        """The kernel thinks that we know this graph, and we do not: once per loss."""
        key = (tgid, hash)
        if key not in self._asked:
            self._asked[key] = None
            _bound(self._asked)
            self.resend.append(key)

    def _again(self, key: tuple[int, int]) -> bool:
        tries = self._tries.get(key, 0) + 1
        self._tries[key] = tries
        _bound(self._tries)
        if tries <= _MAX_TRIES:
            self.resend.append(key)
            return True
        return False


def _bound(book: OrderedDict[tuple[int, int], int] | OrderedDict[tuple[int, int], None]) -> None:
    while len(book) > _MAX_PARTS:
        book.popitem(last=False)


def group_by_seq(records: Records) -> list[tuple[int, Records]]:
    """(seq, records of it in arrival order): slices of ``records`` where it is in order."""
    seq = records["seq"]
    if len(records) > 1 and bool((seq[1:] < seq[:-1]).any()):
        order = np.argsort(seq, kind="stable")
        records = records[order]
        seq = records["seq"]
    cuts = np.flatnonzero(seq[1:] != seq[:-1]) + 1
    edges = [0, *cuts.tolist(), len(records)]
    return [
        (int(seq[low]), records[low:high])
        for low, high in itertools.pairwise(edges)
        if low < high
    ]
