# SPDX-License-Identifier: Apache-2.0
"""What every compute thread did during one call: running, ready, blocked, at a barrier; faults."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ...agent.model.addresses import UNKNOWN, AddressBook
from ...agent.model.trace import Trace
from ..text import clean
from .memory import some_graphs

RUNNING, RUNNABLE, BLOCKED, PREEMPTED, THROTTLED, GAP, BARRIER = range(7)
"""STATES of ``page/src/types.ts``."""
_CAUSES = (
    "preempted",
    "yielded",
    "throttled",
    "wakeup",
    "futex",
    "page fault",
    "I/O",
    "sleep",
    "other",
    "unknown",
)
_STATE = {0: PREEMPTED, 1: RUNNABLE, 2: THROTTLED, 3: RUNNABLE}
_MAX_SLICES = 4000
_MAX_FAULTS = 400
_THIN = 800
"""A slice of a barrier is kept if it is longer than this part of its call."""

Slice = tuple[int, int, int, str]


class _Near:
    """Records of one kind that touch a stretch of time; read some seconds at a time."""

    _AHEAD, _BEHIND = 10_000_000_000, 60_000_000_000
    """A record's time is its begin: one that began long before may still go on."""

    def __init__(self, trace: Trace, kind: str) -> None:
        self._trace, self._kind = trace, kind
        self._low = self._high = 0
        self._held: npt.NDArray[Any] = np.zeros(0)

    def touching(self, begin: int, end: int) -> npt.NDArray[Any]:
        """Those with some of [begin, end) in them; none without the fields "begin" and "end"."""
        if not (self._low <= begin and end <= self._high):
            self._low, self._high = begin, max(begin + self._AHEAD, end)
            self._held = self._trace.records(self._kind, begin - self._BEHIND, self._high)
        if not {"begin", "end"} <= set(self._held.dtype.names or ()):
            return self._held[:0]
        first, last = self._held["begin"].astype(np.int64), self._held["end"].astype(np.int64)
        return self._held[(first < end) & (last > begin)]


