# SPDX-License-Identifier: Apache-2.0
"""The tables of a trace as CSV: a folder with one file per table."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator

from ..agent.model.trace import Trace
from . import Choice
from .tables import Batch, tables

_FORMULA = ("=", "+", "-", "@", "\t", "\r")


class CsvExporter:
    """Implements :class:`profinferd.exporters.TraceExporter`. Null is an empty field."""

    def files(self, trace: Trace, choice: Choice) -> Iterator[tuple[str, Iterable[bytes]]]:
        """``<table>.csv`` for every table, with a heading, lines ending in LF, in UTF-8."""
        for name, batches in tables(trace, choice):
            yield f"{name}.csv", _lines(batches)


def _lines(batches: Iterable[Batch]) -> Iterator[bytes]:
    first = True
    for batch in batches:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        if first:
            writer.writerow(batch)
            first = False
        writer.writerows(zip(*(_cells(column.to_list()) for column in batch.values()), strict=True))
        yield text.getvalue().encode("utf-8", "replace")


def _cells(values: list[object]) -> list[object]:
    """Numbers as they are. Text that a spreadsheet would take for a formula is made plain text."""
    return [
        f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value for value in values
    ]
