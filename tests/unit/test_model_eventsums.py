# SPDX-License-Identifier: Apache-2.0
"""Sums of performance events, on readings written down by hand (C58): no unit was there to count."""

from __future__ import annotations

import random

import pytest

from profinferd.agent.model.eventsums import Count, EventSums, Kind, Scaler


def test_an_event_that_counted_half_of_the_time_counts_double() -> None:
    one = Scaler()
    one.take(Count(100, 1000, 500))
    assert (one.value, one.ratio) == (200, 0.5)
    # The next stretch had the counter to itself: it is not doubled, nor is the first undone.
    one.take(Count(150, 2000, 1500))
    assert one.value == 250
    assert one.ratio == 0.75


def test_a_stretch_without_the_counter_is_scaled_with_the_next() -> None:
    one = Scaler()
    one.take(Count(100, 1000, 1000))
    one.take(Count(100, 3000, 1000))  # it did not run: nothing is known
    assert one.value == 100
    one.take(Count(200, 4000, 2000))  # 100 in a third of 3000
    assert one.value == 400


def test_never_falls_whatever_comes() -> None:
    """Random readings, counters that are opened anew, and ones that ran longer than enabled."""
    chance = random.Random(5)
    for _ in range(200):
        one, before, now = Scaler(), 0.0, Count(0, 0, 0)
        for _ in range(50):
            enabled = chance.randrange(1000)
            running = chance.randrange(enabled + 2)
            now = Count(now.value + chance.randrange(100), now.enabled + enabled, now.running + running)
            if chance.random() < 0.05:
                now = Count(chance.randrange(10), chance.randrange(10), chance.randrange(10))
            one.take(now)
            assert one.value >= before
            assert one.ratio is None or 0 <= one.ratio <= 1
            before = one.value


def test_figures_and_what_follows_from_them() -> None:
    """Two threads, four events: 1000 cycles, 500 instructions, 250 stalled, 7 misses of 64 bytes."""
    names = ["cycles", "instructions", "stalled-cycles-backend", "cache-misses"]
    sums = EventSums(names, {"l3d": "no unit"})
    for tid, values in ((1, (600, 300, 250, 5)), (2, (400, 200, 0, 2))):
        for name, value in zip(names, values, strict=True):
            sums.thread(tid, name, Count(value, 10, 10))
    known = Kind("MUL_MAT", "q4_K", "ffn_up")
    sums.op(1, known, 3, [Count(700, 10, 10), Count(300, 10, 10), Count(5, 10, 10), Count(2, 10, 5)])
    sums.op(2, Kind(None), 9, [Count(300, 10, 10)] * 4)
    events = sums.events(2)
    assert [(e.event, e.value, e.running_ratio) for e in events.events] == [
        ("cycles", 1000, 1.0), ("instructions", 500, 1.0), ("stalled-cycles-backend", 250, 1.0),
        ("cache-misses", 7, 1.0), ("l3d", None, None),
    ]  # fmt: skip
    assert events.events[-1].reason == "no unit"
    assert (events.ipc, events.stall_ratio, events.dram_bytes) == (0.5, 0.25, 448)
    (op,) = events.ops
    assert (op.op, op.dtype, op.calls, op.values["cycles"], op.values["cache-misses"]) == (
        "MUL_MAT", "q4_K", 3, 700, 4,
    )  # fmt: skip
    assert events.unattributed["cycles"] == 300


def test_weights_of_one_role_are_added_up() -> None:
    """Two layers' matrices, read twice each: every one is scaled by its own readings."""
    sums = EventSums(["cycles"])
    up, down = Kind("MUL_MAT", "q4_K", "ffn_up"), Kind("MUL_MAT", "q4_K", "ffn_down")
    for first, second, third in ((10, 20, 5), (30, 50, 9)):
        sums.op("blk.0.up", up, first, [Count(first, 100, 100)])
        sums.op("blk.1.up", up, second, [Count(second, 100, 50)])
        sums.op("blk.0.down", down, third, [Count(third, 100, 100)])
    # 10 and then 30 whole; 20 in half of the time are 40, and what came without time is not scaled yet
    found = {op.role: (op.calls, op.values["cycles"]) for op in sums.events(1).ops}
    assert found == {"ffn_up": (30 + 50, 10 + 40), "ffn_down": (9, 5)}
    sums.op("blk.1.up", up, 60, [Count(60, 200, 150)])
    found = {op.role: (op.calls, op.values["cycles"]) for op in sums.events(1).ops}
    assert found["ffn_up"] == (30 + 60, 10 + 80)


def test_what_never_counted_is_absent_not_zero() -> None:
    events = EventSums(["cycles"], {}).events(0)
    assert events.events[0].value is None
    assert events.events[0].reason
    assert (events.ipc, events.stall_ratio, events.dram_bytes) == (None, None, None)


@pytest.mark.parametrize("cycles", [0, 5])
def test_no_ratio_of_nothing(cycles: int) -> None:
    sums = EventSums(["cycles", "instructions"], {})
    sums.thread(1, "cycles", Count(cycles, 10, 10))
    assert sums.events(1).ipc is None  # instructions are absent, or cycles are none
