# SPDX-License-Identifier: Apache-2.0
"""Which levels of probes a target gets: shed one by one, recovered in reverse order.

Both ways need a condition that has held without a break: ``confirm_s`` for shedding,
``hold_s`` for recovery, and recovery asks for more than shedding does (the caller's margin).
A level that has to be shed again soon after it came back doubles the hold, up to
``max_hold_s``; a long quiet time resets it. So at a steady input, however noisy and however
close to the threshold, there is at most one shedding and one recovery per hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Level(IntEnum):
    """Highest level in use; each includes those below it."""

    NOTHING = 0
    TOKEN = 1
    GRAPH = 2
    OP = 3


@dataclass(frozen=True, slots=True)
class Transition:
    """At ``at_s`` a target went from one level to its neighbour."""

    at_s: float
    target: str
    before: Level
    after: Level
    reason: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the caller finds now. ``over``: why the present level is too much, None: it is not.
    ``known``: the reason is arithmetic about this very level; otherwise (a token rate) the
    effect of the last shedding must show first. ``fits``: the next level would be all right
    with a margin; ``why_fits`` says why."""

    over: str | None = None
    known: bool = True
    fits: bool = False
    why_fits: str = ""


class LevelMachine:
    """State of one target. Times in seconds of any one clock."""

    def __init__(
        self, target: str, *, confirm_s: float, settle_s: float, hold_s: float, max_hold_s: float, top: Level
    ) -> None:
        self._target = target
        self._confirm_s = confirm_s
        self._settle_s = settle_s
        self._base_hold_s = hold_s
        self._hold_s = hold_s
        self._max_hold_s = max_hold_s
        self._top = top
        self.level = top
        self.reason = "as configured"
        self._changed_at: float | None = None
        self._recovered_at: float | None = None
        self._over_since: float | None = None
        self._fits_since: float | None = None

    @property
    def hold_s(self) -> float:
        """For how long a recovery has to look safe, at present."""
        return self._hold_s

    @property
    def top(self) -> Level:
        """The level of a target that nothing has been shed from."""
        return self._top

    def step(self, now_s: float, verdict: Verdict) -> Transition | None:
        """The change that ``verdict`` brings about now, if any; at most one level."""
        self._over_since = _since(self._over_since, now_s, bool(verdict.over))
        fits = verdict.fits and not verdict.over and self.level < self._top
        self._fits_since = _since(self._fits_since, now_s, fits)
        if verdict.over and self._over_since is not None and self.level > Level.NOTHING:
            settled = verdict.known or self._since_change(now_s) >= self._settle_s
            if settled and now_s - self._over_since >= self._confirm_s:
                return self._shed(now_s, verdict)
        if self._fits_since is not None and now_s - self._fits_since >= self._hold_s:
            self._fits_since = None
            self._recovered_at = now_s
            return self._change(now_s, Level(self.level + 1), verdict.why_fits)
        return None

    def _since_change(self, now_s: float) -> float:
        return float("inf") if self._changed_at is None else now_s - self._changed_at

    def _shed(self, now_s: float, verdict: Verdict) -> Transition:
        if self._recovered_at is not None:
            if now_s - self._recovered_at < 8 * self._hold_s:
                self._hold_s = min(2 * self._hold_s, self._max_hold_s)
            else:
                self._hold_s = self._base_hold_s
            self._recovered_at = None
        if not verdict.known:
            self._over_since = None
        return self._change(now_s, Level(self.level - 1), verdict.over or "")

    def _change(self, now_s: float, level: Level, reason: str) -> Transition:
        transition = Transition(now_s, self._target, self.level, level, reason)
        self.level, self.reason, self._changed_at = level, reason, now_s
        return transition


def _since(begin_s: float | None, now_s: float, holds: bool) -> float | None:
    """Since when a condition has held without a break."""
    if not holds:
        return None
    return now_s if begin_s is None else begin_s
