# SPDX-License-Identifier: Apache-2.0
"""A process of ours with the functions of ``victim_code`` and memory that we can write into."""

from __future__ import annotations

import mmap
import os
import platform
import select
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from ..errors import MachineError
from . import bpfsys, victim_code

_CHILD = Path(__file__).with_name("victim_child.py")
_PATIENCE = 10.0  # seconds that any answer may take; they take milliseconds


class Victim:
    """The process; ``path`` is the file to attach to. Close it.

    Raises MachineError when this machine cannot have one.
    """

    def __init__(self, data_size: int, command: Sequence[str] = (sys.executable, "-I", "-S")) -> None:
        """Start it; ``data_size`` bytes are shared with it. ``command`` runs a Python script."""
        try:
            image = victim_code.image()
        except KeyError:
            raise MachineError(f"probes cannot be measured on {platform.machine()}", "") from None
        self._fds: list[int] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._addresses: tuple[int, int] | None = None
        size = -(-data_size // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            self._code = self._file("profinferd-victim")
            os.write(self._code, image)
            data = self._file("profinferd-data")
            os.truncate(data, size)
            self.data = mmap.mmap(data, size)
            self._process = subprocess.Popen(
                [*command, str(_CHILD), str(self._code), str(len(image)), str(data), str(size)],
                pass_fds=[self._code, data], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0,
            )  # fmt: skip
        except OSError as error:
            self.close()
            what = f"cannot make a process to measure probes on: {bpfsys.strerror(error.errno or 0)}"
            raise MachineError(what, "look at vm.memfd_noexec and at security policies") from error

    def _file(self, name: str) -> int:
        self._fds.append(os.memfd_create(name, os.MFD_CLOEXEC))
        return self._fds[-1]

    # ---- where things are ---------------------------------------------------------------

    @property
    def path(self) -> str:
        """A path of the code for this process; the kernel resolves it when attaching."""
        return f"/proc/self/fd/{self._code}"

    @property
    def pid(self) -> int:
        """Its process id, which is also the id of the one thread that calls anything."""
        return self._running.pid

    @property
    def data_address(self) -> int:
        """Where :attr:`data` lies in its memory. Waits until it has started."""
        return self._where()[1]

    def function(self, name: str) -> int:
        """Where a function lies in its memory. Waits until it has started."""
        return self._where()[0] + victim_code.offset(name)

    def _where(self) -> tuple[int, int]:
        if self._addresses is None:
            self._addresses = self._answer()[:2]
        return self._addresses

    # ---- calling ------------------------------------------------------------------------

    def call(self, name: str, *arguments: int) -> int:
        """Have a function called; returns ns of a core that the call took, see :meth:`finish`."""
        self.start(name, *arguments)
        return self.finish()

    def start(self, name: str, *arguments: int) -> None:
        """Have a function called, and do not wait for its end: :meth:`finish` does."""
        self._where()
        request = struct.pack("=5Q", victim_code.offset(name), *arguments, *[0] * (4 - len(arguments)))
        try:
            self._stream(self._running.stdin).write(request)
        except BrokenPipeError as error:
            raise self._died() from error

    def finish(self) -> int:
        """Wait for the end of what was started; returns ns that it took of a core.

        Not of the clock on the wall: with seven others who wanted the two cores, a hit on a graph
        seemed to take 28 us instead of 3.6, and that would be kept.
        """
        return self._answer()[3]

    def clock(self) -> tuple[int, int]:
        """(ns of CLOCK_MONOTONIC, ticks of the processor's clock) of one moment, to a microsecond."""
        readings = []
        for _ in range(5):
            self.start("clock")
            readings.append(self._answer()[:3])
        # The one in which least else happened.
        begun, ended, ticks = min(readings, key=lambda one: one[1] - one[0])
        return (begun + ended) // 2, ticks

    @property
    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise ValueError("the victim is closed")
        return self._process

    @staticmethod
    def _stream(stream: IO[bytes] | None) -> IO[bytes]:
        if stream is None:
            raise ValueError("the victim was started without pipes")
        return stream

    def _answer(self) -> tuple[int, int, int, int]:
        stream = self._stream(self._running.stdout)
        until = time.monotonic() + _PATIENCE
        answer = b""
        while len(answer) < 32:
            ready, _, _ = select.select([stream], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise MachineError(f"the process that probes are measured on is silent for {_PATIENCE} s")
            if not (part := stream.read(32 - len(answer))):
                raise self._died()
            answer += part
        first, second, third, fourth = struct.unpack("=4Q", answer)
        return first, second, third, fourth

    def _died(self) -> MachineError:
        status = self._running.wait(_PATIENCE)
        why = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        if status > 0 and self._addresses is None:
            why = f"cannot map its code: {bpfsys.strerror(status)}"
        return MachineError(f"the process that probes are measured on {why}", "")

    # ---- the end ------------------------------------------------------------------------

    def close(self) -> None:
        """End the process and forget its memory. May be called twice."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for stream in (self._process.stdin, self._process.stdout):
                self._stream(stream).close()
            self._process = None
            self.data.close()
        while self._fds:
            os.close(self._fds.pop())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
