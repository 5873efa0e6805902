# SPDX-License-Identifier: Apache-2.0
"""Spans and faults joined with calls: who paid, in which op, and who took the core."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profinferd.agent.model.causes import Cause
from profinferd.agent.model.graphwork import Mark
from profinferd.agent.model.session import Session, Settled
from profinferd.agent.model.tokens import Phase
from profinferd.agent.model.waiting import MAX_TAKERS, SHOWN_TAKERS, CallWaits, Span, stalls

from .causerecords import records
from .streams import FUSED, START, Stream, decode, prompt, session

P, W, F, X = Cause.PREEMPTED, Cause.WAKEUP, Cause.FAULT, Cause.FUTEX


def span(begin: int, end: int, cause: Cause = P, woken: int | None = None, tid: int = 1) -> Span:
    woken = begin if cause.ready else woken if woken is not None else end
    return Span(begin, woken, end, tid, cause, True, 0, 0)


@pytest.mark.parametrize(
    ("spans", "windows", "expected"),
    [
        ([span(10, 30)], [(0, 100)], {P: 20}),
        ([span(10, 30), span(20, 50, tid=2)], [(0, 100)], {P: 40}),  # no second counts twice
        ([span(10, 50), span(20, 30, F, tid=2)], [(0, 100)], {P: 40}),  # the first one's cause
        ([span(10, 40, F, woken=25)], [(0, 100)], {F: 15, W: 15}),
        ([span(10, 40)], [(0, 20), (35, 100)], {P: 15}),  # nothing between two graphs
        ([span(10, 40, X, woken=30)], [(0, 100)], {W: 10}),  # asleep at a barrier: nobody waits
        ([span(10, 40)], [(50, 60)], {}),
        ([], [(0, 100)], {}),
    ],
)
def test_stalls(spans: list[Span], windows: list[tuple[int, int]], expected: dict[Cause, int]) -> None:
    assert dict(stalls(spans, windows)) == expected


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=12), st.integers(0, 60))
def test_stalls_are_a_union(pairs: list[tuple[int, int]], cut: int) -> None:
    """Against counting every ns by itself."""
    spans = [span(min(p), max(p), tid=n) for n, p in enumerate(pairs)]
    windows = [(5, min(cut, 40)), (max(cut, 41), 55)] if cut > 5 else [(5, 55)]
    inside = {t for a, b in windows for t in range(a, b)}
    whole = {t for one in spans for t in range(one.begin, one.end)} & inside
    assert stalls(spans, windows).total() == len(whole)


class Watched:
    """A session with waits joined to its calls."""

    def __init__(self) -> None:
        self.stream, self.session = Stream(), session()
        self.waits = CallWaits(self.stream.tgid, self.session.plans)
        self.settled: list[tuple[Phase, int]] = []
        self.session.listeners.append(self._on)

    def _on(self, settled: Settled, phase: Phase, mark: Mark) -> None:
        tokens = sum(one.tokens for one in settled.tokens)
        self.settled.append((phase, tokens))
        self.waits.call(settled.call, phase, tokens)

    def spans(self, *rows: dict[str, object]) -> None:
        self.waits.take_spans(records("sched_span", *rows, tgid=self.stream.tgid, tid=self.stream.tgid))

    def drain(self) -> Session:
        self.stream.drain(self.session)
        return self.session


def test_the_token_that_paid() -> None:
    one = Watched()
    one.stream.call(prompt(0, 4))
    one.stream.now += 1000
    begin = one.stream.now
    length = one.stream.call(decode(4))
    one.stream.call(decode(5))
    # 3 us of the first decode, of which 2 us a fault; another process's spans are not ours.
    at = begin + 3000
    one.spans(
        {"begin": at, "woken": at + 2000, "end": at + 3000, "cause": F, "flags": 1},
        {"begin": at, "woken": at, "end": at + 9000, "cause": P, "tgid": 9},
    )
    one.waits.take_faults(
        records(
            "fault_rec",
            {"ts": at + 3000, "kind": 1},
            {"ts": at + 3500, "kind": 0},
            {"ts": begin - 500, "kind": 0},
            {"ts": at, "kind": 1, "tgid": 9},
            tgid=one.stream.tgid,
        )
    )
    one.drain()
    phases = {p.phase: p for p in one.waits.phases()}
    decodes = phases["decode"]
    assert (decodes.calls, decodes.tokens) == (2, 2)
    assert decodes.stalled == {"fault": 2e-6, "wakeup": 1e-6} == decodes.own
    assert decodes.worst == 3e-6
    assert (decodes.majors, decodes.minors) == (1, 1)
    assert decodes.seconds == pytest.approx(2 * length / 1e9)
    assert phases["prefill"].stalled == {} and phases["prefill"].tokens == 4
    assert one.waits.records == 1


def test_a_worker_stalls_the_token_only_while_a_graph_runs() -> None:
    """Time of a call outside its graphs is not waited for by the pool's threads."""
    one = Watched()
    one.stream.call(prompt(0, 4))
    begin = one.stream.now + 100
    one.stream.call(decode(4), think=100)
    end = one.stream.now
    # A worker off its core for the whole call and longer; the call has 1 us before and after its graph.
    one.spans({"tid": 555, "begin": begin - 50, "woken": begin - 50, "end": end + 50, "cause": P})
    one.drain()
    (decodes,) = (p for p in one.waits.phases() if p.phase == "decode")
    assert decodes.stalled["preempted"] == pytest.approx((end - begin - 2000) / 1e9)
    assert decodes.own == {}


def test_the_op_that_was_interrupted() -> None:
    one = Watched()
    one.stream.call(prompt(0, 4))
    step = decode(4)
    begin = one.stream.now
    one.stream.call(step)
    node, fused = next(k for k in one.stream.kernels(step) if not k[1])
    hits = [r for part in one.stream.ops for r in part if not r["node"] & FUSED and r["node"] == node]
    seq = int(hits[-1]["seq"])
    at = begin + 3000
    one.spans(
        {"begin": at, "woken": at, "end": at + 700, "cause": P, "flags": 1, "seq": seq, "node": node},
        {"begin": at, "woken": at, "end": at + 700, "cause": P, "flags": 1, "seq": seq, "node": 1 << 20},
        {"begin": at, "woken": at, "end": at + 700, "cause": P, "flags": 1, "seq": 0, "node": node},
        {"begin": at, "woken": at, "end": at + 9, "cause": P, "seq": seq, "node": node, "tid": 555},
    )
    one.waits.take_faults(
        records(
            "fault_rec",
            {"ts": at + 1, "kind": 1, "seq": seq, "node": node, "tid": one.stream.tgid},
            tgid=one.stream.tgid,
        )
    )
    one.drain()
    (plan,) = (p for _, p in one.session.plans.plans() if p.facts.n_tokens == 1)
    (op,) = one.waits.ops()
    assert plan.graph is not None
    assert op.op == plan.graph.nodes[node].op and not fused
    assert op.seconds == {"preempted": 7e-7} and op.majors == 1


def test_who_took_the_core() -> None:
    one = Watched()
    at = START
    rows = [
        {"by_tgid": 42, "by_comm": b"thief", "end": at + 5000},
        {"by_tgid": 42, "by_comm": b"thief", "end": at + 4000},
        {"by_tgid": one.stream.tgid, "by_comm": b"own\n\x1b[31m", "end": at + 1000},
        {"by_tgid": 43, "by_comm": b"later", "end": at + 9000, "cause": F, "woken": at + 100},
    ]
    one.spans(*({"begin": at, "woken": at, "cause": P, **row} for row in rows))
    first, second = one.waits.takers()  # nobody takes the core of one that sleeps
    assert (first.comm, first.pid, first.preemptions, first.seconds) == ("thief", 42, 2, 9e-6)
    assert second.own and second.comm.isprintable()


def test_what_is_kept_is_bounded() -> None:
    """C21 and hostile records: nothing grows, nothing raises."""
    one = Watched()
    for n in range(3 * MAX_TAKERS):
        one.spans({"begin": START, "woken": START, "end": START + 1 + n, "cause": P, "by_tgid": n + 1})
        assert len(one.waits._takers) <= MAX_TAKERS
    longest = [taker.pid for taker in one.waits.takers()]
    assert longest == [3 * MAX_TAKERS - n for n in range(SHOWN_TAKERS)], "those that took least are forgotten"
    one.spans(
        {"begin": START, "woken": START, "end": START + 5, "cause": 77},
        {"begin": START + 9, "woken": START, "end": START + 5, "cause": F},
        {"begin": 2**64 - 1, "woken": 2**64 - 1, "end": 2**64 - 1, "cause": P},
    )
    for i in range(3):
        one.stream.call(decode(i), think=10)
    one.drain()
    assert all(p.stalled == {} for p in one.waits.phases())
    assert not [s for s in one.waits._spans if s.end < one.stream.now - 10_000_000]


def test_a_call_that_was_not_watched_counts_nowhere() -> None:
    """Not from its begin to its end: it did not wait for nothing."""
    one = Watched()
    one.stream.call(prompt(0, 4))
    one.drain()
    begin = one.stream.now
    one.stream.call(decode(4))
    middle = one.stream.now
    one.stream.call(decode(5))
    one.stream.call(decode(6))
    end = one.stream.now
    one.stream.call(decode(7))
    one.stream.call(decode(8))
    one.waits.away(middle + 1)
    one.waits.back(end - 1)
    one.drain().finish(one.stream.now)
    assert begin < middle < end and len(one.settled) == 6
    phases = {phase.phase: phase.calls for phase in one.waits.phases()}
    assert phases == {"prefill": 1, "decode": 3}
    one.waits.away(one.stream.now)  # until further notice
    one.stream.call(decode(9))
    one.stream.call(decode(10))
    one.drain().finish(one.stream.now)
    assert {phase.phase: phase.calls for phase in one.waits.phases()} == phases
