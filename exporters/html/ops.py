# SPDX-License-Identifier: Apache-2.0
"""Operators as columns with dictionaries, the roofline's points, and experts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ...agent.model import roofline as roofs
from ...agent.model.profile import Row, peak_of, peaks_of
from ...agent.model.trace import PHASES, Trace
from ..summary import phase_ops

MAX_ROWS = 8_000
MAX_POINTS = 1000


class _Names:
    """Names by number, in the order in which they come."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def __call__(self, name: str) -> int:
        return self.numbers.setdefault(name, len(self.numbers))

    def all(self) -> list[str]:
        return list(self.numbers)


def _ns(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * 1e9)


def profile(trace: Trace, rows: Sequence[Row]) -> dict[str, Any]:
    """All rows (most time first) and what each phase took as a whole."""
    names = {field: _Names() for field in ("op", "dtype", "role", "kernel", "backend")}
    shown = rows[:MAX_ROWS]
    number: Callable[[str], int] = lambda phase: PHASES.index(phase) if phase in PHASES else -1  # noqa: E731
    columns: dict[str, list[Any]] = {
        field: [names[field](getattr(row, field)) for row in shown] for field in names
    }
    columns |= {
        "layer": [-1 if row.layer is None else row.layer for row in shown],
        "phase": [number(row.phase) for row in shown],
        "calls": [row.calls for row in shown],
        "untimed": [row.untimed for row in shown],
        "ns": [_ns(row.seconds) for row in shown],
        "stderr": [_ns(row.seconds_stderr) for row in shown],
        "flops": [row.flops for row in shown],
        "bytes": [row.bytes for row in shown],
        "wasted": [_ns(row.wasted_seconds) for row in shown],
    }
    phases = [
        {
            "phase": number(part.phase),
            "whole": _ns(part.seconds) or 0,
            "setup": _ns(part.setup) or 0,
            "untimed": _ns(part.untimed) or 0,
            "per": part.per,
            "units": part.units,
        }
        for part in sorted(phase_ops(trace.snapshot), key=lambda p: -(p.seconds or 0.0))
    ]
    return {
        "note": _profile_note(trace, rows),
        "names": {field: names[field].all() for field in names},
        "rows": columns,
        "phases": phases,
        "wasted_note": _wasted_note(trace),
    }


def _profile_note(trace: Trace, rows: Sequence[Row]) -> str | None:
    if not rows:
        return {
            "off": "Operators were not watched in this recording.",
            "sampled": "No burst of operator probes fell into this recording.",
        }.get(trace.facts.ops, "No operator was recorded.")
    if trace.facts.ops == "sampled":
        return (
            "Operators were sampled in bursts: times are estimates with a standard error, and know no layers."
        )
    if len(rows) > MAX_ROWS:
        return f"The {MAX_ROWS:,} rows with most time of {len(rows):,} are here."
    return None


def _wasted_note(trace: Trace) -> str | None:
    why = roofs.absent_because(peaks_of(trace))
    if why is not None:
        return f"Wasted time is absent: {why}."
    return (
        "Wasted: time beyond what this machine's measured peaks would need for the nominal bytes and"
        " operations."
    )


def roofline(trace: Trace, rows: Iterable[Row]) -> dict[str, Any]:
    """Points by kind of operator and phase, layers together; peaks from fewest threads."""
    peaks, peak = peaks_of(trace), peak_of(trace)
    kinds: dict[tuple[str, str, str, str, str], list[Row]] = {}
    for row in rows:
        kinds.setdefault((row.op, row.dtype, row.role, row.kernel, row.phase), []).append(row)
    points: list[dict[str, Any]] = []
    left_out, left_seconds = 0, 0.0
    for (op, dtype, role, kernel, phase), own in kinds.items():
        seconds = sum(row.seconds for row in own)
        flops, moved = _sum(row.flops for row in own), _sum(row.bytes for row in own)
        if not flops or not moved or seconds <= 0:
            left_out, left_seconds = left_out + 1, left_seconds + seconds
            continue
        reach = roofs.reach(seconds, flops, moved, roofs.roof(peak, op, dtype))
        points.append({
            "op": op, "dtype": dtype, "role": role, "kernel": kernel, "phase": PHASES.index(phase),
            "calls": sum(row.calls for row in own), "ns": round(seconds * 1e9), "flops": flops,
            "bytes": moved, "bound": reach.bound, "ratio": reach.ratio,
        })  # fmt: skip
    points.sort(key=lambda p: -p["ns"])
    note = None
    if left_out:
        note = (
            f"{left_out} kinds of operators ({left_seconds * 1e3:,.1f} ms) compute nothing by the formulas,"
            " or their operations or bytes are not known."
        )
    return {
        "peaks": _roofs(peaks, peak),
        "why": roofs.absent_because(peaks),
        "points": points[:MAX_POINTS],
        "left_out": note,
    }


def _roofs(peaks: Any, peak: Any) -> list[dict[str, Any]]:
    """The roof that counts first: that of as many threads as computed."""
    if peaks is None or peak is None:
        return []
    found = []
    for one in (peak, *(p for p in peaks.by_threads if p is not peak)):
        memory = one.read_bytes_per_second
        threads = f"{one.threads} thread" + ("" if one.threads == 1 else "s")
        if one is peak and one.int8_ops_per_second:
            found.append({"label": f"int8, {threads}", "flops": one.int8_ops_per_second, "bytes": memory})
        if one.flops_per_second:
            found.append({"label": f"f32, {threads}", "flops": one.flops_per_second, "bytes": memory})
    return found


def experts(trace: Trace, rows: Iterable[Row]) -> dict[str, Any] | None:
    """Distinct experts per product of MUL_MAT_ID by layer; None without such products."""
    routed = [row for row in rows if row.op == "MUL_MAT_ID"]
    if not routed:
        return None
    seen: dict[tuple[int, str, str], Counter[int]] = {}
    available: dict[tuple[int, str], int] = {}
    for route in trace.routes:
        graph, node, distinct, phase, count = (
            int(route[n]) for n in ("graph", "node", "distinct", "phase", "count")
        )
        nodes, built = trace.nodes(graph), trace.graph(graph)
        if nodes is None or built is None or node >= len(nodes):
            continue
        key = (int(nodes.layer[node]), nodes.role[node], PHASES[phase])
        seen.setdefault(key, Counter())[distinct] += count
        matrices = built.operand(built.nodes[node], 0)
        if matrices is not None and not matrices.fault:
            available[key[:2]] = matrices.ne[2]
    found = []
    for row in routed:
        layer = -1 if row.layer is None else row.layer
        used = seen.get((layer, row.role, row.phase), Counter())
        found.append({
            "layer": layer, "role": row.role, "phase": row.phase,
            "available": available.get((layer, row.role)),
            "mean": sum(n * count for n, count in used.items()) / used.total() if used else None,
            "max": max(used, default=None), "runs": row.calls, "ns": _ns(row.seconds),
        })  # fmt: skip
    note = None if seen else "Which experts were used was not observed: their number is absent."
    return {"note": note, "rows": found}


def _sum(values: Iterable[int | None]) -> int | None:
    total = 0
    for value in values:
        if value is None:
            return None
        total += value
    return total
