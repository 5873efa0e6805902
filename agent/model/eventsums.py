# SPDX-License-Identifier: Apache-2.0
"""Readings of performance events into figures that only grow. Pure arithmetic.

An event that shares its counter with others counts part of the time: ``running`` of
``enabled`` ns. Each stretch between two readings is scaled by its own share, and what was
added once stays: scaling the sum instead would let a figure fall when the share changes.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .eventdata import Events, EventTotal, OpEvents

LINE_BYTES = 64
"""Of a cache, on the processors that these engines run on."""


class Count(NamedTuple):
    """One reading: ``value`` counted in ``running`` of ``enabled`` ns."""

    value: int
    enabled: int
    running: int


@dataclass(slots=True)
class Scaler:
    """The scaled sum of one event. ``value`` never falls."""

    value: float = 0.0
    enabled: int = 0
    running: int = 0
    _last: Count = field(default_factory=lambda: Count(0, 0, 0))

    def take(self, now: Count) -> None:
        """A later reading. One that has not run since stays open: the next is scaled over both.

        Readings that go back (a counter that was opened anew) begin again from zero.
        """
        last = self._last
        if now.value < last.value or now.enabled < last.enabled or now.running < last.running:
            last = Count(0, 0, 0)
        value, enabled, running = (a - b for a, b in zip(now, last, strict=True))
        if running <= 0:
            return
        self.value += value * max(1.0, enabled / running)
        self.enabled += enabled
        self.running += running
        self._last = now

    @property
    def ratio(self) -> float | None:
        """Share of the time in which it really counted; None before it ever did."""
        return min(1.0, self.running / self.enabled) if self.enabled else None


class Kind(NamedTuple):
    """What readings are of: operator, type of what it works on, role. ``op`` None: no operator."""

    op: str | None
    dtype: str = ""
    role: str = ""


@dataclass(slots=True)
class EventSums:
    """The events of one process. ``names`` in the order of the readings; ``reasons``: why an
    event is absent, by name."""

    names: Sequence[str]
    reasons: Mapping[str, str] = field(default_factory=dict)
    _threads: dict[tuple[int, str], Scaler] = field(default_factory=dict)
    _ops: dict[Hashable, tuple[Kind, list[Scaler], int]] = field(default_factory=dict)

    def thread(self, tid: int, event: str, now: Count) -> None:
        """What one event of one thread has counted so far."""
        self._threads.setdefault((tid, event), Scaler()).take(now)

    def op(self, source: Hashable, kind: Kind, calls: int, counts: Sequence[Count]) -> None:
        """What the ops of one ``source`` (each weight is one) have counted so far, over all threads."""
        _, scalers, _ = self._ops.get(source, (kind, [Scaler() for _ in self.names], 0))
        self._ops[source] = (kind, scalers, calls)
        for scaler, count in zip(scalers, counts, strict=False):
            scaler.take(count)

    def events(self, threads: int) -> Events:
        """The figures. ``threads``: how many are counted."""
        totals = []
        values: dict[str, int] = {}
        for name in (*self.names, *(n for n in self.reasons if n not in self.names)):
            some = [s for (_, event), s in self._threads.items() if event == name]
            enabled = sum(s.enabled for s in some)
            if not enabled:
                reason = self.reasons.get(name, "it has not counted yet")
                totals.append(EventTotal(name, None, None, reason))
                continue
            values[name] = round(sum(s.value for s in some))
            totals.append(EventTotal(name, values[name], sum(s.running for s in some) / enabled))
        by: dict[Kind, tuple[list[Scaler], int]] = {}
        for kind, scalers, calls in self._ops.values():
            some, before = by.get(kind, ([], 0))
            by[kind] = (some + scalers, before + calls)
        ops = [
            OpEvents(kind.op, kind.dtype, kind.role, "", "CPU", "", calls, self._values(scalers))
            for kind, (scalers, calls) in by.items()
            if kind.op is not None
        ]
        first = self.names[0] if self.names else ""
        ops.sort(key=lambda o: -o.values.get(first, 0))
        cycles, misses = values.get("cycles"), values.get("cache-misses")
        return Events(
            tuple(totals),
            tuple(ops),
            self._values([s for kind, (some, _) in by.items() if kind.op is None for s in some]),
            threads,
            ipc=_ratio(values.get("instructions"), cycles),
            stall_ratio=_ratio(values.get("stalled-cycles-backend"), cycles),
            dram_bytes=None if misses is None else misses * LINE_BYTES,
        )

    def _values(self, scalers: Sequence[Scaler]) -> dict[str, int]:
        """By event; ``scalers``: one for each event, and so again for each source."""
        count = len(self.names)
        return {
            name: round(sum(s.value for s in scalers[index::count]))
            for index, name in enumerate(self.names)
            if any(s.enabled for s in scalers[index::count])
        }


def _ratio(part: int | None, whole: int | None) -> float | None:
    return None if part is None or not whole else part / whole
