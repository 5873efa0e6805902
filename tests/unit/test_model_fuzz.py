# SPDX-License-Identifier: Apache-2.0
"""Any records in any order: no exception, bounded memory, counters that never go back."""

from __future__ import annotations

import json
from typing import Any

import hypothesis.strategies as st
import numpy as np
from hypothesis import given, settings

from profinferd.agent.model.session import Session
from profinferd.agent.model.snapshot import Snapshot

from .graphs import NODE_DESC
from .streams import EVENT, INT_CHUNK, OP_HIT, START, Records, Step, Stream, decode, prompt, session, verify

_INTERESTING = [0, 1, 2, 3, 4, 8, 9, 10, 255, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1]


def garbage(dtype: np.dtype[np.void], seed: int, count: int) -> Records:
    """Random bytes, with small numbers where kinds, levels and sequence numbers must collide."""
    rng = np.random.default_rng(seed)
    records = np.frombuffer(rng.bytes(dtype.itemsize * count), dtype=dtype).copy()
    for name in dtype.names or ():
        field = records[name]
        if field.dtype.kind not in "ui":
            continue
        few = rng.choice(np.array(_INTERESTING, dtype=np.uint64), size=field.shape)
        small = rng.integers(0, 12, size=field.shape).astype(np.uint64)
        pick = rng.integers(0, 10, size=field.shape)
        mixed = np.where(pick < 6, small, np.where(pick < 8, few, field.astype(np.uint64)))
        records[name] = mixed.astype(field.dtype)
    return records


def counters(seen: Snapshot) -> dict[Any, float]:
    """Everything that monitoring takes for a counter."""
    assert seen.counters is not None and seen.histograms is not None
    found: dict[Any, float] = {
        "prompt": seen.counters.prompt_tokens, "generated": seen.counters.generation_tokens,
        "verified": seen.counters.verify_tokens, "unreturned": seen.unreturned,
    }  # fmt: skip
    for call in seen.calls:
        found["call", call.phase, call.status] = call.count
        found["call_seconds", call.phase, call.status] = call.seconds
    for graph in seen.counters.graphs:
        found["graphs", graph.phase, graph.backend] = graph.count
        found["graph_seconds", graph.phase, graph.backend] = graph.seconds
        found["sampled", graph.phase, graph.backend] = graph.sampled
    for op in seen.ops:
        key = (op.op, op.dtype, op.role, op.kernel, op.phase, op.backend)
        found["ops", key], found["op_seconds", key] = op.calls, op.seconds
        if op.flops is not None:
            found["flops", key] = op.flops
        if op.bytes is not None:
            found["bytes", key] = op.bytes
    for kind, count in seen.lost.by_kind.items():
        found["lost", kind] = count
    for name in ("time_to_first_token", "inter_token"):
        histogram = getattr(seen.histograms, name)
        found[name, "sum"] = histogram.sum
        found.update({(name, i): count for i, count in enumerate(histogram.counts)})
    return found


def check(to: Session, now: int, before: dict[Any, float]) -> dict[Any, float]:
    seen = to.snapshot(now)
    json.dumps(seen.to_json_dict(), allow_nan=False)
    after = counters(seen)
    for key, value in before.items():
        if key[0] in ("flops", "bytes") and key not in after:
            continue  # a kernel without a formula makes the sum unknown
        assert after[key] >= value, key
    return after


def bounded(to: Session) -> None:
    assert to.stacks.open <= 2 * 4096 and len(to.contexts.all()) <= 64
    assert len(to.graphs()) <= 8 and len(to.plans) <= 128 and to.work.pending <= 1024
    assert len(to.plans.confirmed) <= 100_000 and len(to.plans.resend) <= 100_000


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 2**32), min_size=1, max_size=4), st.integers(0, 200))
def test_garbage(seeds: list[int], count: int) -> None:
    """C21, C11: nothing in a record is trusted."""
    to = session(age_seconds=1.0)
    before: dict[Any, float] = {}
    for seed in seeds:
        parts = [garbage(d, seed + i, count) for i, d in enumerate((EVENT, OP_HIT, NODE_DESC, INT_CHUNK))]
        to.feed(parts[0], parts[1], parts[2], parts[3], START + seed)
        to.sweep({seed % 12}, START + seed)
        before = check(to, START + seed, before)
        bounded(to)
    to.finish(START + 2**40)
    check(to, START + 2**40, before)


