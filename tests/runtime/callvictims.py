# SPDX-License-Identifier: Apache-2.0
"""Programs whose calls are described by data: run on command, watched by the real probes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from profinferd.agent.attach import Attachment
from profinferd.agent.model.budgetdata import BudgetConfig
from profinferd.agent.model.calldata import CallTotal
from profinferd.agent.model.snapshot import Snapshot
from profinferd.agent.recording.reader import Recording

ROOT = Path(__file__).resolve().parents[2]


def recorded(
    program: Path, path: Path, talk: Callable[[Callable[[str], str]], None], *, once_attached: bool = False
) -> Snapshot:
    """``profinferd record`` of ``program`` from its start into ``path``: what the recording says in the
    end. As soon as the program is ready, or ``once_attached``, ``talk`` is given the function that tells
    it a line and returns its answer."""
    command = [sys.executable, "-m", "profinferd.agent", "record", "-o", str(path), "--ops", "off"]
    recorder = subprocess.Popen(
        [*command, "--", str(program)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip
    assert recorder.stdin is not None and recorder.stdout is not None and recorder.stderr is not None
    try:
        assert recorder.stdout.readline() == "ready\n"
        if once_attached:
            assert any("attached to process" in line for line in recorder.stderr)
        asked, answers = recorder.stdin, recorder.stdout

        def tell(line: str) -> str:
            asked.write(line + "\n")
            asked.flush()
            answer = answers.readline()
            assert answer, "it ended"
            return answer.strip()

        talk(tell)
        recorder.stdin.close()
        recorder.stdin = None
        _, err = recorder.communicate(timeout=120)
    finally:
        recorder.kill()
        recorder.wait()
    assert recorder.returncode == 0, err
    with Recording.open(str(path)) as recording:
        return recording.trace.snapshot


class Told:
    """A victim that does what a line says, and answers with a line."""

    def __init__(self, command: Sequence[str | Path], env: Mapping[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [str(part) for part in command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, **(env or {})},
        )  # fmt: skip
        line = self._out.readline()
        assert line.startswith("ready"), f"it said {line!r}"

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def _out(self) -> IO[str]:
        assert self.process.stdout is not None
        return self.process.stdout

    def tell(self, line: str) -> str:
        """Have it work; returns when it has."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        answer = self._out.readline()
        assert answer, "it ended"
        return answer.strip()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self.process.stdin is not None
        if kind is not None:
            self.process.kill()
        if not self.process.stdin.closed:
            self.process.stdin.close()
        self._out.close()
        self.process.wait(60)


def watch(pid: int, *, method: str = "auto", budget: float = 1.0) -> Attachment:
    """Attach without operators; the budget is generous, unless it is what is tested."""
    return Attachment.open(pid, ops="off", method=method, budget=BudgetConfig(budget))


def only(snapshot: Snapshot, call: str, **labels: object) -> CallTotal:
    """The one entry of that call, with these labels and status 0."""
    status = labels.pop("status", 0)
    state = labels.pop("state", "outermost")
    found = [
        c for c in snapshot.engine_calls
        if c.call == call and c.status == status and c.state == state
        and all(c.labels.get(name) == value for name, value in labels.items())
    ]  # fmt: skip
    assert len(found) == 1, f"{call} {labels}: {snapshot.engine_calls}"
    return found[0]


def profinferd(*arguments: str, env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The command line, in a process of its own; its JSON."""
    done = subprocess.run(
        [sys.executable, "-m", "profinferd.agent", *arguments, "--format", "json"],
        capture_output=True, text=True, timeout=120, cwd=ROOT, env={**os.environ, **(env or {})},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer
