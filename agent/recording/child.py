# SPDX-License-Identifier: Apache-2.0
"""A program that is started to be recorded: stopped as soon as an engine is in it, until we are too.

It is our own child, so it may be stopped. It is so before its first instruction, and whenever it
has mapped new code: that is looked through for an engine's name, and it goes on when there is
none. So nothing of an engine in the program itself is missed, and of one in a library at most a
millisecond after it was mapped, in which it is still being linked.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import signal
import subprocess
import time
from collections.abc import Sequence

from ..errors import TargetEnded, UsageError
from ..model.trace import Child
from ..target.catalogue import load_catalogue
from ..target.process import FileId, executable_files, executable_ids

MARKS = (b"ggml_graph_compute", b"llama_decode")
"""A file that holds neither name is no ggml. Other engines are known by the catalogue's marks."""
BENEATH_S = 2.0
"""How long a library that engines compute with (CUDA) may be in the program before it is what is
watched: the engine that it is there for mostly comes soon after, and is waited for."""
POLL_S, SLOW_POLL_S, FAST_FOR_S = 0.0005, 0.01, 2.0
END_S = 10.0
"""How long it may take to end after SIGTERM."""
_PROGRAM_CHARS = 200
_ENGINE, _BENEATH = 1, 2
_TRACEME, _DETACH = 0, 17  # of sys/ptrace.h
_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


class StartedProgram:
    """``command`` as a child of ours. End it with :meth:`end`; UsageError when it cannot start."""

    def __init__(self, command: Sequence[str]) -> None:
        self.program = os.path.basename(command[0])[:_PROGRAM_CHARS]
        self._seen: frozenset[FileId] = frozenset()
        self._looked: dict[FileId, int] = {}
        self._marks, self._beneath = _marks()
        self._beneath_since: float | None = None
        self._stopped = False
        try:
            self._process = subprocess.Popen(list(command), preexec_fn=_be_traced)
        except OSError as error:
            remedy = "give the program and its arguments after --"
            raise UsageError(f"cannot start {command[0]!r} ({error.strerror})", remedy) from error
        self.pid = self._process.pid
        self._stopped = _stop_at_exec(self.pid)

    def running(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def new_engine(self) -> bool:
        """Whether code of an engine was mapped since the last look; if so, it is stopped now.

        It goes on with :meth:`go`.
        """
        try:
            now = executable_ids(self.pid)
            if now <= self._seen:
                return self._beneath_alone()
            self._stop()
            now = executable_ids(self.pid)  # it was running until then
            fresh, self._seen = now - self._seen, now
            files = {(file.dev, file.inode): file.open_path for file in executable_files(self.pid)}
            found = [self._look(file_id, files.get(file_id, "")) for file_id in fresh]
        except TargetEnded:
            return False
        if _ENGINE in found:
            return True
        if _BENEATH in found and self._beneath_since is None:
            self._beneath_since = time.monotonic()
        self.go()
        return False

    def _beneath_alone(self) -> bool:
        """Whether what engines compute with has been there for long, and none has come; once."""
        if self._beneath_since is None or time.monotonic() - self._beneath_since < BENEATH_S:
            return False
        self._beneath_since = math.inf
        self._stop()
        return True

    def _look(self, file_id: FileId, path: str) -> int:
        if file_id not in self._looked:
            kind = _ENGINE if _has_mark(path, self._marks) else 0
            self._looked[file_id] = kind or (_BENEATH if _has_mark(path, self._beneath) else 0)
        return self._looked[file_id]

    def wait_for_engine(self, asked_to_stop: object) -> None:
        """Returns when an engine is in it, stopped. TargetEnded when it ends before.

        ``asked_to_stop``: an object whose attribute ``asked`` becomes true when we should give up.
        """
        fast_until = time.monotonic() + FAST_FOR_S
        while not self.new_engine():
            if not self.running():
                raise TargetEnded(
                    f"{self.program} ended ({self.how_it_ended()}) and no engine was seen in it",
                    "record a program that runs the engine in its own process",
                )
            if getattr(asked_to_stop, "asked", False):
                raise KeyboardInterrupt
            time.sleep(POLL_S if time.monotonic() < fast_until else SLOW_POLL_S)

    def _stop(self) -> None:
        self._process.send_signal(signal.SIGSTOP)
        self._stopped = True

    def go(self) -> None:
        """Let it run (again)."""
        if self._stopped:
            self._stopped = False
            self._process.send_signal(signal.SIGCONT)

    def end(self) -> Child:
        """Ask it to end, wait, and insist after some seconds."""
        if self.running():
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
                self.go()
                self._stopped = False
            try:
                self._process.wait(END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        return self.result()

    def result(self) -> Child:
        """How it ended, or that it runs."""
        code = self._process.poll()
        if code is None:
            return Child(self.program)
        return Child(self.program, None, -code) if code < 0 else Child(self.program, code)

    def how_it_ended(self) -> str:
        """In words."""
        return describe(self.result())


def _be_traced() -> None:
    """In the child: the kernel stops it before the first instruction of its new program."""
    _libc.ptrace(_TRACEME, 0, None, None)


def _stop_at_exec(pid: int) -> bool:
    """Turn that stop into an ordinary one, and let go of it. False: it was not stopped, for it may
    not be traced (Yama's strictest mode), and runs."""
    while True:
        # Looked at first: a status that is taken would be missing where the end is waited for.
        found = os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is not None and found.si_code not in (os.CLD_TRAPPED, os.CLD_STOPPED):
            return False
        if found is not None:
            break
        if not _traced(pid):
            return False
        time.sleep(POLL_S)
    os.waitpid(pid, os.WUNTRACED)
    _libc.ptrace(_DETACH, pid, None, ctypes.c_void_p(int(signal.SIGSTOP)))
    return True


def _traced(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            return b"\nTracerPid:\t0\n" not in file.read()
    except OSError:
        return False


def describe(child: Child) -> str:
    """How a program ended, in words."""
    if child.signal is not None:
        with contextlib.suppress(ValueError):
            return f"by {signal.Signals(child.signal).name}"
        return f"by signal {child.signal}"
    return "still running" if child.exit_code is None else f"with status {child.exit_code}"


def _marks() -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
    """Of engines, and of what they compute with."""
    found: dict[bool, list[bytes]] = {True: [], False: list(MARKS)}
    for engine in load_catalogue().engines:
        if not engine.hooks and engine.watch is None:
            found[engine.beneath] += [os.fsencode(mark) for mark in engine.marks]
    return tuple(found[False]), tuple(found[True])


def _has_mark(path: str, marks: Sequence[bytes]) -> bool:
    if not path:
        return False
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if not os.fstat(fd).st_size:
                return False
            with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as data:
                return any(data.find(mark) >= 0 for mark in marks)
        finally:
            os.close(fd)
    except (OSError, ValueError):
        return False
