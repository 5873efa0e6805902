# SPDX-License-Identifier: Apache-2.0
"""A graph of ggml's kind in a victim's memory, by a layout of our own.

The programs read it as they read an engine's: half of the nodes are views that no kernel
runs for, a ROPE names the positions and a GET_ROWS the output rows. Numbers of operators and
types are ours too, as is every offset: no build of any engine is meant.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

NODES = 256
"""Nodes; every other one is a kernel."""
KERNELS = NODES // 2

_TENSOR, _CGRAPH = 384, 128  # bytes from one to the next
_VIEW, _MATMUL, _ROPE, _GET_ROWS = 1, 2, 3, 4
_F32, _I32 = 0, 26
_COMPUTE = 16

FIELDS: dict[str, int] = {
    "g_n_nodes": 4, "g_nodes": 16, "g_uid": 88,
    "t_type": 0, "t_buffer": 8, "t_ne": 16, "t_nb": 48, "t_op": 80, "t_op_params": 84, "t_flags": 148,
    "t_src": 152, "t_view_src": 232, "t_view_offs": 240, "t_data": 248, "t_name": 256, "t_extra": 320,
    "t_size": 336, "n_src": 10,
    "op_rope": _ROPE, "op_get_rows": _GET_ROWS, "op_mul_mat_id": 0xFFFF, "type_i32": _I32,
}  # fmt: skip
"""``struct layout`` of ``probes/events.h`` but for its state."""


@dataclass(frozen=True, slots=True)
class Graph:
    """Addresses in the victim."""

    known: int
    """A cgraph with a uid, which is recognised by it once it was walked."""
    walked: int
    """The same nodes in a cgraph without a uid: walked at each execution."""
    tensor: int
    """Some node."""
    batch: int
    """Where a call's batch may be read."""


def size() -> int:
    """Bytes that :func:`build` fills."""
    return 2 * _CGRAPH + 64 + 8 * NODES + _TENSOR * (NODES + 3)


def build(base: int) -> tuple[bytes, Graph]:
    """The bytes to put at address ``base`` of the victim, and what lies where."""
    ints = base + 2 * _CGRAPH
    nodes = ints + 64
    first = nodes + 8 * NODES
    weight, positions, rows = (first + _TENSOR * (NODES + i) for i in range(3))
    node = [first + _TENSOR * i for i in range(NODES)]
    content = bytearray(size())

    def put(address: int, data: bytes) -> None:
        content[address - base : address - base + len(data)] = data

    for at, uid in ((base, 1), (base + _CGRAPH, 0)):
        put(at + FIELDS["g_n_nodes"], struct.pack("=I", NODES))
        put(at + FIELDS["g_nodes"], struct.pack("=Q", nodes))
        put(at + FIELDS["g_uid"], struct.pack("=Q", uid))
    put(nodes, struct.pack(f"={NODES}Q", *node))
    put(ints, struct.pack("=ii", 5, 0))  # one position, one output row

    def tensor(at: int, op: int, kind: int, name: str, src: Sequence[int], data: int, ne0: int = 64) -> None:
        put(at + FIELDS["t_type"], struct.pack("=I", kind))
        put(at + FIELDS["t_ne"], struct.pack("=4q", ne0, 1, 1, 1))
        put(at + FIELDS["t_nb"], struct.pack("=4Q", 4, *[4 * ne0] * 3))
        put(at + FIELDS["t_op"], struct.pack("=I", op))
        put(at + FIELDS["t_flags"], struct.pack("=I", _COMPUTE if op else 0))
        put(at + FIELDS["t_src"], struct.pack(f"={len(src)}Q", *src))
        put(at + FIELDS["t_data"], struct.pack("=Q", data))
        put(at + FIELDS["t_name"], name.encode())

    tensor(weight, 0, _F32, "weight", (), ints)
    tensor(positions, 0, _I32, "positions", (), ints, 1)
    tensor(rows, 0, _I32, "rows", (), ints + 4, 1)
    for i, at in enumerate(node):
        before = node[i - 1] if i else weight
        if i == 2:
            tensor(at, _ROPE, _F32, "rope", (before, positions), ints)
        elif i == NODES - 2:
            tensor(at, _GET_ROWS, _F32, "out", (before, rows), ints)
        elif i % 2:
            tensor(at, _VIEW, _F32, f"view-{i}", (before,), ints)
        else:
            tensor(at, _MATMUL, _F32, f"node-{i}", (weight, before), ints)
    return bytes(content), Graph(base, base + _CGRAPH, node[0], ints)
