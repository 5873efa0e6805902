# SPDX-License-Identifier: Apache-2.0
"""What ``top`` shows, from the control socket's answer (docs/control.md): plain data, no terminal.

Everything that comes over the socket is checked and bounded here: names are cleaned, and what is
not a number is absent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...exporters.text import clean, seconds

MAX_TARGETS = 256
MAX_OPS = 200
PHASES = ("decode", "prefill", "mixed", "verify", "encode", "other")


@dataclass(frozen=True, slots=True)
class OpShare:
    """One kind of operator in one phase; ``share`` of all operator time of that phase."""

    op: str
    dtype: str
    role: str
    share: float | None
    calls: float
    seconds: float | None
    gb_per_second: float | None


@dataclass(frozen=True, slots=True)
class Row:
    """One process. Times in seconds, ratios as parts of 1, None where absent."""

    key: str
    name: str
    pid: int
    state: str
    reason: str
    model: str
    tokens_per_second: float | None
    generated: int | None
    prompt: int | None
    first_token: float | None
    inter_token: float | None
    inter_token_p99: float | None
    overhead: float | None
    budget: float | None
    lost: int | None
    phases: tuple[tuple[str, tuple[OpShare, ...]], ...]
    verdicts: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def top_op(self) -> OpShare | None:
        """The operator that takes most of the first phase that is known."""
        return self.phases[0][1][0] if self.phases and self.phases[0][1] else None


def rows(snapshot: Mapping[str, Any]) -> tuple[Row, ...]:
    """One row for each process in the answer, watched ones first."""
    targets = snapshot.get("targets")
    if not isinstance(targets, list):
        return ()
    found = [_row(t) for t in targets[:MAX_TARGETS] if isinstance(t, dict) and t.get("state") != "excluded"]
    return tuple(sorted(found, key=lambda r: (r.state != "watched", r.name, r.pid)))


def _row(target: Mapping[str, Any]) -> Row:
    report = _object(target.get("report"))
    tokens, latency = _object(report.get("tokens")), _object(report.get("latency_seconds"))
    inter, first = _object(latency.get("inter_token")), _object(latency.get("time_to_first_token"))
    overhead = _object(report.get("overhead"))
    pid = _whole(target.get("pid")) or 0
    return Row(
        key=f"{pid}-{_whole(target.get('start_time')) or 0}",
        name=_text(target.get("target"), 60) or "process",
        pid=pid,
        state=_text(target.get("state"), 20) or "?",
        reason=_text(target.get("reason"), 200),
        model=_text(_object(report.get("target")).get("model"), 60),
        tokens_per_second=_number(target.get("tokens_per_second")),
        generated=_whole(tokens.get("output_rows")),
        prompt=_whole(tokens.get("prefill")),
        first_token=_number(first.get("mean")),
        inter_token=_number(inter.get("mean")),
        inter_token_p99=_number(inter.get("p99")),
        overhead=_number(overhead.get("estimated_ratio")),
        budget=_number(overhead.get("budget_ratio")),
        lost=_whole(_object(report.get("lost")).get("total")),
        phases=_phases(report.get("ops")),
        verdicts=_verdicts(report),
        notes=tuple(_text(note, 300) for note in _list(report.get("notes"))[:20]),
    )


def _phases(ops: object) -> tuple[tuple[str, tuple[OpShare, ...]], ...]:
    groups: dict[str, dict[tuple[str, str, str], list[float]]] = {}
    absent: set[tuple[str, tuple[str, str, str]]] = set()
    for op in _list(ops)[:10_000]:
        if not isinstance(op, dict):
            continue
        phase = _text(op.get("phase"), 20)
        key = (_text(op.get("op"), 30), _text(op.get("dtype"), 12), _text(op.get("role"), 24))
        sums = groups.setdefault(phase, {}).setdefault(key, [0.0, 0.0, 0.0])
        sums[0] += _number(op.get("seconds")) or 0.0
        sums[1] += _number(op.get("calls")) or 0.0
        size = _number(op.get("bytes"))
        if size is None:
            absent.add((phase, key))
        sums[2] += size or 0.0
    order = [p for p in PHASES if p in groups] + sorted(set(groups) - set(PHASES))
    return tuple((phase, _shares(phase, groups[phase], absent)) for phase in order)


def _shares(
    phase: str,
    group: Mapping[tuple[str, str, str], Sequence[float]],
    absent: set[tuple[str, tuple[str, str, str]]],
) -> tuple[OpShare, ...]:
    whole = sum(sums[0] for sums in group.values())
    found = []
    for key, (spent, calls, size) in group.items():
        known = spent > 0 and (phase, key) not in absent
        found.append(
            OpShare(*key, spent / whole if whole > 0 else None, calls, spent,
                    size / spent / 1e9 if known else None)
        )  # fmt: skip
    found.sort(key=lambda o: (-(o.seconds or 0.0), o.op, o.dtype, o.role))
    return tuple(found[:MAX_OPS])


def _verdicts(report: Mapping[str, Any]) -> tuple[str, ...]:
    """What the rules concluded, most costly first as they come: one line each."""
    found = []
    for verdict in _list(report.get("verdicts"))[:20]:
        if isinstance(verdict, dict) and (rule := _text(verdict.get("rule"), 60)):
            line = rule.replace("_", " ")
            if (saved := _number(verdict.get("seconds_per_token"))) is not None:
                line += f", up to {seconds(saved)} a token"
            line += f" ({_text(verdict.get('confidence'), 10) or '?'} confidence)"
            evidence = _list(verdict.get("evidence"))
            if evidence and (first := _text(evidence[0], 240)):
                line += f": {first}"
            if advice := _text(verdict.get("try"), 240):
                line += f" Try: {advice}"
            found.append(line)
    return tuple(found)


def _object(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _text(value: object, limit: int) -> str:
    return clean(value, limit) if isinstance(value, str) else ""


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 63 else None
