# SPDX-License-Identifier: Apache-2.0
"""Single rows of a recording, read and checked."""

from __future__ import annotations

import sqlite3

import numpy as np

from ..model.graph import Graph, Incomplete, build_graph
from ..model.nodetable import NodeTable
from ..model.plancache import Tables
from ..model.trace import ROUTE, SUM, Table
from . import codec
from .facts import MAX_JSON, nodes_from_json

_MAX_DESCS = 1 << 17


def meta_of(db: sqlite3.Connection, key: str) -> bytes:
    """The JSON under ``key``; UsageError when it is missing or damaged."""
    row = db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
    if row is None or not isinstance(row[0], bytes) or len(row[0]) < 4:
        raise codec.damaged(f"it has no {key}")
    size = int.from_bytes(row[0][:4], "little")
    if size > MAX_JSON:
        raise codec.damaged("a description of impossible length")
    return codec.decompress(row[0][4:], size)


def nodes_of(db: sqlite3.Connection, index: int) -> NodeTable | None:
    """The columns of a graph's nodes; None when they never came."""
    row = db.execute("SELECT nodes_size, nodes FROM graphs WHERE id = ?", (index,)).fetchone()
    if row is None or row[1] is None:
        return None
    size, data = _int(row[0]), _bytes(row[1])
    if size > MAX_JSON:
        raise codec.damaged("nodes of impossible length")
    return nodes_from_json(codec.decompress(data, size))


def graph_of(db: sqlite3.Connection, index: int, hash: int, tables: Tables) -> Graph | None:
    """The graph with its nodes, built as it was then; None when its descriptors never came."""
    row = db.execute(
        "SELECT n_nodes, cut, type, n_descs, descs FROM graphs WHERE id = ?", (index,)
    ).fetchone()
    if row is None or row[4] is None:
        return None
    n_nodes, cut, type, count, data = _int(row[0]), bool(row[1]), _int(row[2]), _int(row[3]), _bytes(row[4])
    if count > _MAX_DESCS or n_nodes > _MAX_DESCS:
        raise codec.damaged(f"a graph of {n_nodes} nodes")
    descs = codec.decode(data, type_of(db, type, "")[1], count)
    try:
        built = build_graph(
            descs, n_nodes, tables.ops, tables.types, hash=hash, unary=tables.unary, glu=tables.glu, cut=cut
        )
    except (ValueError, KeyError, IndexError, TypeError, OverflowError) as error:
        raise codec.damaged(f"the nodes of a graph: {error}") from error
    return None if isinstance(built, Incomplete) else built


def sums_of(db: sqlite3.Connection, index: int) -> Table:
    """The sums of one graph; empty without."""
    row = db.execute("SELECT rows, data FROM sums WHERE graph = ?", (index,)).fetchone()
    return np.zeros(0, SUM) if row is None else codec.decode(_bytes(row[1]), SUM, _int(row[0]))


def routes_of(db: sqlite3.Connection, index: int) -> Table:
    """The routes of one graph; empty without."""
    row = db.execute("SELECT rows, data FROM routes WHERE graph = ?", (index,)).fetchone()
    return np.zeros(0, ROUTE) if row is None else codec.decode(_bytes(row[1]), ROUTE, _int(row[0]))


def type_of(db: sqlite3.Connection, number: int, kind: str | None = None) -> tuple[str, np.dtype[np.void]]:
    """(kind, record type) under ``number``."""
    row = db.execute("SELECT kind, fields FROM types WHERE id = ?", (number,)).fetchone()
    if row is None or not isinstance(row[0], str) or not isinstance(row[1], str):
        raise codec.damaged("records of an unknown type")
    if kind is not None and row[0] != kind:
        raise codec.damaged("records of another type")
    return row[0], codec.understand(row[1])


def _int(value: object) -> int:
    if not isinstance(value, int) or value < 0:
        raise codec.damaged("a number that is none")
    return value


def _bytes(value: object) -> bytes:
    if not isinstance(value, bytes):
        raise codec.damaged("a table that is none")
    return value
