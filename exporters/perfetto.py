# SPDX-License-Identifier: Apache-2.0
"""A trace for Perfetto (ui.perfetto.dev): calls, graphs and kernels as slices of their threads.

Kernels are written by templates (see :mod:`.wire`): the packets of a graph are laid out once
for each order of kernels, and every execution fills in its times and the numbers of its flows.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from os.path import basename
from typing import Any

import numpy as np
import numpy.typing as npt

from ..agent.errors import UsageError
from ..agent.model.dataflow import dataflow
from ..agent.model.trace import PHASES, Segment, Trace
from . import Choice
from . import perfetto_packets as packets
from .nesting import lanes
from .perfetto_records import record_packets
from .text import clean
from .wire import Message, Template

_MAX_TEMPLATES = 64
_FLOW_BITS = 20  # flows of one execution; more edges than that are not drawn
_LEVELS = {8: "graph", 9: "split", 10: "split"}
_INSIDE = 9, 10


class PerfettoExporter:
    """Implements :class:`profinferd.exporters.TraceExporter`."""

    def files(self, trace: Trace, choice: Choice) -> Iterator[tuple[str, Iterable[bytes]]]:
        """One file. UsageError for a trace without times: there is no timeline to draw."""
        if not choice.times:
            raise UsageError("a Perfetto trace is a timeline", "leave --no-times out")
        yield "", _Writer(trace, choice).pieces()


@dataclass(frozen=True, slots=True)
class _Block:
    """The packets of all kernels of one execution order."""

    template: Template
    flows: npt.NDArray[np.uint64]


class Tracks:
    """Numbers of tracks; a track is described when it is first used."""

    def __init__(self, trace: Trace, choice: Choice) -> None:
        self.pid = trace.facts.target.pid
        self.process = 1
        program = "" if choice.anonymise else basename(trace.facts.target.exe)
        self._program = clean(program) or "target"
        self._threads: dict[tuple[int, int], int] = {}
        self._named: dict[tuple[int, str], int] = {}
        self._next = 2
        self._new = [packets.process_track(self.process, self.pid, self._program)]

    def thread(self, tid: int, lane: int = 0) -> int:
        """The track of a thread; ``lane`` > 0: one for slices that do not nest with its others."""
        known = self._threads.get((tid, lane))
        if known is not None:
            return known
        if lane:
            parent = self.thread(tid)
            return self._add((tid, lane), lambda n: packets.plain_track(n, parent, f"overlapping {lane}"))
        name = self._program if tid == self.pid else f"thread {tid}"
        return self._add((tid, 0), lambda n: packets.thread_track(n, self.process, self.pid, tid, name))

    def _add(self, key: tuple[int, int], describe: Any) -> int:
        number = self._threads[key] = self._next
        self._next += 1
        self._new.append(describe(number))
        return number

    def named(self, name: str, *, parent: int | None = None, unit: str | None = None) -> int:
        """A track of this name under the process or ``parent``; with ``unit``, a counter's."""
        above = self.process if parent is None else parent
        known = self._named.get((above, name))
        if known is None:
            known = self._named[above, name] = self._next
            self._next += 1
            self._new.append(
                packets.plain_track(known, above, name)
                if unit is None
                else packets.counter_track(known, above, name, unit)
            )
        return known

    def take(self) -> bytes:
        """Descriptors of the tracks that are new."""
        out = b"".join(self._new)
        self._new.clear()
        return out


