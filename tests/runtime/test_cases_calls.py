# SPDX-License-Identifier: Apache-2.0
"""Calls, tokens and graphs of the stub engine, against its own log."""

from __future__ import annotations

import json

import pytest

from profinferd.agent.model.snapshot import Snapshot
from profinferd.exporters.json_export import JsonExporter

from .cases import METHODS, Engine, Watch, call_span, check_ops, engine, kernels, kernels_seen


def calls(snapshot: Snapshot) -> dict[int, int]:
    """Status -> how many calls returned it."""
    found: dict[int, int] = {}
    for call in snapshot.calls:
        found[call.status] = found.get(call.status, 0) + call.count
    return found


@pytest.mark.parametrize("method", METHODS)
def test_everything_at_once(method: str) -> None:
    """Every kernel of a dense and a MoE graph, on the main and another thread, with a helper thread: same
    op, same count, same seconds, whatever way of attaching."""
    with Engine(engine()) as stub, Watch(stub, method) as watch:
        replies = [
            watch.run("pos=0-3 out=3"),
            watch.run("pos=4 out=0 thread workers"),
            watch.run("pos=5 out=0 moe fuse=0"),
            watch.run("pos=6 out=0 moe fn=process workers"),
        ]
        snapshot = watch.snapshot()
        check_ops(snapshot, replies)
        assert snapshot.target.attach.method == method and snapshot.target.attach.complete
        assert (snapshot.tokens.prefill, snapshot.tokens.decode, snapshot.tokens.output_rows) == (4, 3, 4)
        assert snapshot.requests.started == 1 and calls(snapshot) == {0: 4}
        counters = snapshot.counters
        assert counters is not None
        everything = sum(kernels(replies).values())
        assert counters.hits["op"] == everything
        assert counters.hits["op_other_thread"] == sum(kernels([replies[1], replies[3]]).values())


@pytest.mark.parametrize("method", ["session", "perf"])
def test_four_sequences_in_one_call(method: str) -> None:
    """C06: one decode of 4 sequences x 100 prompt tokens in 50 ms is 50 ms and 400 tokens."""
    with Engine(engine()) as stub, Watch(stub, method) as watch:
        reply = watch.run("pos=" + ",".join(["0-99"] * 4) + " out=99,199,299,399 us=1700")
        truth = call_span(reply)
        snapshot = watch.snapshot()
        assert truth.least >= 0.045
        assert calls(snapshot) == {0: 1}
        assert sum(call.seconds for call in snapshot.calls) in truth
        assert sum(graph.seconds for graph in snapshot.graphs if not graph.split) in truth
        assert 0.045 <= sum(op.seconds for op in snapshot.ops) <= truth.most
        tokens = snapshot.tokens
        assert (tokens.prefill, tokens.decode, tokens.output_rows) == (400, 0, 4)
        assert snapshot.requests.started == 4 and snapshot.requests.first_rows == 4
        first = snapshot.latency_seconds.time_to_first_token
        assert first.count == 4 and first.mean is not None and first.mean in truth
        check_ops(snapshot, [reply])


@pytest.mark.parametrize("computes", [0, 1], ids=["refused", "computed"])
def test_retries_with_less(computes: int) -> None:
    """C07: 1 for 512, 256 and 128 tokens, then 0 for 64: 4 calls, 3 of status 1, the last one's tokens."""
    with Engine(engine()) as stub, Watch(stub) as watch:
        failed = [
            watch.run(f"pos=0-{n - 1} out={n - 1} status=1 compute={computes} us=100")
            for n in (512, 256, 128)
        ]
        good = watch.run("pos=0-63 out=63 us=100")
        snapshot = watch.snapshot()
        assert calls(snapshot) == {1: 3, 0: 1}
        assert (snapshot.tokens.prefill, snapshot.tokens.decode, snapshot.tokens.output_rows) == (64, 0, 1)
        first = snapshot.latency_seconds.time_to_first_token
        assert first.count == 1 and first.mean is not None
        assert first.mean in call_span(good)
        assert snapshot.latency_seconds.inter_token.count == 0
        assert snapshot.requests.started == 1
        # What was computed for nothing took its time all the same, and is marked.
        check_ops(snapshot, [*failed, good] if computes else [good])
        assert sum(graph.failed for graph in snapshot.graphs) == 3 * computes


@pytest.mark.parametrize("status", [2, -1, -3])
def test_other_statuses(status: int) -> None:
    """C07: every status has its name, negative ones too."""
    with Engine(engine()) as stub, Watch(stub, ops="off") as watch:
        watch.run(f"pos=0-3 out=3 status={status}")
        assert calls(watch.snapshot()) == {status: 1}


def test_cached_prefix() -> None:
    """C14: after a long prompt a prompt of which one token is left: no division by what was not processed."""
    with Engine(engine()) as stub, Watch(stub) as watch:
        watch.run("pos=0-511 out=511 us=50")
        watch.run("pos=512 out=0 times=3 us=50")
        watch.run("pos=300 out=0 us=50")  # the same prompt again, up to 300 from the cache
        snapshot = watch.snapshot()
        assert (snapshot.tokens.prefill, snapshot.tokens.decode) == (513, 3)
        assert snapshot.requests.started == 2 and snapshot.latency_seconds.time_to_first_token.count == 2
        text = JsonExporter().render(snapshot)
        assert "NaN" not in text and "Infinity" not in text
        json.loads(text)


