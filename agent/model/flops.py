# SPDX-License-Identifier: Apache-2.0
"""Floating-point operations of one kernel, one function per formula.

A formula counts what the mathematics needs, not what a kernel happens to do: a
multiply-add is 2, a division, root, exponential or activation is 1, copies, comparisons
and conversions are 0. "Source" names where shapes and meaning were read: operators and
shapes in ggml's public header ``ggml.h`` and constructors in ``ggml.c``, the arithmetic
in ``ggml-cpu/ops.cpp``. A formula returns None when a source it needs is not known.
"""

from __future__ import annotations

from collections.abc import Callable

from .tensors import EMPTY_OPS, Graph, Node, Tensor

Formula = Callable[[Graph, Node], int | None]

_VISION_ROPE = 24

#: Move, choose or compare values; none of them computes one.
MOVES = frozenset({
    "DUP", "CPY", "CONT", "GET_ROWS", "SET_ROWS", "SET", "CONCAT", "REPEAT", "PAD",
    "PAD_REFLECT_1D", "ROLL", "FILL", "TRI", "DIAG", "DIAG_MASK_INF", "DIAG_MASK_ZERO",
    "IM2COL", "IM2COL_3D", "WIN_PART", "WIN_UNPART", "GET_REL_POS", "ARGSORT", "TOP_K",
    "ARGMAX", "COUNT_EQUAL", "CLAMP",
})  # fmt: skip


def flops_of(graph: Graph, node: Node) -> int | None:
    """FLOPs of one node run alone; None where no formula is known, never 0 for that."""
    if node.fault:
        return None
    if node.op in EMPTY_OPS or node.elements == 0 or node.op in MOVES:
        return 0
    formula = FORMULAS.get(node.op)
    return formula(graph, node) if formula is not None else None


def known(graph: Graph, node: Node, slot: int) -> Tensor | None:
    """The tensor in a source slot, if there is one and it could be read."""
    tensor = graph.operand(node, slot)
    return None if tensor is None or tensor.fault else tensor


def _dim(tensor: Tensor, axis: int) -> int:
    return max(tensor.ne[axis], 0)


def _param(node: Node, word: int) -> int:
    return node.op_params[word] if word < len(node.op_params) else 0


def mul_mat(graph: Graph, node: Node) -> int | None:
    """Each output element is a dot product over ne0 of the first source: 2 ne00 n.

    Source: ``ggml_mul_mat``, ``ggml_mul_mat_id`` (result shapes); the same count for the
    experts' form, whose result has one row per token and chosen expert.
    """
    first = known(graph, node, 0)
    return None if first is None else 2 * _dim(first, 0) * node.elements


def out_prod(graph: Graph, node: Node) -> int | None:
    """Each output element is a sum over ne1 of the first source: 2 ne01 n.

    Source: ``ggml_out_prod``.
    """
    first = known(graph, node, 0)
    return None if first is None else 2 * _dim(first, 1) * node.elements


def flash_attn(graph: Graph, node: Node) -> int | None:
    """Scores and weighted values over the whole padded KV length, mask or not.

    Per head, query and KV position a dot product of length dk and an addition of dv
    products: 2 h nq n_kv (dk + dv), times ne3 streams. The soft-max is left out, as in
    the engine's own benchmark of this operator.
    Source: ``ggml_flash_attn_ext``: q [dk, nq, h, s], k [dk, n_kv, h_kv, s], v [dv, ...].
    """
    q, k, v = (known(graph, node, slot) for slot in range(3))
    if q is None or k is None or v is None:
        return None
    queries = _dim(q, 1) * _dim(q, 2) * _dim(q, 3)
    return 2 * queries * _dim(k, 1) * (_dim(k, 0) + _dim(v, 0))


def elementwise(graph: Graph, node: Node) -> int | None:
    """One operation per output element, broadcast or not: n. By convention for activations.

    Source: ``ggml_add``, ``ggml_mul``, ..., ``ggml_unary``.
    """
    return node.elements


def glu(graph: Graph, node: Node) -> int | None:
    """An activation and a product per output element: 2n, by convention.

    Source: ``ggml_glu`` (one source is split in two halves, or two sources).
    """
    return 2 * node.elements


