# SPDX-License-Identifier: Apache-2.0
"""Graphs from descriptors: figures, what must run, and what hostile descriptors do."""

from __future__ import annotations

import time

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from profinferd.agent.model.costs import costs
from profinferd.agent.model.graph import (
    Graph,
    Incomplete,
    LeafKind,
    NodeState,
    account,
    build_graph,
    clean_name,
    structure,
)

from .graphs import GLU, INPUT, NODE_DESC, OPS, OUTPUT, TYPES, UNARY, Builder, decoder


def node(graph: Graph, name: str, op: str) -> int:
    found = [n.index for n in graph.nodes if n.name == name and n.op == op]
    assert len(found) == 1, (name, op, found)
    return found[0]


def observed(graph: Graph, fuse: bool) -> tuple[np.ndarray, np.ndarray]:
    """What the CPU backend would dispatch, pairs of RMS_NORM and MUL as one if ``fuse``."""
    seen, fused = [], []
    skip = False
    for n in graph.nodes:
        if skip:
            skip = False
        elif graph.expected[n.index]:
            skip = fuse and n.op == "RMS_NORM"
            seen.append(n.index)
            fused.append(skip)
    return np.array(seen), np.array(fused)


def test_positions_on_a_device_are_not_expected() -> None:
    """With all layers offloaded every input is a copy there: nothing is lost that could be read."""
    for name, here in (
        ("RPC0[127.0.0.1:50052]#inp_pos#0", False), ("Vulkan0#leaf_6#0", False), ("CPU#inp_pos#0", True),
    ):  # fmt: skip
        assert decoder(positions_name=name).graph().has_rope is here


def test_figures_of_a_decode() -> None:
    graph = decoder(tokens=3, rows=2, n_kv=512).graph(hash=77)
    assert (graph.n_tokens, graph.rows, graph.kv_length, graph.pooled) == (3, 2, 512, None)
    assert graph.has_rope and graph.has_attention and graph.has_output and graph.writes_kv
    assert not graph.is_k_shift and not graph.takes_embeddings and not graph.all_experts
    assert graph.hash == 77 and graph.unresolved == 0 and graph.faults == 0
    per_layer = ["RMS_NORM", "MUL", "MUL_MAT", "RESHAPE", "ROPE", "MUL_MAT", "RESHAPE", "ROPE", "MUL_MAT"]
    per_layer += ["VIEW", "SET_ROWS", "VIEW", "PERMUTE"] * 2
    per_layer += ["PERMUTE", "FLASH_ATTN_EXT", "RESHAPE", "MUL_MAT"]
    after = ["ADD", "RMS_NORM", "MUL", "MUL_MAT", "MUL_MAT", "GLU", "MUL_MAT", "ADD"]
    whole = ["GET_ROWS", *per_layer, *after, *per_layer, "GET_ROWS", "GET_ROWS", *after]
    assert [n.op for n in graph.nodes] == [*whole, "RMS_NORM", "MUL", "MUL_MAT"]


def test_no_output_rows_leaves_the_tail_empty() -> None:
    """A prompt chunk without logits: rows 0, and nothing after the row choice must run."""
    graph = decoder(tokens=4, rows=0).graph()
    assert graph.rows == 0 and graph.n_tokens == 4 and graph.has_output
    first = next(n.index for n in graph.nodes if n.op == "GET_ROWS" and n.index > 0)
    assert not graph.expected[first:].any() and graph.expected[:first].any()
    assert all(c.flops == 0 and c.bytes == 0 for c in costs(graph)[first:])


def test_embeddings_as_input() -> None:
    """Both inputs are in the graph; the unused gather lacks the COMPUTE flag."""
    graph = decoder(tokens=5, from_embeddings=True).graph()
    assert graph.takes_embeddings and graph.n_tokens == 5
    assert not graph.expected[node(graph, "embd", "GET_ROWS")]


