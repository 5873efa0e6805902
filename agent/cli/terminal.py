# SPDX-License-Identifier: Apache-2.0
"""The table: live on a terminal, and as stdout wants it at the end.

A module of its own because rich takes 10 MiB, which whoever asks for JSON need not pay.
"""

from __future__ import annotations

import contextlib
import os
import sys
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.live import Live

from ...exporters.table import TableExporter
from ..model.snapshot import Snapshot

if TYPE_CHECKING:
    from ...exporters.reporttable import ReportExporter

NARROWEST, WIDEST = 80, 120
"""Columns of the table: it fits the first and has no use for more than the second."""


class LiveView:
    """The table, redrawn in place on the terminal that stderr is; erased at the end."""

    every = 0.5

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


def live_view() -> LiveView | None:
    """A live table where stderr is a terminal that can redraw."""
    console = Console(stderr=True, highlight=False)
    if console.is_terminal and not console.is_dumb_terminal and sys.stderr.isatty():
        return LiveView(console)
    return None


def stdout_table() -> TableExporter:
    """The final table as stdout wants it: its width, and colour on a terminal only."""
    width, color, ascii_only = _stdout()
    return TableExporter(width=width, color=color, ascii_only=ascii_only)


def stdout_report() -> ReportExporter:
    """The report of a recording, likewise."""
    from ...exporters.reporttable import ReportExporter  # more to load than whoever watches needs

    width, color, ascii_only = _stdout()
    return ReportExporter(width=width, color=color, ascii_only=ascii_only)


def _stdout() -> tuple[int, bool, bool]:
    """Columns, whether there are colours, and whether there is only ASCII."""
    console = Console(highlight=False)
    terminal = sys.stdout.isatty()
    # A pipe has no width; COLUMNS is what a person can say about it.
    width = console.width if terminal or "COLUMNS" in os.environ else NARROWEST
    color = terminal and not console.no_color and not console.is_dumb_terminal
    ascii_only = (sys.stdout.encoding or "ascii").lower().replace("-", "") not in ("utf8", "utf_8")
    return max(40, min(width, WIDEST)), color, ascii_only
