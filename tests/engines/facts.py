# SPDX-License-Identifier: Apache-2.0
"""What the synthetic models must cost, worked out from their hyperparameters alone.

Nothing of the profiler is imported and nothing is read from a running engine: these are the
sums that a person does on paper. One :class:`Kernel` stands for one kernel that runs. The
conventions are the published ones of the project: a multiply-add is two operations, copies and
gathers none; bytes are rows touched, each source read once and the result written once; a fused
RMS_NORM and MUL has nothing in between.

Roles are only given where a weight or the KV cache names them ("" else).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from .models import Spec

F32, F16, I32, I64 = 4, 2, 4, 8
KV_PADDING = 256

# (weights in a block, bytes of a block)
BLOCKS = {"f32": (1, 4), "f16": (1, 2), "q8_0": (32, 34), "q4_0": (32, 18), "q4_K": (256, 144)}


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel: engine's op name, role, weight type, shape of its result, costs."""

    op: str
    role: str
    dtype: str
    ne: tuple[int, ...]
    flops: int
    bytes: int


@dataclass
class Total:
    calls: int = 0
    flops: int = 0
    bytes: int = 0


def matrix_bytes(dtype: str, columns: int, rows: int) -> int:
    """Bytes of a weight matrix as it is stored."""
    per, size = BLOCKS[dtype]
    return columns // per * size * rows


