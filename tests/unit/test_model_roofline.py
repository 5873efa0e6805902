# SPDX-License-Identifier: Apache-2.0
"""Roofs, limits and wasted time, worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profinferd.agent.model.peaks import ABSENT, Peak, Peaks
from profinferd.agent.model.roofline import Roof, absent_because, reach, roof

PEAK = Peak(2, 10e9, 12e9, 100e9, 400e9)


def test_below_the_slope_memory_is_the_limit() -> None:
    """1 GB and 2 GFLOP in 0.25 s, with 10 GB/s and 100 GFLOP/s: 0.1 s of reading, 0.02 s of work."""
    found = reach(0.25, 2e9, 1e9, Roof(10e9, 100e9))
    assert found.intensity == 2
    assert found.ops_per_second == pytest.approx(8e9) and found.bytes_per_second == pytest.approx(4e9)
    assert found.bound == "memory" and found.ideal_seconds == pytest.approx(0.1)
    assert found.ratio == pytest.approx(0.4) and found.wasted_seconds == pytest.approx(0.15)


def test_under_the_flat_part_arithmetic_is() -> None:
    """50 operations per byte is beyond the knee at 10."""
    found = reach(1.0, 50e9, 1e9, Roof(10e9, 100e9))
    assert found.bound == "compute" and found.ideal_seconds == pytest.approx(0.5)
    assert found.wasted_seconds == pytest.approx(0.5)


def test_caches_can_be_faster_than_memory_and_waste_nothing() -> None:
    found = reach(0.05, 1e6, 1e9, Roof(10e9, 100e9))
    assert found.ratio == pytest.approx(2.0) and found.wasted_seconds == 0


def test_absent_stays_absent() -> None:
    for flops, moved, of in (
        (None, 1e9, Roof(10e9, 100e9)),
        (1e9, None, Roof(10e9, 100e9)),
        (1e9, 1e9, Roof(None, 100e9)),
        (1e9, 1e9, Roof(10e9, None)),
    ):
        found = reach(1.0, flops, moved, of)
        assert (found.bound, found.ideal_seconds, found.ratio, found.wasted_seconds) == (None,) * 4
    # What computes nothing is bound by memory, whatever the arithmetic peak is.
    copied = reach(1.0, 0, 1e9, Roof(10e9, None))
    assert copied.bound == "memory" and copied.wasted_seconds == pytest.approx(0.9)


def test_quantised_products_run_under_the_integer_roof() -> None:
    assert roof(PEAK, "MUL_MAT", "q4_K") == Roof(10e9, 400e9)
    assert roof(PEAK, "MUL_MAT_ID", "mxfp4") == Roof(10e9, 400e9)
    assert roof(PEAK, "MUL_MAT", "f16") == Roof(10e9, 100e9)
    assert roof(PEAK, "ADD", "q4_K") == Roof(10e9, 100e9)
    without = Peak(2, 10e9, None, 100e9)
    assert roof(without, "MUL_MAT", "q4_K") == Roof(10e9, 100e9)
    assert roof(None, "MUL_MAT", "q4_K") == Roof(None, None)


def test_why_there_is_no_roof() -> None:
    assert "calibrate" in (absent_because(None) or "")
    assert absent_because(ABSENT) == ABSENT.reason
    assert absent_because(Peaks((PEAK,))) is None


@given(
    st.floats(1e-9, 1e3), st.floats(0, 1e15), st.floats(1, 1e15), st.floats(1e6, 1e13), st.floats(1e6, 1e15)
)
def test_waste_is_part_of_the_time(
    seconds: float, flops: float, moved: float, memory: float, ops: float
) -> None:
    found = reach(seconds, flops, moved, Roof(memory, ops))
    assert found.wasted_seconds is not None and found.ratio is not None
    assert 0 <= found.wasted_seconds <= seconds
    assert found.wasted_seconds == pytest.approx(max(0.0, 1 - found.ratio) * seconds, abs=1e-9 * seconds)
