# SPDX-License-Identifier: Apache-2.0
"""Descriptors of one graph, as the probe sent them, become a :class:`Graph`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from ..digest import blake2b
from . import roles
from .execution import account
from .figures import figures
from .link import link
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
    "EMPTY_OPS",
    "FLAG_COMPUTE",
    "FLAG_INPUT",
    "FLAG_OUTPUT",
    "UNKNOWN",
    "Accounting",
    "Cost",
    "Experts",
    "Graph",
    "Incomplete",
    "Leaf",
    "LeafKind",
    "Node",
    "NodeState",
    "Source",
    "Tensor",
    "TypeTraits",
    "account",
    "assemble",
    "build_graph",
    "clean_name",
    "fields_of",
    "structure",
]

_ND_NODE, _ND_LEAF = 0, 1  # enum node_role of probes/events.h
_MISSING_SHOWN = 64
_WEIGHT_KERNELS = frozenset({"MUL_MAT", "MUL_MAT_ID"})


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
    no harm. ``n_nodes`` is how many nodes the probe looked at (``event.n_nodes``); ``cut``
    says that the engine's graph has more (EF_CUT). ``ops``, ``types``, ``unary`` and
    ``glu`` are the engine's own tables; a number beyond them is named ``op_<n>`` /
    ``type_<n>``. A source without descriptor does not make a graph incomplete: splits
    have sources that another split computed.
    """
    rows = _Rows(descs, _Names(ops, types, unary, glu))
    node_rows = rows.nodes(n_nodes)
    if len(node_rows) < n_nodes:
        return _incomplete(n_nodes, set(node_rows))
    tensors = [rows.tensor(node_rows[i]) for i in range(n_nodes)]
    leaf_rows = rows.leaves()
    leaf_tensors = [rows.tensor(row) for row in leaf_rows.values()]
    leaf_at = {addr: place for place, addr in enumerate(leaf_rows)}
    sources = link(tensors, [rows.src[node_rows[i]] for i in range(n_nodes)], leaf_tensors, leaf_at)

    kinds = [roles.leaf_kind(t.name, t.flags) for t in leaf_tensors]
    leaf_roles = [roles.leaf_role(t.name, k) for t, k in zip(leaf_tensors, kinds, strict=True)]
    leaves = tuple(
        Leaf(*(*fields_of(t), kind, role, layer))
        for t, kind, (role, layer) in zip(leaf_tensors, kinds, leaf_roles, strict=True)
    )
    assigned = roles.assign(tensors, sources, kinds, leaf_roles)
    nodes = tuple(
        _node(i, tensors[i], sources[i], assigned[i], leaves, rows.sub_op(node_rows[i]))
        for i in range(n_nodes)
    )
    return assemble(nodes, leaves, hash=hash, n_nodes=n_nodes, cut=cut)


def clean_name(raw: bytes) -> str:
    """A tensor's name up to its NUL as UTF-8; whatever cannot be printed becomes U+FFFD."""
    text = raw.split(b"\0", 1)[0].decode("utf-8", "replace")
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else "\ufffd" for c in text)


class _Names:
    """Numbers of this build into names: from its own tables, never a neighbour's (C13)."""

    def __init__(
        self,
        ops: Sequence[str],
        types: Sequence[TypeTraits | None] | None,
        unary: Sequence[str],
        glu: Sequence[str],
    ) -> None:
        self.ops, self.types = ops, types or ()
        self.functions = {"UNARY": unary, "GLU": glu}

    def op(self, number: int) -> str:
        return self.ops[number] if number < len(self.ops) else f"op_{number}"

    def type(self, number: int) -> tuple[str, int | None, int | None]:
        traits = self.types[number] if number < len(self.types) else None
        if traits is None:
            return f"type_{number}", None, None
        return traits.name or f"type_{number}", traits.block_size, traits.type_size

    def sub_op(self, op: str, params: Sequence[int]) -> str | None:
        names = self.functions.get(op)
        if names is None or not params:
            return None
        number = params[0]
        return names[number] if 0 <= number < len(names) else f"{op.lower()}_{number}"


class _Rows:
    """The record array as Python lists: converted once, column by column."""

    def __init__(self, descs: npt.NDArray[np.void], names: _Names) -> None:
        self._names = names

        def column(field: str) -> list[Any]:
            values: list[Any] = descs[field].tolist()
            return values

        self.addr, self.role, self.index = column("addr"), column("role"), column("index")
        self._slot, self.fault, self.src = column("slot"), column("fault"), column("src")
        self._ops, self._types, self._flags = column("op"), column("type"), column("flags")
        self._ne, self._nb = column("ne"), column("nb")
        self._params = column("op_params")
        self._rest = [column(f) for f in ("view_src", "view_offs", "data", "buffer", "extra")]
        text = np.ascontiguousarray(descs["name"])
        self._text = text.tobytes()
        self._width = len(self._text) // len(descs) if len(descs) else 0

    def nodes(self, n_nodes: int) -> dict[int, int]:
        """Node index -> row; of duplicates the first that could be read."""
        found: dict[int, int] = {}
        for row, (role, index) in enumerate(zip(self.role, self.index, strict=True)):
            if role == _ND_NODE and index < n_nodes and self._better(found.get(index), row):
                found[index] = row
        return found

    def leaves(self) -> dict[int, int]:
        """Address of a leaf -> row, in the order of first use."""
        found: dict[int, int] = {}
        rows = [row for row, role in enumerate(self.role) if role == _ND_LEAF]
        for row in sorted(rows, key=lambda row: (self.index[row], self._slot[row])):
            addr = self.addr[row]
            if self._better(found.get(addr), row):
                found[addr] = row
        return found

    def _better(self, have: int | None, row: int) -> bool:
        return have is None or bool(self.fault[have] and not self.fault[row])

    def tensor(self, row: int) -> Tensor:
        if self.fault[row]:
            return Tensor(
                addr=self.addr[row],
                name="",
                op=UNKNOWN,
                type=UNKNOWN,
                block_size=None,
                type_size=None,
                ne=(0, 0, 0, 0),
                nb=(0, 0, 0, 0),
                flags=0,
                op_params=(),
                view_src=0,
                view_offs=0,
                data=0,
                buffer=0,
                extra=0,
                fault=True,
            )
        type_name, block_size, type_size = self._names.type(self._types[row])
        view_src, view_offs, data, buffer, extra = (column[row] for column in self._rest)
        start = row * self._width
        return Tensor(
            self.addr[row],
            clean_name(self._text[start : start + self._width]),
            self._names.op(self._ops[row]),
            type_name,
            block_size,
            type_size,
            tuple(self._ne[row]),
            tuple(self._nb[row]),
            self._flags[row],
            tuple(self._params[row]),
            view_src,
            view_offs,
            data,
            buffer,
            extra,
            False,
        )

    def sub_op(self, row: int) -> str | None:
        if self.fault[row]:
            return None
        return self._names.sub_op(self._names.op(self._ops[row]), self._params[row])


