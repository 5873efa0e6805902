# SPDX-License-Identifier: Apache-2.0
"""A session's calls, graphs and op records, kept one by one instead of only being added up.

A :class:`Collector` listens to a :class:`Session`, so what it has is what the session's sums are
made of: the same phases, the same tokens, the same kernels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .calls import GraphRun
from .graph import Graph
from .graphwork import Mark, placement
from .nodetable import Ints, NodeTable
from .optable import RawSegment, expand, merge_sums, route_experts, sum_ops, without_ops
from .opwork import Execution
from .plancache import Tables
from .records import Flag, Level, Records
from .session import Session, Settled
from .tokens import GraphTokens, Phase
from .totals import CPU
from .trace import CALL, EXPERT, GAP, PHASES, RUN, Counts, GraphInfo, Segment, Table, Trace, TraceFacts

MAX_GRAPHS = 1 << 16
"""Graphs told apart in one trace; executions of further ones have no graph."""
_MAX_BACKENDS = 64
_PHASE_NUMBER = {Phase(name): number for number, name in enumerate(PHASES)}
_MOST = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class Described:
    """A graph that became known: its descriptors as the probe sent them, and what they mean."""

    index: int
    descs: Records
    n_nodes: int
    cut: bool
    graph: Graph
    prices: tuple[Ints, Ints] | None = None


class Collector:
    """Collects from ``session`` until :meth:`take` hands over what there is."""

    def __init__(self, session: Session) -> None:
        self.graphs: list[GraphInfo] = []
        self.backends: list[str] = [CPU]
        #: Op records that were collected and not taken yet.
        self.held_ops = 0
        self._session = session
        self._index: dict[tuple[int, int], int] = {}
        self._described: dict[int, Described] = {}
        self._new()
        session.listeners.append(self.settled)
        session.plans.built = self.built

    def _new(self) -> None:
        self.held_ops = 0
        self._calls: list[tuple[Any, ...]] = []
        self._runs: list[tuple[Any, ...]] = []
        self._order: list[int] = []
        self._orders: dict[bytes, int] = {}
        self._times: list[Table] = []
        self._experts: list[tuple[int, int, int, int]] = []

    @property
    def tables(self) -> Tables:
        """By which the graphs are read."""
        return self._session.plans.tables

    @property
    def held_calls(self) -> int:
        """Calls that were collected and not taken yet."""
        return len(self._calls)

    def take(self) -> RawSegment:
        """What was collected since the last time."""
        times = [t.astype(np.int64) for t in self._times]
        segment = RawSegment(
            np.array(self._calls, CALL),
            np.array(self._runs, RUN),
            np.array(self._order, np.int32),
            tuple(np.frombuffer(words, np.uint32) for words in self._orders),
            np.concatenate([np.zeros(0, np.int64), *times]),
            np.array(self._experts, EXPERT),
        )
        self._new()
        return segment

    def take_described(self) -> list[Described]:
        """Graphs that became known since the last time."""
        taken, self._described = self._described, {}
        return [dataclasses.replace(one, prices=self._prices(one)) for one in taken.values()]

    def _prices(self, one: Described) -> tuple[Ints, Ints] | None:
        """The session works them out for kinds of kernels, which costs a tenth of doing it for each."""
        info = self.graphs[one.index]
        plan = self._session.plans.get(info.tgid, info.hash)
        if plan is None or plan.n != len(one.graph.nodes):
            return None
        return plan.price(np.arange(2 * plan.n))

    # -- what the session tells ----------------------------------------------------

    def built(self, key: tuple[int, int], graph: Graph, descs: Records, n_nodes: int, cut: bool) -> None:
        """The nodes of a graph are known."""
        index = self._graph(*key, n_nodes)
        if index < 0:
            return
        rows = graph.rows if graph.pooled is None else graph.pooled
        self.graphs[index] = GraphInfo(
            key[1], key[0], graph.n_nodes, True, graph.topology, graph.n_tokens, rows, graph.kv_length
        )
        self._described[index] = Described(index, descs, n_nodes, cut, graph)

    def settled(self, done: Settled, phase: Phase, mark: Mark) -> None:
        """A call whose phase is known."""
        call = done.call
        number = len(self._calls)
        begin = call.end if call.begin is None else min(call.begin, call.end)
        tokens = [t.tokens for t in done.tokens]
        rows = [t.rows for t in done.tokens]
        runs = [run for t in done.tokens for run in t.runs or ()]
        self._calls.append((
            _time(begin), _time(call.end), _number(call.tid), call.seq & 0xFFFFFFFF, done.context,
            _number(call.status or 0), _number(sum(tokens)), _sum(rows),
            _number(runs[0].start) if runs else -1, _PHASE_NUMBER[phase], call.status is not None,
            call.begin is not None, mark.warmup,
        ))  # fmt: skip
        for root, its in zip(call.graphs, done.tokens, strict=False):
            self._root(root, its, done.work, number, Phase.OTHER if its.k_shift else phase, mark)

    def _root(
        self, root: GraphRun, tokens: GraphTokens, work: Mapping[int, Execution], call: int, phase: Phase,
        mark: Mark,
    ) -> None:  # fmt: skip
        away, name = placement(root, self._session.work.backend)
        names = {id(run): self._session.work.backend(run.object) for run in away}
        first = len(self._runs)
        for run in (root, *sorted(root.inner, key=lambda run: (run.begin, run.level))):
            backend = CPU if run.level == Level.CPU else names.get(id(run), name)
            execution = work.get(run.seq)
            hits = None if execution is None else execution.hits
            count = 0 if hits is None else len(hits)
            self._runs.append((
                _time(run.begin), _time(run.end or run.begin), 0, count, run.seq & 0xFFFFFFFF, call,
                -1 if run is root else first, self._graph(run.tgid, run.hash, run.n_nodes), _number(run.tid),
                _number(tokens.tokens), _sum([tokens.rows]), _number(run.lost), self._backend(backend),
                _PHASE_NUMBER[phase], run.level & 0xFF, bool(run.flags & Flag.TRACED),
                execution is not None and execution.partial, mark.failed, mark.warmup,
            ))  # fmt: skip
            self._hits(hits)
            for node, distinct in () if execution is None else execution.experts.items():
                where = len(self._runs) - 1
                self._experts.append((_time(run.begin), where, _number(node), _number(distinct)))

    def _hits(self, hits: Records | None) -> None:
        if hits is None or not len(hits):
            self._order.append(-1)
            return
        self._order.append(self._orders.setdefault(hits["node"].tobytes(), len(self._orders)))
        # A copy: the slice would keep the whole drained array alive.
        self._times.append(hits["ts"].copy())
        self.held_ops += len(hits)

    def _graph(self, tgid: int, hash: int, n_nodes: int) -> int:
        if not hash:
            return -1
        index = self._index.get((tgid, hash))
        if index is None:
            if len(self.graphs) >= MAX_GRAPHS:
                return -1
            index = self._index[tgid, hash] = len(self.graphs)
            self.graphs.append(GraphInfo(hash, tgid, n_nodes))
        return index

    def _backend(self, name: str) -> int:
        if name not in self.backends:
            if len(self.backends) >= _MAX_BACKENDS:
                return -1
            self.backends.append(name)
        return self.backends.index(name)


class MemorySource:
    """A trace's tables in memory: what a collector has, graphs included."""

    def __init__(self, collector: Collector, records: Mapping[str, npt.NDArray[Any]] | None = None) -> None:
        described = collector.take_described()
        self._graphs = {one.index: one.graph for one in described}
        self._nodes = {one.index: NodeTable.of(one.graph, one.prices) for one in described}
        self._raw = collector.take()
        self._records = dict(records or {})

    def segments(self, begin_ns: int | None, end_ns: int | None, *, ops: bool) -> Iterator[Segment]:
        """See :class:`profinferd.agent.model.trace.Source`."""
        yield expand(self._raw, self.nodes) if ops else without_ops(self._raw)

    def counts(self) -> Counts:
        """How much there is."""
        return Counts(len(self._raw.calls), len(self._raw.runs), len(self._raw.times))

    def sums(self) -> Table:
        """All ops added up."""
        return merge_sums([sum_ops(expand(self._raw, self.nodes))])

    def routes(self) -> Table:
        """Experts that were used."""
        return route_experts(expand(self._raw, self.nodes))

    def graph(self, index: int) -> Graph | None:
        """The nodes of a graph, where they were described."""
        return self._graphs.get(index)

    def nodes(self, index: int) -> NodeTable | None:
        """The same as columns."""
        return self._nodes.get(index)

    def kinds(self) -> Mapping[str, int]:
        """Other kinds of records."""
        return {kind: len(rows) for kind, rows in self._records.items()}

    def records(self, kind: str, begin_ns: int | None, end_ns: int | None) -> npt.NDArray[Any]:
        """Those of one kind and time."""
        rows = self._records.get(kind)
        return np.zeros(0, np.dtype([])) if rows is None else between(rows, begin_ns, end_ns)


