# SPDX-License-Identifier: Apache-2.0
"""Traces: what is kept one by one adds up to what the session's sums say (cases C11, C25)."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from profinferd.agent.model import costs
from profinferd.agent.model.optable import RawSegment, expand, merge_sums, sum_ops
from profinferd.agent.model.trace import GAP, PHASES, Trace, join

from . import traces
from .graphs import EMBD, FF, INPUT, decoder
from .streams import OP_NS, SETUP, decode, prompt, verify

#: Kernels of a one-layer decoder as the CPU backend dispatches them, counted by hand: a gather, 3
#: fused norms, q, k, v, 2 ROPE, 2 SET_ROWS, attention, output, 2 gathers, ADD, gate, up, GLU,
#: down, ADD, head.
KERNELS = 22


def _by_op(trace: Trace) -> dict[tuple[str, ...], list[int]]:
    """calls, ns, flops, bytes, untimed by the labels of the JSON, from the trace's own sums."""
    found: dict[tuple[str, ...], list[int]] = {}
    for row in trace.sums:
        nodes = trace.nodes(int(row["graph"]))
        assert nodes is not None
        node, fused, calls = int(row["node"]), bool(row["fused"]), int(row["calls"])
        key = (nodes.op[node], nodes.dtype[node], nodes.role[node], nodes.kernel_of(node, fused))
        flops = (nodes.fused_flops if fused else nodes.flops)[node]
        moved = (nodes.fused_bytes if fused else nodes.bytes)[node]
        sums = found.setdefault((*key, PHASES[row["phase"]]), [0] * 5)
        for place, value in enumerate((calls, row["ns"], flops * calls, moved * calls, row["untimed"])):
            sums[place] += int(value)
    return found


def _of_snapshot(trace: Trace) -> dict[tuple[str, ...], list[int]]:
    return {
        (o.op, o.dtype, o.role, o.kernel, o.phase): [
            o.calls, round(o.seconds * 1e9), o.flops or 0, o.bytes or 0, o.untimed
        ]
        for o in trace.snapshot.ops
    }  # fmt: skip


def test_hand_worked_values() -> None:
    trace = traces.small()
    assert [PHASES[p] for p in trace.calls["phase"]] == ["prefill", "decode", "decode", "decode"]
    assert trace.calls["tokens"].tolist() == [5, 1, 1, 1]
    assert trace.calls["rows"].tolist() == [1, 1, 1, 1]
    assert trace.calls["position"].tolist() == [0, 5, 6, 7]
    duration = SETUP + KERNELS * OP_NS + 2000
    assert (trace.calls["end"] - trace.calls["begin"]).tolist() == [duration] * 4
    assert trace.runs["level"].tolist() == [8, 9, 10] * 4
    assert trace.runs["parent"].tolist() == [-1, 0, 0, -1, 3, 3, -1, 6, 6, -1, 9, 9]
    assert [trace.facts.backends[b] for b in trace.runs["backend"]] == ["CPU"] * 12
    assert len(trace.ops) == 4 * KERNELS
    assert (trace.ops["end"] - trace.ops["begin"] == OP_NS).all()
    assert trace.ops["timed"].all()
    assert trace.ops["fused"].sum() == 4 * 3
    cpu = trace.runs[trace.runs["level"] == 10]
    assert (trace.ops["begin"][cpu["first_op"]] - cpu["begin"] == SETUP).all()


def test_sums_are_those_of_the_session() -> None:
    for trace in (traces.small(), traces.small(2), traces.small(lose=[3], unseen=[7])):
        assert _by_op(trace) == _of_snapshot(trace)


def test_what_was_not_seen_is_no_neighbours_time() -> None:
    trace = traces.small(unseen=[7], lose=[3])
    last = trace.ops[trace.ops["run"] == trace.ops["run"].max()]
    assert len(last) == KERNELS - 2
    assert np.flatnonzero(~last["timed"]).tolist() == [2, 5]
    assert trace.runs["lost"].max() == 1
    assert trace.runs["partial"].sum() == 1


def test_a_window_is_whole_calls_with_indices_of_its_own() -> None:
    trace = traces.small()
    second = trace.calls[1]
    part = trace.window(int(second["begin"]), int(second["end"]))
    assert len(part.calls) == 1
    assert part.calls["seq"].tolist() == [second["seq"]]
    assert part.runs["parent"].tolist() == [-1, 0, 0]
    assert part.runs["call"].tolist() == [0, 0, 0]
    assert len(part.ops) == KERNELS
    cpu = part.runs[part.ops["run"][0]]
    assert cpu["level"] == 10
    assert cpu["first_op"] == 0


