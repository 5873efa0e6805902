# SPDX-License-Identifier: Apache-2.0
"""``profinferd record`` on the stub engine: what is in the file is what the stub's log says (C11)."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from profinferd.agent import attach
from profinferd.agent.attach import Attachment
from profinferd.agent.cli import main
from profinferd.agent.errors import UsageError
from profinferd.agent.kernel.programs import GgmlPrograms
from profinferd.agent.model.budget import Prices
from profinferd.agent.model.trace import PHASES, Trace
from profinferd.agent.recording.facts import Facts
from profinferd.agent.recording.reader import Recording
from profinferd.agent.recording.recorder import Recorder
from profinferd.agent.recording.writer import RecordingWriter

from ..tries import in_one_of, timed
from .cases import Engine, Reply, engine

LIMIT = 300.0
COMMAND = (sys.executable, "-m", "profinferd.agent", "record")
LEAD_NS = 300_000
"""By so much may the stub's clock readings lie apart from the probes', but where the machine did something
else between the two: in most cases it did not."""


class Record:
    """A running ``profinferd record``; ``lines`` is what it said."""

    def __init__(
        self, *options: str, environment: dict[str, str] | None = None, stdin: Any = None,
        script: str | None = None,
    ) -> None:  # fmt: skip
        """``script``: Python that runs the command in its own way."""
        command = COMMAND if script is None else (sys.executable, "-c", script)
        self.process = subprocess.Popen(
            [*command, *options], stderr=subprocess.PIPE, stdout=subprocess.PIPE, stdin=stdin,
            env={**os.environ, **(environment or {})},
        )  # fmt: skip
        self.said = ""

    def wait_for(self, words: str) -> None:
        """Until it has said these words."""
        assert self.process.stderr is not None
        until = time.monotonic() + LIMIT
        while words not in self.said:
            line = self.process.stderr.readline().decode()
            assert line and time.monotonic() < until, f"it said only: {self.said}"
            self.said += line

    def end(self, number: int | None = signal.SIGINT) -> int:
        """Send a signal, and wait: the exit code."""
        if number is not None:
            self.process.send_signal(number)
        out, err = self.process.communicate(timeout=LIMIT)
        self.out = out.decode()
        self.said += err.decode()
        return self.process.returncode

    def __enter__(self) -> Record:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


def until(what: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT
    while not what():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.02)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Trace]:
    with Recording.open(str(path)) as recording:
        yield recording.trace


def kernels(reply: Reply) -> list[tuple[int, str, int, int]]:
    """(node, op, begin, end) of one execution (the last), by the stub's own clock."""
    return [(node, op, begin, end) for node, _, op, begin, end in reply["kernels"]]


def check_agrees(trace: Trace) -> None:
    """The file's ops add up to what its snapshot says, label by label."""
    found: dict[tuple[str, ...], list[int]] = {}
    for row in trace.sums:
        nodes = trace.nodes(int(row["graph"]))
        assert nodes is not None
        node, fused = int(row["node"]), bool(row["fused"])
        key = (nodes.op[node], nodes.dtype[node], nodes.role[node], nodes.kernel_of(node, fused))
        total = found.setdefault((*key, PHASES[row["phase"]]), [0, 0])
        total[0] += int(row["calls"])
        total[1] += int(row["ns"])
    said = {
        (o.op, o.dtype, o.role, o.kernel, o.phase): [o.calls, round(o.seconds * 1e9)]
        for o in trace.snapshot.ops
    }
    assert found == said
    timed = trace.ops[trace.ops["timed"]]
    assert int((timed["end"] - timed["begin"]).sum()) == sum(ns for _, ns in said.values())