steps = st.one_of(
    st.builds(prompt, st.integers(0, 40), st.integers(1, 12), st.booleans()),
    st.builds(lambda ps: decode(*ps), st.lists(st.integers(0, 40), min_size=1, max_size=4)),
    st.builds(verify, st.integers(0, 40), st.integers(2, 5)),
    st.builds(lambda p: Step(p, [0]), st.permutations(range(6))),
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.lists(steps, max_size=3), st.sampled_from([0, 0, 0, 1, -2]), st.booleans()),
             min_size=1, max_size=12),
    st.integers(0, 2**32),
    st.sampled_from([0.0, 0.1, 0.5]),
)  # fmt: skip
def test_real_streams_with_losses(calls: list[tuple[list[Step], int, bool]], seed: int, rate: float) -> None:
    """Any batches in any order; records lost at random in every ring, and drains anywhere."""
    rng = np.random.default_rng(seed)
    stream, to = Stream(), session(age_seconds=1.0)
    before: dict[Any, float] = {}
    for batch, status, drain in calls:
        stream.call(*batch, status=status, ctx=int(rng.integers(1, 4)))
        if drain:
            kept = [part[rng.random(len(part)) >= rate] for part in stream.take()]
            to.feed(kept[0], kept[1], kept[2], kept[3], stream.now)
            before = check(to, stream.now, before)
    stream.drain(to)
    to.finish(stream.now)
    after = check(to, stream.now, before)
    bounded(to)
    if rate == 0:
        seen = to.snapshot(stream.now)
        done = [step for batch, status, _ in calls for step in batch if status == 0]
        tokens = seen.tokens
        parts = (tokens.prefill, tokens.decode, tokens.verify, tokens.encode, tokens.warmup)
        draft = sum(
            sum(x or 0 for x in (c.tokens.prefill, c.tokens.decode, c.tokens.verify, c.tokens.encode))
            for c in seen.contexts if c.role == "draft"
        )  # fmt: skip
        # Every token of a successful call is counted exactly once.
        assert sum(p or 0 for p in parts) + draft == sum(len(step.pos) for step in done)
        assert sum(call.count for call in seen.calls) == len(calls)
        assert after[("lost", "graph")] == 0 if ("lost", "graph") in after else True


def test_endless_garbage_is_bounded() -> None:
    """Memory after many rounds of records that never end is that of a few."""
    to = session()
    for seed in range(5):
        events = garbage(EVENT, seed, 3000)
        events["kind"] = np.where(events["kind"] % 2, 1, 3)
        events["seq"] = np.arange(3000) + 3000 * seed
        events["tid"] = events["seq"]
        events["parent"] = 0
        ops = garbage(OP_HIT, seed, 60_000)
        ops["seq"] = np.arange(60_000) + 10**6 * seed
        ints = garbage(INT_CHUNK, seed, 3000)
        ints["seq"] = np.arange(3000) + 10**6 * seed
        nodes = garbage(NODE_DESC, seed, 3000)
        nodes["seq"] = np.arange(3000) + 10**6 * seed
        to.feed(events, ops, nodes, ints, START + seed)
        assert to.stacks.open <= 8192
    assert len(to._hits._by_seq) <= 8192 and to._hits.held <= 1 << 19
    assert to._chunks._held <= 8192 and to.plans.held <= 1 << 16
    assert to.snapshot(START + 99).lost.by_kind["unended_ops"] > 0