def test_joining_parts_moves_indices() -> None:
    trace = traces.small()
    parts = [trace.window(int(c["begin"]), int(c["end"])) for c in trace.calls]
    again = join(parts)
    assert again.calls.tolist() == trace.calls.tolist()
    assert again.runs.tolist() == trace.runs.tolist()
    assert again.ops.tolist() == trace.ops.tolist()


def test_calls_that_failed_and_other_phases() -> None:
    trace = traces.of_steps([[prompt(0, 5)], [decode(5)], [verify(6, 4)]])
    counted = Counter(PHASES[p] for p in trace.calls["phase"])
    assert counted == Counter({"prefill": 1, "decode": 1, "verify": 1})
    assert _by_op(trace) == _of_snapshot(trace)


def test_prices_of_the_session_are_those_of_each_kernel() -> None:
    trace = traces.small(2)
    for index in range(len(trace.facts.graphs)):
        graph, nodes = trace.graph(index), trace.nodes(index)
        assert graph is not None and nodes is not None
        for i in range(len(nodes)):
            for fused, flops, moved in (
                (False, nodes.flops, nodes.bytes),
                (True, nodes.fused_flops, nodes.fused_bytes),
            ):
                cost = costs.cost(graph, i, fused=fused)
                assert (flops[i], moved[i]) == tuple(-1 if c is None else c for c in (cost.flops, cost.bytes))


def test_experts_by_node() -> None:
    """Four executions: three used 2 experts and one 3; the last one's kernel was lost."""
    b = decoder(1, 1, 256, layers=1)
    up = b.leaf("blk.0.ffn_up_exps.weight", "q4_K", EMBD, FF, 8)
    ids = b.leaf("ids", "i32", 2, 1, flags=INPUT)
    node = len(b.nodes)
    b.op("MUL_MAT_ID", "f32", (FF, 2, 1), up, b.nodes[-1], ids, name="ffn_moe_up-0")
    steps = [
        [decode(7 + i, graph=b, hash=9, experts={node: count}, lose=lose)]
        for i, (count, lose) in enumerate([(2, []), (3, []), (2, []), (2, [KERNELS])])
    ]
    trace = traces.of_steps([[prompt(0, 7)], *steps])
    assert trace.experts["distinct"].tolist() == [2, 3, 2, 2]
    routes = [(row["node"], row["distinct"], bool(row["timed"]), row["count"]) for row in trace.routes]
    assert sorted(routes) == [(node, 2, False, 1), (node, 2, True, 2), (node, 3, True, 1)]


def test_gaps_and_other_records() -> None:
    faults = np.array([(5, 1), (9, 2)], [("ts", "<i8"), ("pages", "<i4")])
    trace = traces.small(gaps=[(10, 20, 3, "ops")], records={"faults": faults})
    assert trace.gaps.dtype == GAP
    assert trace.gaps.tolist() == [(10, 20, 3, "ops")]
    assert trace.kinds == {"faults": 2}
    assert trace.records("faults", 6)["pages"].tolist() == [2]
    assert len(trace.records("sched")) == 0


@pytest.mark.parametrize("seed", range(20))
def test_broken_records_are_left_out_as_the_session_does(seed: int) -> None:
    """Random node words: never an index outside the graph, never a time that is not provable."""
    rng = np.random.default_rng(seed)
    trace = traces.small()
    nodes = trace.nodes(0)
    assert nodes is not None
    words = rng.integers(0, 2 * len(nodes), 30).astype(np.uint32)
    words |= rng.integers(0, 2, 30).astype(np.uint32) << np.uint32(31)
    runs = trace.runs[2:3].copy()
    runs["n_ops"], runs["call"], runs["parent"] = 30, 0, -1
    times = rng.integers(0, 10**6, 30)
    raw = RawSegment(trace.calls[:1], runs, np.zeros(1, np.int32), (words,), times, trace.experts)
    part = expand(raw, lambda index: nodes)
    assert (part.ops["node"] < len(nodes)).all()
    assert (np.diff(part.ops["node"]) > 0).all()
    assert (part.ops["end"] >= part.ops["begin"])[part.ops["timed"]].all()
    assert part.runs["n_ops"][0] == len(part.ops)
    assert merge_sums([sum_ops(part), sum_ops(part)])["calls"].sum() == 2 * part.ops["timed"].sum()
