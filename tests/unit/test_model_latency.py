# SPDX-License-Identifier: Apache-2.0
"""The bounded store of durations against exact arithmetic."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
from hypothesis import given

from profinferd.agent.model.latency import BUCKETS, LatencyStore, merged

durations = st.lists(st.integers(0, 10**13), min_size=1, max_size=200)


def store_of(values: list[int]) -> LatencyStore:
    store = LatencyStore()
    for ns in values:
        store.record(ns)
    return store


def test_empty_is_absent() -> None:
    """C14: no inf, no NaN, no zero that was never measured."""
    summary = LatencyStore().summary()
    assert (summary.count, summary.mean, summary.p50, summary.p90, summary.p99) == (0, None, None, None, None)
    histogram = LatencyStore().histogram()
    assert histogram.count == 0 and set(histogram.counts) == {0} and len(histogram.counts) == len(BUCKETS) + 1


@given(durations)
def test_mean_is_exact_and_quantiles_within_one_percent(values: list[int]) -> None:
    store = store_of(values)
    ordered = sorted(values)
    summary = store.summary()
    assert summary.count == len(values)
    assert summary.mean == pytest.approx(math.fsum(values) / len(values) / 1e9, rel=1e-12)
    for q, got in ((0.5, summary.p50), (0.9, summary.p90), (0.99, summary.p99)):
        exact = ordered[max(1, math.ceil(q * len(values))) - 1] / 1e9
        assert got == pytest.approx(exact, rel=0.01, abs=1e-9)


@given(durations)
def test_buckets_are_exact(values: list[int]) -> None:
    histogram = store_of(values).histogram()
    for bound, count in zip(BUCKETS, histogram.counts, strict=False):
        assert count == sum(ns <= round(bound * 1e9) for ns in values)
    assert histogram.counts[-1] == histogram.count == len(values)
    assert histogram.sum == pytest.approx(sum(values) / 1e9)


@given(durations, durations)
def test_sum_of_two(a: list[int], b: list[int]) -> None:
    both = merged([store_of(a), store_of(b), LatencyStore()])
    assert both.summary() == store_of(a + b).summary()
    assert both.histogram() == store_of(a + b).histogram()


def test_bounded_whatever_is_recorded() -> None:
    store = LatencyStore()
    for ns in range(200_000):
        store.record(ns**3)
    assert len(store._bins) < 5000
    store.record(-5)
    store.record(2**64)
    assert store.low == 0 and store.high == 2**64 and store.quantile(1.0) == 2**64 / 1e9
