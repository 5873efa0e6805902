# SPDX-License-Identifier: Apache-2.0
"""Graphs and kernels added up, what was lost of them, and graphs that are not known yet."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from profinferd.agent.model import costs
from profinferd.agent.model.session import Session
from profinferd.agent.model.tokens import Phase

from .graphs import GLU, INPUT, OPS, TYPES, UNARY, Builder, decoder
from .streams import (
    BACKEND,
    CALL_BEGIN,
    CALL_END,
    CPU,
    DECODE,
    DESCRIBED,
    FAULT,
    GRAPH_BEGIN,
    GRAPH_END,
    OP_NS,
    PROCESS,
    SCHED,
    SETUP,
    START,
    Step,
    Stream,
    decode,
    facts,
    prompt,
    session,
)

# -- graphs and kernels ----------------------------------------------------------


def test_setup_and_ops_are_the_graph() -> None:
    """D4: an op lasts to the next one's entry, the last to the graph's return."""
    stream, to = Stream(), session()
    step = decode(6)
    for _ in range(3):
        stream.call(step)
    seen = stream.snapshot(to)
    kernels = stream.kernels(step)
    (graph,) = (g for g in seen.graphs if g.rows == 1)
    assert graph.phase == "decode" or graph.count
    total = sum(op.seconds for op in seen.ops)
    setup = sum(g.setup_seconds or 0 for g in seen.graphs)
    assert total == pytest.approx(3 * len(kernels) * OP_NS / 1e9, rel=1e-9)
    assert setup == pytest.approx(3 * SETUP / 1e9, rel=1e-9)
    assert sum(g.seconds for g in seen.graphs) == pytest.approx(total + setup, rel=1e-9)
    assert sum(op.calls for op in seen.ops) == 3 * len(kernels)


def test_kernels_by_op_type_and_role() -> None:
    """Counts, FLOPs and bytes against the graph itself; fused pairs are one kernel (C25)."""
    stream, to = Stream(), session()
    step = prompt(0, 5)
    for start in (0, 100):
        stream.call(prompt(start, 5))
    seen = stream.snapshot(to)
    graph = decoder(5, 1, 256, layers=1).graph()
    calls: Counter[tuple[str, str, str, str]] = Counter()
    flops: Counter[tuple[str, str, str, str]] = Counter()
    moved: Counter[tuple[str, str, str, str]] = Counter()
    for index, fused in stream.kernels(step):
        node = graph.nodes[index]
        key = (node.op, node.dtype, node.role, "fused_mul" if fused else node.kernel)
        cost = costs.cost(graph, index, fused=fused)
        calls[key] += 2
        flops[key] += 2 * (cost.flops or 0)
        moved[key] += 2 * (cost.bytes or 0)
    assert {(o.op, o.dtype, o.role, o.kernel): o.calls for o in seen.ops} == dict(calls)
    assert {(o.op, o.dtype, o.role, o.kernel): o.flops for o in seen.ops} == dict(flops)
    assert {(o.op, o.dtype, o.role, o.kernel): o.bytes for o in seen.ops} == dict(moved)
    assert all(o.phase == "prefill" and o.backend == "CPU" for o in seen.ops)
    (entry,) = seen.graphs
    n_fused = sum(fused for _, fused in stream.kernels(step))
    assert (entry.executed, entry.fused, entry.uncovered) == (len(stream.kernels(step)), n_fused, 0)
    assert entry.skipped == len(graph.nodes) - len(stream.kernels(step)) - n_fused
    assert (entry.tokens, entry.rows, entry.kv_length) == (5, 1, 256)
    assert (entry.nodes, entry.topology) == (len(graph.nodes), graph.topology)


def test_ops_take_the_phase_of_their_call() -> None:
    stream, to = Stream(), session()
    stream.call(prompt(0, 8))
    stream.call(Step([8, *range(9)], [0, 9]))
    stream.call(decode(9, 9))
    seen = stream.snapshot(to)
    assert {o.phase for o in seen.ops} == {"prefill", "mixed", "decode"}
    assert {(g.phase, g.tokens) for g in seen.graphs} == {("prefill", 8), ("mixed", 10), ("decode", 2)}


def test_lost_op_records_are_nobodys_time() -> None:
    """C11: the gap is not given to the kernel before it; nothing looks uncovered."""
    stream, to = Stream(), session()
    step = decode(6)
    n = len(stream.kernels(step))
    stream.call(decode(6, lose=[3, n - 1]))
    seen = stream.snapshot(to, ST_LOST_OPS=2)
    assert sum(o.calls for o in seen.ops) == n - 4 and sum(o.untimed for o in seen.ops) == 2
    assert all(o.seconds <= o.calls * OP_NS * 1.0001 / 1e9 for o in seen.ops)
    (graph,) = seen.graphs
    assert graph.uncovered is None and graph.sampled == 1
    assert graph.untimed_seconds == pytest.approx(4 * OP_NS / 1e9)
    assert seen.lost.total == 2 and seen.lost.by_kind == {"ops": 2}
    assert any("untimed" in note for note in seen.notes)


def test_losses_are_counted_once() -> None:
    """The probes count a failed reserve, and the end of its graph tells of it too."""
    stream, to = Stream(), session()
    stream.call(decode(6, lose=[3]))
    assert stream.snapshot(to).lost.by_kind == {"ops": 1}
    assert stream.snapshot(to, ST_LOST_OPS=5).lost.by_kind == {"ops": 5}
    # Never back, even if a caller forgets the probes' counters.
    assert stream.snapshot(to).lost.by_kind == {"ops": 5}


def test_uncovered_kernels_are_reported_and_not_merged() -> None:
    """D2, C25: a kernel without a probe leaves a hole, not a slow neighbour."""
    stream, to = Stream(), session()
    for unseen in ([], [0, 5], [5]):
        stream.call(decode(6, unseen=unseen))
    seen = stream.snapshot(to)
    assert sum(g.uncovered or 0 for g in seen.graphs) == 2
    assert max(o.seconds / o.calls for o in seen.ops) == pytest.approx(OP_NS / 1e9)
    assert seen.lost.total == 0 and any("uncovered" in note for note in seen.notes)
    # Without the first kernel there is no telling where the setup ended.
    setups = sum(g.setup_seconds or 0 for g in seen.graphs)
    assert setups == pytest.approx(2 * SETUP / 1e9)


def test_graphs_without_op_records_are_not_sampled() -> None:
    stream, to = Stream(), session()
    stream.call(decode(6))
    stream.call(decode(7), traced=False)
    seen = stream.snapshot(to)
    assert sum(g.count for g in seen.graphs) == 2 and sum(g.sampled for g in seen.graphs) == 1
    assert sum(g.uncovered or 0 for g in seen.graphs) == 0


def moe(tokens: int) -> Builder:
    b = Builder()
    embd = b.leaf("token_embd.weight", "q8_0", 256, 1000)
    x = b.gather(embd, b.leaf("inp_tokens", "i32", tokens, flags=INPUT), "embd")
    ids = b.leaf("ids", "i32", 2, tokens, flags=INPUT)
    up = b.leaf("blk.0.ffn_up_exps.weight", "q4_K", 256, 512, 8)
    b.op("MUL_MAT_ID", "f32", (512, 2, tokens), up, b.view("RESHAPE", x, 256, 1, tokens), ids)
    return b


def test_distinct_experts() -> None:
    """D11: bytes of MUL_MAT_ID are those of the experts that were used."""
    stream, to = Stream(), session()
    builder = moe(4)
    where = next(i for i, n in enumerate(builder.nodes) if n.op == "MUL_MAT_ID")
    for used in (3, 5):
        stream.call(Step(range(4), [3], graph=builder, hash=77, experts={where: used}))
    seen = stream.snapshot(to)
    graph = builder.graph()
    (op,) = (o for o in seen.ops if o.op == "MUL_MAT_ID")
    parts = [costs.bytes_moved(graph, where, experts=used) for used in (3, 5)]
    assert op.bytes == sum(p or 0 for p in parts) and parts[0] != parts[1]
    assert op.flops == 2 * (costs.flops(graph, where) or 0) and op.role == "ffn_up_exps"


def test_a_backend_that_computes_later() -> None:
    """C08: its time is the time to enqueue, and is no op time."""
    stream, to = Stream(), session(backends={0xC1 + BACKEND: "RPC"})
    stream.call(prompt(0, 6), levels=(SCHED, BACKEND))
    seen = stream.snapshot(to)
    (graph,) = seen.graphs
    assert (graph.backend, graph.timing, graph.sampled) == ("RPC", "enqueue", 0)
    assert seen.ops == () and any("enqueue" in note for note in seen.notes)


def test_splits_on_two_backends() -> None:
    """The whole graph counts once; its parts are listed as parts."""
    stream, to = Stream(), session(backends={8: "RPC", 9: "CPU"})
    a, s, b1, c1, b2 = (stream.next_seq() for _ in range(5))
    who = {"call": a}
    stream.event(CALL_BEGIN, a, DECODE, object=1, batch_tokens=6, **who)
    begin = stream.now
    event = stream.event(GRAPH_BEGIN, s, SCHED, object=2, hash=11, n_nodes=9, **who)
    stream._ints(event, prompt(0, 6))
    stream.event(GRAPH_BEGIN, b1, BACKEND, parent=s, object=9, hash=12, n_nodes=4, **who)
    stream.event(GRAPH_BEGIN, c1, CPU, parent=b1, hash=12, n_nodes=4, **who)
    stream.now += 6_000_000
    stream.event(GRAPH_END, c1, CPU, parent=b1, begin_ts=begin, **who)
    stream.event(GRAPH_END, b1, BACKEND, parent=s, object=9, begin_ts=begin, **who)
    stream.event(GRAPH_BEGIN, b2, BACKEND, parent=s, object=8, hash=13, n_nodes=5, **who)
    stream.now += 200_000
    stream.event(GRAPH_END, b2, BACKEND, parent=s, object=8, begin_ts=begin, **who)
    stream.event(GRAPH_END, s, SCHED, object=2, begin_ts=begin, **who)
    stream.event(CALL_END, a, DECODE, object=1, begin_ts=begin, **who)
    seen = stream.snapshot(to)
    assert {(int(g.id or "0", 16), g.backend, g.split, g.timing) for g in seen.graphs} == {
        (11, "mixed", False, "wall"), (12, "CPU", True, "wall"), (13, "RPC", True, "enqueue"),
    }  # fmt: skip
    assert seen.counters is not None
    (whole,) = seen.counters.graphs
    assert (whole.backend, whole.count) == ("mixed", 1) and whole.seconds == pytest.approx(0.0062)


def test_a_part_that_ran_where_nobody_looked() -> None:
    """A CPU split of four of nine nodes: the whole did not run on the CPU alone."""
    stream, to = Stream(), session()
    a, s, c = (stream.next_seq() for _ in range(3))
    who = {"call": a}
    stream.event(CALL_BEGIN, a, DECODE, object=1, batch_tokens=6, **who)
    begin = stream.now
    stream._ints(stream.event(GRAPH_BEGIN, s, SCHED, object=2, hash=11, n_nodes=9, **who), prompt(0, 6))
    stream.event(GRAPH_BEGIN, c, CPU, parent=s, hash=12, n_nodes=4, **who)
    stream.event(GRAPH_END, c, CPU, parent=s, begin_ts=begin, **who)
    stream.event(GRAPH_END, s, SCHED, object=2, begin_ts=begin, **who)
    stream.event(CALL_END, a, DECODE, object=1, begin_ts=begin, **who)
    seen = stream.snapshot(to)
    assert {(g.backend, g.nodes) for g in seen.graphs} == {("mixed", 9), ("CPU", 4)}


# -- descriptors -----------------------------------------------------------------


def test_descriptors_are_confirmed_once_complete() -> None:
    """D8: the kernel is told; lost ones are asked for again, and the executions wait."""
    stream, to = Stream(), session()
    stream.call(decode(6))
    events, ops, nodes, ints = stream.take()
    (hash,) = set(events["hash"].tolist()) - {0}
    to.feed(events, ops, nodes[:-7], ints, stream.now)
    assert to.take_confirmed() == [] and to.take_resend() == [(100, hash)]
    waiting = to.snapshot(stream.now)
    assert waiting.ops == () and any("wait" in note for note in waiting.notes)
    # Positions are in the event itself: nothing about tokens was lost with the nodes.
    assert waiting.tokens.prefill == 1 and waiting.requests.started == 1
    stream.sent.clear()
    stream.call(decode(7))
    events, ops, nodes, ints = stream.take()
    to.feed(events, ops, nodes, ints, stream.now)
    assert to.take_confirmed() == [(100, hash)] and to.take_resend() == []
    seen = to.snapshot(stream.now)
    assert sum(o.calls for o in seen.ops) == 2 * len(stream.kernels(decode(6)))
    assert {o.phase for o in seen.ops} == {"prefill", "decode"} and seen.lost.total == 0


def test_graphs_that_never_become_known_are_lost() -> None:
    stream, to = Stream(), session()
    for position in range(6, 9):
        stream.call(decode(position))
    events, ops, nodes, ints = stream.take()
    to.feed(events, ops, nodes[:0], ints, stream.now)
    assert to.snapshot(stream.now).lost.total == 0
    to.finish(stream.now)
    assert to.snapshot(stream.now).lost.by_kind == {"graph": 3}


def test_nodes_that_could_not_be_read() -> None:
    """C10: used as unknown, asked for again a few times, and then accepted as it is."""
    stream, to = Stream(), session()
    asked = 0
    for position in range(6, 16):
        stream.sent.clear()
        stream.call(decode(position))
        events, ops, nodes, ints = stream.take()
        nodes["fault"][0] = 1
        to.feed(events, ops, nodes, ints, stream.now)
        asked += len(to.take_resend())
        if to.take_confirmed():
            break
    assert 1 <= asked <= 4 and position < 15
    seen = to.snapshot(stream.now)
    assert "unknown" in {o.op for o in seen.ops}
    assert any(o.flops is None for o in seen.ops if o.op == "unknown")


def test_forgotten_graphs_keep_their_sums() -> None:
    """The cache of graphs is bounded; totals are not forgotten with it, and it is refilled."""
    stream = Stream()
    to = Session(OPS, TYPES, facts(), START, unary=UNARY, glu=GLU, max_graphs=1, max_plans=2)
    expected = 0
    for turn in range(2):
        for length in range(3, 8):
            stream.call(prompt(100 * turn, length))
            expected += len(stream.kernels(prompt(0, length)))
            stream.drain(to)
            # The kernel was told to send again what it had thought known.
            if turn:
                stream.call(prompt(100 * turn + 50, length))
                expected += len(stream.kernels(prompt(0, length)))
                stream.drain(to)
    seen = stream.snapshot(to)
    assert len(to.graphs()) == 1 and len(to.plans) == 2
    assert sum(o.calls for o in seen.ops) == expected and seen.lost.total == 0
    assert all(g.nodes and g.topology and g.tokens for g in seen.graphs)


def test_costs_outlive_the_graph() -> None:
    """The same figures whether graphs are kept or not, experts seen later included."""
    one = moe(4)
    where = next(i for i, n in enumerate(one.nodes) if n.op == "MUL_MAT_ID")
    found = []
    for kept in (1, 50):
        stream = Stream()
        to = Session(OPS, TYPES, facts(), START, unary=UNARY, glu=GLU, max_graphs=kept)
        for turn in range(3):
            for n in range(3, 6):
                stream.call(prompt(100 * turn, n))
            stream.call(Step(range(4), [3], graph=one, hash=77, experts={where: 3 + turn}))
            stream.drain(to)
        assert len(to.graphs()) == min(kept, 4) and len(to.plans) == 4
        found.append(stream.snapshot(to).ops)
    assert found[0] == found[1] and all(o.bytes is not None for o in found[0])


def test_per_node_sums() -> None:
    stream, to = Stream(), session()
    for position in (6, 7):
        stream.call(decode(position))
    stream.drain(to)
    ((tgid, graph),) = to.graphs()
    n = len(graph.nodes)
    sums = to.node_sums(tgid, graph.hash)
    assert set(sums) == {Phase.PREFILL, Phase.DECODE}
    ran = np.zeros(2 * n, dtype=np.int64)
    for index, fused in stream.kernels(decode(6)):
        ran[index + n * fused] = 1
    assert (sums[Phase.DECODE].calls == ran).all() and (sums[Phase.DECODE].ns == ran * OP_NS).all()
    assert to.node_sums(tgid, 123) == {}


def test_a_graph_whose_memory_could_not_be_read() -> None:
    """C10: no hash, no positions; the call counts, and nothing is made up from zeros."""
    stream, to = Stream(), session()
    a, s = stream.next_seq(), stream.next_seq()
    begin = stream.now
    stream.event(CALL_BEGIN, a, PROCESS, call=a, object=1, status=1)
    stream.event(GRAPH_BEGIN, s, SCHED, call=a, object=2, flags=FAULT)
    stream.event(GRAPH_END, s, SCHED, call=a, object=2, begin_ts=begin)
    stream.event(CALL_END, a, PROCESS, call=a, object=1, begin_ts=begin)
    seen = stream.snapshot(to, ST_FAULT_GRAPH=1)
    assert [(c.phase, c.count) for c in seen.calls] == [("other", 1)]
    assert (seen.tokens.prefill, seen.tokens.decode) == (0, 0)
    assert [g.id for g in seen.graphs] == [None] and seen.lost.by_kind == {"fault_graph": 1}


def test_descriptor_flag_without_records_is_survived() -> None:
    """C11: a described graph whose descriptors were all lost is asked for again."""
    stream, to = Stream(), session()
    s = stream.next_seq()
    stream.event(GRAPH_BEGIN, s, SCHED, object=2, hash=42, n_nodes=3, flags=DESCRIBED)
    stream.event(GRAPH_END, s, SCHED, object=2, begin_ts=stream.now)
    to.feed(*stream.take(), stream.now)
    assert to.take_resend() == [(100, 42)]
