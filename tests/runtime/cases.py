# SPDX-License-Identifier: Apache-2.0
"""The real profiler on the stub engine (``tests/victims/stub_ggml.c``).

What is expected comes from the stub's own log: what it did, how often, and when by its own
clock. Nothing here is computed from the profiler's output.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from profinferd.agent.attach import Attachment
from profinferd.agent.kernel import bpfsys
from profinferd.agent.model.snapshot import Snapshot
from tests.victims.build import build

BUILD_ID = "-Wl,--build-id=sha1"
DEADLINE = 120.0
"""Seconds after which a stub that does not answer is a failure of the test: a busy machine takes its time."""
METHODS = ("session", "multi", "perf")
Reply = dict[str, Any]


def engine(*flags: str, strip: bool = False, dynamic: bool = True) -> Path:
    """The stub as one program; ``dynamic``: its functions are in .dynsym too."""
    export = ("-rdynamic",) if dynamic else ()
    return build("stub_ggml.c", cflags=("-DMAIN", BUILD_ID, *export, *flags), strip=strip)


def library(*flags: str, name: str, strip: bool = False) -> Path:
    """The stub as a shared object; it calls its own functions, whatever the program has."""
    options = (BUILD_ID, "-Wl,-Bsymbolic", *flags)
    return build("stub_ggml.c", cflags=options, shared=True, name=name, strip=strip)


def plain(strip: bool = True) -> Path:
    """A program that has no engine until it loads one."""
    return build("stub_ggml.c", cflags=("-DPLAIN_MAIN", BUILD_ID), strip=strip, name="plain")


class Engine:
    """A running stub."""

    def __init__(self, command: Path | Sequence[str | Path]) -> None:
        words = [command] if isinstance(command, Path) else list(command)
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._unread = b""
        self.pid = int(self.reply()["ready"])

    @property
    def _out(self) -> IO[bytes]:
        assert self.process.stdout is not None
        return self.process.stdout

    def send(self, order: str | bytes) -> None:
        """Give an order without waiting for its answer."""
        assert self.process.stdin is not None
        self.process.stdin.write((order if isinstance(order, bytes) else order.encode()) + b"\n")
        self.process.stdin.flush()

    def reply(self, meanwhile: Callable[[], None] | None = None) -> Reply:
        """The next answer; ``meanwhile`` is called until it comes."""
        until = time.monotonic() + DEADLINE
        while b"\n" not in self._unread:
            if select.select([self._out], [], [], 0 if meanwhile else 1.0)[0]:
                piece = os.read(self._out.fileno(), 1 << 20)
                assert piece, f"the stub ended (exit status {self.process.wait()})"
                self._unread += piece
            elif meanwhile:
                meanwhile()
            assert time.monotonic() < until, "the stub does not answer"
        line, _, self._unread = self._unread.partition(b"\n")
        answer: Reply = json.loads(line)
        assert "error" not in answer, answer
        return answer

    def order(self, order: str | bytes, meanwhile: Callable[[], None] | None = None) -> Reply:
        """Give an order and wait for the answer."""
        self.send(order)
        return self.reply(meanwhile)

    def kill(self) -> None:
        """End it at once and reap it."""
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


def ahead(pid: int) -> None:
    """From now on the process comes before whatever else this machine does (real-time order), where that
    is allowed: its clock and ours are read one after the other, and what comes between the two readings
    is in one account alone."""
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(pid, os.SCHED_FIFO, os.sched_param(1))


class Watch:
    """An Attachment and the stub that it watches, ahead of everybody; all is detached at the end."""

    def __init__(self, stub: Engine, method: str = "auto", ops: str = "all", **options: Any) -> None:
        self.stub = stub
        ahead(stub.pid)
        self.attachment = Attachment.open(stub.pid, method=method, ops=ops, **options)

    def run(self, words: str = "") -> Reply:
        """Have the stub run, draining meanwhile."""
        return self.order(f"run {words}")

    def order(self, order: str) -> Reply:
        """Give any order, draining meanwhile."""
        reply = self.stub.order(order, self.drain)
        self.drain()
        return reply

    def drain(self) -> None:
        """Look at what has come."""
        self.attachment.poll(0.005)

    def snapshot(self) -> Snapshot:
        """Everything up to now."""
        self.drain()
        return self.attachment.snapshot()

    def keys(self, name: str) -> list[bytes]:
        """The keys that are in a map of the kernel side."""
        return list(self.attachment._programs._object.map(name).keys())

    def stats(self) -> dict[str, int]:
        """The kernel side's counters."""
        return self.attachment._programs.stats()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.attachment.close()


# ---- comparing -------------------------------------------------------------------------


def kernels(replies: Iterable[Reply]) -> Counter[tuple[str, bool]]:
    """(op, fused with the next) -> how often it ran, by the stub's log."""
    return Counter((op, bool(fused)) for reply in replies for _, fused, op, _, _ in reply["kernels"])


def kernels_seen(snapshot: Snapshot) -> Counter[tuple[str, bool]]:
    """The same as the profiler has it."""
    seen: Counter[tuple[str, bool]] = Counter()
    for op in snapshot.ops:
        seen[op.op, op.kernel.startswith("fused_")] += op.calls
    return seen


