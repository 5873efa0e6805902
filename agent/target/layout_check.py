# SPDX-License-Identifier: Apache-2.0
"""Does a live graph make sense under a claimed layout?

The claim is refused on the first thing that cannot be: a wrong layout yields garbage in almost every field,
and figures made of garbage are worse than none. What is legal but rare (odd strides of views, unnamed
nodes) only counts when it is not rare.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from .layout_types import Layout, LiveGraph

MAX_NODES = 1 << 20
MAX_OPS = 1024
MAX_TYPES = 256
_MAX_NE = 1 << 40
_MAX_BYTES = 1 << 50
_MAX_FLAGS = 1 << 16
_USER_END = 1 << 57
_USER_START = 0x1000
# What lies between two tensors made one after the other: nothing in an array, malloc's or ggml's own
# header (16 and 32 bytes) otherwise; tensor data, where it is there too, is much larger.
_HEADERS = (0, 16, 32)
_SMALL_DATA = 128
_OP_PARAMS = 64
_RARE = 4  # soft conditions may fail for a quarter


@dataclass(frozen=True, slots=True)
class _Node:
    index: int
    address: int
    type: int
    op: int
    ne: tuple[int, ...]
    nb: tuple[int, ...]
    src: tuple[int, ...]
    grad: int
    """The word before the sources, where the layout has one for a gradient."""
    view_src: int
    view_offs: int
    data: int
    buffer: int
    flags: int
    extra: int | None
    """None: memory ended before it."""
    name: bytes


def check_layout(layout: Layout, live: LiveGraph, op_count: int | None, type_count: int | None) -> str | None:
    """None when ``live`` fits ``layout``, else the first reason why it does not.

    ``op_count``, ``type_count``: how many operators and types this build has, None when unknown.
    """
    reason = _check_header(layout, live)
    if reason is not None:
        return reason
    needed = layout.t_name + layout.name_size
    nodes = [
        _decode(layout, index, address, data)
        for index, (address, data) in sorted(live.nodes.items())
        if len(data) >= needed
    ]
    if 2 * len(nodes) < len(live.nodes):
        return f"most nodes could not be read up to the {needed} bytes that this layout needs"
    for node in nodes:
        reason = _impossible(node, op_count or MAX_OPS, type_count or MAX_TYPES)
        if reason is not None:
            return f"node {node.index}: {reason}"
    return _improbable(nodes) or _check_edges(nodes) or _check_distances(layout, live)


def _check_header(layout: Layout, live: LiveGraph) -> str | None:
    end = max(layout.g_n_nodes + 4, layout.g_nodes + 8, 0 if layout.g_uid is None else layout.g_uid + 8)
    if len(live.cgraph) < end:
        return "the graph's header could not be read"
    (n_nodes,) = struct.unpack_from("<i", live.cgraph, layout.g_n_nodes)
    (nodes,) = struct.unpack_from("<Q", live.cgraph, layout.g_nodes)
    if not 0 < n_nodes <= MAX_NODES:
        return f"the graph would have {n_nodes} nodes"
    if not _pointer(nodes) or nodes % 8:
        return f"its list of nodes would be at {nodes:#x}"
    if layout.g_uid is not None:
        (uid,) = struct.unpack_from("<Q", live.cgraph, layout.g_uid)
        if uid >= 1 << 48:
            return f"the graph's number would be {uid:#x}"
    if not live.nodes:
        return "no node of the graph could be read"
    if max(live.nodes) >= n_nodes:
        return f"node {max(live.nodes)} was read of a graph that would have {n_nodes}"
    return None


def _decode(layout: Layout, index: int, address: int, data: bytes) -> _Node:
    def u32(at: int | None) -> int:
        return 0 if at is None else int(struct.unpack_from("<I", data, at)[0])

    def u64(at: int | None) -> int:
        return 0 if at is None else int(struct.unpack_from("<Q", data, at)[0])

    return _Node(
        index=index,
        address=address,
        type=u32(layout.t_type),
        op=u32(layout.t_op),
        ne=struct.unpack_from("<4q", data, layout.t_ne),
        nb=struct.unpack_from("<4Q", data, layout.t_nb),
        src=struct.unpack_from(f"<{layout.n_src}Q", data, layout.t_src),
        grad=u64(layout.t_src - 8) if layout.t_src - 8 >= layout.t_op_params + _OP_PARAMS + 4 else 0,
        view_src=u64(layout.t_view_src),
        view_offs=u64(layout.t_view_offs),
        data=u64(layout.t_data),
        buffer=u64(layout.t_buffer),
        flags=u32(layout.t_flags),
        extra=u64(layout.t_extra) if len(data) >= layout.t_extra + 8 else None,
        name=data[layout.t_name : layout.t_name + layout.name_size],
    )


def _pointer(value: int) -> bool:
    return _USER_START <= value < _USER_END


def _impossible(node: _Node, op_count: int, type_count: int) -> str | None:
    if node.op >= op_count:
        return f"operator {node.op} is not below {op_count}"
    if node.type >= type_count:
        return f"type {node.type} is not below {type_count}"
    elements = 1
    for n in node.ne:
        if not 0 <= n < _MAX_NE:
            return f"a dimension would be {n}"
        elements *= max(n, 1)
    if elements >= _MAX_BYTES:
        return f"it would have {elements} elements"
    if any(b >= _MAX_BYTES for b in node.nb):
        return f"a stride would be {max(node.nb)} bytes"
    if all(node.ne) and min(node.nb) == 0:
        return "a stride would be 0"
    for what, value in (("view_src", node.view_src), *(("a source", s) for s in node.src)):
        if value and (not _pointer(value) or value % 8):
            return f"{what} would be at {value:#x}"
    # A cast is a copy whose second source is itself (ggml_cast): encoders are full of them.
    for what, value in (("view_src", node.view_src), ("its first source", node.src[0])):
        if value == node.address:
            return f"{what} would be the node itself"
    if node.buffer and (not _pointer(node.buffer) or node.buffer % 8):
        return f"its buffer would be at {node.buffer:#x}"
    # Devices and remote servers hand out addresses of their own: not even alignment is certain.
    for what, address in (("data", node.data), ("extra", node.extra or 0)):
        if address and not _pointer(address):
            return f"its {what} would be at {address:#x}"
    if node.view_offs >= _MAX_BYTES:
        return f"its offset in the viewed tensor would be {node.view_offs}"
    if node.flags >= _MAX_FLAGS:
        return f"its flags would be {node.flags:#x}"
    return _bad_name(node.name)


def _bad_name(name: bytes) -> str | None:
    text, end, rest = name.partition(b"\0")
    if not end:
        return "its name would have no end"
    try:
        printable = text.decode().isprintable()
    except UnicodeDecodeError:
        # Names are cut at the array's size, in the middle of a character too.
        printable = len(text) >= len(name) - 4 and text[:-3].decode(errors="replace").isprintable()
    if not printable:
        return "its name would not be printable"
    # Behind the end lie zeros or what an earlier, longer name left.
    if any(byte and not 0x20 <= byte < 0x7F for byte in rest if byte < 0x80):
        return "behind its name would lie something that is no name"
    return None


def _improbable(nodes: Sequence[_Node]) -> str | None:
    def too_many(failing: int) -> bool:
        return failing * _RARE > len(nodes)

    if all(node.op == 0 for node in nodes):
        return "no node would have an operator"
    if too_many(sum(not node.name[0] for node in nodes)):
        return "most nodes would have no name"
    if too_many(sum(not any(node.src) for node in nodes)):
        return "most nodes would have no source"
    # Nobody computes gradients while generating: there the first source of another layout would lie.
    if too_many(sum(bool(node.grad) for node in nodes)):
        return "most nodes would have a gradient"
    odd = [node for node in nodes if all(node.ne) and not _strides_fit(node)]
    if too_many(len(odd)):
        return f"node {odd[0].index}: strides {odd[0].nb} would not go with dimensions {odd[0].ne}"
    if 2 * sum(not all(node.ne) for node in nodes) > len(nodes):
        return "most nodes would be empty"
    if 2 * sum(not node.data for node in nodes) > len(nodes) and len({node.data for node in nodes}) > 1:
        return "most nodes would have no data"
    if too_many(sum(bool(node.view_offs and not node.view_src) for node in nodes)):
        return "most nodes would have an offset in a tensor that they do not view"
    return None


def _strides_fit(node: _Node) -> bool:
    """Contiguous, a row or more apart (view), or permuted: every stride a multiple of an element's size."""
    ne, nb = node.ne, node.nb
    if not 0 < min(nb) <= 4096 or any(b % min(nb) for b in nb):
        return False
    if nb == tuple(sorted(nb)):
        return all(n == 1 or b >= nb[0] for n, b in zip(ne, nb, strict=True)) and nb[3] < _MAX_BYTES
    return True


def _check_edges(nodes: Sequence[_Node]) -> str | None:
    place = {node.address: node.index for node in nodes}
    if len(place) < len(nodes):
        return "two nodes would be at one address"
    edges = 0
    for node in nodes:
        inside = [place[s] for s in node.src if s in place and s != node.address]
        if any(index >= node.index for index in inside):
            return f"node {node.index} would use the result of node {max(inside)}, which is computed later"
        edges += bool(inside)
    if len(nodes) >= 4 and edges * _RARE < len(nodes):
        return "hardly any node would use the result of another"
    return None


def _check_distances(layout: Layout, live: LiveGraph) -> str | None:
    """Tensors cannot overlap; and where most lie equally far apart the distance tells their size."""
    places = sorted(address for address, _ in live.nodes.values())
    distances = [b - a for a, b in pairwise(places)]
    if not distances:
        return None
    least = min(distances)
    if least < layout.t_size:
        return f"tensors lie {least} bytes apart, and this one would have {layout.t_size}"
    usual, times = Counter(distances).most_common(1)[0]
    unlike = usual - layout.t_size not in _HEADERS and usual < layout.t_size + max(_HEADERS) + _SMALL_DATA
    if unlike and times >= 3 and times * _RARE >= len(distances):
        return f"tensors lie {usual} bytes apart, which does not go with a size of {layout.t_size}"
    return None
