# SPDX-License-Identifier: Apache-2.0
"""What was seen of a target, call by call and op by op: what reports and exports are made from.

A :class:`Trace` is the same whether it comes from a recording or was made in memory. The tables
``calls`` and ``runs`` are numpy structured arrays (fields below); ops can be many, so that whole
traces are read in parts (:meth:`Trace.parts`) or by their sums (:attr:`Trace.sums`), and a stretch
of time with everything in it by :meth:`Trace.window`.

Times are ns of the records' clock (CLOCK_MONOTONIC); :attr:`TraceFacts.clocks` relates it to
others. -1 in a count or an index means absent: not known, or no such thing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from .nodetable import NodeTable
from .peaks import ABSENT, Peaks
from .plancache import Tables
from .snapshot import Snapshot, Target
from .tensors import Graph
from .tokens import Phase

Table = npt.NDArray[np.void]

PHASES: tuple[str, ...] = tuple(phase.value for phase in Phase)
"""Names of the numbers in fields "phase"."""

CALL = np.dtype(
    [
        ("begin", "<i8"),
        ("end", "<i8"),
        ("tid", "<i4"),
        ("seq", "<u4"),  # of the kernel side; 0: a graph that ran outside any call
        ("context", "<i4"),  # number of the engine's context, from 1 on
        ("status", "<i4"),  # what the function returned
        ("tokens", "<i4"),  # processed, all sequences together
        ("rows", "<i4"),  # output rows
        ("position", "<i4"),  # of the first token, in its sequence
        ("phase", "u1"),
        ("returned", "?"),  # False: left by longjmp or by the end of its thread
        ("begun", "?"),  # False: its begin was not seen, and `begin` is its end
        ("warmup", "?"),
    ]
)
"""One outermost call of the engine, in the order in which they were understood (nearly: ended)."""

RUN = np.dtype(
    [
        ("begin", "<i8"),
        ("end", "<i8"),
        ("first_op", "<i8"),  # its ops are ops[first_op : first_op + n_ops] of the same trace
        ("n_ops", "<i4"),
        ("seq", "<u4"),
        ("call", "<i4"),  # row of `calls`
        ("parent", "<i4"),  # row of `runs`: the outermost graph around it; -1: it is that itself
        ("graph", "<i4"),  # index of a graph; -1: it was never described
        ("tid", "<i4"),
        ("tokens", "<i4"),  # those of the outermost graph
        ("rows", "<i4"),
        ("lost", "<i4"),  # records of ops that found no room
        ("backend", "<i2"),  # index into TraceFacts.backends
        ("phase", "u1"),
        ("level", "u1"),  # enum event_level: 8 scheduler, 9 backend, 10 CPU (ops run inside)
        ("traced", "?"),  # its ops were to be recorded
        ("partial", "?"),  # ... and some are missing for a known reason
        ("failed", "?"),  # its call failed
        ("warmup", "?"),
    ]
)
"""One execution of a graph or of a part of one."""

OP = np.dtype(
    [
        ("begin", "<i8"),
        ("end", "<i8"),  # entry of the next kernel, or end of the graph (design D4)
        ("run", "<i4"),  # row of `runs`
        ("node", "<i4"),  # index into the nodes of the run's graph
        ("fused", "?"),  # this node and the next ran as one kernel
        ("timed", "?"),  # False: a kernel between this and the next was not seen; the time is shared
    ]
)
"""One kernel, on thread 0 of its graph: barrier included, so this is the critical path."""

SUM = np.dtype(
    [
        ("graph", "<i4"),
        ("node", "<i4"),
        ("phase", "u1"),
        ("fused", "?"),
        ("calls", "<i8"),  # kernels whose own time is known
        ("ns", "<i8"),  # ... their time together,
        ("min", "<i8"),  # ... the shortest
        ("max", "<i8"),  # ... and the longest
        ("untimed", "<i8"),  # kernels that ran besides
    ]
)
"""All ops of one node in one phase."""

GAP = np.dtype([("begin", "<i8"), ("end", "<i8"), ("count", "<i8"), ("kind", "<U24")])
"""Records that were lost: how many of which kind, at some time between ``begin`` and ``end``."""

EXPERT = np.dtype([("ts", "<i8"), ("run", "<i4"), ("node", "<i4"), ("distinct", "<i4")])
"""Distinct experts that one MUL_MAT_ID used."""


ROUTE = np.dtype(
    [
        ("graph", "<i4"),
        ("node", "<i4"),
        ("distinct", "<i4"),  # so many distinct experts were used
        ("phase", "u1"),
        ("timed", "?"),  # whether the kernel's own time is known (it is in SUM.calls then)
        ("count", "<i8"),  # ... by so many executions
    ]
)
"""All MUL_MAT_ID of one node in one phase that used the same number of distinct experts."""


@dataclass(frozen=True, slots=True)
class Clock:
    """One moment on several clocks, in ns. ``boottime`` goes on while the machine sleeps."""

    monotonic: int
    boottime: int
    realtime: int


@dataclass(frozen=True, slots=True)
class Machine:
    """Where it was recorded. ``cpus`` that the target could use; ``memory`` in bytes."""

    host: str = ""
    kernel: str = ""
    arch: str = ""
    cpu: str | None = None
    cpus: int | None = None
    memory: int | None = None
    page: int = 4096


@dataclass(frozen=True, slots=True)
class Child:
    """The program that was started to be recorded: its file name, and how it ended.

    Exactly one of ``exit_code`` and ``signal`` is set; neither while it runs.
    """

    program: str
    exit_code: int | None = None
    signal: int | None = None


@dataclass(frozen=True, slots=True)
class GraphInfo:
    """One graph (or part of one) that ran: its figures, without its nodes.

    ``known`` False: its descriptors never came, and ``n_nodes`` is what the probe counted.
    """

    hash: int
    tgid: int
    n_nodes: int
    known: bool = False
    topology: str | None = None
    tokens: int | None = None
    rows: int | None = None
    kv_length: int | None = None


@dataclass(frozen=True, slots=True)
class TraceFacts:
    """What is said once of a whole trace. ``begin_ns`` .. ``end_ns``: while probes were armed.

    ``backends`` are named by the number in ``RUN.backend``. ``tables``: the engine's own names.
    ``ops``: all (a record per kernel), sampled or off. ``finished`` False: the recorder was
    killed, and the last seconds may be missing. ``created``: seconds since 1970.
    """

    target: Target
    begin_ns: int
    end_ns: int
    machine: Machine = Machine()
    clocks: tuple[Clock, ...] = ()
    peaks: Peaks = ABSENT
    tables: Tables = field(default_factory=lambda: Tables((), None))
    layout: Mapping[str, int | str | None] = field(default_factory=dict)
    backends: tuple[str, ...] = ()
    graphs: tuple[GraphInfo, ...] = ()
    losses: Mapping[str, int] = field(default_factory=dict)
    child: Child | None = None
    ops: str = "all"
    created: float = 0.0
    version: str = ""
    finished: bool = True
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Segment:
    """Some calls with all that ran inside them. Indices (RUN.call, .parent, .first_op, OP.run)
    are within the segment; ``ops`` and ``experts`` are empty where they were not asked for."""

    calls: Table
    runs: Table
    ops: Table
    experts: Table


@dataclass(frozen=True, slots=True)
class Counts:
    """How much there is: calls, executions of graphs, op records."""

    calls: int
    runs: int
    ops: int


class Source(Protocol):
    """Where a trace's tables come from: memory, or a recording."""

    def segments(self, begin_ns: int | None, end_ns: int | None, *, ops: bool) -> Iterator[Segment]:
        """Segments with something in [begin_ns, end_ns), in order; ``ops``: with ops and experts."""
        ...

    def counts(self) -> Counts:
        """How much there is, without reading it."""
        ...

    def sums(self) -> Table:
        """A SUM table over everything."""
        ...

    def routes(self) -> Table:
        """A ROUTE table over everything."""
        ...

    def graph(self, index: int) -> Graph | None:
        """The nodes of a graph; None when they are not known."""
        ...

    def nodes(self, index: int) -> NodeTable | None:
        """What is needed of the nodes to add up, without building the graph."""
        ...

    def kinds(self) -> Mapping[str, int]:
        """Other kinds of records -> how many."""
        ...

    def records(self, kind: str, begin_ns: int | None, end_ns: int | None) -> npt.NDArray[Any]:
        """All records of one kind with begin_ns <= ts < end_ns."""
        ...


