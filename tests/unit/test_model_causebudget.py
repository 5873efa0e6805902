# SPDX-License-Identifier: Apache-2.0
"""Shedding waits and page faults, against a stand-in for a process that has as many as it is told.

The truth is the stand-in's own account of what watching them cost it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profinferd.agent.model.callbudget import DEPTH, FILL, KEEP
from profinferd.agent.model.causebudget import (
    FAULTS,
    LEAST_BUSY_S,
    MAX_HOLD,
    WAITS,
    CauseBudget,
    CauseDecision,
    Seen,
)

PRICES = {WAITS: 1.3e-6, FAULTS: 0.5e-6}
CYCLE = 0.0005
STEP = 0.01
PERIOD = 5.0


@dataclass
class Process:
    """Busy as told, with so many waits and faults a second; looked at as the product does it."""

    rates: dict[str, float]
    free: float = 0.01
    useless: tuple[str, ...] = ()
    now: float = 100.0
    costs: list[float] = field(default_factory=list)
    watched: list[frozenset[str]] = field(default_factory=list)
    charged: float = 0.0

    def __post_init__(self) -> None:
        self.budget = CauseBudget(PRICES)
        self.decision = CauseDecision(frozenset(PRICES), {}, {}, True)
        self.counts = dict.fromkeys(PRICES, 0.0)
        self.looked, self.busy, self.since = self.now, 0.0, 0.0

    def work(self, seconds: float, *, busy: float = 1.0, look: float = 1.0) -> None:
        for _ in range(round(seconds / STEP)):
            self.now += STEP
            self.busy += busy * STEP
            watched = self.decision.watched
            new = {part: self.rates.get(part, 0.0) * STEP for part in watched}
            for part, count in new.items():
                self.counts[part] += count
            cost = sum(count * PRICES[part] for part, count in new.items())
            self.since += cost
            self.costs.append(cost)
            self.watched.append(watched)
            hurry = self.decision.hurry or self.since > DEPTH * self.free * PERIOD
            if self.now - self.looked >= (0.05 if hurry else look) - STEP / 2:
                self._look()

    def _look(self) -> None:
        seen = {part: Seen(round(n), n * PRICES[part]) for part, n in self.counts.items()}
        before = self.decision.watched
        self.decision = self.budget.tick(self.now, self.busy, self.free, seen, CYCLE, self.useless)
        self.charged += sum(self.decision.charged.values())
        if self.decision.watched - before:
            self.costs[-1] += CYCLE
        self.counts = dict.fromkeys(PRICES, 0.0)
        self.looked, self.busy, self.since = self.now, 0.0, 0.0

    def worst(self, stretch: float = PERIOD, begin: int = 0) -> float:
        """Most that was spent in any stretch of so many seconds."""
        window: deque[float] = deque(maxlen=round(stretch / STEP))
        total = most = 0.0
        for cost in self.costs[begin:]:
            if len(window) == window.maxlen:
                total -= window[0]
            window.append(cost)
            total += cost
            most = max(most, total)
        return most

    def changes(self) -> int:
        """How often a part came or went."""
        return sum(a != b for a, b in zip(self.watched, self.watched[1:], strict=False))


def share(ratio: float, part: str = WAITS, budget: float = 0.01) -> dict[str, float]:
    """The rate at which watching a part costs so much of the budget."""
    return {part: ratio * budget / PRICES[part]}


@pytest.mark.parametrize("ratio", [0.1, 0.4, 0.65])
def test_what_fits_is_watched_without_a_gap(ratio: float) -> None:
    one = Process(share(ratio))
    one.work(60)
    assert not one.decision.shed and one.changes() == 0
    assert one.charged == pytest.approx(ratio * 0.01 * 60, rel=0.02)


@pytest.mark.parametrize("ratio", [0.75, 1.0, 1.5, 4.0, 20.0])
def test_what_does_not_is_shed_within_the_budget(ratio: float) -> None:
    """At once, and it is said how much it would cost; the trials are paid for."""
    one = Process(share(ratio))
    one.work(1.3)
    assert one.decision.shed.keys() == {WAITS} and one.decision.watched == {FAULTS}
    why = one.decision.shed[WAITS]
    assert why.per_second == pytest.approx(ratio * 0.01 / PRICES[WAITS], rel=0.05)
    assert why.ratio == pytest.approx(ratio * 0.01, rel=0.05)
    one.work(120)
    assert WAITS in one.decision.shed
    # What flows in the shortest time that tells anything, and until the next look.
    assert one.worst() <= 0.01 * PERIOD + ratio * 0.01 * (LEAST_BUSY_S + 0.06)
    # It never oscillates: trials become rare.
    late = round(30 / STEP)
    one.watched = one.watched[late:]
    assert 4 <= one.changes() <= 2 * (91 / (MAX_HOLD * PERIOD) + 1)


def test_the_dearest_goes_first() -> None:
    """Page faults take most: waits go on, for what is left has room for them."""
    one = Process({**share(0.3, WAITS), **share(0.8, FAULTS)})
    one.work(30)
    assert one.decision.shed.keys() == {FAULTS}
    assert all(WAITS in watched for watched in one.watched)


def test_it_comes_back_when_it_calms_and_not_before() -> None:
    one = Process(share(2.0))
    one.work(20)
    assert WAITS in one.decision.shed
    # 60 % of what there is: not what it would be shed for, and not what it is taken back for.
    one.rates = share(0.6)
    one.work(60)
    assert WAITS in one.decision.shed
    one.rates = share(0.4)
    one.work(MAX_HOLD * PERIOD + 3)
    assert not one.decision.shed and one.decision.watched == {WAITS, FAULTS}
    one.watched.clear()
    one.work(60)
    assert one.changes() == 0


@settings(deadline=None, max_examples=40)
@given(st.floats(0.05, 3), st.floats(0.05, 3))
def test_a_steady_load_never_oscillates(waits: float, faults: float) -> None:
    """Whatever it is, also close to a threshold: what changes is trials alone, one in a hold."""
    one = Process({**share(waits, WAITS), **share(faults, FAULTS)})
    one.work(100)
    one.watched.clear()
    one.work(100)
    assert one.changes() <= 2 * (100 / (MAX_HOLD * PERIOD) + 1)


def test_an_idle_process_is_neither_judged_nor_charged() -> None:
    """A server that waits for requests wakes up now and then, which slows no token down."""
    one = Process(share(5.0))
    one.work(60, busy=0.0)
    assert not one.decision.shed and one.charged == 0.0 and not one.decision.hurry
    one.work(2)
    assert WAITS in one.decision.shed


def test_less_is_left_over() -> None:
    """Token and graph probes come to take more: waits give way, and have their room back later."""
    one = Process(share(0.5))
    one.work(20)
    assert not one.decision.shed
    one.free = 0.003
    one.work(2)
    assert one.decision.shed.keys() == {WAITS}
    one.free = 0.0
    one.work(60)
    assert one.decision.watched == {FAULTS} and one.charged < 0.5 * 0.01 * 30
    one.free = 0.02
    one.work(MAX_HOLD * PERIOD + 3)
    assert not one.decision.shed


def test_what_tells_nothing_is_not_watched() -> None:
    """While graphs are shed waits do not count: they are not tried either, and no verdict is made of it."""
    one = Process(share(2.0))
    one.work(20)
    one.useless = (WAITS,)
    one.work(1)
    one.watched.clear()
    one.work(60)
    assert all(watched == {FAULTS} for watched in one.watched) and WAITS in one.decision.shed
    one.useless = ()
    one.work(60)
    assert any(WAITS in watched for watched in one.watched[round(60 / STEP) :])
    assert WAITS in one.decision.shed, "it still costs twice the budget"


def test_without_a_limit_everything_is_watched() -> None:
    one = Process(share(500.0), free=1.0)
    one.work(20)
    assert not one.decision.shed and one.changes() == 0


def test_what_others_need_is_charged_all_the_same() -> None:
    """Programs that stay for another target run here too; that is no rate to judge by."""
    budget = CauseBudget({WAITS})
    budget.tick(0.0, 1.0, 0.01, {WAITS: Seen(20_000, 0.026)})
    decision = budget.tick(1.0, 1.0, 0.01, {WAITS: Seen(0, 0.004)})
    assert decision.shed[WAITS].ratio == pytest.approx(0.026)
    assert decision.charged == {WAITS: 0.004} and not decision.watched


rates = st.one_of(st.floats(0, 1000), st.floats(1000, 20_000), st.floats(20_000, 500_000))
PHASES = st.tuples(rates, rates, st.floats(0.2, 12), st.sampled_from([0.3, 1.0]))


@settings(deadline=None, max_examples=150)
@given(
    st.lists(PHASES, min_size=1, max_size=6),
    st.sampled_from([0.002, 0.01, 0.05]),
)
def test_the_budget_holds_whatever_comes(
    phases: list[tuple[float, float, float, float]], free: float
) -> None:
    """What is spent beyond the budget is what flows until a look sees it, once for each time that the
    load changed; and that is paid back before anything is tried again."""
    one = Process({}, free)
    flow = 0.0
    busy = 0.0
    for waits, faults, seconds, share_ in phases:
        one.rates = {WAITS: waits, FAULTS: faults}
        # In a hurry there is a look each 0.05 s; before, what the bucket holds has to be spent.
        most = waits * PRICES[WAITS] + faults * PRICES[FAULTS]
        flow += most * (LEAST_BUSY_S / share_ + 0.07)
        one.work(seconds, busy=share_)
        busy += seconds * share_
        judged = sum(one.rates[part] * PRICES[part] for part in one.decision.watched)
        if seconds * share_ > 3 and one.decision.shed and not one.decision.hurry:
            assert judged / share_ <= FILL * free * 1.05
    trials = 1 + len(phases) + (one.now - 100) / PERIOD
    assert sum(one.costs) <= free * (busy + PERIOD) + flow + trials * CYCLE
    assert sum(one.costs) == pytest.approx(one.charged, abs=flow + 1e-3 + free * PERIOD)
    assert KEEP < FILL
