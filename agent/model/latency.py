# SPDX-License-Identifier: Apache-2.0
"""A bounded store of durations: exact count and mean, quantiles within 1 %."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

#: Upper bounds of the published histograms, in seconds (design section 4).
BUCKETS = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5,
    1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
_BUCKETS_NS = tuple(round(bound * 1e9) for bound in BUCKETS)

#: Ratio of neighbouring bins: a value is at most 0.5 % from the middle of its bin.
_STEP = math.log(1.01)
_MAX_BIN = math.ceil(math.log(2**63) / _STEP)


@dataclass(frozen=True, slots=True)
class Summary:
    """Seconds. Mean and quantiles are None when nothing was recorded."""

    count: int
    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None


@dataclass(frozen=True, slots=True)
class Histogram:
    """Cumulative counts at :data:`BUCKETS`, then all; ``sum`` in seconds."""

    counts: tuple[int, ...]
    sum: float
    count: int


class LatencyStore:
    """Durations in ns. Holds at most a few thousand integers whatever is recorded."""

    __slots__ = ("_bins", "_buckets", "count", "high", "low", "total_ns")

    def __init__(self) -> None:
        self.count = 0
        self.total_ns = 0
        self.low = 0
        self.high = 0
        self._bins: dict[int, int] = {}
        self._buckets = [0] * (len(BUCKETS) + 1)

    def record(self, ns: int) -> None:
        """One duration; negative ones (a broken record) count as 0."""
        ns = max(ns, 0)
        self.low = ns if self.count == 0 else min(self.low, ns)
        self.high = max(self.high, ns)
        self.count += 1
        self.total_ns += ns
        number = min(int(math.log(ns) / _STEP), _MAX_BIN) if ns > 0 else -1
        self._bins[number] = self._bins.get(number, 0) + 1
        self._buckets[bisect_left(_BUCKETS_NS, ns)] += 1

    def add(self, other: LatencyStore) -> None:
        """Everything that ``other`` holds."""
        if other.count == 0:
            return
        self.low = other.low if self.count == 0 else min(self.low, other.low)
        self.high = max(self.high, other.high)
        self.count += other.count
        self.total_ns += other.total_ns
        for number, count in other._bins.items():
            self._bins[number] = self._bins.get(number, 0) + count
        self._buckets = [a + b for a, b in zip(self._buckets, other._buckets, strict=True)]

    def quantile(self, q: float) -> float | None:
        """Seconds at the nearest rank of ``q`` (0 < q <= 1); None when empty."""
        if self.count == 0:
            return None
        rank = max(1, math.ceil(q * self.count))
        # The two ends are known exactly.
        if rank == self.count:
            return self.high / 1e9
        seen = 0
        for number in sorted(self._bins):
            seen += self._bins[number]
            if seen >= rank:
                middle = math.exp((number + 0.5) * _STEP) if number >= 0 else 0.0
                return min(max(middle, self.low), self.high) / 1e9
        return self.high / 1e9

    def summary(self) -> Summary:
        """Count, mean and quantiles."""
        mean = self.total_ns / self.count / 1e9 if self.count else None
        return Summary(self.count, mean, self.quantile(0.5), self.quantile(0.9), self.quantile(0.99))

    def histogram(self) -> Histogram:
        """Cumulative bucket counts, exact."""
        counts: list[int] = []
        running = 0
        for count in self._buckets:
            running += count
            counts.append(running)
        return Histogram(tuple(counts), self.total_ns / 1e9, self.count)


def merged(stores: Iterable[LatencyStore]) -> LatencyStore:
    """The sum of several stores, as a new one."""
    whole = LatencyStore()
    for store in stores:
        whole.add(store)
    return whole