def seconds_of(replies: Iterable[Reply]) -> dict[str, float]:
    """Seconds per op: from one kernel's begin to the next one's, the last one to the graph's end."""
    seconds: dict[str, float] = defaultdict(float)
    for reply in replies:
        ends = [begin for *_, begin, _ in reply["kernels"][1:]] + [reply["graph"][1]]
        for (_, _, op, begin, _), end in zip(reply["kernels"], ends, strict=True):
            seconds[op] += (end - begin) / 1e9
    return seconds


@dataclass(slots=True)
class Span:
    """Seconds that something took at least and at most, by the stub's clock. It reads its clock before
    a probe is passed and again behind it: whoever takes its core meanwhile, and for how long, the probe's
    time lies between."""

    least: float = 0.0
    most: float = 0.0

    def add(self, least_ns: int, most_ns: int) -> None:
        """One more of them."""
        self.least += least_ns / 1e9
        self.most += most_ns / 1e9

    def __contains__(self, seconds: float) -> bool:
        return self.least - SLACK <= seconds <= self.most + SLACK


SLACK = 50e-6
"""Seconds by which two readings of the clock may differ, in the kernel and outside."""


def spans_of(replies: Iterable[Reply]) -> dict[str, Span]:
    """The same as :func:`seconds_of`, between bounds."""
    spans: dict[str, Span] = defaultdict(Span)
    for reply in replies:
        for at, (_, _, op, begin, end) in enumerate(reply["kernels"]):
            entered = reply["entered"][at]
            if at + 1 < len(reply["kernels"]):
                spans[op].add(reply["kernels"][at + 1][3] - entered, reply["entered"][at + 1] - begin)
            else:
                spans[op].add(end - entered, reply["graph"][1] - begin)
    return spans


def call_span(*replies: Reply) -> Span:
    """Of calls, or of their graphs as a whole: more than what is inside, less than what is around."""
    span = Span()
    for reply in replies:
        span.add(reply["graph"][1] - reply["graph"][0], reply["call"][1] - reply["call"][0])
    return span


def check_ops(snapshot: Snapshot, replies: Sequence[Reply]) -> None:
    """Counts are equal, seconds agree, nothing is uncovered, unknown or lost."""
    assert kernels_seen(snapshot) == kernels(replies)
    seen: dict[str, float] = defaultdict(float)
    for op in snapshot.ops:
        seen[op.op] += op.seconds
    for op_name, span in spans_of(replies).items():
        assert seen[op_name] in span, (op_name, seen[op_name], span)
    assert all(not graph.uncovered for graph in snapshot.graphs), snapshot.graphs
    assert snapshot.lost.total == 0, snapshot.lost


def wait_for(condition: Callable[[], bool], what: str, seconds: float = DEADLINE) -> None:
    """Until ``condition`` holds; the test fails when it does not come to that."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"in vain waited for: {what}"
        time.sleep(0.01)


# ---- the command line ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run of the program ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """Its data, which must be strict JSON."""

        def refuse(word: str) -> float:
            raise AssertionError(f"{word} in JSON")

        answer: dict[str, Any] = json.loads(self.out, parse_constant=refuse)
        return answer

    @property
    def line(self) -> str:
        """What it said on standard error: exactly one line."""
        assert self.err.count("\n") == 1 and self.err.endswith("\n"), self.err
        return self.err.rstrip("\n")


def profinferd(
    *arguments: str | int,
    under: Sequence[str] = (),
    duration: float | None = 0.3,
    meanwhile: Callable[[subprocess.Popen[str]], None] | None = None,
) -> Outcome:
    """``profinferd attach --format json ARGUMENTS``, ``under`` another command.

    ``meanwhile`` is called as soon as probes are attached; of standard error, what came
    until then (progress, for people) is left out.
    """
    words = [*under, sys.executable, "-m", "profinferd.agent", "attach", "--format", "json", "--ops", "all"]
    if meanwhile is None:
        words.append("-q")
    if duration is not None:
        words += ["-d", str(duration)]
    process = subprocess.Popen(
        [*words, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        if meanwhile is not None:
            assert process.stderr is not None
            for line in process.stderr:
                if line.startswith("attached to"):
                    break
            meanwhile(process)
        out, err = process.communicate(timeout=DEADLINE)
    finally:
        process.kill()
        process.wait()
    return Outcome(process.returncode, out, err)


def links() -> set[int]:
    """Ids of every BPF link in this kernel, whoever holds it."""
    return {link.id for link in bpfsys.links()}


def held_by_others() -> set[int]:
    """Ids of links that other processes, which live, hold."""
    found = set()
    for path in glob.iglob("/proc/[0-9]*/fdinfo/*"):
        if path.startswith(f"/proc/{os.getpid()}/"):
            continue
        with contextlib.suppress(OSError):
            for line in Path(path).read_text().splitlines():
                if line.startswith("link_id:"):
                    found.add(int(line.split()[1]))
    return found


def nothing_left(before: set[int]) -> None:
    """No link is there that was not there before and that nobody else holds.

    Perf uprobes take the kernel a moment to take away.
    """
    wait_for(lambda: not (new := links() - before) or not new - held_by_others(), "links to go")


def copied(path: Path, folder: Path, name: str | None = None) -> Path:
    """A private, executable copy of a built file."""
    to = folder / (name or path.name)
    shutil.copy(path, to)
    to.chmod(0o755)
    return to
