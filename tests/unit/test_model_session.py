# SPDX-License-Identifier: Apache-2.0
"""A session over whole record streams: calls, graphs, kernels, and what was lost of them."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from profinferd.agent.model import costs
from profinferd.agent.model.session import Session
from profinferd.agent.model.snapshot import Snapshot
from profinferd.agent.model.tokens import Phase

from .graphs import GLU, INPUT, OPS, TYPES, UNARY, Builder, decoder
from .streams import (
    BACKEND,
    CALL_ABANDONED,
    CALL_BEGIN,
    CALL_END,
    CPU,
    DECODE,
    DESCRIBED,
    ENCODE,
    FAULT,
    GRAPH_ABANDONED,
    GRAPH_BEGIN,
    GRAPH_END,
    OP_NS,
    PROCESS,
    SCHED,
    SETUP,
    START,
    UNPAIRED,
    Step,
    Stream,
    decode,
    facts,
    prompt,
    session,
)


def by_status(seen: Snapshot) -> dict[int, int]:
    found: Counter[int] = Counter()
    for call in seen.calls:
        found[call.status] += call.count
    return dict(found)


# -- calls ---------------------------------------------------------------------


def test_retries_after_no_space() -> None:
    """C07: 1, 1, 1, 0 for n = 512, 256, 128, 64: tokens of the last call only."""
    stream, to = Stream(), session()
    for n, status in ((512, 1), (256, 1), (128, 1), (64, 0)):
        steps = [prompt(0, n)] if status == 0 else []
        stream.call(*steps, status=status, batch=n)
    seen = stream.snapshot(to)
    assert by_status(seen) == {0: 1, 1: 3}
    assert seen.tokens.prefill == 64 and seen.requests.started == 1
    assert seen.latency_seconds.time_to_first_token.count == 1
    assert all(call.phase == "prefill" for call in seen.calls)


def test_graphs_inside_a_failed_call() -> None:
    """C07: they ran and are marked; their tokens do not count and latency does not see them."""
    stream, to = Stream(), session()
    stream.call(prompt(0, 6))
    stream.call(decode(6), status=2)
    stream.call(decode(6), status=-3)
    stream.call(decode(6))
    seen = stream.snapshot(to)
    assert seen.tokens.decode == 1 and seen.latency_seconds.inter_token.count == 1
    (graph,) = (g for g in seen.graphs if g.phase == "decode")
    assert (graph.count, graph.failed) == (3, 2)


def test_status_is_an_int_of_the_engine() -> None:
    """The upper half of the return register is whatever was there."""
    stream, to = Stream(), session()
    stream.call(decode(6), status=0x1234_5678_0000_0001)
    stream.call(decode(6), status=0x0000_0000_FFFF_FFFD)
    assert by_status(stream.snapshot(to)) == {1: 1, -3: 1}


def test_statuses_are_bounded() -> None:
    stream, to = Stream(), session()
    for status in range(1, 200):
        stream.call(status=status, batch=1)
    seen = stream.snapshot(to)
    assert sum(by_status(seen).values()) == 199 and len(by_status(seen)) <= 17


def nested(stream: Stream, outer: int, inner: int, *steps: Step, ctx: int = 0xC0) -> None:
    """One call inside another on the same context."""
    a, b, begin = stream.next_seq(), stream.next_seq(), stream.now
    stream.event(CALL_BEGIN, a, outer, call=a, object=ctx, batch_tokens=9)
    stream.event(CALL_BEGIN, b, inner, call=a, parent=a, object=ctx, batch_tokens=9)
    for step in steps:
        stream.graph(step, call=a, sched=ctx + 1)
    stream.event(CALL_END, b, inner, call=a, parent=a, object=ctx, begin_ts=begin)
    stream.event(CALL_END, a, outer, call=a, object=ctx, begin_ts=begin)


def encoder(tokens: int, pooled: int) -> Builder:
    """Attention without a cache and no LM head: ends in a pooled embedding."""
    b = Builder()
    embd = b.leaf("token_embd.weight", "q8_0", 256, 100)
    x = b.gather(embd, b.leaf("inp_tokens", "i32", tokens, flags=INPUT), "embd")
    mask = b.leaf("leaf_3", "f16", tokens, tokens, flags=INPUT)
    q = b.mul_mat(b.leaf("blk.0.attn_q.weight", "q4_K", 256, 256), x, "Qcur-0")
    heads = b.view("RESHAPE", q, 64, tokens, 4)
    x = b.op("FLASH_ATTN_EXT", "f32", (64, 4, tokens), heads, heads, heads, mask)
    x = b.view("RESHAPE", x, 256, tokens)
    means = b.leaf("inp_mean", "f32", tokens, pooled, flags=INPUT)
    b.mul_mat(b.op("CONT", "f32", (tokens, 256), x), means, "result_embd_pooled")
    return b


def embed(tokens: int, sequences: int = 1) -> Step:
    return Step(range(tokens), [], graph=encoder(tokens, sequences), hash=1000 + tokens)


@pytest.mark.parametrize("level", [ENCODE, DECODE, PROCESS])
def test_embeddings(level: int) -> None:
    """C50: prompt tokens and no generation, whichever entry point; nothing looks idle."""
    stream, to = Stream(), session()
    stream.call(embed(9), level=level, batch=0)
    seen = stream.snapshot(to)
    assert [(c.phase, c.count) for c in seen.calls] == [("encode", 1)]
    assert (seen.tokens.encode, seen.tokens.encode_rows) == (9, 1)
    assert (seen.tokens.prefill, seen.tokens.decode, seen.tokens.output_rows) == (0, 0, 0)
    assert seen.requests.started == 0
    assert seen.counters is not None and seen.counters.prompt_tokens == 9


def test_decode_that_encodes_inside_counts_once() -> None:
    """C50: the outermost call counts, and it is an encode."""
    stream, to = Stream(), session()
    nested(stream, DECODE, ENCODE, embed(9))
    seen = stream.snapshot(to)
    assert [(c.phase, c.count) for c in seen.calls] == [("encode", 1)]
    assert seen.tokens.encode == 9


def test_encode_then_decode() -> None:
    """C50: encoder and decoder of one model in two calls."""
    stream, to = Stream(), session()
    stream.call(embed(9), level=ENCODE)
    stream.call(decode(0))
    stream.call(decode(1))
    seen = stream.snapshot(to)
    assert {c.phase: c.count for c in seen.calls} == {"encode": 1, "prefill": 1, "decode": 1}
    assert (seen.tokens.encode, seen.tokens.prefill, seen.tokens.decode) == (9, 1, 1)


def test_calls_without_any_graph() -> None:
    """C06, C15: only entry points have probes: tokens submitted per context, flagged as a guess."""
    stream, to = Stream(), session(has_graphs=False, has_ops=False)
    for _ in range(8):
        stream.call(ctx=0xA0, batch=1, around=10_000_000)
    stream.call(ctx=0xB0, batch=400, around=25_000_000)
    seen = stream.snapshot(to)
    assert (seen.tokens.prefill, seen.tokens.decode, seen.tokens.output_rows) == (400, 8, 0)
    assert seen.tokens.ambiguous == 408
    assert sum(c.seconds for c in seen.calls) == pytest.approx(8 * 0.02 + 0.05, rel=1e-9)
    assert [c.tokens.ambiguous for c in sorted(seen.contexts, key=lambda c: c.context)] == [8, 400]
    assert any("shape" in note for note in seen.notes) and any("output rows" in n for n in seen.notes)


def test_ggml_without_llama() -> None:
    """C17: the op view works, the token view is absent and says so."""
    stream, to = Stream(), session(has_calls=False, has_graphs=False)
    b = Builder()
    x = b.leaf("x", "f32", 256, 3, flags=INPUT)
    b.same("ADD", b.mul_mat(b.leaf("w", "q8_0", 256, 64), x), b.leaf("bias", "f32", 64))
    stream.graph(Step([], graph=b, hash=5), levels=(CPU,))
    seen = stream.snapshot(to)
    assert {(o.op, o.calls) for o in seen.ops} == {("MUL_MAT", 1), ("ADD", 1)}
    assert seen.tokens.prefill is None and seen.requests.started is None
    assert any("not available" in note for note in seen.notes)
    assert [(g.phase, g.backend, g.count) for g in seen.graphs] == [("other", "CPU", 1)]


def test_frames_without_a_return() -> None:
    """C21: abandoned by longjmp, by a later call on the thread, by the end of the thread."""
    stream, to = Stream(), session()
    a, b, c = (stream.next_seq() for _ in range(3))
    stream.event(CALL_BEGIN, a, DECODE, call=a, object=1, batch_tokens=4)
    stream.event(GRAPH_BEGIN, b, SCHED, call=a, object=2, hash=9, n_nodes=3)
    stream.event(GRAPH_ABANDONED, b, SCHED, object=2)
    stream.event(CALL_ABANDONED, a, DECODE, object=1)
    stream.event(CALL_BEGIN, c, DECODE, call=c, object=1, batch_tokens=4)
    stream.call(prompt(0, 6), ctx=1)
    d = stream.next_seq()
    stream.event(CALL_BEGIN, d, DECODE, call=d, object=1, batch_tokens=4, tid=55)
    e = stream.next_seq()
    stream.event(GRAPH_BEGIN, e, CPU, call=d, hash=9, n_nodes=3, tid=55)
    stream.drain(to)
    assert to.stacks.open == 2
    to.sweep([55], stream.now)
    seen = stream.snapshot(to)
    assert to.stacks.open == 0
    assert seen.unreturned == 3 and by_status(seen) == {0: 1}
    assert seen.tokens.prefill == 6
    assert seen.lost.by_kind == {"abandoned": 2}


def test_ends_of_what_began_before_us() -> None:
    stream, to = Stream(), session()
    stream.event(GRAPH_END, 0, SCHED, flags=UNPAIRED)
    stream.event(CALL_END, 0, DECODE, flags=UNPAIRED)
    stream.call(prompt(0, 6))
    seen = stream.snapshot(to)
    assert by_status(seen) == {0: 1} and any("before we attached" in note for note in seen.notes)


def test_a_call_whose_begin_record_was_lost() -> None:
    """C11: its end repeats begin and object, so only the batch size is missing."""
    stream, to = Stream(), session()
    stream.call(prompt(0, 6))
    stream.events.pop(0)
    stream.call(decode(6))
    seen = stream.snapshot(to)
    assert (seen.tokens.prefill, seen.tokens.decode, seen.requests.started) == (6, 1, 1)
    assert len(seen.contexts) == 1


def test_records_in_pieces() -> None:
    """Drains cut the stream anywhere: events first, what belongs to them in the same or before."""
    whole, pieces = Stream(), Stream()
    at_once, piecewise = session(), session()
    for stream in (whole, pieces):
        stream.call(prompt(0, 40))
        for position in range(40, 60):
            stream.call(decode(position))
    events, ops, nodes, ints = pieces.take()
    cuts = [0, 1, 2, 5, 6, 9, 40, 41, 90, len(events)]
    for low, high in pairwise(cuts):
        until = events["ts"][high - 1] if high < len(events) else 2**63
        late = events["ts"][low - 1] if low else 0
        part = ops[(ops["ts"] <= until) & (ops["ts"] > late)]
        piecewise.feed(events[low:high], part, nodes if low == 0 else nodes[:0],
                       ints if low == 0 else ints[:0], pieces.now)  # fmt: skip
    a, b = whole.snapshot(at_once), piecewise.snapshot(pieces.now)
    assert a.to_json_dict() == b.to_json_dict()


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
    assert (whole.backend, whole.count, whole.seconds) == ("mixed", 1, pytest.approx(0.0062))


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


# -- the contract ------------------------------------------------------------------


def test_json_has_the_keys_of_the_contract() -> None:
    """Design section 4, to the letter; what is not known is null and a note says why."""
    stream, to = Stream(), session()
    stream.call(prompt(0, 6))
    stream.call(decode(6))
    one = stream.snapshot(to, ST_HITS_CALL=4, ST_HITS_OP=100, ns_per_hit=650.0).to_json_dict()
    again = json.loads(json.dumps(one, allow_nan=False))
    assert again == one and one["schema"] == 1
    keys = {
        "schema", "target", "window_seconds", "tokens", "calls", "latency_seconds", "graphs", "ops",
        "overhead", "lost", "notes",
    }  # fmt: skip
    assert keys <= set(one)
    assert {"pid", "exe", "engine", "model", "libraries", "layout", "attach"} <= set(one["target"])
    assert set(one["target"]["layout"]) == {"source", "name"}
    assert set(one["target"]["attach"]) == {"method", "op_source", "complete"}
    assert {"prefill", "decode", "output_rows"} <= set(one["tokens"])
    assert {"phase", "status", "count", "seconds"} <= set(one["calls"][0])
    for which in ("time_to_first_token", "inter_token"):
        assert set(one["latency_seconds"][which]) == {"count", "mean", "p50", "p90", "p99"}
    graph = {"id", "topology", "phase", "backend", "nodes", "executed", "uncovered", "tokens", "rows",
             "kv_length", "count", "sampled", "seconds", "setup_seconds"}  # fmt: skip
    assert graph <= set(one["graphs"][0])
    op = {"op", "dtype", "role", "kernel", "backend", "phase", "calls", "seconds", "seconds_stderr",
          "flops", "bytes"}  # fmt: skip
    assert op <= set(one["ops"][0])
    assert one["overhead"] == {
        "budget_ratio": None, "estimated_ratio": None, "measured_ratio": None, "measured_ci95": None,
        "hits": 104, "ns_per_hit": 650.0,
    }  # fmt: skip
    assert one["lost"] == {"total": 0, "by_kind": {}}
    assert any("overhead" in note for note in one["notes"])


def test_an_idle_target() -> None:
    to = session()
    seen = to.snapshot(START + 5_000_000_000)
    assert seen.window_seconds == pytest.approx(5.0)
    assert (seen.tokens.prefill, seen.calls, seen.ops, seen.graphs) == (0, (), (), ())
    assert seen.latency_seconds.inter_token.mean is None
    json.dumps(seen.to_json_dict(), allow_nan=False)


def test_descriptor_flag_without_records_is_survived() -> None:
    """C11: a described graph whose descriptors were all lost is asked for again."""
    stream, to = Stream(), session()
    s = stream.next_seq()
    stream.event(GRAPH_BEGIN, s, SCHED, object=2, hash=42, n_nodes=3, flags=DESCRIBED)
    stream.event(GRAPH_END, s, SCHED, object=2, begin_ts=stream.now)
    to.feed(*stream.take(), stream.now)
    assert to.take_resend() == [(100, 42)]
