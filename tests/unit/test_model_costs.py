# SPDX-License-Identifier: Apache-2.0
"""Costs (design D11), each value worked out by hand beside its test.

Bytes per row: q4_K 144 per 256 elements, q8_0 34 per 32, f32 4, f16 2, i32 4, i64 8.
"""

from __future__ import annotations

import pytest

from profinferd.agent.model.costs import bytes_moved, cost, costs, flops
from profinferd.agent.model.graph import Cost, Graph

from .graphs import INPUT, Builder, T, decoder


def x(b: Builder, *ne: int, type: str = "f32") -> T:
    return b.leaf("x", type, *ne, flags=INPUT)


def last(b: Builder, experts: int | None = None) -> Cost:
    return cost(b.graph(), len(b.nodes) - 1, experts=experts)


def at(graph: Graph, role: str, op: str) -> Cost:
    found = [n.index for n in graph.nodes if n.role == role and n.op == op and n.layer in (0, None)]
    return cost(graph, found[0])


def test_a_decoder_worked_out_by_hand() -> None:
    """3 tokens, 256 KV cells, embedding 256, 4 heads of 64 over 2 KV heads, FF 512."""
    graph = decoder(tokens=3, rows=1).graph()
    # 256 x 256 weights, 3 columns: 2*256*256*3. Weight 256 rows of 144, in and out 3*256*4.
    assert at(graph, "attn_q", "MUL_MAT") == Cost(393_216, 256 * 144 + 2 * 3 * 256 * 4)
    # 256 x 128: half the weight, half the output.
    assert at(graph, "attn_k", "MUL_MAT") == Cost(196_608, 128 * 144 + 3 * 256 * 4 + 3 * 128 * 4)
    # gathered 3 rows of q8_0: 256/32*34 = 272; ids 3*4; result 3*256*4. Not 1000 rows.
    assert at(graph, "token_embd", "GET_ROWS") == Cost(0, 3 * 272 + 12 + 3072)
    # rotated 64 of 64 in 4 heads x 3 tokens: 3*64*12; in and out 3072 bytes, positions 12.
    assert at(graph, "Qcur", "ROPE") == Cost(2_304, 3072 + 3072 + 12)
    # 3 rows of 128: f32 in, i64 ids, f16 out. Not 4096 rows.
    assert at(graph, "kv_k", "SET_ROWS") == Cost(0, 3 * 512 + 3 * 8 + 3 * 256)
    # 2*h*nq*n_kv*(dk+dv) = 2*4*3*256*128; q and out 3072 each; K and V 2 heads*256*64*2 each
    # (once per KV head, not per head); mask 3 rows of 256 f16.
    assert at(graph, "attn", "FLASH_ATTN_EXT") == Cost(786_432, 2 * 3072 + 2 * 65_536 + 3 * 512)
    assert at(graph, "ffn_geglu", "GLU") == Cost(2 * 512 * 3, 3 * 3 * 512 * 4)
    assert at(graph, "ffn_inp", "ADD") == Cost(768, 3 * 3072)
    # the head sees one row: 2*256*1000; 1000 rows of 272, in 1024, out 4000.
    assert at(graph, "output", "MUL_MAT") == Cost(512_000, 272_000 + 1024 + 4000)
    assert all(c == Cost(0, 0) for n, c in zip(graph.nodes, costs(graph), strict=True) if n.op == "VIEW")


def test_attention_without_flash_reads_k_and_v_once_per_kv_head() -> None:
    graph = decoder(tokens=1, n_kv=256, flash=False).graph()
    # kq: K 256 x 64 x 2 heads f16 = 65536, q 1024, scores 4 heads*256*4; 2*64*(256*4)
    assert at(graph, "kv_k", "MUL_MAT") == Cost(131_072, 65_536 + 1024 + 4096)
    # scores in and out, one mask row of 256 f16
    assert at(graph, "kq_soft_max", "SOFT_MAX") == Cost(5 * 1024, 4096 * 2 + 512)
    # V in f16 copied: no arithmetic
    assert at(graph, "kv_v", "CONT") == Cost(0, 2 * 65_536)
    # kqv: 2*256*(64*4); V 65536, scores 4096, result 1024
    assert cost(graph, next(n.index for n in graph.nodes if n.name == "kqv-0")) == Cost(
        131_072, 65_536 + 4096 + 1024
    )


