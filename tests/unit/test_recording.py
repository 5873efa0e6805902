# SPDX-License-Identifier: Apache-2.0
"""Recordings: what is read is what was seen; foreign, newer, cut off and hostile files (case C11)."""

from __future__ import annotations

import dataclasses
import functools
import gc
import os
import sqlite3
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from profinferd.agent.errors import UsageError
from profinferd.agent.model.eventdata import CpuPart, CpuTime
from profinferd.agent.model.plancache import Tables
from profinferd.agent.model.session import Session
from profinferd.agent.model.snapshot import Snapshot
from profinferd.agent.model.trace import Trace
from profinferd.agent.recording import codec
from profinferd.agent.recording import recorder as recorder_module
from profinferd.agent.recording.facts import Facts, Names
from profinferd.agent.recording.flight import FlightRecorder
from profinferd.agent.recording.machine import memory_of
from profinferd.agent.recording.reader import Recording
from profinferd.agent.recording.recorder import Recorder
from profinferd.agent.recording.writer import RecordingWriter

from . import traces
from .graphs import GLU, OPS, TYPES, UNARY
from .streams import START, Stream, decode, facts, prompt, session

FAULTS = np.dtype([("ts", "<u8"), ("addr", "<u8"), ("bytes", "u1", (3,)), ("name", "S8"), ("ok", "?")])


SAMPLES = CpuTime(
    99, 4, 0, 0.05, 0.04, (CpuPart("kernels", 3, 0.03, 0.75), CpuPart("sampler", 1, 0.01, 0.25)),
    (("main;mul_mat", 3), ("main;sample", 1)),
)  # fmt: skip


class Live:
    """Stands for the attachment: a session, and what the probes say was lost."""

    def __init__(self, of: Session, stream: Stream) -> None:
        self.session, self.stream = of, stream
        self.lost: dict[str, int] = {}

    def snapshot(self) -> Snapshot:
        stats = {f"lost_{kind}": count for kind, count in self.lost.items()}
        return dataclasses.replace(self.session.snapshot(self.stream.now, stats), cpu_time=SAMPLES)

    def losses(self) -> dict[str, int]:
        return dict(self.lost)