def test_two_contexts() -> None:
    """C15: 8 calls of one token on one context, one of 9 on another: never added into one sequence."""
    with Engine(engine()) as stub, Watch(stub) as watch:
        watch.run("context=1 pos=0-9 out=9 us=50")
        watch.run("context=2 pos=0-9 out=9 us=50")
        watch.run("context=1 pos=10 out=0 times=8 us=50")  # the draft
        watch.run("context=2 pos=10-18 out=0-8 us=50")  # all of it verified in one call
        watch.run("context=2 pos=19 out=0 us=50")  # every one was right
        snapshot = watch.snapshot()
        by_role = {context.role: context for context in snapshot.contexts}
        assert set(by_role) == {"draft", "target"}
        assert by_role["draft"].calls == 9 and by_role["target"].calls == 3
        assert by_role["draft"].tokens.decode == 8
        assert by_role["target"].tokens.verify == 9 and by_role["target"].tokens.verify_rows == 9
        assert by_role["target"].tokens.verify_accepted == 9
        # Tokens are those of the target; verified ones are submitted, not generated.
        assert (snapshot.tokens.prefill, snapshot.tokens.verify) == (10, 9)
        assert snapshot.tokens.output_rows == 2
        assert sum(call.count for call in snapshot.calls) == 12


@pytest.mark.parametrize("method", ["session", "perf"])
def test_decode_that_encodes(method: str) -> None:
    """C50: decode calling encode is one call; encode alone is prompt tokens and no idleness; both, both."""
    with Engine(engine()) as stub, Watch(stub, method) as watch:
        nested = watch.run("nested pos=0-6 out=0-6")
        assert nested["nested"] == 1
        snapshot = watch.snapshot()
        assert calls(snapshot) == {0: 1}
        assert snapshot.tokens.encode == 7 and snapshot.tokens.output_rows == 0
        assert sum(c.seconds for c in snapshot.calls) in call_span(nested)
        alone = watch.run("fn=encode pos=0-4 out=0-4")
        snapshot = watch.snapshot()
        assert calls(snapshot) == {0: 2} and snapshot.tokens.encode == 12
        after = watch.run("pos=0-1 out=1")
        more = watch.run("pos=2 out=0")
        snapshot = watch.snapshot()
        assert calls(snapshot) == {0: 4} and snapshot.tokens.encode == 12
        assert (snapshot.tokens.prefill, snapshot.tokens.decode, snapshot.tokens.output_rows) == (2, 1, 2)
        check_ops(snapshot, [nested, alone, after, more])
        assert "idle" not in " ".join(snapshot.notes)


@pytest.mark.parametrize("kind", ["process", "process_encode"])
def test_newest_entry_point(kind: str) -> None:
    """C50: llama_process says in its second argument which of the two it is."""
    with Engine(engine()) as stub, Watch(stub, ops="off") as watch:
        watch.run(f"fn={kind} pos=0-5 out=0-5" if "encode" in kind else f"fn={kind} pos=0-5 out=5")
        snapshot = watch.snapshot()
        assert calls(snapshot) == {0: 1}
        assert [c.phase for c in snapshot.calls] == ["encode" if "encode" in kind else "prefill"]


@pytest.mark.parametrize("words", ["", "fuse=0", "alternatives", "plain", "plain fuse=0", "moe alternatives"])
def test_nodes_and_kernels(words: str) -> None:
    """C25: executed, fused and skipped nodes are the stub's own count; nothing is uncovered."""
    with Engine(engine()) as stub, Watch(stub) as watch:
        reply = watch.run(f"pos=0-4 out=4 us=50 {words}")
        snapshot = watch.snapshot()
        check_ops(snapshot, [reply])
        (graph,) = snapshot.graphs
        ran = kernels([reply])
        fused = sum(count for (_, with_next), count in ran.items() if with_next)
        assert graph.nodes == reply["nodes"]
        assert graph.executed == sum(ran.values()) and graph.fused == fused
        assert graph.skipped == reply["nodes"] - sum(ran.values()) - fused
        assert graph.uncovered == 0
        # The halves of fused pairs, views and what was not computed have no time, not a time of 0.
        assert all(op.calls > 0 for op in snapshot.ops)
        assert "SQRT" not in {op.op for op in snapshot.ops} and reply["ops"].count("SQRT") == 2 * (
            "alternatives" in words
        )
        assert not {"VIEW", "RESHAPE", "PERMUTE"} & {op.op for op in snapshot.ops}


