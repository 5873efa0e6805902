# SPDX-License-Identifier: Apache-2.0
"""The terminal program: targets above, the chosen one below, keys at the foot."""

from __future__ import annotations

from collections import deque
from typing import Any, ClassVar, TypeVar

from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.widgets import DataTable, Footer, Sparkline, Static

from ...exporters.text import MISSING, count, number, percent, seconds
from ..errors import ProfinferError
from ..version import version
from .rows import OpShare, Row, rows
from .sources import Source

_Cell = TypeVar("_Cell")
HISTORY = 120
"""Speeds kept of each target for the little curve."""
_BAR = 12
_SORTS = ("speed", "name", "cost")
_WIDE = 110
"""From this many columns on, everything is shown."""
_TARGETS = {
    "target": False, "pid": False, "tokens/s": False, "generated": True, "1st token": True,
    "inter-token": True, "top operator": False, "cost": False, "state": False,
}  # fmt: skip
_OPS = {"share": False, "": True, "op": False, "dtype": False, "role": False, "GB/s": True}
"""Columns, and whether they need a wide terminal."""


class TopApp(App[None]):
    """Shows what ``source`` gives, every ``every`` seconds."""

    TITLE = "profinferd top"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { layout: vertical; }
    #head { height: 1; padding: 0 1; background: $primary-background; }
    DataTable { scrollbar-size-horizontal: 0; scrollbar-size-vertical: 1; }
    #targets { height: auto; max-height: 40%; min-height: 3; }
    #detail { height: 1fr; }
    #title { height: 1; padding: 0 1; text-style: bold; text-wrap: nowrap; text-overflow: ellipsis; }
    #left { width: 58%; }
    #right { width: 42%; padding: 0 1; scrollbar-size-vertical: 1; }
    #ops { height: 1fr; }
    #curve { height: 3; margin: 0 0 1 0; }
    #words { height: auto; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "quit"),
        Binding("p", "phase", "phase"),
        Binding("s", "sort", "sort"),
        Binding("space", "pause", "pause"),
        Binding("n", "notes", "notes"),
        Binding("up,k", "up", "choose", key_display="↑↓", priority=True),
        Binding("down,j", "down", "choose", show=False, priority=True),
    ]

    def __init__(self, source: Source, every: float = 1.0) -> None:
        super().__init__()
        self._source, self._every = source, every
        self._rows: tuple[Row, ...] = ()
        self._speeds: dict[str, deque[float]] = {}
        self._chosen: str | None = None
        self._phase: str | None = None
        self._sort = _SORTS[0]
        self._paused = False
        self._notes = False
        self._problem = ""
        self._wide = True

    def compose(self) -> ComposeResult:
        yield Static(id="head")
        yield DataTable(id="targets", cursor_type="row", zebra_stripes=False)
        with Horizontal(id="detail"):
            with Vertical(id="left"):
                yield Static(id="title")
                yield DataTable(id="ops", cursor_type="none")
            with VerticalScroll(id="right"):
                yield Static("tokens/s", id="speed")
                yield Sparkline([], id="curve")
                yield Static(id="words")
        yield Footer()

    def on_mount(self) -> None:
        self._make_columns()
        for table in self.query(DataTable):
            table.can_focus = False  # keys are ours
        self.set_interval(self._every, self._refresh)
        self._refresh()

    def on_resize(self) -> None:
        """Columns come and go with the width."""
        if self.query("#ops") and (self.size.width >= _WIDE) != self._wide:
            self._make_columns()
            self._draw()

    def _make_columns(self) -> None:
        self._wide = self.size.width >= _WIDE
        for name, columns in (("#targets", _TARGETS), ("#ops", _OPS)):
            table = self.query_one(name, DataTable)
            table.clear(columns=True)
            table.add_columns(*self._fitting(columns, tuple(columns)))

    def _fitting(self, columns: dict[str, bool], cells: tuple[_Cell, ...]) -> list[_Cell]:
        return [cell for cell, wide in zip(cells, columns.values(), strict=True) if self._wide or not wide]

    # ---- figures ------------------------------------------------------------------------

    @work(thread=True, exclusive=True, group="fetch")
    def _refresh(self) -> None:
        if self._paused:
            return
        try:
            answer = self._source.fetch()
        except ProfinferError as error:
            self.call_from_thread(self.show_problem, str(error))
        else:
            self.call_from_thread(self.show_answer, answer)

    def show_problem(self, text: str) -> None:
        """The latest figures stay, marked as old."""
        self._problem = text
        if self.query("#head"):  # not on our way out
            self._draw_head()

    def show_answer(self, answer: dict[str, Any]) -> None:
        """Draw an answer of the control socket."""
        self._problem = ""
        self._rows = self._sorted(rows(answer))
        for row in self._rows:
            curve = self._speeds.setdefault(row.key, deque([0.0], maxlen=HISTORY))
            curve.append(row.tokens_per_second or 0.0)
        for gone in set(self._speeds) - {row.key for row in self._rows}:
            del self._speeds[gone]
        if self.query("#head"):
            self._draw()

    def _sorted(self, found: tuple[Row, ...]) -> tuple[Row, ...]:
        if self._sort == "speed":
            return tuple(sorted(found, key=lambda r: (r.state != "watched", -(r.tokens_per_second or 0.0))))
        if self._sort == "cost":
            return tuple(sorted(found, key=lambda r: -(r.overhead or 0.0)))
        return found

    # ---- drawing ------------------------------------------------------------------------

    def _draw(self) -> None:
        self._draw_head()
        table = self.query_one("#targets", DataTable)
        keys = [row.key for row in self._rows]
        if self._chosen not in keys:
            self._chosen = keys[0] if keys else None
        table.clear()
        for row in self._rows:
            table.add_row(*self._fitting(_TARGETS, _target_cells(row)), key=row.key)
        if self._chosen is not None:
            table.move_cursor(row=keys.index(self._chosen), animate=False)
        self._draw_detail()

    def _draw_head(self) -> None:
        watched = [row for row in self._rows if row.state == "watched"]
        speed = sum(row.tokens_per_second or 0.0 for row in watched)
        line = Text(no_wrap=True, overflow="ellipsis")
        line.append(f"profinferd {version()}", "bold").append(f"  {self._source.label}")
        line.append(
            f"  {len(watched)} watched of {len(self._rows)}, {number(speed)} tokens/s, by {self._sort}"
        )
        if self._paused:
            line.append("  paused", "yellow")
        if self._problem:
            line.append(f"  old: {self._problem}", "red")
        self.query_one("#head", Static).update(line)

    def _draw_detail(self) -> None:
        row = next((r for r in self._rows if r.key == self._chosen), None)
        ops = self.query_one("#ops", DataTable)
        ops.clear()
        title, words = self.query_one("#title", Static), self.query_one("#words", Static)
        if row is None:
            title.update("no engine runs on this machine")
            words.update("")
            self.query_one("#speed", Static).update("")
            return
        phases = dict(row.phases)
        phase = self._phase if self._phase in phases else next(iter(phases), None)
        listed = phases[phase] if phase is not None else ()
        title.update(Text(f"{phase or 'no'} operators of {row.name}"))
        top = max((op.share or 0.0 for op in listed), default=0.0)
        for op in listed:
            ops.add_row(*self._fitting(_OPS, _op_cells(op, top)))
        self.query_one("#speed", Static).update(f"tokens/s {number(row.tokens_per_second)}")
        self.query_one("#curve", Sparkline).data = list(self._speeds.get(row.key, ()))
        words.update(self._words(row))

    def _words(self, row: Row) -> Text:
        text = Text()
        figures = (
            ("model", row.model or MISSING),
            ("generated", count(row.generated)),
            ("prompt", count(row.prompt)),
            ("first token", seconds(row.first_token)),
            ("inter-token", seconds(row.inter_token)),
            ("  p99", seconds(row.inter_token_p99)),
            ("cost", f"{_share(row.overhead)} of {_share(row.budget)}"),
            ("lost records", count(row.lost)),
        )
        for label, value in figures:
            text.append(f"{label:<13}", "dim").append(f"{value}\n")
        if row.reason:
            text.append(f"{row.reason}\n", "yellow")
        for number_, verdict in enumerate(row.verdicts):
            text.append("\nwhy\n" if number_ == 0 else "", "bold").append(f"• {verdict}\n")
        if self._notes:
            text.append("\nnotes\n", "bold")
            text.append("".join(f"• {note}\n" for note in row.notes) or "none\n")
        elif row.notes:
            text.append(f"\n{len(row.notes)} note{'s' * (len(row.notes) > 1)}: press n\n", "dim")
        return text

    # ---- keys ---------------------------------------------------------------------------

    def action_phase(self) -> None:
        """The next phase of the chosen target."""
        row = next((r for r in self._rows if r.key == self._chosen), None)
        names = [name for name, _ in row.phases] if row is not None else []
        if names:
            at = names.index(self._phase) if self._phase in names else 0
            self._phase = names[(at + 1) % len(names)]
            self._draw_detail()

    def action_sort(self) -> None:
        """By speed, name, cost."""
        self._sort = _SORTS[(_SORTS.index(self._sort) + 1) % len(_SORTS)]
        self._rows = self._sorted(tuple(sorted(self._rows, key=lambda r: (r.name, r.pid))))
        self._draw()

    def action_pause(self) -> None:
        """Stand still, or go on."""
        self._paused = not self._paused
        self._draw_head()

    def action_notes(self) -> None:
        """Show or hide what is absent and why."""
        self._notes = not self._notes
        self._draw_detail()

    def action_up(self) -> None:
        """The target above."""
        self._choose(-1)

    def action_down(self) -> None:
        """The target below."""
        self._choose(1)

    def _choose(self, step: int) -> None:
        # By ourselves and not by the table's cursor, which goes to the first row when it is filled anew.
        keys = [row.key for row in self._rows]
        if keys:
            at = keys.index(self._chosen) if self._chosen in keys else 0
            self._chosen = keys[min(max(at + step, 0), len(keys) - 1)]
            self._draw()


