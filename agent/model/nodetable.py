# SPDX-License-Identifier: Apache-2.0
"""The nodes of one graph as columns: what adding up, listing and drawing need, in little room."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from . import costs
from .tensors import Graph

Ints = npt.NDArray[np.int64]

ABSENT = -1
_MAX_COST = 1 << 60


@dataclass(frozen=True, slots=True, eq=False)
class NodeTable:
    """One entry per node and column.

    ``sub_op`` is "" where there is none, ``layer`` -1. ``expected``: it must run a kernel, alone
    or as the second half of a fused one. ``flops`` and ``bytes`` are of one kernel of that node
    alone, ``fused_flops`` and ``fused_bytes`` of one that runs it with the next; -1: not known.
    """

    name: tuple[str, ...]
    op: tuple[str, ...]
    sub_op: tuple[str, ...]
    dtype: tuple[str, ...]
    role: tuple[str, ...]
    kernel: tuple[str, ...]
    layer: Ints
    expected: npt.NDArray[np.bool_]
    flops: Ints
    bytes: Ints
    fused_flops: Ints
    fused_bytes: Ints

    def __len__(self) -> int:
        return len(self.name)

    def kernel_of(self, node: int, fused: bool) -> str:
        """The kernel's name as the JSON has it: native, repack, fused_mul …"""
        if fused and node + 1 < len(self.op):
            return f"fused_{self.op[node + 1].lower()}"
        return self.kernel[node]

    def before(self) -> npt.NDArray[np.int32]:
        """[n + 1]: how many nodes before each must run a kernel."""
        out = np.zeros(len(self) + 1, dtype=np.int32)
        np.cumsum(self.expected, out=out[1:])
        return out

    @classmethod
    def of(cls, graph: Graph, prices: tuple[Ints, Ints] | None = None) -> NodeTable:
        """The columns of a graph; costs by the formulas of design D11.

        ``prices``: FLOPs and bytes of every slot (see :class:`Plan`), where they are known already.
        """
        nodes, n = graph.nodes, len(graph.nodes)
        if prices is None:
            made = [costs.cost(graph, i, fused=fused) for fused in (False, True) for i in range(n)]
            prices = _column([cost.flops for cost in made]), _column([cost.bytes for cost in made])
        flops, moved = prices
        return cls(
            name=tuple(node.name for node in nodes),
            op=tuple(node.op for node in nodes),
            sub_op=tuple(node.sub_op or "" for node in nodes),
            dtype=tuple(node.dtype for node in nodes),
            role=tuple(node.role for node in nodes),
            kernel=tuple(node.kernel for node in nodes),
            layer=np.array([ABSENT if n.layer is None else n.layer for n in nodes], dtype=np.int64),
            expected=np.array(graph.expected, dtype=np.bool_),
            flops=flops[:n],
            bytes=moved[:n],
            fused_flops=flops[n:],
            fused_bytes=moved[n:],
        )


def _column(values: list[int | None]) -> Ints:
    """Shapes come from the target: an impossible product must not overflow."""
    return np.array(
        [ABSENT if value is None else min(max(value, 0), _MAX_COST) for value in values], dtype=np.int64
    )
