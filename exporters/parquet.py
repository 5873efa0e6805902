# SPDX-License-Identifier: Apache-2.0
"""The tables of a trace as Parquet, a folder that grows: one file per table and recording.

Partitioned as Hive does it, ``<table>/host=<host>/date=<date>/<recording>.parquet``, so that the
exports of many machines and days can be put together and queried at once.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable, Iterator
from typing import Any

from ..agent.errors import MachineError
from ..agent.model.trace import Trace
from . import Choice
from .tables import Batch, Column, tables

VIEWS = "views.sql"
_TABLE = re.compile(r"[a-z][a-z0-9_]{0,60}")
_SAFE = re.compile(r"[^A-Za-z0-9._-]+")


class ParquetExporter:
    """Implements :class:`profinferd.exporters.TraceExporter`; needs pyarrow (extra ``analysis``)."""

    def files(self, trace: Trace, choice: Choice) -> Iterator[tuple[str, Iterable[bytes]]]:
        """``views.sql``, which makes a DuckDB view of every table, and the tables."""
        try:
            import pyarrow as arrow
            import pyarrow.parquet as parquet
        except ImportError as error:
            raise MachineError(
                "Parquet needs the Python package pyarrow, which is not installed",
                "pip install 'profinferd[analysis]', or choose --format csv",
            ) from error
        facts = trace.facts
        day = datetime.datetime.fromtimestamp(facts.created, datetime.UTC).date().isoformat()
        host = "anonymous" if choice.anonymise else _SAFE.sub("_", facts.machine.host) or "unknown"
        name = f"{int(facts.created)}-{0 if choice.anonymise else facts.target.pid}"
        names = []
        for table, batches in tables(trace, choice):
            names.append(table)
            yield (
                f"{table}/host={host}/date={day}/{name}.parquet",
                _file(arrow, parquet, batches, name),
            )
        # Another recording may have tables that this one lacks.
        others = sorted(name for name in choice.present if name not in names and _TABLE.fullmatch(name))
        yield VIEWS, [_views([*names, *others]).encode()]


class _Sink:
    """A file that is written by others and taken away in pieces."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._at = 0
        self.closed = False

    def write(self, data: Any) -> int:
        part = bytes(data)
        self._parts.append(part)
        self._at += len(part)
        return len(part)

    def tell(self) -> int:
        return self._at

    def flush(self) -> None:
        """Nothing is kept back."""

    def close(self) -> None:
        self.closed = True

    def take(self) -> bytes:
        out = b"".join(self._parts)
        self._parts.clear()
        return out


def _file(arrow: Any, parquet: Any, batches: Iterable[Batch], recording: str) -> Iterator[bytes]:
    sink, writer = _Sink(), None
    for batch in batches:
        length = len(next(iter(batch.values())))
        arrays = {"recording": arrow.array([recording] * length, arrow.string())}
        arrays |= {name: _array(arrow, column) for name, column in batch.items()}
        rows = arrow.table(arrays)
        if writer is None:
            writer = parquet.ParquetWriter(arrow.PythonFile(sink, mode="w"), rows.schema, compression="zstd")
        writer.write_table(rows.cast(writer.schema))
        yield sink.take()
    if writer is not None:
        writer.close()
    yield sink.take()


def _array(arrow: Any, column: Column) -> Any:
    if column.words is None:
        return arrow.array(column.values, mask=column.null)
    codes = arrow.array(column.values, mask=column.values < 0, type=arrow.int32())
    return arrow.DictionaryArray.from_arrays(codes, arrow.array(column.words, arrow.string())).cast(
        arrow.string()
    )


def _views(names: Iterable[str]) -> str:
    """Paths are relative: run it where the folders are (``cd FOLDER; duckdb -init views.sql``)."""
    lines = ["-- In this folder: duckdb -init views.sql"]
    for name in names:
        files = f"'{name}/*/*/*.parquet', hive_partitioning = true, union_by_name = true"
        view = f'CREATE OR REPLACE VIEW "{name}" AS SELECT * FROM read_parquet({files});'  # noqa: S608 - our names
        lines.append(view)
    return "\n".join(lines) + "\n"