class Lanes:
    """Lanes of a trace's threads. Kinds of records that were not recorded give no lanes."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._threads: dict[int, int] = {}
        kinds = trace.kinds
        self._spans, self._barriers = (
            _Near(trace, kind) if kinds.get(kind) else None for kind in ("sched_spans", "barriers")
        )
        self._book: AddressBook | None = None
        self._faults = "page_faults" if kinds.get("page_faults") else None
        self._leaders = {int(tid) for tid in np.unique(trace.calls["tid"]).tolist()}

    def of(self, begin: int, end: int) -> tuple[list[dict[str, Any]], list[tuple[Any, ...]]]:
        """Lanes and faults in [begin, end), times relative to ``begin``."""
        slices: dict[int, list[Slice]] = {}
        if self._spans is not None:
            self._off_core(self._spans.touching(begin, end), begin, end, slices)
        if self._barriers is not None:
            self._at_barriers(self._barriers.touching(begin, end), begin, end, slices)
        lanes = [
            {"thread": self._thread(tid), "slices": _filled(_layered(own), end - begin)}
            for tid, own in sorted(slices.items(), key=lambda item: (item[0] not in self._leaders, item[0]))
        ]
        return lanes, self._faulted(begin, end)

    def threads(self) -> list[tuple[int, str]]:
        """tid and name of every thread that has a lane, by number."""
        return [(tid, "calling thread" if tid in self._leaders else f"worker {tid}") for tid in self._threads]

    def _thread(self, tid: int) -> int:
        return self._threads.setdefault(tid, len(self._threads))

    def _off_core(self, spans: npt.NDArray[Any], begin: int, end: int, into: dict[int, list[Slice]]) -> None:
        names = spans.dtype.names or ()
        if not {"cause", "woken", "tid"} <= set(names):
            return
        for one in spans[:_MAX_SLICES]:
            cause = int(one["cause"])
            left, woken, back = int(one["begin"]), int(one["woken"]), int(one["end"])
            own = into.setdefault(int(one["tid"]), [])
            why = _CAUSES[cause] if cause < len(_CAUSES) else "unknown"
            who = _comm(one["by_comm"]) if "by_comm" in names and cause == 0 else ""
            if cause in _STATE:
                _put(own, left, back, _STATE[cause], who if cause == 0 and who else why, begin, end)
                continue
            ready = min(max(woken, left), back) if woken else back
            _put(own, left, ready, BLOCKED, why, begin, end)
            _put(own, ready, back, RUNNABLE, "wakeup", begin, end)

    def _at_barriers(
        self, records: npt.NDArray[Any], begin: int, end: int, into: dict[int, list[Slice]]
    ) -> None:
        names = records.dtype.names or ()
        if not {"arrived", "tid"} <= set(names):
            return
        arrived, last = records["arrived"].astype(np.int64), records["end"].astype(np.int64)
        if "tensor" in names:
            last = np.minimum(last, _released(records, arrived))
        # What is thinner than a pixel would only be noise: there is one for every kernel.
        seen = last - arrived > (end - begin) // _THIN
        columns = (records["tid"][seen].tolist(), arrived[seen].tolist(), last[seen].tolist())
        for tid, left, right in list(zip(*columns, strict=True))[:_MAX_SLICES]:
            _put(into.setdefault(tid, []), left, right, BARRIER, "", begin, end)

    def _named(self, address: int) -> str:
        """The tensor at an address, or what else is known to be there; "" where nothing is."""
        if self._book is None:
            self._book = AddressBook()
            for graph in some_graphs(self._trace):
                self._book.add_graph(graph)
        place = self._book.find(address)
        if place.tensor is not None:
            return clean(place.tensor, 64)
        return "" if place.mapping == UNKNOWN else place.mapping

    def _faulted(self, begin: int, end: int) -> list[tuple[Any, ...]]:
        if self._faults is None:
            return []
        found = self._trace.records(self._faults, begin, end)
        names = found.dtype.names or ()
        if not {"ts", "tid", "kind"} <= set(names):
            return []
        # Majors first, where there are too many of them to be seen.
        if len(found) > _MAX_FAULTS:
            found = found[np.argsort(-found["kind"].astype(np.int64), kind="stable")[:_MAX_FAULTS]]
        out = []
        for one in found:
            wait = int(one["wait_ns"]) if "wait_ns" in names else -1
            known = 0 <= wait < 1 << 62
            what = self._named(int(one["addr"])) if "addr" in names else ""
            node = int(one["node"]) if "node" in names and int(one["node"]) < 1 << 31 else -1
            out.append(
                (
                    int(one["ts"]) - begin,
                    self._thread(int(one["tid"])),
                    int(one["kind"]),
                    wait if known else None,
                    node,
                    what,
                )
            )
        return sorted(out)


def _comm(value: Any) -> str:
    raw = value.tobytes() if isinstance(value, np.ndarray) else value
    text = raw.split(b"\0", 1)[0].decode("utf-8", "replace") if isinstance(raw, bytes) else str(raw)
    return clean(text, 64) if text else ""


def _put(own: list[Slice], left: int, right: int, state: int, why: str, begin: int, end: int) -> None:
    left, right = max(left, begin), min(right, end)
    if right > left:
        own.append((left - begin, right - left, state, why))


def _released(records: npt.NDArray[Any], arrived: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """When the last thread of each barrier came: from then on nobody is waited for, and who still does
    not go on has no core. Threads of one barrier computed the same tensor at the same time."""
    begin, end = records["begin"].astype(np.int64), records["end"].astype(np.int64)
    order = np.lexsort((begin, records["tensor"]))
    out = arrived.copy()
    group: list[int] = []
    for i in [*order.tolist(), -1]:
        same = i >= 0 and group and records["tensor"][i] == records["tensor"][group[0]]
        if not same or begin[i] >= max(end[j] for j in group):
            out[group] = max((arrived[j] for j in group), default=0)
            group = []
        group.append(i)
    return out


def _layered(slices: list[Slice]) -> list[Slice]:
    """In order, of several at once the one that says most: that it was ready and had no core, then that it
    waited at a barrier, then how it waited."""
    barrier = [s for s in slices if s[2] == BARRIER]
    blocked = [s for s in slices if s[2] == BLOCKED]
    out = sorted(s for s in slices if s[2] not in (BARRIER, BLOCKED))
    for layer in (barrier, blocked):
        out = sorted([*out, *_around(sorted(layer), out)])
    return out


def _around(slices: list[Slice], above: list[Slice]) -> list[Slice]:
    """What of them is not covered by those above. Both in order."""
    out: list[Slice] = []
    first = 0
    for left, length, state, why in slices:
        at, end = left, left + length
        while first < len(above) and above[first][0] + above[first][1] <= left:
            first += 1
        for begin, covered, _, _ in above[first:]:
            if begin >= end:
                break
            if begin > at:
                out.append((at, begin - at, state, why))
            at = max(at, begin + covered)
        if at < end:
            out.append((at, end - at, state, why))
    return out


def _filled(slices: list[Slice], ns: int) -> list[Slice]:
    """The slices without overlap, and running in between."""
    out: list[Slice] = []
    at = 0
    for left, length, state, why in slices:
        begin, end = max(left, at), left + length
        if end <= at:
            continue
        if begin > at:
            out.append((at, begin - at, RUNNING, ""))
        out.append((begin, end - begin, state, why))
        at = end
    if at < ns:
        out.append((at, ns - at, RUNNING, ""))
    return out
