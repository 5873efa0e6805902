# SPDX-License-Identifier: Apache-2.0
"""What a person sees while tokens flow: a live table on a terminal, else a line now and then."""

from __future__ import annotations

import math
import sys
from types import TracebackType
from typing import Protocol, Self

from ...exporters.summary import rates
from ...exporters.text import count, number, seconds
from ..model.snapshot import Snapshot
from .output import say

LINE_SECONDS = 5.0
"""Seconds of watching between two progress lines, in the first minute."""
LATER_SECONDS = 60.0
"""The same after it: whoever watches all night has a log to keep."""

_EARLY = 0.5
"""A look may come a moment before it is due, and the next one is a whole :data:`LINE_SECONDS` later."""


class View(Protocol):
    """Shows snapshots on stderr while watching, and leaves the terminal as it was."""

    every: float
    """Seconds between two snapshots that it has a use for: each costs a few ms of a core."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def update(self, snapshot: Snapshot) -> None: ...


class SilentView:
    """Nothing at all."""

    every = math.inf

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def update(self, snapshot: Snapshot) -> None:
        """Shows nothing."""


class LineView(SilentView):
    """One plain line every :data:`LINE_SECONDS`: for logs, pipes and dumb terminals."""

    every = LINE_SECONDS

    def __init__(self) -> None:
        self._next = LINE_SECONDS - _EARLY
        self._changes = 0

    def update(self, snapshot: Snapshot) -> None:
        """Says how far things are, when it is time to; and sooner what was shed or came back."""
        window = snapshot.window_seconds
        self._budget(snapshot)
        if window < self._next:
            return
        self._next = window + (LINE_SECONDS if window < LATER_SECONDS else LATER_SECONDS) - _EARLY
        speeds = [
            f"{rate.phase} {number(rate.tokens_per_second)} tokens/s"
            for rate in rates(snapshot)
            if rate.tokens_per_second is not None
        ]
        slowdown = snapshot.overhead.estimated_ratio
        if slowdown is not None:
            speeds.append(f"slowdown {slowdown:.2%}")
        tokens = snapshot.tokens
        seen = f"{count(tokens.prefill)} prefill and {count(tokens.decode)} decode tokens"
        if not snapshot.calls and not snapshot.graphs:
            seen = "nothing seen yet"
        say(f"{seconds(window)}: {seen}" + "".join(f", {speed}" for speed in speeds))

    def _budget(self, snapshot: Snapshot) -> None:
        budget = snapshot.budget
        if budget is None:
            return
        new = sum(budget.changes.values()) - self._changes
        self._changes += new
        for change in budget.transitions[len(budget.transitions) - new :] if new > 0 else ():
            say(f"{seconds(change.at_seconds)}: probes {change.before} -> {change.after}, {change.reason}")


def choose_view(quiet: bool) -> View:
    """The view that stderr is good for."""
    if quiet:
        return SilentView()
    if sys.stderr.isatty():
        from .terminal import live_view

        return live_view() or LineView()
    return LineView()
