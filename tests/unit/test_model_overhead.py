# SPDX-License-Identifier: Apache-2.0
"""The measured overhead against streams whose slowdown is known (design D6, case C18)."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profinferd.agent.model.overhead import Interval, MeasuredOverhead, Token, t95, trimmed_interval


class Stream:
    """Decode steps one after the other; seconds grow with the KV length."""

    def __init__(self, seed: int, slowdown: float, *, noise: float = 0.05, growth: float = 1e-4) -> None:
        self.rng = random.Random(seed)
        self.slowdown = slowdown
        self.noise = noise
        self.growth = growth
        self.measured = MeasuredOverhead()
        self.now = 0.0
        self.kv = 0

    def token(self, inside: bool, factor: float = 1.0) -> None:
        seconds = 0.02 * (1 + self.growth * self.kv) * self.rng.lognormvariate(0, self.noise) * factor
        cost = seconds * self.slowdown if inside else 0.0
        self.now += seconds + cost
        self.kv += 1
        token = Token(self.now, "a", self.kv, seconds + cost, cost)
        (self.measured.inside if inside else self.measured.outside)(token)

    def periods(
        self, n: int, outside: int = 40, inside: int = 20, odd: float = 0.0, spikes: float = 0.0
    ) -> None:
        for _ in range(n):
            for _ in range(outside):
                self.token(False, 5.0 if self.rng.random() < spikes else 1.0)
            strange = 1.5 if self.rng.random() < odd else 1.0
            for _ in range(inside):
                self.token(True, strange * (5.0 if self.rng.random() < spikes else 1.0))


def test_the_interval_covers_the_truth() -> None:
    """95 % intervals hold the true slowdown in >= 93 % of runs: with few bursts, with tokens
    that waited for a core, with whole bursts that met something else."""
    runs = 300
    covered = 0
    cases = ((6, 0.0, 0.0), (12, 0.05, 0.0), (25, 0.05, 0.0), (25, 0.05, 0.04))
    for case, (bursts, spikes, odd) in enumerate(cases):
        held = 0
        estimates = []
        for seed in range(runs):
            stream = Stream(case * runs + seed, 0.02)
            stream.periods(bursts + 1, outside=24, inside=12, odd=odd, spikes=spikes)
            interval = stream.measured.in_burst()
            assert interval is not None
            held += interval.low <= 0.02 <= interval.high
            estimates.append(interval.value)
        # One case is good to 1.3 %, all together to 0.6 %.
        assert held / runs >= 0.95 - 3 * 0.013
        # A plain mean would be off by 0.018 where one burst in 25 takes half as long again.
        assert statistics.mean(estimates) == pytest.approx(0.02, abs=0.006 if odd else 0.0015)
        covered += held
    assert covered / runs / len(cases) >= 0.93


def test_growth_of_the_cache_is_not_overhead() -> None:
    """Steep growth without any slowdown: the neighbours on both sides cancel it."""
    stream = Stream(3, 0.0, noise=0.005, growth=1e-3)
    stream.periods(30)
    interval = stream.measured.in_burst()
    assert interval is not None
    assert abs(interval.value) < 0.002 and interval.low < 0 < interval.high


def test_overall_is_the_part_of_time_inside_bursts() -> None:
    """2.5 % in a third of the tokens is 0.8 % overall."""
    stream = Stream(4, 0.025, noise=0.001, growth=0.0)
    stream.periods(40)
    overall, share = stream.measured.overall(), stream.measured.inside_share
    assert overall is not None and share is not None
    assert overall.low <= overall.value <= overall.high
    # 40 tokens outside and 20 inside a period, the latter 2.5 % longer.
    assert overall.value == pytest.approx(0.025 * 20 / 60, rel=0.05)
    assert share == pytest.approx(20 * 1.025 / (40 + 20 * 1.025), rel=0.01)
    assert stream.measured.in_burst_estimate() == pytest.approx(0.025)


def test_estimate_and_measurement_may_disagree() -> None:
    """Said only when the intervals do not touch."""
    stream = Stream(5, 0.05, noise=0.01)
    stream.periods(20)
    interval = stream.measured.in_burst()
    assert interval is not None
    assert interval.disagrees(0.01) and interval.disagrees(0.0, 0.02) and interval.disagrees(0.2)
    assert not interval.disagrees(0.05) and not interval.disagrees(0.01, 0.05)
    assert Interval(0.1, 0.0, 0.2).disagrees(0.2) is False


def test_only_comparable_neighbours_count() -> None:
    """Another kind of step, another KV length, another time of day: no pair."""
    for change in ("kind", "kv", "time", "short"):
        measured = MeasuredOverhead()
        now = 0.0
        for burst in range(5):
            for i in range(30):
                now += 0.02
                inside = 10 <= i < 20
                other = not inside
                token = Token(
                    at_s=now + (100.0 if other and change == "time" and i >= 20 else 0.0),
                    kind="b" if other and change == "kind" else "a",
                    kv_length=5000 if other and change == "kv" else 100,
                    seconds=0.02,
                )
                if change == "short" and inside and i > 11:
                    continue
                (measured.inside if inside else measured.outside)(token)
            now += 200.0 * (change == "time")
            assert measured.pairs == 0, (change, burst)
        assert measured.in_burst() is None and measured.overall() is None


def test_a_burst_at_the_end_of_a_request_has_no_neighbour_after() -> None:
    """It is counted as unpaired when the next burst begins."""
    measured = MeasuredOverhead()
    now = 0.0
    for inside in (False, True, True):
        for _ in range(10):
            now += 0.02
            (measured.inside if inside else measured.outside)(Token(now, "a", 10, 0.02))
    now += 60
    for inside in (False, True):
        for _ in range(10):
            now += 0.02
            (measured.inside if inside else measured.outside)(Token(now, "a", 10, 0.02))
    assert measured.pairs == 0 and measured.unpaired == 1


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 40),
            st.booleans(),
            st.floats(0, 10),
            st.integers(0, 2**31),
            st.floats(0, 1e5),
        ),
        max_size=300,
    )
)
def test_any_stream_is_survived_in_bounded_memory(steps: list[tuple[int, bool, float, int, float]]) -> None:
    """Zero seconds, endless kinds, huge lengths: finite figures, bounded stores."""
    measured = MeasuredOverhead(neighbours=8, min_tokens=1, max_inside=16, max_pairs=10, max_kinds=3)
    now = 0.0
    for kind, inside, gap, kv, seconds in steps:
        now += gap
        (measured.inside if inside else measured.outside)(Token(now, kind, kv, seconds))
        assert measured.pairs <= 10
        assert len(measured._quiet) <= 3 and len(measured._open) <= 3
        assert all(len(b.inside) <= 16 and len(b.after) <= 8 for b in measured._open.values())
        interval = measured.in_burst()
        if interval is not None:
            assert interval.low <= interval.value <= interval.high
            assert math.isfinite(interval.value) and interval.low > -1


def test_t_quantiles() -> None:
    """Against the tables (NIST handbook, 1.3.6.7.2)."""
    table = {1: 12.706, 2: 4.303, 4: 2.776, 5: 2.571, 6: 2.447, 10: 2.228, 30: 2.042, 100: 1.984}
    for df, value in table.items():
        assert t95(df) == pytest.approx(value, abs=0.003), df
    with pytest.raises(ValueError):
        t95(0)


def test_trimmed_interval() -> None:
    """Plain t below ten values; beyond, one wild value in ten changes next to nothing."""
    plain = trimmed_interval([1.0, 2.0, 3.0])
    assert plain is not None
    assert plain.value == 2.0 and plain.high - 2.0 == pytest.approx(4.302653 / math.sqrt(3))
    assert trimmed_interval([1.0]) is None
    values = [0.02 + 0.001 * ((i * 7) % 11 - 5) for i in range(20)]
    wild = trimmed_interval([*values[:-1], 50.0])
    assert wild is not None and wild.value == pytest.approx(0.02, abs=0.001) and wild.high < 0.03
