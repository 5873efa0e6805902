# SPDX-License-Identifier: Apache-2.0
"""Barriers worked out by hand: two threads, who is late, and why."""

from __future__ import annotations

import numpy as np
import pytest

from profinferd.agent.model.barriers import BarrierStore
from profinferd.agent.model.calls import GraphRun
from profinferd.agent.model.plans import OpKey, Plan
from profinferd.agent.model.records import OP_FUSED
from profinferd.agent.model.tokens import Phase

from .causerecords import Records, records
from .graphs import decoder
from .streams import OP_HIT

T0, T1 = 100, 101


def hits(*at: tuple[int, int]) -> Records:
    made = np.zeros(len(at), OP_HIT)
    made["ts"], made["node"] = [t for t, _ in at], [n for _, n in at]
    return made


def run(begin: int, end: int) -> GraphRun:
    made = GraphRun(5, 7, T0, 10, 0, 1, begin, 0, 3, 0, 0, [], [], None)
    made.end = end
    return made


@pytest.fixture
def plan() -> Plan:
    return Plan.of(decoder(layers=1).graph(), {})


def names(plan: Plan, *nodes: int) -> list[OpKey]:
    return [plan.keys[int(plan.group[n])] for n in nodes]


def test_by_hand(plan: Plan) -> None:
    """Ops at 1000, 2000 and 3000 of thread 0. In the first its peer works 900 of 1000 ns, of which it
    had no core for 600; in the second thread 0 works 800 and waited for a page for 700."""
    store = BarrierStore(7)
    rows = [
        {"tid": T0, "tensor": 1, "begin": 1000, "arrived": 1200, "blocked_ns": 300},
        {"tid": T1, "tensor": 1, "begin": 1050, "arrived": 1950, "ready_ns": 600},
        {"tid": T0, "tensor": 2, "begin": 2000, "arrived": 2800, "paging_ns": 700},
        {"tid": T1, "tensor": 2, "begin": 2010, "arrived": 2110},
        # the last op has no barrier after it; another graph follows
        {"tid": T0, "tensor": 1, "begin": 9000, "arrived": 9100},
        {"tid": T1, "tensor": 1, "begin": 1000, "arrived": 1100, "tgid": 8},
    ]
    store.take(records("barrier_rec", *({"tgid": 7, **row} for row in rows)))
    store.run(run(900, 4000), plan, hits((1000, 0), (2000, 7 | OP_FUSED), (3000, 9)), Phase.DECODE)
    assert (store.matched, store.unmatched) == (1, 0)
    first, second = store.threads()
    assert (first.tid, first.ops, second.tid, second.ops) == (T0, 2, T1, 2)
    assert first.wall_seconds == pytest.approx(2e-6) == second.wall_seconds
    assert first.work_seconds == pytest.approx(1e-6)  # 200 + 800
    assert first.blocked_seconds == pytest.approx(3e-7)
    # Until the last one came: 750 of 1000 ns, then none. What follows, to the next op, is no waiting.
    assert first.idle_share == pytest.approx(0.375) and first.idle_seconds == pytest.approx(750e-9)
    assert second.idle_seconds == pytest.approx(690e-9)
    assert (first.late, second.late) == (1, 1)
    assert second.late_seconds == pytest.approx(750e-9) and first.late_seconds == pytest.approx(690e-9)
    assert second.ready_seconds == pytest.approx(6e-7) and first.paging_seconds == pytest.approx(7e-7)
    by = {(o.op, o.role): o for o in store.ops()}
    a = by[plan.keys[int(plan.group[0])].op, plan.keys[int(plan.group[0])].role]
    assert a.late == {"preempted": pytest.approx(750e-9)}
    assert (a.threads, a.ops, a.phase) == (2, 1, "decode")
    assert a.idle_seconds == pytest.approx(750e-9) and a.idle_share == pytest.approx(0.375)
    b = by[plan.keys[int(plan.group[7 + plan.n])].op, plan.keys[int(plan.group[7 + plan.n])].role]
    assert b.late == {"paging": pytest.approx(690e-9)}


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({}, "work"),
        ({"cpu": 1}, "slow_core"),
        ({"cpu": 1, "ready_ns": 400}, "preempted"),
        ({"ready_ns": 400, "paging_ns": 500}, "paging"),
        ({"before": 390}, "preempted"),  # it lost its core at the barrier before, and began late
    ],
)
def test_why(plan: Plan, more: dict[str, int], why: str) -> None:
    store = BarrierStore(7, kinds=[0, 1])
    before = more.pop("before", 0)
    rows = [
        {"tid": T0, "tensor": 1, "begin": 1000, "arrived": 1100},
        {"tid": T1, "tensor": 1, "begin": 1000, "arrived": 1100, "late_ns": before},
        {"tid": T0, "tensor": 2, "begin": 2000, "arrived": 2100},
        {"tid": T1, "tensor": 2, "begin": 2000, "arrived": 2800, **more},
    ]
    store.take(records("barrier_rec", *rows, tgid=7))
    store.run(run(900, 4000), plan, hits((1000, 0), (2000, 1), (3000, 2)), Phase.DECODE)
    late = {name: ns for op in store.ops() for name, ns in op.late.items()}
    assert late == {why: pytest.approx(7e-7)}


def test_what_does_not_fit_together(plan: Plan) -> None:
    """Lost records, wrong order, broken times: counted, not guessed at."""
    store = BarrierStore(7)
    rows = [{"tid": T0, "tensor": 1, "begin": 1000, "arrived": 1100}]
    store.take(records("barrier_rec", *rows, tgid=7))
    store.run(run(900, 4000), plan, hits((1000, 0), (2000, 1), (3000, 2)), Phase.DECODE)
    assert (store.matched, store.unmatched) == (0, 1) and store.threads() == ()
    store.take(records("barrier_rec", {"begin": 2**64 - 1, "arrived": 5, "ready_ns": 2**64 - 1}, tgid=7))
    store.run(run(900, 4000), plan, hits((1000, 0), (2000, 1)), Phase.DECODE)
    store.run(run(900, 4000), None, None, Phase.DECODE)
    assert store.ops() == ()


def test_one_thread_is_never_late(plan: Plan) -> None:
    """And waits for nobody: the way from one op to the next, with our probes on it, is not idle."""
    store = BarrierStore(7)
    rows = [{"tid": T0, "tensor": n, "begin": 1000 * n, "arrived": 1000 * n + 840} for n in (1, 2)]
    store.take(records("barrier_rec", *rows, tgid=7))
    store.run(run(900, 4000), plan, hits((1000, 0), (2000, 1), (3000, 2)), Phase.DECODE)
    (thread,) = store.threads()
    assert thread.late == 0 and thread.idle_share == 0
    assert thread.work_seconds == pytest.approx(1.68e-6) and thread.wall_seconds == pytest.approx(2e-6)
