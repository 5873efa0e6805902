# SPDX-License-Identifier: Apache-2.0
"""Addresses of sources become indices, and chains of views lead to their base."""

from __future__ import annotations

from collections.abc import Sequence

from .tensors import EMPTY_OPS, Source, Tensor


def link(
    tensors: Sequence[Tensor],
    addresses: Sequence[Sequence[int]],
    leaves: Sequence[Tensor],
    leaf_at: dict[int, int],
) -> list[tuple[Source, ...]]:
    """Sources of every node, with the base of each chain of views.

    One pass: a view's base is known when its own source comes earlier, as the engine
    orders its graphs; a chain that does not (a hostile or a cyclic one) ends there.
    """
    node_at: dict[int, int] = {}
    for index, tensor in enumerate(tensors):
        node_at.setdefault(tensor.addr, index)
    leaf_base = [_leaf_base(place, leaf, leaf_at) for place, leaf in enumerate(leaves)]
    bases: list[tuple[int | None, int | None]] = []
    linked: list[tuple[Source, ...]] = []
    for index, tensor in enumerate(tensors):
        its: list[Source] = []
        for slot, addr in enumerate(addresses[index]):
            if not addr:
                continue
            node = node_at.get(addr)
            leaf = leaf_at.get(addr) if node is None else None
            if node is not None:
                base = bases[node] if node < index else (node, None)
            else:
                base = (None, leaf_base[leaf] if leaf is not None else None)
            its.append(Source(slot, addr, node, leaf, *base))
        linked.append(tuple(its))
        bases.append(_node_base(index, tensor, its, leaf_at))
    return linked


def _leaf_base(place: int, leaf: Tensor, leaf_at: dict[int, int]) -> int:
    return leaf_at.get(leaf.view_src, place) if leaf.view_src else place


def _node_base(
    index: int, tensor: Tensor, sources: Sequence[Source], leaf_at: dict[int, int]
) -> tuple[int | None, int | None]:
    """(base node, base leaf) of a node: itself unless it is a view that computes nothing."""
    if tensor.op not in EMPTY_OPS:
        return index, None
    if sources and (sources[0].base_node is not None or sources[0].base_leaf is not None):
        return sources[0].base_node, sources[0].base_leaf
    leaf = leaf_at.get(tensor.view_src) if tensor.view_src else None
    return (None, leaf) if leaf is not None else (index, None)
