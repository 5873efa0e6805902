# SPDX-License-Identifier: Apache-2.0
"""What watching waits and page faults costs the target stays within its budget, on the stub engine.

What a wait costs is made up, so that the same happens on any machine: a kernel of the stub sleeps
once, which a thread cannot do in less than some microseconds, and not at all while it computes.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from profinferd.agent import attach, causekeeper
from profinferd.agent.model.budget import BudgetConfig, Prices
from profinferd.agent.model.snapshot import Snapshot

from .cases import DEADLINE, Engine, Watch, engine

DEAR = Prices(1, 1, 1, 1e5, 0, wait_ns=100_000, wait_record_ns=0, other_switch_ns=0, fault_ns=1)
"""A wait costs as much as 100 us of work."""
WILD, CALM = "us=50 times=20", "us=100 spin times=20"


class Kept(Watch):
    """A watched stub that decodes on and on."""

    def __init__(self, stub: Engine, budget: float = 0.1, ops: str = "sampled") -> None:
        super().__init__(stub, ops=ops, budget=BudgetConfig(budget))
        self.position = 4
        self.run("pos=0-4 out=4")

    def until(self, words: str, condition: Callable[[Snapshot], bool]) -> Snapshot:
        until = time.monotonic() + DEADLINE
        while True:
            self.position += 1
            self.run(f"pos={self.position} out=0 quiet=1 {words}")
            seen = self.snapshot()
            if condition(seen):
                return seen
            assert time.monotonic() < until, (seen.causes_shed, seen.budget, seen.notes)

    @property
    def attached(self) -> bool:
        return self.attachment._causes.attached("waits")


@pytest.fixture
def dear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attach, "prices_here", lambda *_: DEAR)
    monkeypatch.setattr(attach, "ASSUMED", DEAR)
    monkeypatch.setattr(causekeeper, "PERIOD_S", 0.5)


def shed(seen: Snapshot) -> set[str]:
    return {one.part for one in seen.causes_shed}


def waits(seen: Snapshot) -> int:
    assert seen.threads is not None
    return sum(sum(one.waits.values()) for one in seen.threads.threads)


def phase_calls(seen: Snapshot) -> int:
    assert seen.threads is not None
    return sum(one.calls for one in seen.threads.phases)


def switches(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if "ctxt_switches" in line)


def test_waits_are_shed_named_and_come_back(dear: None) -> None:
    """Nothing else goes: graphs and operators are watched all the time."""
    with Engine(engine()) as stub, Kept(stub) as watch:
        seen = watch.until(WILD, lambda seen: shed(seen) == {"waits"} and not watch.attached)
        (why,) = seen.causes_shed
        assert why.cost_ratio > 0.07 and why.per_second > 0.07 / 100e-6
        assert any(note.startswith("threads: waits are watched in short trials only") for note in seen.notes)
        assert seen.budget is not None and seen.budget.level == "op"
        # Nothing of what it does while it is not watched is in the figures; it is known how long that was.
        sched = watch.attachment._causes.sched
        assert sched is not None and len(sched.threads()) == 0
        graphs = sum(one.count for one in seen.graphs)
        before, at, calls = waits(seen), switches(stub.pid), phase_calls(seen)
        watch.attachment._keeper = None  # no trial for the moment
        watch.run(f"pos=100 out=0 {WILD}")
        later = watch.snapshot()
        assert switches(stub.pid) - at > 200, "it did wait"
        assert waits(later) == before and later.threads is not None and seen.threads is not None
        assert later.threads.work_seconds == seen.threads.work_seconds
        assert later.threads.unwatched_seconds > seen.threads.unwatched_seconds > 0
        assert phase_calls(later) == calls
        assert sum(one.count for one in later.graphs) == graphs + 20


def test_trials_and_the_return(dear: None) -> None:
    with Engine(engine()) as stub, Kept(stub) as watch:
        seen = watch.until(WILD, lambda seen: shed(seen) == {"waits"} and not watch.attached)
        first = waits(seen)
        # A trial: some of it is seen again, and it still costs too much.
        seen = watch.until(WILD, lambda seen: waits(seen) > first and not watch.attached)
        assert shed(seen) == {"waits"}
        seen = watch.until(CALM, lambda seen: not seen.causes_shed and watch.attached)
        assert "threads: waits were not watched for some time, to stay within the budget" in seen.notes
        assert seen.threads is not None
        (leader,) = (one for one in seen.threads.threads if one.tid == stub.pid)
        ran, away = leader.run_seconds, seen.threads.unwatched_seconds
        watch.run(f"pos=200 out=0 {CALM}")
        seen = watch.snapshot()
        assert seen.threads is not None and seen.threads.unwatched_seconds == away
        (leader,) = (one for one in seen.threads.threads if one.tid == stub.pid)
        assert leader.run_seconds > ran, "what it did before was kept, and it is watched again"


def test_with_a_record_of_every_operator_nothing_is_shed(dear: None) -> None:
    """There is no budget with --ops all."""
    with Engine(engine()) as stub, Kept(stub, ops="all") as watch:
        until = time.monotonic() + 3
        seen = watch.until(WILD, lambda seen: time.monotonic() > until and waits(seen) > 1000)
        assert not seen.causes_shed and watch.attached
        assert seen.threads is not None and seen.threads.unwatched_seconds == 0


def test_without_operators_the_budget_is_kept_too(dear: None) -> None:
    with Engine(engine()) as stub, Kept(stub, ops="off") as watch:
        watch.until(WILD, lambda seen: shed(seen) == {"waits"} and not watch.attached)
        watch.until(CALM, lambda seen: not seen.causes_shed and watch.attached)


def test_page_faults_alone(dear: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever costs too much goes: here each graph is in new memory."""
    prices = dataclasses.replace(DEAR, wait_ns=1, fault_ns=100_000)
    monkeypatch.setattr(attach, "prices_here", lambda *_: prices)
    with Engine(engine()) as stub, Kept(stub) as watch:
        words = "us=50 times=20 fresh"
        causes = watch.attachment._causes
        # Where one run takes long, it may be in the middle of the next trial.
        seen = watch.until(words, lambda seen: shed(seen) == {"faults"} and not causes.attached("faults"))
        assert watch.attached
        assert any(
            note.startswith("faults: page faults are watched in short trials only") for note in seen.notes
        )
        watch.until("us=50 times=20", lambda seen: not seen.causes_shed)
        seen = watch.snapshot()
        assert seen.faults is not None and seen.faults.unwatched_seconds > 0
        assert seen.threads is not None and seen.threads.unwatched_seconds == 0


def test_programs_that_are_gone(dear: None) -> None:
    """The daemon takes them off for good when something is wrong with them; what they cost ends there."""
    with Engine(engine()) as stub, Kept(stub) as watch:
        watch.until(WILD, lambda seen: waits(seen) > 100)
        watch.attachment._causes.close()
        seen = watch.until(CALM, lambda seen: seen.threads is None and seen.faults is None)
        assert seen.budget is not None
        before = seen.budget.spent_seconds["waits"]
        seen = watch.until(WILD, lambda seen: True)
        assert seen.budget is not None and seen.budget.spent_seconds["waits"] == before
