# SPDX-License-Identifier: Apache-2.0
"""Writing a recording: everything in transactions, so that a crash loses at most the last one."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import numpy as np

from ..errors import MachineError, ProfinferError, UsageError
from ..model.collect import Described
from ..model.nodetable import NodeTable
from ..model.optable import RawSegment, expand, merge_routes, merge_sums, route_experts, sum_ops
from ..model.snapshot import Snapshot
from ..model.trace import GraphInfo, Table
from . import codec, segments
from .facts import Facts, nodes_to_json, to_json
from .rows import nodes_of, routes_of, sums_of
from .schema import APPLICATION_ID, TABLES, VERSION

PAGE = 8192
SEAL_PAGES = 2
"""What is left for the last word."""
_MAX_KEPT = 64
_WAIT_S = 5.0
T = TypeVar("T")


class NoRoom(Exception):
    """A flush would have made the file larger than it may be; the file is as it was."""


class RecordingWriter:
    """A new recording at ``path`` (which must not exist): mode 0600, owned by ``owner``.

    Every :meth:`flush` is one transaction; what was flushed stays readable whatever happens
    to us. Raises UsageError when the file cannot be made, MachineError when it cannot be
    written to any more. ``max_bytes``: what the file may have after any flush but the first, without
    which there would be nothing.
    """

    def __init__(self, path: str, owner: tuple[int, int] | None = None, max_bytes: int | None = None) -> None:
        self.path = path
        self._max_bytes = max_bytes
        self.flushed_bytes = 0
        self._growth = 0
        self._sums: dict[int, Table] = {}
        self._nodes: dict[int, NodeTable] = {}
        self._types: dict[tuple[str, str], int] = {}
        made = _create(path, owner)
        try:
            self._db = sqlite3.connect(path, timeout=_WAIT_S, isolation_level=None)
            try:
                self._prepare()
                found = os.stat(path, follow_symlinks=False)
                if (found.st_dev, found.st_ino) != made:
                    raise UsageError(f"{path!r} was replaced while it was made", "choose another folder")
            except BaseException:
                self._db.close()
                raise
        except sqlite3.Error as error:
            _remove(path)
            raise self._failed(error) from error
        except BaseException:
            _remove(path)
            raise

    def _prepare(self) -> None:
        for statement in (
            f"PRAGMA page_size = {PAGE}", f"PRAGMA application_id = {APPLICATION_ID}",
            f"PRAGMA user_version = {VERSION}", "PRAGMA journal_mode = DELETE",
            "PRAGMA synchronous = NORMAL", "PRAGMA temp_store = MEMORY",
        ):  # fmt: skip
            self._db.execute(statement)
        with self._transaction():
            for statement in TABLES.values():
                self._db.execute(statement)

    def flush(
        self,
        facts: Facts,
        snapshot: Snapshot,
        *,
        segment: RawSegment | None = None,
        described: Iterable[Described] = (),
        graphs: Mapping[int, GraphInfo] | None = None,
        records: Mapping[str, Iterable[codec.Array]] | None = None,
        gaps: Iterable[tuple[int, int, int, str]] = (),
    ) -> None:
        """Add what came since the last flush. ``graphs``: those that are new or changed. Raises NoRoom:
        then only :meth:`seal` may follow."""
        try:
            with self._transaction():
                for index, info in (graphs or {}).items():
                    self._graph(index, info)
                for one in described:
                    self._described(one)
                if segment is not None and len(segment.calls):
                    self._segment(segment)
                for kind, tables in (records or {}).items():
                    self._records(kind, [t for t in tables if len(t)])
                self._db.executemany("INSERT INTO gaps (begin, end, count, kind) VALUES (?, ?, ?, ?)", gaps)
                self._meta("facts", to_json(facts))
                self._meta("snapshot", to_json(snapshot))
                self._check_size()
        except sqlite3.Error as error:
            raise self._failed(error) from error
        size = os.stat(self.path).st_size
        self._growth, self.flushed_bytes = size - self.flushed_bytes, size

    def _check_size(self) -> None:
        if self._max_bytes is None or not self.flushed_bytes:
            return
        (pages,) = self._db.execute("PRAGMA page_count").fetchone()
        if (pages + SEAL_PAGES) * PAGE > self._max_bytes:
            raise NoRoom

    def seal(self, facts: Facts) -> None:
        """Say of what was flushed that nothing more comes."""
        try:
            with self._transaction():
                self._meta("facts", to_json(facts))
        except sqlite3.Error as error:
            raise self._failed(error) from error

    def next_bytes(self) -> int:
        """What the file may have after the next flush, if that brings half as much again as the last."""
        return self.flushed_bytes + self._growth + self._growth // 2

    def close(self) -> None:
        """No more comes. May be called twice."""
        self._db.close()

    def remove(self) -> None:
        """Close it and delete the file: nothing came to be in it."""
        self.close()
        _remove(self.path)

    # ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _transaction(self) -> Any:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):  # a full disk has rolled back already
                self._db.execute("ROLLBACK")
            raise

    def _meta(self, key: str, value: bytes) -> None:
        packed = len(value).to_bytes(4, "little") + codec.compress(value)
        self._db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, packed))

    def _graph(self, index: int, info: GraphInfo) -> None:
        self._db.execute(
            "INSERT INTO graphs (id, info) VALUES (?, ?) ON CONFLICT (id) DO UPDATE SET info = excluded.info",
            (index, to_json(info)),
        )

    def _described(self, one: Described) -> None:
        nodes = NodeTable.of(one.graph, one.prices)
        _keep(self._nodes, one.index, nodes)
        text = nodes_to_json(nodes)
        self._db.execute(
            "UPDATE graphs SET n_nodes = ?, cut = ?, type = ?, n_descs = ?, nodes_size = ?, nodes = ?,"
            " descs = ? WHERE id = ?",
            (
                one.n_nodes, int(one.cut), self._type("", one.descs.dtype), len(one.descs), len(text),
                codec.compress(text), codec.encode(one.descs), one.index,
            ),
        )  # fmt: skip

    def _segment(self, raw: RawSegment) -> None:
        row = segments.pack(raw)
        names = ", ".join(segments.COLUMNS)
        marks = ", ".join("?" * len(segments.COLUMNS))
        self._db.execute(
            f"INSERT INTO segments ({names}) VALUES ({marks})",  # noqa: S608 - our own names
            [getattr(row, name) for name in segments.COLUMNS],
        )
        whole = expand(raw, self._node_table)
        self._routes(route_experts(whole))
        added = sum_ops(whole)
        for index in np.unique(added["graph"]).tolist():
            part = added[added["graph"] == index]
            known = self._sums.get(index)
            if known is None:
                known = sums_of(self._db, index)
            total = merge_sums([known, part])
            _keep(self._sums, index, total)
            self._db.execute(
                "INSERT OR REPLACE INTO sums VALUES (?, ?, ?)", (index, len(total), codec.encode(total))
            )

    def _routes(self, added: Table) -> None:
        for index in np.unique(added["graph"]).tolist():
            total = merge_routes([routes_of(self._db, index), added[added["graph"] == index]])
            self._db.execute(
                "INSERT OR REPLACE INTO routes VALUES (?, ?, ?)", (index, len(total), codec.encode(total))
            )

    def _node_table(self, index: int) -> NodeTable | None:
        nodes = self._nodes.get(index)
        if nodes is None:
            nodes = nodes_of(self._db, index)
            if nodes is not None:
                _keep(self._nodes, index, nodes)
        return nodes

    def _records(self, kind: str, tables: list[codec.Array]) -> None:
        if not tables:
            return
        rows = np.concatenate(tables)
        self._db.execute(
            "INSERT INTO records (type, begin, end, rows, data) VALUES (?, ?, ?, ?, ?)",
            (
                self._type(kind, rows.dtype), int(rows["ts"].min()), int(rows["ts"].max()), len(rows),
                codec.encode(rows),
            ),
        )  # fmt: skip

    def _type(self, kind: str, dtype: np.dtype[Any]) -> int:
        key = (kind, codec.describe(dtype))
        number = self._types.get(key)
        if number is None:
            cursor = self._db.execute("INSERT INTO types (kind, fields) VALUES (?, ?)", key)
            number = self._types[key] = int(cursor.lastrowid or 0)
        return number

    def _failed(self, error: sqlite3.Error) -> ProfinferError:
        said = str(error)
        if "full" in said:
            return MachineError(f"no room is left for {self.path!r}", "free some, or record elsewhere")
        return MachineError(f"cannot write {self.path!r} ({said})", "record elsewhere")


def _keep(cache: dict[int, T], index: int, value: T) -> None:
    """Remember the latest few; others are read from the file again."""
    cache.pop(index, None)
    cache[index] = value
    while len(cache) > _MAX_KEPT:
        cache.pop(next(iter(cache)))


def _create(path: str, owner: tuple[int, int] | None) -> tuple[int, int]:
    """Make the empty file; (device, inode) of it."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(path, flags, 0o600)
    except FileExistsError as error:
        if not os.path.isfile(path) or os.path.islink(path):
            raise UsageError(f"{path!r} is not a regular file", "give the name of a new one") from error
        raise UsageError(f"{path!r} exists already", "choose another name, or use --force") from error
    except OSError as error:
        raise UsageError(f"cannot make {path!r} ({error.strerror})", "choose another folder") from error
    try:
        os.fchmod(fd, 0o600)  # the umask may have taken even the owner's bits
        if owner is not None:
            os.fchown(fd, *owner)
        found = os.fstat(fd)
        return found.st_dev, found.st_ino
    finally:
        os.close(fd)


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)
