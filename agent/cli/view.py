# SPDX-License-Identifier: Apache-2.0
"""What a person sees while tokens flow: a live table on a terminal, else a line now and then."""

from __future__ import annotations

import contextlib
import os
import sys
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.live import Live

from ...exporters.summary import rates
from ...exporters.table import TableExporter
from ...exporters.text import count, number, seconds
from ..model.snapshot import Snapshot
from .output import say

LINE_SECONDS = 5.0
"""Seconds of watching between two progress lines."""
NARROWEST, WIDEST = 80, 120
"""Columns of the table: it fits the first and has no use for more than the second."""


class View(Protocol):
    """Shows snapshots on stderr while watching, and leaves the terminal as it was."""

    wants_snapshots: bool

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def update(self, snapshot: Snapshot) -> None: ...


class SilentView:
    """Nothing at all."""

    wants_snapshots = False

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

    wants_snapshots = True

    def __init__(self) -> None:
        self._next = LINE_SECONDS
        self._changes = 0

    def update(self, snapshot: Snapshot) -> None:
        """Says how far things are, when it is time to; and at once what was shed or came back."""
        window = snapshot.window_seconds
        self._budget(snapshot)
        if window < self._next:
            return
        self._next = window + LINE_SECONDS
        speeds = [
            f"{rate.phase} {number(rate.tokens_per_second)} tokens/s"
            for rate in rates(snapshot)
            if rate.tokens_per_second is not None
        ]
        slowdown = snapshot.overhead.estimated_ratio
        if slowdown is not None:
            speeds.append(f"slowdown {slowdown:.2%}")
        tokens = snapshot.tokens
        say(
            f"{seconds(window)}: {count(tokens.prefill)} prefill and {count(tokens.decode)} decode tokens"
            + "".join(f", {speed}" for speed in speeds)
        )


    def _budget(self, snapshot: Snapshot) -> None:
        budget = snapshot.budget
        if budget is None:
            return
        new = sum(budget.changes.values()) - self._changes
        self._changes += new
        for change in budget.transitions[len(budget.transitions) - new :] if new > 0 else ():
            say(f"{seconds(change.at_seconds)}: probes {change.before} -> {change.after}, {change.reason}")


class LiveView:
    """The table, redrawn in place on the terminal that stderr is; erased at the end."""

    wants_snapshots = True

    def __init__(self, console: Console) -> None:
        self._console = console
        # Not screen=True: progress lines stay readable. No thread: the watcher draws.
        self._live = Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False)

    def __enter__(self) -> Self:
        with contextlib.suppress(OSError):
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):  # the terminal may be gone; the results are not
            self._live.stop()

    def update(self, snapshot: Snapshot) -> None:
        """Draws ``snapshot``, no taller than the terminal."""
        width, height = self._console.size
        table = TableExporter(width=min(width, WIDEST), height=height - 1)
        with contextlib.suppress(OSError):
            self._live.update(table.renderable(snapshot), refresh=True)


def choose_view(quiet: bool) -> View:
    """The view that stderr is good for."""
    if quiet:
        return SilentView()
    console = Console(stderr=True, highlight=False)
    if console.is_terminal and not console.is_dumb_terminal and sys.stderr.isatty():
        return LiveView(console)
    return LineView()


def stdout_table() -> TableExporter:
    """The final table as stdout wants it: its width, and colour on a terminal only."""
    console = Console(highlight=False)
    terminal = sys.stdout.isatty()
    # A pipe has no width; COLUMNS is what a person can say about it.
    width = console.width if terminal or "COLUMNS" in os.environ else NARROWEST
    color = terminal and not console.no_color and not console.is_dumb_terminal
    ascii_only = (sys.stdout.encoding or "ascii").lower().replace("-", "") not in ("utf8", "utf_8")
    return TableExporter(width=max(40, min(width, WIDEST)), color=color, ascii_only=ascii_only)
