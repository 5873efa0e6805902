# SPDX-License-Identifier: Apache-2.0
"""``profinferd status`` for people: one line a target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...exporters.text import clean, count, number, percent, seconds


def table(health: Mapping[str, Any], snapshot: Mapping[str, Any]) -> str:
    """What the daemon said, as text."""
    reason = f" ({clean(str(health.get('reason')), 200)})" if health.get("reason") else ""
    lines = [
        f"profinferd {clean(str(health.get('version')), 40)}, pid {health.get('pid')}, "
        f"up {seconds(_float(health.get('uptime_seconds')))}: {clean(str(health.get('state')), 40)}{reason}"
    ]
    rows = [_row(target) for target in snapshot.get("targets", []) if isinstance(target, dict)]
    if not rows:
        return "\n".join([*lines, "no engine runs on this machine", ""])
    head = ("target", "pid", "state", "tokens/s", "generated", "top operator", "overhead")
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    lines.append("")
    lines += [
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (head, *rows)
    ]
    return "\n".join([*lines, ""])


def _row(target: Mapping[str, Any]) -> tuple[str, ...]:
    report = target.get("report") or {}
    state = str(target.get("state"))
    if target.get("reason"):
        state += f": {target['reason']}"
    tokens = report.get("tokens") or {}
    return (
        clean(str(target.get("target")), 60),
        str(target.get("pid")),
        clean(state, 80),
        number(_float(target.get("tokens_per_second"))),
        count(_float(tokens.get("output_rows"))),
        _top(report.get("ops") or []),
        percent(_float((report.get("overhead") or {}).get("estimated_ratio"))),
    )


def _top(ops: Sequence[Mapping[str, Any]]) -> str:
    best = max(ops, key=lambda op: op.get("seconds") or 0.0, default=None)
    if best is None:
        return "-"
    return clean(" ".join(filter(None, (best.get("op"), best.get("dtype"), best.get("role")))), 40)


def _float(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None
