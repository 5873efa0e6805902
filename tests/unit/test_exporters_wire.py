# SPDX-License-Identifier: Apache-2.0
"""Messages written by templates are what the protobuf library reads."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import DebugAnnotation, TrackEvent

from profinferd.exporters.wire import Message, Template, varint

NUMBERS = st.integers(0, 2**63 - 1)


@given(st.lists(st.tuples(NUMBERS, NUMBERS, st.integers(0, 2**64 - 1)), min_size=1, max_size=5))
def test_holes_are_filled_row_by_row(rows: list[tuple[int, int, int]]) -> None:
    inner = Message().text(10, "n").uint_hole(3)
    message = Message().uint_hole(11).message(4, inner).fixed64_hole(47).uint(9, 2)
    template = Template(message)
    assert template.holes == (2, 1)
    data = template.rows(
        np.array([row[:2] for row in rows], dtype=np.int64),
        np.array([row[2:] for row in rows], dtype=np.uint64),
    )
    size = len(message)
    assert len(data) == size * len(rows)
    for number, (track, value, flow) in enumerate(rows):
        event = TrackEvent.FromString(data[number * size : (number + 1) * size])
        assert (event.track_uuid, event.type, list(event.flow_ids)) == (track, 2, [flow])
        (note,) = event.debug_annotations
        assert (note.name, note.uint_value) == ("n", value)


@given(st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False), st.text(max_size=5))
def test_fields_are_read_back(number: int, real: float, text: str) -> None:
    message = Message().uint(4, number)
    assert DebugAnnotation.FromString(message.encoded()).int_value == number
    assert DebugAnnotation.FromString(Message().double(5, real).encoded()).double_value == real
    assert DebugAnnotation.FromString(Message().text(6, text).encoded()).string_value == text


def test_edges() -> None:
    assert (varint(0), varint(127), varint(128)) == (b"\0", b"\x7f", b"\x80\x01")
    assert DebugAnnotation.FromString(Message().text(6, "\ud800").encoded()).string_value == "?"
    hole = Template(Message().uint_hole(3))
    assert DebugAnnotation.FromString(hole.fill(np.array([-5]))).uint_value == 0
    assert Message().packed_holes(5, 0).encoded() == b""