def test_norms_fused_and_not() -> None:
    """C25: 3n alone, n for the MUL, 4n as one kernel without the intermediate."""
    b = Builder()
    b.norm(x(b, 256, 3), b.leaf("blk.0.attn_norm.weight", "f32", 256), "attn_norm-0")
    graph = b.graph()
    assert cost(graph, 0) == Cost(3 * 768, 2 * 3072)
    assert cost(graph, 1) == Cost(768, 3072 + 1024 + 3072)
    assert cost(graph, 0, fused=True) == Cost(4 * 768, 3072 + 1024 + 3072)
    assert costs(graph, [0]) == [Cost(3072, 7168), Cost(0, 0)]
    assert costs(graph) == [Cost(2304, 6144), Cost(768, 7168)]
    assert flops(graph, 1, fused=True) == 768  # nothing after it


def test_fused_pair_that_shares_nothing() -> None:
    b = Builder()
    b.same("RMS_NORM", x(b, 256))
    b.same("MUL", x(b, 256), b.leaf("w.weight", "f32", 256))
    assert bytes_moved(b.graph(), 0, fused=True) == 2 * 1024 + 3 * 1024


def test_experts_are_counted_once_each() -> None:
    b = Builder()
    ids = b.leaf("leaf_1", "i32", 2, 5, flags=INPUT)
    experts = b.leaf("blk.0.ffn_up_exps.weight", "q4_K", 256, 512, 8)
    b.op("MUL_MAT_ID", "f32", (512, 2, 5), experts, x(b, 256, 1, 5), ids)
    # 10 token-expert pairs of 256 x 512; ids 10*4, in 5*1024, out 10*2048; an expert is 512*144
    rest = 40 + 5120 + 20_480
    assert last(b) == Cost(2 * 256 * 512 * 10, None)  # how many distinct: unobserved
    assert last(b, experts=6).bytes == 6 * 73_728 + rest
    assert last(b, experts=99).bytes == 8 * 73_728 + rest
    one = Builder()
    ids = one.leaf("leaf_1", "i32", 2, 1, flags=INPUT)
    experts = one.leaf("blk.0.ffn_up_exps.weight", "q4_K", 256, 512, 8)
    one.op("MUL_MAT_ID", "f32", (512, 2, 1), experts, x(one, 256, 1, 1), ids)
    assert last(one).bytes == 2 * 73_728 + 8 + 1024 + 4096  # one token's experts are distinct


def test_one_cache_for_keys_and_values_is_read_once() -> None:
    b = Builder()
    k = b.leaf("cache_k_l0", "f16", 576, 256)
    v = b.leaf("cache_k_l0 (view)", "f16", 512, 256)
    v.data, strides = k.data, (2, 1152, 294_912, 294_912)
    v.nb = k.nb = strides
    b.op("FLASH_ATTN_EXT", "f32", (512, 16, 1), x(b, 576, 1, 16), k, v, None)
    # q 576*16*4, K 576*256*2, no V, result 512*16*4
    assert last(b) == Cost(2 * 16 * 256 * (576 + 512), 36_864 + 294_912 + 32_768)


def test_a_padded_mask_is_not_read_whole() -> None:
    b = Builder()
    mask = b.leaf("m", "f16", 256, 64, flags=INPUT)
    kv = [b.leaf(f"cache_{c}_l0", "f16", 64, 256) for c in "kv"]
    b.op("FLASH_ATTN_EXT", "f32", (64, 1, 3), x(b, 64, 3, 1), *kv, mask)
    assert last(b).bytes == 768 + 2 * 32_768 + 3 * 512 + 768


