# SPDX-License-Identifier: Apache-2.0
"""Student's t, for intervals and tests of few values; no more than comparing recordings needs."""

from __future__ import annotations

import math

_STEPS = 300
_TINY = 1e-300


def tail(t: float, df: float) -> float:
    """P(|T| >= |t|) with ``df`` degrees of freedom, two-sided; 1.0 for what is no number."""
    if df <= 0 or math.isnan(t):
        return 1.0
    if math.isinf(t):
        return 0.0
    return _beta(df / 2, 0.5, df / (df + t * t))


def quantile(p: float, df: float) -> float:
    """The t with P(|T| >= t) = ``p`` (0 < p < 1); infinite for df <= 0."""
    if df <= 0:
        return math.inf
    low, high = 0.0, 1.0
    while tail(high, df) > p and high < 1e12:
        high *= 2
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if tail(middle, df) > p else (low, middle)
    return high


def holm(ps: list[float]) -> list[float]:
    """P-values adjusted so that the chance of any false alarm among all stays below the level (Holm)."""
    order = sorted(range(len(ps)), key=lambda i: ps[i])
    out, highest = [1.0] * len(ps), 0.0
    for rank, i in enumerate(order):
        highest = max(highest, min(1.0, (len(ps) - rank) * ps[i]))
        out[i] = highest
    return out


def _beta(a: float, b: float, x: float) -> float:
    """The regularised incomplete beta function, by its continued fraction."""
    if x <= 0 or x >= 1:
        return 0.0 if x <= 0 else 1.0
    front = math.exp(
        math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    )
    if x > (a + 1) / (a + b + 2):
        return 1 - front * _fraction(b, a, 1 - x) / b
    return front * _fraction(a, b, x) / a


def _fraction(a: float, b: float, x: float) -> float:
    c, d = 1.0, 1 / _apart(1 - (a + b) * x / (a + 1))
    value = d
    for m in range(1, _STEPS):
        for step in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 / _apart(1 + step * d)
            c = _apart(1 + step / c)
            value *= c * d
        if abs(c * d - 1) < 1e-12:
            break
    return value


def _apart(x: float) -> float:
    return x if abs(x) > _TINY else _TINY
