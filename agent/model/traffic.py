# SPDX-License-Identifier: Apache-2.0
"""Bytes that one kernel must read and write, one function per formula.

Rows *touched*, not tensors named (design D11): every source is read once however often it
is broadcast, the result is written once, in place or not. What caches save or scratch
buffers add is not in here. "Source" as in :mod:`.flops`. None: a shape or a type that the
formula needs is not known.
"""

from __future__ import annotations

from collections.abc import Callable

from .flops import known
from .tensors import EMPTY_OPS, Graph, Node, Tensor

Formula = Callable[[Graph, Node, int | None], int | None]


def bytes_of(graph: Graph, node: Node, experts: int | None = None) -> int | None:
    """Bytes of one node run alone; None where no formula is known, never 0 for that.

    ``experts``: distinct experts that a MUL_MAT_ID used, None if not observed.
    """
    if node.fault:
        return None
    if node.op in EMPTY_OPS or node.elements == 0:
        return 0
    formula = FORMULAS.get(node.op)
    return formula(graph, node, experts) if formula is not None else None


def _sum(*parts: int | None) -> int | None:
    total = 0
    for part in parts:
        if part is None:
            return None
        total += part
    return total


def _whole(graph: Graph, node: Node, *slots: int) -> int | None:
    """Bytes of the tensors in these slots; a slot that the node leaves empty is 0."""
    used = {source.slot for source in node.sources}
    total: int | None = 0
    for slot in slots:
        if slot in used:
            tensor = known(graph, node, slot)
            total = _sum(total, tensor.nbytes if tensor is not None else None)
    return total


def _times(count: int, size: int | None) -> int | None:
    return None if size is None else count * size


def stream(graph: Graph, node: Node, experts: int | None) -> int | None:
    """All sources and the result, each once: dense and elementwise operators.

    MUL_MAT over a cached K or V reads the rows of its view, once per KV head.
    Source: ``ggml_mul_mat``, ``ggml_add``, ``ggml_rms_norm``, ``ggml_rope_ext``, ...
    """
    return _sum(_whole(graph, node, *(source.slot for source in node.sources)), node.nbytes)


def first_and_result(graph: Graph, node: Node, experts: int | None) -> int | None:
    """The first source and the result.

    CPY names its destination as second source only to say where; REPEAT its shape.
    Source: ``ggml_cpy``, ``ggml_cont``, ``ggml_repeat``.
    """
    return _sum(_whole(graph, node, 0), node.nbytes)


def second_and_result(graph: Graph, node: Node, experts: int | None) -> int | None:
    """The second source and the result: im2col takes only the kernel's shape.

    Source: ``ggml_im2col``.
    """
    return _sum(_whole(graph, node, 1), node.nbytes)


def result(graph: Graph, node: Node, experts: int | None) -> int | None:
    """Only the result: values that come from parameters. Source: ``ggml_arange``, ``ggml_fill``."""
    return node.nbytes


def get_rows(graph: Graph, node: Node, experts: int | None) -> int | None:
    """The gathered rows as they are stored, the ids and the result.

    Source: ``ggml_get_rows``: one row of the result per id.
    """
    table = known(graph, node, 0)
    row = table.row_bytes if table is not None else None
    return _sum(_times(node.rows, row), _whole(graph, node, 1), node.nbytes)


def set_rows(graph: Graph, node: Node, experts: int | None) -> int | None:
    """The new rows, the ids, and as many rows written in the type of the destination.

    Source: ``ggml_set_rows``: sources are rows and ids; the result is the destination.
    """
    new = known(graph, node, 0)
    written = _times(new.rows, node.row_bytes) if new is not None else None
    return _sum(_whole(graph, node, 0, 1), written)


def set_part(graph: Graph, node: Node, experts: int | None) -> int | None:
    """In place the part is read and written; else the first source is copied too.

    ACC also reads what it adds to. Source: ``ggml_set``, ``ggml_acc``: parameter 4 is "in place".
    """
    part = _whole(graph, node, 1)
    if len(node.op_params) > 4 and node.op_params[4]:
        return _times(3 if node.op == "ACC" else 2, part)
    return _sum(_whole(graph, node, 0), part, node.nbytes)


def add_id(graph: Graph, node: Node, experts: int | None) -> int | None:
    """The first source, one row of the second per row of the result, ids and result.

    Source: ``ggml_add_id``.
    """
    table = known(graph, node, 1)
    row = table.row_bytes if table is not None else None
    return _sum(_whole(graph, node, 0, 2), _times(node.rows, row), node.nbytes)


