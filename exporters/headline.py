# SPDX-License-Identifier: Apache-2.0
"""The figures that are asked for first of a trace: the same in the terminal and on the page."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass

from ..agent.model import profile
from ..agent.model.snapshot import Snapshot
from ..agent.model.trace import Trace
from ..agent.model.verdict import judge
from ..agent.model.verdictdata import Verdict
from .summary import Rate, rates
from .text import clean, ratio, seconds, total


@dataclass(frozen=True, slots=True)
class Figure:
    """``value`` in ``unit`` (tokens/s, s, 1, B/s, ratio); None is absent and ``sub`` says why.

    ``tone``: good, bad or "".
    """

    id: str
    label: str
    value: float | None
    unit: str
    sub: str
    tone: str = ""


def title(snapshot: Snapshot) -> str:
    """What was watched: the model's name, else the program's."""
    target = snapshot.target
    return clean(target.model or os.path.basename(target.exe) or f"process {target.pid}", 120)


def verdicts(trace: Trace) -> tuple[Verdict, ...]:
    """Why tokens take the time they take: as it was judged while recording, else judged now."""
    if trace.snapshot.verdicts is not None:
        return trace.snapshot.verdicts
    return judge(dataclasses.replace(trace.snapshot, peaks=profile.peaks_of(trace)))


def level(trace: Trace) -> str:
    """Program, engine, length and depth of the trace, in one line."""
    target = trace.snapshot.target
    ops = {"all": "every kernel recorded", "sampled": "operators sampled", "off": "no operators"}
    parts = [
        clean(os.path.basename(target.exe) or f"pid {target.pid}", 80),
        clean(target.engine, 40) if target.engine else "",
        f"{(trace.facts.end_ns - trace.facts.begin_ns) / 1e9:.1f} s",
        ops.get(trace.facts.ops, trace.facts.ops),
    ]
    return " · ".join(part for part in parts if part)


def figures(trace: Trace) -> tuple[Figure, ...]:
    """In the order in which they are asked for."""
    snapshot = trace.snapshot
    by_phase = {rate.phase: rate for rate in rates(snapshot)}
    return (
        _speed("decode", "Decode", by_phase),
        _speed("prefill", "Prefill", by_phase),
        _latency("inter_token", "Between tokens", snapshot),
        _latency("time_to_first_token", "First token", snapshot),
        _tokens(snapshot),
        _bandwidth(trace),
        _lost(snapshot),
        _overhead(snapshot),
    )


def _speed(phase: str, label: str, by_phase: Mapping[str, Rate]) -> Figure:
    rate = by_phase.get(phase)
    if rate is None:
        return Figure(phase, label, None, "tokens/s", f"no {phase} call was seen")
    calls = _many(rate.calls, "call")
    sub = calls if rate.tokens is None else f"{_many(rate.tokens, 'token')} in {calls}"
    return Figure(phase, label, rate.tokens_per_second, "tokens/s", sub)


def _many(count: int, word: str) -> str:
    return f"{count:,} {word}" + ("" if count == 1 else "s")


def _latency(which: str, label: str, snapshot: Snapshot) -> Figure:
    summary = getattr(snapshot.latency_seconds, which)
    if not summary.count:
        return Figure(which, label, None, "s", "not seen in this window")
    sub = f"mean of {summary.count:,}"
    if summary.p99 is not None and summary.count > 1:
        sub = f"mean; p99 {seconds(summary.p99)}"
    return Figure(which, label, summary.mean, "s", sub)


def _tokens(snapshot: Snapshot) -> Figure:
    rows, prefill = snapshot.tokens.output_rows, snapshot.tokens.prefill
    sub = "prompt tokens not known" if prefill is None else f"after {_many(prefill, 'prompt token')}"
    return Figure("generated", "Generated tokens", rows, "1", sub)


def _bandwidth(trace: Trace) -> Figure:
    """What decoding read and wrote by its operators' nominal bytes, against what memory can do."""
    ops = [op for op in trace.snapshot.ops if op.phase == "decode" and op.bytes is not None]
    moved = ratio(total(op.bytes for op in ops), total(op.seconds for op in ops))
    if moved is None:
        return Figure("bandwidth", "Decode bandwidth", None, "B/s", "no decode operator with known bytes")
    peak = profile.peak_of(trace)
    most = None if peak is None else peak.read_bytes_per_second
    part = ratio(moved, most)
    sub = (
        "nominal; the machine's peak is not measured"
        if part is None
        else f"nominal; {part * 100:.0f} % of this machine's peak"
    )
    return Figure("bandwidth", "Decode bandwidth", moved, "B/s", sub)


def _lost(snapshot: Snapshot) -> Figure:
    lost = snapshot.lost.total
    kinds = [f"{n:,} {kind}" for kind, n in sorted(snapshot.lost.by_kind.items(), key=lambda i: -i[1]) if n]
    return Figure(
        "lost",
        "Lost records",
        lost,
        "1",
        ", ".join(kinds[:2]) or "nothing is missing",
        "bad" if lost else "good",
    )


def _overhead(snapshot: Snapshot) -> Figure:
    overhead = snapshot.overhead
    if overhead.estimated_ratio is None:
        return Figure("overhead", "Cost of watching", None, "ratio", "was not measured")
    sub = (
        "estimated"
        if overhead.budget_ratio is None
        else f"estimated; budget {overhead.budget_ratio * 100:g} %"
    )
    return Figure("overhead", "Cost of watching", overhead.estimated_ratio, "ratio", sub)