def _share(value: float | None) -> str:
    return MISSING if value is None else f"{value * 100:.2f}%"


def _target_cells(row: Row) -> tuple[Text, ...]:
    top = row.top_op
    op = " ".join(filter(None, (top.op, top.role))) if top is not None else MISSING
    share = f" {percent(top.share)}" if top is not None else ""
    state = row.state if not row.reason else f"{row.state}: {row.reason}"
    return (
        Text(row.name[:40], "bold"),
        Text(str(row.pid), justify="right"),
        Text(number(row.tokens_per_second), "bold green", justify="right"),
        Text(count(row.generated), justify="right"),
        Text(seconds(row.first_token), justify="right"),
        Text(seconds(row.inter_token), justify="right"),
        Text(f"{op[:24]}{share}", "cyan"),
        Text(_share(row.overhead), justify="right"),
        Text(state[:60], "" if row.state == "watched" else "yellow"),
    )


def _op_cells(op: OpShare, top: float) -> tuple[Text, ...]:
    eighths = round((op.share or 0.0) / top * _BAR * 8) if top else 0
    bar = "█" * (eighths // 8) + (" ▏▎▍▌▋▊▉"[eighths % 8] if eighths % 8 else "")
    return (
        Text(percent(op.share), "bold", justify="right"),
        Text(f"{bar:<{_BAR}}", "green"),
        Text(op.op, "cyan"),
        Text(op.dtype),
        Text(op.role),
        Text(number(op.gb_per_second), justify="right"),
    )
