# SPDX-License-Identifier: Apache-2.0
"""How often rings are drained: seldom, and never so seldom that a steady engine overflows one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profinferd.agent import pace


@given(st.floats(0, 50), st.booleans())
def test_a_steady_stream_never_fills_a_ring(rings_a_second: float, in_burst: bool) -> None:
    """Whatever the rate, after a few pauses the ring is found at most an eighth full; below the
    shortest pause nothing can be done, and records that are lost are counted."""
    sleep = pace.IDLE
    for _ in range(50):
        fill = min(1.0, rings_a_second * sleep)
        sleep = pace.pause(sleep, fill, in_burst=in_burst)
    assert rings_a_second * sleep <= max(pace.FILL, rings_a_second * pace.SHORTEST) + 1e-9


@given(st.floats(0.001, 1.0), st.floats(0, 1), st.booleans(), st.booleans())
def test_a_pause_is_within_its_bounds(elapsed: float, fill: float, settling: bool, in_burst: bool) -> None:
    found = pace.pause(elapsed, fill, settling=settling, in_burst=in_burst)
    assert pace.SHORTEST <= found <= (pace.IN_BURST if in_burst else pace.LONGEST)


def test_common_loads_are_drained_seldom() -> None:
    """60 tokens/s with every operator: 402 records of 24 bytes a token in 4 MiB."""
    fill = 60 * 402 * 24 / (4 << 20)
    assert pace.pause(0.25, 0.25 * fill) == pace.LONGEST
    # A tiny model: 2,000 tokens/s, six events of 224 bytes each in 256 KiB.
    fill = 2000 * 6 * 224 / (256 << 10)
    assert pace.pause(0.05, 0.05 * fill) == pytest.approx(0.0122, abs=0.001)
    assert pace.pause(0.1, 0.0) == pace.IDLE


def test_until_the_layout_is_chosen_only_what_comes_is_hurried_for() -> None:
    assert pace.pause(0.1, 0.0, settling=True) == pace.UNSETTLED
    assert pace.pause(0.1, 0.01, settling=True) == pace.SETTLING
