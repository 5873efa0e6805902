# SPDX-License-Identifier: Apache-2.0
"""Perfetto traces, read back with Perfetto's own classes (cases C11, C24, C25)."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from profinferd.agent.errors import UsageError
from profinferd.agent.model.trace import Trace
from profinferd.exporters import Choice
from profinferd.exporters.nesting import lanes
from profinferd.exporters.perfetto import PerfettoExporter

from . import longtraces, traces
from .graphs import decoder
from .perfetto_reader import Parsed, Slice, parse
from .streams import OP_NS, SETUP

#: Where the data of each kernel of a one-layer decoder comes from, by hand; numbered in the order
#: in which they run (see test_model_trace.KERNELS). 7 and 8 write the cache that 9 reads.
EDGES = {
    (0, 1), (1, 2), (2, 3), (1, 4), (4, 5), (1, 6), (5, 7), (6, 8), (3, 9), (7, 9), (8, 9), (9, 10),
    (10, 11), (0, 12), (11, 13), (12, 13), (13, 14), (14, 15), (14, 16), (15, 17), (16, 17), (17, 18),
    (18, 19), (13, 19), (19, 20), (20, 21),
}  # fmt: skip


WHOLE = Choice()


def export(trace: Trace, choice: Choice = WHOLE) -> Parsed:
    ((path, pieces),) = PerfettoExporter().files(trace, choice)
    assert path == ""
    return parse(b"".join(pieces))


def inside(outer: Slice, slices: list[Slice]) -> list[Slice]:
    return [s for s in slices if s.track == outer.track and outer.begin <= s.begin and s.end <= outer.end]


def test_slices_nest_token_graph_op_with_the_recorded_times() -> None:
    trace = traces.small()
    parsed = export(trace)
    tokens, graphs, ops = parsed.of("token"), parsed.of("graph"), parsed.of("op")
    assert [t.name for t in tokens] == ["prefill", "decode", "decode", "decode"]
    assert [t.notes["tokens"] for t in tokens] == [5, 1, 1, 1]
    assert {s.depth for s in graphs} == {1}
    assert [(len(inside(t, graphs)), len(inside(t, ops))) for t in tokens] == [(1, 22)] * 4
    assert {s.depth for s in ops} == {2}
    assert [(s.begin, s.end) for s in tokens] == trace.calls[["begin", "end"]].tolist()
    assert [(s.begin, s.end) for s in ops] == trace.ops[["begin", "end"]].tolist()
    assert {s.end - s.begin for s in ops} == {OP_NS}
    assert all(ops[22 * i].begin - graphs[i].begin == SETUP for i in range(4))
    assert parsed.tracks[tokens[0].track] == ("7/100", 1)
    assert parsed.clocks == [{3: 10**12, 6: 10**12 + 5, 1: 1_700_000_000_000_000_000}]


def test_a_fused_kernel_is_one_slice_of_both_names() -> None:
    """C25: RMS_NORM and MUL ran as one kernel."""
    ops = Counter(s.name for s in export(traces.small()).of("op"))
    assert ops["RMS_NORM+MUL attn_norm"] == ops["RMS_NORM+MUL ffn_norm"] == 4
    assert not any(name.startswith(("RMS_NORM ", "MUL ", "VIEW", "RESHAPE", "PERMUTE")) for name in ops)
    assert ops["FLASH_ATTN_EXT attn"] == 4


def test_flows_lead_from_producers_to_consumers() -> None:
    parsed = export(traces.small())
    ops = [i for i, s in enumerate(parsed.slices) if s.category == "op"]
    by_time = sorted(ops, key=lambda i: parsed.slices[i].begin)
    place = {i: n for n, i in enumerate(by_time)}
    flows = {(place[a], place[b]) for a, b in parsed.flows()}
    assert flows == {(22 * run + a, 22 * run + b) for run in range(4) for a, b in EDGES}


def test_numbers_agree_with_the_sums() -> None:
    trace = longtraces.long(40, layers=2, ns=12_345)
    ns = sum(s.end - s.begin for s in export(trace).of("op"))
    assert ns == int(trace.sums["ns"].sum()) == 40 * 39 * 12_345


def test_lost_records_are_a_gap_and_counted() -> None:
    """C11: the kernel before the lost one does not silently last longer, and the gap shows."""
    begin = traces.small().facts.begin_ns
    gaps = [(begin, begin + 500, 7, "ops"), (begin + 200, begin + 900, 2, "events")]
    trace = traces.small(lose=[3], gaps=gaps)
    parsed = export(trace)
    lost = parsed.of("lost")
    assert [(s.name, s.notes["records"]) for s in lost] == [("lost: ops", 7), ("lost: events", 2)]
    assert {parsed.tracks[s.track][0] for s in lost} == {"lost records", "lost records 2"}
    shared = [s for s in parsed.of("op") if "time shared with kernels that were not seen" in s.notes]
    assert len(shared) == 1 and shared[0].name == "MUL_MAT attn_q"
    assert shared[0].end - shared[0].begin == 2 * OP_NS


def test_what_overlaps_without_nesting_gets_a_track_of_its_own() -> None:
    """C24: {200,300} and {280,350} on one thread."""
    begin, end = np.array([100, 200, 280, 290]), np.array([400, 300, 350, 295])
    assert lanes(begin, end).tolist() == [0, 0, 1, 0]
    s = longtraces.segment(np.full((2, 3), 1000, np.int64), [(0, False), (1, True), (5, False)])
    s.calls["end"][0] = s.calls["begin"][1] + 500  # the first call ends inside the second
    parsed = export(longtraces.trace([s], [decoder(layers=1).graph()]))
    first, second = parsed.of("token")
    assert (first.begin, first.end) == tuple(s.calls[["begin", "end"]][0])
    assert first.track != second.track and {first.depth, second.depth} == {0}
    assert len(parsed.of("op")) == 6


def test_ops_that_cannot_be_are_cut_to_their_graph() -> None:
    s = longtraces.segment(np.full((1, 3), 1000, np.int64), [(0, False), (1, True), (5, False)])
    s.ops["end"][0] += 700
    s.ops["end"][2] += 10**9
    parsed = export(longtraces.trace([s], [decoder(layers=1).graph()]))
    (graph,) = parsed.of("graph")
    assert len(inside(graph, parsed.of("op"))) == 3


SPAN = [(name, "<u8") for name in ("begin", "woken", "end")]
SPAN += [("tid", "<u4"), ("by_comm", "S16"), ("cause", "<u2")]
FAULT = [(name, "<u8") for name in ("ts", "addr", "wait_ns")]
FAULT += [("tid", "<u4"), ("node", "<u4"), ("kind", "<u2")]


def test_thread_states_and_preemptions() -> None:
    trace = traces.small()
    begin, end = (int(trace.runs[field][0]) for field in ("begin", "end"))
    spans = np.array(
        [
            (begin + 1000, begin + 1000, begin + 3000, 100, b"make", 0),
            (begin + 3000, begin + 4000, begin + 5000, 100, b"", 4),
            (end + 500, end + 600, end + 600, 100, b"", 7),
        ],
        dtype=SPAN,
    )
    parsed = export(traces.small(records={"spans": with_time(spans)}))
    states = [s for s in parsed.of("state") if s.end <= end + 600]
    assert [(s.name, s.begin - begin, s.end - begin) for s in states] == [
        ("running", 0, 1000),
        ("runnable: preempted", 1000, 3000),
        ("blocked: futex", 3000, 4000),
        ("runnable: woken up", 4000, 5000),
        ("running", 5000, end - begin),
        ("blocked: sleep", end - begin + 500, end - begin + 600),
    ]
    assert parsed.tracks[states[0].track] == ("state", parsed.of("token")[0].track)
    (taken,) = parsed.instants
    assert (taken.name, taken.begin, taken.notes) == ("preempted", begin + 1000, {"by": "make", "ns": 2000})


def test_waits_at_barriers() -> None:
    begin = int(traces.small().runs["begin"][0])
    rows = np.zeros(3, [(n, "<u8") for n in ("begin", "arrived", "end", "blocked_ns")] + [("tid", "<u4")])
    rows["begin"], rows["arrived"], rows["end"] = (
        begin,
        [begin + 5, begin + 20, begin + 25],
        [begin + 9, 0, begin + 30],
    )
    rows["tid"] = 101
    parsed = export(traces.small(records={"barriers": with_time(rows)}))
    waits = [(s.begin - begin, s.end - begin) for s in parsed.of("barrier")]
    assert waits == [(5, 9), (25, 30)]


def test_records_that_cannot_be_break_nothing() -> None:
    """A hostile file: states that overlap, run backwards, or lie before time."""
    begin = int(traces.small().runs["begin"][0])
    spans = np.array(
        [
            (begin, begin, begin + 500, 100, b"\x1b[2J", 0),
            (begin + 100, begin + 650, begin + 700, 100, b"", 60000),
            (begin + 900, 0, begin + 10, 100, b"", 4),
            (2**63 - 5, 2**63 - 5, 2**63 - 1, 100, b"", 4),
        ],
        dtype=SPAN,
    )
    parsed = export(traces.small(records={"spans": with_time(spans)}))
    assert {"runnable: preempted", "blocked: cause 60000"} <= {s.name for s in parsed.of("state")}
    assert all("\x1b" not in repr(s.notes) for s in parsed.instants)


def with_time(rows: Any) -> Any:
    """The records with a field "ts", as recordings have it."""
    out = np.zeros(len(rows), [("ts", "<i8"), *rows.dtype.descr])
    out["ts"] = rows["begin"]
    for name in rows.dtype.names:
        out[name] = rows[name]
    return out


def test_page_faults_are_instants_and_counters_are_tracks() -> None:
    begin = int(traces.small().runs["begin"][0])
    faults = np.array(
        [(begin + 5, 0x1000, 700, 100, 3, 1), (begin + 9, 0x2000, 0, 100, 4, 0)],
        dtype=FAULT,
    )
    counts = np.array([(begin, 10), (begin + 100, 12)], dtype=[("ts", "<u8"), ("value", "<i8")])
    memory = np.array([(begin + 7, 4096, -1)], dtype=[("ts", "<u8"), ("rss_anon", "<i8"), ("swap", "<i8")])
    records = {"faults": faults, "resident_bytes": counts, "memory": memory}
    parsed = export(traces.small(records=records))
    assert [(s.name, s.begin - begin, s.notes) for s in sorted(parsed.instants, key=lambda s: s.begin)] == [
        ("major page fault", 5, {"node": 3, "wait_ns": 700}),
        ("minor page fault", 9, {"node": 4, "wait_ns": 0}),
    ]
    counters = sorted((parsed.tracks[t][0], ts - begin, v) for t, ts, v in parsed.counters)
    assert counters == [("memory rss anon", 7, 4096), ("resident bytes", 0, 10), ("resident bytes", 100, 12)]


def test_a_window_and_names_left_out() -> None:
    trace = traces.small()
    second = trace.calls[1]
    window = int(second["begin"]), int(second["end"])
    parsed = export(trace, Choice(window=window, anonymise=True))
    (token,) = parsed.of("token")
    assert (token.begin, token.end) == window
    assert len(parsed.of("op")) == 22
    text = repr(parsed)
    for secret in ("blk.", "Qcur", "server", "l_out", "attn_q"):
        assert secret not in text


def test_without_times_there_is_no_timeline() -> None:
    with pytest.raises(UsageError, match="--no-times"):
        export(traces.small(), Choice(times=False))
