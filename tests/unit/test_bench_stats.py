# SPDX-License-Identifier: Apache-2.0
"""The benchmark's statistics: known answers, coverage, and what noise must not do."""

from __future__ import annotations

import itertools
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.bench.stats import _signed_rank_below, capped_mean, estimate, slowdown

FINITE = st.floats(-1e3, 1e3, allow_nan=False)


def test_distribution_of_the_signed_rank_by_enumeration() -> None:
    n = 6
    sums = [
        sum(rank for rank, sign in enumerate(signs, 1) if sign)
        for signs in itertools.product((0, 1), repeat=n)
    ]
    for k, p in enumerate(_signed_rank_below(n)):
        assert p == pytest.approx(sum(s <= k for s in sums) / 2**n)


@pytest.mark.parametrize(("n", "cut"), [(6, 0), (7, 2), (8, 3), (10, 8), (15, 25), (20, 52)])
def test_interval_against_published_critical_values(n: int, cut: int) -> None:
    """Two-sided 5 % critical values of Wilcoxon's test, as in any table of it."""
    values = [float(2**i) for i in range(n)]  # all pairwise means differ
    means = sorted((a + b) / 2 for a, b in itertools.combinations_with_replacement(values, 2))
    found = estimate(values)
    assert (found.low, found.high) == (means[cut], means[-1 - cut])
    assert found.reached


def test_few_samples_do_not_claim_95_percent() -> None:
    found = estimate([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (found.low, found.high) == (1.0, 5.0)
    assert found.confidence == pytest.approx(1 - 2 / 2**5)
    assert not found.reached
    assert estimate([7.0]).confidence == pytest.approx(0.0)


@pytest.mark.parametrize("n", [6, 9, 14])
def test_the_interval_holds_the_truth_as_often_as_it_says(n: int) -> None:
    rng = random.Random(n)
    hits = 0
    for _ in range(1500):
        # Heavy tails on both sides, as a shared machine has.
        values = [0.01 + rng.gauss(0, 0.01) * (10 if rng.random() < 0.1 else 1) for _ in range(n)]
        found = estimate(values)
        hits += found.low <= 0.01 <= found.high
    assert 0.935 <= hits / 1500 <= 0.995


def test_one_wild_window_does_not_move_the_estimate() -> None:
    calm = [0.010, 0.011, 0.009, 0.010, 0.012, 0.008, 0.010, 0.011, 0.009]
    wild = [*calm, 0.9]
    assert estimate(wild).value == pytest.approx(estimate(calm).value, abs=0.001)
    assert abs(statistics.fmean(wild) - statistics.fmean(calm)) > 0.05


@given(st.lists(FINITE, min_size=1, max_size=25), FINITE)
def test_estimates_move_with_the_values(values: list[float], shift: float) -> None:
    found, moved = estimate(values), estimate([v + shift for v in values])
    assert min(values) <= found.low <= found.value <= found.high <= max(values)
    assert moved.value == pytest.approx(found.value + shift, abs=1e-6)
    assert moved.high - moved.low == pytest.approx(found.high - found.low, abs=1e-6)


def test_slowdown_cancels_a_linear_drift() -> None:
    """The machine becomes slower by 3 % a window; the profiled one costs 2 % besides."""
    assert slowdown(1.00, 1.03 / 0.98, 1.06) == pytest.approx(0.02)
    assert slowdown(1.0, 1.0, 1.0) == 0.0
    with pytest.raises(ValueError, match="duration"):
        slowdown(1.0, 0.0, 1.0)


def test_capped_mean_keeps_small_stalls_and_cuts_foreign_ones() -> None:
    calm = [10.0] * 99
    assert capped_mean([*calm, 14.0]).mean == pytest.approx(10.04)  # an arming stall counts fully
    cut = capped_mean([*calm, 500.0])
    assert cut.mean == pytest.approx(10.05)
    assert cut.cut == pytest.approx(0.01)
    with pytest.raises(ValueError, match="no values"):
        capped_mean([])


def test_no_values() -> None:
    with pytest.raises(ValueError, match="no values"):
        estimate([])