def test_empty_graphs_at_the_end_of_a_prompt_chunk() -> None:
    """C25, D10: a chunk without rows: kernels of empty tensors are not run, and not uncovered either."""
    with Engine(engine()) as stub, Watch(stub) as watch:
        replies = [watch.run("pos=0-15 out= us=50"), watch.run("pos=16-19 out=3 us=50")]
        snapshot = watch.snapshot()
        check_ops(snapshot, replies)
        assert (snapshot.tokens.prefill, snapshot.tokens.output_rows, snapshot.requests.started) == (20, 1, 1)


def test_experts() -> None:
    """D11: MUL_MAT_ID reads the matrices of the experts that were used, each once."""
    with Engine(engine()) as stub, Watch(stub) as watch:
        watch.run("pos=0-5 out=5 moe us=50 layers=1")
        watch.run("pos=6 out=0 moe us=50 layers=1")
        snapshot = watch.snapshot()
        moved = {op.phase: op.bytes for op in snapshot.ops if op.op == "MUL_MAT_ID"}
        # Six tokens (one after the choice of rows) of 256 floats, 2 of 4 experts of 256 x 256 q4_0 each.
        matrix, row = 256 * 256 // 32 * 18, 256 * 4
        one = 2 * matrix + row + 2 * 4 + 2 * row
        assert moved == {"prefill": one, "decode": one}
        watch.run("pos=0-5 out=0-5 moe us=50 layers=1 context=3")
        snapshot = watch.snapshot()
        several = {op.phase: op.bytes for op in snapshot.ops if op.op == "MUL_MAT_ID"}
        assert several["encode"] == 3 * matrix + 6 * row + 6 * 2 * 4 + 6 * 2 * row


def test_an_operator_in_the_middle() -> None:
    """C13: one operator more at 10: all names are those of this build's own table."""
    with Engine(engine("-DINSERTED_OP")) as stub, Watch(stub) as watch:
        reply = watch.run("pos=0-3 out=3 alternatives us=50")
        snapshot = watch.snapshot()
        check_ops(snapshot, [reply])
        assert kernels_seen(snapshot)["MUL_MAT", False] == kernels([reply])["MUL_MAT", False] > 0
        assert watch.attachment.info.tables is not None
        assert watch.attachment.info.tables.op(10) == "BRAND_NEW"
        assert watch.attachment.info.tables.op(99) == "op_99"


@pytest.mark.parametrize("flags", [("-DWITHOUT_CALLS",), ("-DWITHOUT_CALLS", "-DWITHOUT_GRAPHS")])
def test_ggml_alone(flags: tuple[str, ...]) -> None:
    """C17: a program of the ggml part alone: operators are seen, calls are "not available"."""
    with Engine(engine(*flags, strip=True)) as stub, Watch(stub) as watch:
        replies = [watch.run("fn=graph pos=0-3 out=3"), watch.run("fn=cpu pos=4 out=0")]
        replies[1]["graph"] = replies[1]["call"]
        snapshot = watch.snapshot()
        check_ops(snapshot, replies)
        assert snapshot.calls == ()
        assert any("not available" in note for note in snapshot.notes), snapshot.notes
        assert any(op.role == "attn_q" for op in snapshot.ops)


def test_calls_alone() -> None:
    """C17: and the other way round: without a function for operators, calls and graphs are seen."""
    with Engine(engine("-DWITHOUT_DISPATCH", "-DWITHOUT_FUSED")) as stub, Watch(stub) as watch:
        watch.run("pos=0-3 out=3")
        watch.run("pos=4 out=0")
        snapshot = watch.snapshot()
        assert (snapshot.tokens.prefill, snapshot.tokens.decode, snapshot.tokens.output_rows) == (4, 1, 2)
        assert snapshot.ops == () and snapshot.target.attach.op_source is None
        assert any("ops: not available" in note for note in snapshot.notes)
        assert {graph.nodes for graph in snapshot.graphs} == {44}
        assert all(graph.executed is None and graph.uncovered is None for graph in snapshot.graphs)


def test_without_rope() -> None:
    """D10: no positions: shapes alone, flagged, and no request is claimed."""
    with Engine(engine()) as stub, Watch(stub) as watch:
        watch.run("rope=0 pos=0-6 out=6 us=50")
        watch.run("rope=0 pos=7 out=0 us=50 times=2")
        snapshot = watch.snapshot()
        assert (snapshot.tokens.prefill, snapshot.tokens.decode, snapshot.tokens.ambiguous) == (7, 2, 9)
        assert snapshot.requests.started == 0


def test_graphs_without_a_number() -> None:
    """D8: uid 0: each execution is recognised by its shape, and positions are read anew."""
    with Engine(engine()) as stub, Watch(stub) as watch:
        replies = [watch.run("uid=0 pos=0-3 out=3 us=50"), watch.run("uid=0 fresh pos=4 out=0 us=50")]
        replies += [watch.run(f"uid=0 fresh pos={n} out=0 us=50") for n in range(5, 10)]
        snapshot = watch.snapshot()
        check_ops(snapshot, replies)
        assert (snapshot.tokens.prefill, snapshot.tokens.decode, snapshot.requests.started) == (4, 6, 1)
        assert sorted(graph.count for graph in snapshot.graphs) == [1, 6]
        assert len(watch.keys("known")) == 2
