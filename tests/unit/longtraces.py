# SPDX-License-Identifier: Apache-2.0
"""Long traces of one decoder, made with numpy: for speed, and for comparing two of them.

Every execution is one decode of one token: the scheduler's graph, a split on the backend, and
the CPU's graph with its kernels. Times of kernels are given, or drawn by the caller.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from profinferd.agent.model.nodetable import NodeTable
from profinferd.agent.model.optable import merge_routes, merge_sums, route_experts, sum_ops
from profinferd.agent.model.plancache import Tables
from profinferd.agent.model.tensors import Graph
from profinferd.agent.model.trace import (
    CALL,
    EXPERT,
    GAP,
    OP,
    PHASES,
    RUN,
    Clock,
    Counts,
    GraphInfo,
    Machine,
    Segment,
    Trace,
    TraceFacts,
    join,
)  # fmt: skip

from . import streams
from .graphs import GLU, OPS, TYPES, UNARY, decoder

START = 1_000_000_000_000
DECODE = PHASES.index("decode")
_SETUP, _EDGE, _BETWEEN = 500, 1000, 200_000


def kernels(graph: Graph, *, fuse: bool = True) -> list[tuple[int, bool]]:
    """(node, fused) in the order in which the CPU backend runs them."""
    out = []
    node = 0
    while node < len(graph.nodes):
        if not graph.expected[node]:
            node += 1
            continue
        after = graph.nodes[node + 1] if node + 1 < len(graph.nodes) else None
        fused = (
            fuse and graph.nodes[node].op == "RMS_NORM" and after is not None and after.op == "MUL"
            and any(source.node == node for source in after.sources)
        )  # fmt: skip
        out.append((node, fused))
        node += 2 if fused else 1
    return out


class Memory:
    """Segments and graphs as a :class:`profinferd.agent.model.trace.Source`."""

    def __init__(
        self,
        segments: Sequence[Segment],
        graphs: Sequence[Graph],
        records: Mapping[str, npt.NDArray[Any]] | None = None,
    ) -> None:
        self._segments, self._graphs = list(segments), list(graphs)
        self._nodes = [NodeTable.of(graph) for graph in graphs]
        self._records = dict(records or {})

    def segments(self, begin_ns: int | None, end_ns: int | None, *, ops: bool) -> Iterator[Segment]:
        for s in self._segments:
            late = begin_ns is not None and s.calls["end"].max(initial=0) < begin_ns
            early = end_ns is not None and s.calls["begin"].min(initial=1 << 62) >= end_ns
            if not late and not early:
                yield s

    def counts(self) -> Counts:
        parts = self._segments
        return Counts(*(sum(len(getattr(p, name)) for p in parts) for name in ("calls", "runs", "ops")))

    def sums(self) -> npt.NDArray[np.void]:
        return merge_sums([sum_ops(s) for s in self._segments])

    def routes(self) -> npt.NDArray[np.void]:
        return merge_routes([route_experts(s) for s in self._segments])

    def graph(self, index: int) -> Graph | None:
        return self._graphs[index]

    def nodes(self, index: int) -> NodeTable | None:
        return self._nodes[index]

    def kinds(self) -> Mapping[str, int]:
        return {kind: len(rows) for kind, rows in self._records.items()}

    def records(self, kind: str, begin_ns: int | None, end_ns: int | None) -> npt.NDArray[Any]:
        rows = self._records.get(kind, np.zeros(0))
        if begin_ns is not None and end_ns is not None and len(rows):
            rows = rows[(rows["ts"] >= begin_ns) & (rows["ts"] < end_ns)]
        return rows


def segment(
    ns: npt.NDArray[np.int64], order: Sequence[tuple[int, bool]], *, start: int = START, graph: int = 0,
    position: int = 0, tid: int = 100, seq: int = 1,
) -> Segment:  # fmt: skip
    """Executions one after another: ``ns[i, k]`` is how long kernel ``k`` took in execution ``i``."""
    count, width = ns.shape
    length = ns.sum(axis=1) + _SETUP
    begin = start + np.concatenate([[0], np.cumsum(length + 2 * _EDGE + _BETWEEN)[:-1]])
    calls, runs, ops = np.zeros(count, CALL), np.zeros(3 * count, RUN), np.zeros(ns.size, OP)
    number = np.arange(count)
    calls["begin"], calls["end"], calls["tid"] = begin, begin + length + 2 * _EDGE, tid
    calls["seq"], calls["position"] = seq + 4 * number, position + number
    calls["tokens"] = calls["rows"] = calls["context"] = 1
    calls["phase"], calls["returned"], calls["begun"] = DECODE, True, True
    for level in range(3):
        its = runs[level::3]
        its["begin"], its["end"] = begin + _EDGE, begin + _EDGE + length
        its["seq"], its["call"], its["level"] = calls["seq"] + 1 + level, number, 8 + level
        its["parent"] = 3 * number if level else -1
        its["graph"], its["tid"], its["tokens"], its["rows"], its["phase"] = graph, tid, 1, 1, DECODE
    runs["first_op"] = np.repeat(width * number, 3)
    runs["first_op"][2::3], runs["n_ops"][2::3], runs["traced"][2::3] = width * number, width, True
    ends = (begin + _EDGE + _SETUP)[:, None] + np.cumsum(ns, axis=1)
    ops["begin"], ops["end"] = (ends - ns).ravel(), ends.ravel()
    ops["run"] = np.repeat(3 * number + 2, width)
    nodes, fused = zip(*order, strict=True)
    ops["node"], ops["fused"], ops["timed"] = np.tile(nodes, count), np.tile(fused, count), True
    return Segment(calls, runs, ops, np.zeros(0, EXPERT))


def trace(
    segments: Sequence[Segment],
    graphs: Sequence[Graph],
    *,
    gaps: Sequence[tuple[int, int, int, str]] = (),
    records: Mapping[str, npt.NDArray[Any]] | None = None,
    backends: tuple[str, ...] = ("CPU",),
) -> Trace:
    """A trace of these segments, in order of time."""
    session = streams.session()
    last = int(segments[-1].calls["end"][-1])
    facts = TraceFacts(
        session.target.target, START, last, Machine("board", "6.18.0", "x86_64", "Test CPU", 2, 8 << 30),
        (Clock(START, START + 5, 1_700_000_000_000_000_000),), tables=Tables(OPS, TYPES, UNARY, GLU),
        backends=backends,
        graphs=tuple(
            GraphInfo(11 + i, 100, len(g.nodes), True, g.topology, g.n_tokens, g.rows, g.kv_length)
            for i, g in enumerate(graphs)
        ),
        created=1_700_000_000.0, version="test",
    )  # fmt: skip
    return Trace(facts, session.snapshot(last), np.array(list(gaps), GAP), Memory(segments, graphs, records))


def long(executions: int, layers: int = 24, *, parts: int = 4, ns: int = 42_000) -> Trace:
    """As much as a minute of decoding: every kernel takes ``ns``; read in ``parts``."""
    graph = decoder(1, 1, 256, layers=layers).graph()
    order = kernels(graph)
    made: list[Segment] = []
    start, position = START, 0
    for part in range(parts):
        count = executions // parts
        times = np.full((count, len(order)), ns, dtype=np.int64)
        made.append(segment(times, order, start=start, position=position, seq=1 + 4 * part * count))
        start, position = int(made[-1].calls["end"][-1]) + _BETWEEN, position + count
    return trace(made, [graph])


__all__ = ["DECODE", "START", "Memory", "join", "kernels", "long", "segment", "trace"]