def scale(graph: Graph, node: Node) -> int | None:
    """A product per element, and an addition if there is a bias: n or 2n.

    Source: ``ggml_scale_bias``: parameters are scale and bias as float bits.
    """
    return node.elements * (2 if _param(node, 1) else 1)


def rms_norm(graph: Graph, node: Node) -> int | None:
    """Square, sum and scale each element: 3n; per-row division and root are left out.

    Source: ``ggml_rms_norm``, ``ggml_l2_norm``. Fused with the MUL after it: 4n.
    """
    return 3 * node.elements


def norm(graph: Graph, node: Node) -> int | None:
    """Sum, subtract the mean, square, sum, scale: 5n; per-row operations left out.

    Source: ``ggml_norm``, ``ggml_group_norm``.
    """
    return 5 * node.elements


def soft_max(graph: Graph, node: Node) -> int | None:
    """Scale, mask or maximum, subtract and exponentiate, sum, divide: 5n by convention.

    Source: ``ggml_soft_max_ext``.
    """
    return 5 * node.elements


def rope(graph: Graph, node: Node) -> int | None:
    """Two products and an addition for each rotated element: 3 n_rot per row.

    Sines and cosines are made once per position and left out. The vision form rotates
    the whole row.
    Source: ``ggml_rope_ext``: parameters 1 and 2 are n_rot and mode.
    """
    rotated = min(max(_param(node, 1), 0), _dim(node, 0))
    if _param(node, 2) == _VISION_ROPE:
        rotated = _dim(node, 0)
    return 3 * rotated * node.rows


def reduction(graph: Graph, node: Node) -> int | None:
    """One addition per input element. Source: ``ggml_sum_rows``, ``ggml_mean``, ..."""
    first = known(graph, node, 0)
    return None if first is None else first.elements


def accumulate(graph: Graph, node: Node) -> int | None:
    """One addition per element of the second source. Source: ``ggml_acc``."""
    second = known(graph, node, 1)
    return None if second is None else second.elements


def ssm_conv(graph: Graph, node: Node) -> int | None:
    """A dot product of length d_conv per output element: 2 d_conv n.

    Source: ``ggml_ssm_conv``: the second source is [d_conv, d_inner].
    """
    kernel = known(graph, node, 1)
    return None if kernel is None else 2 * _dim(kernel, 0) * node.elements


def ssm_scan(graph: Graph, node: Node) -> int | None:
    """5 per state element and token, by convention: 5 d_state nelem(x).

    Decay the state (1), add the input (2), read the output (2); softplus and the
    exponential of the decay are left out.
    Source: ``ggml_ssm_scan``: s [d_state, head_dim, n_head, ...], x [head_dim, n_head, ...].
    """
    state, x = known(graph, node, 0), known(graph, node, 1)
    return None if state is None or x is None else 5 * _dim(state, 0) * x.elements


def _recurrence(per_element: int, slot: int) -> Formula:
    """``per_element`` operations on each of the S x S state elements, per token and head."""

    def formula(graph: Graph, node: Node) -> int | None:
        value = known(graph, node, slot)
        return None if value is None else per_element * _dim(value, 0) * value.elements

    return formula


rwkv_wkv6 = _recurrence(7, 0)
rwkv_wkv6.__doc__ = """Outer product (1), bonus (2), output (2), decay and add (2): 7 S nelem(k).

Source: ``ggml_rwkv_wkv6``: k [S, H, T]; by convention, the state update is a matrix S x S.
"""

rwkv_wkv7 = _recurrence(9, 2)
rwkv_wkv7.__doc__ = """State times a (2), update from w, k v and b (5), output (2): 9 S nelem(k).

Source: ``ggml_rwkv_wkv7``: k [S, H, T] is the third source.
"""

gated_linear_attn = _recurrence(5, 0)
gated_linear_attn.__doc__ = """Outer product (1), gate and add (2), output (2): 5 S nelem(k).

Source: ``ggml_gated_linear_attn``: k [S, H, T].
"""

