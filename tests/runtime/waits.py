# SPDX-License-Identifier: Apache-2.0
"""``waits.c`` under the programs of causes, and what the system itself says about it."""

from __future__ import annotations

import os
import select
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from profinferd.agent.causes import SHARED, CauseOptions, Causes
from profinferd.agent.kernel.programs import GgmlPrograms
from profinferd.agent.model.causes import Cause
from tests.victims.build import build

ANSWER_SECONDS = 60.0
Records = npt.NDArray[Any]


class Waits:
    """The running victim."""

    def __init__(self, command: Sequence[str] = ()) -> None:
        self._process = subprocess.Popen(
            [*command, str(build("waits.c"))], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        assert self._line() == "ready"
        self.settle()  # it has said so, and has something left to do until it waits for orders

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self, order: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(order.encode() + b"\n")

    def finish(self) -> list[int]:
        answer = self._line().split()
        assert answer and answer[0] in ("ok", "ready"), answer
        return [int(word) for word in answer[1:]]

    def do(self, order: str) -> list[int]:
        """The numbers of the answer."""
        self.start(order)
        return self.finish()

    def _line(self) -> str:
        out = self._process.stdout
        assert out is not None
        line = b""
        while not line.endswith(b"\n"):
            assert select.select([out], [], [], ANSWER_SECONDS)[0], "the victim does not answer"
            more = out.read(1)
            assert more, "the victim has ended"
            line += more
        return line.decode().strip()

    # ---- what the system says -------------------------------------------------------------

    def schedstat(self) -> tuple[float, float]:
        """(seconds on a core, seconds ready and waiting) of its main thread."""
        run, delay, _ = Path(f"/proc/{self.pid}/task/{self.pid}/schedstat").read_text().split()
        return int(run) / 1e9, int(delay) / 1e9

    def switches(self) -> int:
        """How often its main thread left its core."""
        lines = Path(f"/proc/{self.pid}/task/{self.pid}/status").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if "ctxt_switches" in line)

    def faults(self) -> tuple[int, int]:
        """(minor, major) of the process."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[7]), int(fields[9])

    def settle(self) -> None:
        """Until it sleeps for its next order: what it did is all behind it."""
        until = time.monotonic() + ANSWER_SECONDS
        while Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] != "S":
            assert time.monotonic() < until
            time.sleep(0.001)

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._process.wait(ANSWER_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Watching:
    """Programs that watch some processes as if they were engines in a call all the time."""

    def __init__(self, programs: GgmlPrograms, causes: Causes) -> None:
        self.programs, self.causes = programs, causes

    def watch(self, pid: int) -> None:
        self.programs.set_target(pid, layout=0, mode=0)

    def row(self, tid: int) -> Records:
        """struct sched_thread of a thread."""
        assert self.causes.sched is not None
        rows = self.causes.sched.threads()
        (row,) = rows[rows["tid"] == tid]
        return np.asarray(row)

    def settle(self, victim: Waits) -> None:
        """Until it is off its core for good. What /proc calls sleeping may still be running, or be
        preempted on its way: the moment of comparison must be the same on both sides."""
        until = time.monotonic() + ANSWER_SECONDS
        while True:
            victim.settle()
            row = self.row(victim.pid)
            if row["state"] == 1 and not row["woken"]:
                return
            assert time.monotonic() < until
            time.sleep(0.001)

    def seconds(self, tid: int) -> dict[Cause, float]:
        """What it waited for, however long."""
        wait = self.row(tid)["wait_ns"].tolist()
        return {cause: wait[cause] / 1e9 for cause in Cause}

    def graph_runs(self, tgid: int) -> None:
        """From now on a graph of this process runs (the clock that graph probes drive)."""
        programs = self.programs
        dtype = self.causes.sched.types.dtype("graph_clock") if self.causes.sched else None
        assert dtype is not None
        clock = np.zeros(1, dtype)
        clock["since"], clock["open"] = time.monotonic_ns(), 1
        programs._object.map("graph_clocks").update(tgid.to_bytes(4, "little"), clock.tobytes())


@contextmanager
def watching(*pids: int, **options: bool) -> Iterator[Watching]:
    """The programs, loaded and attached, watching ``pids``."""
    with ExitStack() as stack:
        programs = stack.enter_context(GgmlPrograms.load("auto"))
        causes = Causes.load(programs, CauseOptions(**options))
        stack.callback(causes.close)
        assert causes.notes == []
        made = Watching(programs, causes)
        for pid in pids:
            made.watch(pid)
        yield made


def one_cpu() -> int:
    """A CPU that we may use."""
    return max(os.sched_getaffinity(0))


__all__ = ["SHARED", "Records", "Waits", "Watching", "one_cpu", "watching"]
