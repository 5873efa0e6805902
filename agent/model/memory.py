# SPDX-License-Identifier: Apache-2.0
"""What a model takes of memory, from the tensors that its graphs use.

A tensor is counted once however many graphs use it, by where its data lies. Sizes follow from
shapes and types; padding that a kernel's own arrangement adds is not known and not in here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .tensors import EMPTY_OPS, Graph, Leaf, LeafKind

_MAX_TENSORS = 1 << 18


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights of one layer (None: outside), role and type. ``bytes`` of ``tensors``.

    ``repacked``: rearranged into anonymous memory for special kernels; the file's copy is
    unused then.
    """

    layer: int | None
    role: str
    dtype: str
    repacked: bool
    bytes: int
    tensors: int


@dataclass(frozen=True, slots=True)
class Cache:
    """KV and recurrent state as allocated. ``positions``: rows of one K cache, None without."""

    bytes: int
    layers: int
    k_type: str | None
    v_type: str | None
    positions: int | None
    used_positions: int | None


@dataclass(frozen=True, slots=True)
class Memory:
    """All sizes in bytes; None is absent.

    ``unsized``: weights whose type's size is not known. ``scratch``: from the lowest to the
    highest address of what nodes compute, of the graph that needs most: its intermediate
    results, which reuse each other's room. ``inputs``: of the graph that has most.
    """

    weights: tuple[Weights, ...]
    unsized: int
    cache: Cache | None
    scratch: int | None
    inputs: int

    @property
    def weight_bytes(self) -> int | None:
        """All weights; None when no graph with weights is known."""
        return sum(w.bytes for w in self.weights) if self.weights else None

    @property
    def repacked_bytes(self) -> int:
        """Those that were rearranged."""
        return sum(w.bytes for w in self.weights if w.repacked)


def of_graphs(graphs: Iterable[Graph]) -> Memory:
    """The memory that some graphs of one process use."""
    weights: dict[tuple[int, str, str], Leaf] = {}
    caches: dict[tuple[int, str], Leaf] = {}
    scratch: int | None = None
    inputs = 0
    used: int | None = None
    for graph in graphs:
        own = 0
        for leaf in graph.leaves:
            if leaf.fault:
                continue
            if leaf.kind is LeafKind.WEIGHT and len(weights) < _MAX_TENSORS:
                # A weight that two nodes name, or a tied LM head, is one tensor in one place.
                weights.setdefault(_place(leaf), leaf)
            elif leaf.kind is LeafKind.CACHE and len(caches) < _MAX_TENSORS:
                _keep_whole(caches, leaf)
            elif leaf.kind is LeafKind.INPUT:
                own += leaf.nbytes or 0
        inputs = max(inputs, own)
        extent = _extent(graph)
        if extent is not None:
            scratch = max(scratch or 0, extent)
        if graph.kv_length is not None:
            used = max(used or 0, graph.kv_length)
    rows: dict[tuple[int, str, str, bool], list[int]] = {}
    unsized = 0
    for leaf in weights.values():
        size = leaf.nbytes
        if size is None:
            unsized += 1
            continue
        layer = -1 if leaf.layer is None else leaf.layer
        row = rows.setdefault((layer, leaf.role, leaf.type, leaf.extra != 0), [0, 0])
        row[0] += size
        row[1] += 1
    return Memory(
        tuple(
            Weights(None if layer < 0 else layer, role, dtype, repacked, size, tensors)
            for (layer, role, dtype, repacked), (size, tensors) in sorted(rows.items())
        ),
        unsized,
        _cache(list(caches.values()), used),
        scratch,
        inputs,
    )


def _place(leaf: Leaf) -> tuple[int, str, str]:
    return (leaf.data, "", "") if leaf.data else (0, leaf.name, leaf.type)


def _keep_whole(caches: dict[tuple[int, str], Leaf], leaf: Leaf) -> None:
    """Of several views that start at one cache, the biggest is the cache itself."""
    key = (leaf.data, leaf.role) if leaf.data else (leaf.addr, leaf.name)
    known = caches.get(key)
    if known is None or (leaf.nbytes or 0) > (known.nbytes or 0):
        caches[key] = leaf


def _extent(graph: Graph) -> int | None:
    """Bytes from the first to the last of what nodes compute into memory of their own."""
    own = [
        node
        for node in graph.nodes
        if node.data and not node.fault and not node.view_src and node.op not in EMPTY_OPS and node.nbytes
    ]
    if not own:
        return None
    # Each buffer (one per backend) is a stretch of its own.
    ends: dict[int, tuple[int, int]] = {}
    for node in own:
        size = node.nbytes or 0
        low, high = ends.get(node.buffer, (node.data, node.data))
        ends[node.buffer] = (min(low, node.data), max(high, node.data + size))
    return sum(high - low for low, high in ends.values())


def _cache(leaves: list[Leaf], used: int | None) -> Cache | None:
    if not leaves:
        return None
    keys = [leaf for leaf in leaves if leaf.role == "kv_k"]
    values = [leaf for leaf in leaves if leaf.role == "kv_v"]
    layers = {leaf.layer for leaf in leaves if leaf.layer is not None}
    return Cache(
        sum(leaf.nbytes or 0 for leaf in leaves),
        len(layers),
        keys[0].type if keys else None,
        values[0].type if values else None,
        max((leaf.ne[1] for leaf in keys), default=None),
        used,
    )
