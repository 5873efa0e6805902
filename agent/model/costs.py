# SPDX-License-Identifier: Apache-2.0
"""What a kernel costs in FLOPs and bytes (design D11): formulas in `flops` and `traffic`."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from .flops import flops_of
from .tensors import Cost, Experts, Graph
from .traffic import bytes_of

_NO_EXPERTS: Mapping[int, int] = {}


def flops(graph: Graph, index: int, *, fused: bool = False) -> int | None:
    """FLOPs of the kernel of node ``index``; ``fused``: of this node and the next.

    RMS_NORM alone is 3n, with the MUL after it 4n. None: no formula, or a source unknown.
    """
    own = flops_of(graph, graph.nodes[index])
    if not fused or index + 1 >= len(graph.nodes):
        return own
    other = flops_of(graph, graph.nodes[index + 1])
    return None if own is None or other is None else own + other


def bytes_moved(graph: Graph, index: int, *, fused: bool = False, experts: int | None = None) -> int | None:
    """Bytes read and written by the kernel of node ``index``; ``fused``: with the next.

    A fused pair never stores what the first hands to the second: neither its writing nor
    its reading counts. ``experts``: distinct experts observed, for MUL_MAT_ID.
    """
    own = bytes_of(graph, graph.nodes[index], experts)
    if not fused or index + 1 >= len(graph.nodes):
        return own
    second = graph.nodes[index + 1]
    other = bytes_of(graph, second)
    between = graph.nodes[index].nbytes
    if own is None or other is None or between is None:
        return None
    reads = sum(source.base_node == index for source in second.sources)
    return max(own + other - (1 + reads) * between, 0) if reads else own + other


def cost(graph: Graph, index: int, *, fused: bool = False, experts: int | None = None) -> Cost:
    """FLOPs and bytes of one kernel."""
    return Cost(
        flops(graph, index, fused=fused),
        bytes_moved(graph, index, fused=fused, experts=experts),
    )


def costs(graph: Graph, fused_heads: Collection[int] = (), experts: Experts = _NO_EXPERTS) -> list[Cost]:
    """Cost of every node as it ran: ``fused_heads`` are the nodes that ran with their next.

    The second half of a fused pair costs nothing of its own. Which nodes ran at all is
    for :func:`profinferd.agent.model.execution.account` to say.
    """
    heads = frozenset(fused_heads)
    return [
        Cost(0, 0)
        if index - 1 in heads and index not in heads
        else cost(graph, index, fused=index in heads, experts=experts.get(index))
        for index in range(len(graph.nodes))
    ]
