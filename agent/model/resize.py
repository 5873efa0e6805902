# SPDX-License-Identifier: Apache-2.0
"""A graph that differs from a known one in its dimensions only is made from that.

Every prompt length and every 256 tokens of context are a new graph to the probe, of the same
tensors at the same addresses. Names, roles, links and costs by kind stay as they are: this
takes a fraction of :func:`.graph.build_graph`, and it happens while the target computes, on
small machines on its very cores.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..digest import blake2b
from .graph import assemble, fields_of
from .tensors import Graph, Leaf, Node

_NODE, _LEAF = 0, 1  # enum node_role of probes/events.h
_VARIABLE = frozenset({"seq", "ne", "nb"})
_NE, _NB = 6, 7  # places in the fields of a tensor


@dataclass(frozen=True, slots=True)
class Skeleton:
    """What the descriptors of one graph say.

    ``key``: equal for graphs of equal nodes and leaves but for their shapes. ``ne``:
    int64[nodes + leaves, 4]; ``nb``: uint64, likewise.
    """

    key: bytes
    ne: npt.NDArray[np.int64]
    nb: npt.NDArray[np.uint64]

    def dims(self) -> npt.NDArray[np.int64]:
        """``ne`` and ``nb`` side by side."""
        return np.hstack((self.ne, self.nb.astype(np.int64)))

    @classmethod
    def of(cls, descs: npt.NDArray[np.void], n_nodes: int, *, cut: bool) -> Skeleton | None:
        """That of a complete graph, all of which could be read; None for others."""
        if descs["fault"].any():
            return None
        order = np.lexsort((descs["slot"], descs["index"], descs["role"]))
        rows = descs[order]
        nodes, leaves = rows[:n_nodes], rows[n_nodes:]
        if len(nodes) < n_nodes or not np.array_equal(nodes["index"], np.arange(n_nodes)):
            return None
        if (nodes["role"] != _NODE).any() or (leaves["role"] != _LEAF).any():
            return None
        # A leaf that several nodes use is described with each: the first counts.
        _, first = np.unique(leaves["addr"], return_index=True)
        used = np.concatenate((nodes, leaves[np.sort(first)]))
        state = blake2b(f"{n_nodes} {cut}".encode(), digest_size=16)
        for name in rows.dtype.names or ():
            if name not in _VARIABLE:
                state.update(rows[name].tobytes())
        return cls(state.digest(), used["ne"].copy(), used["nb"].copy())


def resized(graph: Graph, skeleton: Skeleton, hash: int) -> Graph:
    """``graph`` with the shapes of ``skeleton``, whose key its own descriptors had."""
    ne = [(n[0], n[1], n[2], n[3]) for n in skeleton.ne.tolist()]
    nb = [(n[0], n[1], n[2], n[3]) for n in skeleton.nb.tolist()]
    n = len(graph.nodes)
    nodes = tuple(_node(node, ne[i], nb[i]) for i, node in enumerate(graph.nodes))
    leaves = tuple(_leaf(leaf, ne[n + i], nb[n + i]) for i, leaf in enumerate(graph.leaves))
    return assemble(nodes, leaves, hash=hash, n_nodes=graph.n_nodes, cut=graph.cut, topology=graph.topology)


_Four = tuple[int, int, int, int]


def _node(old: Node, ne: _Four, nb: _Four) -> Node:
    if old.ne == ne and old.nb == nb:
        return old
    same = fields_of(old)
    rest = (old.index, old.sub_op, old.sources, old.dtype, old.role, old.layer, old.kernel, old.weight)
    return Node(*(*same[:_NE], ne, nb, *same[_NB + 1 :], *rest))


def _leaf(old: Leaf, ne: _Four, nb: _Four) -> Leaf:
    if old.ne == ne and old.nb == nb:
        return old
    same = fields_of(old)
    return Leaf(*(*same[:_NE], ne, nb, *same[_NB + 1 :], old.kind, old.role, old.layer))
