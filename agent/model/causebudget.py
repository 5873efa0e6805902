# SPDX-License-Identifier: Apache-2.0
"""Whether waits and page faults of a target are watched, so that this stays within the budget (design D6).

Programs on the scheduler and on page faults run as often as the target sleeps, wakes and meets new
pages, which nobody knows before it was looked at: four times a token cost a thousandth, and a server
that wakes 50,000 times a second would pay a tenth of its time. Their cost is known from counts and
calibrated prices, and is held against ``free_ratio``: the part of the budget that token and graph
probes (and calls of backends) leave over. So waits go before graphs do.

A part is shed when what is watched takes more than ``FILL`` of that, the dearest first, until the rest
takes ``KEEP``. It is tried again when that was paid for and ``hold_s`` has passed: for a second of work,
or until ``DEPTH`` of a period's budget is spent, and stays if all takes ``KEEP`` then, well below what
it was shed for. Each trial that fails doubles the hold, up to ``MAX_HOLD`` periods. The rest of the
budget is for operators and calls.

Only time in which the target was busy counts: an idle server's wake-ups slow no token down, and are
neither judged nor charged. Times are seconds of the caller's clock.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from .callbudget import DEPTH, FILL, KEEP, TRIAL_BUSY_S

WAITS, FAULTS = "waits", "faults"
MAX_HOLD = 4
"""Of a period, between two trials."""
LEAST_BUSY_S = 0.05
"""Of less busy time than this no rate is made: it is known when a graph ends, and what it costs before."""


@dataclass(frozen=True, slots=True)
class Seen:
    """Of one part since the last tick: how many waits or faults were looked at, and what that cost."""

    count: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class ShedCause:
    """Why a part is not watched: how often it came when it was looked at last, and what that would cost."""

    per_second: float
    ratio: float


@dataclass(frozen=True, slots=True)
class CauseDecision:
    """``watched`` from now on. ``charged``: seconds of cost since the last tick, by part. ``shed``: what
    is not watched, or in a trial again. ``hurry``: the next tick should come soon, for a trial spends
    what there is."""

    watched: frozenset[str]
    charged: Mapping[str, float]
    shed: Mapping[str, ShedCause]
    hurry: bool


@dataclass(slots=True)
class _Window:
    """Since when the present rates are measured."""

    busy_s: float = 0.0
    counts: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def cost_s(self) -> float:
        return sum(self.seconds.values())


class CauseBudget:
    """One process. Ticks may come at any interval; what is overdrawn is what happens between two of
    them, so those that ``hurry`` should be short (0.05 s)."""

    def __init__(self, parts: Collection[str], *, period_s: float = 5.0) -> None:
        """``parts``: what can be watched here at all."""
        self._parts = frozenset(parts)
        self._period_s = self._hold_s = period_s
        self._debt_s = 0.0
        self._shed: dict[str, ShedCause] = {}
        self._trial = True
        self._window = _Window()
        self._next_trial_s = float("-inf")
        self._back_at: float | None = None
        self._useless: frozenset[str] = frozenset()

    def tick(
        self,
        now_s: float,
        busy_s: float,
        free_ratio: float,
        seen: Mapping[str, Seen],
        cycle_s: float = 0.0,
        useless: Collection[str] = (),
    ) -> CauseDecision:
        """``busy_s``: that the target was busy since the last tick. ``seen``: since then, by part; of a
        part that is not watched what it costs all the same. ``cycle_s``: what beginning a trial costs.
        ``useless``: parts that tell nothing now; they are neither watched nor tried.
        With a ``free_ratio`` of 1 or more everything is watched, whatever it costs."""
        self._useless = frozenset(useless)
        if busy_s <= 0:
            return self._decision({}, idle=True)
        charged = {part: one.seconds for part, one in seen.items()}
        self._debt_s = max(0.0, self._debt_s + sum(charged.values()) - FILL * free_ratio * busy_s)
        window, depth = self._window, DEPTH * free_ratio * self._period_s
        window.busy_s += busy_s
        for part, one in seen.items():
            if self._trial or part not in self._shed:
                window.counts[part] = window.counts.get(part, 0) + one.count
                window.seconds[part] = window.seconds.get(part, 0.0) + one.seconds
        if free_ratio >= 1:
            self._shed, self._trial = {}, False
        elif window.busy_s >= TRIAL_BUSY_S or (window.busy_s >= LEAST_BUSY_S and window.cost_s >= depth):
            self._judge(now_s, free_ratio)
            self._trial, self._window = False, _Window()
        paid = free_ratio > 0 and self._debt_s <= 0.01 * depth
        due = not self._trial and paid and now_s >= self._next_trial_s
        if self._shed.keys() - self._useless and due:
            self._debt_s += cycle_s
            charged[WAITS] = charged.get(WAITS, 0.0) + cycle_s
            self._trial, self._window = True, _Window()
        return self._decision(charged, hurry=self._trial and self._window.cost_s > 0.1 * depth)

    def _decision(
        self, charged: Mapping[str, float], *, hurry: bool = False, idle: bool = False
    ) -> CauseDecision:
        shed = {} if self._trial else self._shed
        trying = self._trial and bool(self._shed) and not idle
        watched = self._parts - shed.keys() - self._useless
        return CauseDecision(watched, charged, dict(self._shed), hurry or trying)

    def _judge(self, now_s: float, free_ratio: float) -> None:
        """Shed what costs too much; after a trial, take back what fits."""
        window = self._window
        # Of what was not watched nothing is known: it stays what it is.
        out = {part: why for part, why in self._shed.items() if part in self._useless}
        before = {part: why for part, why in self._shed.items() if part not in self._useless}
        parts = self._parts - self._useless
        ratios = {part: window.seconds.get(part, 0.0) / window.busy_s for part in parts}
        found = {
            part: ShedCause(window.counts.get(part, 0) / window.busy_s, ratio)
            for part, ratio in ratios.items()
        }
        shed = {part: found[part] if self._trial else why for part, why in before.items()}
        kept = {part: ratio for part, ratio in ratios.items() if part not in shed}
        if sum(kept.values()) > FILL * free_ratio:
            for part in sorted(kept, key=lambda p: -kept[p]):
                if sum(kept.values()) <= KEEP * free_ratio:
                    break
                shed[part] = found[part]
                del kept[part]
        if self._trial:
            for part in sorted(before, key=lambda p: ratios[p]):
                if sum(kept.values()) + ratios[part] > KEEP * free_ratio:
                    break
                kept[part] = ratios[part]
                del shed[part]
        self._shed = {**out, **shed}
        self._hold(now_s, {**out, **before})

    def _hold(self, now_s: float, before: Mapping[str, ShedCause]) -> None:
        """When to try again."""
        if self._trial and before.keys() - self._shed.keys():
            self._back_at = now_s
        failed = self._trial and bool((before.keys() & self._shed.keys()) - self._useless)
        fresh = bool(self._shed.keys() - before.keys())
        if fresh and self._back_at is not None:
            # Shed again soon after it came back: it was too early.
            failed = now_s - self._back_at < 8 * self._hold_s
            if not failed:
                self._hold_s = self._period_s
        if failed:
            self._hold_s = min(2 * self._hold_s, MAX_HOLD * self._period_s)
        if failed or fresh:
            self._next_trial_s = now_s + self._hold_s
