# SPDX-License-Identifier: Apache-2.0
"""A session over whole record streams: calls, statuses, frames without end, and the contract."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise

import pytest

from profinferd.agent.model.calls import Call, GraphRun
from profinferd.agent.model.contexts import Contexts
from profinferd.agent.model.snapshot import Snapshot

from .graphs import INPUT, Builder
from .streams import (
    CALL_ABANDONED,
    CALL_BEGIN,
    CALL_END,
    CPU,
    DECODE,
    ENCODE,
    GRAPH_ABANDONED,
    GRAPH_BEGIN,
    GRAPH_END,
    PROCESS,
    SCHED,
    START,
    UNPAIRED,
    Step,
    Stream,
    decode,
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


def test_a_graph_described_in_an_execution_that_never_ended() -> None:
    """C21: the kernel does not describe it again by itself, and takes it for sent."""
    stream, to = Stream(), session()
    stream.graph(prompt(0, 6), levels=(CPU,))
    stream.events[-1]["kind"] = GRAPH_ABANDONED
    stream.drain(to)
    assert stream.sent and not stream.confirmed
    stream.call(prompt(0, 6))
    stream.drain(to)
    assert not stream.sent, "it is asked for"
    stream.call(prompt(0, 6))
    seen = stream.snapshot(to)
    assert stream.confirmed == stream.sent
    assert sum(op.calls for op in seen.ops) == 2 * len(stream.kernels(prompt(0, 6))), "and the first is known"


def test_a_possible_warm_up_survives_that_its_context_gets_known() -> None:
    """What a scheduler did before its context was known is settled, not forgotten."""
    contexts = Contexts()
    run = GraphRun(5, 7, 7, SCHED, 0xC9, 1, 10, 0, 1, 0, 0, [], [], None)

    def call(seq: int, object: int, *graphs: GraphRun) -> Call:
        return Call(seq, 7, 7, DECODE, object, 0, 1, False, graphs=list(graphs))

    contexts.of(call(1, 0xC0))
    early, gone = contexts.of(call(0, 0, run))
    early.held = object()
    assert gone == []
    context, gone = contexts.of(call(2, 0xC0, run))
    assert gone == [early] and contexts.all() == [context]


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
        "hits": 104, "ns_per_hit": 650.0, "machine_seconds": None,
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
