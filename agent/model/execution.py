# SPDX-License-Identifier: Apache-2.0
"""Which nodes of a graph ran in one execution, from the kernels that were seen (C25)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .tensors import Accounting, Graph, NodeState


def account(graph: Graph, seen: npt.NDArray[np.integer], fused: npt.NDArray[np.bool_]) -> Accounting:
    """What became of each node, from the kernels seen in one execution of ``graph``.

    ``seen``: node indices, any order; ``fused``: same length, True where this node and the
    next ran as one kernel. Kernels of nodes outside the graph, or of nodes that should not
    run, are counted as unexpected; not so kernels of empty tensors, which the engine
    dispatches when they are fused.
    """
    n = len(graph.nodes)
    indices = seen.astype(np.int64)
    inside = (indices >= 0) & (indices < n)
    state = np.where(graph.expected, NodeState.UNCOVERED, NodeState.SKIPPED).astype(np.uint8)
    state[graph.fault] = NodeState.UNKNOWN
    heads = indices[inside]
    halves = indices[inside & fused] + 1
    halves = halves[halves < n]
    ran = np.zeros(n, dtype=np.bool_)
    ran[heads] = True
    ran[halves] = True
    state[halves] = NodeState.FUSED
    state[heads] = NodeState.EXECUTED
    unexpected = ran & ~graph.expected & ~graph.empty & ~graph.fault
    counts = np.bincount(state, minlength=len(NodeState))
    return Accounting(
        state=state,
        executed=int(counts[NodeState.EXECUTED]),
        fused=int(counts[NodeState.FUSED]),
        skipped=int(counts[NodeState.SKIPPED]),
        uncovered=int(counts[NodeState.UNCOVERED]),
        unexpected=int(np.count_nonzero(unexpected)) + int(np.count_nonzero(~inside)),
    )
