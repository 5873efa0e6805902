# SPDX-License-Identifier: Apache-2.0
"""Where it goes: one module per format. Exporters see the model and nothing else of ours."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from ..agent.model.snapshot import Snapshot
    from ..agent.model.trace import Segment, Trace


class Exporter(Protocol):
    """Writes what was seen in one format. Pure: no clock, no file, no terminal."""

    def render(self, snapshot: Snapshot) -> str:
        """All of ``snapshot`` as text that ends in a newline."""
        ...


@dataclass(frozen=True, slots=True)
class Choice:
    """What of a trace is exported, and how.

    ``window``: only calls that touch [begin, end) ns of the records' clock; ``graph``: the index
    of the graph to draw (None: the one that took most time); ``anonymise``: nothing that names
    the model, its weights, the host or the program; ``times`` False: structure alone; ``present``:
    what the folder that it goes to has of other recordings.
    """

    window: tuple[int, int] | None = None
    graph: int | None = None
    anonymise: bool = False
    times: bool = True
    present: frozenset[str] = frozenset()

    def segments(self, trace: Trace) -> Iterator[Segment]:
        """The chosen calls with their ops, some seconds at a time."""
        if self.window is None:
            yield from trace.parts()
        else:
            yield trace.window(*self.window)


class TraceExporter(Protocol):
    """Writes a trace in one format. Pure: what it yields is written by others."""

    def files(self, trace: Trace, choice: Choice) -> Iterator[tuple[str, Iterable[bytes]]]:
        """(path, content in pieces) of every file, in order; each to be consumed before the next.

        The path is "" for a format that is one file, else relative to the folder of the export.
        Raises ProfinferError for a trace that has nothing of the kind, or a missing library.
        """
        ...
