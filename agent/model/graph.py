# SPDX-License-Identifier: Apache-2.0
"""Descriptors of one graph, as the probe sent them, become a :class:`Graph`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .tensors import (
    EMPTY_OPS,
    FLAG_COMPUTE,
    FLAG_INPUT,
    FLAG_OUTPUT,
    UNKNOWN,
    Accounting,
    Cost,
    Experts,
    Graph,
    Incomplete,
    Leaf,
    LeafKind,
    Node,
    NodeState,
    Source,
    Tensor,
    TypeTraits,
)

__all__ = [
    "EMPTY_OPS", "FLAG_COMPUTE", "FLAG_INPUT", "FLAG_OUTPUT", "UNKNOWN",
    "Accounting", "Cost", "Experts", "Graph", "Incomplete", "Leaf", "LeafKind", "Node",
    "NodeState", "Source", "Tensor", "TypeTraits", "account", "build_graph",
]


def build_graph(
    descs: npt.NDArray[np.void],
    n_nodes: int,
    ops: Sequence[str],
    types: Sequence[TypeTraits | None] | None = None,
    *,
    hash: int = 0,
    unary: Sequence[str] = (),
    glu: Sequence[str] = (),
    cut: bool = False,
) -> Graph | Incomplete:
    """The graph of one sequence number, or which nodes are missing.

    ``descs`` has the fields of ``struct node_desc``; order does not matter, duplicates do
    no harm. ``ops``, ``types``, ``unary`` and ``glu`` are the engine's own tables; a number
    beyond them is named ``op_<n>`` / ``type_<n>``. ``cut``: the probe did not look at the
    tail (EF_CUT), so nodes after the last described one are not missing.
    """
    raise NotImplementedError


def account(
    graph: Graph, seen: npt.NDArray[np.integer], fused: npt.NDArray[np.bool_]
) -> Accounting:
    """What became of each node, from the kernels seen in one execution of ``graph``.

    ``seen``: node indices, any order; ``fused``: same length, True where this node and the
    next ran as one kernel. Indices out of range are counted as unexpected.
    """
    raise NotImplementedError