def test_a_mixture_of_ids_and_embeddings_is_not_embeddings() -> None:
    """Newer engines build three inputs and compute one of them."""
    b = Builder()
    embd = b.leaf("token_embd.weight", "q8_0", 256, 100)
    gathers = [b.gather(embd, b.leaf(f"leaf_{n}", "i32", n, flags=INPUT)) for n in (6, 4)]
    rest = b.op("CONT", "f32", (256, 6), b.leaf("leaf_9", "f32", 256, 6, flags=INPUT))
    slots = b.leaf("leaf_3", "i64", 4, flags=INPUT)
    b.op("SET_ROWS", "f32", (256, 6), gathers[1], slots, rest, view_src=rest)
    gathers[0].flags = 0
    assert (b.graph().n_tokens, b.graph().takes_embeddings) == (6, False)
    gathers[1].flags = 0
    assert (b.graph().n_tokens, b.graph().takes_embeddings) == (6, True)


def test_embeddings_as_the_only_input() -> None:
    b = Builder()
    x = b.leaf("leaf_2", "f32", 256, 7, flags=INPUT)
    h = b.norm(x, b.leaf("blk.0.attn_norm.weight", "f32", 256), "attn_norm-0")
    b.mul_mat(b.leaf("output.weight", "f16", 256, 100), h, "result_output")
    graph = b.graph()
    assert graph.takes_embeddings and (graph.n_tokens, graph.rows) == (7, 7)


@pytest.mark.parametrize("name", ["result_embd_pooled", "node_9"])
def test_pooled_embeddings_count_sequences_not_rows(name: str) -> None:
    b = Builder()
    tokens = b.gather(b.leaf("token_embd.weight", "f16", 256, 100), b.leaf("i", "i32", 9, flags=INPUT))
    x = b.view("TRANSPOSE", tokens, 9, 256)
    means = b.leaf("inp_mean", "f32", 9, 3, flags=INPUT)
    b.op("MUL_MAT", "f32", (256, 3), x, means, name=name, flags=16 | OUTPUT)
    graph = b.graph()
    assert (graph.pooled, graph.rows, graph.n_tokens) == (3, None, 9)
    assert not graph.has_output and not graph.writes_kv and graph.kv_length is None


def test_k_shift_is_not_a_forward_pass() -> None:
    b = Builder()
    shift = b.leaf("leaf_0", "i32", 4096, flags=INPUT)
    for i in range(2):
        cache = b.leaf(f"cache_k_l{i}", "f16", 128, 4096)
        keys = b.view("VIEW", cache, 64, 2, 4096)
        b.op("ROPE", "f16", keys.ne, keys, shift, view_src=cache, params=(0, 64, 2))
    quantized = b.leaf("cache_k_l2", "q8_0", 128, 4096)
    keys = b.view("VIEW", quantized, 64, 2, 4096)
    wide = b.op("CPY", "f32", keys.ne, keys)
    spin = b.leaf("leaf_1", "f32", 64, 64, flags=INPUT)
    turned = b.same("ROPE", b.mul_mat(spin, wide), shift, params=(0, 64, 2))
    turned = b.mul_mat(spin, turned)
    b.op("CPY", "q8_0", keys.ne, turned, keys, view_src=quantized)
    graph = b.graph()
    assert graph.is_k_shift and graph.has_rope and graph.n_tokens is None and graph.rows is None
    assert {n.role for n in graph.nodes} == {"kv_k"}
    assert not decoder().graph().is_k_shift and not decoder(flash=False).graph().is_k_shift


def test_soft_max_attention_gives_the_kv_length_and_a_gate_does_not() -> None:
    assert decoder(n_kv=768, flash=False).graph().kv_length == 768
    b = Builder()
    b.same(
        "SOFT_MAX", b.mul_mat(b.leaf("blk.0.ffn_gate_inp.weight", "f32", 64, 8), b.leaf("x", "f32", 64, 2))
    )
    assert b.graph().kv_length is None


def test_warm_up_of_a_mixture_uses_all_experts() -> None:
    def moe(used: int) -> Graph:
        b = Builder()
        ids = b.leaf("leaf_1", "i32", used, 1, flags=INPUT)
        experts = b.leaf("blk.0.ffn_up_exps.weight", "q4_K", 256, 512, 8)
        b.op(
            "MUL_MAT_ID", "f32", (512, used, 1), experts, b.leaf("leaf_2", "f32", 256, 1, 1, flags=INPUT), ids
        )
        return b.graph()

    assert moe(8).all_experts and not moe(2).all_experts


