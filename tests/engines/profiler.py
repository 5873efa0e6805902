# SPDX-License-Identifier: Apache-2.0
"""Runs ``profinferd attach`` as a user does, and gives its JSON a typed face."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from .facts import Total
from .fetch import ROOT
from .processes import end, with_parent

COMMAND = (sys.executable, "-m", "profinferd.agent")
ATTACH_SECONDS = 240.0
REPORT_SECONDS = 240.0
"""Generous: a busy machine takes its time, and only a failure waits so long."""
GIVES_WAY, FORWARD = 10, -10
"""Nice values: of a profiler that is attached, and of one that is to lose nothing."""
_ATTACHED = re.compile(r"attached to process \d+ in (\d+) ms")


@dataclass(frozen=True)
class OpRow:
    """One element of "ops" in the JSON."""

    op: str
    dtype: str
    role: str
    phase: str
    calls: int
    seconds: float
    flops: int
    bytes: int


@dataclass(frozen=True)
class Report:
    """The JSON of one ``attach``; ``json`` is all of it."""

    json: Mapping[str, Any]
    attach_ms: int
    exit_code: int

    @property
    def prefill(self) -> int:
        return int(self.json["tokens"]["prefill"])

    @property
    def decode(self) -> int:
        return int(self.json["tokens"]["decode"])

    @property
    def output_rows(self) -> int:
        return int(self.json["tokens"]["output_rows"])

    @property
    def ops(self) -> list[OpRow]:
        names = OpRow.__dataclass_fields__
        return [OpRow(**{k: row[k] for k in names}) for row in self.json["ops"]]

    @property
    def uncovered(self) -> int:
        return sum(int(graph["uncovered"] or 0) for graph in self.json["graphs"])

    def calls(self, **match: Any) -> int:
        """How many calls have these fields, for example ``phase="decode", status=0``."""
        rows = self.json["calls"]
        return sum(int(row["count"]) for row in rows if all(row[k] == v for k, v in match.items()))

    def by_role(self) -> dict[tuple[str, str], tuple[Total, float]]:
        """(op, role) -> counts, and seconds on the critical path."""
        totals: dict[tuple[str, str], Total] = defaultdict(Total)
        seconds: dict[tuple[str, str], float] = defaultdict(float)
        for row in self.ops:
            total = totals[row.op, row.role]
            total.calls += row.calls
            total.flops += row.flops
            total.bytes += row.bytes
            seconds[row.op, row.role] += row.seconds
        return {key: (totals[key], seconds[key]) for key in totals}


class Profiler:
    """``with Profiler(pid) as profiler: ...work...; report = profiler.finish()``.

    The block starts when the probes are in place; ``finish`` is a Ctrl-C. Every op is recorded
    unless the options say otherwise. ``begin_ns`` and
    ``end_ns`` (CLOCK_MONOTONIC) enclose what was certainly watched.
    """

    def __init__(self, pid: int, *options: str) -> None:
        ops = [] if "--ops" in options else ["--ops", "all"]
        self.command = [*COMMAND, "attach", "--pid", str(pid), "--format", "json", *ops, *options]
        self.begin_ns = self.end_ns = 0
        self.attach_ms = -1
        self.progress: list[str] = []
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            with_parent(self.command),
            cwd=ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        try:
            self._wait_attached()
            self._come_forward()
        except BaseException:
            self.stop()
            raise
        self.begin_ns = time.monotonic_ns()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError("the profiler was not started")
        return self._process

    @property
    def pid(self) -> int:
        return self._running().pid

    def _come_forward(self) -> None:
        """It gives way to everybody once it is attached, and its rings hold some seconds. Here all that
        it sees is compared: on a machine whose cores are all busy it has to have one now and then."""
        until = time.monotonic() + ATTACH_SECONDS
        while self._running().poll() is None and os.getpriority(os.PRIO_PROCESS, self.pid) < GIVES_WAY:
            if time.monotonic() > until:
                raise RuntimeError("the profiler did not give way")
            time.sleep(0.002)
        for name in os.listdir(f"/proc/{self.pid}/task"):
            with contextlib.suppress(PermissionError, ProcessLookupError):
                os.setpriority(os.PRIO_PROCESS, int(name), FORWARD)

    def _wait_attached(self) -> None:
        stream = self._running().stderr
        assert stream is not None
        deadline, said = time.monotonic() + ATTACH_SECONDS, b""
        while time.monotonic() < deadline:
            if not select.select([stream], [], [], 0.2)[0]:
                continue
            # Not by lines: of two that come together, a buffer would keep the second from select().
            piece = os.read(stream.fileno(), 1 << 16)
            if not piece:
                break
            *lines, said = (said + piece).split(b"\n")
            self.progress += [line.decode(errors="replace").rstrip() for line in lines]
            found = _ATTACHED.search("\n".join(self.progress))
            if found:
                self.attach_ms = int(found.group(1))
                return
        raise RuntimeError("the profiler did not attach: " + " | ".join(self.progress))

    def finish(self) -> Report:
        """Ctrl-C, then the report."""
        self.end_ns = time.monotonic_ns()
        process = self._running()
        process.send_signal(signal.SIGINT)
        return self._report()

    def wait(self, seconds: float = REPORT_SECONDS) -> Report:
        """The report of a profiler that ends by itself (``--duration``, target gone)."""
        return self._report(seconds)

    def _report(self, seconds: float = REPORT_SECONDS) -> Report:
        process = self._running()
        out, err = process.communicate(timeout=seconds)
        self.progress += err.decode(errors="replace").splitlines()
        if process.returncode != 0:
            raise RuntimeError(f"attach ended with {process.returncode}: " + " | ".join(self.progress))
        return Report(json.loads(out), self.attach_ms, process.returncode)

    def kill(self) -> None:
        """SIGKILL to this very process, and its end."""
        self._running().kill()
        self._running().wait(60)

    def stop(self) -> None:
        process = self._process
        if process is not None:
            end(process)
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()


def run(*arguments: str, seconds: float = 300.0) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of one ``profinferd`` command."""
    done = subprocess.run(
        [*COMMAND, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=seconds, check=False
    )
    return done.returncode, done.stdout, done.stderr


def describe(rows: Sequence[str]) -> str:
    """Lines for an assertion message."""
    return "\n".join(("", *rows))