gated_delta_net = _recurrence(7, 2)
gated_delta_net.__doc__ = """Decay (1), state times k (2), rank-1 update (2), output (2): 7 S nelem(v).

Source: ``ggml_gated_delta_net``: v [S, H, T, sequences] is the third source.
"""


def solve_tri(graph: Graph, node: Node) -> int | None:
    """Forward substitution: ne0 of the triangle operations per output element.

    Row i of n takes i multiply-adds per column, in sum n^2 for a column of n elements.
    Source: ``ggml_solve_tri``.
    """
    triangle = known(graph, node, 0)
    return None if triangle is None else _dim(triangle, 0) * node.elements


def lightning_indexer(graph: Graph, node: Node) -> int | None:
    """Per head a dot product of length d, weighted and summed: 2 (d + 1) h n.

    Source: ``ggml_lightning_indexer``: q [d, h, tokens, streams].
    """
    q = known(graph, node, 0)
    return None if q is None else 2 * (_dim(q, 0) + 1) * _dim(q, 1) * node.elements


def conv_2d(graph: Graph, node: Node) -> int | None:
    """A dot product over width, height and channels of the kernel: 2 KW KH IC n.

    Source: ``ggml_conv_2d_direct``: kernel [KW, KH, IC, OC].
    """
    kernel = known(graph, node, 0)
    if kernel is None:
        return None
    return 2 * _dim(kernel, 0) * _dim(kernel, 1) * _dim(kernel, 2) * node.elements


def conv_2d_dw(graph: Graph, node: Node) -> int | None:
    """As conv_2d with one channel per kernel: 2 KW KH n. Source: ``ggml_conv_2d_dw_direct``."""
    kernel = known(graph, node, 0)
    return None if kernel is None else 2 * _dim(kernel, 0) * _dim(kernel, 1) * node.elements


def conv_transpose(graph: Graph, node: Node) -> int | None:
    """Every input element times all of the kernel that belongs to its channel.

    1d: kernel [K, OC, IC], 2d: [KW, KH, OC, IC]; input elements times kernel elements
    without IC, times 2.
    Source: ``ggml_conv_transpose_1d``, ``ggml_conv_transpose_2d_p0``.
    """
    kernel, data = known(graph, node, 0), known(graph, node, 1)
    if kernel is None or data is None:
        return None
    size = _dim(kernel, 0) * _dim(kernel, 1)
    if node.op == "CONV_TRANSPOSE_2D":
        size *= _dim(kernel, 2)
    return 2 * size * data.elements


FORMULAS: dict[str, Formula] = {
    "MUL_MAT": mul_mat, "MUL_MAT_ID": mul_mat, "OUT_PROD": out_prod,
    "FLASH_ATTN_EXT": flash_attn, "SOFT_MAX": soft_max, "ROPE": rope, "ROPE_BACK": rope,
    "RMS_NORM": rms_norm, "L2_NORM": rms_norm, "NORM": norm, "GROUP_NORM": norm,
    "GLU": glu, "SCALE": scale, "ACC": accumulate,
    "SUM": reduction, "SUM_ROWS": reduction, "MEAN": reduction, "CUMSUM": reduction,
    "SSM_CONV": ssm_conv, "SSM_SCAN": ssm_scan, "RWKV_WKV6": rwkv_wkv6,
    "RWKV_WKV7": rwkv_wkv7, "GATED_LINEAR_ATTN": gated_linear_attn,
    "GATED_DELTA_NET": gated_delta_net, "SOLVE_TRI": solve_tri,
    "LIGHTNING_INDEXER": lightning_indexer, "CONV_2D": conv_2d, "CONV_2D_DW": conv_2d_dw,
    "CONV_TRANSPOSE_1D": conv_transpose, "CONV_TRANSPOSE_2D": conv_transpose,
    **dict.fromkeys(
        ("ADD", "ADD1", "ADD_ID", "SUB", "MUL", "DIV", "SQR", "SQRT", "LOG", "SIN", "COS",
         "UNARY", "LEAKY_RELU"), elementwise,
    ),
}  # fmt: skip
