# SPDX-License-Identifier: Apache-2.0
"""Reading a recording: a :class:`Trace` whose tables are read when they are asked for."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np

from ..errors import UsageError
from ..model.collect import between
from ..model.graph import Graph
from ..model.nodetable import NodeTable
from ..model.optable import expand, merge_routes, route_experts, without_ops
from ..model.snapshot import Snapshot
from ..model.trace import GAP, ROUTE, SUM, Counts, GraphInfo, Segment, Table, Trace
from . import codec, segments
from .facts import Facts, from_json
from .opening import BROKEN, open_database
from .rows import graph_of, meta_of, nodes_of, type_of
from .segments import COLUMNS, Stored

_MAX_GRAPHS, _MAX_NODES, _MAX_GAPS = 1 << 16, 1 << 17, 1 << 20
_KEPT_GRAPHS, _KEPT_NODES = 4, 256
_NUMBERS = tuple(name for name in COLUMNS if Stored.__dataclass_fields__[name].type == "int")
_WITHOUT_OPS = frozenset({"experts", "lengths", "words", "times"})
T = TypeVar("T")


class Recording:
    """A recording, opened for reading. Close it, or use ``with``; its trace needs it open.

    Everything in it is taken for hostile: lengths are bounded, indices checked, and what cannot
    be true is a UsageError.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._db = open_database(path)
        self._graphs: OrderedDict[int, Graph | None] = OrderedDict()
        self._nodes: OrderedDict[int, NodeTable | None] = OrderedDict()
        try:
            if not self._db.execute("SELECT count(*) FROM meta").fetchone()[0]:
                raise UsageError(f"nothing was saved to {path!r} yet", "wait a second, or record again")
            self._version = int(self._db.execute("PRAGMA user_version").fetchone()[0])
            facts = from_json(meta_of(self._db, "facts"), Facts)
            snapshot = from_json(meta_of(self._db, "snapshot"), Snapshot)
            graphs = self._graph_infos()
            self._infos = graphs
            about = facts.trace(graphs, snapshot.lost.by_kind)
            self.tables = about.tables
            self.trace = Trace(about, snapshot, self._gaps(), self)
        except BROKEN as error:
            self._db.close()
            raise codec.damaged(str(error)) from error
        except BaseException:
            self._db.close()
            raise

    @classmethod
    def open(cls, path: str) -> Self:
        """Opens ``path``; UsageError when it is not a recording, is newer, cut off or damaged."""
        return cls(path)

    def close(self) -> None:
        """Close the file; what the trace has read stays valid."""
        self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- what a trace asks for -------------------------------------------------------

    def segments(self, begin_ns: int | None, end_ns: int | None, *, ops: bool) -> Iterator[Segment]:
        """See :class:`profinferd.agent.model.trace.Source`."""
        names = ", ".join("x''" if name in _WITHOUT_OPS and not ops else name for name in COLUMNS)
        where, values = _when("end >= ?", begin_ns, "begin < ?", end_ns)
        known = len(self._infos)
        for row in self._rows(f"SELECT {names} FROM segments {where} ORDER BY id", values):  # noqa: S608
            raw = segments.unpack(_stored(row), ops=ops)
            if (raw.runs["graph"] >= known).any():
                raise codec.damaged("a graph that is not there")
            yield expand(raw, self.nodes) if ops else without_ops(raw)

    def counts(self) -> Counts:
        """See :class:`profinferd.agent.model.trace.Source`."""
        query = "SELECT total(n_calls), total(n_runs), total(n_ops) FROM segments"
        return Counts(*(_whole(count) for row in self._rows(query, ()) for count in row))

    def sums(self) -> Table:
        """See :class:`profinferd.agent.model.trace.Source`."""
        return self._by_graph("sums", SUM)

    def routes(self) -> Table:
        """See :class:`profinferd.agent.model.trace.Source`."""
        if self._version < 2:
            return merge_routes([route_experts(part) for part in self.segments(None, None, ops=True)])
        return self._by_graph("routes", ROUTE)

    def _by_graph(self, table: str, dtype: np.dtype[Any]) -> Table:
        parts = [np.zeros(0, dtype)]
        query = f"SELECT graph, rows, data FROM {table} ORDER BY graph"  # noqa: S608 - our own words
        for graph, rows, data in self._rows(query, ()):
            if not isinstance(graph, int) or not isinstance(rows, int) or not isinstance(data, bytes):
                raise codec.damaged("sums that are none")
            part = codec.decode(data, dtype, rows)
            nodes = self.nodes(graph)
            if (part["graph"] != graph).any() or nodes is None or (part["phase"] > 5).any():
                raise codec.damaged("sums of no graph")
            if ((part["node"] < 0) | (part["node"] >= len(nodes))).any():
                raise codec.damaged("sums of no node")
            parts.append(part)
        return np.concatenate(parts)

    def graph(self, index: int) -> Graph | None:
        """See :class:`profinferd.agent.model.trace.Source`."""
        if index not in self._graphs:
            hash = self._infos[index].hash if index < len(self._infos) else 0
            self._graphs[index] = self._read(lambda: graph_of(self._db, index, hash, self.tables))
            _bound(self._graphs, _KEPT_GRAPHS)
        self._graphs.move_to_end(index)
        return self._graphs[index]

    def nodes(self, index: int) -> NodeTable | None:
        """See :class:`profinferd.agent.model.trace.Source`."""
        if index not in self._nodes:
            self._nodes[index] = self._read(lambda: nodes_of(self._db, index))
            _bound(self._nodes, _KEPT_NODES)
        self._nodes.move_to_end(index)
        return self._nodes[index]

    def kinds(self) -> Mapping[str, int]:
        """See :class:`profinferd.agent.model.trace.Source`."""
        query = (
            "SELECT kind, sum(rows) FROM records JOIN types ON types.id = records.type"
            " GROUP BY kind ORDER BY kind LIMIT 1000"
        )
        return {str(kind): _whole(rows) for kind, rows in self._rows(query, ())}

    def records(self, kind: str, begin_ns: int | None, end_ns: int | None) -> codec.Array:
        """See :class:`profinferd.agent.model.trace.Source`."""
        where, values = _when("records.end >= ?", begin_ns, "records.begin < ?", end_ns)
        query = "SELECT type, rows, data FROM records JOIN types ON types.id = records.type"
        query += f" {where or 'WHERE 1'} AND kind = ? ORDER BY records.id"
        parts: list[codec.Array] = []
        for type, rows, data in self._rows(query, (*values, kind)):
            if not isinstance(rows, int) or not isinstance(data, bytes):
                raise codec.damaged("records that are none")
            dtype = self._read(functools.partial(type_of, self._db, type))[1]
            if "ts" not in (dtype.names or ()):
                raise codec.damaged("records without a time")
            parts.append(between(codec.decode(data, dtype, rows), begin_ns, end_ns))
        if not parts:
            return np.zeros(0, np.dtype([]))
        # A newer program may have added fields in the middle of a recording: the last one's hold.
        return _alike(parts)

    # ------------------------------------------------------------------------------

    def _rows(self, query: str, values: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        try:
            # "yield from" would close the cursor for a caller that stops early, maybe after the database.
            for row in self._db.execute(query, values):  # noqa: UP028
                yield row
        except BROKEN as error:
            raise codec.damaged(str(error)) from error

    def _read(self, what: Any) -> Any:
        try:
            return what()
        except BROKEN as error:
            raise codec.damaged(str(error)) from error

    def _graph_infos(self) -> tuple[GraphInfo, ...]:
        found: list[GraphInfo] = []
        for index, info in self._rows("SELECT id, info FROM graphs ORDER BY id", ()):
            if index != len(found) or len(found) >= _MAX_GRAPHS or not isinstance(info, bytes):
                raise codec.damaged("graphs that are not numbered in order")
            found.append(from_json(info, GraphInfo))
        return tuple(found)

    def _gaps(self) -> Table:
        query = f"SELECT begin, end, count, substr(kind, 1, 24) FROM gaps ORDER BY id LIMIT {_MAX_GAPS}"  # noqa: S608
        try:
            return np.array(list(self._rows(query, ())), GAP)
        except (ValueError, TypeError, OverflowError) as error:
            raise codec.damaged("a gap that is none") from error


def _when(first: str, begin: int | None, second: str, end: int | None) -> tuple[str, tuple[int, ...]]:
    terms = [(term, value) for term, value in ((first, begin), (second, end)) if value is not None]
    where = "WHERE " + " AND ".join(term for term, _ in terms) if terms else ""
    return where, tuple(value for _, value in terms)


def _whole(count: object) -> int:
    """A sum that SQLite made: it adds up whatever it finds, also what is no number or has no end."""
    if not isinstance(count, (int, float)) or not 0 <= count < 1 << 63:
        raise codec.damaged("numbers of rows that cannot be")
    return int(count)


def _stored(row: tuple[Any, ...]) -> Stored:
    for name, value in zip(COLUMNS, row, strict=True):
        wanted = int if name in _NUMBERS else bytes
        if not isinstance(value, wanted):
            raise codec.damaged("a segment that is none")
        if isinstance(value, int) and name not in ("begin", "end") and value < 0:
            raise codec.damaged("a segment that is none")
    return Stored(*row)


def _alike(parts: list[codec.Array]) -> codec.Array:
    last = parts[-1].dtype
    out = []
    for part in parts:
        if part.dtype != last:
            wider = np.zeros(len(part), last)
            for name in last.names or ():
                if name in (part.dtype.names or ()) and part.dtype[name] == last[name]:
                    wider[name] = part[name]
            part = wider
        out.append(part)
    return np.concatenate(out)


def _bound(cache: OrderedDict[int, Any], most: int) -> None:
    while len(cache) > most:
        cache.popitem(last=False)
