# SPDX-License-Identifier: Apache-2.0
"""The flight recorder: the records of the last seconds are kept as they came, and written when asked.

What is written is played through a session of its own, so that every figure in it is of that
window and of nothing before it.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ..model.graph import Graph
from ..model.records import LOST_STATS, Kind
from ..model.session import Session
from ..model.snapshot import Lost, Snapshot
from . import codec
from .facts import Facts
from .recorder import Recorder, timed
from .writer import RecordingWriter

_MAX_GRAPHS = 1024
Array = npt.NDArray[Any]


class Rings(Protocol):
    """What one drain of the rings brought."""

    @property
    def events(self) -> Array: ...
    @property
    def ops(self) -> Array: ...
    @property
    def nodes(self) -> Array: ...
    @property
    def ints(self) -> Array: ...


@dataclass(frozen=True, slots=True)
class _Drain:
    at_ns: int
    rings: tuple[Array, Array, Array, Array]
    size: int


@dataclass(frozen=True, slots=True)
class _Known:
    dtype: np.dtype[Any]
    rows: int
    descs: bytes
    n_nodes: int
    cut: bool


class FlightRecorder:
    """Keeps ``seconds`` of records, and at most ``max_bytes`` of them."""

    def __init__(self, seconds: float, max_bytes: int) -> None:
        self.seconds = seconds
        self.dropped_early = False
        """Whether the window became shorter than asked for, for want of room."""
        self._max_bytes = max_bytes
        self._drains: deque[_Drain] = deque()
        self._others: deque[tuple[int, str, Array]] = deque()
        self._lost: deque[tuple[int, dict[str, int]]] = deque()
        self._bytes = 0
        self._known: OrderedDict[tuple[int, int], _Known] = OrderedDict()

    @property
    def held_bytes(self) -> int:
        """What is kept now."""
        return self._bytes

    # -- what the attachment tells -------------------------------------------------

    def opened(self, session: Session) -> None:
        """The session that is fed: its graphs are remembered, they are sent but once."""
        session.plans.built = self._built

    def _built(self, key: tuple[int, int], graph: Graph, descs: Array, n_nodes: int, cut: bool) -> None:
        self._known[key] = _Known(descs.dtype, len(descs), codec.encode(descs), n_nodes, cut)
        self._known.move_to_end(key)
        while len(self._known) > _MAX_GRAPHS:
            self._known.popitem(last=False)

    def fed(self, rings: Rings, now_ns: int) -> None:
        """One drain."""
        parts = (rings.events, rings.ops, rings.nodes, rings.ints)
        size = sum(part.nbytes for part in parts)
        if size:
            self._drains.append(_Drain(now_ns, parts, size))
            self._bytes += size

    def take(self, records: Mapping[str, Array], now_ns: int) -> None:
        """Other records of one drain, by kind."""
        for kind, rows in records.items():
            if len(rows):
                mine = timed(rows)
                self._others.append((now_ns, kind, mine))
                self._bytes += mine.nbytes

    def look(self, losses: dict[str, int], now_ns: int) -> None:
        """Between two polls: what is too old falls out."""
        self._lost.append((now_ns, losses))
        oldest = now_ns - int(self.seconds * 1e9)
        while self._drains and self._drains[0].at_ns < oldest:
            self._bytes -= self._drains.popleft().size
        while self._others and self._others[0][0] < oldest:
            self._bytes -= self._others.popleft()[2].nbytes
        while self._bytes > self._max_bytes and (self._drains or self._others):
            self.dropped_early = True
            first = self._drains[0].at_ns if self._drains else now_ns
            if self._others and self._others[0][0] <= first:
                self._bytes -= self._others.popleft()[2].nbytes
            else:
                self._bytes -= self._drains.popleft().size
        first = max(oldest, self._first_ns(oldest))
        while len(self._lost) > 1 and self._lost[1][0] <= first:
            self._lost.popleft()

    def _first_ns(self, now_ns: int) -> int:
        firsts = [self._drains[0].at_ns] if self._drains else []
        return min(firsts, default=now_ns)

    def _first_call_ns(self) -> int:
        for drain in self._drains:
            events = drain.rings[0]
            begins = events["ts"][events["kind"] == Kind.CALL_BEGIN]
            if len(begins):
                return int(begins.min())
        return 0

    # -- the trigger -----------------------------------------------------------------

    def write(
        self, path: str, owner: tuple[int, int] | None, facts: Facts, new_session: Callable[[], Session],
        now_ns: int, decorate: Callable[[Snapshot], Snapshot] = lambda snapshot: snapshot,
    ) -> int:  # fmt: skip
        """Write the window to a new file, and begin with an empty one; returns its size in bytes.

        ``new_session``: one like that of the attachment, that nothing was fed to. Raises as
        :class:`RecordingWriter` does.
        """
        begin_ns = max(now_ns - int(self.seconds * 1e9), facts.begin_ns)
        if self.dropped_early:
            begin_ns = max(begin_ns, self._first_ns(now_ns))
            shorter = "the window is shorter than asked for: it did not fit into memory"
            facts = dataclasses.replace(facts, notes=(*facts.notes, shorter))
        session = new_session()
        session.join_in()
        session.start_ns = max(begin_ns, self._first_call_ns() - 1)
        writer = RecordingWriter(path, owner)
        try:
            recorder = Recorder(writer, dataclasses.replace(facts, begin_ns=begin_ns))
            recorder.opened(session)
            self._prepare(session)
            for drain in self._drains:
                session.feed(*drain.rings, now_ns=drain.at_ns)
                session.take_confirmed(), session.take_resend()
            for _, kind, rows in self._others:
                recorder.take({kind: rows})
            session.finish(now_ns)
            session.start_ns = begin_ns
            recorder.gaps(self._gaps())
            snapshot = self._with_losses(decorate(session.snapshot(now_ns, self._stats())))
            recorder.flush(snapshot, now_ns, finished=True)
        except BaseException:
            writer.remove()
            raise
        writer.close()
        self._drains.clear()
        self._others.clear()
        self._bytes, self.dropped_early = 0, False
        return writer.flushed_bytes

    def _prepare(self, session: Session) -> None:
        """Make the graphs known that ran in the window and were described before it."""
        wanted: dict[tuple[int, int], None] = {}
        for drain in self._drains:
            events = drain.rings[0]
            begins = events[(events["kind"] == Kind.GRAPH_BEGIN) & (events["hash"] != 0)]
            for tgid, hash in zip(begins["tgid"].tolist(), begins["hash"].tolist(), strict=True):
                wanted[tgid, hash] = None
        for number, key in enumerate(wanted):
            known = self._known.get(key)
            if known is not None:
                descs = codec.decode(known.descs, known.dtype, known.rows)
                descs["seq"] = (1 << 32) - 1 - number
                session.plans.take(descs)
                session.plans.build(*key, (1 << 32) - 1 - number, known.n_nodes, cut=known.cut)
        session.take_confirmed(), session.take_resend()

    def _gaps(self) -> list[tuple[int, int, int, str]]:
        found = []
        for (begin, before), (end, after) in zip(self._lost, list(self._lost)[1:], strict=False):
            found += [
                (begin, end, count - before.get(kind, 0), kind)
                for kind, count in after.items()
                if count > before.get(kind, 0)
            ]
        return found

    def _with_losses(self, snapshot: Snapshot) -> Snapshot:
        """With what was lost of records that no session sees: waits, barriers, page faults."""
        if not self._lost:
            return snapshot
        first, last = self._lost[0][1], self._lost[-1][1]
        kinds = {kind: count - first.get(kind, 0) for kind, count in last.items()}
        kinds = {**kinds, **snapshot.lost.by_kind}
        return dataclasses.replace(snapshot, lost=Lost(sum(kinds.values()), kinds))

    def _stats(self) -> dict[str, float]:
        if not self._lost:
            return {}
        first, last = self._lost[0][1], self._lost[-1][1]
        names = {kind: stat for stat, kind in LOST_STATS.items()}
        return {names[kind]: last[kind] - first.get(kind, 0) for kind in last if kind in names}