class Trace:
    """One recorded stretch of one target's life. Tables are read when first asked for."""

    def __init__(self, facts: TraceFacts, snapshot: Snapshot, gaps: Table, source: Source) -> None:
        self.facts = facts
        self.snapshot = snapshot
        """The figures as ``attach --format json`` would have said them at the end."""
        self.gaps = gaps
        self._source = source
        self._whole: Segment | None = None
        self._with_ops: Segment | None = None
        self._sums: Table | None = None
        self._routes: Table | None = None

    @property
    def calls(self) -> Table:
        """All calls (CALL)."""
        return self._tables().calls

    @property
    def runs(self) -> Table:
        """All executions of graphs (RUN)."""
        return self._tables().runs

    @property
    def ops(self) -> Table:
        """All ops (OP), run by run: 32 bytes each, so rather a :meth:`window` of a long trace."""
        return self._all().ops

    @property
    def experts(self) -> Table:
        """All numbers of distinct experts (EXPERT)."""
        return self._all().experts

    @property
    def sums(self) -> Table:
        """All ops added up by graph, phase and node (SUM); needs no reading of ops."""
        if self._sums is None:
            self._sums = self._source.sums()
        return self._sums

    @property
    def routes(self) -> Table:
        """How many distinct experts were used how often (ROUTE); needs no reading of ops."""
        if self._routes is None:
            self._routes = self._source.routes()
        return self._routes

    @property
    def counts(self) -> Counts:
        """How much there is; reads none of it."""
        return self._source.counts()

    @property
    def kinds(self) -> Mapping[str, int]:
        """Other kinds of records (scheduler spans, faults, counters, …) and how many there are."""
        return self._source.kinds()

    def records(self, kind: str, begin_ns: int | None = None, end_ns: int | None = None) -> npt.NDArray[Any]:
        """Records of another kind (field "ts" is when), of all time or of [begin_ns, end_ns).

        A kind that was not recorded is an empty array without fields.
        """
        return self._source.records(kind, begin_ns, end_ns)

    def graph(self, index: int) -> Graph | None:
        """A graph with its nodes; None when they are not known. Big: not to be kept in numbers."""
        return self._source.graph(index) if index >= 0 else None

    def nodes(self, index: int) -> NodeTable | None:
        """The nodes of a graph as columns: names, roles, layers, costs."""
        return self._source.nodes(index) if index >= 0 else None

    def parts(self) -> Iterator[Segment]:
        """Everything with its ops, some seconds at a time; indices are within each part."""
        return self._source.segments(None, None, ops=True)

    def window(self, begin_ns: int, end_ns: int) -> Segment:
        """The calls that touch [begin_ns, end_ns), whole, with all that ran inside them."""
        parts = self._source.segments(begin_ns, end_ns, ops=True)
        return join([_touching(part, begin_ns, end_ns) for part in parts])

    def _tables(self) -> Segment:
        if self._with_ops is not None:
            return self._with_ops
        if self._whole is None:
            self._whole = join(list(self._source.segments(None, None, ops=False)))
        return self._whole

    def _all(self) -> Segment:
        if self._with_ops is None:
            self._with_ops = join(list(self.parts()))
        return self._with_ops