def kv_padded(positions: int) -> int:
    """The KV length that attention runs over: the cells in use, up to a multiple of 256."""
    return max(1, -(-positions // KV_PADDING)) * KV_PADDING


def mul_mat(role: str, dtype: str, inner: int, outer: int, rows: int) -> Kernel:
    """[inner, outer] x [inner, rows]."""
    size = matrix_bytes(dtype, inner, outer) + F32 * (inner + outer) * rows
    return Kernel("MUL_MAT", role, dtype, (outer, rows), 2 * inner * outer * rows, size)


def mul_mat_id(
    spec: Spec, role: str, inner: int, outer: int, rows: int, inputs: int, distinct: int
) -> Kernel:
    """``rows`` tokens times ``experts_used``; ``inputs`` rows of input for each token."""
    used = spec.experts_used
    size = distinct * matrix_bytes(spec.type, inner, outer)
    size += F32 * inner * inputs * rows + I32 * used * rows + F32 * outer * used * rows
    return Kernel("MUL_MAT_ID", role, spec.type, (outer, used, rows), 2 * inner * outer * used * rows, size)


def norm(role: str, width: int, rows: int) -> Kernel:
    """RMS_NORM and the MUL after it, in one kernel."""
    n = width * rows
    return Kernel("RMS_NORM", role, "f32", (width, rows), 4 * n, F32 * (2 * n + width) if n else 0)


def add(width: int, rows: int) -> Kernel:
    n = width * rows
    return Kernel("ADD", "", "f32", (width, rows), n, F32 * 3 * n)


def glu(*shape: int) -> Kernel:
    n = prod(shape)
    return Kernel("GLU", "", "f32", shape, 2 * n, F32 * 3 * n)


def rope(width: int, heads: int, rows: int) -> Kernel:
    n = width * heads * rows
    return Kernel("ROPE", "", "f32", (width, heads, rows), 3 * n, F32 * 2 * n + I32 * rows)


def gather(width: int, rows: int) -> Kernel:
    """GET_ROWS of activations: the rows that are asked for."""
    return Kernel("GET_ROWS", "", "f32", (width, rows), 0, 2 * F32 * width * rows + I32 * rows)


def embed(spec: Spec, tokens: int) -> Kernel:
    size = matrix_bytes(spec.type, spec.embd, tokens) + I32 * tokens + F32 * spec.embd * tokens
    return Kernel("GET_ROWS", "token_embd", spec.type, (spec.embd, tokens), 0, size)


def store(role: str, width: int, tokens: int, cells: int) -> Kernel:
    """SET_ROWS of new keys or values into the F16 cache of ``cells`` rows."""
    size = F32 * width * tokens + I64 * tokens + F16 * width * tokens
    return Kernel("SET_ROWS", role, "f16", (width, cells), 0, size)


def attention(spec: Spec, tokens: int, kv: int) -> Kernel:
    head, h, hk = spec.head, spec.heads, spec.kv_heads
    size = 2 * F32 * head * h * tokens + 2 * F16 * head * hk * kv + F16 * kv * tokens
    return Kernel("FLASH_ATTN_EXT", "", "f32", (head, h, tokens), 2 * h * tokens * kv * 2 * head, size)


def _moe(spec: Spec, rows: int, distinct: int) -> list[Kernel]:
    e, used = spec.experts, spec.experts_used
    n = F32 * used * rows
    return [
        mul_mat("ffn_gate_inp", "f32", spec.embd, e, rows),
        Kernel("SOFT_MAX", "", "f32", (e, rows), 5 * e * rows, 2 * F32 * e * rows),
        Kernel("ARGSORT", "", "i32", (e, rows), 0, (F32 + I32) * e * rows),
        Kernel("GET_ROWS", "", "f32", (1, used, rows), 0, 2 * n + I32 * used * rows),
        Kernel("SUM_ROWS", "", "f32", (1, rows), used * rows, n + F32 * rows),
        Kernel("CLAMP", "", "f32", (1, rows), 0, 2 * F32 * rows),
        Kernel("DIV", "", "f32", (used, rows), used * rows, 2 * n + F32 * rows),
        mul_mat_id(spec, "ffn_gate_exps", spec.embd, spec.ff, rows, 1, distinct),
        mul_mat_id(spec, "ffn_up_exps", spec.embd, spec.ff, rows, 1, distinct),
        glu(spec.ff, used, rows),
        mul_mat_id(spec, "ffn_down_exps", spec.ff, spec.embd, rows, used, distinct),
        Kernel("MUL", "", "f32", (spec.embd, used, rows), spec.embd * used * rows, 2 * spec.embd * n + n),
        *[add(spec.embd, rows)] * (used - 1),
    ]


def _dense(spec: Spec, rows: int) -> list[Kernel]:
    return [
        mul_mat("ffn_gate", spec.type, spec.embd, spec.ff, rows),
        mul_mat("ffn_up", spec.type, spec.embd, spec.ff, rows),
        glu(spec.ff, rows),
        mul_mat("ffn_down", spec.type, spec.ff, spec.embd, rows),
    ]


def llama(
    spec: Spec, tokens: int, rows: int, kv: int, cells: int, distinct: int | None = None
) -> list[Kernel]:
    """Every kernel of one graph of a llama model with flash attention.

    ``tokens`` go in, ``rows`` of them are asked for, attention runs over ``kv`` cells of
    ``cells``. With 0 rows what follows the last attention is empty: the engine leaves it out,
    but for fused norms, whose kernel it calls before it looks at the size.
    ``distinct`` experts in each MoE layer (known for one token: those it uses).
    """
    e, kv_width = spec.embd, spec.kv_heads * spec.head
    out = [embed(spec, tokens)]
    for layer in range(spec.layers):
        out += [
            norm("attn_norm", e, tokens),
            mul_mat("attn_q", spec.type, e, e, tokens),
            mul_mat("attn_k", spec.type, e, kv_width, tokens),
            mul_mat("attn_v", spec.type, e, kv_width, tokens),
            rope(spec.head, spec.heads, tokens),
            rope(spec.head, spec.kv_heads, tokens),
            store("kv_k", kv_width, tokens, cells),
            store("kv_v", kv_width, tokens, cells),
            attention(spec, tokens, kv),
            mul_mat("attn_output", spec.type, e, e, tokens),
        ]
        after = tokens
        if layer == spec.layers - 1:
            if not rows:
                return [*out, norm("ffn_norm", e, 0), norm("output_norm", e, 0)]
            after = rows
            out += [gather(e, rows), gather(e, rows)]
        out += [add(e, after), norm("ffn_norm", e, after)]
        if spec.experts:
            experts = distinct if distinct is not None else spec.experts_used
            out += _moe(spec, after, experts)
        else:
            out += _dense(spec, after)
        out += [add(e, after)]
    return [*out, norm("output_norm", e, rows), mul_mat("output", spec.type, e, spec.vocab, rows)]


def weights_t5(spec: Spec, side: str, tokens: int, rows: int, source: int) -> list[Kernel]:
    """The kernels of a T5 graph that read a weight (attention itself differs by build).

    ``side`` "enc": ``rows`` = ``tokens``. "dec": ``source`` tokens were encoded.
    """
    e, layers = spec.embd, spec.layers if side == "enc" else spec.decoder_layers
    out = [embed(spec, tokens)]
    for layer in range(layers):
        after = rows if layer == layers - 1 else tokens
        out += [norm(f"{side}.attn_norm", e, tokens)]
        out += [mul_mat(f"{side}.attn_{m}", spec.type, e, e, tokens) for m in "qkvo"]
        if side == "dec":
            out += [
                norm("dec.cross_attn_norm", e, tokens),
                mul_mat("dec.cross_attn_q", spec.type, e, e, tokens),
                mul_mat("dec.cross_attn_k", spec.type, e, e, source),
                mul_mat("dec.cross_attn_v", spec.type, e, e, source),
                mul_mat("dec.cross_attn_o", spec.type, e, e, tokens),
            ]
        out += [
            norm(f"{side}.ffn_norm", e, after),
            mul_mat(f"{side}.ffn_gate", spec.type, e, spec.ff, after),
            mul_mat(f"{side}.ffn_up", spec.type, e, spec.ff, after),
            mul_mat(f"{side}.ffn_down", spec.type, spec.ff, e, after),
        ]
    out += [norm(f"{side}.output_norm", e, rows)]
    return out if side == "enc" else [*out, mul_mat("output", spec.type, e, spec.vocab, rows)]


def matrices_bert(spec: Spec, tokens: int) -> list[Kernel]:
    """The matrix products with weights of one BERT-like graph that embeds ``tokens``."""
    e, out = spec.embd, []
    for _ in range(spec.layers):
        projections = ("attn_q", "attn_k", "attn_v", "attn_output")
        out += [mul_mat(role, spec.type, e, e, tokens) for role in projections]
        if spec.arch == "nomic-bert":
            out.append(mul_mat("ffn_gate", spec.type, e, spec.ff, tokens))
        out.append(mul_mat("ffn_up", spec.type, e, spec.ff, tokens))
        out.append(mul_mat("ffn_down", spec.type, spec.ff, e, tokens))
    return out


def totals(kernels: Iterable[Kernel]) -> dict[tuple[str, str], Total]:
    """Sums by (op, role)."""
    sums: dict[tuple[str, str], Total] = defaultdict(Total)
    for kernel in kernels:
        total = sums[kernel.op, kernel.role]
        total.calls += 1
        total.flops += kernel.flops
        total.bytes += kernel.bytes
    return dict(sums)
