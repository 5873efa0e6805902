# SPDX-License-Identifier: Apache-2.0
"""Whether operators differ between two recordings, on machines that are never the same twice.

Two runs of the same program differ: the machine was busier, memory was laid out otherwise, and
what comes after one another in one run is alike. Pairs of executions are therefore put into blocks
of neighbours, and

* what all operators did together (the median over them, block by block) is taken off first;
* besides the scatter between blocks, the scatter *between operators* counts: when most of them
  moved by some 2 % either way, 3 % is nothing. It is taken from the middle of their distribution, so
  that the few that really changed do not hide themselves;
* a probe takes about a microsecond of each kernel, and not always the same: some 150 ns of a kernel
  are never evidence;
* the chance of any false alarm among all tests is kept below 0.1 % (Holm).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from .diffdata import Ratio
from .student import holm, quantile, tail

Floats = npt.NDArray[np.float64]

LEVEL = 0.001
MIN_PAIRS = 16
_MOST_BLOCKS, _FEWEST_BLOCKS = 20, 4
_PROBE_NS = 150.0
_FLOOR, _FEW_FLOOR, _FEW = 0.01, 0.03, 6
_SMALL_SHARE = 0.001
_MAD = 1.4826


@dataclass(frozen=True, slots=True)
class Measured:
    """A difference of logarithms with its standard error and degrees of freedom. ``own``: the part of
    the error that is scatter between blocks."""

    value: float
    error: float
    df: float
    own: float = 0.0

    @property
    def p(self) -> float:
        """The chance of such a difference without a cause."""
        return tail(self.value / self.error, self.df) if self.error > 0 else 1.0

    def ratio(self, p: float) -> Ratio:
        """As a ratio, with an adjusted p."""
        wide = quantile(0.05, self.df) * self.error
        low, high = (math.exp(min(max(self.value + side, -700.0), 700.0)) for side in (-wide, wide))
        return Ratio(math.exp(self.value), low, high, p, p < LEVEL)


def blocks(pairs: int) -> list[slice]:
    """Stretches of neighbouring pairs; empty when there are too few to tell anything."""
    if pairs < MIN_PAIRS:
        return []
    count = min(_MOST_BLOCKS, max(_FEWEST_BLOCKS, pairs // 8))
    edges = np.linspace(0, pairs, count + 1).astype(int).tolist()
    return [slice(a, b) for a, b in pairwise(edges)]


def block_medians(a: Floats, b: Floats, parts: list[slice]) -> Floats:
    """log(b / a) of every column, as medians of blocks: [block, column], NaN where one is missing."""
    with np.errstate(invalid="ignore", divide="ignore"):
        logs = np.log(b / a)
    logs[~np.isfinite(logs)] = np.nan
    out = np.full((len(parts), logs.shape[1]), np.nan)
    for row, part in enumerate(parts):
        there = ~np.isnan(logs[part]).all(axis=0)
        out[row, there] = np.nanmedian(logs[part][:, there], axis=0)
    return out


def common(medians: Floats, share: Floats) -> Floats:
    """What all columns did together, by block; zero where there are too few to say. ``share`` of the
    whole time, by column: the smallest have no say."""
    heard = (share >= _SMALL_SHARE) & ~np.isnan(medians).any(axis=0)
    if np.count_nonzero(heard) < 3:
        return np.zeros(len(medians))
    return np.asarray(np.median(medians[:, heard], axis=1))


def spread(found: list[Measured | None]) -> float:
    """The variance between what should be alike: from the middle of the distribution, so that what
    really changed has no part in it, and without what scatters between blocks."""
    known = [one for one in found if one is not None]
    if len(known) < 3:
        return 0.0
    values = np.array([one.value for one in known])
    mad = float(np.median(np.abs(values - np.median(values))))
    return max((_MAD * mad) ** 2 - float(np.median([one.own**2 for one in known])), 0.0)


def differences(
    apart: Floats, share: Floats, kernel_ns: Floats, *, floor: float = _FLOOR, besides: Floats | float = 0.0
) -> list[Measured | None]:
    """Every column's difference from the others. ``apart``: [block, column] without what is common;
    ``kernel_ns``: usual time of one kernel; ``besides``: a variance that each column has in any case.
    None: not there in enough blocks."""
    count = np.sum(~np.isnan(apart), axis=0)
    there = count >= _FEWEST_BLOCKS
    columns = np.flatnonzero(there)
    value = {c: float(np.nanmean(apart[:, c])) for c in columns.tolist()}
    own = {c: float(np.nanstd(apart[:, c], ddof=1) / math.sqrt(count[c])) for c in columns.tolist()}
    heard = [Measured(value[c], own[c], 1, own[c]) for c in columns.tolist() if share[c] >= _SMALL_SHARE]
    least = floor if len(heard) >= _FEW else max(floor, _FEW_FLOOR)
    between = max(spread(list(heard)), least**2)
    extra = np.broadcast_to(np.asarray(besides, dtype=np.float64), count.shape)
    found: list[Measured | None] = [None] * len(count)
    for c in columns.tolist():
        both = between + float(extra[c]) + (_PROBE_NS / max(float(kernel_ns[c]), 1.0)) ** 2
        variance = own[c] ** 2 + both
        df = variance**2 / (own[c] ** 4 / (int(count[c]) - 1) + both**2 / max(len(heard) - 1, 2))
        found[c] = Measured(value[c], math.sqrt(variance), df, own[c])
    return found


def usual(times: Floats) -> float:
    """What an execution takes without rare pauses: the sum of every column's median. NaN: not there."""
    there = ~np.isnan(times).all(axis=0)
    return float(np.nanmedian(times[:, there], axis=0).sum()) if there.any() else 0.0


