# SPDX-License-Identifier: Apache-2.0
"""Roles (design D11): the same in every layer, from weights, caches, norms and names."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from profinferd.agent.model.graph import LeafKind
from profinferd.agent.model.roles import leaf_kind, leaf_role, op_role, stem_role, weight_role

from .graphs import INPUT, Builder, decoder


@pytest.mark.parametrize(
    ("name", "role", "layer"),
    [
        ("blk.7.attn_q.weight", "attn_q", 7),
        ("blk.12.attn_q.bias", "attn_q", 12),
        ("CPU#blk.0.attn_q.weight#0", "attn_q", 0),
        ("RPC[127.0.0.1:50052]#blk.31.ffn_down.weight#1", "ffn_down", 31),
        ("enc.blk.3.attn_q.weight", "enc.attn_q", 3),
        ("dec.blk.3.cross_attn_k.weight", "dec.cross_attn_k", 3),
        ("v.blk.11.ffn_up.weight", "v.ffn_up", 11),
        ("enc.output_norm.weight", "enc.output_norm", None),
        ("token_embd.weight", "token_embd", None),
        ("output.weight", "output", None),
        ("blk.0.ffn_gate.3.weight", "ffn_gate", 0),
        ("blk.2.ffn_up_exps.weight", "ffn_up_exps", 2),
        ("blk.2.attn_norm_2.weight", "attn_norm_2", 2),
        ("mm.0.weight", "mm", None),
        ("blk.1.attn_q.weight.lora_a", "attn_q.lora_a", 1),
        ("encoder.blocks.5.attn.query.weight", "encoder.attn.query", 5),
        ("blk.123456.x.weight", "x", None),
        ("", "weight", None),
        ('blk.1.a"b\nc{}.weight', "a_b_c", 1),
    ],
)
def test_weights(name: str, role: str, layer: int | None) -> None:
    assert weight_role(name) == (role, layer)


@pytest.mark.parametrize(
    ("name", "flags", "kind", "role", "layer"),
    [
        ("cache_k_l17", 0, LeafKind.CACHE, "kv_k", 17),
        ("cache_v_l0", 0, LeafKind.CACHE, "kv_v", 0),
        ("CPU#cache_k_l2 (view)#0", 0, LeafKind.CACHE, "kv_k", 2),
        ("cache_swa_k_l4", 0, LeafKind.CACHE, "kv_k", 4),
        ("cache_r_l5", 0, LeafKind.CACHE, "state_r", 5),
        ("cache_s_l5", 0, LeafKind.CACHE, "state_s", 5),
        ("leaf_6", INPUT, LeafKind.INPUT, "input", None),
        ("inp_pos", INPUT, LeafKind.INPUT, "inp_pos", None),
        ("CPU#inp_tokens#0", 0, LeafKind.INPUT, "inp_tokens", None),
        ("CPU#l_out-3#0", 0, LeafKind.INPUT, "l_out", None),
        ("rope_freqs.weight", 0, LeafKind.WEIGHT, "rope_freqs", None),
        ("my_tensor", 0, LeafKind.WEIGHT, "my_tensor", None),
    ],
)
def test_leaves(name: str, flags: int, kind: LeafKind, role: str, layer: int | None) -> None:
    assert leaf_kind(name, flags) is kind
    assert leaf_role(name, kind) == (role, layer)


@pytest.mark.parametrize(
    ("name", "role", "layer"),
    [
        ("ffn_geglu-3", "ffn_geglu", 3),
        ("Qcur-11 (reshaped)", "Qcur", 11),
        ("ffn_sqr(relu)-2", "ffn_sqr(relu)", 2),
        ("cache_k_l3 (view) (copy of Kcur-3 (view))", "kv_k", 3),
        ("logits_seq_0_17", "logits_seq", None),
        ("result_norm", "result_norm", None),
        ("node_1234", "", None),
        ("", "", None),
    ],
)
def test_stems(name: str, role: str, layer: int | None) -> None:
    assert stem_role(name) == (role, layer)


def test_roles_of_a_decoder() -> None:
    """Every kernel of one layer, in order."""
    graph = decoder().graph()
    layer = [(n.op, n.role, n.dtype) for n in graph.nodes if n.layer == 0 and graph.expected[n.index]]
    assert layer == [
        ("RMS_NORM", "attn_norm", "f32"), ("MUL", "attn_norm", "f32"),
        ("MUL_MAT", "attn_q", "q4_K"), ("ROPE", "Qcur", "f32"),
        ("MUL_MAT", "attn_k", "q4_K"), ("ROPE", "Kcur", "f32"),
        ("MUL_MAT", "attn_v", "q4_K"), ("SET_ROWS", "kv_k", "f16"), ("SET_ROWS", "kv_v", "f16"),
        ("FLASH_ATTN_EXT", "attn", "f32"), ("MUL_MAT", "attn_output", "q4_K"), ("ADD", "ffn_inp", "f32"),
        ("RMS_NORM", "ffn_norm", "f32"), ("MUL", "ffn_norm", "f32"),
        ("MUL_MAT", "ffn_gate", "q4_K"), ("MUL_MAT", "ffn_up", "q4_K"), ("GLU", "ffn_geglu", "f32"),
        ("MUL_MAT", "ffn_down", "q4_K"), ("ADD", "l_out", "f32"),
        ("GET_ROWS", "l_out", "f32"),  # the rows of it that the last layer goes on with
    ]  # fmt: skip
    tail = [(n.op, n.role, n.layer) for n in graph.nodes[-3:]]
    assert tail == [
        ("RMS_NORM", "output_norm", None),
        ("MUL", "output_norm", None),
        ("MUL_MAT", "output", None),
    ]
    first = graph.nodes[0]
    assert (first.op, first.role, first.dtype) == ("GET_ROWS", "token_embd", "q8_0")


def test_attention_without_flash() -> None:
    graph = decoder(flash=False, layers=1).graph()
    roles = {n.name: n.role for n in graph.nodes if n.op in ("MUL_MAT", "SOFT_MAX", "CONT") and n.name}
    assert roles["kq-0"] == "kv_k" and roles["kqv-0"] == "kv_v" and roles["v_cont-0"] == "kv_v"
    assert roles["kq_soft_max-0"] == "kq_soft_max"


def test_attention_of_an_encoder_has_the_layer_of_its_queries() -> None:
    b = Builder()
    q = b.mul_mat(b.leaf("enc.blk.4.attn_q.weight", "f16", 64, 64), b.leaf("x", "f32", 64, 2, flags=INPUT))
    b.op("FLASH_ATTN_EXT", "f32", (64, 1, 2), q, q, q, None, name="node_51")
    graph = b.graph()
    assert (graph.nodes[1].role, graph.nodes[1].layer, graph.nodes[1].weight) == ("attn", 4, None)


def test_a_tied_head_is_output_and_its_gather_is_not() -> None:
    graph = decoder(tied=True).graph()
    assert graph.nodes[0].role == "token_embd"
    assert graph.nodes[-1].role == "output" and graph.nodes[-1].dtype == "q8_0"
    assert graph.rows == 1


def test_prefixes_stay() -> None:
    roles = {n.role for n in decoder(prefix="enc.").graph().nodes}
    assert "enc.attn_q" in roles and "enc.attn_norm" in roles and "attn_q" not in roles


def test_layers_share_roles() -> None:
    two, many = decoder(layers=2).graph(), decoder(layers=24).graph()
    assert {n.role for n in two.nodes} == {n.role for n in many.nodes}
    assert {n.layer for n in many.nodes} == {None, *range(24)}


def test_parameters_are_not_weights() -> None:
    """Rotary factors and attention sinks come from the file, but say nothing of the op."""
    b = Builder()
    q = b.mul_mat(
        b.leaf("blk.0.attn_q.weight", "f16", 64, 64), b.leaf("x", "f32", 64, 2, flags=INPUT), "Qcur-0"
    )
    turned = b.same("ROPE", q, b.leaf("p", "i32", 2, flags=INPUT), b.leaf("rope_freqs.weight", "f32", 32))
    assert turned
    graph = b.graph()
    assert (graph.nodes[1].role, graph.nodes[1].weight, graph.nodes[1].dtype) == ("attn_q", None, "f32")


@given(st.text(max_size=80), st.integers(0, 31))
def test_any_name_gives_a_bounded_label(name: str, flags: int) -> None:
    role, layer = leaf_role(name, leaf_kind(name, flags))
    for text in (role, stem_role(name)[0] or "x"):
        assert 0 < len(text) <= 48 and text.isascii() and text.isprintable()
    assert layer is None or 0 <= layer < 10**5


@pytest.mark.parametrize(
    ("op", "leaf", "slot", "role", "weight"),
    [
        ("MUL_MAT", "blk.7.attn_q.weight", 0, "attn_q", True),
        ("MUL_MAT_ID", "blk.0.ffn_up_exps.weight", 0, "ffn_up_exps", True),
        ("RMS_NORM", "output_norm.weight", 1, "output_norm", True),
        ("MUL_MAT", "token_embd.weight", 0, "output", True),
        ("GET_ROWS", "token_embd.weight", 0, "token_embd", True),
        ("SET_ROWS", "cache_k_l3", 2, "kv_k", False),
        ("FLASH_ATTN_EXT", "cache_k_l3", 1, "attn", False),
        ("FLASH_ATTN_EXT", "blk.0.attn_sinks.weight", 4, "", False),
        ("ROPE", "rope_freqs.weight", 2, "", False),
        ("MUL_MAT", "CPU#inp_pos#0", 0, "", False),
    ],
)
def test_roles_by_a_leaf_alone(op: str, leaf: str, slot: int, role: str, weight: bool) -> None:
    assert op_role(op, leaf, slot) == (role, weight)
