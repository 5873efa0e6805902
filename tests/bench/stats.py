# SPDX-License-Identifier: Apache-2.0
"""Statistics of the benchmark: what one window says, and what many pairs say together.

Nothing here assumes a normal distribution: a shared machine has none.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95
CAP = 1.5
"""A token counts as at most so many times its window's median: what takes longer than half a
token more is another process or the hypervisor, no probe. The longest stall that probes cause
(arming them while the engine runs) is a few ms, well below."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A median-like value and the interval that holds it with ``confidence``.

    With fewer than six samples no interval reaches 95 %: it is their range then, and
    ``confidence`` says how little that is.
    """

    value: float
    low: float
    high: float
    samples: int
    confidence: float

    @property
    def reached(self) -> bool:
        """Whether the interval is one of 95 %."""
        return self.confidence >= CONFIDENCE


@dataclass(frozen=True, slots=True)
class Capped:
    """Mean of the tokens of a window in ns, and the share of them that were cut to the cap."""

    mean: float
    cut: float


def capped_mean(times: Sequence[float], factor: float = CAP) -> Capped:
    """Mean with each value cut to ``factor`` times the median. Raises ValueError when empty."""
    if not times:
        raise ValueError("no values")
    cap = factor * statistics.median(times)
    return Capped(statistics.fmean(min(t, cap) for t in times), sum(t > cap for t in times) / len(times))


def slowdown(before: float, during: float, after: float) -> float:
    """Speed lost, as a ratio: ``during`` against the mean of the windows on both sides.

    Arguments are times per token; 0.02 means 2 % fewer tokens a second. Taking both sides
    cancels a drift of the machine that is linear over three windows.
    """
    if during <= 0:
        raise ValueError("a window without a duration")
    return 1.0 - (before + after) / 2 / during


def estimate(values: Sequence[float]) -> Estimate:
    """Hodges-Lehmann median (that of all pairwise means) with Wilcoxon's signed-rank interval.

    Distribution-free for symmetric noise, and as precise as half as many samples more would
    make the plain median. Raises ValueError when empty.
    """
    if not values:
        raise ValueError("no values")
    n = len(values)
    means = sorted((values[i] + values[j]) / 2 for i in range(n) for j in range(i, n))
    below = _signed_rank_below(n)
    outside = (1 - CONFIDENCE) / 2
    # How many of the smallest (and of the largest) means are outside the interval.
    cut = 0
    while cut + 1 < len(below) and below[cut + 1] <= outside:
        cut += 1
    # P(W <= cut): with cut 0 even the whole range misses the median so often.
    confidence = 1 - 2 * below[cut]
    return Estimate(statistics.median(means), means[cut], means[-1 - cut], n, confidence)


def _signed_rank_below(n: int) -> list[float]:
    """P(W <= k) of Wilcoxon's signed-rank statistic for n samples, k from 0 on, exactly.

    Of the 2**n sets of ranks 1..n, those with sum W; the float is exact enough from n = 6 on
    and a quarter of the range is all that is asked for.
    """
    most = n * (n + 1) // 4 + 1
    ways = [1] + [0] * most
    for rank in range(1, n + 1):
        for total in range(most, rank - 1, -1):
            ways[total] += ways[total - rank]
    out: list[float] = []
    running = 0
    for count in ways:
        running += count
        out.append(running / 2**n)
    return out
