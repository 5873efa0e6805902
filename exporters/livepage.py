# SPDX-License-Identifier: Apache-2.0
"""The daemon's page: what is running, how fast, where the time goes, what watching costs.

One file without anything from elsewhere; its script asks ``/api/live`` every two seconds and
puts text where text belongs, so a hostile name is a name.
"""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MAX_OPS, MAX_TARGETS, MAX_NOTES = 8, 64, 4
_RANKS = {"watched": 0, "unprofiled": 1, "waiting": 2, "excluded": 3}
_PAGE = Path(__file__).with_name("livepage.html")


def _hashes(tag: str, text: str) -> str:
    """CSP sources of the inline parts: only this very script and style may run."""
    parts = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    digests = (base64.b64encode(hashlib.sha256(part.encode()).digest()).decode() for part in parts)
    return " ".join(f"'sha256-{digest}'" for digest in digests)


_TEXT = _PAGE.read_text(encoding="utf-8")
SECURITY_HEADERS = (
    (
        "Content-Security-Policy",
        f"default-src 'none'; connect-src 'self'; script-src {_hashes('script', _TEXT)}; "
        f"style-src {_hashes('style', _TEXT)}; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'",
    ),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cache-Control", "no-store"),
)


def page() -> bytes:
    """The page."""
    return _TEXT.encode()


def summary(targets: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What the page shows of the targets of the control socket: little, and nothing unbounded.

    Where there are too many, those that are watched come before those that are not, and those that
    should be before those that nobody wants.
    """
    ranked = sorted(targets, key=lambda target: _RANKS.get(str(target.get("state")), len(_RANKS)))
    return [_one(target) for target in ranked[:MAX_TARGETS]]


def _one(target: Mapping[str, Any]) -> dict[str, Any]:
    report = target.get("report") or {}
    about, tokens = report.get("target") or {}, report.get("tokens") or {}
    latency, overhead = report.get("latency_seconds") or {}, report.get("overhead") or {}
    return {
        **{name: target.get(name) for name in ("target", "pid", "state", "reason", "unit", "container")},
        "model": about.get("model"),
        "engine": about.get("engine"),
        "tokens_per_second": _number(target.get("tokens_per_second")),
        "generated": tokens.get("output_rows"),
        "prompt": tokens.get("prefill"),
        "first_token": _latency(latency.get("time_to_first_token")),
        "inter_token": _latency(latency.get("inter_token")),
        "ops": _ops(report.get("ops") or []),
        "runs": _runs(report) if tokens.get("decode") is None else [],
        "overhead": _number(overhead.get("estimated_ratio")),
        "budget": _number(overhead.get("budget_ratio")),
        "lost": (report.get("lost") or {}).get("total"),
        "verdicts": [
            _verdict(v) for v in (report.get("verdicts") or [])[:MAX_NOTES] if isinstance(v, Mapping)
        ],
        "notes": [str(note)[:300] for note in (report.get("notes") or [])[:MAX_NOTES]],
    }


def _verdict(verdict: Mapping[str, Any]) -> str:
    """Its name, its first evidence, and what to try."""
    rule = str(verdict.get("rule", "")).replace("_", " ").capitalize()
    evidence = verdict.get("evidence") or [""]
    parts = [f"{rule}: {evidence[0]}" if evidence[0] else rule, str(verdict.get("try") or "")]
    # Each is a sentence here, and most advice begins with a small letter where it follows "try".
    return ". ".join(part[0].upper() + part[1:].rstrip(".") for part in parts if part)[:400]


def _latency(figures: Mapping[str, Any] | None) -> dict[str, float | None] | None:
    if not figures or not figures.get("count"):
        return None
    return {name: _number(figures.get(name)) for name in ("mean", "p50", "p99")}


def _ops(ops: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Decode's operators by share of time, the largest first, the rest as one."""
    phases = {op.get("phase") for op in ops}
    phase = "decode" if "decode" in phases else None
    sums: dict[str, float] = {}
    for op in ops:
        if phase is not None and op.get("phase") != phase:
            continue
        name = " ".join(str(op[key]) for key in ("op", "dtype", "role") if op.get(key))[:80]
        sums[name] = sums.get(name, 0.0) + (_number(op.get("seconds")) or 0.0)
    total = sum(sums.values())
    if total <= 0:
        return []
    ranked = sorted(sums.items(), key=lambda item: -item[1])
    shown = [{"name": name, "share": seconds / total} for name, seconds in ranked[:MAX_OPS]]
    rest = sum(seconds for _, seconds in ranked[MAX_OPS:])
    if rest > 0:
        shown.append({"name": f"{len(ranked) - MAX_OPS} more", "share": rest / total})
    return shown


def _runs(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Of an engine without tokens, what it runs, that which takes longest first: compiled programs where
    it has some, else its calls. ``mean``: seconds, of a program until it was seen to be done."""
    found = [
        (str(one.get("name") or "a program without a name"), one.get("executions"), one.get("completions"),
         one.get("completion_seconds"), one.get("dispatch_seconds"))
        for one in report.get("programs") or []
    ] or [
        (str(one.get("call")), one.get("count"), None, None, one.get("seconds"))
        for one in report.get("engine_calls") or []
        if one.get("state") == "outermost"
    ]  # fmt: skip
    sums: dict[str, list[float]] = {}
    for name, count, done, done_seconds, seconds in found:
        whole = done and done_seconds is not None
        number, total = _number(done if whole else count), _number(done_seconds if whole else seconds)
        have = sums.setdefault(name[:80], [0.0, 0.0, 0.0])
        have[0] += _number(count) or 0.0
        if number and total is not None:
            have[1], have[2] = have[1] + number, have[2] + total
    ranked = sorted(sums.items(), key=lambda item: -item[1][2])[:MAX_OPS]
    return [
        {"name": name, "count": count, "mean": seconds / number if number else None}
        for name, (count, number, seconds) in ranked
        if count
    ]


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None
