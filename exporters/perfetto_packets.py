# SPDX-License-Identifier: Apache-2.0
"""Packets of a Perfetto trace: interned names, tracks, slices. Field numbers of perfetto_trace.proto.

A test parses what comes out of here with Perfetto's own classes.
"""

from __future__ import annotations

from collections.abc import Mapping

from .wire import Message

PACKET = 1  # Trace.packet
_SEQUENCE = 1  # one sequence of packets; its number is ours to choose
_STATE_CLEARED, _NEEDS_STATE = 1, 2  # TracePacket.SequenceFlags
MONOTONIC, BOOTTIME, REALTIME = 3, 6, 1  # BuiltinClock
BEGIN, END, INSTANT, COUNTER = 1, 2, 3, 4  # TrackEvent.Type


class Hole:
    """A note whose value, an unsigned number, comes later."""


HOLE = Hole()
Value = int | float | str | bool | Hole | None


class Names:
    """Strings that packets refer to by number; new ones are written before their first use."""

    _FIELDS = {"category": 1, "event": 2, "key": 3, "value": 29}  # of InternedData  # noqa: RUF012

    def __init__(self) -> None:
        self._iids: dict[tuple[str, str], int] = {}
        self._new: list[tuple[str, str, int]] = []

    def iid(self, kind: str, text: str) -> int:
        """The number of a string; ``kind``: category, event, key or value."""
        found = self._iids.get((kind, text))
        if found is None:
            found = self._iids[kind, text] = len(self._iids) + 1
            self._new.append((kind, text, found))
        return found

    def take(self) -> bytes:
        """A packet with the names that are new since the last time; b"" without any."""
        if not self._new:
            return b""
        interned = Message()
        for field in sorted(self._FIELDS.values()):
            for kind, text, iid in self._new:
                if self._FIELDS[kind] == field:
                    interned.message(field, Message().uint(1, iid).text(2, text))
        self._new.clear()
        return framed(_packet().message(12, interned))


def _packet(flags: int = _NEEDS_STATE) -> Message:
    return Message().uint(10, _SEQUENCE).uint(13, flags)


def framed(packet: Message) -> bytes:
    """One packet as the file has it."""
    return Message().message(PACKET, packet).encoded()


def first_packet() -> bytes:
    """Begins the sequence: all its times are of CLOCK_MONOTONIC."""
    defaults = Message().uint(58, MONOTONIC)
    return framed(_packet(_STATE_CLEARED).uint(41, 1).uint(87, 1).message(59, defaults))


def clock_packet(clocks: Mapping[int, int]) -> bytes:
    """One moment on several clocks: BuiltinClock -> ns."""
    snapshot = Message()
    for clock, ns in clocks.items():
        snapshot.message(1, Message().uint(1, clock).uint(2, ns))
    snapshot.uint(2, MONOTONIC)
    return framed(_packet().uint(8, clocks[MONOTONIC]).message(6, snapshot))


def process_track(uuid: int, pid: int, name: str) -> bytes:
    """The process that everything belongs to."""
    process = Message().uint(1, pid).text(6, name)
    return _descriptor(Message().uint(1, uuid).text(2, name).message(3, process))


def thread_track(uuid: int, parent: int, pid: int, tid: int, name: str) -> bytes:
    """A thread."""
    thread = Message().uint(1, pid).uint(2, tid).text(5, name)
    return _descriptor(Message().uint(1, uuid).uint(5, parent).message(4, thread))


def plain_track(uuid: int, parent: int, name: str) -> bytes:
    """A track for slices that are no thread's own."""
    return _descriptor(Message().uint(1, uuid).uint(5, parent).text(2, name))


def counter_track(uuid: int, parent: int, name: str, unit: str) -> bytes:
    """A track of values over time."""
    counter = Message().text(6, unit)
    return _descriptor(Message().uint(1, uuid).uint(5, parent).text(2, name).message(8, counter))


def _descriptor(track: Message) -> bytes:
    return framed(_packet().message(60, track))


def event(
    kind: int,
    track: int,
    names: Names,
    *,
    name: str | Hole = "",
    category: str = "",
    notes: Mapping[str, Value] | None = None,
    flows_out: int = 0,
    flows_in: int = 0,
) -> Message:
    """A TrackEvent with holes for its flows, ``flows_out`` before ``flows_in``.

    ``notes`` become debug annotations; what is None is left out. A hole for the name wants a
    number that :meth:`Names.iid` gave.
    """
    message = Message().uint(9, kind).uint(11, track)
    if category:
        message.uint(3, names.iid("category", category))
    if isinstance(name, Hole):
        message.uint_hole(10)
    elif name:
        message.uint(10, names.iid("event", name))
    for key, value in (notes or {}).items():
        if value is not None:
            message.message(4, _annotation(names, key, value))
    for _ in range(flows_out):
        message.fixed64_hole(47)
    for _ in range(flows_in):
        message.fixed64_hole(48)
    return message


def _annotation(names: Names, key: str, value: int | float | str | bool | Hole) -> Message:
    message = Message().uint(1, names.iid("key", key))
    if isinstance(value, Hole):
        return message.uint_hole(3)
    if isinstance(value, bool):
        return message.uint(2, int(value))
    if isinstance(value, int):
        return message.uint(4, value)
    if isinstance(value, float):
        return message.double(5, value)
    return message.uint(17, names.iid("value", value))


def stamped(track_event: Message) -> Message:
    """A packet of one event with a hole for its time, to be part of a template."""
    return Message().message(PACKET, _packet().uint_hole(8).message(11, track_event))


def at(ns: int, track_event: Message) -> bytes:
    """A packet of one event."""
    return framed(_packet().uint(8, max(ns, 0)).message(11, track_event))