def _incomplete(n_nodes: int, present: set[int]) -> Incomplete:
    missing: list[int] = []
    # n_nodes is the target's figure: look only as far as the answer needs.
    for index in range(min(n_nodes, len(present) + _MISSING_SHOWN)):
        if index not in present:
            missing.append(index)
            if len(missing) == _MISSING_SHOWN:
                break
    return Incomplete(n_nodes, n_nodes - len(present), tuple(missing))


# The fields of a tensor, in order: leaves and nodes begin with them. As a tuple, not by name,
# for a big graph has thousands and a new one is read while the target computes.
fields_of: Callable[[Tensor], tuple[Any, ...]] = attrgetter(*(f.name for f in dataclasses.fields(Tensor)))


def _node(
    index: int,
    tensor: Tensor,
    sources: tuple[Source, ...],
    role: roles.NodeRole,
    leaves: Sequence[Leaf],
    sub_op: str | None,
) -> Node:
    weight = leaves[role.weight] if role.weight is not None else None
    repacked = weight is not None and weight.extra != 0 and tensor.op in _WEIGHT_KERNELS
    dtype = weight.type if weight is not None and not weight.fault else tensor.type
    kernel = "repack" if repacked else "native"
    rest = (index, sub_op, sources, dtype, role.role, role.layer, kernel, role.weight)
    return Node(*(*fields_of(tensor), *rest))


def assemble(
    nodes: tuple[Node, ...],
    leaves: tuple[Leaf, ...],
    *,
    hash: int,
    n_nodes: int,
    cut: bool,
    topology: str | None = None,
) -> Graph:
    """The graph of finished nodes and leaves; ``topology`` where it is known already."""
    # Engines before the COMPUTE flag run every node; later ones only those that carry it.
    flagged = any(node.flags & FLAG_COMPUTE for node in nodes)
    empty = np.array([node.elements == 0 for node in nodes], dtype=np.bool_)
    fault = np.array([node.fault for node in nodes], dtype=np.bool_)
    runs = np.array(
        [node.op not in EMPTY_OPS and (not flagged or bool(node.flags & FLAG_COMPUTE)) for node in nodes],
        dtype=np.bool_,
    )
    expected = runs & ~empty & ~fault
    for array in (empty, fault, expected):
        array.setflags(write=False)
    key = figures(nodes, leaves, expected)
    return Graph(
        hash=hash,
        topology=topology or _digest(nodes, leaves),
        n_nodes=n_nodes,
        cut=cut,
        nodes=nodes,
        leaves=leaves,
        expected=expected,
        empty=empty,
        fault=fault,
        has_compute_flag=flagged,
        n_tokens=key.n_tokens,
        rows=key.rows,
        pooled=key.pooled,
        kv_length=key.kv_length,
        has_rope=key.has_rope,
        has_attention=key.has_attention,
        is_k_shift=key.is_k_shift,
        has_output=key.has_output,
        takes_embeddings=key.takes_embeddings,
        writes_kv=key.writes_kv,
        all_experts=key.all_experts,
        unresolved=sum(s.node is None and s.leaf is None for n in nodes for s in n.sources),
        faults=int(np.count_nonzero(fault)),
    )


def structure(graph: Graph) -> str:
    """The topology with dimensions: equal for graphs of the same shapes; 16 hex digits."""
    return _digest(graph.nodes, graph.leaves, shapes=True)


def _digest(nodes: Sequence[Node], leaves: Sequence[Leaf], *, shapes: bool = False) -> str:
    """Hash over operators, types and edges, with or without dimensions; 16 hex digits.

    Names, addresses and parameters stay out: they differ between layers, runs and calls.
    """
    state = blake2b(digest_size=8)
    for node in nodes:
        edges = ",".join(
            f"{s.slot}:n{s.node}" if s.node is not None
            else f"{s.slot}:l{s.leaf}{leaves[s.leaf].type}{leaves[s.leaf].ne if shapes else ''}"
            if s.leaf is not None
            else f"{s.slot}:?"
            for s in node.sources
        )  # fmt: skip
        state.update(f"{node.op};{node.sub_op};{node.type};{node.ne if shapes else ''};{edges}\n".encode())
    return state.hexdigest()
