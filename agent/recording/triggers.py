# SPDX-License-Identifier: Apache-2.0
"""What makes the flight recorder write: a signal, slow tokens, or a verdict."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ..errors import UsageError
from ..model.graphwork import Mark
from ..model.session import Session, Settled
from ..model.tokens import Phase
from ..model.verdictdata import Verdict

NOTHING_WRONG = "nothing_wrong"
MIN_INTERVALS = 20
"""A p99 of fewer would be one odd token."""
_P99 = re.compile(r"p99>([0-9.]+)(ms|s)")
_REMEDY = "use signal, p99>50ms, or verdict"


@dataclass(frozen=True, slots=True)
class Triggers:
    """Which are wanted. ``p99_s``: inter-token latency in seconds, None: not asked for."""

    p99_s: float | None = None
    verdict: bool = False

    @classmethod
    def parse(cls, words: tuple[str, ...]) -> Triggers:
        """From the command line; a signal is always one. UsageError for a word that is none."""
        p99, verdict = None, False
        for word in words:
            found = _P99.fullmatch(word.replace(" ", ""))
            if found is not None:
                try:
                    p99 = float(found[1]) / (1000 if found[2] == "ms" else 1)
                except ValueError:
                    raise UsageError(f"--trigger {word!r} is not known", _REMEDY) from None
            elif word == "verdict":
                verdict = True
            elif word != "signal":
                raise UsageError(f"--trigger {word!r} is not known", _REMEDY)
        return cls(p99, verdict)


class TokenWatch:
    """Intervals between tokens of one generation, over the last ``seconds``."""

    def __init__(self, seconds: float) -> None:
        self._ns = int(seconds * 1e9)
        self._intervals: deque[tuple[int, int]] = deque()
        self._last: dict[int, tuple[int, frozenset[int]]] = {}

    def opened(self, session: Session) -> None:
        """The session to listen to."""
        session.listeners.append(self._settled)

    def _settled(self, done: Settled, phase: Phase, mark: Mark) -> None:
        runs = [run for tokens in done.tokens for run in tokens.runs or ()]
        before = self._last.get(done.context)
        if phase is Phase.DECODE and before is not None and any(run.start in before[1] for run in runs):
            self._intervals.append((done.call.end, max(done.call.end - before[0], 0)))
        self._last[done.context] = (done.call.end, frozenset(run.next for run in runs))
        while len(self._last) > 256:
            self._last.pop(next(iter(self._last)))

    def p99(self, now_ns: int) -> float | None:
        """Seconds; None for too few tokens."""
        while self._intervals and self._intervals[0][0] < now_ns - self._ns:
            self._intervals.popleft()
        if len(self._intervals) < MIN_INTERVALS:
            return None
        return float(np.percentile([ns for _, ns in self._intervals], 99)) / 1e9

    def clear(self) -> None:
        """Begin anew: one slow stretch is written once."""
        self._intervals.clear()


def verdict_of(verdicts: Iterable[Verdict]) -> str | None:
    """The rule of the first verdict that is sure of a cause; None without."""
    for verdict in verdicts:
        if verdict.confidence == "high" and verdict.rule != NOTHING_WRONG:
            return verdict.rule
    return None
