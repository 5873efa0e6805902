# SPDX-License-Identifier: Apache-2.0
"""What happened inside single calls, packed in parts that the page unpacks when they are looked at."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ...agent.model.trace import Segment, Trace
from .lanes import Lanes

FUSED = 1 << 20
PER_PART = 24
MAX_PACKED = 2_600_000
"""Bytes of packed timelines in a page (base64 included)."""
MAX_WHOLE = 4_000_000
"""Ops up to which whole traces are read; of longer ones only stretches around chosen calls."""
MAX_SPARSE = 96
_BYTES_PER_OP = 3.2
"""A generous guess of what one op takes when packed, for choosing calls."""

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Timelines:
    """The document's part, and which timeline belongs to which row of ``trace.calls``."""

    document: dict[str, Any]
    index_of: dict[int, int]


def build(trace: Trace, shown: Ints, graphs: Sequence[tuple[int, int]]) -> Timelines:
    """Timelines of as many of the calls ``shown`` as fit; ``graphs``: the (graph, phase) drawn."""
    calls, runs = trace.calls, trace.runs
    ops_of = np.zeros(len(calls), np.int64)
    np.add.at(ops_of, runs["call"], runs["n_ops"])
    wanted = _wanted(trace, shown, ops_of)
    drawn = {pair: number for number, pair in enumerate(graphs)}
    packer = _Packer(trace, drawn)
    sparse = int(ops_of.sum()) > MAX_WHOLE
    for row, segment, call in _walk(trace, set(wanted), sparse):
        packer.add(row, segment, call)
    index_of = packer.keep(wanted)
    document = packer.document()
    document["note"] = _note(trace, len(shown), len(index_of))
    return Timelines(document, index_of)


def _note(trace: Trace, shown: int, kept: int) -> str | None:
    if not shown:
        return "No call was recorded."
    if kept < shown:
        return (
            f"Timelines of {kept:,} of {shown:,} calls are kept: the slowest of each phase, the first, and"
            " some of each stretch of time."
        )
    return None


