# SPDX-License-Identifier: Apache-2.0
"""Which calls of an engine are watched, so that watching them stays within the budget (design D6).

Calls that the catalogue describes by data may come twice a token or 200,000 times a second, and
nobody knows which before they were looked at. So what watching may cost is a bucket: it holds
``DEPTH`` of a period's budget and fills at ``FILL`` of the budget while the target is busy. In any
``period_s`` of busy time at most ``FILL`` + 2 x ``DEPTH`` = 1 of the budget is spent, because the
kernel looks at no more calls when the bucket is empty: at the frequent ones first, and at none when
it was overdrawn by as much again. What their probes cost all the same, until they are taken off, is
a debt that is paid before anything else.

Everything begins in a trial: watched until the bucket is empty, or for a second of work. Then what
costs most is shed until the rest takes ``KEEP`` of the budget. Each period there is another trial of
everything, as soon as the bucket is full: what fits by then (``KEEP``, well below what it was shed
for) comes back, and of what does not, a few calls were seen again. So the bucket pays for that, too.

A unit is what is shed together: calls of one name, or all of an engine's. Times are seconds of the
caller's clock.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from .accounts import Account

Unit = tuple[str, str]
"""An engine and a call of it; "" for all of its calls."""
FILL, DEPTH, KEEP = 0.7, 0.15, 0.5
TRIAL_BUSY_S = 1.0
LEAST_BUSY_S = 0.02
"""Of less busy time than this no rate is made unless the bucket is empty."""


@dataclass(frozen=True, slots=True)
class Spent:
    """Of one unit since it is known: calls that were watched, ``skipped`` ones that came when the
    bucket was empty, and what both cost the target."""

    calls: int = 0
    skipped: int = 0
    seconds: float = 0.0

    def __sub__(self, other: Spent) -> Spent:
        return Spent(self.calls - other.calls, self.skipped - other.skipped, self.seconds - other.seconds)

    def __add__(self, other: Spent) -> Spent:
        return Spent(self.calls + other.calls, self.skipped + other.skipped, self.seconds + other.seconds)


@dataclass(frozen=True, slots=True)
class ShedUnit:
    """Why a unit is not watched: how often it came when it was looked at last, and what that would cost."""

    calls_per_second: float
    ratio: float


@dataclass(frozen=True, slots=True)
class CallDecision:
    """``watched``: units whose probes are to be there. ``grant_s``: what may be spent from now on, until
    the next tick, and ``more_s``: what rare calls may spend beyond. ``trial``: it is not known yet what
    fits, so the next tick should come soon. ``shed``: what is not watched."""

    watched: frozenset[Unit]
    grant_s: float
    more_s: float
    trial: bool
    shed: Mapping[Unit, ShedUnit]


@dataclass(slots=True)
class _Window:
    """Since when the present rates are measured."""

    busy_s: float = 0.0
    spent: dict[Unit, Spent] = field(default_factory=dict)

    def add(self, busy_s: float, fresh: Mapping[Unit, Spent]) -> None:
        self.busy_s += busy_s
        for unit, spent in fresh.items():
            self.spent[unit] = self.spent.get(unit, Spent()) + spent

    @property
    def cost_s(self) -> float:
        return sum(one.seconds for one in self.spent.values())

    @property
    def skipped(self) -> bool:
        return any(one.skipped for one in self.spent.values())


class CallBudget:
    """One process. Ticks may come at any interval; what a trial overdraws is what happens until the
    tick after it, so those during one should be short (0.05 s)."""

    def __init__(self, budget_ratio: float, *, period_s: float = 5.0) -> None:
        """``budget_ratio``: 0.01 is 1 %. From 1 on everything is watched, whatever it costs."""
        self.budget_ratio = budget_ratio
        self.account = Account()
        self._period_s = period_s
        self._before: dict[Unit, Spent] = {}
        self._shed: dict[Unit, ShedUnit] = {}
        self._trial = True
        self._window = _Window()
        self._next_trial_s = -math.inf
        self._allowance_s: float | None = None

    def tick(
        self,
        now_s: float,
        busy_s: float,
        free_ratio: float,
        spent: Mapping[Unit, Spent],
        prices: Mapping[Unit, float],
        cycle_s: float,
    ) -> CallDecision:
        """``busy_s``: that the target was busy since the last tick. ``free_ratio``: the part of the budget
        that is for calls. ``spent``: of every unit, since the beginning. ``prices``: seconds that one
        watched call costs. ``cycle_s``: what it costs to put probes on and take them off again."""
        fresh = {unit: now - self._before.get(unit, Spent()) for unit, now in spent.items()}
        self._before = dict(spent)
        cost = sum(one.seconds for one in fresh.values())
        self.account.pay(FILL * free_ratio * busy_s, busy_s)
        self.account.charge({"engine_call": cost})
        self.account.lapse()
        self._window.add(busy_s, fresh)
        depth = DEPTH * free_ratio * self._period_s
        if self.budget_ratio >= 1:
            return CallDecision(frozenset(spent), math.inf, math.inf, False, {})
        if self._allowance_s is None:
            self._begin_trial(now_s, depth)
        if self._trial:
            empty = self._window.skipped or self._window.cost_s >= 0.95 * (self._allowance_s or 0.0)
            if empty or self._window.busy_s >= TRIAL_BUSY_S:
                self._judge(self._window, prices, free_ratio, trial=True)
                self._trial, self._window = False, _Window()
        elif any(one.skipped for one in fresh.values()):
            self._judge(_Window(busy_s, dict(fresh)), prices, free_ratio, trial=False)
            self._window = _Window()
        elif self._window.busy_s >= TRIAL_BUSY_S:
            self._judge(self._window, prices, free_ratio, trial=False)
            self._window = _Window()
        paid = self.account.debt_s <= 0.01 * depth
        if not self._trial and self._shed and free_ratio > 0 and paid and now_s >= self._next_trial_s:
            self.account.charge({"cycle": cycle_s})
            # Where even putting probes on costs more than the bucket holds, there is a longer wait.
            self._begin_trial(now_s, max(depth, 4 * cycle_s))
        grant = max(0.0, (self._allowance_s or depth) if self._trial else depth)
        shed = {} if self._trial else self._shed
        return CallDecision(
            watched=frozenset(unit for unit in spent if unit not in shed),
            grant_s=max(0.0, grant - self.account.debt_s),
            more_s=depth,
            trial=self._trial,
            shed=dict(shed),
        )

    def join(self, engine: str) -> None:
        """From now on all calls of ``engine`` are one unit; with the next tick a trial begins."""
        for known in [unit for unit in self._before if unit[0] == engine and unit[1]]:
            self._before[engine, ""] = self._before.get((engine, ""), Spent()) + self._before.pop(known)
        self._shed = {unit: why for unit, why in self._shed.items() if unit[0] != engine}
        self._allowance_s = None

    def _begin_trial(self, now_s: float, allowance_s: float) -> None:
        self._trial, self._window = True, _Window()
        self._allowance_s = allowance_s
        self._next_trial_s = now_s + self._period_s

    def _judge(
        self, window: _Window, prices: Mapping[Unit, float], free_ratio: float, *, trial: bool
    ) -> None:
        """Shed what costs too much of what was seen; after a trial, take back what fits."""
        would = {
            unit: (one.calls + one.skipped) * prices.get(unit, 0.0) for unit, one in window.spent.items()
        }
        busy = max(window.busy_s, window.cost_s, 1e-6)
        if busy < LEAST_BUSY_S and not trial and not window.skipped:
            return
        ratios = {unit: seconds / busy for unit, seconds in would.items()}

        def found(unit: Unit) -> ShedUnit:
            one = window.spent[unit]
            return ShedUnit((one.calls + one.skipped) / busy, ratios[unit])

        shed = {unit: found(unit) for unit in self._shed if unit in ratios} if trial else dict(self._shed)
        kept = {unit: ratio for unit, ratio in ratios.items() if unit not in shed}
        if sum(kept.values()) > FILL * free_ratio:
            for unit in sorted(kept, key=lambda u: -kept[u]):
                if sum(kept.values()) <= KEEP * free_ratio:
                    break
                shed[unit] = found(unit)
                del kept[unit]
        elif trial:
            for unit in sorted(shed, key=lambda u: ratios[u]):
                if sum(kept.values()) + ratios[unit] > KEEP * free_ratio:
                    break
                kept[unit] = ratios[unit]
                del shed[unit]
        self._shed = shed
