# SPDX-License-Identifier: Apache-2.0
"""The tables of a trace as one JSON object, with the summary that ``attach --format json`` prints."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

from ..agent.model.trace import Trace
from . import Choice
from .json_export import one
from .tables import Batch, tables

SCHEMA = 1
_ROWS = 4096


class TablesJsonExporter:
    """Implements :class:`profinferd.exporters.TraceExporter`."""

    def files(self, trace: Trace, choice: Choice) -> Iterator[tuple[str, Iterable[bytes]]]:
        """One object: ``schema``, ``summary``, then every table as ``{"columns": […], "rows": [[…]]}``."""
        yield "", _pieces(trace, choice)


def _pieces(trace: Trace, choice: Choice) -> Iterator[bytes]:
    yield f'{{"schema": {SCHEMA},\n'.encode()
    if not choice.anonymise and choice.window is None:
        yield f'"summary": {one(trace.snapshot.to_json())},\n'.encode()
    yield b'"tables": {'
    between = "\n"
    for name, batches in tables(trace, choice):
        yield f"{between}{json.dumps(name)}: ".encode()
        yield from _table(batches)
        between = ",\n"
    yield b"\n}}\n"


def _table(batches: Iterable[Batch]) -> Iterator[bytes]:
    columns: list[str] | None = None
    between = "\n"
    for batch in batches:
        if columns is None:
            columns = list(batch)
            yield f'{{"columns": {json.dumps(columns)}, "rows": ['.encode()
        length = len(next(iter(batch.values())))
        values = [column.to_list() for column in batch.values()]
        for start in range(0, length, _ROWS):
            rows = list(zip(*(column[start : start + _ROWS] for column in values), strict=True))
            # One call for many rows: what JSON does not have is not in them (see Column.to_list).
            text = json.dumps(rows, allow_nan=False, separators=(",", ":"))[1:-1]
            yield f"{between}{text}".encode()
            between = ",\n"
    yield b"]}" if columns is not None else b'{"columns": [], "rows": []}'