def mul_mat_id(graph: Graph, node: Node, experts: int | None) -> int | None:
    """The matrices of the distinct experts used, the other sources and the result.

    Unobserved, the number is known only for a single token (its experts are distinct) and
    when every token uses every expert.
    Source: ``ggml_mul_mat_id``: as [k, m, n_expert], b, ids [n_used, tokens].
    """
    matrices, ids = known(graph, node, 0), known(graph, node, 2)
    if matrices is None or ids is None:
        return None
    available, used, tokens = max(matrices.ne[2], 0), max(ids.ne[0], 0), max(ids.ne[1], 0)
    if experts is None:
        if tokens == 1 or used >= available:
            experts = used
        else:
            return None
    matrix = _times(max(matrices.ne[1], 0), matrices.row_bytes)
    distinct = min(max(experts, 0), available)
    return _sum(_times(distinct, matrix), _whole(graph, node, 1, 2), node.nbytes)


def _mask(graph: Graph, node: Node, slot: int, rows: int) -> int | None:
    """Bytes of a mask: it may be padded to more rows than there are queries."""
    if all(source.slot != slot for source in node.sources):
        return 0
    mask = known(graph, node, slot)
    if mask is None:
        return None
    touched = min(max(mask.ne[1], 0), rows) * max(mask.ne[2], 0) * max(mask.ne[3], 0)
    return _times(touched, mask.row_bytes)


def flash_attn(graph: Graph, node: Node, experts: int | None) -> int | None:
    """Queries, K and V once per KV head over the padded KV length, mask, sinks, result.

    V that lies in K (compressed attention keeps one cache for both) is not read twice.
    Source: ``ggml_flash_attn_ext``.
    """
    q, k, v = (known(graph, node, slot) for slot in range(3))
    if q is None or k is None or v is None:
        return None
    values = 0 if _within(v, k) else v.nbytes
    mask = _mask(graph, node, 3, max(q.ne[1], 0))
    return _sum(q.nbytes, k.nbytes, values, mask, _whole(graph, node, 4), node.nbytes)


def _within(v: Tensor, k: Tensor) -> bool:
    """Whether rows of ``v`` are the beginnings of the rows of ``k``."""
    same_place = v.data != 0 and v.data == k.data and v.type == k.type
    return same_place and v.nb[1:] == k.nb[1:] and v.ne[0] <= k.ne[0] and v.ne[1:] == k.ne[1:]


def soft_max(graph: Graph, node: Node, experts: int | None) -> int | None:
    """Scores, the rows of the mask that are used, sinks and result.

    Source: ``ggml_soft_max_ext``.
    """
    mask = _mask(graph, node, 1, max(node.ne[1], 0))
    return _sum(_whole(graph, node, 0, 2), mask, node.nbytes)


def ssm_scan(graph: Graph, node: Node, experts: int | None) -> int | None:
    """The states of the sequences at hand, the other sources, and outputs with new states.

    Source: ``ggml_ssm_scan``: ids choose the last dimension of the states.
    """
    state, ids = known(graph, node, 0), known(graph, node, 6)
    if state is None or ids is None:
        return None
    rows = max(state.ne[1], 0) * max(state.ne[2], 0) * ids.elements
    states = _times(rows, state.row_bytes)
    return _sum(states, _whole(graph, node, 1, 2, 3, 4, 5, 6), node.nbytes)


_STREAMED = (
    "MUL_MAT", "OUT_PROD", "ADD", "ADD1", "SUB", "MUL", "DIV", "SQR", "SQRT", "LOG", "SIN", "COS",
    "SUM", "SUM_ROWS", "CUMSUM", "MEAN", "ARGMAX", "COUNT_EQUAL", "CONCAT", "NORM", "RMS_NORM",
    "GROUP_NORM", "L2_NORM", "SCALE", "DIAG", "DIAG_MASK_INF", "DIAG_MASK_ZERO", "ROPE", "ROPE_BACK",
    "CLAMP", "CONV_TRANSPOSE_1D", "CONV_2D", "CONV_3D", "CONV_2D_DW", "CONV_TRANSPOSE_2D", "POOL_1D",
    "POOL_2D", "UPSCALE", "PAD", "PAD_REFLECT_1D", "ROLL", "TIMESTEP_EMBEDDING", "ARGSORT", "TOP_K",
    "LEAKY_RELU", "TRI", "SSM_CONV", "WIN_PART", "WIN_UNPART", "RWKV_WKV6", "RWKV_WKV7",
    "GATED_LINEAR_ATTN", "GATED_DELTA_NET", "SOLVE_TRI", "LIGHTNING_INDEXER", "UNARY", "GLU",
)  # fmt: skip

FORMULAS: dict[str, Formula] = {
    **dict.fromkeys(_STREAMED, stream),
    **dict.fromkeys(("DUP", "CPY", "CONT", "REPEAT"), first_and_result),
    **dict.fromkeys(("IM2COL", "IM2COL_3D"), second_and_result),
    **dict.fromkeys(("ARANGE", "FILL"), result),
    **dict.fromkeys(("SET", "ACC"), set_part),
    "GET_ROWS": get_rows, "SET_ROWS": set_rows, "ADD_ID": add_id, "MUL_MAT_ID": mul_mat_id,
    "FLASH_ATTN_EXT": flash_attn, "SOFT_MAX": soft_max, "SSM_SCAN": ssm_scan,
}  # fmt: skip
