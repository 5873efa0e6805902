# SPDX-License-Identifier: Apache-2.0
"""What a Perfetto trace has besides calls, graphs and kernels: thread states, page faults, lost records.

Each kind is drawn if it was recorded with the fields that drawing needs, and left out otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..agent.model.trace import Trace
from . import Choice
from . import perfetto_packets as packets
from .nesting import lanes
from .wire import Template

if TYPE_CHECKING:
    from .perfetto import Tracks

CAUSES = (
    "preempted", "yielded", "throttled", "woken up",
    "futex", "page fault", "I/O", "sleep", "system call", "not known",
)  # fmt: skip
"""In words, by ``enum wait_cause``."""
_READY = 4  # causes below this one leave the thread ready to run
_NONE = 0xFFFFFFFF
_UNKNOWN_NS = (1 << 64) - 1
_BATCH = 1 << 16

Records = npt.NDArray[Any]
Ints = npt.NDArray[np.int64]


def record_packets(trace: Trace, choice: Choice, names: packets.Names, tracks: Tracks) -> Iterator[bytes]:
    """Packets of all records of other kinds; what they refer to is described by the caller."""
    begin, end = choice.window or (None, None)
    for kind in trace.kinds:
        records = trace.records(kind, begin, end)
        fields = set(records.dtype.names or ())
        if {"begin", "woken", "end", "tid", "cause"} <= fields:
            yield from _states(trace, choice, records, names, tracks)
        elif {"ts", "tid", "kind", "addr"} <= fields:
            yield from _faults(records, names, tracks)
        elif {"begin", "arrived", "end", "tid", "blocked_ns"} <= fields:
            yield from _barriers(records, names, tracks)
        elif "ts" in fields and not fields & {"tid", "seq", "begin", "end"}:
            yield from _counters(kind, records, names, tracks)
    yield from _gaps(trace, choice, names, tracks)


def _states(
    trace: Trace, choice: Choice, spans: Records, names: packets.Names, tracks: Tracks
) -> Iterator[bytes]:
    """Off the core: blocked until woken, then ready until it runs. On it: the rest of each graph."""
    graphs = _graph_times(trace, choice)
    for tid in np.unique(spans["tid"]).tolist():
        own = np.sort(spans[spans["tid"] == tid], order="begin")
        track = tracks.named("state", parent=tracks.thread(tid))
        begin, end = own["begin"].astype(np.int64), own["end"].astype(np.int64)
        woken = np.clip(own["woken"].astype(np.int64), begin, end)
        # Of one thread they cannot overlap; a record that does would break the nesting.
        begin[1:] = np.maximum(begin[1:], np.maximum.accumulate(end)[:-1])
        end, woken = np.maximum(end, begin), np.maximum(woken, begin)
        cause = own["cause"].astype(np.int64)
        numbers, which = np.unique(cause, return_inverse=True)
        left = np.array([names.iid("event", _left(number)) for number in numbers.tolist()], dtype=np.int64)
        woken_up = names.iid("event", f"runnable: {CAUSES[3]}")
        running = _between(graphs, begin, end)
        states = [
            (begin, np.where(cause < _READY, end, woken), left[which]),
            (np.where(cause < _READY, end, woken), end, np.full(len(end), woken_up)),
            (*running, np.full(len(running[0]), names.iid("event", "running"))),
        ]
        begins, ends, words = (np.concatenate(part) for part in zip(*states, strict=True))
        yield from _slices(begins, ends, words, "state", track, names)
        if "by_comm" in (own.dtype.names or ()):
            yield from _preemptions(own[cause == 0], tid, names, tracks, choice)


def _left(cause: int) -> str:
    word = CAUSES[cause] if cause < len(CAUSES) else f"cause {cause}"
    return f"runnable: {word}" if cause < _READY else f"blocked: {word}"


def _preemptions(
    own: Records, tid: int, names: packets.Names, tracks: Tracks, choice: Choice
) -> Iterator[bytes]:
    """An instant on the thread for each time that another took its core."""
    track = tracks.thread(tid)
    for taker in np.unique(own["by_comm"]).tolist():
        of = own[own["by_comm"] == taker]
        name = "another program" if choice.anonymise else _word(taker)
        event = packets.event(
            packets.INSTANT, track, names, name="preempted", category="sched",
            notes={"by": name, "ns": packets.HOLE},
        )  # fmt: skip
        template = Template(packets.stamped(event))
        yield template.rows(
            np.stack([of["begin"].astype(np.int64), (of["end"] - of["begin"]).astype(np.int64)], axis=1)
        )


def _graph_times(trace: Trace, choice: Choice) -> tuple[Ints, Ints]:
    """When a graph ran, without overlaps."""
    runs = trace.runs[trace.runs["parent"] < 0]
    if choice.window is not None:
        runs = runs[(runs["begin"] < choice.window[1]) & (runs["end"] >= choice.window[0])]
    runs = np.sort(runs, order="begin")
    begin, end = runs["begin"].astype(np.int64), np.maximum.accumulate(runs["end"].astype(np.int64))
    if len(begin):
        begin[1:] = np.maximum(begin[1:], end[:-1])
    return begin, np.maximum(end, begin)


def _between(
    graphs: tuple[Ints, Ints],
    begin: Ints,
    end: Ints,
) -> tuple[Ints, Ints]:
    """The parts of the graphs' times in which the thread was not off its core."""
    edges = np.concatenate([graphs[0], graphs[1], begin, end])
    steps = np.repeat([1, -1, -2, 2], [len(graphs[0]), len(graphs[1]), len(begin), len(end)])
    order = np.argsort(edges, kind="stable")
    edges, level = edges[order], np.cumsum(steps[order])
    running = (level[:-1] == 1) & (edges[1:] > edges[:-1])
    return edges[:-1][running], edges[1:][running]


