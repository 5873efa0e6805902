# SPDX-License-Identifier: Apache-2.0
"""Graphs for tests: descriptors as the probe sends them, built node by node.

The record type is read from ``probes/events.h``; operators are numbered in an order that
no engine uses, so that a number leaking into our code is seen.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from profinferd.agent.model.graph import Graph, build_graph

HEADER = Path(__file__).resolve().parents[2] / "probes" / "events.h"
INPUT, OUTPUT, COMPUTE = 1, 2, 16
_C_TYPES = {"__u8": "u1", "__u16": "<u2", "__u32": "<u4", "__u64": "<u8", "__s32": "<i4", "__s64": "<i8"}


def record_dtype(name: str) -> np.dtype[np.void]:
    """The numpy type of a structure of events.h (fixed-size fields without holes)."""
    text = re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.DOTALL)
    constants = {k: int(v) for k, v in re.findall(r"#define (\w+) (\d+)", text.replace("\t", " "))}
    body = re.search(rf"struct {name} {{(.*?)\n}};", text, re.DOTALL)
    assert body, name
    fields: list[tuple[Any, ...]] = []
    for c_type, names in re.findall(r"(\w+) ([^;]+);", body.group(1)):
        for one in names.split(","):
            found = re.fullmatch(r"\s*(\w+)(?:\[(\w+)\])?\s*", one)
            assert found, one
            label, count = found.groups()
            size = constants.get(count, 0) or int(count) if count else None
            if c_type == "char":
                fields.append((label, f"S{size}"))
            else:
                fields.append((label, _C_TYPES[c_type], (size,)) if size else (label, _C_TYPES[c_type]))
    return np.dtype(fields)


NODE_DESC = record_dtype("node_desc")


@dataclass(frozen=True)
class Traits:
    name: str
    block_size: int
    type_size: int


TYPES: list[Traits | None] = [
    Traits("f32", 1, 4), Traits("f16", 1, 2), None, Traits("q8_0", 32, 34), Traits("q4_K", 256, 144),
    Traits("i32", 1, 4), Traits("i64", 1, 8),
]  # fmt: skip
_TYPE_NUMBER = {t.name: i for i, t in enumerate(TYPES) if t is not None}
OPS = [
    "NONE", "VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE", "ZEBRA", "FLASH_ATTN_EXT", "MUL_MAT_ID", "MUL_MAT",
    "ROPE", "GLU", "UNARY", "SET_ROWS", "GET_ROWS", "SOFT_MAX", "RMS_NORM", "NORM", "MUL", "ADD", "SCALE",
    "CPY", "CONT", "ARGSORT", "SUM_ROWS", "SSM_CONV", "SSM_SCAN", "RWKV_WKV6", "RWKV_WKV7",
    "GATED_LINEAR_ATTN", "GATED_DELTA_NET", "CONCAT", "PAD", "ADD_ID", "OUT_PROD", "IM2COL", "CONV_2D",
    "CONV_TRANSPOSE_1D", "SOLVE_TRI", "SET", "ACC", "LIGHTNING_INDEXER", "REPEAT", "FILL",
]  # fmt: skip
UNARY = ["ABS", "SILU"]
GLU = ["REGLU", "GEGLU", "SWIGLU"]


@dataclass
class T:
    """A tensor of the graph being built."""

    addr: int
    op: str
    type: str
    ne: tuple[int, ...]
    name: str | bytes = ""
    flags: int = 0
    params: tuple[int, ...] = ()
    src: tuple[T | None, ...] = ()
    view_src: T | None = None
    data: int = 0
    extra: int = 0
    nb: tuple[int, ...] = ()


@dataclass
class Builder:
    """Adds nodes in the engine's order; shapes follow ggml's rules for each operator."""

    flags: int = COMPUTE
    nodes: list[T] = field(default_factory=list)
    _next: int = 0x7F0000001000

    def tensor(self, op: str, type: str, ne: Sequence[int], **more: Any) -> T:
        self._next += 512
        shape = (*ne, 1, 1, 1)[:4]
        return T(self._next, op, type, shape, data=self._next << 8, **more)

    def leaf(self, name: str, type: str, *ne: int, flags: int = 0, extra: int = 0) -> T:
        return self.tensor("NONE", type, ne, name=name, flags=flags, extra=extra)

    def op(self, op: str, type: str, ne: Sequence[int], *src: T | None, **more: Any) -> T:
        more.setdefault("flags", self.flags)
        node = self.tensor(op, type, ne, src=src, **more)
        self.nodes.append(node)
        return node

    def mul_mat(self, a: T, b: T, name: str = "") -> T:
        return self.op("MUL_MAT", "f32", (a.ne[1], b.ne[1], b.ne[2], b.ne[3]), a, b, name=name)

    def same(self, op: str, a: T, *src: T | None, name: str = "", params: tuple[int, ...] = ()) -> T:
        return self.op(op, a.type, a.ne, a, *src, name=name, params=params)

    def view(self, op: str, a: T, *ne: int, name: str = "") -> T:
        base = a.view_src or a
        return self.op(op, a.type, ne, a, name=name, view_src=base)

    def norm(self, x: T, weight: T, name: str) -> T:
        return self.same("MUL", self.same("RMS_NORM", x), weight, name=name)

    def gather(self, table: T, ids: T, name: str = "") -> T:
        return self.op("GET_ROWS", "f32", (table.ne[0], ids.ne[0]), table, ids, name=name)

    def glu(self, gate: T, up: T, name: str) -> T:
        return self.same("GLU", gate, up, name=name, params=(1,))

    def descs(self) -> npt.NDArray[np.void]:
        """As the probe walks: each node, then its sources that have no operator."""
        rows: list[tuple[Any, ...]] = []
        for index, node in enumerate(self.nodes):
            rows.append(self._row(node, index, 0, 0))
            for slot, source in enumerate(node.src):
                if source is not None and source.op == "NONE":
                    rows.append(self._row(source, index, 1, slot))
        return np.array(rows, dtype=NODE_DESC)

    def _row(self, t: T, index: int, role: int, slot: int) -> tuple[Any, ...]:
        traits = TYPES[_TYPE_NUMBER[t.type]]
        assert traits is not None
        nb = [traits.type_size, t.ne[0] // traits.block_size * traits.type_size]
        nb += [nb[1] * t.ne[1], nb[1] * t.ne[1] * t.ne[2]]
        nb = [stride & (2**64 - 1) for stride in nb]
        src = [s.addr if s is not None else 0 for s in t.src]
        values = {
            "addr": t.addr, "seq": 1, "index": index, "role": role, "slot": slot,
            "type": _TYPE_NUMBER[t.type], "op": OPS.index(t.op), "flags": t.flags, "fault": 0,
            "tgid": 0, "reserved": 0,
            "ne": t.ne, "nb": t.nb or nb, "op_params": [*t.params, *[0] * (16 - len(t.params))],
            "src": [*src, *[0] * (10 - len(src))], "view_src": t.view_src.addr if t.view_src else 0,
            "view_offs": 0, "data": t.data, "buffer": 0x1000, "extra": t.extra,
            "name": t.name if isinstance(t.name, bytes) else t.name.encode(),
        }  # fmt: skip
        assert set(values) == set(NODE_DESC.names or ())
        return tuple(values[n] for n in NODE_DESC.names or ())

    def graph(self, **more: Any) -> Graph:
        built = build_graph(self.descs(), len(self.nodes), OPS, TYPES, unary=UNARY, glu=GLU, **more)
        assert isinstance(built, Graph)
        return built


# A dense decoder with grouped-query attention, small enough to work out by hand:
EMBD, HEADS, KV_HEADS, HEAD, FF, VOCAB = 256, 4, 2, 64, 512, 1000


def decoder(
    tokens: int = 1,
    rows: int = 1,
    n_kv: int = 256,
    layers: int = 2,
    *,
    flash: bool = True,
    tied: bool = False,
    from_embeddings: bool = False,
    flags: int = COMPUTE,
    prefix: str = "",
    positions_name: str = "leaf_6",
) -> Builder:
    """The graph of one decode: rows are chosen in the last layer, after attention."""
    b = Builder(flags=flags)
    embd = b.leaf("token_embd.weight", "q8_0", EMBD, VOCAB)
    ids = b.leaf("inp_tokens", "i32", tokens, flags=INPUT)
    gathered = b.gather(embd, ids, "embd")
    if from_embeddings:
        gathered.flags = 0
    x = b.leaf("inp_embd", "f32", EMBD, tokens, flags=INPUT) if from_embeddings else gathered
    positions = b.leaf(positions_name, "i32", tokens, flags=INPUT)
    cells = b.leaf("leaf_8", "i64", tokens, flags=INPUT)
    mask = b.leaf("leaf_10", "f16", n_kv, tokens, flags=INPUT)
    out_ids = b.leaf("inp_out_ids", "i32", rows, flags=INPUT)
    for i in range(layers):
        blk = f"{prefix}blk.{i}."
        h = b.norm(x, b.leaf(blk + "attn_norm.weight", "f32", EMBD), f"attn_norm-{i}")
        rope = (0, HEAD, 2)
        q = b.mul_mat(b.leaf(blk + "attn_q.weight", "q4_K", EMBD, EMBD), h, f"Qcur-{i}")
        q = b.view("RESHAPE", q, HEAD, HEADS, tokens, name=f"Qcur-{i} (reshaped)")
        q = b.same("ROPE", q, positions, name=f"Qcur-{i}", params=rope)
        k = b.mul_mat(b.leaf(blk + "attn_k.weight", "q4_K", EMBD, HEAD * KV_HEADS), h, f"Kcur-{i}")
        k = b.view("RESHAPE", k, HEAD, KV_HEADS, tokens, name=f"Kcur-{i} (reshaped)")
        k = b.same("ROPE", k, positions, name=f"Kcur-{i}", params=rope)
        v = b.mul_mat(b.leaf(blk + "attn_v.weight", "q4_K", EMBD, HEAD * KV_HEADS), h, f"Vcur-{i}")
        caches = []
        for letter, new in (("k", k), ("v", v)):
            cache = b.leaf(f"cache_{letter}_l{i}", "f16", HEAD * KV_HEADS, 4096)
            flat = b.view("VIEW", new, HEAD * KV_HEADS, tokens, name=f"{letter.upper()}cur-{i} (view)")
            b.op(
                "SET_ROWS",
                "f16",
                cache.ne,
                flat,
                cells,
                cache,
                view_src=cache,
                name=f"cache_{letter}_l{i} (view)",
            )
            seen = b.view("VIEW", cache, HEAD, KV_HEADS, n_kv, name=f"cache_{letter}_l{i} (view)")
            caches.append(
                b.view("PERMUTE", seen, HEAD, n_kv, KV_HEADS, name=f"cache_{letter}_l{i} (view) (permuted)")
            )
        q = b.view("PERMUTE", q, HEAD, tokens, HEADS, name=f"Qcur-{i} (permuted)")
        if flash:
            o = b.op(
                "FLASH_ATTN_EXT",
                "f32",
                (HEAD, HEADS, tokens),
                q,
                caches[0],
                caches[1],
                mask,
                name=f"__fattn__-{i}",
            )
        else:
            kq = b.op("MUL_MAT", "f32", (n_kv, tokens, HEADS), caches[0], q, name=f"kq-{i}")
            kq = b.same("SOFT_MAX", kq, mask, name=f"kq_soft_max-{i}")
            vt = b.view("TRANSPOSE", caches[1], n_kv, HEAD, KV_HEADS)
            vt = b.op("CONT", "f16", (n_kv, HEAD, KV_HEADS), vt, name=f"v_cont-{i}")
            kqv = b.op("MUL_MAT", "f32", (HEAD, tokens, HEADS), vt, kq, name=f"kqv-{i}")
            o = b.view("PERMUTE", kqv, HEAD, HEADS, tokens)
            o = b.op("CONT", "f32", (EMBD, tokens), o)
        o = b.view("RESHAPE", o, EMBD, tokens, name=f"kqv_out-{i}")
        o = b.mul_mat(b.leaf(blk + "attn_output.weight", "q4_K", EMBD, EMBD), o, f"attn_out-{i}")
        if i == layers - 1:
            o, x = b.gather(o, out_ids), b.gather(x, out_ids)
        x = b.same("ADD", o, x, name=f"ffn_inp-{i}")
        h = b.norm(x, b.leaf(blk + "ffn_norm.weight", "f32", EMBD), f"ffn_norm-{i}")
        gate = b.mul_mat(b.leaf(blk + "ffn_gate.weight", "q4_K", EMBD, FF), h, f"ffn_gate-{i}")
        up = b.mul_mat(b.leaf(blk + "ffn_up.weight", "q4_K", EMBD, FF), h, f"ffn_up-{i}")
        h = b.glu(gate, up, f"ffn_geglu-{i}")
        h = b.mul_mat(b.leaf(blk + "ffn_down.weight", "q4_K", FF, EMBD), h, f"ffn_out-{i}")
        x = b.same("ADD", h, x, name=f"l_out-{i}")
    x = b.norm(x, b.leaf(prefix + "output_norm.weight", "f32", EMBD), "result_norm")
    head = embd if tied else b.leaf("output.weight", "q8_0", EMBD, VOCAB)
    b.mul_mat(head, x, "result_output")
    return b