def test_topology_ignores_dimensions_and_structure_does_not() -> None:
    """D8: the KV length grows while the topology stays."""
    one, later, other = decoder(n_kv=256).graph(), decoder(n_kv=512).graph(), decoder(layers=3).graph()
    assert one.topology == later.topology != other.topology
    assert structure(one) != structure(later)
    assert len(one.topology) == 16 and int(one.topology, 16) >= 0
    assert decoder(flash=False).graph().topology != one.topology
    assert structure(decoder().graph()) == structure(one)


def test_sources_and_bases() -> None:
    graph = decoder().graph()
    attention = graph.nodes[next(n.index for n in graph.nodes if n.op == "FLASH_ATTN_EXT")]
    bases = [graph.base(s) for s in attention.sources]
    assert [b.name if b else None for b in bases] == ["Qcur-0", "cache_k_l0", "cache_v_l0", "leaf_10"]
    assert [b.op if b else None for b in bases] == ["ROPE", "NONE", "NONE", "NONE"]
    kinds = {leaf.name: leaf.kind for leaf in graph.leaves}
    assert kinds["cache_k_l1"] is LeafKind.CACHE and kinds["leaf_6"] is LeafKind.INPUT
    assert kinds["blk.1.ffn_up.weight"] is LeafKind.WEIGHT
    assert all(a < b for a, b in graph.edges())
    # inp_tokens, leaf_6, 8, 10, inp_out_ids, token_embd, output, output_norm; 9 weights, 2 caches a layer
    assert len(graph.leaves) == 8 + 2 * (9 + 2)


def test_without_the_compute_flag_every_kernel_runs() -> None:
    """C25: engines before the flag."""
    old, new = decoder(flags=0).graph(), decoder().graph()
    assert not old.has_compute_flag and new.has_compute_flag
    assert (old.expected == new.expected).all()


def test_accounting_with_and_without_fusion() -> None:
    """C25: one kernel for RMS_NORM and MUL; views are skipped; a hole is uncovered."""
    graph = decoder().graph()
    views = sum(n.op in ("VIEW", "RESHAPE", "PERMUTE") for n in graph.nodes)
    assert views == 2 * 10
    plain = account(graph, *observed(graph, fuse=False))
    assert plain.uncovered == plain.fused == plain.unexpected == 0
    assert plain.executed == len(graph.nodes) - views and plain.skipped == views
    fused = account(graph, *observed(graph, fuse=True))
    assert fused.fused == 5 and fused.executed == plain.executed - 5  # two norms a layer, one at the end
    assert fused.uncovered == 0 and fused.unexpected == 0
    head = node(graph, "attn_norm-0", "MUL") - 1
    assert fused.state[head] == NodeState.EXECUTED and fused.state[head + 1] == NodeState.FUSED

    seen, pairs = observed(graph, fuse=True)
    lost = account(graph, np.delete(seen, 3), np.delete(pairs, 3))
    assert lost.uncovered == 1 and lost.state[seen[3]] == NodeState.UNCOVERED
    total = lost.executed + lost.fused + lost.skipped + lost.uncovered
    assert total == len(graph.nodes)


def test_accounting_of_what_should_not_be_seen() -> None:
    graph = decoder().graph()
    view = next(n.index for n in graph.nodes if n.op == "VIEW")
    odd = account(graph, np.array([view, -1, len(graph.nodes), 2**31]), np.array([False] * 4))
    assert odd.unexpected == 4
    last = len(graph.nodes) - 1
    assert account(graph, np.array([last]), np.array([True])).executed == 1
    nothing = account(graph, np.array([], dtype=np.uint32), np.array([], dtype=np.bool_))
    assert nothing.executed == 0 and nothing.uncovered == int(graph.expected.sum())


def test_fused_kernels_of_empty_tensors_are_dispatched_and_not_unexpected() -> None:
    graph = decoder(tokens=4, rows=0).graph()
    head = len(graph.nodes) - 3
    assert graph.nodes[head].op == "RMS_NORM" and not graph.expected[head]
    assert account(graph, np.array([head]), np.array([True])).unexpected == 0


