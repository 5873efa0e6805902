# SPDX-License-Identifier: Apache-2.0
"""Everything that the page shows, as one JSON document (``page/src/types.ts`` describes it)."""

from __future__ import annotations

import datetime
import os
from typing import Any

from ...agent.model import profile
from ...agent.model.trace import PHASES, Trace, TraceFacts
from ..headline import figures, level, title, verdicts
from ..text import clean
from ..verdicts import TITLES
from . import calls, graphs, memory, ops, placement, threads, timelines

FORMAT = 1
_MAX_GAPS = 2000
_MAX_NOTES = 200


def document(trace: Trace, name: str, made_by: str) -> dict[str, Any]:
    """The document of one trace. ``name``: of the recording's file, without its folder."""
    rows = profile.rows(trace)
    kept = graphs.choose(trace)
    chosen = calls.choose(trace)
    lines = timelines.build(trace, chosen, kept)
    return {
        "format": FORMAT,
        "about": _about(trace, name, made_by),
        "figures": [
            {"id": f.id, "label": f.label, "value": f.value, "unit": f.unit, "sub": f.sub, "tone": f.tone}
            for f in figures(trace)
        ],
        "verdicts": _verdicts(trace),
        "phases": list(PHASES),
        "tokens": calls.table(trace, chosen, lines.index_of),
        "timelines": lines.document,
        "profile": ops.profile(trace, rows),
        "roofline": ops.roofline(trace, rows),
        "graphs": graphs.documents(trace, kept),
        "graphs_note": graphs.note(trace, kept),
        "memory": memory.document(trace),
        "threads": threads.document(trace),
        "experts": ops.experts(trace, rows),
        "placement": placement.document(trace.snapshot.placement, trace.snapshot.offload),
    }


def _verdicts(trace: Trace) -> list[dict[str, Any]]:
    return [
        {
            "rule": v.rule,
            "title": TITLES.get(v.rule, clean(v.rule, 60)),
            "severity": "none" if v.rule == "nothing_wrong" else "high" if n == 0 else "medium",
            "confidence": v.confidence,
            "seconds_per_token": v.seconds_per_token,
            "evidence": [clean(text, 400) for text in v.evidence],
            "try": [clean(v.try_, 400)] if v.try_ else [],
        }
        for n, v in enumerate(verdicts(trace))
    ]


def _about(trace: Trace, name: str, made_by: str) -> dict[str, Any]:
    facts, snapshot = trace.facts, trace.snapshot
    gaps = trace.gaps[:_MAX_GAPS]
    return {
        "title": title(snapshot),
        "file": clean(name, 200),
        "recorded": _recorded(facts),
        "seconds": (facts.end_ns - facts.begin_ns) / 1e9,
        "level": level(trace),
        "facts": [[what, value] for what, value in _facts(trace)],
        "libraries": [
            [clean(os.path.basename(one.path), 200), one.build_id, one.role]
            for one in snapshot.target.libraries
        ],
        "losses": {
            "total": snapshot.lost.total,
            "by_kind": dict(snapshot.lost.by_kind),
            "gaps": [
                [
                    int(gap["begin"]) - facts.begin_ns,
                    int(gap["end"]) - facts.begin_ns,
                    str(gap["kind"]),
                    int(gap["count"]),
                ]
                for gap in gaps
            ],
        },
        "notes": [*facts.notes, *snapshot.notes][:_MAX_NOTES],
        "made_by": made_by,
    }


def _recorded(facts: TraceFacts) -> str | None:
    if facts.created <= 0:
        return None
    try:
        when = datetime.datetime.fromtimestamp(facts.created, datetime.UTC)
    except (OverflowError, OSError, ValueError):
        return None
    return when.strftime("%Y-%m-%d %H:%M UTC")


def _facts(trace: Trace) -> list[tuple[str, str]]:
    facts, target = trace.facts, trace.snapshot.target
    machine = facts.machine
    child = facts.child
    ended = None
    if child is not None:
        ended = (
            f"{clean(child.program)} ended with code {child.exit_code}"
            if child.exit_code is not None
            else f"{clean(child.program)} was ended by signal {child.signal}"
            if child.signal is not None
            else f"{clean(child.program)} was running"
        )
    found: list[tuple[str, str | None]] = [
        ("Model", None if target.model is None else clean(target.model, 200)),
        ("Program", f"{clean(os.path.basename(target.exe) or 'process', 120)} (pid {target.pid})"),
        ("Engine", target.engine),
        ("Started by us", ended),
        (
            "Machine",
            " · ".join(
                p for p in (machine.host, machine.cpu or "", _cpus(machine.cpus), _gib(machine.memory)) if p
            ),
        ),
        ("Kernel", " ".join(p for p in (machine.kernel, machine.arch) if p)),
        ("Probes", _attached(target.attach.method, target.attach.op_source, target.attach.complete)),
        (
            "Layout",
            " ".join(
                p
                for p in (target.layout.name, f"({target.layout.source})" if target.layout.source else "")
                if p
            ),
        ),
        (
            "Operators",
            {"all": "every kernel recorded", "sampled": "sampled in bursts", "off": "not watched"}.get(
                facts.ops, facts.ops
            ),
        ),
        ("Recorder", f"profinferd {facts.version}" + ("" if facts.finished else ", ended before its time")),
    ]
    return [(what, value) for what, value in found if value]


def _cpus(count: int | None) -> str:
    return "" if count is None else f"{count} CPUs"


def _gib(size: int | None) -> str:
    return "" if size is None else f"{size / (1 << 30):.1f} GiB"


def _attached(method: str | None, source: str | None, complete: bool | None) -> str | None:
    if method is None:
        return None
    said = method if source is None else f"{method}, operators by {source}"
    return f"{said} (incomplete)" if complete is False else said
