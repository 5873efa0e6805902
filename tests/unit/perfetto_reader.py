# SPDX-License-Identifier: Apache-2.0
"""Reads a Perfetto trace back with Perfetto's own message classes, as its importer would.

The importer itself (trace_processor) is a program that its Python package downloads; what it does
with slices is little enough to do here: sort by time, keeping the order of the file where times
are equal, and close the innermost open slice of the track at each end.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TrackEvent


@dataclass
class Slice:
    track: int
    name: str
    category: str
    begin: int
    end: int = -1
    depth: int = 0
    notes: dict[str, Any] = field(default_factory=dict)
    sends: tuple[int, ...] = ()
    receives: tuple[int, ...] = ()


@dataclass
class Parsed:
    """What a trace shows. ``tracks``: name and parent by number; threads by "pid/tid"."""

    slices: list[Slice] = field(default_factory=list)
    instants: list[Slice] = field(default_factory=list)
    counters: list[tuple[int, int, float]] = field(default_factory=list)
    tracks: dict[int, tuple[str, int]] = field(default_factory=dict)
    clocks: list[dict[int, int]] = field(default_factory=list)

    def of(self, category: str) -> list[Slice]:
        """Slices of one category, by time."""
        return sorted((s for s in self.slices if s.category == category), key=lambda s: (s.begin, -s.end))

    def flows(self) -> set[tuple[int, int]]:
        """(place of the producer, place of the consumer) in ``slices``."""
        senders = {flow: i for i, s in enumerate(self.slices) for flow in s.sends}
        assert len(senders) == sum(len(s.sends) for s in self.slices), "a flow has one beginning"
        return {(senders[flow], i) for i, s in enumerate(self.slices) for flow in s.receives}


def parse(data: bytes) -> Parsed:
    """Everything; AssertionError for a trace that the importer would repair or reject."""
    trace = Trace()
    trace.ParseFromString(data)
    out = Parsed()
    names: dict[str, dict[int, str]] = defaultdict(dict)
    events: list[tuple[int, Any, dict[str, Any]]] = []
    assert trace.packet[0].sequence_flags & 1, "the first packet begins the sequence"
    default_clock = trace.packet[0].trace_packet_defaults.timestamp_clock_id
    for packet in trace.packet:
        assert packet.trusted_packet_sequence_id == 1
        for kind in ("event_categories", "event_names", "debug_annotation_names"):
            for item in getattr(packet.interned_data, kind):
                assert item.iid not in names[kind], "a name is given once"
                names[kind][item.iid] = item.name
        for item in packet.interned_data.debug_annotation_string_values:
            names["values"][item.iid] = item.str.decode()
        if packet.HasField("clock_snapshot"):
            out.clocks.append({c.clock_id: c.timestamp for c in packet.clock_snapshot.clocks})
            assert packet.clock_snapshot.primary_trace_clock == default_clock
        if packet.HasField("track_descriptor"):
            d = packet.track_descriptor
            assert d.uuid not in out.tracks, "a track is described once"
            name = d.name or f"{d.thread.pid}/{d.thread.tid}"
            assert not d.parent_uuid or d.parent_uuid in out.tracks, "its parent is there"
            out.tracks[d.uuid] = (name, d.parent_uuid)
        if packet.HasField("track_event"):
            assert packet.sequence_flags == 2 and packet.HasField("timestamp")
            e = packet.track_event
            assert e.track_uuid in out.tracks, "a track is described before its events"
            events.append((packet.timestamp, e, _resolved(e, names)))
    _replay(sorted(events, key=lambda event: event[0]), out)
    return out


def _resolved(e: Any, names: dict[str, dict[int, str]]) -> dict[str, Any]:
    notes: dict[str, Any] = {}
    for a in e.debug_annotations:
        kind = a.WhichOneof("value")
        value = getattr(a, kind)
        notes[names["debug_annotation_names"][a.name_iid]] = (
            names["values"][value] if kind == "string_value_iid" else value
        )
    category = names["event_categories"][e.category_iids[0]] if e.category_iids else ""
    return {
        "name": names["event_names"][e.name_iid] if e.name_iid else "", "category": category,
        "notes": notes, "sends": tuple(e.flow_ids), "receives": tuple(e.terminating_flow_ids),
    }  # fmt: skip


def _replay(events: list[tuple[int, Any, dict[str, Any]]], out: Parsed) -> None:
    stacks: dict[int, list[Slice]] = defaultdict(list)
    for ts, e, said in events:
        stack = stacks[e.track_uuid]
        if e.type == TrackEvent.TYPE_SLICE_BEGIN:
            stack.append(Slice(e.track_uuid, begin=ts, depth=len(stack), **said))
            out.slices.append(stack[-1])
        elif e.type == TrackEvent.TYPE_SLICE_END:
            assert stack, f"an end without a beginning at {ts}"
            stack.pop().end = ts
        elif e.type == TrackEvent.TYPE_INSTANT:
            out.instants.append(Slice(e.track_uuid, begin=ts, end=ts, **said))
        else:
            assert e.type == TrackEvent.TYPE_COUNTER
            out.counters.append((e.track_uuid, ts, e.counter_value))
    assert not any(stacks.values()), "a slice was never closed"