def test_order_and_duplicates_do_not_matter() -> None:
    b = decoder()
    descs = b.descs()
    shuffled = np.concatenate([descs, descs])[np.random.default_rng(1).permutation(2 * len(descs))]
    built = build_graph(shuffled, len(b.nodes), OPS, TYPES, unary=UNARY, glu=GLU)
    assert isinstance(built, Graph)
    straight = b.graph()
    assert [n.name for n in built.nodes] == [n.name for n in straight.nodes]
    assert built.topology == straight.topology and built.n_tokens == straight.n_tokens
    assert [n.role for n in built.nodes] == [n.role for n in straight.nodes]


def test_missing_descriptors_are_named() -> None:
    """C11: a lost record means: ask again, not a smaller graph."""
    b = decoder()
    descs = b.descs()
    keep = ~((descs["role"] == 0) & np.isin(descs["index"], [3, 9]))
    assert build_graph(descs[keep], len(b.nodes), OPS, TYPES) == Incomplete(len(b.nodes), 2, (3, 9))
    hostile = build_graph(descs, 2**32 - 1, OPS, TYPES)
    assert isinstance(hostile, Incomplete) and len(hostile.missing) == 64
    assert isinstance(build_graph(descs[:0], 5, OPS, TYPES), Incomplete)
    none = build_graph(descs[:0], 0, OPS, TYPES)
    assert isinstance(none, Graph) and none.nodes == ()


def test_a_tensor_that_could_not_be_read_is_unknown_not_zero() -> None:
    """C10."""
    b = decoder()
    descs = b.descs()
    row = int(np.flatnonzero((descs["role"] == 0) & (descs["op"] == OPS.index("FLASH_ATTN_EXT")))[0])
    broken = descs.copy()
    broken["fault"][row] = 1
    graph = build_graph(broken, len(b.nodes), OPS, TYPES)
    assert isinstance(graph, Graph)
    bad = graph.nodes[int(descs["index"][row])]
    assert bad.fault and bad.op == "unknown" and graph.faults == 1 and not graph.expected[bad.index]
    assert costs(graph)[bad.index].flops is None
    state = account(graph, np.array([bad.index]), np.array([False])).state
    assert state[bad.index] == NodeState.EXECUTED
    again = build_graph(np.concatenate([broken, descs]), len(b.nodes), OPS, TYPES)
    assert isinstance(again, Graph) and again.faults == 0


def test_numbers_outside_the_tables_are_numbers() -> None:
    """C13: never the neighbour's name."""
    b = decoder()
    descs = b.descs()
    descs["op"][0], descs["type"][0] = 900, 2
    graph = build_graph(descs, len(b.nodes), OPS, TYPES, glu=["ONLY"])
    assert isinstance(graph, Graph)
    assert (graph.nodes[0].op, graph.nodes[0].type) == ("op_900", "type_2")
    assert costs(graph)[0].flops is None and costs(graph)[0].bytes is None
    assert next(n.sub_op for n in graph.nodes if n.op == "GLU") == "glu_1"
    assert next(n.sub_op for n in b.graph().nodes if n.op == "GLU") == "GEGLU"
    bare = build_graph(descs, len(b.nodes), OPS)
    assert isinstance(bare, Graph) and all(n.type.startswith("type_") for n in bare.nodes)


def test_weight_type_kernel_and_source_of_a_split() -> None:
    b = Builder()
    other = b.tensor("ADD", "f32", (256, 2), name="l_out-3")  # computed in another split
    b.mul_mat(b.leaf("blk.4.attn_q.weight", "q4_K", 256, 256, extra=0xABC), other, "Qcur-4")
    b.gather(b.leaf("token_embd.weight", "q8_0", 256, 10, extra=0xABC), b.leaf("t", "i32", 2, flags=INPUT))
    graph = b.graph()
    assert graph.unresolved == 1 and graph.tensor(graph.nodes[0].sources[1]) is None
    assert (graph.nodes[0].dtype, graph.nodes[0].type, graph.nodes[0].kernel) == ("q4_K", "f32", "repack")
    assert (graph.nodes[1].dtype, graph.nodes[1].kernel) == ("q8_0", "native")
    assert costs(graph)[0].flops == 2 * 256 * 256 * 2 and costs(graph)[0].bytes is None