def between(rows: npt.NDArray[Any], begin_ns: int | None, end_ns: int | None) -> npt.NDArray[Any]:
    """Records with begin_ns <= ts < end_ns."""
    kept = np.ones(len(rows), np.bool_)
    if begin_ns is not None:
        kept &= rows["ts"] >= begin_ns
    if end_ns is not None:
        kept &= rows["ts"] < end_ns
    return rows if bool(kept.all()) else rows[kept]


def trace_of(
    collector: Collector, facts: TraceFacts, session: Session, now_ns: int,
    *, stats: Mapping[str, float] | None = None, gaps: Sequence[tuple[int, int, int, str]] = (),
    records: Mapping[str, npt.NDArray[Any]] | None = None,
) -> Trace:  # fmt: skip
    """A trace in memory of what a session was fed with, graphs and backends filled in."""
    snapshot = session.snapshot(now_ns, stats)
    source = MemorySource(collector, records)
    whole = dataclasses.replace(
        facts, graphs=tuple(collector.graphs), backends=tuple(collector.backends),
        losses=dict(snapshot.lost.by_kind),
    )  # fmt: skip
    return Trace(whole, snapshot, np.array(list(gaps), GAP), source)


def _time(ns: int) -> int:
    return min(max(ns, 0), (1 << 62) - 1)


def _number(value: int) -> int:
    """A record's number in 32 bits: what does not fit was broken anyway."""
    return min(max(value, -_MOST - 1), _MOST)


def _sum(values: Sequence[int | None]) -> int:
    known = [value for value in values if value is not None]
    return _number(sum(known)) if len(known) == len(values) else -1