def _faults(records: Records, names: packets.Names, tracks: Tracks) -> Iterator[bytes]:
    """Instants on the thread that faulted."""
    fields = set(records.dtype.names or ())
    for tid in np.unique(records["tid"]).tolist():
        track = tracks.thread(tid)
        for kind, word in ((0, "minor page fault"), (1, "major page fault")):
            own = records[(records["tid"] == tid) & (records["kind"] == kind)]
            notes: dict[str, packets.Value] = {}
            columns = [own["ts"].astype(np.int64)]
            for field in ("node", "wait_ns"):
                if field in fields:
                    known = own[field] != (_NONE if field == "node" else _UNKNOWN_NS)
                    if bool(known.all()):
                        notes[field] = packets.HOLE
                        columns.append(own[field].astype(np.int64))
            event = packets.event(packets.INSTANT, track, names, name=word, category="fault", notes=notes)
            yield from _rows(Template(packets.stamped(event)), np.stack(columns, axis=1))


def _barriers(records: Records, names: packets.Names, tracks: Tracks) -> Iterator[bytes]:
    """On each thread's barrier track: when it had done its share and waited for the others."""
    for tid in np.unique(records["tid"]).tolist():
        own = np.sort(records[(records["tid"] == tid) & (records["end"] != 0)], order="begin")
        track = tracks.named("barrier", parent=tracks.thread(tid))
        begin, end = own["arrived"].astype(np.int64), own["end"].astype(np.int64)
        name = np.full(len(own), names.iid("event", "waits at the barrier"))
        yield from _slices(begin, end, name, "barrier", track, names)


def _counters(kind: str, records: Records, names: packets.Names, tracks: Tracks) -> Iterator[bytes]:
    """A track for every number that was looked at from time to time. Negative ones mean absent."""
    for field in records.dtype.names or ():
        if field == "ts" or records[field].ndim > 1 or records[field].dtype.kind not in "iu":
            continue
        values = records[field].astype(np.int64)
        name = kind if field == "value" else f"{kind} {field}"
        track = tracks.named(name.replace("_", " "), unit="")
        event = packets.event(packets.COUNTER, track, names).uint_hole(30)
        columns = np.stack([records["ts"].astype(np.int64), values], axis=1)[values >= 0]
        yield from _rows(Template(packets.stamped(event)), columns)


def _gaps(trace: Trace, choice: Choice, names: packets.Names, tracks: Tracks) -> Iterator[bytes]:
    """When records were lost: the trace is not whole there (C11)."""
    gaps = trace.gaps
    if choice.window is not None:
        gaps = gaps[(gaps["begin"] < choice.window[1]) & (gaps["end"] >= choice.window[0])]
    if not len(gaps):
        return
    gaps = gaps[np.lexsort((-gaps["end"], gaps["begin"]))]
    lane = lanes(gaps["begin"], gaps["end"])
    for gap, number in zip(gaps, lane.tolist(), strict=True):
        track = tracks.named("lost records" if not number else f"lost records {number + 1}")
        event = packets.event(
            packets.BEGIN, track, names, name=f"lost: {gap['kind']}", category="lost",
            notes={"records": int(gap["count"])},
        )  # fmt: skip
        yield packets.at(int(gap["begin"]), event)
        yield packets.at(int(gap["end"]), packets.event(packets.END, track, names))


def _slices(
    begin: Ints, end: Ints, name: Ints, category: str, track: int, names: packets.Names
) -> Iterator[bytes]:
    """Slices that do not overlap, in order of time: the end of one comes before the next one's begin,
    also where both are at the same moment. Those of no length are left out."""
    order = np.argsort(begin, kind="stable")
    begin, end, name = begin[order], end[order], name[order]
    if len(begin):
        begin[1:] = np.maximum(begin[1:], np.maximum.accumulate(end)[:-1])  # what overlaps is cut
    kept = end > begin
    opening = packets.event(packets.BEGIN, track, names, name=packets.HOLE, category=category)
    message = packets.stamped(opening).append(packets.stamped(packets.event(packets.END, track, names)))
    yield from _rows(Template(message), np.stack([begin, name, end], axis=1)[kept])


def _rows(template: Template, columns: npt.NDArray[np.int64]) -> Iterator[bytes]:
    for start in range(0, len(columns), _BATCH):
        yield template.rows(columns[start : start + _BATCH])


def _word(raw: bytes | str) -> str:
    text = raw.split(b"\0", 1)[0].decode("utf-8", "replace") if isinstance(raw, bytes) else raw
    return "".join(c if c.isprintable() else "\ufffd" for c in text) or "another program"