def test_names_are_safe_to_print() -> None:
    assert clean_name(b"inp_pos\0garbage") == "inp_pos"
    assert clean_name(b'a"b\nc\xff\x1b[31m') == 'a"b\ufffdc\ufffd\ufffd[31m'
    assert clean_name("κ-3".encode()) == "κ-3"
    assert clean_name("\u202egnp".encode()) == "\ufffdgnp"


def test_name_field_may_come_as_bytes_or_as_numbers() -> None:
    b = decoder()
    descs = b.descs()
    fields = [(n, "u1", (64,)) if n == "name" else (n, NODE_DESC[n]) for n in NODE_DESC.names or ()]
    as_numbers = descs.view(np.dtype(fields))
    graph = build_graph(as_numbers, len(b.nodes), OPS, TYPES)
    assert isinstance(graph, Graph) and graph.nodes[-1].name == "result_output"


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_hostile_descriptors_never_raise_and_never_go_negative(data: st.DataObject) -> None:
    """Any bytes at all in plausible places: cyclic sources, negative ne, bad UTF-8."""
    n = data.draw(st.integers(1, 12))
    rows = n + data.draw(st.integers(0, 8))
    raw = data.draw(st.binary(min_size=NODE_DESC.itemsize, max_size=NODE_DESC.itemsize * 3))
    descs = np.frombuffer((raw * rows)[: NODE_DESC.itemsize * rows], dtype=NODE_DESC).copy()
    small = st.integers(0, rows)
    for row in range(rows):
        descs["role"][row] = 0 if row < n else data.draw(st.integers(0, 2))
        descs["index"][row] = row if row < n else data.draw(small)
        descs["addr"][row] = 0x1000 + 16 * data.draw(small)
        descs["fault"][row] = data.draw(st.sampled_from([0, 0, 0, 1]))
        descs["op"][row] = data.draw(st.integers(0, len(OPS)))
        descs["type"][row] = data.draw(st.integers(0, len(TYPES)))
        if data.draw(st.booleans()):
            descs["ne"][row] = data.draw(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=4, max_size=4))
        sources = data.draw(st.lists(small, min_size=10, max_size=10))
        descs["src"][row] = [0x1000 + 16 * s if s else 0 for s in sources]
        descs["view_src"][row] = 0x1000 + 16 * data.draw(small)
    graph = build_graph(descs, n, OPS, TYPES, unary=UNARY, glu=GLU)
    assert isinstance(graph, Graph)
    for cost in [*costs(graph), *costs(graph, range(n), dict.fromkeys(range(n), -5))]:
        assert (cost.flops is None or cost.flops >= 0) and (cost.bytes is None or cost.bytes >= 0)
    for figure in (graph.n_tokens, graph.rows, graph.pooled, graph.kv_length):
        assert figure is None or figure >= 0
    seen = np.array(data.draw(st.lists(st.integers(-2, n + 2), max_size=8)), dtype=np.int64)
    fused = np.array([data.draw(st.booleans()) for _ in seen], dtype=np.bool_)
    told = account(graph, seen, fused)
    unknown = int((told.state == NodeState.UNKNOWN).sum())
    assert told.executed + told.fused + told.skipped + told.uncovered + unknown == n
    assert all(len(node.role) <= 48 and node.role.isascii() and node.role for node in graph.nodes)
    assert repr(graph)  # no object cycles


def test_a_long_chain_of_views_takes_linear_time() -> None:
    """16384 nodes is what the probe reads at most."""
    n = 16384
    descs = np.zeros(n, dtype=NODE_DESC)
    descs["index"] = np.arange(n)
    descs["addr"] = 0x1000 + 16 * np.arange(n)
    descs["op"] = OPS.index("VIEW")
    descs["ne"] = 1
    descs["src"][1:, 0] = descs["addr"][:-1]
    descs["src"][0, 0] = descs["addr"][-1]  # and it is a ring
    started = time.process_time()
    graph = build_graph(descs, n, OPS, TYPES)
    assert (
        isinstance(graph, Graph)
        and graph.nodes[-1].sources[0].base_node == graph.nodes[1].sources[0].base_node
    )
    assert time.process_time() - started < 30