def _wanted(trace: Trace, shown: Ints, ops_of: Ints) -> list[int]:
    """Rows of calls whose timelines may be kept, those first that matter most: the slowest, the first and
    evenly some, by a guess of what their ops take. What threads did comes on top of it."""
    room = MAX_PACKED / _BYTES_PER_OP
    sparse = int(ops_of.sum()) > MAX_WHOLE
    calls = trace.calls
    ns = calls["end"] - calls["begin"]
    ranked: list[int] = []
    for phase in np.unique(calls["phase"][shown]).tolist():
        own = shown[calls["phase"][shown] == phase]
        by_time = own[np.argsort(ns[own], kind="stable")]
        ranked += [
            *by_time[-12:][::-1].tolist(),
            *by_time[len(by_time) // 2 :][:4].tolist(),
            *own[:2].tolist(),
        ]
    even = shown[np.unique(np.linspace(0, len(shown) - 1, min(len(shown), 4096)).astype(np.int64))]
    # Halving steps: the first few are spread over everything, later ones fill in between.
    order = np.argsort([_spread(i) for i in range(len(even))], kind="stable")
    ranked += even[order].tolist()
    ranked += shown.tolist()
    kept: dict[int, None] = {}
    for row in ranked:
        cost = int(ops_of[row]) + 40
        if row in kept or cost > room:
            continue
        if sparse and len(kept) >= MAX_SPARSE:
            break
        room -= cost
        kept[row] = None
    return list(kept)


def _spread(i: int) -> float:
    """A number in [0, 1) per index, neighbours far apart: bits reversed."""
    return int(f"{i:016b}"[::-1], 2) / 65536


def _walk(trace: Trace, wanted: set[int], sparse: bool) -> Iterator[tuple[int, Segment, int]]:
    """(row of ``trace.calls``, a segment, row in it) of each wanted call, in order of their rows."""
    calls = trace.calls
    if not sparse:
        first = 0
        for part in trace.parts():
            for call in range(len(part.calls)):
                if first + call in wanted:
                    yield first + call, part, call
            first += len(part.calls)
        return
    for row in sorted(wanted):
        one = calls[row]
        part = trace.window(int(one["begin"]), int(one["begin"]) + 1)
        same = np.flatnonzero(
            (part.calls["begin"] == one["begin"])
            & (part.calls["tid"] == one["tid"])
            & (part.calls["seq"] == one["seq"])
        )
        if len(same):
            yield row, part, int(same[0])


def _squeezed(data: bytes, level: int) -> bytes:
    squeeze = zlib.compressobj(level, zlib.DEFLATED, -15)
    return squeeze.compress(data) + squeeze.flush()


class _Packer:
    """Makes timelines, and packs as many of them into parts as fit."""

    def __init__(self, trace: Trace, drawn: dict[tuple[int, int], int]) -> None:
        self._trace = trace
        self._drawn = drawn
        self._made: dict[int, bytes] = {}
        self._kept: list[int] = []
        self._orders: dict[bytes, int] = {}
        self._order_lists: list[list[int]] = []
        self._lanes = Lanes(trace)
        self._segment: Segment | None = None
        self._runs_of: dict[int, list[int]] = {}

    def add(self, row: int, segment: Segment, call: int) -> None:
        """One timeline: that of a row of ``trace.calls``."""
        if segment is not self._segment:
            self._segment = segment
            self._runs_of = {}
            for run, its in enumerate(segment.runs["call"].tolist()):
                self._runs_of.setdefault(its, []).append(run)
        one = segment.calls[call]
        begin, end = int(one["begin"]), int(one["end"])
        lanes, faults = self._lanes.of(begin, end)
        text = json.dumps({
            "call": row,
            "begin": begin - self._trace.facts.begin_ns,
            "ns": end - begin,
            "graphs": [self._graph(segment, run, begin) for run in self._shown(segment, call)],
            "lanes": lanes,
            "faults": faults,
        }, separators=(",", ":"), ensure_ascii=True)  # fmt: skip
        self._made[row] = _squeezed(text.encode(), 1)

    def keep(self, ranked: Sequence[int]) -> dict[int, int]:
        """Choose, in this order, as many as fit; the number of each row's timeline."""
        ranked = [row for row in ranked if row in self._made]
        room = MAX_PACKED / self._shrinks(ranked)
        kept = []
        for row in ranked:
            room -= len(self._made[row])
            if room < 0:
                break
            kept.append(row)
        self._kept = sorted(kept)
        return {row: number for number, row in enumerate(self._kept)}

    def _shrinks(self, rows: Sequence[int]) -> float:
        """By how much they become smaller (or larger: text for bytes) in parts, by a few of them."""
        some = rows[:: max(1, len(rows) // PER_PART)][:PER_PART]
        alone = sum(len(self._made[row]) for row in some)
        return len(self._part(some)) / alone if alone else 1.0

    def document(self) -> dict[str, Any]:
        """What the page needs to unpack them."""
        starts = range(0, len(self._kept), PER_PART)
        return {
            "per": PER_PART,
            "count": len(self._kept),
            "parts": [self._part(self._kept[at : at + PER_PART]) for at in starts],
            "orders": self._order_lists,
            "threads": self._lanes.threads(),
        }

    def _part(self, rows: Sequence[int]) -> str:
        text = b"[" + b",".join(zlib.decompress(self._made[row], -15) for row in rows) + b"]"
        return base64.b64encode(_squeezed(text, 6)).decode("ascii")

    def _shown(self, segment: Segment, call: int) -> list[int]:
        """The runs with ops of a call; those that compute elsewhere; else its outermost ones."""
        runs = segment.runs
        own = self._runs_of.get(call, [])
        with_ops = [r for r in own if runs["n_ops"][r] > 0]
        parents = {int(runs["parent"][r]) for r in own}
        leaf = [r for r in own if r not in parents and runs["n_ops"][r] == 0]
        return sorted(with_ops + self._apart(segment, leaf, with_ops), key=lambda r: int(runs["begin"][r]))

    @staticmethod
    def _apart(segment: Segment, runs: list[int], with_ops: list[int]) -> list[int]:
        """Of runs without ops, those that are not just another look at a run with ops."""
        begin, end = segment.runs["begin"], segment.runs["end"]

        def within(inner: int, outer: int) -> bool:
            return bool(begin[outer] <= begin[inner] and end[inner] <= end[outer])

        return [r for r in runs if not any(within(o, r) or within(r, o) for o in with_ops)]

    def _graph(self, segment: Segment, run: int, begin: int) -> dict[str, Any]:
        one = segment.runs[run]
        first, count = int(one["first_op"]), int(one["n_ops"])
        ops = segment.ops[first : first + count]
        ns = np.clip(ops["end"] - ops["begin"], 0, None)
        backends = self._trace.facts.backends
        backend = int(one["backend"])
        return {
            "graph": self._drawn.get((int(one["graph"]), int(one["phase"])), -1),
            "backend": backends[backend] if 0 <= backend < len(backends) else "other",
            "at": int(one["begin"]) - begin,
            "ns": int(one["end"] - one["begin"]),
            "setup": int(ops["begin"][0] - one["begin"]) if count else None,
            "order": self._order(ops),
            # Where kernels in between were not seen, the time is nobody's: negative.
            "ops": np.where(ops["timed"], ns, -ns).tolist(),
        }

    def _order(self, ops: npt.NDArray[np.void]) -> int:
        entries = ops["node"].astype(np.int64) + FUSED * ops["fused"]
        key = entries.tobytes()
        number = self._orders.get(key)
        if number is None:
            number = self._orders[key] = len(self._order_lists)
            self._order_lists.append(entries.tolist())
        return number
