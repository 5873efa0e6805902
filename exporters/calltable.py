# SPDX-License-Identifier: Apache-2.0
"""Calls of engines described by data, and compiled programs, as tables for people."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ..agent.model.calldata import CallTotal, ProgramTotal
from ..agent.model.snapshot import Snapshot
from . import placementtable, text

ROWS = 16
"""Rows of each table when the height is free."""
_NUMBERS, _DONE = 31, 12
"""Columns of the numbers in the table of calls with the gaps between, and of the one that may lack."""
_WORDS = {"inner": "inner", "recorded": "recorded", "overflow": "the rest"}


def only_calls(snapshot: Snapshot) -> bool:
    """Whether nothing of tokens or graphs was seen, but calls of such an engine were."""
    return bool(snapshot.engine_calls) and not snapshot.calls and not snapshot.graphs


def sections(snapshot: Snapshot, width: int, limit: int = ROWS) -> Iterator[RenderableType]:
    """The tables there is something for, each after an empty line; ``width`` in columns."""
    if snapshot.programs:
        yield Text()
        yield _programs(snapshot.programs[:limit], width)
        yield from _more(len(snapshot.programs) - limit, "programs")
    if snapshot.engine_calls:
        yield Text()
        yield _calls(snapshot.engine_calls[:limit], width)
        yield from _more(len(snapshot.engine_calls) - limit, "kinds of calls")
    yield from placementtable.offloaded(snapshot.offload)
    yield from placementtable.section(snapshot.placement or (), width, limit)


def _more(count: int, what: str) -> Iterator[Text]:
    if count > 0:
        yield Text(f"{count} more {what} (all of them: --format json)", "dim")


def _grid(*columns: str, gap: int = 2) -> Table:
    table = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, show_edge=False, header_style="dim")
    for place, title in enumerate(columns):
        left = place == 0 or title == "of"
        table.add_column(title, justify="left" if left else "right", no_wrap=True, overflow="ellipsis")
    return table


def _calls(calls: tuple[CallTotal, ...], width: int) -> Table:
    names = [text.clean(one.call, 22) for one in calls]
    done = any(one.completed for one in calls)
    columns = ["call", "of", "count", "in call", "us/call", *(["until done"] if done else [])]
    room = max(16, width - _NUMBERS - (_DONE if done else 0) - max(map(len, names)))
    table = _grid(*columns)
    for name, one in zip(names, calls, strict=True):
        mean = text.ratio(one.seconds, one.count - one.untimed)
        cells = [text.count(one.count), text.seconds(one.seconds)]
        cells.append(text.number(None if mean is None else mean * 1e6))
        if done:
            until = text.ratio(one.completion_seconds, one.completed)
            cells.append("" if until is None else text.seconds(until))
        table.add_row(Text(name, "cyan"), Text(text.clean(_about(one), room)), *cells)
    return table


def _about(one: CallTotal) -> str:
    """What tells it apart, in few characters: three dimensions are one word, nothing comes twice."""
    parts: dict[str, str] = {}
    for name, value in one.labels.items():
        base, _, axis = name.rpartition("_")
        if axis in ("x", "y", "z") and base:
            parts[base] = f"{parts[base]}x{value}" if base in parts else str(value)
        elif str(value) not in parts.values():
            parts[name] = str(value)
    words = [*parts.values(), *(f"{name} {_amount(name, n)}" for name, n in one.sums.items() if n)]
    if one.state in _WORDS:
        words.insert(0, _WORDS[one.state])
    if one.status:
        words.insert(0, f"status {one.status}")
    return ", ".join(words)


def _amount(name: str, number: int) -> str:
    return f"{text.number(number / 1e6)} M" if "bytes" in name and number >= 1_000_000 else text.count(number)


def _programs(programs: tuple[ProgramTotal, ...], width: int) -> Table:
    narrow = width < 100
    times = ("compiles", "compile", "runs", "dispatch", "until done")
    table = _grid("program", *times, "MB in", "MB out", "errors", gap=1 if narrow else 2)
    for one in programs:
        dispatch = text.ratio(one.dispatch_seconds, one.executions)
        done = text.ratio(one.completion_seconds, one.completions)
        table.add_row(
            Text(text.clean(_program(one), 24 if narrow else 48), "cyan"),
            text.count(one.compiles),
            text.seconds(text.ratio(one.compile_seconds, one.compiles)), text.count(one.executions),
            text.seconds(dispatch), text.seconds(done), _megabytes(one.bytes_in), _megabytes(one.bytes_out),
            text.count(one.errors),
        )  # fmt: skip
    return table


def _program(one: ProgramTotal) -> str:
    """Its name, and what it seems to be for: a guess, as the question mark says."""
    name = one.name or "without a name"
    return f"{name} ({one.phase_guess}?)" if one.phase_guess else name


def _megabytes(count: int | None) -> str:
    return text.number(None if count is None else count / 1e6)
