# SPDX-License-Identifier: Apache-2.0
"""Nodes that cost the same: a model's layers repeat, so a handful of formulas prices a graph.

Two nodes are alike when operator, parameters, types, places and shapes of the node and of its
sources are equal: everything that `flops` and `traffic` look at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .tensors import Leaf, Node, Source

Ints = npt.NDArray[np.int64]

_MAX_SLOTS = 10  # GGML_MAX_SRC
_DIMS = 8  # ne and nb


def _odd(count: int) -> npt.NDArray[np.uint64]:
    """Numbers without pattern (splitmix64), the same in every run; odd, so that multiplying modulo 2^64
    loses nothing. Not numpy.random, which is 5 MiB that nothing else here needs."""
    mask, state, found = (1 << 64) - 1, 2026, []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & mask
        mixed = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & mask
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & mask
        found.append((mixed ^ mixed >> 31) | 1)
    return np.array(found, np.uint64)


_MIX = _odd(_DIMS + _MAX_SLOTS + 2)


@dataclass(frozen=True, slots=True)
class Alike:
    """What of a graph's nodes does not change with its dimensions.

    ``kinds``: int64[n], equal for nodes that are equal but for shapes. ``operands``:
    int64[n, 1 + 10], the node itself and what its slots hold as places among nodes, leaves and
    a last one that stands for none.
    """

    kinds: Ints
    operands: Ints

    @classmethod
    def of(cls, nodes: Sequence[Node], leaves: Sequence[Leaf]) -> Alike:
        """That of a graph; one pass over its nodes."""
        n, none = len(nodes), len(nodes) + len(leaves)
        numbers: dict[object, int] = {}
        kinds = np.zeros(n, dtype=np.int64)
        operands = np.full((n, 1 + _MAX_SLOTS), none, dtype=np.int64)
        for i, node in enumerate(nodes):
            operands[i, 0] = i
            seen: list[object] = [node.op, node.type, node.op_params, node.fault]
            places: list[int] = []
            for source in node.sources:
                place = _place(source, n, none)
                operands[i, 1 + source.slot] = place
                tensor = nodes[place] if place < n else leaves[place - n] if place < none else None
                if tensor is None:
                    seen += (source.slot, None)
                    continue
                # Sources that share their memory are read once (attention with one cache).
                places.append(tensor.data)
                shared = places.index(tensor.data) if tensor.data else None
                seen += (source.slot, tensor.type, tensor.fault, shared)
            kinds[i] = numbers.setdefault(tuple(seen), len(numbers))
        return cls(kinds, operands)

    def representatives(self, dims: Ints) -> npt.NDArray[np.int32]:
        """For every node the first one that costs the same.

        ``dims``: int64[nodes + leaves, 8], ``ne`` and ``nb`` of each. Shapes are compared by
        64-bit hashes: a target that makes two collide spoils its own figures only.
        """
        with np.errstate(over="ignore"):
            shape = np.zeros(len(dims) + 1, dtype=np.uint64)
            shape[:-1] = (dims.astype(np.uint64) * _MIX[:_DIMS]).sum(axis=1, dtype=np.uint64) | np.uint64(1)
            shape ^= shape >> np.uint64(29)
            its = shape[self.operands] * _MIX[_DIMS : _DIMS + 1 + _MAX_SLOTS]
            mixed = its.sum(axis=1, dtype=np.uint64) + self.kinds.astype(np.uint64) * _MIX[-1]
        _, first, back = np.unique(mixed, return_index=True, return_inverse=True)
        return first[back.reshape(-1)].astype(np.int32)


def dims_of(nodes: Sequence[Node], leaves: Sequence[Leaf]) -> Ints:
    """``ne`` and ``nb`` of nodes, then leaves: int64[nodes + leaves, 8]."""
    rows = [(*t.ne, *_signed(t.nb)) for some in (nodes, leaves) for t in some]
    return np.array(rows, dtype=np.int64).reshape(-1, _DIMS)


def _signed(nb: tuple[int, int, int, int]) -> tuple[int, ...]:
    # Strides are unsigned in the target; a hostile one need not fit.
    return tuple((n & 0xFFFFFFFFFFFFFFFF) - ((n & 1 << 63) << 1) for n in nb)


def _place(source: Source, n: int, none: int) -> int:
    if source.node is not None:
        return source.node
    return n + source.leaf if source.leaf is not None else none
