# SPDX-License-Identifier: Apache-2.0
"""Graphs as the sums need them: for every node what its kernel counts as, and costs.

A :class:`Graph` of a big model takes megabytes, and every prompt length and every 256 tokens
of context are a new one. A :class:`Plan` is what adding up needs of it, some 100 bytes a node;
it outlives its graph.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from . import costs
from .alike import Alike, dims_of
from .graph import Graph

_UNKNOWN = -1
_UNPRICED = -2
_MAX_COST = 1 << 60
_MAX_PARTS = 4096

Ints = npt.NDArray[np.int64]


class OpKey(NamedTuple):
    """What an op counts as; all are bounded labels. ``kernel``: native, repack, fused_mul …"""

    op: str
    dtype: str
    role: str
    kernel: str


@dataclass(frozen=True, slots=True)
class GraphFacts:
    """The figures of a graph, as :class:`Graph` has them."""

    hash: int
    topology: str
    n_nodes: int
    n_tokens: int | None
    rows: int | None
    pooled: int | None
    kv_length: int | None
    has_rope: bool
    has_attention: bool
    is_k_shift: bool
    has_output: bool
    takes_embeddings: bool
    writes_kv: bool
    unresolved: int
    faults: int

    @classmethod
    def of(cls, graph: Graph) -> GraphFacts:
        """Those of a graph."""
        return cls(
            graph.hash, graph.topology, graph.n_nodes, graph.n_tokens, graph.rows, graph.pooled,
            graph.kv_length, graph.has_rope, graph.has_attention, graph.is_k_shift,
            graph.has_output, graph.takes_embeddings, graph.writes_kv, graph.unresolved,
            graph.faults,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Order:
    """What follows from the nodes alone in which an execution's records came (``nodes``, their
    bytes): ``slots`` of the kernels, ``fused`` ones among them, and kernels missing before the
    first (``head``)."""

    nodes: bytes
    slots: Ints
    fused: int
    head: int


@dataclass(slots=True)
class Plan:
    """One graph, prepared for adding up.

    ``before[i]`` is how many nodes before node i must run a kernel. Slot i is node i alone,
    slot n + i is node i fused with the next; ``group`` names each slot's key. ``graph`` is
    None once it was released.
    """

    graph: Graph | None
    facts: GraphFacts
    n: int
    before: npt.NDArray[np.int32]
    keys: list[OpKey]
    group: npt.NDArray[np.int32]
    by_experts: frozenset[int]
    alike: Alike
    _same: npt.NDArray[np.int32]
    _flops: Ints
    _bytes: Ints
    _pairs: dict[tuple[int, int, int], int] = field(default_factory=dict)
    _experts: dict[tuple[int, int], int] = field(default_factory=dict)
    order: Order | None = None
    """In which kernels last ran, if none was missing between two: nearly always the same."""

    @classmethod
    def of(cls, graph: Graph, names: dict[OpKey, OpKey]) -> Plan:
        """The plan of a graph; costs are worked out when a kernel was first seen.

        ``names`` lets all plans share their keys.
        """
        n = len(graph.nodes)
        keys: dict[OpKey, int] = {}
        group = np.zeros(2 * n, dtype=np.int32)
        for i, node in enumerate(graph.nodes):
            key = OpKey(node.op, node.dtype, node.role, node.kernel)
            group[i] = keys.setdefault(names.setdefault(key, key), len(keys))
            if i + 1 < n:
                key = key._replace(kernel=f"fused_{graph.nodes[i + 1].op.lower()}")
                group[n + i] = keys.setdefault(names.setdefault(key, key), len(keys))
        routed = frozenset(i for i, node in enumerate(graph.nodes) if node.op == "MUL_MAT_ID")
        alike = Alike.of(graph.nodes, graph.leaves)
        same = alike.representatives(dims_of(graph.nodes, graph.leaves))
        return cls._made(graph, list(keys), group, routed, alike, same)

    @classmethod
    def _made(
        cls,
        graph: Graph,
        keys: list[OpKey],
        group: npt.NDArray[np.int32],
        routed: frozenset[int],
        alike: Alike,
        same: npt.NDArray[np.int32],
    ) -> Plan:
        n = len(graph.nodes)
        before = np.zeros(n + 1, dtype=np.int32)
        np.cumsum(graph.expected, out=before[1:])
        return cls(
            graph, GraphFacts.of(graph), n, before, keys, group, routed, alike, same,
            np.full(2 * n, _UNPRICED, dtype=np.int64), np.full(2 * n, _UNPRICED, dtype=np.int64),
        )  # fmt: skip

    def resized(self, graph: Graph, dims: Ints) -> Plan:
        """The plan of ``graph``, which differs from ours in its dimensions only: ``dims`` as in
        :meth:`Alike.representatives`."""
        same = self.alike.representatives(dims)
        return self._made(graph, self.keys, self.group, self.by_experts, self.alike, same)

    def price(self, slots: Ints) -> tuple[Ints, Ints]:
        """FLOPs and bytes of one execution of each slot; -1 where no formula is known."""
        if self.graph is not None:
            for slot in slots[self._flops[slots] == _UNPRICED].tolist():
                first = self._first(self.graph, slot)
                if self._flops[first] == _UNPRICED:
                    fused, index = divmod(first, self.n)
                    cost = costs.cost(self.graph, index, fused=bool(fused))
                    self._flops[first] = _clamp(cost.flops)
                    self._bytes[first] = _clamp(cost.bytes)
                self._flops[slot], self._bytes[slot] = self._flops[first], self._bytes[first]
        return np.maximum(self._flops[slots], _UNKNOWN), np.maximum(self._bytes[slots], _UNKNOWN)

    def _first(self, graph: Graph, slot: int) -> int:
        """The slot whose kernel costs the same and is priced for all of them."""
        if slot < self.n:
            return int(self._same[slot])
        index = slot - self.n
        if index + 1 >= self.n:
            return slot
        handed = sum(source.base_node == index for source in graph.nodes[index + 1].sources)
        pair = (int(self._same[index]), int(self._same[index + 1]), handed)
        return self._pairs.setdefault(pair, slot)

    def expert_bytes(self, node: int, experts: int) -> int | None:
        """Bytes of MUL_MAT_ID at ``node`` when it used so many distinct experts."""
        known = self._experts.get((node, experts))
        if known is None:
            known = self._expert_bytes(node, experts)
            if len(self._experts) < _MAX_PARTS:
                self._experts[node, experts] = known
        return None if known == _UNKNOWN else known

    def _expert_bytes(self, node: int, experts: int) -> int:
        if self.graph is not None:
            return _clamp(costs.bytes_moved(self.graph, node, experts=experts))
        # Each further expert reads one more matrix of the same size.
        one, two = (self._experts.get((node, count), _UNKNOWN) for count in (1, 2))
        if one == _UNKNOWN or two == _UNKNOWN:
            return _UNKNOWN
        return _clamp(one + (experts - 1) * (two - one))

    def release(self) -> None:
        """Let go of the graph; what may still be asked of it is worked out first."""
        if self.graph is None:
            return
        self.price(np.arange(2 * self.n))
        self._pairs.clear()
        for node in self.by_experts:
            for count in (1, 2):
                self.expert_bytes(node, count)
        self.graph = None


def _clamp(cost: int | None) -> int:
    """Shapes come from the target: an impossible product must not overflow the sums."""
    return _UNKNOWN if cost is None else min(max(cost, 0), _MAX_COST)
