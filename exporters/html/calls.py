# SPDX-License-Identifier: Apache-2.0
"""Calls over time, as columns; thinned where there are more than a page can show."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ...agent.model.trace import Trace

MAX_CALLS = 9000
Ints = npt.NDArray[np.int64]


def choose(trace: Trace) -> Ints:
    """Rows of ``trace.calls`` that are shown, by begin. Of too many, the first, the slowest and
    the fastest of each stretch."""
    calls = trace.calls
    order = np.argsort(calls["begin"], kind="stable").astype(np.int64)
    if len(order) <= MAX_CALLS:
        return order
    ns = (calls["end"] - calls["begin"])[order]
    kept = []
    for part in np.array_split(np.arange(len(order)), MAX_CALLS // 3):
        kept += [int(part[0]), int(part[ns[part].argmax()]), int(part[ns[part].argmin()])]
    return order[np.unique(np.array(kept, dtype=np.int64))]


def table(trace: Trace, chosen: Ints, timeline_of: Mapping[int, int]) -> dict[str, Any]:
    """The columns. ``timeline_of``: row of a call -> number of its timeline."""
    calls = trace.calls[chosen]
    kv, ops_ns = _of_runs(trace)
    note = None
    if len(chosen) < len(trace.calls):
        note = (
            f"{len(chosen):,} of {len(trace.calls):,} calls are shown: of each stretch the first, the"
            " slowest and the fastest. All of them are in the figures."
        )
    elif not len(chosen):
        note = "No call was recorded."
    return {
        "note": note,
        "begin": (calls["begin"] - trace.facts.begin_ns).tolist(),
        "ns": (calls["end"] - calls["begin"]).tolist(),
        "phase": calls["phase"].tolist(),
        "tokens": _known(calls["tokens"]),
        "rows": _known(calls["rows"]),
        "kv": _known(kv[chosen]),
        "status": calls["status"].tolist(),
        "ops_ns": _known(ops_ns[chosen]),
        "timeline": [timeline_of.get(row, -1) for row in chosen.tolist()],
    }


def _of_runs(trace: Trace) -> tuple[Ints, Ints]:
    """By row of ``calls``: the longest KV length of its graphs, and ns in outermost graphs; -1: none."""
    runs = trace.runs
    lengths = np.array([-1 if g.kv_length is None else g.kv_length for g in trace.facts.graphs] or [-1])
    kv = np.full(len(trace.calls), -1, np.int64)
    known = runs["graph"] >= 0
    np.maximum.at(kv, runs["call"][known], lengths[runs["graph"][known]])
    ns = np.full(len(trace.calls), -1, np.int64)
    roots = runs[runs["parent"] < 0]
    ns[roots["call"]] = 0
    np.add.at(ns, roots["call"], roots["end"] - roots["begin"])
    return kv, ns


def _known(column: npt.NDArray[Any]) -> list[int | None]:
    return [None if value < 0 else value for value in column.tolist()]