class _Writer:
    def __init__(self, trace: Trace, choice: Choice) -> None:
        self._trace, self._choice = trace, choice
        self._names = packets.Names()
        self._tracks = Tracks(trace, choice)
        self._blocks: OrderedDict[tuple[int, int, bytes], _Block] = OrderedDict()
        self._executions = 0

    def pieces(self) -> Iterator[bytes]:
        yield packets.first_packet()
        for clock in self._trace.facts.clocks:
            moments = {
                packets.MONOTONIC: clock.monotonic,
                packets.BOOTTIME: clock.boottime,
                packets.REALTIME: clock.realtime,
            }
            yield packets.clock_packet(moments)
        if not self._trace.facts.clocks:
            yield packets.clock_packet({packets.MONOTONIC: self._trace.facts.begin_ns})
        for segment in self._choice.segments(self._trace):
            yield from self._segment(segment)
        for piece in record_packets(self._trace, self._choice, self._names, self._tracks):
            yield self._described(piece)

    def _described(self, piece: bytes) -> bytes:
        """``piece`` after whatever it refers to for the first time."""
        return self._tracks.take() + self._names.take() + piece

    def _segment(self, s: Segment) -> Iterator[bytes]:
        items = _items(s)
        if not len(items):
            return
        for tid in np.unique(items["tid"]).tolist():
            own = items[items["tid"] == tid]
            own = own[np.lexsort((own["depth"], -own["end"], own["begin"]))]
            lane = lanes(own["begin"], own["end"])
            for number in range(int(lane.max()) + 1):
                yield from self._lane(s, own[lane == number], self._tracks.thread(tid, number))

    def _lane(self, s: Segment, items: npt.NDArray[np.void], track: int) -> Iterator[bytes]:
        """Items that nest, in the order of their beginnings."""
        end_event = packets.event(packets.END, track, self._names)
        open_until: list[int] = []
        out: list[bytes] = []
        for begin, end, row, depth, shown in items[["begin", "end", "row", "depth", "shown"]].tolist():
            while open_until and open_until[-1] <= begin:
                out.append(packets.at(open_until.pop(), end_event))
            if shown:
                what = self._call(s, row, track) if depth == 0 else self._run(s, row, track)
                out.append(packets.at(begin, what))
                open_until.append(end)
            if depth and s.runs["n_ops"][row]:
                out.append(self._ops(s, row, track))
            if len(out) >= 256:
                yield self._described(b"".join(out))
                out.clear()
        while open_until:
            out.append(packets.at(open_until.pop(), end_event))
        yield self._described(b"".join(out))

    def _call(self, s: Segment, row: int, track: int) -> Message:
        call = s.calls[row]
        phase = PHASES[int(call["phase"])]
        notes: dict[str, packets.Value] = {
            "tokens": _known(call["tokens"]), "rows": _known(call["rows"]),
            "position": _known(call["position"]), "context": _known(call["context"]),
            "status": int(call["status"]) if call["returned"] else None,
            "left without a return": None if call["returned"] else True,
            "begin not seen": None if call["begun"] else True,
            "warm-up": True if call["warmup"] else None,
        }  # fmt: skip
        return packets.event(packets.BEGIN, track, self._names, name=phase, category="token", notes=notes)

    def _run(self, s: Segment, row: int, track: int) -> Message:
        run = s.runs[row]
        facts = self._trace.facts
        graph = facts.graphs[run["graph"]] if run["graph"] >= 0 else None
        backend = facts.backends[run["backend"]] if 0 <= run["backend"] < len(facts.backends) else None
        level = _LEVELS.get(int(run["level"]), "graph")
        name = level if level == "graph" or backend is None else f"{level} {backend}"
        notes: dict[str, packets.Value] = {
            "graph": _known(run["graph"]),
            "hash": None if graph is None else f"{graph.hash:016x}",
            "topology": None if graph is None else graph.topology,
            "nodes": None if graph is None else graph.n_nodes,
            "KV length": None if graph is None else graph.kv_length,
            "backend": backend,
            "kernels": int(run["n_ops"]) or None,
            "kernels lost": int(run["lost"]) if run["lost"] > 0 else None,
            "call failed": True if run["failed"] else None,
        }
        return packets.event(packets.BEGIN, track, self._names, name=name, category="graph", notes=notes)

    def _ops(self, s: Segment, row: int, track: int) -> bytes:
        run = s.runs[row]
        first = int(run["first_op"])
        ops = s.ops[first : first + int(run["n_ops"])]
        begin, end = ops["begin"], ops["end"]
        if bool((end < begin).any() or (begin[1:] < end[:-1]).any()) or end[-1] > run["end"] or (
            begin[0] < run["begin"]
        ):  # fmt: skip
            ops = _straightened(ops, int(run["begin"]), int(run["end"]))
            begin, end = ops["begin"], ops["end"]
        block = self._block(int(run["graph"]), ops, track)
        times = np.empty(2 * len(ops), dtype=np.int64)
        times[::2], times[1::2] = begin, end
        self._executions += 1
        return block.template.fill(times, block.flows + np.uint64(self._executions << _FLOW_BITS))

    def _block(self, graph: int, ops: npt.NDArray[np.void], track: int) -> _Block:
        key = graph, track, ops["node"].tobytes() + ops["fused"].tobytes() + ops["timed"].tobytes()
        found = self._blocks.get(key)
        if found is None:
            found = self._blocks[key] = self._lay_out(graph, ops, track)
            if len(self._blocks) > _MAX_TEMPLATES:
                self._blocks.popitem(last=False)
        else:
            self._blocks.move_to_end(key)
        return found

    def _lay_out(self, graph: int, ops: npt.NDArray[np.void], track: int) -> _Block:
        nodes, fused, timed = (ops[field].tolist() for field in ("node", "fused", "timed"))
        whole, table = self._trace.graph(graph), self._trace.nodes(graph)
        outgoing: list[list[int]] = [[] for _ in nodes]
        incoming: list[list[int]] = [[] for _ in nodes]
        if whole is not None:
            flow = dataflow(whole, list(zip(nodes, fused, strict=True)))
            if len(flow.kernels) == len(nodes):
                for number, (producer, consumer) in enumerate(flow.edges()[: 1 << _FLOW_BITS]):
                    outgoing[producer].append(number)
                    incoming[consumer].append(number)
        message, flows = Message(), []
        ending = packets.stamped(packets.event(packets.END, track, self._names))
        for place, node in enumerate(nodes):
            notes: dict[str, packets.Value] = {"node": node}
            name = f"node {node}"
            if table is not None and node < len(table):
                pair = fused[place] and node + 1 < len(table)
                name = table.op[node] + (f"+{table.op[node + 1]}" if pair else "")
                name += "" if self._choice.anonymise else f" {table.role[node]}"
                flops, moved = (table.fused_flops, table.fused_bytes) if pair else (table.flops, table.bytes)
                notes |= {
                    "layer": _known(table.layer[node]),
                    "type": table.dtype[node],
                    "tensor": None if self._choice.anonymise else table.name[node + pair] or None,
                    "FLOP": _known(flops[node]),
                    "bytes": _known(moved[node]),
                    "kernel": table.kernel_of(node, pair),
                }
            if not timed[place]:
                notes["time shared with kernels that were not seen"] = True
            out, into = outgoing[place], incoming[place]
            opening = packets.event(
                packets.BEGIN, track, self._names, name=name, category="op", notes=notes,
                flows_out=len(out), flows_in=len(into),
            )  # fmt: skip
            message.append(packets.stamped(opening)).append(ending)
            flows += out + into
        return _Block(Template(message), np.array(flows, dtype=np.uint64))


