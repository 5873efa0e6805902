# SPDX-License-Identifier: Apache-2.0
"""The tables of a recording (docs/recording.md says what is in them), and their versions."""

from __future__ import annotations

APPLICATION_ID = 0x50464931  # "PFI1"
VERSION = 2
"""1: without table "routes", which is worked out from the op records of such a file."""

_SEGMENT_NUMBERS = (
    "begin", "end", "n_calls", "n_runs", "n_ops", "n_experts", "n_orders", "n_words", "width",
)  # fmt: skip
_SEGMENT_TABLES = ("calls", "runs", "experts", "lengths", "words", "times")

TABLES: dict[str, str] = {
    "meta": "CREATE TABLE meta (key TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID",
    "graphs": (
        "CREATE TABLE graphs (id INTEGER PRIMARY KEY, info BLOB NOT NULL, n_nodes INTEGER, cut INTEGER,"
        " type INTEGER, n_descs INTEGER, nodes_size INTEGER, nodes BLOB, descs BLOB)"
    ),
    "segments": (
        "CREATE TABLE segments (id INTEGER PRIMARY KEY, "
        + ", ".join(f"{name} INTEGER NOT NULL" for name in _SEGMENT_NUMBERS)
        + ", "
        + ", ".join(f"{name} BLOB NOT NULL" for name in _SEGMENT_TABLES)
        + ")"
    ),
    "sums": "CREATE TABLE sums (graph INTEGER PRIMARY KEY, rows INTEGER NOT NULL, data BLOB NOT NULL)",
    "routes": "CREATE TABLE routes (graph INTEGER PRIMARY KEY, rows INTEGER NOT NULL, data BLOB NOT NULL)",
    "types": "CREATE TABLE types (id INTEGER PRIMARY KEY, kind TEXT NOT NULL, fields TEXT NOT NULL)",
    "records": (
        "CREATE TABLE records (id INTEGER PRIMARY KEY, type INTEGER NOT NULL, begin INTEGER NOT NULL,"
        " end INTEGER NOT NULL, rows INTEGER NOT NULL, data BLOB NOT NULL)"
    ),
    "gaps": (
        "CREATE TABLE gaps (id INTEGER PRIMARY KEY, begin INTEGER NOT NULL, end INTEGER NOT NULL,"
        " count INTEGER NOT NULL, kind TEXT NOT NULL)"
    ),
}  # fmt: skip
"""Statement that makes each table; a file whose own differ is not one of ours."""

ADDED: dict[int, frozenset[str]] = {2: frozenset({"routes"})}
"""Tables that came with a version."""


def tables_of(version: int) -> dict[str, str]:
    """The tables of a file of that version."""
    later = {name for since, names in ADDED.items() if since > version for name in names}
    return {name: sql for name, sql in TABLES.items() if name not in later}
