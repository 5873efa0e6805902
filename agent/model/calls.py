# SPDX-License-Identifier: Apache-2.0
"""Begin and end events become whole calls, each with the graphs that ran inside it.

Frames can end without a return (longjmp, thread exit, kill) and records can be lost, so
nothing here waits for an end: a thread's next begin closes what it left open (case C21).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

from .records import Flag, Kind, Level, Records, columns

#: Open frames remembered in all: threads beyond that are broken records.
MAX_OPEN = 4096
MAX_GRAPHS_PER_CALL = 4096

_PROCESS_ENCODE = 0  # enum llama_process_type, as CALL_BEGIN carries it in `status`


class _Event(NamedTuple):
    """``struct event``, what is needed of it, in plain numbers and lists of them."""

    ts: int
    begin_ts: int
    tgid: int
    tid: int
    seq: int
    call: int
    parent: int
    kind: int
    level: int
    flags: int
    object: int
    status: int
    hash: int
    n_nodes: int
    n_pos: int
    n_out: int
    batch_tokens: int
    pos: list[int]
    out: list[int]
    hits: int
    accepted: int
    lost: int
    op_faults: int
    sum_slot: int
    tokens: int


@dataclass(slots=True, eq=False)
class GraphRun:
    """One execution of a graph or of a split; times in ns, ``end`` None while it runs.

    ``inner``: graphs that ran inside it, at any depth. ``hits`` .. ``op_faults`` are the
    end event's figures (level CPU). ``slot``: where its ops were added up, None: nowhere;
    ``tokens``: by which the kernel chooses a spare slot.
    """

    seq: int
    tgid: int
    tid: int
    level: int
    object: int
    hash: int
    begin: int
    flags: int
    n_nodes: int
    n_pos: int
    n_out: int
    pos: list[int]
    out: list[int]
    root: GraphRun | None
    end: int | None = None
    end_flags: int = 0
    hits: int = 0
    accepted: int = 0
    lost: int = 0
    op_faults: int = 0
    slot: int | None = None
    tokens: int = 0
    inner: list[GraphRun] = field(default_factory=list)

    @property
    def ns(self) -> int:
        """Duration; 0 for a broken record."""
        return max((self.end or self.begin) - self.begin, 0)


@dataclass(slots=True, eq=False)
class Call:
    """One outermost call, or (``seq`` 0) one graph that ran outside any call.

    ``begin`` None: its begin was not seen. ``status`` None: it never returned.
    ``encode``: llama_encode, itself or inside it.
    """

    seq: int
    tgid: int
    tid: int
    level: int
    object: int
    begin: int | None
    batch_tokens: int
    encode: bool
    end: int = 0
    status: int | None = None
    graphs: list[GraphRun] = field(default_factory=list)

    @property
    def ns(self) -> int:
        """Duration; 0 when the begin is unknown or the record broken."""
        return 0 if self.begin is None else max(self.end - self.begin, 0)


class CallStacks:
    """Open calls and graphs of all threads."""

    def __init__(self) -> None:
        self._calls: OrderedDict[int, Call] = OrderedDict()
        self._call_of: dict[int, int] = {}
        self._graphs: OrderedDict[int, GraphRun] = OrderedDict()
        #: Frames whose end was never seen; ends whose begin was not.
        self.abandoned = 0
        self.unpaired = 0
        #: Graph executions dropped because they ended in an abandoned frame.
        self.dropped: list[GraphRun] = []

    def feed(self, events: Records) -> list[Call]:
        """Calls that ended, in order of their end. Any records in any order are survived."""
        done: list[Call] = []
        if not len(events):
            return done
        for event in map(_Event._make, zip(*columns(events, _Event._fields), strict=True)):
            kind = event.kind
            if not event.seq:
                # Only an end whose begin was not seen has no number.
                self.unpaired += 1
            elif kind == Kind.GRAPH_BEGIN:
                self._graph_begin(event)
            elif kind == Kind.GRAPH_END:
                self._graph_end(event, done)
            elif kind == Kind.CALL_BEGIN:
                self._call_begin(event, done)
            elif kind == Kind.CALL_END:
                self._call_end(event, done)
            elif kind == Kind.CALL_ABANDONED:
                if not event.parent:
                    self._abandon(event.seq, event.ts, done)
            elif kind == Kind.GRAPH_ABANDONED:
                self._graph_lost(event.seq)
        return done

    def sweep(self, dead: set[int], now: int) -> list[Call]:
        """Close what dead threads left open; their calls never returned."""
        done: list[Call] = []
        for seq in [s for s, c in self._calls.items() if c.tid in dead]:
            self._abandon(seq, now, done)
        for seq in [s for s, g in self._graphs.items() if g.tid in dead]:
            self._graph_lost(seq)
        return done

    @property
    def open(self) -> int:
        """How many frames are open."""
        return len(self._calls) + len(self._graphs)

    def summed(self, since_ns: int) -> bool:
        """Whether summed graphs that ended after ``since_ns`` wait for the end of their call."""
        waiting = [root for call in self._calls.values() for root in call.graphs]
        waiting += [graph for graph in self._graphs.values() if graph.inner]
        return any(
            run.slot is not None and (run.end or 0) > since_ns
            for root in waiting
            for run in (root, *root.inner)
        )

    # -- calls -----------------------------------------------------------------

    def _call_begin(self, event: _Event, done: list[Call]) -> None:
        encode = event.level == Level.ENCODE or (
            event.level == Level.PROCESS and event.status == _PROCESS_ENCODE
        )
        if event.parent:
            # Only the outermost counts (case C50), but it did encode then.
            outer = self._calls.get(self._call_of.get(event.tid, 0))
            if outer is not None and encode:
                outer.encode = True
            return
        left = self._call_of.get(event.tid)
        if left is not None:
            self._abandon(left, event.ts, done)
        self._open_call(
            Call(
                event.seq, event.tgid, event.tid, event.level, event.object,
                event.ts, event.batch_tokens, encode,
            )
        )  # fmt: skip
        while len(self._calls) > MAX_OPEN:
            self._abandon(next(iter(self._calls)), event.ts, done)

    def _open_call(self, call: Call) -> None:
        replaced = self._calls.pop(call.seq, None)
        if replaced is not None and self._call_of.get(replaced.tid) == call.seq:
            del self._call_of[replaced.tid]
        self._calls[call.seq] = call
        self._call_of[call.tid] = call.seq

    def _call_end(self, event: _Event, done: list[Call]) -> None:
        if event.flags & Flag.UNPAIRED or not event.begin_ts:
            self.unpaired += 1
            return
        if event.parent:
            return
        call = self._calls.pop(event.seq, None)
        if call is None:
            # The begin record was lost; its end repeats what is needed.
            call = Call(
                event.seq, event.tgid, event.tid, event.level, event.object,
                None, 0, event.level == Level.ENCODE,
            )  # fmt: skip
        if self._call_of.get(call.tid) == call.seq:
            del self._call_of[call.tid]
        call.begin = event.begin_ts if call.begin is None else call.begin
        call.object = call.object or event.object
        call.end = event.ts
        call.status = _int32(event.status)
        done.append(call)

    def _abandon(self, seq: int, now: int, done: list[Call]) -> None:
        call = self._calls.pop(seq, None)
        if call is None:
            return
        if self._call_of.get(call.tid) == seq:
            del self._call_of[call.tid]
        self.abandoned += 1
        call.end = now
        call.status = None
        done.append(call)

    # -- graphs ----------------------------------------------------------------

    def _graph_begin(self, event: _Event) -> None:
        parent = self._graphs.get(event.parent) if event.parent else None
        root = None if parent is None else parent.root or parent
        graph = GraphRun(
            event.seq, event.tgid, event.tid, event.level, event.object,
            event.hash, event.ts, event.flags, event.n_nodes, event.n_pos,
            event.n_out, event.pos, event.out, root,
        )  # fmt: skip
        graph.tokens = event.tokens
        if graph.flags & Flag.SUMMED and event.sum_slot:
            graph.slot = event.sum_slot - 1
        if root is not None and not graph.hash and graph.flags & Flag.SAME:
            graph.hash = parent.hash if parent is not None else 0
        self._graphs.pop(graph.seq, None)
        self._graphs[graph.seq] = graph
        while len(self._graphs) > MAX_OPEN:
            self._graph_lost(next(iter(self._graphs)))

    def _graph_end(self, event: _Event, done: list[Call]) -> None:
        if event.flags & Flag.UNPAIRED:
            self.unpaired += 1
            return
        graph = self._graphs.pop(event.seq, None)
        if graph is None:
            self.unpaired += 1
            return
        graph.end = event.ts
        graph.end_flags = event.flags
        graph.hits, graph.accepted = event.hits, event.accepted
        graph.lost, graph.op_faults = event.lost, event.op_faults
        if graph.root is not None:
            if len(graph.root.inner) < MAX_GRAPHS_PER_CALL:
                graph.root.inner.append(graph)
            else:
                self.dropped.append(graph)
            return
        call = self._enclosing(event, graph)
        if call is None:
            alone = Call(0, graph.tgid, graph.tid, graph.level, graph.object, graph.begin, 0, False)
            alone.end, alone.status = graph.end, 0
            alone.graphs.append(graph)
            done.append(alone)
        elif len(call.graphs) < MAX_GRAPHS_PER_CALL:
            call.graphs.append(graph)
        else:
            self.dropped.append(graph)

    def _enclosing(self, event: _Event, graph: GraphRun) -> Call | None:
        seq = event.call
        if not seq:
            return None
        call = self._calls.get(seq)
        if call is None and graph.tid not in self._call_of:
            # Its begin record was lost: the end will tell the rest.
            call = Call(seq, graph.tgid, graph.tid, 0, 0, None, 0, False)
            self._open_call(call)
        return call

    def _graph_lost(self, seq: int) -> None:
        graph = self._graphs.pop(seq, None)
        if graph is not None:
            self.abandoned += 1
            self.dropped.append(graph)
            self.dropped.extend(graph.inner)


def _int32(value: int) -> int:
    """The engine returns an int: the upper half of the register is whatever was there."""
    low = int(value) & 0xFFFFFFFF
    return low - (1 << 32) if low & (1 << 31) else low