def test_broadcast_is_read_once() -> None:
    b = Builder()
    b.same("ADD", x(b, 256, 10), b.leaf("blk.0.attn_q.bias", "f32", 256))
    assert last(b) == Cost(2560, 10_240 + 1024 + 10_240)
    b.same("ADD_ID", x(b, 256, 2, 5), b.leaf("e.bias", "f32", 256, 8), b.leaf("i", "i32", 2, 5, flags=INPUT))
    assert last(b) == Cost(2560, 10_240 + 10_240 + 40 + 10_240)


def test_copies_have_no_flops_and_no_second_source() -> None:
    b = Builder()
    cache = b.leaf("cache_k_l0", "f16", 128, 4096)
    b.op("CPY", "f16", (128, 3), x(b, 128, 3), b.view("VIEW", cache, 128, 3), view_src=cache)
    assert last(b) == Cost(0, 1536 + 768)
    b.op("REPEAT", "f32", (128, 9), x(b, 128, 3), x(b, 128, 9))
    assert last(b) == Cost(0, 1536 + 4608)
    b.op("CONCAT", "f32", (128, 5), x(b, 128, 3), x(b, 128, 2))
    assert last(b) == Cost(0, 2560 * 2)
    b.op("PAD", "f32", (128, 4), x(b, 128, 3))
    assert last(b) == Cost(0, 1536 + 2048)
    b.op("FILL", "f32", (128, 4), x(b, 128, 4))
    assert last(b) == Cost(0, 2048)
    b.op("ARGSORT", "i32", (128, 4), x(b, 128, 4))
    assert last(b) == Cost(0, 4096)
    b.op("IM2COL", "f16", (12, 10), b.leaf("k.weight", "f16", 3, 4, 8), x(b, 12, 4))
    assert last(b) == Cost(0, 192 + 240)


def test_parts_in_place_and_not() -> None:
    b = Builder()
    b.op("SET", "f32", (100,), x(b, 100), x(b, 10), params=(0, 0, 0, 0, 1))
    assert last(b) == Cost(0, 80)
    b.op("ACC", "f32", (100,), x(b, 100), x(b, 10), params=(0, 0, 0, 0, 0))
    assert last(b) == Cost(10, 400 + 40 + 400)
    b.op("ACC", "f32", (100,), x(b, 100), x(b, 10), params=(0, 0, 0, 0, 1))
    assert last(b) == Cost(10, 120)


def test_small_ones() -> None:
    b = Builder()
    b.same("SCALE", x(b, 100), params=(0x3F800000, 0))
    assert last(b) == Cost(100, 800)
    b.same("SCALE", x(b, 100), params=(0x3F800000, 0x3F800000))
    assert last(b).flops == 200
    b.same("UNARY", x(b, 100), params=(1,))
    assert last(b) == Cost(100, 800)
    b.same("NORM", x(b, 100))
    assert last(b) == Cost(500, 800)
    b.op("GLU", "f32", (50, 3), x(b, 100, 3), params=(1,))
    assert last(b) == Cost(300, 1200 + 600)
    b.op("SUM_ROWS", "f32", (1, 3), x(b, 100, 3))
    assert last(b) == Cost(300, 1200 + 12)
    b.op("OUT_PROD", "f32", (7, 5), x(b, 7, 3), x(b, 5, 3))
    assert last(b) == Cost(2 * 3 * 35, 84 + 60 + 140)
    b.op("SOLVE_TRI", "f32", (2, 6), x(b, 6, 6), x(b, 2, 6))
    assert last(b) == Cost(6 * 12, 144 + 48 + 48)


def test_rope_rotates_only_n_rot() -> None:
    b = Builder()
    pos = b.leaf("p", "i32", 2, flags=INPUT)
    b.same("ROPE", x(b, 64, 4, 2), pos, params=(0, 16, 0))
    assert last(b).flops == 3 * 16 * 8
    b.same("ROPE", x(b, 64, 4, 2), pos, params=(0, 32, 24))
    assert last(b).flops == 3 * 64 * 8
    b.same("ROPE", x(b, 64, 4, 2), pos, params=(0, 1000, 0))
    assert last(b).flops == 3 * 64 * 8
    b.same("ROPE", x(b, 64, 4, 2), pos, params=(0, -4, 0))
    assert last(b).flops == 0


