# SPDX-License-Identifier: Apache-2.0
"""What watches the target while a row is measured: started, asked for its cost, ended."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from profinferd.agent.kernel.bcc_loader import PYTHON
from profinferd.agent.recording.reader import Recording
from tests.engines.fetch import ROOT
from tests.engines.processes import end, with_parent
from tests.engines.profiler import COMMAND, Profiler, Report

from .rows import Row
from .stats import CONFIDENCE, Estimate

FUNCTIONS = "ggml_compute_forward_"
EVERY = "*"
_COUNT = "uprobe:{lib}:{f} {{ @n[probe] = count(); }}"
_TIME = (
    "uprobe:{lib}:{f} {{ @s[tid] = nsecs; }} "
    "uretprobe:{lib}:{f} /@s[tid]/ {{ @ns[probe] = sum(nsecs - @s[tid]); delete(@s[tid]); }}"
)
_PROBES = re.compile(rb"Attaching (\d+) probes")
_LINE = re.compile(r"^@(n|ns)\[[^\]]*:" + FUNCTIONS + r"(\w+)\]: (\d+)$", re.MULTILINE)
_READY_SECONDS, _STOP_SECONDS, _QUIET_SECONDS = 60.0, 120.0, 0.5


class WatchFailed(RuntimeError):
    """The watcher did not start, or did not end as it should."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What a watcher says when it ends. None: it does not say.

    ``hits`` of probes a call, all threads together; ``kernels`` executed a call; records
    ``lost``; seconds ``by_op`` (the engine's name of the operator). Slowdown, as a ratio: as its
    budget ``estimated`` it, and ``measured`` on the target's own tokens.
    """

    hits: float | None = None
    kernels: int | None = None
    lost: int | None = None
    by_op: Mapping[str, float] = field(default_factory=dict)
    estimated: float | None = None
    measured: Estimate | None = None


class Watcher(Protocol):
    """``pid`` None: nobody watches. ``finish`` ends it, and what it had attached is gone then."""

    pid: int | None

    def finish(self) -> Seen: ...


class Nobody:
    pid: int | None = None

    def finish(self) -> Seen:
        return Seen()


class Ours:
    """``profinferd attach``, as a user runs it."""

    def __init__(self, profiler: Profiler) -> None:
        self.pid: int | None = profiler.pid
        self._profiler = profiler

    def finish(self) -> Seen:
        return seen_by_us(self._profiler.finish())


def seen_by_us(report: Report) -> Seen:
    """The figures of the benchmark from a report."""
    calls = report.calls()
    by_op: dict[str, float] = defaultdict(float)
    for row in report.json["ops"]:
        by_op[row["op"]] += row["seconds"] or 0.0
    kernels = [g["executed"] for g in report.json["graphs"] if g["executed"]]
    overhead = report.json["overhead"]
    hits, value, interval = (overhead[key] for key in ("hits", "measured_ratio", "measured_ci95"))
    return Seen(
        hits / calls if calls and hits is not None else None,
        max(kernels, default=None),
        report.json["lost"]["total"],
        by_op,
        overhead["estimated_ratio"],
        None if interval is None else Estimate(value, interval[0], interval[1], 0, CONFIDENCE),
    )


class BpfTrace:
    """bpftrace on the functions of all operators, as it is used for this question.

    The times of every function of ``functions`` (names without their common prefix, all by
    default) are added up by entry and return; with ``count`` their entries are counted
    instead. It attaches to the file: with ``-p`` it would see one thread of the process.
    """

    def __init__(self, library: Path, functions: Sequence[str] = (EVERY,), *, count: bool = False) -> None:
        program = " ".join(
            (_COUNT if count else _TIME).format(lib=library, f=FUNCTIONS + name) for name in functions
        )
        self._process = subprocess.Popen(
            with_parent(["bpftrace", "-e", program]),
            env={**os.environ, "BPFTRACE_MAX_PROBES": "4096"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self.pid: int | None = self._process.pid
        self._out = b""
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise

    def _wait(self) -> None:
        """It says how many probes it is about to attach, and not when it has: a descriptor each."""
        stdout = self._process.stdout
        assert stdout is not None
        until = time.monotonic() + _READY_SECONDS
        last, since = -1, time.monotonic()
        while time.monotonic() < until:
            if select.select([stdout], [], [], 0.1)[0]:
                piece = os.read(stdout.fileno(), 65536)
                self._out += piece
                if not piece:
                    break
            wanted = _PROBES.search(self._out)
            open_now = len(os.listdir(f"/proc/{self.pid}/fd")) if wanted else -1
            if open_now != last:
                last, since = open_now, time.monotonic()
            elif wanted and open_now > int(wanted[1]) and time.monotonic() - since > _QUIET_SECONDS:
                return
        raise WatchFailed("bpftrace did not attach: " + self._out.decode(errors="replace").strip()[-300:])

    def sums(self) -> dict[str, int]:
        """Ends it; ns or counts by function (without the common prefix). Takes 0.1 s a probe."""
        self._process.send_signal(signal.SIGINT)
        out, _ = self._process.communicate(timeout=_READY_SECONDS + _STOP_SECONDS)
        text = (self._out + out).decode(errors="replace")
        return {name: int(value) for _, name, value in _LINE.findall(text)}

    def finish(self) -> Seen:
        return Seen(by_op={name: ns / 1e9 for name, ns in self.sums().items()})

    def stop(self) -> None:
        end(self._process)
        if self._process.stdout is not None:
            self._process.stdout.close()


class Published:
    """A tracer as the ProfInfer paper describes it (``published.c``), on the functions of operators
    (names without their common prefix), on calls and on graphs."""

    def __init__(self, pid: int, functions: Sequence[str]) -> None:
        ops, calls = library_of(pid), library_of(pid, "libllama.so")
        places = [
            f"{calls}=llama_decode",
            f"{library_of(pid, 'libggml-base')}=ggml_backend_graph_compute_async",
        ]
        places += [f"{ops}={FUNCTIONS}{name}" for name in functions]
        script = str(Path(__file__).with_name("published.py"))
        self._process = subprocess.Popen(
            with_parent([PYTHON, "-I", "-S", script, str(pid), *places]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
        )
        self.pid: int | None = self._process.pid
        stdout = self._process.stdout
        assert stdout is not None
        if not select.select([stdout], [], [], _READY_SECONDS)[0] or stdout.readline() != b"ready\n":
            self.stop()
            raise WatchFailed("the tracer as published did not attach")

    def finish(self) -> Seen:
        self._process.send_signal(signal.SIGINT)
        out, _ = self._process.communicate(timeout=_STOP_SECONDS)
        try:
            said = json.loads(out)
        except ValueError as error:
            raise WatchFailed("the tracer as published ended without a word") from error
        calls = said["entered"].get("llama_decode", 0)
        return Seen(said["hits"] / calls if calls else None, None, said["lost"], said["by_op"])

    def stop(self) -> None:
        end(self._process)
        if self._process.stdout is not None:
            self._process.stdout.close()


class Recorder:
    """``profinferd record`` of the process into a file that is thrown away."""

    def __init__(self, pid: int, options: Sequence[str]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="profinferd-bench-")
        self._file = str(Path(self._folder.name) / "run.pfi")
        self._process = subprocess.Popen(
            with_parent([*COMMAND, "record", "--pid", str(pid), "-o", self._file, *options]),
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        self.pid: int | None = self._process.pid
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise

    def _wait(self) -> None:
        stderr, said = self._process.stderr, b""
        assert stderr is not None
        until = time.monotonic() + _READY_SECONDS
        while time.monotonic() < until:
            if select.select([stderr], [], [], 0.1)[0]:
                piece = os.read(stderr.fileno(), 65536)
                said += piece
                if b"attached to process" in said:
                    return
                if not piece:
                    break
        raise WatchFailed("the recorder did not attach: " + said.decode(errors="replace").strip()[-300:])

    def finish(self) -> Seen:
        self._process.send_signal(signal.SIGINT)
        _, err = self._process.communicate(timeout=_STOP_SECONDS)
        if self._process.returncode != 0:
            raise WatchFailed("the recorder failed: " + err.decode(errors="replace").strip()[-300:])
        with Recording.open(self._file) as recording:
            return seen_by_us(Report(recording.trace.snapshot.to_json(), 0, 0))

    def stop(self) -> None:
        end(self._process)
        if self._process.stderr is not None:
            self._process.stderr.close()
        self._folder.cleanup()


@contextmanager
def watching(row: Row, pid: int, functions: Sequence[str]) -> Iterator[Watcher]:
    """The row's watcher on process ``pid``, attached. Raises WatchFailed.

    ``functions``: what bpftrace and the tracer as published attach to.
    """
    if row.kind == "nothing":
        yield Nobody()
        return
    if row.kind in ("bpftrace", "published", "record"):
        tracer: BpfTrace | Published | Recorder
        if row.kind == "record":
            tracer = Recorder(pid, row.options)
        elif row.kind == "published":
            tracer = Published(pid, functions)
        else:
            tracer = BpfTrace(library_of(pid), functions)
        try:
            yield tracer
        finally:
            tracer.stop()
        return
    profiler = Profiler(pid, *row.options)
    if row.kind == "firstbyte":
        profiler.command[:3] = [sys.executable, "-m", "tests.bench.firstbyte"]
    try:
        with profiler:
            yield Ours(profiler)
    except RuntimeError as error:
        raise WatchFailed(str(error)) from error


def library_of(pid: int, name: str = "libggml-cpu") -> Path:
    """The file of that name, by default the one with the operators, that a process has mapped."""
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[5:]
        if path and name in path[0]:
            return Path(path[0])
    raise WatchFailed(f"process {pid} has no {name} mapped")
