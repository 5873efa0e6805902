# SPDX-License-Identifier: Apache-2.0
"""Where operators ran, for people: one line for an operator on a backend, phases together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ..agent.model.calldata import Offload
from ..agent.model.placementdata import Placement
from . import text


@dataclass(slots=True)
class _Line:
    count: int = 0
    shapes: Counter[str] = field(default_factory=Counter)


def section(placed: Sequence[Placement], width: int, limit: int) -> Iterator[RenderableType]:
    """The table after an empty line, most frequent first; nothing where nothing was offloaded."""
    lines: dict[tuple[str, str, str], _Line] = {}
    for one in placed:
        line = lines.setdefault((one.op, one.dtype, one.backend), _Line())
        line.count += one.count
        for shape in one.shapes:
            line.shapes[shape_text(shape.sources, shape.result)] += shape.count
    if not lines:
        return
    yield Text()
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_edge=False, header_style="dim")
    for title in ("operator", "dtype", "ran on", "times", "shapes"):
        table.add_column(
            title, justify="right" if title == "times" else "left", no_wrap=True, overflow="ellipsis"
        )
    order = sorted(lines.items(), key=lambda item: (item[0][0] != "MUL_MAT", -item[1].count, item[0]))
    room = max(16, width - 50)
    for (op, dtype, backend), line in order[:limit]:
        words = ", ".join(f"{name} {text.count(n)}" for name, n in line.shapes.most_common())
        table.add_row(
            Text(text.clean(op, 16), "cyan"), text.clean(dtype, 8), text.clean(backend, 12),
            text.count(line.count), text.clean(words, room),
        )  # fmt: skip
    yield table
    if len(order) > limit:
        yield Text(f"{len(order) - limit} more operators (all of them: --format json)", "dim")


def offloaded(found: Offload | None) -> Iterator[RenderableType]:
    """Where the time went, most first: of the calls, and between them, where results are waited for."""
    if found is None:
        return
    whole = found.in_calls_seconds + found.between_calls_seconds
    yield Text()
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_edge=False, header_style="dim")
    for title in ("share", "part", "backend", "in calls", "between", "a call"):
        table.add_column(title, justify="left" if title in ("part", "backend") else "right", no_wrap=True)
    for one in found.parts:
        both = one.in_calls_seconds + one.between_calls_seconds
        table.add_row(
            Text(text.percent(text.ratio(both, whole)), "bold"), Text(one.part, "cyan"),
            text.clean(one.backend or "", 16), text.seconds(one.in_calls_seconds),
            text.seconds(one.between_calls_seconds) if one.between_calls_seconds else "",
            text.seconds(text.ratio(both, found.calls)),
        )  # fmt: skip
    yield table


def shape_text(sources: Sequence[Sequence[int]], result: Sequence[int]) -> str:
    """Lengths as people write them: ``512x1536*512x4`` for the first two sources, else the result."""
    some = [_lengths(one) for one in sources[:2]]
    return "*".join(some) if len(some) == 2 else _lengths(result)


def _lengths(dims: Sequence[int]) -> str:
    return "x".join(str(n) for n in dims)
