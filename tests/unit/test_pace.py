# SPDX-License-Identifier: Apache-2.0
"""How often rings are drained: seldom, and never so seldom that a steady engine overflows one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profinferd.agent import pace

LEFT = st.none() | st.floats(0, 10)
RATES = st.floats(0, 50)
"""Rings a second."""


def settled(rings_a_second: float = 0.01, seconds: float = 300.0, left: float | None = None) -> pace.Pace:
    """That has seen an engine at this steady rate for a while."""
    found, sleep = pace.Pace(), pace.IDLE
    while seconds > 0:
        seconds -= sleep
        sleep = found.pause(sleep, min(1.0, rings_a_second * sleep), burst_s=left)
    return found


@given(RATES, LEFT)
def test_a_steady_stream_never_fills_a_ring(rings_a_second: float, left: float | None) -> None:
    """Whatever the rate, after a few pauses the ring is found at most an eighth full; below the
    shortest pause nothing can be done, and records that are lost are counted."""
    found, sleep = pace.Pace(), pace.IDLE
    for _ in range(50):
        sleep = found.pause(sleep, min(1.0, rings_a_second * sleep), burst_s=left)
    assert rings_a_second * sleep <= max(pace.FILL, rings_a_second * pace.SHORTEST) + 1e-9


@given(st.lists(st.tuples(st.floats(0.001, 1.0), st.floats(0, 1), st.booleans(), LEFT), min_size=1))
def test_a_pause_is_within_its_bounds(turns: list[tuple[float, float, bool, float | None]]) -> None:
    found = pace.Pace()
    for elapsed, fill, settling, left in turns:
        pause = found.pause(elapsed, fill, settling=settling, burst_s=left)
        assert pace.SHORTEST <= pause <= pace.LONGEST
        if left is not None:
            assert pause <= max(pace.IN_BURST, left), "a burst ends when it was meant to, or a moment later"


@given(st.floats(0.1, 1 / pace.SHORTEST / 4))
def test_an_engine_that_was_fast_and_is_slow_may_be_fast_again(rings_a_second: float) -> None:
    """Ten seconds of a long prompt, and then the fast generation goes on in the middle of a pause:
    nothing is lost."""
    found, slow = settled(rings_a_second), 10.0
    sleep = pace.IDLE
    while slow > 0:
        slow -= sleep
        sleep = found.pause(sleep, 0.001 * sleep)
        assert rings_a_second * sleep <= 1.0


def test_a_new_engine_may_fill_a_ring_in_a_second() -> None:
    """Whose long prompt is all that was seen yet."""
    found, sleep = pace.Pace(), pace.IDLE
    for _ in range(10):
        sleep = found.pause(sleep, 0.001 * sleep)
        assert pace.AT_FIRST * sleep <= 0.75


def test_common_loads_are_drained_seldom() -> None:
    """75 tokens/s: six events of 224 bytes each in 1 MiB; with every operator: 402 records of 24
    bytes in 4 MiB."""
    fill = 75 * 6 * 232 / (1 << 20)
    assert settled(fill).pause(1.0, fill) == pace.LONGEST
    fill = 75 * 402 * 24 / (4 << 20)
    assert settled(fill).pause(0.25, 0.25 * fill) == pytest.approx(0.72, abs=0.01)
    # A tiny model: 2,000 tokens/s in 256 KiB.
    fill = 2000 * 6 * 224 / (256 << 10)
    assert settled(fill).pause(0.05, 0.05 * fill) == pytest.approx(0.0122, abs=0.001)
    assert settled().pause(0.1, 0.0) == pace.IDLE


def test_graphs_that_are_described_once_are_no_rate() -> None:
    """While the layout is chosen graphs come whole, and each new one once: a tenth of a ring at once."""
    found = pace.Pace()
    for _ in range(100):
        found.pause(pace.SETTLING, 0.3, settling=True)
    for turn in range(600):
        sleep = found.pause(0.1, 0.1 if turn % 100 == 0 else 0.001)
    assert sleep == pace.LONGEST


def test_until_the_layout_is_chosen_only_what_comes_is_hurried_for() -> None:
    assert pace.Pace().pause(0.1, 0.0, settling=True) == pace.UNSETTLED
    assert pace.Pace().pause(0.1, 0.01, settling=True) == pace.SETTLING
