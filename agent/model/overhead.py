# SPDX-License-Identifier: Apache-2.0
"""What op probes cost a target, measured on its own tokens (design D6).

Tokens inside a burst (op probes armed) are compared with their neighbours just before and
just after it, of the same kind and a similar KV length. One burst gives one log ratio,

    ln median(inside) - (ln median(before) + ln median(after)) / 2

Tokens of one burst share its moment, so the burst is the unit, not the token. Medians: a
token that waited for a core says nothing about probes. Neighbours on both sides: what grows
steadily (attention over a longer cache) cancels. Bursts without both are counted, not used.

The interval is Student's t on the mean of the bursts' log ratios with a tenth trimmed off
each end (Tukey-McLaughlin: winsorised deviation, n - 2g - 1 degrees of freedom): one burst
in ten may have met something else entirely. With fewer than 10 bursts nothing is trimmed;
a strange one makes the interval long instead.

It measures op probes alone: the token and graph probes are there on both sides.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

TRIM = 0.1
#: Two-sided 95 % quantiles of Student's t for 1..4 degrees of freedom; beyond, the series.
_T95 = (12.706205, 4.302653, 3.182446, 2.776445)
_Z95 = 1.959964


def t95(df: int) -> float:
    """Two-sided 95 % quantile of Student's t; relative error below 0.1 %.

    Cornish-Fisher expansion in 1/df (Abramowitz and Stegun 26.7.5).
    """
    if df < 1:
        raise ValueError("no degrees of freedom")
    if df <= len(_T95):
        return _T95[df - 1]
    z = _Z95
    return (
        z
        + (z**3 + z) / (4 * df)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * df**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * df**3)
        + (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * df**4)
    )


@dataclass(frozen=True, slots=True)
class Interval:
    """``value`` with a 95 % interval [low, high]: slowdown as a ratio, 0.01 is 1 %."""

    value: float
    low: float
    high: float

    def disagrees(self, low: float, high: float | None = None) -> bool:
        """True when this interval and [low, high] (or the figure ``low``) do not overlap."""
        return self.high < low or self.low > (low if high is None else high)


def trimmed_interval(values: list[float]) -> Interval | None:
    """Trimmed mean of ``values`` and its 95 % interval; None below two values."""
    n = len(values)
    cut = int(TRIM * n)
    kept = n - 2 * cut
    if n < 2:
        return None
    ordered = sorted(values)
    inner = ordered[cut : n - cut]
    mean = sum(inner) / kept
    winsorised = [inner[0]] * cut + inner + [inner[-1]] * cut
    centre = sum(winsorised) / n
    deviation = math.sqrt(sum((v - centre) ** 2 for v in winsorised) / (n - 1))
    half = t95(kept - 1) * deviation / ((1 - 2 * cut / n) * math.sqrt(n))
    return Interval(mean, mean - half, mean + half)


@dataclass(frozen=True, slots=True)
class Token:
    """One decode step: when its graph ended, its kind (topology and tokens per step: what
    must be equal for two steps to be comparable), KV length, graph seconds; ``cost_s``: what
    its op hits cost at the calibrated price."""

    at_s: float
    kind: Hashable
    kv_length: int
    seconds: float
    cost_s: float = 0.0


@dataclass(slots=True)
class _Burst:
    before: list[Token]
    inside: list[Token] = field(default_factory=list)
    after: list[Token] = field(default_factory=list)


class MeasuredOverhead:
    """Pairs of one target; memory is bounded by the parameters.

    ``neighbours``: tokens on each side, at most. ``min_tokens``: at least, inside and on
    each side. ``reach_s``: how far away in time a neighbour may be. ``kv_slack``,
    ``kv_ratio``: KV lengths are similar when they differ by no more than the larger of
    both. ``max_pairs``: the latest bursts that count. ``max_kinds``: kinds followed.
    """

    def __init__(
        self,
        *,
        neighbours: int = 32,
        min_tokens: int = 4,
        reach_s: float = 10.0,
        kv_slack: int = 128,
        kv_ratio: float = 0.1,
        max_inside: int = 512,
        max_pairs: int = 256,
        max_kinds: int = 16,
    ) -> None:
        if not 1 <= min_tokens <= min(neighbours, max_inside):
            raise ValueError("1 <= min_tokens <= neighbours, max_inside")
        self._neighbours = neighbours
        self._min_tokens = min_tokens
        self._reach_s = reach_s
        self._kv_slack = kv_slack
        self._kv_ratio = kv_ratio
        self._max_inside = max_inside
        self._max_kinds = max_kinds
        self._quiet: OrderedDict[Hashable, deque[Token]] = OrderedDict()  # latest tokens outside
        self._open: dict[Hashable, _Burst] = {}
        self._pairs: deque[float] = deque(maxlen=max_pairs)
        self._seconds = [0.0, 0.0]  # outside, inside
        self._cost_s = 0.0
        self.unpaired = 0

    def outside(self, token: Token) -> None:
        """A token that ran without op probes from its begin to its end."""
        self._seconds[0] += token.seconds
        if token.seconds <= 0:
            return
        quiet = self._quiet.get(token.kind)
        if quiet is None:
            quiet = self._quiet[token.kind] = deque(maxlen=self._neighbours)
            if len(self._quiet) > self._max_kinds:
                kind, _ = self._quiet.popitem(last=False)
                self._give_up(kind)
        self._quiet.move_to_end(token.kind)
        quiet.append(token)
        burst = self._open.get(token.kind)
        if burst is not None and burst.inside:
            burst.after.append(token)
            far = token.at_s - burst.inside[-1].at_s > self._reach_s
            if far or len(burst.after) >= max(self._min_tokens, min(self._neighbours, len(burst.inside))):
                self._close(token.kind)

    def inside(self, token: Token) -> None:
        """A token that ran with op probes armed from its begin to its end. Tokens during
        which probes came or went belong to neither side: leave them out."""
        self._seconds[1] += token.seconds
        self._cost_s += token.cost_s
        if token.seconds <= 0:
            return
        burst = self._open.get(token.kind)
        if burst is not None and burst.after:
            self._close(token.kind)
            burst = None
        if burst is None:
            if token.kind not in self._quiet:
                return
            burst = self._open[token.kind] = _Burst(list(self._quiet[token.kind]))
        if len(burst.inside) < self._max_inside:
            burst.inside.append(token)
        else:
            # The latest stay, for their neighbours after.
            burst.inside[len(burst.inside) // 2 :] = [*burst.inside[len(burst.inside) // 2 + 1 :], token]

    def _give_up(self, kind: Hashable) -> None:
        if self._open.pop(kind, None) is not None:
            self.unpaired += 1

    def _similar(self, tokens: list[Token], near: Token) -> list[Token]:
        slack = max(self._kv_slack, self._kv_ratio * near.kv_length)
        return [
            t
            for t in tokens
            if abs(t.kv_length - near.kv_length) <= slack and abs(t.at_s - near.at_s) <= self._reach_s
        ]

    def _close(self, kind: Hashable) -> None:
        burst = self._open.pop(kind)
        # Each side has its own stretch of the burst next to it: a long burst need not be
        # within reach as a whole.
        first, last = burst.inside[0], burst.inside[-1]
        before = self._similar(burst.before, first)
        after = self._similar(burst.after, last)
        # As many on one side as on the other, or a steady growth would not cancel.
        n = min(len(before), len(after), max(len(burst.inside), self._min_tokens))
        if min(n, len(burst.inside)) < self._min_tokens:
            self.unpaired += 1
            return
        outside = [math.log(median(t.seconds for t in side)) for side in (before[-n:], after[:n])]
        self._pairs.append(math.log(median(t.seconds for t in burst.inside)) - sum(outside) / 2)

    @property
    def pairs(self) -> int:
        """Bursts that count."""
        return len(self._pairs)

    @property
    def inside_share(self) -> float | None:
        """Share of all token seconds that lay inside bursts; None before the first token."""
        total = sum(self._seconds)
        return self._seconds[1] / total if total > 0 else None

    def in_burst_estimate(self) -> float | None:
        """Slowdown of the tokens inside bursts as their hits explain it; None before the first."""
        without = self._seconds[1] - self._cost_s
        return self._cost_s / without if without > 0 else None

    def in_burst(self) -> Interval | None:
        """Slowdown of a token while op probes are armed; None below two pairs."""
        log = trimmed_interval(list(self._pairs))
        if log is None:
            return None
        return Interval(math.expm1(log.value), math.expm1(log.low), math.expm1(log.high))

    def overall(self) -> Interval | None:
        """Slowdown over all token seconds, bursts and the time between them."""
        burst, share = self.in_burst(), self.inside_share
        if burst is None or share is None:
            return None
        # share counts slowed seconds: without probes they would be share / (1 + ratio).
        low, value, high = (share * r / (1 + r - share * r) for r in (burst.low, burst.value, burst.high))
        return Interval(value, low, high)


def median(values: Iterable[float]) -> float:
    """The middle one, or the mean of the two. (``statistics`` loads decimal arithmetic: a MiB.)"""
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
