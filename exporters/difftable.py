# SPDX-License-Identifier: Apache-2.0
"""A comparison of two recordings for people, in plain text of any width."""

from __future__ import annotations

from ..agent.model.diffdata import Diff, Phase, Ratio, Row
from .text import MISSING, clean, count, number, seconds

_MOST_ROWS = 40


def render(diff: Diff, *, everything: bool = False) -> str:
    """What differs, phase by phase; ``everything``: also what does not."""
    lines: list[str] = []
    for phase in diff.phases:
        lines += _phase(phase, everything)
    if not diff.phases:
        lines.append("nothing to compare")
    lines += [f"note: {clean(note, 300)}" for note in diff.notes]
    return "\n".join(lines).rstrip("\n") + "\n"


def _phase(phase: Phase, everything: bool) -> list[str]:
    times = f"usually {seconds(phase.a_usual_seconds)} to {seconds(phase.b_usual_seconds)} a token"
    lines = [f"{phase.phase}: {times}{_change(phase.total)}, {count(phase.pairs)} pairs of executions"]
    if phase.common is not None:
        lines.append(
            f"  all operators together: {_percent(phase.common)}; operators are compared with that"
            " (see docs/diff.md)"
        )
    rows = phase.rows if everything else phase.significant
    if rows:
        lines += _table(rows[:_MOST_ROWS])
        if len(rows) > _MOST_ROWS:
            lines.append(f"  {len(rows) - _MOST_ROWS} more: see --format json")
    elif phase.tested:
        lines.append(f"  no operator differs ({count(phase.tested)} differences tested)")
    return [*lines, ""]


def _table(rows: tuple[Row, ...]) -> list[str]:
    head = (
        "operator",
        "role",
        "layers",
        "change",
        "A usually",
        "B usually",
        "beyond the rest",
        "95 % interval",
    )
    cells = [head, *(_cells(row) for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    left = {0, 1, 2, 3}
    return [
        "  "
        + "  ".join(
            c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]


def _cells(row: Row) -> tuple[str, ...]:
    change = row.change if row.change != "same" else "" if row.time is None else _word(row.time)
    dtype = row.a_dtype or row.b_dtype
    if row.a_dtype and row.b_dtype and row.a_dtype != row.b_dtype:
        dtype = f"{row.a_dtype} to {row.b_dtype}"
    low, high = (MISSING, MISSING) if row.time is None else (_percent(row.time.low), _percent(row.time.high))
    return (
        clean(f"{row.op} {dtype}", 48), clean(row.role, 24), _layers(row.layers), change,
        *(MISSING if side is None else seconds(side.usual_seconds) for side in (row.a, row.b)),
        MISSING if row.time is None else _percent(row.time.value),
        MISSING if row.time is None else f"{low} to {high}",
    )  # fmt: skip


def _word(ratio: Ratio) -> str:
    if not ratio.significant:
        return ""
    return "slower" if ratio.value > 1 else "faster"


def _layers(layers: tuple[int, ...] | None) -> str:
    """``0-3, 7``; "all" where the row is about every layer or none has any."""
    if layers is None:
        return "all"
    parts: list[list[int]] = []
    for layer in layers:
        if parts and layer == parts[-1][-1] + 1:
            parts[-1].append(layer)
        else:
            parts.append([layer])
    text = ", ".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)
    return text if len(text) <= 20 else f"{len(layers)} of them"


def _change(ratio: Ratio | None) -> str:
    if ratio is None:
        return ""
    low, high = _percent(ratio.low), _percent(ratio.high)
    said = f" (block by block {_percent(ratio.value)}, 95 % interval {low} to {high}"
    return said + (")" if ratio.significant else "; not significant)")


def _percent(ratio: float) -> str:
    value = (ratio - 1) * 100
    if abs(value) < 1000:
        return f"{value:+.1f}%"
    return f"{number(ratio)} times"