def total(a: Floats, b: Floats, parts: list[slice]) -> Ratio | None:
    """How the usual time of whole executions changed. ``a``, ``b``: [execution, unit]. A machine that is
    slower all the time counts like a build that is."""
    if not parts:
        return None
    logs = np.array([math.log(max(usual(b[part]), 1.0) / max(usual(a[part]), 1.0)) for part in parts])
    error = math.hypot(float(np.std(logs, ddof=1)) / math.sqrt(len(logs)), _FLOOR)
    found = Measured(float(np.mean(logs)), error, len(logs) - 1)
    return found.ratio(found.p)


def counts(a: Floats, b: Floats, parts: list[slice]) -> list[Measured | None]:
    """Differences of things that are counted (faults, waits) by column, from means of blocks (Welch).

    The value is log(b / a), its error such that p is that of the difference of the means; None where
    one of the sides has none.
    """
    if not parts:
        return [None] * a.shape[1]
    left, right = (np.stack([side[part].mean(axis=0) for part in parts]) for side in (a, b))
    found: list[Measured | None] = []
    for x, y in zip(left.T, right.T, strict=True):
        mean = float(x.mean()), float(y.mean())
        if min(mean) <= 0:
            found.append(None)
            continue
        own = float(x.var(ddof=1)) / len(x), float(y.var(ddof=1)) / len(y)
        error = math.sqrt(sum(own)) or 1e-9
        df = sum(own) ** 2 / (own[0] ** 2 + own[1] ** 2) * (len(x) - 1) if sum(own) else len(x) - 1
        value = math.log(mean[1] / mean[0])
        t = (mean[1] - mean[0]) / error
        found.append(Measured(value, abs(value / t) if t else error, df))
    return found


def judged(found: list[Measured | None], families: int = 1) -> list[Ratio | None]:
    """As ratios, with p adjusted for all of them, and for so many families of tests."""
    tested = [(i, one) for i, one in enumerate(found) if one is not None]
    adjusted = holm([one.p for _, one in tested])
    out: list[Ratio | None] = [None] * len(found)
    for (i, one), p in zip(tested, adjusted, strict=True):
        out[i] = one.ratio(min(1.0, families * p))
    return out