def test_recurrent_models_by_stated_convention() -> None:
    b = Builder()
    # d_conv 4, inner 8, 5 tokens: 2*4*40; in (3+5)*8*4, kernel 4*8*4, out 160
    b.op("SSM_CONV", "f32", (8, 5), x(b, 8, 8), b.leaf("blk.0.ssm_conv1d.weight", "f32", 4, 8))
    assert last(b) == Cost(320, 256 + 128 + 160)
    # d_state 16, head_dim 4, 2 heads, 5 tokens, 1 of 3 sequences: 5*16*40
    state, out = x(b, 16, 4, 2, 3), 40 + 16 * 8
    dt, a, bc = x(b, 2, 5), b.leaf("blk.0.ssm_a", "f32", 1, 2), x(b, 16, 1, 5)
    b.op("SSM_SCAN", "f32", (out,), state, x(b, 4, 2, 5), dt, a, bc, bc, b.leaf("i", "i32", 1, flags=INPUT))
    # one state of 128 floats, x 160, dt 40, A 8, B and C 320 each, id 4, result
    assert last(b) == Cost(3200, 512 + 160 + 40 + 8 + 640 + 4 + out * 4)
    # S 8, H 2, 3 tokens: nelem(k) 48
    k, state, shape = x(b, 8, 2, 3), x(b, 128), (16, 11)
    assert last_flops(b, "RWKV_WKV6", shape, k, k, k, x(b, 16), k, state) == 7 * 8 * 48
    assert last_flops(b, "RWKV_WKV7", shape, k, k, k, k, k, k, state) == 9 * 8 * 48
    assert last_flops(b, "GATED_LINEAR_ATTN", shape, k, k, k, k, state) == 5 * 8 * 48
    g = x(b, 1, 2, 3)
    assert last_flops(b, "GATED_DELTA_NET", shape, k, k, k, g, g, x(b, 8, 8, 2)) == 7 * 8 * 48
    # 3 f32 of 48, g and beta of 6, state 128, result 176
    assert last(b).bytes == 4 * (3 * 48 + 12 + 128 + 176)


def last_flops(b: Builder, op: str, ne: tuple[int, ...], *src: T) -> int | None:
    b.op(op, "f32", ne, *src)
    return last(b).flops


def test_convolutions() -> None:
    b = Builder()
    b.op("CONV_2D", "f32", (10, 10, 8), b.leaf("v.patch.weight", "f16", 3, 3, 4, 8), x(b, 12, 12, 4))
    assert last(b) == Cost(2 * 36 * 800, 3 * 3 * 4 * 8 * 2 + 576 * 4 + 3200)
    b.op("CONV_TRANSPOSE_1D", "f32", (30, 8), b.leaf("a.up.weight", "f16", 4, 8, 2), x(b, 10, 2))
    assert last(b).flops == 2 * 4 * 8 * 20


def test_indexer() -> None:
    b = Builder()
    q, k, w = x(b, 32, 4, 3), x(b, 32, 1, 256), x(b, 4, 3)
    b.op("LIGHTNING_INDEXER", "f32", (256, 3), q, k, w, b.leaf("m", "f16", 256, 3, flags=INPUT))
    assert last(b).flops == 2 * 33 * 4 * 768


@pytest.mark.parametrize("op", ["ZEBRA"])
def test_an_unknown_operator_has_no_cost_rather_than_none_at_all(op: str) -> None:
    """D12: absent is not zero."""
    b = Builder()
    b.same(op, x(b, 100))
    assert last(b) == Cost(None, None)


def test_large_shapes_do_not_wrap_around() -> None:
    b = Builder()
    big = 2**40
    b.op("MUL_MAT", "f32", (big, big), x(b, big, big), x(b, big, big))
    assert last(b).flops == 2 * 2**120
