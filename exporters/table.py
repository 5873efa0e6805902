# SPDX-License-Identifier: Apache-2.0
"""The table for people: fits 80 columns, uses 120 when they are there.

Everything is built from :class:`rich.text.Text`, never from markup, and every name that
the target chose goes through :func:`profinferd.exporters.text.clean`.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterator, Sequence

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ..agent.model.causes import ShedPart
from ..agent.model.latency import Summary
from ..agent.model.snapshot import Budget, Overhead, Snapshot
from . import calltable, text
from .summary import OpRow, PhaseOps, coverage, failed_calls, phase_ops, rates
from .verdicts import verdict_lines

WIDE = 118
SHED_WORDS = {"waits": "waits", "faults": "page faults"}
"""From this width on, the table has its additional columns."""
ROWS = 12
"""Operators listed per phase when the height is free."""
SECTIONS = 2
"""Phases whose operators are listed; the JSON has all of them."""
LOW = 30
"""Below this height, operators are worth more than empty lines."""
_BAR = 8


class TableExporter:
    """Implements :class:`profinferd.exporters.Exporter`.

    ``width`` in columns; ``height`` in lines limits the operators listed (None: free);
    ``color`` writes ANSI colours; ``ascii_only`` keeps to characters of any terminal.
    """

    def __init__(
        self, width: int = 80, height: int | None = None, color: bool = False, ascii_only: bool = False
    ) -> None:
        self._width = width
        self._height = height
        self._color = color
        self._ascii = ascii_only

    def render(self, snapshot: Snapshot) -> str:
        """The table as text, ending in a newline."""
        out = io.StringIO()
        console = Console(
            file=out,
            width=self._width,
            force_terminal=self._color,
            color_system="standard" if self._color else None,
            no_color=not self._color,
            highlight=False,
            markup=False,
            emoji=False,
            legacy_windows=False,
            _environ={},
        )
        console.print(self.renderable(snapshot))
        lines = (line.rstrip() for line in out.getvalue().splitlines())
        return "\n".join(lines) + "\n"

    def renderable(self, snapshot: Snapshot) -> RenderableType:
        """The same for a rich console (the live view)."""
        sections = phase_ops(snapshot)
        shown = sorted(sections, key=lambda s: -(s.seconds or 0.0))[:SECTIONS]
        parts: list[RenderableType] = [self._header(snapshot)]
        if not calltable.only_calls(snapshot):
            parts += [*self._empty_line(), self._speed(snapshot)]
        rows = ROWS
        if self._height is not None:
            shown = shown[:1]
            rows = max(1, self._height - self._lines(snapshot, shown))
        for section in (s for s in sections if s in shown):
            parts += [Text(), *self._ops(section, rows)]
        if self._height is None or calltable.only_calls(snapshot):
            most = calltable.ROWS if self._height is None else rows // 2
            parts += calltable.sections(snapshot, self._width, most)
        parts += [Text(), self._footer(snapshot)]
        if snapshot.verdicts and self._height is None:
            parts += [Text(), *verdict_lines(snapshot.verdicts)]
        return Group(*parts)

    def _lines(self, snapshot: Snapshot, shown: Sequence[PhaseOps]) -> int:
        """Lines of the live table beside the operators listed."""
        speeds, waits = 1 + max(1, len(rates(snapshot))), 3
        wide, gap = self._width >= WIDE, len(self._empty_line())
        lines = (2 if wide else 3) + gap + (max(speeds, waits) if wide else speeds + gap + waits)
        lines += 2 + (snapshot.budget is not None) + bool(failed_calls(snapshot))
        for section in shown:  # a gap, its title and columns; "more" is always allowed for
            lines += 4 + (section.setup is not None) + (section.untimed is not None)
        return lines

    def _empty_line(self) -> list[Text]:
        return [] if self._height is not None and self._height < LOW else [Text()]

    # ---- who ---------------------------------------------------------------------------

    def _header(self, snapshot: Snapshot) -> Text:
        target = snapshot.target
        program = text.clean(os.path.basename(target.exe or "") or "process", 40)
        line = Text(no_wrap=True, overflow="ellipsis")
        line.append(program, "bold").append(f" (pid {target.pid})")
        line.append("  model ", "dim").append(_name(target.model, 60), "bold")
        line.append("\nengine ", "dim").append(_name(target.engine))
        layout = target.layout
        line.append("  layout ", "dim").append(_name(layout.name))
        if layout.source:
            line.append(f" ({_name(layout.source)})", "dim")
        line.append("  " if self._width >= WIDE else "\n")
        line.append("probes ", "dim").append(_name(target.attach.method))
        if target.attach.op_source is None:
            line.append(", no ops")
        else:
            line.append(f", ops by {_name(target.attach.op_source)}")
        if target.attach.complete is False:
            line.append(" (incomplete)", "yellow")
        line.append("  watched ", "dim").append(text.seconds(snapshot.window_seconds), "bold")
        return line

    # ---- how fast ----------------------------------------------------------------------

    def _speed(self, snapshot: Snapshot) -> RenderableType:
        speeds = _grid(("", "left"), ("tokens", "right"), ("calls", "right"), ("in calls", "right"),
                       ("tokens/s", "right"))  # fmt: skip
        for rate in rates(snapshot):
            speeds.add_row(
                _name(rate.phase),
                text.count(rate.tokens),
                text.count(rate.calls),
                text.seconds(rate.seconds),
                Text(text.number(rate.tokens_per_second), "bold"),
            )
        if not speeds.row_count:
            speeds.add_row("no calls yet", *[""] * 4)
        waits = _grid(("", "left"), ("count", "right"), ("mean", "right"), ("p50", "right"),
                      ("p90", "right"), ("p99", "right"))  # fmt: skip
        latency = snapshot.latency_seconds
        for label, figures in (
            ("first token", latency.time_to_first_token),
            ("inter-token", latency.inter_token),
        ):
            waits.add_row(label, *_latency(figures))
        if self._width < WIDE:
            return Group(speeds, *self._empty_line(), waits)
        both = Table.grid(padding=(0, 5, 0, 0))
        both.add_row(speeds, waits)
        return both

    # ---- where the time goes -----------------------------------------------------------

    def _ops(self, section: PhaseOps, limit: int) -> Iterator[RenderableType]:
        title = Text(no_wrap=True, overflow="ellipsis")
        title.append(f"{_name(section.phase)} ops", "bold")
        graphs = f"{text.count(section.graphs)} graph{'' if section.graphs == 1 else 's'}"
        if section.known < section.graphs:
            graphs = f"{text.count(section.known)} of {graphs} so far"
        title.append(f" on the critical path: {text.seconds(section.seconds)} in {graphs}", "dim")
        yield title
        wide = self._width >= WIDE
        columns = [("share", "right"), ("op", "left"), ("dtype", "left"), ("role", "left")]
        if wide:
            columns = [("", "left"), *columns, ("kernel", "left"), ("time", "right")]
        columns += [
            (f"calls/{section.per}", "right"),
            ("us/call", "right"),
            ("GFLOP/s", "right"),
            ("GB/s", "right"),
        ]
        listed = section.rows[:limit]
        top = max((row.share or 0.0 for row in listed), default=0.0)
        rows = [self._op_row(row, section, wide, top) for row in listed]
        for label, seconds in _rest(section, listed):
            share = text.percent(text.ratio(seconds, section.seconds))
            name = Text(label, "dim")
            rows.append(["", share, name, "", "", "", text.seconds(seconds)] if wide else [share, name])
        table = _grid(*columns, gap=self._gap(columns, rows))
        for row in rows:
            table.add_row(*row)
        yield table

    def _op_row(self, row: OpRow, section: PhaseOps, wide: bool, top: float) -> list[str | Text]:
        per_call, flops, rate = row.seconds_per_call, row.flops_per_second, row.bytes_per_second
        cells: list[str | Text] = [
            Text(text.percent(row.share), "bold"),
            Text(_name(row.op, 18 if wide else 16), "cyan"),
            _name(row.dtype, 7),
            _name(row.role, 16 if wide else 13),
        ]
        if wide:
            cells = [self._bar(row.share, top), *cells, _name(row.kernel, 10), text.seconds(row.seconds)]
        return [
            *cells,
            text.plain(text.ratio(row.calls, section.units)),
            text.number(None if per_call is None else per_call * 1e6),
            text.number(None if flops is None else flops / 1e9),
            text.number(None if rate is None else rate / 1e9),
        ]

    def _gap(self, columns: Sequence[tuple[str, str]], rows: Sequence[Sequence[str | Text]]) -> int:
        """Columns between columns: two, or one where the longest names leave no room for two."""
        widths = [
            max(cell_len(title), *(cell_len(str(row[i])) for row in rows if i < len(row)))
            for i, (title, _) in enumerate(columns)
        ]
        return 2 if sum(widths) + 2 * len(widths) <= self._width else 1

    def _bar(self, share: float | None, top: float) -> Text:
        """A bar whose whole length is the largest share listed, in eighths of a column."""
        eighths = round((text.ratio(share, top) or 0.0) * _BAR * 8)
        if self._ascii:
            return Text("#" * round(eighths / 8), "green")
        return Text("█" * (eighths // 8) + (" ▏▎▍▌▋▊▉"[eighths % 8] if eighths % 8 else ""), "green")

    # ---- at what cost --------------------------------------------------------------------

    def _budget(self, overhead: Overhead, budget: Budget, shed: tuple[ShedPart, ...]) -> Text:
        line = Text(no_wrap=True, overflow="ellipsis")
        line.append("slowdown ", "dim").append(_share(overhead.estimated_ratio), "bold")
        line.append(f" of {_share(overhead.budget_ratio)}, measured ")
        line.append(_share(overhead.measured_ratio))
        doing = Text()
        if budget.level != "op":
            doing.append("  shed to ", "dim")
            doing.append(_name(f"{budget.level}: {budget.reason}", 90), "yellow")
        if shed:
            parts = " and ".join(_name(SHED_WORDS.get(one.part, one.part), 20) for one in shed)
            doing.append("  not watched: ", "dim").append(parts, "yellow")
        if budget.level == "op" and self._height is not None:
            # At the end, nothing is being done any more.
            doing.append("  ops ", "dim").append(_name(budget.activity, 60))
        if overhead.measured_ci95 is not None:
            low, high = overhead.measured_ci95
            interval = f" ({_share(low)} to {_share(high)})"
            if self._height is None or line.cell_len + len(interval) + doing.cell_len <= self._width:
                line.append(interval)
        line.append(doing)
        line.truncate(self._width, overflow="ellipsis")
        return line

    # ---- how sure ----------------------------------------------------------------------

    def _footer(self, snapshot: Snapshot) -> RenderableType:
        line = Text()
        covered = coverage(snapshot)
        if not calltable.only_calls(snapshot):
            line.append("graph coverage ", "dim")
        if covered is None:
            line.append("" if calltable.only_calls(snapshot) else text.MISSING)
        else:
            line.append(text.percent(math.floor(covered.ratio * 1000) / 1000))
            if covered.worst:
                worst = (
                    f"up to {text.count(covered.worst)} of {text.count(covered.kernels)} kernels uncovered"
                )
                line.append(", ").append(worst, "bold red")
            else:
                line.append(", 0 uncovered")
        lost = snapshot.lost
        gap = "" if calltable.only_calls(snapshot) else "  "
        line.append(f"{gap}lost ", "dim").append(text.count(lost.total), "bold red" if lost.total else "")
        if lost.total:
            kinds = ", ".join(f"{_name(k)} {text.count(n)}" for k, n in sorted(lost.by_kind.items()) if n)
            line.append(f" ({kinds})")
        failed = failed_calls(snapshot)
        if snapshot.budget is not None:
            line.append("\n").append(self._budget(snapshot.overhead, snapshot.budget, snapshot.causes_shed))
        if failed:
            line.append("\nfailed calls ", "dim")
            line.append(", ".join(f"{text.count(n)} with status {s}" for s, n in failed[:6]), "yellow")
        # Where the height is limited, notes would push the operators out; they come at the end.
        if not snapshot.notes or self._height is not None:
            return line
        notes = Table.grid(padding=(0, 1, 0, 0))
        for note in snapshot.notes:
            notes.add_row("-", Text(text.clean(note, 400)))
        return Group(line, Text("notes", "dim"), Padding(notes, (0, 0, 0, 2)))


def _share(value: float | None) -> str:
    """Slowdowns are small: two decimals of a percent."""
    return text.MISSING if value is None else f"{value * 100:.2f}%"


def _latency(figures: Summary) -> list[str]:
    return [
        text.count(figures.count),
        *(text.seconds(value) for value in (figures.mean, figures.p50, figures.p90, figures.p99)),
    ]


def _rest(section: PhaseOps, listed: Sequence[OpRow]) -> Iterator[tuple[str, float | None]]:
    others = section.rows[len(listed) :]
    if others:
        yield f"{len(others)} more", text.total(row.seconds for row in others)
    if section.setup is not None:
        yield "setup", section.setup
    if section.untimed is not None:
        yield "untimed", section.untimed


def _name(value: str | None, limit: int = 40) -> str:
    return text.clean(value, limit) if value else text.MISSING


def _grid(*columns: tuple[str, str], gap: int = 2) -> Table:
    table = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, show_edge=False, header_style="dim")
    for title, side in columns:
        table.add_column(
            title, justify="right" if side == "right" else "left", no_wrap=True, overflow="ellipsis"
        )
    return table