def test_the_file_is_what_the_stub_did(tmp_path: Path) -> None:
    path = tmp_path / "run.pfi"
    with Engine(engine()) as stub, Record("--pid", str(stub.pid), "-o", str(path)) as record:
        record.wait_for("attached")
        replies = [stub.order("run pos=0-9 out=9 us=100"), stub.order("run pos=10 out=0 us=100")]
        replies.append(stub.order("run pos=11 out=0 us=100"))
        until(lambda: _calls_or_none(path) == 3)
        assert record.end() == 0
    assert "saved" in record.said
    with opened(path) as trace:
        assert trace.facts.finished
        assert trace.calls["tokens"].tolist() == [10, 1, 1]
        assert [PHASES[p] for p in trace.calls["phase"]] == ["prefill", "decode", "decode"]
        apart: list[int] = []
        for row, reply in zip(trace.calls, replies, strict=True):
            # The stub reads its clock outside the call, and before each kernel.
            begin, end = (int(row[name]) for name in ("begin", "end"))
            assert reply["call"][0] <= begin < end <= reply["call"][1]
            apart += [begin - reply["call"][0], reply["call"][1] - end]
        for reply, run in zip(replies, np.flatnonzero(trace.runs["level"] == 10), strict=True):
            its = trace.ops[trace.ops["run"] == run]
            logged = kernels(reply)
            assert [n for n, *_ in logged] == its["node"].tolist()
            nodes = trace.nodes(int(trace.runs["graph"][run]))
            assert nodes is not None
            assert [nodes.op[n] for n in its["node"]] == [op for _, op, *_ in logged]
            begun = np.array([begin for *_, begin, _ in logged])
            assert (begun <= its["begin"]).all() and (its["begin"][:-1] < begun[1:]).all()
            apart += (its["begin"] - begun).tolist()
        assert sorted(apart)[len(apart) * 9 // 10] < LEAD_NS
        check_agrees(trace)
        memory = trace.records("memory")
        # What its threads waited for: it waits for orders on a pipe, and between kernels it works.
        assert set(trace.kinds) <= {"memory", "sched_spans", "page_faults"}
        assert len(memory) >= 1 and memory["rss_file"][0] > 0 and memory["threads"][0] >= 1
        assert len(trace.gaps) == 0


def test_samples_and_events_are_recorded_too(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Where CPU time goes, and performance events: of a program that is watched from its start on, and
    computes for half a second by its own clock."""
    path = tmp_path / "run.pfi"
    watch = ("--stacks", "--counters", "page-faults,cpu-clock")
    with Record("-o", str(path), *watch, "--", str(engine()), stdin=subprocess.PIPE) as record:
        assert record.process.stdin is not None
        record.process.stdin.write(b"run pos=0-9 out=9 us=100\n" + b"run pos=10 out=0 us=12000 spin=1\n")
        record.process.stdin.flush()
        until(lambda: _calls_or_none(path) == 2)
        record.process.stdin.close()
        record.process.stdin = None
        assert record.end(None) == 0
    with opened(path) as trace:
        cpu, events = trace.snapshot.cpu_time, trace.snapshot.hardware
        assert cpu is not None and cpu.samples > 0
        assert sum(part.samples for part in cpu.parts) == cpu.samples == sum(n for _, n in cpu.folded)
        assert events is not None
        assert [event.event for event in events.events] == ["page-faults", "cpu-clock"]
        assert all(event.value for event in events.events)
        assert {op.op for op in events.ops} >= {"MUL_MAT"}
    assert main(["export", str(path), "--format", "stacks"]) == 0
    assert capfd.readouterr().out.count("\n") == len(cpu.folded)


def _calls(path: Path) -> int:
    with opened(path) as trace:
        return trace.counts.calls


def test_a_program_is_recorded_from_its_first_call_on(tmp_path: Path) -> None:
    """The stub is told to compute before it has even started."""
    path = tmp_path / "run.pfi"
    orders = b"run pos=0-3 out=3 us=20\nrun pos=4 out=0 times=50 us=20\n"
    with Record("-o", str(path), "--", str(engine()), stdin=subprocess.PIPE) as record:
        assert record.process.stdin is not None
        record.process.stdin.write(orders)
        record.process.stdin.close()
        record.process.stdin = None
        assert record.end(None) == 0
    answers = [json.loads(line) for line in record.out.splitlines()]
    assert [answer["times"] for answer in answers[1:]] == [1, 50]
    assert "ended with status 0" in record.said
    with opened(path) as trace:
        assert trace.calls["tokens"].tolist() == [4, *[1] * 50]
        assert trace.facts.target.pid == answers[0]["ready"]
        assert trace.facts.child is not None
        assert (trace.facts.child.exit_code, trace.facts.child.signal) == (0, None)
        assert len(trace.ops) == len(kernels(answers[1])) + 50 * len(kernels(answers[2]))
        check_agrees(trace)


@pytest.mark.parametrize("ending, wanted", [("exec kill -9 $$", (None, 9)), ("exit 7", (7, None))])
def test_how_a_program_ended_without_an_engine(tmp_path: Path, ending: str, wanted: tuple[Any, ...]) -> None:
    """No engine was in it: no file, exit code 5, and its own status is said."""
    path = tmp_path / "run.pfi"
    with Record("-o", str(path), "--", "/bin/sh", "-c", ending) as record:
        assert record.end(None) == 5
    said = "by SIGKILL" if wanted[1] else f"with status {wanted[0]}"
    assert said in record.said
    assert not path.exists()


def test_the_status_of_a_program_that_fails_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "run.pfi"
    with Record("-o", str(path), "--", str(engine()), stdin=subprocess.PIPE) as record:
        assert record.process.stdin is not None
        record.process.stdin.write(b"run pos=0-3 out=3 us=20\nrun pos=4 out=0 us=20\n")
        record.process.stdin.flush()
        record.wait_for("attached")
        until(lambda: _calls_or_none(path) == 2)
        pid = _target(path)
        os.kill(pid, signal.SIGSEGV)
        record.process.stdin.close()
        record.process.stdin = None
        assert record.end(None) == 0
    with opened(path) as trace:
        assert trace.facts.child is not None and trace.facts.child.signal == signal.SIGSEGV
        assert trace.counts.calls == 2


def _calls_or_none(path: Path) -> int | None:
    with contextlib.suppress(UsageError):
        return _calls(path)
    return None


def _target(path: Path) -> int:
    with opened(path) as trace:
        return trace.facts.target.pid


def test_a_killed_recorder_leaves_what_was_flushed(tmp_path: Path) -> None:
    path, copy = tmp_path / "run.pfi", tmp_path / "copy.pfi"
    with Engine(engine()) as stub, Record("--pid", str(stub.pid), "-o", str(path)) as record:
        record.wait_for("attached")
        stub.order("run pos=0-9 out=9 us=100")
        until(lambda: _calls_or_none(path) == 1)
        record.process.kill()
        record.process.wait()
        stub.order("run pos=10 out=0 us=100")  # the target goes on
    copy.write_bytes(path.read_bytes())  # the file alone
    with opened(copy) as trace:
        assert trace.counts.calls == 1
        assert not trace.facts.finished
        assert trace.snapshot.tokens.prefill == 10
        check_agrees(trace)
    said = subprocess.run([*COMMAND[:-1], "info", str(copy)], capture_output=True, text=True, check=True)
    assert "the last seconds may be missing" in said.stdout


def test_a_tiny_ring_loses_and_the_gaps_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C11: what is missing from the file against the stub's log is counted, and when it was lost."""
    load = GgmlPrograms.load.__func__  # type: ignore[attr-defined]

    def tiny(cls: type[GgmlPrograms], /, method: str, **more: Any) -> GgmlPrograms:
        more["ring_bytes"] = {"ops": 4096}
        loaded: GgmlPrograms = load(cls, method, **more)
        return loaded

    monkeypatch.setattr(GgmlPrograms, "load", classmethod(tiny))
    # Where this machine's prices are not kept yet, they would be measured with that ring.
    monkeypatch.setattr(attach, "prices_here", lambda *_: Prices(1000, 1000, 1000, 1e6))
    path = tmp_path / "run.pfi"
    with Engine(engine()) as stub, Attachment.open(stub.pid, ops="all") as watched:
        writer = RecordingWriter(str(path))
        recorder = Recorder(writer, Facts(watched.snapshot().target, watched.begun_ns, watched.begun_ns))
        watched.session_opened.append(recorder.opened)
        before = time.monotonic_ns()
        ran = [stub.order("run pos=0-3 out=3 us=20", lambda: watched.poll(0.005))]
        watched.poll(0.0)
        recorder.look(watched, time.monotonic_ns())
        flooded = time.monotonic_ns()
        ran.append(stub.order("run pos=4 out=0 times=100 us=1"))  # and nobody drains meanwhile
        watched.poll(0.0)
        recorder.look(watched, time.monotonic_ns())
        looked = time.monotonic_ns()
        ran.append(stub.order("run pos=104 out=0 times=80 us=1"))  # and the end comes first
        watched.close()
        recorder.flush(watched.snapshot(), time.monotonic_ns(), finished=True)
        writer.close()
    executed = len(kernels(ran[0])) + 100 * len(kernels(ran[1])) + 80 * len(kernels(ran[2]))
    with opened(path) as trace:
        gaps = trace.gaps[trace.gaps["kind"] == "ops"]
        lost = int(gaps["count"].sum())
        assert lost > 0
        assert trace.snapshot.lost.by_kind["ops"] == lost
        assert int(trace.runs["lost"].sum()) == lost
        assert len(trace.ops) == executed - lost
        late = gaps[gaps["count"] == gaps["count"].max()][0]
        assert before < late["begin"] <= flooded < late["end"]
        assert gaps["end"].max() > looked  # what the very last drain missed is a gap, too
        # Where kernels are missing, no neighbour has their time.
        check_agrees(trace)
        whole = trace.runs[(trace.runs["level"] == 10) & (trace.runs["lost"] == 0)]
        assert (whole["n_ops"] == len(kernels(ran[0]))).all()


@contextlib.contextmanager
def mounted(folder: Path, options: str) -> Iterator[Path]:
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_keeps_what_was_flushed(tmp_path: Path) -> None:
    with mounted(tmp_path / "small", "size=400k") as folder:
        path = folder / "run.pfi"
        with Engine(engine()) as stub, Record("--pid", str(stub.pid), "-o", str(path)) as record:
            record.wait_for("attached")
            stub.order("run pos=0-9 out=9 us=50")
            until(lambda: _calls_or_none(path) == 1)
            record.process.send_signal(signal.SIGSTOP)  # a flush takes some room for itself
            state = Path(f"/proc/{record.process.pid}/stat")
            until(lambda: state.read_text().rpartition(")")[2].split()[0] == "T")
            (folder / "filler").write_bytes(bytes(400 << 10)[: _room(folder) - 8192])
            record.process.send_signal(signal.SIGCONT)
            for position in range(10, 10_000):
                if record.process.poll() is not None:
                    break
                stub.order(f"run pos={position} out=0 us=1 times=20")
            assert record.end(None) == 4
        assert "no room is left" in record.said
        assert re.search(r"its first \d+ s are in it and readable", record.said)
        with opened(path) as trace:
            assert trace.counts.calls >= 1
            assert not trace.facts.finished
            check_agrees(trace)


def _room(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def test_a_folder_that_cannot_be_written_is_said_before_attaching(tmp_path: Path) -> None:
    with Engine(engine()) as stub, mounted(tmp_path / "ro", "ro,size=100k") as folder:
        there = tmp_path / "there.pfi"
        there.write_text("of yesterday")
        for path, words in (
            (folder / "run.pfi", "Read-only"), (tmp_path / "none" / "run.pfi", "No such"),
            (there, "exists already"),
        ):  # fmt: skip
            for options in ((), ("--last", "5")):  # the flight recorder needs it much later only
                with Record("--pid", str(stub.pid), "-o", str(path), *options) as record:
                    assert record.end(None) == 2
                assert words in record.said
                assert "attached" not in record.said
                assert record.said.count("\n") == 1
        assert there.read_text() == "of yesterday"


def test_flight_recordings_of_yesterday_keep_their_names(tmp_path: Path) -> None:
    first, second, third = (tmp_path / name for name in ("f.pfi", "f-2.pfi", "f-3.pfi"))
    second.write_text("of yesterday")
    with Engine(engine()) as stub:
        with Record("--pid", str(stub.pid), "-o", str(first), "--last", "5") as record:
            record.wait_for("attached")
            for path in (first, third):
                stub.order("run pos=0-9 out=9 us=50")
                record.process.send_signal(signal.SIGUSR1)
                record.wait_for(f"{path.name} (")
            assert record.end() == 0
        assert second.read_text() == "of yesterday"
        # With --force they go, but not before there is something in their place.
        with Record("--pid", str(stub.pid), "-o", str(first), "--last", "5", "--force") as record:
            record.wait_for("attached")
            assert record.end() in (0, 130)
        assert first.stat().st_size > 1000 and set(tmp_path.iterdir()) == {first, second, third}


def test_a_limit_of_time(tmp_path: Path) -> None:
    in_one_of(3, lambda: a_limit_of_time(tmp_path))


def a_limit_of_time(tmp_path: Path) -> None:
    with Engine(engine()) as stub:
        path = Path(tempfile.mkdtemp(dir=tmp_path)) / "time.pfi"
        with Record("--pid", str(stub.pid), "-o", str(path), "-d", "3") as record:
            record.wait_for("attached")
            call = stub.order("run pos=0-9 out=9 us=50")["call"]
            timed(record.end(None) == 0, record.said)  # 5: nothing was done in those seconds
        with opened(path) as trace:
            assert trace.facts.end_ns - trace.facts.begin_ns >= 3e9
            timed(call[1] < trace.facts.begin_ns + 3e9, "the call came too late")
            assert trace.counts.calls == 1


@pytest.mark.parametrize("stalled", [False, True])
def test_a_limit_of_size(tmp_path: Path, stalled: bool) -> None:
    """Also where a busy machine gives it no core for a while, and then more waits than there is room for."""
    with Engine(engine()) as stub:
        path = tmp_path / "size.pfi"
        with Record("--pid", str(stub.pid), "-o", str(path), "--max-size", "256K") as record:
            record.wait_for("attached")
            position = 10
            if stalled:
                stub.order("run pos=0-9 out=9 us=50")
                until(lambda: _calls_or_none(path) == 1)
                record.process.send_signal(signal.SIGSTOP)
                for _ in range(12):
                    stub.order(f"run pos={position} out=0 us=1 times=300")
                    position += 300
                record.process.send_signal(signal.SIGCONT)
            while record.process.poll() is None:
                stub.order(f"run pos={position} out=0 us=1 times=300")
                position += 300
            assert record.end(None) == 0
        assert "stopped at --max-size" in record.said
        assert path.stat().st_size <= 1 << 18
        with opened(path) as trace:
            assert trace.facts.finished and trace.counts.calls > 0
            check_agrees(trace)


@pytest.fixture
def open_to_all() -> Iterator[Path]:
    """A folder that everybody may look into, now and later: pytest's own are closed again by any other
    run of it that starts meanwhile."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


def test_the_file_is_the_invoking_users_who_reads_it_without_root(open_to_all: Path) -> None:
    path = open_to_all / "run.pfi"
    sudo = {"SUDO_UID": "65534", "SUDO_GID": "65534"}
    with (
        Engine(engine()) as stub,
        Record("--pid", str(stub.pid), "-o", str(path), environment=sudo) as record,
    ):
        record.wait_for("attached")
        stub.order("run pos=0-9 out=9 us=50")
        until(lambda: _calls_or_none(path) == 1)
        assert record.end() == 0
    found = path.stat()
    assert (found.st_uid, found.st_gid, found.st_mode & 0o777) == (65534, 65534, 0o600)
    read = subprocess.run(
        [*COMMAND[:-1], "info", "--format", "json", str(path)], capture_output=True, text=True, user=65534,
        group=65534, extra_groups=[], cwd="/",
    )  # fmt: skip
    if "Permission denied" in read.stderr and "site-packages" in read.stderr:
        pytest.skip("this checkout is not readable for other users")
    assert json.loads(read.stdout)["records"]["calls"] == 1, read.stderr


def test_the_flight_recorder_writes_the_last_seconds_on_a_signal(tmp_path: Path) -> None:
    """All that was done before the signal, and nothing that is older than the window."""
    path = tmp_path / "last.pfi"
    with (
        Engine(engine()) as stub,
        Record("--pid", str(stub.pid), "-o", str(path), "--last", "5") as record,
    ):
        record.wait_for("attached")
        stub.order("run pos=0-9 out=9 us=50")
        stub.order("run pos=10 out=0 us=50 times=5")
        time.sleep(6)  # so that these are too old for the window; nothing is awaited
        late = [stub.order(f"run pos={position} out=0 us=50") for position in range(15, 19)]
        record.process.send_signal(signal.SIGUSR1)
        record.wait_for("wrote the last 5 s")
        again = stub.order("run pos=19 out=0 us=50")
        record.process.send_signal(signal.SIGUSR1)
        record.wait_for("last-2.pfi")
        assert record.end() == 0
    with opened(path) as trace:
        # On a machine that stood still meanwhile, some of these are too old as well.
        inside = [15 + i for i, one in enumerate(late) if one["call"][0] >= trace.facts.begin_ns]
        # The graphs were described seconds before, and are known all the same.
        assert trace.calls["position"].tolist() == inside
        assert len(trace.ops) == sum(len(kernels(one)) for one in late[4 - len(inside) :])
        assert trace.snapshot.tokens.decode == len(inside)
        assert trace.snapshot.tokens.prefill == 0
        assert trace.snapshot.window_seconds == pytest.approx(5.0, rel=0.001)
        assert any("a signal" in note for note in trace.facts.notes)
        check_agrees(trace)
    with opened(tmp_path / "last-2.pfi") as trace:
        seen = again["call"][0] >= trace.facts.begin_ns
        assert trace.calls["position"].tolist() == [19] * seen
        assert len(trace.ops) == len(kernels(again)) * seen


EARLY = """
import importlib, os, signal, sys
module = importlib.import_module("profinferd.agent.cli.record")
attach = module._Run.attach_to
def signalled(*arguments):
    watched = attach(*arguments)
    os.kill(os.getpid(), signal.SIGUSR1)
    return watched
module._Run.attach_to = signalled
sys.exit(importlib.import_module("profinferd.agent.cli").main(["record", *sys.argv[1:]]))
"""
"""The command, to which the signal comes as soon as it has said that it is attached."""


def test_a_signal_that_comes_at_once_is_heard(tmp_path: Path) -> None:
    """It asks for a file, also before there is anybody to write one; it does not end the recorder."""
    path = tmp_path / "early.pfi"
    with (
        Engine(engine()) as stub,
        Record("--pid", str(stub.pid), "-o", str(path), "--last", "5", script=EARLY) as record,
    ):
        record.wait_for("wrote the last 5 s")
        assert record.end() in (0, 130)
    with opened(path) as trace:
        assert trace.counts.calls == 0 and trace.facts.finished


def test_the_flight_recorder_writes_when_tokens_are_slow(tmp_path: Path) -> None:
    in_one_of(3, lambda: slow_tokens(Path(tempfile.mkdtemp(dir=tmp_path)) / "slow.pfi"))


def slow_tokens(path: Path) -> None:
    options = ("--last", "20", "--trigger", "p99>300ms")  # a busy machine may hold a token for some 100 ms
    with Engine(engine()) as stub, Record("--pid", str(stub.pid), "-o", str(path), *options) as record:
        record.wait_for("attached")
        ends = [stub.order("run pos=0-9 out=9 us=50")["call"][1]]
        ends += [stub.order(f"run pos={position} out=0 us=50")["call"][1] for position in range(10, 40)]
        slowest = max(b - a for a, b in itertools.pairwise(ends)) / 1e9
        timed(slowest < 0.3, slowest)  # by the stub's clock
        assert not path.exists()
        stub.order("run pos=40 out=0 us=20000 times=2")  # 29 kernels of 20 ms each
        record.wait_for("p99 between tokens")
        assert record.end() == 0
    with opened(path) as trace:
        assert trace.counts.calls >= 32
        check_agrees(trace)