def empty_segment() -> Segment:
    """Nothing."""
    return Segment(np.zeros(0, CALL), np.zeros(0, RUN), np.zeros(0, OP), np.zeros(0, EXPERT))


def join(segments: list[Segment]) -> Segment:
    """Several segments as one, their indices moved."""
    if not segments:
        return empty_segment()
    if len(segments) == 1:
        return segments[0]
    calls = np.concatenate([s.calls for s in segments])
    runs = np.concatenate([s.runs for s in segments])
    ops = np.concatenate([s.ops for s in segments])
    experts = np.concatenate([s.experts for s in segments])
    call_at = run_at = op_at = expert_at = first_op = 0
    for s in segments:
        own = runs[run_at : run_at + len(s.runs)]
        own["call"] += call_at
        own["parent"][own["parent"] >= 0] += run_at
        own["first_op"] += first_op
        ops["run"][op_at : op_at + len(s.ops)] += run_at
        experts["run"][expert_at : expert_at + len(s.experts)] += run_at
        call_at, run_at = call_at + len(s.calls), run_at + len(s.runs)
        op_at, expert_at = op_at + len(s.ops), expert_at + len(s.experts)
        first_op += int(s.runs["n_ops"].sum(dtype=np.int64))
    return Segment(calls, runs, ops, experts)


def _touching(s: Segment, begin_ns: int, end_ns: int) -> Segment:
    """Of a segment, the calls that touch a stretch of time."""
    kept = (s.calls["begin"] < end_ns) & (s.calls["end"] >= begin_ns)
    if bool(kept.all()):
        return s
    return select(s, kept)


def select(s: Segment, kept: npt.NDArray[np.bool_]) -> Segment:
    """Some calls (a mask) of a segment, with all that ran inside them."""
    new_call = np.cumsum(kept) - 1
    run_kept = kept[s.runs["call"]]
    new_run = np.cumsum(run_kept) - 1
    op_kept = run_kept[s.ops["run"]] if len(s.ops) else np.zeros(0, np.bool_)
    expert_kept = run_kept[s.experts["run"]] if len(s.experts) else np.zeros(0, np.bool_)
    calls, runs = s.calls[kept], s.runs[run_kept]
    ops, experts = s.ops[op_kept], s.experts[expert_kept]
    runs["call"] = new_call[runs["call"]]
    inner = runs["parent"] >= 0
    runs["parent"][inner] = new_run[runs["parent"][inner]]
    runs["first_op"] = np.cumsum(runs["n_ops"], dtype=np.int64) - runs["n_ops"]
    ops["run"] = new_run[ops["run"]]
    experts["run"] = new_run[experts["run"]]
    return Segment(calls, runs, ops, experts)