_ITEM = np.dtype(
    [("begin", "<i8"), ("end", "<i8"), ("tid", "<i4"), ("row", "<i4"), ("depth", "i1"), ("shown", "?")]
)


def _items(s: Segment) -> npt.NDArray[np.void]:
    """Calls and runs as intervals. A split that is all of its graph is not drawn, only its kernels."""
    calls, runs = np.zeros(len(s.calls), _ITEM), np.zeros(len(s.runs), _ITEM)
    for items, table in ((calls, s.calls), (runs, s.runs)):
        items["begin"], items["tid"], items["row"] = table["begin"], table["tid"], np.arange(len(table))
        items["end"] = np.maximum(table["end"], table["begin"])
    calls["shown"] = s.calls["seq"] != 0
    runs["depth"] = np.where(s.runs["parent"] < 0, 1, np.where(s.runs["level"] == _INSIDE[0], 2, 3))
    parents = s.runs["parent"]
    splits = np.zeros((len(s.runs), 2), dtype=np.int64)
    for column, level in enumerate(_INSIDE):
        inner = (parents >= 0) & (s.runs["level"] == level)
        np.add.at(splits[:, column], parents[inner], 1)
    several = np.where(splits[:, 0] > 0, splits[:, 0], splits[:, 1]) > 1
    by_backend = splits[:, 0] > 0
    for row in np.flatnonzero(parents >= 0):
        parent = parents[row]
        level = s.runs["level"][row]
        runs["shown"][row] = several[parent] and (level == _INSIDE[0] or not by_backend[parent])
    runs["shown"][parents < 0] = True
    items = np.concatenate([calls, runs])
    return items[items["shown"] | (items["depth"] > 0)]


def _straightened(ops: npt.NDArray[np.void], begin: int, end: int) -> npt.NDArray[np.void]:
    """Ops that cannot be as they were recorded, cut so that they follow one another."""
    ops = ops.copy()
    ops["begin"] = np.clip(np.maximum.accumulate(ops["begin"]), begin, end)
    ops["end"] = np.clip(ops["end"], ops["begin"], np.append(ops["begin"][1:], end))
    return ops


def _known(value: Any) -> int | None:
    number = int(value)
    return None if number < 0 else number
