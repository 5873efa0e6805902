# SPDX-License-Identifier: Apache-2.0
"""Processes with functions of an engine in them, in whatever arrangement a test needs."""

from __future__ import annotations

import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from profinferd.agent.target.facts import TargetInfo
from tests.victims.build import build

EVERYTHING = ("-DCALLS", "-DGRAPHS", "-DCPU", "-DDISPATCH", "-DFUSED")
BUILD_ID = "-Wl,--build-id=sha1"


def program(*flags: str, strip: bool = False) -> Path:
    """A program with the parts of ``engine.c`` that the flags name."""
    return build("engine.c", cflags=("-DMAIN", BUILD_ID, *flags), strip=strip)


def library(*flags: str, name: str, strip: bool = False) -> Path:
    """A shared object with the parts of ``engine.c`` that the flags name."""
    return build("engine.c", cflags=(BUILD_ID, *flags), shared=True, name=name, strip=strip)


class Stub:
    """A running ``engine.c`` program."""

    def __init__(self, path: Path | Sequence[str]) -> None:
        command = [str(path)] if isinstance(path, Path) else list(path)
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            errors="surrogateescape",
        )
        assert self._out.readline() == "ready\n"

    @property
    def pid(self) -> int:
        """Its pid (of the last program, where one command starts another by exec)."""
        return self.process.pid

    @property
    def _out(self) -> IO[str]:
        assert self.process.stdout is not None
        return self.process.stdout

    def tell(self, line: str) -> str:
        """Send a line, return the answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self._out.readline().rstrip("\n")

    def load(self, path: Path | str) -> None:
        """dlopen a library."""
        assert self.tell(f"o {path}") == "loaded"

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


INTERPRETER = [sys.executable, "-I", "-c", "import json, re, dataclasses, pathlib, subprocess"]
"""What any program in Python takes to begin: the measure of how fast this machine is."""


def quick(look: Callable[[], TargetInfo], limit: float = 6.0) -> None:
    """Assert that a look at a target, its child included, takes less than ``limit`` times what an
    interpreter takes to start: three to four times that, and 120 ms, on the machine that this was
    written on, where an attach may take 300 ms.

    Processor time of both in turn, for other work on the machine stretches the rest.
    """
    looks, starts = [], []
    for _ in range(5):
        starts.append(_spent(lambda: subprocess.run(INTERPRETER, check=True)))
        looks.append(_spent(lambda: look().close()))
    assert min(looks) < limit * min(starts), [
        f"{what} {[round(1000 * t) for t in times]} ms"
        for what, times in (("looks", looks), ("starts", starts))
    ]


def _spent(work: Callable[[], object]) -> float:
    """Seconds of processor time, ours and of children that have ended."""
    whose = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    before = [resource.getrusage(who) for who in whose]
    work()
    after = [resource.getrusage(who) for who in whose]
    return sum(b.ru_utime + b.ru_stime - a.ru_utime - a.ru_stime for a, b in zip(before, after, strict=True))


def copy(path: Path, to: Path) -> Path:
    """A copy under another name, executable."""
    shutil.copy(path, to)
    to.chmod(0o755)
    return to
