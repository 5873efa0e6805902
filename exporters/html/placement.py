# SPDX-License-Identifier: Apache-2.0
"""Where operators ran, and where the time went with several backends, as rows of the page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...agent.model.calldata import Offload
from ...agent.model.placementdata import Placement
from ..placementtable import shape_text
from ..text import clean

MAX_ROWS = 2000
_MAX_SHAPES = 6


def document(placed: Sequence[Placement] | None, offload: Offload | None) -> dict[str, Any] | None:
    """Rows, matrix products first, then the most frequent, and parts of the time; None where
    nothing was offloaded."""
    if not placed and offload is None:
        return None
    placed = placed or ()
    order = sorted(placed, key=lambda p: (p.op != "MUL_MAT", -p.count))
    rows = [
        {
            "op": clean(one.op, 40), "dtype": clean(one.dtype, 20), "role": clean(one.role, 60),
            "backend": clean(one.backend, 40), "phase": one.phase, "count": one.count, "shapes": _shapes(one),
        }
        for one in order[:MAX_ROWS]
    ]  # fmt: skip
    return {"rows": rows, "parts": _parts(offload)}


def _parts(offload: Offload | None) -> list[dict[str, Any]]:
    if offload is None:
        return []
    whole = offload.in_calls_seconds + offload.between_calls_seconds
    return [
        {
            "part": one.part, "backend": clean(one.backend or "", 40), "calls": offload.calls,
            "in_calls": round(one.in_calls_seconds * 1e9), "between": round(one.between_calls_seconds * 1e9),
            "share": (one.in_calls_seconds + one.between_calls_seconds) / whole if whole else None,
        }
        for one in offload.parts
    ]  # fmt: skip


def _shapes(one: Placement) -> str:
    shown = one.shapes[:_MAX_SHAPES]
    words = [f"{shape_text(shape.sources, shape.result)} ({shape.count})" for shape in shown]
    rest = one.count - sum(shape.count for shape in shown)
    return ", ".join([*words, *([f"others ({rest})"] if rest else [])])
