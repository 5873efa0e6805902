# SPDX-License-Identifier: Apache-2.0
"""Opening a file that may be a recording: foreign, newer, cut off or made to harm, until shown."""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
import stat
import urllib.parse

from ..errors import UsageError
from . import codec
from .schema import APPLICATION_ID, VERSION, tables_of

_MAGIC = b"SQLite format 3\0"
_WAIT_S = 5.0
BROKEN = (sqlite3.DatabaseError, UnicodeDecodeError, OverflowError)
"""What SQLite and its binding raise for a file that is not what it should be."""
_SPACES = re.compile(r"\s+")


def open_database(path: str) -> sqlite3.Connection:
    """A read-only connection to the recording ``path``.

    UsageError, in one line, when it is not one, is newer than this program, or is damaged. What
    an interrupted transaction left half-done is taken back first, if its journal is there.
    """
    _look(path)
    try:
        db = _connect(path)
        try:
            _check(db, path)
        except BaseException:
            db.close()
            raise
        return db
    except sqlite3.OperationalError as error:
        raise UsageError(
            f"cannot read {path!r} ({error})", "copy it, with its -journal file if there is one"
        ) from error
    except BROKEN as error:
        raise codec.damaged(str(error)) from error


def _look(path: str) -> None:
    """Is it a whole SQLite file with our mark? Asked before SQLite itself is."""
    try:
        # A pipe must not be waited for.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise UsageError(f"{path!r} is not a regular file", "give a recording of profinferd record")
            head = file.read(100)
    except OSError as error:
        raise UsageError(
            f"cannot open {path!r} ({error.strerror})", "give a recording of profinferd record"
        ) from error
    if len(head) < 100 and _MAGIC.startswith(head[:16]):
        raise UsageError(f"{path!r} is empty or cut off", "record again, or use another copy")
    if head[:16] != _MAGIC or int.from_bytes(head[68:72], "big") != APPLICATION_ID:
        raise UsageError(
            f"{path!r} is not a recording of profinferd", "give a file that profinferd record wrote"
        )
    version = int.from_bytes(head[60:64], "big")
    if version > VERSION:
        raise UsageError(
            f"{path!r} was written by a newer profinferd (format {version}, this one reads up to {VERSION})",
            "update profinferd",
        )
    if version < 1:
        raise codec.damaged("a format that never was")
    page = int.from_bytes(head[16:18], "big")
    pages = int.from_bytes(head[28:32], "big")
    whole = pages * (65536 if page == 1 else page)
    if found.st_size < whole and not os.path.exists(f"{path}-journal"):
        raise UsageError(
            f"{path!r} is cut off ({found.st_size} of {whole} bytes)", "copy it again, the whole file"
        )


def _connect(path: str) -> sqlite3.Connection:
    name = urllib.parse.quote(os.path.abspath(path))
    db = sqlite3.connect(f"file:{name}?mode=ro", uri=True, timeout=_WAIT_S, isolation_level=None)
    try:
        db.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except sqlite3.OperationalError:
        db.close()
        # A journal of a recorder that was killed: only a connection that may write can take it back.
        with contextlib.closing(
            sqlite3.connect(f"file:{name}?mode=rw", uri=True, timeout=_WAIT_S)
        ) as mending:
            mending.execute("SELECT count(*) FROM sqlite_master").fetchone()
        db = sqlite3.connect(f"file:{name}?mode=ro", uri=True, timeout=_WAIT_S, isolation_level=None)
    except BaseException:
        db.close()
        raise
    return db


def _check(db: sqlite3.Connection, path: str) -> None:
    """Only the tables that we made, as we made them: no view, trigger or index of a stranger."""
    db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, codec.MAX_RAW)
    db.setlimit(sqlite3.SQLITE_LIMIT_SQL_LENGTH, 1 << 16)
    db.text_factory = lambda raw: raw.decode("utf-8", "replace")
    for statement in ("trusted_schema = OFF", "cell_size_check = ON", "query_only = ON"):
        db.execute(f"PRAGMA {statement}")
    found = {}
    for kind, name, sql in db.execute("SELECT type, name, sql FROM sqlite_master LIMIT 100"):
        if kind == "index" and str(name).startswith("sqlite_autoindex_"):
            continue
        found[name] = sql if kind == "table" else None
    wanted = tables_of(int(db.execute("PRAGMA user_version").fetchone()[0]))
    if found.keys() != wanted.keys() or any(
        not isinstance(sql, str) or _plain(sql) != _plain(wanted[name]) for name, sql in found.items()
    ):
        raise codec.damaged("its tables are not those of a recording")


def _plain(sql: str) -> str:
    return _SPACES.sub(" ", sql).strip()