def record(path: Path, *, flushes: int = 1, finished: bool = True) -> Live:
    """The small trace's calls, ``flushes`` times, flushed after each time."""
    live = Live(session(), Stream())
    start = Facts.of(traces.small().facts)
    writer = RecordingWriter(str(path))
    recorder = Recorder(writer, dataclasses.replace(start, begin_ns=START, clocks=(traces.CLOCK,)))
    recorder.opened(live.session)
    for turn in range(flushes):
        live.stream.call(prompt(0, 5), think=traces.THINK)
        for position in (5, 6, 7):
            live.stream.call(decode(position), think=traces.THINK)
        live.stream.drain(live.session)
        rows = np.zeros(2, FAULTS)
        rows["ts"], rows["addr"] = live.stream.now, [2**64 - 1, turn]
        rows["bytes"], rows["name"], rows["ok"] = [[1, 2, 3], [255, 0, 7]], b"x", [True, False]
        recorder.take({"faults": rows})
        live.lost = {"ops": 3 * (turn // 2)}
        recorder.look(live, live.stream.now)
        last = turn == flushes - 1
        if last:
            live.session.finish(live.stream.now)
        recorder.flush(live.snapshot(), live.stream.now, finished=finished and last)
    writer.close()
    return live


@functools.cache
def recorded(flushes: int) -> bytes:
    """The file that :func:`record` makes, with the same bytes each time."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.pfi"
        with mock.patch.object(recorder_module, "read_clocks", lambda: traces.CLOCK):
            record(path, flushes=flushes)
        return path.read_bytes()


def test_what_is_read_is_what_was_seen(tmp_path: Path) -> None:
    path = tmp_path / "run.pfi"
    live = record(path)
    wanted = traces.small()
    with Recording.open(str(path)) as recording:
        trace = recording.trace
        for name in ("calls", "runs", "ops", "sums"):
            assert getattr(trace, name).tolist() == getattr(wanted, name).tolist(), name
        assert trace.snapshot == live.snapshot()
        assert trace.snapshot.to_json() == live.snapshot().to_json()
        assert trace.facts.finished
        assert trace.facts.target == wanted.facts.target
        assert trace.facts.peaks == traces.PEAKS
        assert trace.facts.machine == traces.MACHINE
        for index, info in enumerate(wanted.facts.graphs):
            one, two = trace.graph(index), wanted.graph(index)
            assert one is not None and two is not None
            assert (one.nodes, one.leaves, one.topology) == (two.nodes, two.leaves, two.topology)
            assert trace.facts.graphs[index] == info
            columns, expected = trace.nodes(index), wanted.nodes(index)
            assert columns is not None and expected is not None
            assert columns.op == expected.op and columns.name == expected.name
            assert columns.fused_bytes.tolist() == expected.fused_bytes.tolist()


def test_names_that_come_after_the_beginning(tmp_path: Path) -> None:
    """As when the library that has them is linked after the recording began (case C02)."""
    path = tmp_path / "run.pfi"
    live = Live(Session((), None, facts(), START), Stream())
    writer = RecordingWriter(str(path))
    start = dataclasses.replace(Facts.of(traces.small().facts), names=Names(), begin_ns=START)
    recorder = Recorder(writer, start)
    recorder.opened(live.session)
    live.session.plans.tables = Tables(OPS, TYPES, UNARY, GLU)
    live.stream.call(prompt(0, 5), think=traces.THINK)
    live.stream.drain(live.session)
    live.session.finish(live.stream.now)
    recorder.flush(live.snapshot(), live.stream.now, finished=True)
    writer.close()
    with Recording.open(str(path)) as recording:
        graph, nodes = recording.trace.graph(0), recording.trace.nodes(0)
        assert graph is not None and nodes is not None
        assert {"MUL_MAT", "RMS_NORM"} <= {node.op for node in graph.nodes} == set(nodes.op)


def test_a_process_that_has_ended_has_no_memory_and_not_0() -> None:
    (mine,) = memory_of(os.getpid())
    assert mine["rss_anon"] > 0 and mine["threads"] > 0
    with subprocess.Popen(["true"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it is a zombie from now on
        assert "State:\tZ" in Path(f"/proc/{process.pid}/status").read_text()
        assert len(memory_of(process.pid)) == 0


def test_what_is_not_read_to_its_end_is_let_go_of_quietly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when an export fails: the recording is closed while someone is in the middle of its rows."""
    path = tmp_path / "run.pfi"
    path.write_bytes(recorded(2))
    unraisable: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    with Recording.open(str(path)) as recording:
        segments = recording.segments(None, None, ops=True)
        next(segments)
    del segments
    gc.collect()
    assert unraisable == []


def test_several_flushes_are_one_trace(tmp_path: Path) -> None:
    path = tmp_path / "run.pfi"
    record(path, flushes=5)
    with Recording.open(str(path)) as recording:
        trace = recording.trace
        assert len(trace.calls) == 20
        assert len(list(trace.parts())) == 5
        assert len(trace.ops) == 5 * len(traces.small().ops)
        assert (trace.calls["begin"][1:] > trace.calls["end"][:-1]).all()
        assert trace.sums["calls"].sum() == len(trace.ops)
        assert trace.sums["ns"].sum() == (trace.ops["end"] - trace.ops["begin"]).sum()
        call = trace.calls[9]
        part = trace.window(int(call["begin"]), int(call["end"]))
        assert part.calls["position"].tolist() == [5]
        assert len(part.ops) == len(traces.small().ops) // 4
        # Lost between the looks before and after: in the third turn and in the fifth.
        assert trace.gaps["count"].tolist() == [3, 3]
        assert trace.gaps["kind"].tolist() == ["ops", "ops"]
        ends = trace.calls["end"].reshape(5, 4).max(axis=1)
        assert trace.gaps["end"].tolist() == [ends[2], ends[4]]
        assert trace.gaps["begin"].tolist() == [ends[1], ends[3]]
        assert trace.snapshot.lost.by_kind["ops"] == trace.gaps["count"].sum() == 6


def test_what_the_last_drain_finds_missing_is_a_gap(tmp_path: Path) -> None:
    """C11: no look comes after the end, and yet every record that is counted lost lies in a gap."""
    live = Live(session(), Stream())
    writer = RecordingWriter(str(tmp_path / "run.pfi"))
    recorder = Recorder(writer, dataclasses.replace(Facts.of(traces.small().facts), begin_ns=START))
    recorder.opened(live.session)
    live.stream.call(prompt(0, 5), think=traces.THINK)
    live.stream.drain(live.session)
    live.lost = {"ops": 3}
    looked = live.stream.now
    recorder.look(live, looked)
    live.lost = {"ops": 10, "events": 2}
    end = looked + 1_000_000
    live.session.finish(end)
    recorder.flush(live.snapshot(), end, finished=True)
    writer.close()
    with Recording.open(str(tmp_path / "run.pfi")) as recording:
        trace = recording.trace
        assert trace.gaps.tolist() == [
            (START, looked, 3, "ops"),
            (START, end, 2, "events"),
            (looked, end, 7, "ops"),
        ]
        assert {k: n for k, n in trace.snapshot.lost.by_kind.items() if n} == {"ops": 10, "events": 2}


def test_a_flight_counts_what_its_gaps_say(tmp_path: Path) -> None:
    """Of the window alone, and of waits and barriers, too, which no session sees."""
    flight = FlightRecorder(2.0, 1 << 20)
    second = 1_000_000_000
    flight.look({"ops": 1, "barriers": 0, "sched_spans": 5}, START)
    flight.look({"ops": 1, "barriers": 0, "sched_spans": 9}, START + 3 * second)
    flight.look({"ops": 4, "barriers": 2, "sched_spans": 9}, START + 4 * second)
    path = tmp_path / "last.pfi"
    began = dataclasses.replace(Facts.of(traces.small().facts), begin_ns=START)
    flight.write(str(path), None, began, session, START + 4 * second)
    with Recording.open(str(path)) as recording:
        trace = recording.trace
        counted = {kind: n for kind, n in trace.snapshot.lost.by_kind.items() if n}
        assert trace.snapshot.lost.total == sum(counted.values())
        gaps: dict[str, int] = {}
        for gap in trace.gaps.tolist():
            gaps[gap[3]] = gaps.get(gap[3], 0) + gap[2]
        assert gaps == counted
        assert counted["ops"] == 3 and counted["barriers"] == 2


def test_other_records_by_kind_and_time(tmp_path: Path) -> None:
    path = tmp_path / "run.pfi"
    record(path, flushes=3)
    with Recording.open(str(path)) as recording:
        trace = recording.trace
        assert trace.kinds == {"faults": 6}
        rows = trace.records("faults")
        assert rows["addr"].tolist() == [2**64 - 1, 0, 2**64 - 1, 1, 2**64 - 1, 2]
        assert rows["bytes"][1].tolist() == [255, 0, 7]
        assert rows["ok"].tolist() == [True, False] * 3
        assert rows["name"][0] == b"x"
        middle = trace.records("faults", int(rows["ts"][2]), int(rows["ts"][2]) + 1)
        assert middle["addr"].tolist() == [2**64 - 1, 1]
        assert len(trace.records("sched")) == 0


def test_a_file_of_the_first_format_is_read(tmp_path: Path) -> None:
    """Before table "routes" was added: what is in it now is worked out from the op records."""
    path = tmp_path / "run.pfi"
    path.write_bytes(recorded(3))
    with sqlite3.connect(path) as db:
        db.execute("DROP TABLE routes")
    db.close()
    assert "tables are not those" in _reading(path)
    _mark(path, version=1)
    with Recording.open(str(path)) as recording:
        assert recording.trace.counts.calls == 12
        assert len(recording.trace.routes) == 0
        assert recording.trace.sums["calls"].sum() == len(recording.trace.ops)
    with sqlite3.connect(path) as db:
        assert db.execute("SELECT count(*) FROM sqlite_master WHERE name = 'routes'").fetchone() == (0,)
    db.close()


def test_it_is_private_and_never_replaces(tmp_path: Path) -> None:
    path = tmp_path / "run.pfi"
    before = os.umask(0)
    try:
        RecordingWriter(str(path), owner=(1234, 4321)).close()
    finally:
        os.umask(before)
    found = path.stat()
    assert stat.S_IMODE(found.st_mode) == 0o600
    if os.geteuid() == 0:
        assert (found.st_uid, found.st_gid) == (1234, 4321)
    with pytest.raises(UsageError, match="exists already"):
        RecordingWriter(str(path))
    link = tmp_path / "link.pfi"
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError):
        RecordingWriter(str(link))
    assert not (tmp_path / "elsewhere").exists()
    with pytest.raises(UsageError, match="No such file"):
        RecordingWriter(str(tmp_path / "missing" / "run.pfi"))
    with pytest.raises(UsageError, match="not a regular file"):
        RecordingWriter("/dev/null")  # a recording is written in pages, and read while it grows


def _mark(path: Path, application: int | None = None, version: int | None = None) -> None:
    with sqlite3.connect(path) as db:
        if application is not None:
            db.execute(f"PRAGMA application_id = {application}")
        if version is not None:
            db.execute(f"PRAGMA user_version = {version}")
    db.close()


def test_foreign_newer_and_cut_off_files_are_one_clear_error(tmp_path: Path) -> None:
    def said(path: Path) -> str:
        with pytest.raises(UsageError) as error:
            Recording.open(str(path))
        assert "\n" not in str(error.value)
        return str(error.value)

    path = tmp_path / "run.pfi"
    record(path, flushes=3)
    whole = path.read_bytes()
    text = tmp_path / "notes.txt"
    text.write_text("nothing to see here\n" * 100)
    assert "is not a recording of profinferd" in said(text)
    empty = tmp_path / "empty.pfi"
    empty.touch()
    assert "empty or cut off" in said(empty)
    assert "No such file" in said(tmp_path / "none.pfi")
    assert "Is a directory" in said(tmp_path)
    foreign = tmp_path / "foreign.db"
    with sqlite3.connect(foreign) as db:
        db.execute("CREATE TABLE meta (key TEXT, value BLOB)")
    db.close()
    assert "is not a recording" in said(foreign)
    newer = tmp_path / "newer.pfi"
    newer.write_bytes(whole)
    _mark(newer, version=99)
    assert "newer profinferd (format 99" in said(newer)
    for size in (50, 4096, len(whole) // 2, len(whole) - 1):
        cut = tmp_path / "cut.pfi"
        cut.write_bytes(whole[:size])
        assert "cut off" in said(cut), size
    os.mkfifo(tmp_path / "pipe.pfi")
    assert "is not a regular file" in said(tmp_path / "pipe.pfi")


def _everything(trace: Trace) -> None:
    trace.calls, trace.runs, trace.ops, trace.sums, trace.routes, trace.experts, trace.counts  # noqa: B018
    for kind in trace.kinds:
        trace.records(kind)
    for index in range(len(trace.facts.graphs)):
        trace.graph(index)
        trace.nodes(index)


def _reading(path: Path) -> str:
    """Reads everything: what was wrong with it, "" when nothing was noticed."""
    try:
        with Recording.open(str(path)) as recording:
            _everything(recording.trace)
    except UsageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("seed", range(30))
def test_bytes_that_are_wrong_are_an_error_or_harmless(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "run.pfi"
    raw = bytearray(recorded(2))
    rng = np.random.default_rng(seed)
    for _ in range(1 + seed):
        raw[int(rng.integers(100, len(raw)))] = int(rng.integers(256))
    path.write_bytes(raw)
    _reading(path)


HOSTILE: dict[str, tuple[str, str]] = {
    "view": ("DROP TABLE gaps; CREATE VIEW gaps AS SELECT 1 AS id, 1 AS begin", "tables are not those"),
    "trigger": ("CREATE TRIGGER t AFTER INSERT ON gaps BEGIN SELECT 1; END", "tables are not those"),
    "more tables": ("CREATE TABLE more (a)", "tables are not those"),
    "rows": ("UPDATE segments SET n_calls = 1 << 40", "a table of"),
    "fewer rows": ("UPDATE segments SET n_calls = n_calls - 1", "another size"),
    "negative": ("UPDATE segments SET n_runs = -1", "segment that is none"),
    "text": ("UPDATE segments SET calls = 'x'", "segment that is none"),
    "bomb": ("UPDATE meta SET value = CAST(x'ffffff7f' || substr(value, 5) AS BLOB)", "impossible length"),
    "no facts": ("DELETE FROM meta WHERE key = 'facts'", "has no facts"),
    "type": ("""UPDATE types SET fields = '[["ts","O",[]]]' WHERE kind = 'faults'""", "a field of type O"),
    "big type": ("""UPDATE types SET fields = '[["ts","<i8",[4000,4000]]]' WHERE kind = 'faults'""", "bytes"),
    "no time": ("""UPDATE types SET fields = '[["x","u1",[29]]]' WHERE kind = 'faults'""", "without a time"),
    "graph numbers": ("UPDATE graphs SET id = id + 7", "not numbered"),
    "nodes": ("UPDATE graphs SET n_nodes = 1 << 30", "a graph of"),
    "sums": ("UPDATE sums SET graph = graph + 100", "sums of no graph"),
    "endless rows": ("UPDATE records SET rows = 9e999", "rows that cannot be"),
    "endless calls": ("UPDATE segments SET n_calls = 9e999", "segment that is none"),
    "a gap": ("UPDATE gaps SET count = 'many'", "a gap that is none"),
    "width": ("UPDATE segments SET width = 3", "op records"),
    "times": ("UPDATE segments SET n_ops = n_ops + 1", "op records"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_files_made_to_harm(tmp_path: Path, name: str) -> None:
    """Each lie is noticed, in one line, before it is believed."""
    path = tmp_path / "run.pfi"
    path.write_bytes(recorded(4))
    assert _reading(path) == ""
    statements, wanted = HOSTILE[name]
    with sqlite3.connect(path) as db:
        db.executescript(statements)
    db.close()
    assert wanted in _reading(path)


class Torn:
    """A database, or a cursor, of which SQLite finds at the n-th step that it is damaged."""

    def __init__(self, real: Any, steps: list[int]) -> None:
        self.real, self.steps = real, steps

    def _step(self) -> None:
        self.steps[0] -= 1
        if not self.steps[0]:
            raise sqlite3.DatabaseError("database disk image is malformed")

    def execute(self, *given: Any) -> Torn:
        self._step()
        return Torn(self.real.execute(*given), self.steps)

    def fetchone(self) -> Any:
        self._step()
        return self.real.fetchone()

    def __iter__(self) -> Any:
        for row in self.real:
            self._step()
            yield row


def test_damage_that_shows_at_any_step(tmp_path: Path) -> None:
    """A page is looked at when it is needed: whichever is not whole, one line says so."""
    path = tmp_path / "run.pfi"
    path.write_bytes(recorded(2))

    def read(step: int) -> int:
        """Steps that were left."""
        with Recording.open(str(path)) as recording:
            steps = [step]
            made: Any = recording
            made._db, real = Torn(recording._db, steps), recording._db
            try:
                _everything(recording.trace)
            finally:
                made._db = real
        return steps[0]

    whole = 1000 - read(1000)
    assert 20 < whole < 1000
    for step in range(1, whole + 1):
        with pytest.raises(UsageError, match="malformed"):
            read(step)


def test_endless_sums_are_noticed(tmp_path: Path) -> None:
    """Also by who only counts."""
    path = tmp_path / "run.pfi"
    path.write_bytes(recorded(2))
    with sqlite3.connect(path) as db:
        db.execute("UPDATE segments SET n_ops = 9e999")
    db.close()
    with Recording.open(str(path)) as recording, pytest.raises(UsageError, match="rows that cannot be"):
        _ = recording.trace.counts


def test_a_table_is_never_unpacked_beyond_what_it_says() -> None:
    packed = codec.compress(bytes(1 << 26))
    assert len(packed) < 1 << 14
    with pytest.raises(UsageError, match="another size"):
        codec.decompress(packed, 1000)
    with pytest.raises(UsageError, match="a table of"):
        codec.decompress(packed, codec.MAX_RAW + 1)


@pytest.mark.parametrize("type", ["<i8", "<u8", "<i4", "<u2", "u1", "<f8", "S5", "?"])
def test_columns_come_back(type: str) -> None:
    rng = np.random.default_rng(1)
    raw: Any = rng.integers(0, 256, 8 * 100).astype(np.uint8)
    column = raw != 0 if type == "?" else raw[: 100 * np.dtype(type).itemsize].view(type)
    table = np.zeros(len(column), [("ts", "<i8"), ("x", type)])
    table["x"] = column
    again = codec.decode(codec.encode(table), codec.understand(codec.describe(table.dtype)), len(table))
    assert again.tobytes() == table.tobytes()


def test_facts_are_the_models() -> None:
    about = facts().target
    assert Facts(about, 1, 2).trace((), {}).target == about
