# SPDX-License-Identifier: Apache-2.0
"""From a watched process into a recording: collects while it is polled, flushes now and then."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ..errors import MachineError
from ..model.collect import Collector
from ..model.session import Session
from ..model.snapshot import Snapshot
from ..model.trace import Child, Clock, GraphInfo
from .facts import Facts, Names
from .writer import NoRoom, RecordingWriter

FIRST_FLUSH_S, LAST_FLUSH_S = 2.0, 10.0
GROWTH = 0.1
"""A flush comes after this share of the time recorded so far, within the two limits: a crash costs
little of a short recording, and a long one does not become a heap of small pieces. Each takes some
7 ms of a core (the snapshot, the sums, the transaction), and where every core is the target's, it
is the target that waits: one a second was half of what recording cost beyond its probes."""
MAX_HELD_OPS = 1 << 18
MAX_HELD_BYTES = 32 << 20
"""Other records held until the next flush."""

Records = Mapping[str, npt.NDArray[Any]]


class Watched(Protocol):
    """What is asked of an attachment."""

    def snapshot(self) -> Snapshot: ...
    def losses(self) -> dict[str, int]: ...


class Recorder:
    """One recording in the making. ``facts``: what is known at the beginning."""

    def __init__(self, writer: RecordingWriter, facts: Facts) -> None:
        self.writer = writer
        self.facts = facts
        self.flushes = 0
        self.full = False
        """Whether what came at last found no room: the file ends with the flush before."""
        self._flushed_facts = facts
        self._readable_s = 0.0
        self._first = (0.0, 0)
        self._collector: Collector | None = None
        self._records: dict[str, list[npt.NDArray[Any]]] = {}
        self._held_bytes = 0
        self._gaps: list[tuple[int, int, int, str]] = []
        self._lost: dict[str, int] = {}
        self._looked_ns: dict[str, int] = {}
        self._graphs: list[GraphInfo] = []
        self._begun = self._flushed = time.monotonic()

    def opened(self, session: Session) -> None:
        """The session that is fed from now on: to be told before it is fed."""
        self._collector = Collector(session)

    def take(self, records: Records) -> None:
        """Other records of one drain, by kind. Each has a field "ts" or "begin"."""
        for kind, rows in records.items():
            if len(rows):
                mine = timed(rows)
                self._records.setdefault(kind, []).append(mine)
                self._held_bytes += mine.nbytes

    def look(self, watched: Watched, now_ns: int) -> None:
        """Between two polls: what was lost since the last time becomes a gap; flush when due."""
        self._missing(watched.losses(), now_ns)
        if self._due():
            self.flush(watched.snapshot(), now_ns)

    def _missing(self, lost: Mapping[str, int], now_ns: int) -> None:
        """What is lost by now and was not at the last look becomes a gap."""
        for kind, count in lost.items():
            more = count - self._lost.get(kind, 0)
            if more > 0:
                begin = self._looked_ns.get(kind, self.facts.begin_ns)
                self._gaps.append((begin, now_ns, more, kind))
                self._lost[kind] = count
            self._looked_ns[kind] = now_ns

    def gaps(self, gaps: Iterable[tuple[int, int, int, str]]) -> None:
        """Gaps (begin, end, count, kind) that are known already."""
        for gap in gaps:
            self._gaps.append(gap)
            self._lost[gap[3]] = self._lost.get(gap[3], 0) + gap[2]

    def _due(self) -> bool:
        now = time.monotonic()
        wait = min(max((now - self._begun) * GROWTH, FIRST_FLUSH_S), LAST_FLUSH_S)
        held = self._collector.held_ops if self._collector is not None else 0
        return now - self._flushed >= wait or held >= MAX_HELD_OPS or self._held_bytes >= MAX_HELD_BYTES

    def flush(self, snapshot: Snapshot, now_ns: int, *, finished: bool = False) -> None:
        """Write what there is. Raises MachineError when it cannot be written."""
        if self.full:
            self._seal(finished=finished)
            return
        # What the last drain found missing, too: no look comes after it.
        self._missing(snapshot.lost.by_kind, now_ns)
        collector = self._collector
        backends = tuple(collector.backends) if collector is not None else ()
        names = self.facts.names
        if collector is not None and not names.ops:
            names = Names.of(collector.tables)  # what computes may have come after the beginning
        self.facts = dataclasses.replace(
            self.facts, names=names, target=snapshot.target, end_ns=now_ns, backends=backends,
            finished=finished, clocks=(*self.facts.clocks[:1], read_clocks()),
        )  # fmt: skip
        graphs = [] if collector is None else collector.graphs
        described = [] if collector is None else collector.take_described()
        changed = {
            index: info
            for index, info in enumerate(graphs)
            if index >= len(self._graphs) or self._graphs[index] is not info
        }
        self._graphs = list(graphs)
        segment = None if collector is None else collector.take()
        records, self._records, self._held_bytes = self._records, {}, 0
        gaps, self._gaps = self._gaps, []
        self._flushed = time.monotonic()
        try:
            self.writer.flush(
                self.facts, snapshot, segment=segment, described=described, graphs=changed, records=records,
                gaps=gaps,
            )  # fmt: skip
        except MachineError as error:
            raise MachineError(f"{error.what}; {self.readable()}", error.remedy) from error
        except NoRoom:
            self.full = True
            self._seal(finished=finished)
            return
        self._flushed_facts = self.facts
        if not self.flushes:
            self._first = (self._flushed, self.writer.flushed_bytes)
        self.flushes += 1
        self._readable_s = (now_ns - self.facts.begin_ns) / 1e9

    def _seal(self, *, finished: bool) -> None:
        """What is in the file is of the last flush, and so is what it says of itself."""
        self.writer.seal(dataclasses.replace(self._flushed_facts, child=self.facts.child, finished=finished))

    def bytes_per_second(self) -> float:
        """By which the file grows, since the first flush; 0.0 before there are two."""
        if self.flushes < 2:
            return 0.0
        grown = self.writer.flushed_bytes - self._first[1]
        return grown / max(self._flushed - self._first[0], 1e-3)

    def readable(self) -> str:
        """How much is safe, in words."""
        if not self.flushes:
            return "nothing is in it"
        return f"its first {self._readable_s:.0f} s are in it and readable"

    def child(self, child: Child) -> None:
        """How the program that was started has ended."""
        self.facts = dataclasses.replace(self.facts, child=child)


def read_clocks() -> Clock:
    """This moment on all clocks, read within microseconds."""
    clocks = (time.CLOCK_MONOTONIC, time.CLOCK_BOOTTIME, time.CLOCK_REALTIME)
    return Clock(*(time.clock_gettime_ns(clock) for clock in clocks))


def timed(rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A copy whose field "ts" says when: that of records that have another name for it is added."""
    names = rows.dtype.names or ()
    if "ts" in names:
        return rows.copy()
    fields = [("ts", "<i8"), *((name, rows.dtype[name]) for name in names)]
    timed = np.zeros(len(rows), fields)
    for name in names:
        timed[name] = rows[name]
    timed["ts"] = rows["begin" if "begin" in names else names[0]]
    return timed
