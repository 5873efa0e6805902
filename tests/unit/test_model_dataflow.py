# SPDX-License-Identifier: Apache-2.0
"""What a kernel waits for: views, results in place, caches that are written again (case C75)."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from profinferd.agent.model.dataflow import Dataflow, dataflow
from profinferd.agent.model.tensors import EMPTY_OPS

from .graphs import Builder, decoder
from .longtraces import kernels


def flow_of(b: Builder) -> Dataflow:
    graph = b.graph()
    return dataflow(graph, [(n.index, False) for n in graph.nodes if n.op not in EMPTY_OPS])


def test_a_result_in_place_waits_for_everyone_who_read_what_it_overwrites() -> None:
    b = Builder()
    a = b.mul_mat(b.leaf("w.weight", "f32", 8, 8), b.leaf("x", "f32", 8, 1, flags=1))
    b.same("ADD", a, a)  # 1 reads the first version
    c = b.op("SCALE", "f32", a.ne, a, view_src=a)  # 2 overwrites it
    b.same("ADD", c, c)  # 3 reads the second version
    b.same("ADD", a, a)  # 4 reads it too, whatever its source says
    d = b.op("SCALE", "f32", a.ne, c, view_src=a)  # 5 overwrites it once more
    assert d.view_src is a
    flow = flow_of(b)
    assert [k.needs for k in flow.kernels] == [(), (0,), (0, 1), (2,), (0, 2), (2, 3, 4)]
    assert [k.inputs for k in flow.kernels] == [(), (0,), (0,), (2,), (0, 2), (2,)]
    assert [k.in_place for k in flow.kernels] == [False, False, True, False, False, True]


def test_the_allocators_own_reuse_is_in_place_too() -> None:
    b = Builder()
    a = b.mul_mat(b.leaf("w.weight", "f32", 8, 8), b.leaf("x", "f32", 8, 1, flags=1))
    first = b.same("ADD", a, a)
    second = b.same("ADD", a, first)
    second.data = a.data
    flow = flow_of(b)
    assert [k.in_place for k in flow.kernels] == [False, False, True]
    assert flow.kernels[2].needs == (0, 1)


def test_views_lead_to_the_kernel_that_made_the_data() -> None:
    b = Builder()
    a = b.mul_mat(b.leaf("w.weight", "f32", 8, 8), b.leaf("x", "f32", 8, 1, flags=1))
    seen = b.view("PERMUTE", b.view("VIEW", b.view("RESHAPE", a, 4, 2), 2, 2), 2, 2)
    b.same("ADD", seen, seen)
    assert [k.producers for k in flow_of(b).kernels] == [(), (0,)]


def test_attention_waits_for_the_rows_that_were_written_to_its_cache() -> None:
    graph = decoder(layers=2).graph()
    order = kernels(graph)
    flow = dataflow(graph, order)
    by_op = [graph.nodes[node].op for node, _ in order]
    for attention in (i for i, op in enumerate(by_op) if op == "FLASH_ATTN_EXT"):
        k = flow.kernels[attention]
        writes = [i for i in k.needs if by_op[i] == "SET_ROWS"]
        assert len(writes) == 2 and all(i < attention for i in writes)
        assert sorted(graph.leaves[leaf].role for leaf in k.caches) == ["kv_k", "kv_v"]
        assert not set(writes) & set(k.producers), "no source leads there: memory does"
    assert sorted(graph.leaves[leaf].name for leaf in flow.carries) == [
        "cache_k_l0", "cache_k_l1", "cache_v_l0", "cache_v_l1"
    ]  # fmt: skip
    for carry in flow.carries.values():
        ((first, writes_first),) = carry.first
        assert by_op[first] == "SET_ROWS" and writes_first and carry.writer == first
        assert [by_op[i] for i in carry.last] == ["FLASH_ATTN_EXT"]


def test_a_kernel_that_was_not_seen_makes_nothing() -> None:
    b = Builder()
    a = b.mul_mat(b.leaf("w.weight", "f32", 8, 8), b.leaf("x", "f32", 8, 1, flags=1))
    b.same("ADD", b.same("SCALE", a))
    graph = b.graph()
    flow = dataflow(graph, [(0, False), (2, False)])
    assert [k.producers for k in flow.kernels] == [(), ()]
    assert flow.kernel_of == {0: 0, 2: 1}


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 11), st.integers(-1, 11), st.booleans()), min_size=2, max_size=12))
def test_nothing_is_cyclic_whatever_the_target_claims(links: list[tuple[int, int, bool]]) -> None:
    """Sources that come later, views of themselves, views of each other."""
    b = Builder()
    nodes = [b.op("VIEW" if empty else "ADD", "f32", (4,)) for _, _, empty in links]
    for node, (source, view, _) in zip(nodes, links, strict=True):
        node.src = (nodes[source % len(nodes)],)
        node.view_src = nodes[view % len(nodes)] if view >= 0 else None
    flow = flow_of(b)
    for place, kernel in enumerate(flow.kernels):
        assert all(need < place for need in kernel.needs)
        assert set(kernel.producers) <= set(kernel.inputs) <= set(kernel.needs)
