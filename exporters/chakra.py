# SPDX-License-Identifier: Apache-2.0
"""A Chakra execution trace (MLCommons): one node per kernel that ran, with everything it waits for.

Readers resolve ``data_deps`` alone, so every order that matters is there: producers, versions of
memory that is written again (in place, caches), what the previous execution left in the caches,
and the token that it gave. All dependencies point to nodes with smaller numbers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ..agent.model.trace import PHASES, Segment, Table, Trace
from . import Choice
from . import chakra_nodes as chakra
from .chakra_layout import External, Layout, lay_out
from .chakra_splits import Transfer, executions, transfers

_MAX_LAYOUTS = 64
_FEEDBACK = frozenset({"decode", "verify", "mixed"})


class ChakraExporter:
    """Implements :class:`profinferd.exporters.TraceExporter`."""

    def files(self, trace: Trace, choice: Choice) -> Iterator[tuple[str, Iterable[bytes]]]:
        """One file."""
        yield "", _Writer(trace, choice).pieces()


@dataclass(slots=True)
class _Cache:
    """Who used a cache last, by node number."""

    writer: int | None = None
    last: tuple[int, ...] = ()


@dataclass(slots=True)
class _State:
    """What later executions depend on. Bounded: one entry per cache and per context."""

    next_id: int = 1
    caches: dict[int | str, _Cache] = field(default_factory=dict)
    results: dict[int, int] = field(default_factory=dict)


class _Writer:
    def __init__(self, trace: Trace, choice: Choice) -> None:
        self._trace, self._choice = trace, choice
        self._layouts: OrderedDict[tuple[object, ...], Layout] = OrderedDict()
        self._transfers: dict[tuple[tuple[int, int], ...], list[tuple[Transfer, ...]]] = {}
        self._state = _State()
        self._zero = trace.facts.begin_ns
        self._faults = _Faults(trace, choice)

    def pieces(self) -> Iterator[bytes]:
        yield chakra.metadata(self._about())
        for segment in self._choice.segments(self._trace):
            yield from self._segment(segment)

    def _about(self) -> dict[str, chakra.Value]:
        facts = self._trace.facts
        about: dict[str, chakra.Value] = {
            "profinfer.schema": 1,
            "profinfer.version": facts.version or None,
            "profinfer.lost_records": sum(facts.losses.values()),
            "profinfer.backends": ",".join(facts.backends) or None,
            "profinfer.anonymised": True if self._choice.anonymise else None,
        }
        if not self._choice.anonymise:
            machine = facts.machine
            about |= {
                "profinfer.program": facts.target.exe,
                "profinfer.model": facts.target.model,
                "profinfer.host": machine.host or None,
                "profinfer.kernel": machine.kernel or None,
                "profinfer.cpu": machine.cpu,
            }
        if self._choice.times and not self._choice.anonymise:
            about["profinfer.begin_ns"] = self._zero
            if facts.clocks:
                clock = facts.clocks[0]
                about["profinfer.begin_realtime_ns"] = clock.realtime + self._zero - clock.monotonic
        return about

    def _segment(self, s: Segment) -> Iterator[bytes]:
        for root, parts in executions(s, self._trace.facts.backends):
            moved = self._moved(s, parts)
            result: int | None = None
            sent: dict[int, int] = {}  # transfer -> number of the node that received it
            for part, its in zip(parts, moved, strict=True):
                piece, result = self._execution(s, root, part, its, sent)
                if piece:
                    yield piece
            run = s.runs[root]
            if result is not None and run["rows"] > 0 and not run["failed"]:
                self._state.results[self._context(s, root)] = result

    def _moved(self, s: Segment, parts: list[int]) -> list[tuple[Transfer, ...]]:
        if len(parts) == 1:
            return [()]
        key = tuple((int(s.runs["graph"][part]), int(s.runs["backend"][part])) for part in parts)
        found = self._transfers.get(key)
        if found is None:
            if len(self._transfers) >= _MAX_LAYOUTS:
                self._transfers.clear()
            found = self._transfers[key] = transfers(self._trace, key)
        return found

    def _context(self, s: Segment, root: int) -> int:
        call = int(s.runs["call"][root])
        return int(s.calls["context"][call]) if call >= 0 else -1

    def _execution(
        self, s: Segment, root: int, part: int, moved: tuple[Transfer, ...], sent: dict[int, int]
    ) -> tuple[bytes, int | None]:
        run = s.runs[part]
        first = int(run["first_op"])
        ops = s.ops[first : first + int(run["n_ops"])]
        faults = self._faults.of(int(run["seq"]))
        phase = PHASES[int(run["phase"])]
        layout = self._layout(run, ops, tuple(sorted(faults)), moved)
        if layout is None:
            return b"", None
        deps, counts = [], []
        for wanted in layout.externals:
            ids = self._resolve(wanted, s, root, phase, sent)
            deps.append(ids)
            counts.append(len(ids))
        filled = layout.sized(tuple(counts))
        base = self._state.next_id
        values = filled.values + np.where(filled.local, base, 0)
        values[filled.external] = [i for ids in deps for i in ids]
        if self._choice.times and len(ops):
            _fill_times(values, filled.times, ops, self._zero)
        if len(filled.faults):
            values[filled.faults] = [x for node in layout.paged for x in faults[node]]
        self._state.next_id = base + layout.count
        for leaf, writer, last in layout.leaves:
            held = self._state.caches.setdefault(leaf, _Cache())
            held.writer = held.writer if writer is None else base + writer
            held.last = tuple(base + place for place in last)
        for number, place in layout.received:
            sent[number] = base + place
        return filled.template.fill(values), base + layout.last if layout.last is not None else None

    def _resolve(
        self, wanted: External, s: Segment, root: int, phase: str, sent: dict[int, int]
    ) -> tuple[int, ...]:
        """Numbers of the nodes outside this execution that are meant."""
        if wanted.kind == "token":
            known = self._state.results.get(self._context(s, root)) if phase in _FEEDBACK else None
            return () if known is None else (known,)
        if wanted.kind == "received":
            known = sent.get(int(wanted.key))
            return () if known is None else (known,)
        held = self._state.caches.get(wanted.key, _Cache())
        if wanted.kind == "written":
            return () if held.writer is None else (held.writer,)
        return tuple(sorted({*held.last, *(() if held.writer is None else (held.writer,))}))

    def _layout(
        self, run: np.void, ops: Table, faulting: tuple[int, ...], moved: tuple[Transfer, ...]
    ) -> Layout | None:
        """The layout of an execution, kept for the next one like it; None for an unknown graph."""
        order = ops["node"].tobytes() + ops["fused"].tobytes() + ops["timed"].tobytes()
        index, backend, partial = int(run["graph"]), int(run["backend"]), bool(run["partial"])
        key = index, backend, order, faulting, moved, partial
        found = self._layouts.get(key)
        if found is not None:
            self._layouts.move_to_end(key)
            return found
        graph, table = self._trace.graph(index), self._trace.nodes(index)
        if graph is None or table is None:
            return None
        backends = self._trace.facts.backends
        name = backends[backend] if 0 <= backend < len(backends) else "unknown"
        found = lay_out(self._trace, self._choice, graph, table, ops, faulting, moved, partial, name)
        self._layouts[key] = found
        if len(self._layouts) > _MAX_LAYOUTS:
            self._layouts.popitem(last=False)
        return found


def _fill_times(values: npt.NDArray[np.int64], holes: npt.NDArray[np.int64], ops: Table, zero: int) -> None:
    """``holes``: one row per kernel that was seen, in order: start us, duration us, start, duration."""
    begin, length = ops["begin"] - zero, ops["end"] - ops["begin"]
    columns = np.stack([begin // 1000, length // 1000, begin, length], axis=1)
    values[holes] = np.maximum(columns, 0)


class _Faults:
    """Page faults by execution and node: how many, and how long they were waited for."""

    def __init__(self, trace: Trace, choice: Choice) -> None:
        self._by_seq: dict[int, dict[int, tuple[int, int, int]]] = {}
        begin, end = choice.window or (None, None)
        page = max(trace.facts.machine.page, 1)
        for kind in trace.kinds:
            rows = trace.records(kind, begin, end)
            if not {"seq", "node", "addr", "kind", "wait_ns"} <= set(rows.dtype.names or ()):
                continue
            rows = rows[(rows["kind"] == 1) & (rows["seq"] != 0) & (rows["node"] != 0xFFFFFFFF)]
            waits = np.where(rows["wait_ns"] > 1 << 62, 0, rows["wait_ns"]).tolist()
            for seq, node, ns in zip(rows["seq"].tolist(), rows["node"].tolist(), waits, strict=True):
                nodes = self._by_seq.setdefault(seq, {})
                count, _, waited = nodes.get(node, (0, 0, 0))
                nodes[node] = (count + 1, (count + 1) * page, waited + ns)

    def of(self, seq: int) -> dict[int, tuple[int, int, int]]:
        """node -> (faults, bytes that they asked for at least, ns waited) of one execution."""
        return self._by_seq.get(seq, {})
