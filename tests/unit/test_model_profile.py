# SPDX-License-Identifier: Apache-2.0
"""The profile by layer, and the memory of graphs, against hand-worked values and the session's sums."""

from __future__ import annotations

import dataclasses

import pytest

from profinferd.agent.model import memory, profile
from profinferd.agent.model.peaks import Peak, Peaks
from profinferd.agent.model.tensors import Graph

from . import traces
from .graphs import INPUT, Builder, decoder
from .streams import OP_NS, Step, decode, prompt


def moe(tokens: int, used: int = 2) -> Builder:
    """One routed product: 8 experts of q4_K [256, 512], 73,728 bytes each (by hand: 144 per 256)."""
    b = Builder()
    ids = b.leaf("leaf_3", "i32", used, tokens, flags=INPUT)
    experts = b.leaf("blk.0.ffn_up_exps.weight", "q4_K", 256, 512, 8)
    b.op(
        "MUL_MAT_ID",
        "f32",
        (512, used, tokens),
        experts,
        b.leaf("leaf_2", "f32", 256, 1, tokens, flags=INPUT),
        ids,
    )
    return b


def test_rows_by_layer_add_up_to_the_sums_of_the_session() -> None:
    """Cases C11, C25: with a lost record and fused pairs, nothing is added and nothing is missing."""
    trace = traces.small(layers=3, lose=[4])
    rows = profile.rows(trace)
    by_kind: dict[tuple[str, ...], list[float]] = {}
    for row in rows:
        key = (row.op, row.dtype, row.role, row.kernel, row.backend, row.phase)
        sums = by_kind.setdefault(key, [0.0] * 5)
        for place, value in enumerate((row.calls, row.untimed, row.seconds, row.flops or 0, row.bytes or 0)):
            sums[place] += value
    said = {
        (o.op, o.dtype, o.role, o.kernel, o.backend, o.phase): [
            o.calls, o.untimed, o.seconds, o.flops or 0, o.bytes or 0
        ]
        for o in trace.snapshot.ops
    }  # fmt: skip
    assert set(by_kind) == set(said)
    for key, values in said.items():
        assert by_kind[key] == pytest.approx(values), key
    assert sum(row.untimed for row in rows) == 1


def test_a_row_by_hand() -> None:
    """ffn_down of layer 1: q4_K [512, 256], three tokens decoded, one kernel each."""
    (row,) = (
        r
        for r in profile.rows(traces.small(layers=2))
        if r.role == "ffn_down" and r.layer == 1 and r.phase == "decode"
    )
    assert (row.op, row.dtype, row.calls, row.untimed) == ("MUL_MAT", "q4_K", 3, 0)
    assert row.seconds == pytest.approx(3 * OP_NS / 1e9)
    assert row.flops == 3 * 2 * 512 * 256
    moved = 512 * 256 // 256 * 144 + 4 * 512 + 4 * 256
    assert row.bytes == 3 * moved
    # 10 GB/s need 7.68 us for each, of which the kernel took 1: caches, nothing is wasted.
    assert row.wasted_seconds == 0


def test_waste_follows_the_peaks() -> None:
    trace = traces.small()
    trace.snapshot = dataclasses.replace(trace.snapshot, peaks=Peaks((Peak(2, 1e12, None, 1e12),)))
    (row,) = (r for r in profile.rows(trace) if r.role == "ffn_down" and r.phase == "decode")
    moved = 512 * 256 // 256 * 144 + 4 * 512 + 4 * 256
    ideal = 3 * max(moved / 1e12, 2 * 512 * 256 / 1e12)
    assert row.wasted_seconds == pytest.approx(3e-6 - ideal)
    without = traces.small(peaks=Peaks((), reason="not here"))
    assert all(r.wasted_seconds is None for r in profile.rows(without))


def test_observed_experts_say_what_was_read() -> None:
    """Two executions used 5 and 8 of 8 experts, one was not observed and cannot be priced."""
    steps = [
        prompt(0, 5, graph=moe(5), hash=31, experts={0: 5}),
        prompt(5, 5, graph=moe(5), hash=31, experts={0: 8}),
    ]
    (row,) = (r for r in profile.rows(traces.of_steps([[s] for s in steps])) if r.op == "MUL_MAT_ID")
    rest = 5 * 2 * 4 + 5 * 1024 + 5 * 2 * 2048
    assert (row.calls, row.bytes) == (2, (5 + 8) * 73_728 + 2 * rest)
    steps.append(prompt(10, 5, graph=moe(5), hash=31))
    trace = traces.of_steps([[s] for s in steps])
    (row,) = (r for r in profile.rows(trace) if r.op == "MUL_MAT_ID")
    (said,) = (o for o in trace.snapshot.ops if o.op == "MUL_MAT_ID")
    assert row.calls == 3 and row.bytes is None and said.bytes is None


def test_sampled_rows_are_the_estimates() -> None:
    trace = traces.small()
    trace.facts = dataclasses.replace(trace.facts, ops="sampled")
    rows = profile.rows(trace)
    assert len(rows) == len(trace.snapshot.ops) and all(row.layer is None for row in rows)


def graph_of(builder: Builder) -> Graph:
    return builder.graph()


def test_memory_by_hand() -> None:
    """Sizes of the made-up decoder: EMBD 256, KV 128 wide, FF 512, vocabulary 1000, two layers."""
    found = memory.of_graphs([graph_of(decoder(5)), graph_of(decoder(1))])
    by = {(w.layer, w.role): (w.dtype, w.bytes, w.tensors) for w in found.weights}
    block = 144  # bytes of 256 values of q4_K
    assert by[0, "attn_q"] == ("q4_K", 256 * 256 // 256 * block, 1)
    assert by[1, "attn_k"] == ("q4_K", 256 * 128 // 256 * block, 1)
    assert by[1, "ffn_down"] == ("q4_K", 512 * 256 // 256 * block, 1)
    assert by[0, "ffn_norm"] == ("f32", 1024, 1)
    assert by[None, "token_embd"] == ("q8_0", 1000 * 256 // 32 * 34, 1)
    assert found.unsized == 0 and found.repacked_bytes == 0
    assert found.weight_bytes == sum(size for _, size, _ in by.values())
    cache = found.cache
    assert cache is not None
    assert cache.bytes == 2 * 2 * 128 * 4096 * 2  # K and V, two layers, f16
    assert (cache.layers, cache.k_type, cache.v_type, cache.positions) == (2, "f16", "f16", 4096)
    assert cache.used_positions == 256
    # ids and positions (i32), cells (i64), mask (f16, 256 wide), output ids
    assert found.inputs == 5 * 4 + 5 * 4 + 5 * 8 + 5 * 256 * 2 + 4


def test_a_tied_head_is_one_tensor() -> None:
    tied = memory.of_graphs([graph_of(decoder(1, tied=True))])
    apart = memory.of_graphs([graph_of(decoder(1))])
    assert tied.weight_bytes is not None and apart.weight_bytes is not None
    assert apart.weight_bytes - tied.weight_bytes == 1000 * 256 // 32 * 34


def test_rearranged_weights_and_scratch() -> None:
    b = Builder()
    weight = b.leaf("blk.0.ffn_up.weight", "q4_K", 256, 512, extra=1)
    first = b.mul_mat(weight, b.leaf("leaf_2", "f32", 256, 1, flags=INPUT), "ffn_up-0")
    second = b.same("SCALE", first)
    third = b.same("SCALE", second, name="in place")
    first.data, second.data, third.data = 0x10000, 0x10000 + 4096, 0x10000 + 4096
    third.view_src = second
    found = memory.of_graphs([b.graph()])
    assert found.repacked_bytes == 512 * 144
    assert found.scratch == 4096 + 512 * 4
    assert found.cache is None


def test_no_graph_is_absent_not_zero() -> None:
    found = memory.of_graphs([])
    assert (found.weight_bytes, found.cache, found.scratch) == (None, None, None)


def test_threads_are_unknown_without_a_scheduler() -> None:
    trace = traces.of_steps([[Step([0], [0])], [decode(1)]])
    assert profile.threads_of(trace) is None
    peak = profile.peak_of(trace)
    assert peak is not None and peak.read_bytes_per_second == 10e9
