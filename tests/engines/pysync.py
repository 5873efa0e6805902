# SPDX-License-Identifier: Apache-2.0
"""Runs :mod:`tests.engines.pysync_victim`: shared libraries, not stripped or stripped.

``stripped=True`` uses a copy of the wheel's libraries without symbol tables, the form in which
distributions and other wheels ship them.
"""

from __future__ import annotations

import hashlib
import json
import os
import select
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from . import oldlibc
from .fetch import CACHE, Engines, fetch
from .processes import end, with_parent

VICTIM = Path(__file__).with_name("pysync_victim.py")
ANSWER_SECONDS = 300.0


@dataclass(frozen=True)
class Options:
    """``context`` is the size of the KV cache of each context, in tokens. ``loading``: read puts the
    model into memory instead of mapping it, mlock locks what is mapped."""

    model: Path
    threads: int = 2
    contexts: int = 1
    context: int = 2048
    batch: int = 2048
    sequences: int = 4
    embedding: bool = False
    repack: bool = True
    api: str = "decode"
    loading: str = "mmap"
    stripped: bool = False
    env: Mapping[str, str] = field(default_factory=dict)


def libraries(engines: Engines, stripped: bool) -> Path:
    """The folder to load from: the wheel's own, or copies made once per wheel.

    Copies are needed for ``stripped``, and where the C library is older than the wheel's.
    """
    source = engines.pysync_libraries
    files = sorted(p for p in source.glob("*.so*") if not p.name.startswith("libmtmd"))
    if not stripped and not any(oldlibc.too_new(f) for f in files):
        return source
    key = hashlib.sha256("".join(f"{p.name}{p.stat().st_size}" for p in files).encode()).hexdigest()[:10]
    target = CACHE / f"pysync-{'stripped' if stripped else 'whole'}-{key}"
    if not target.exists():
        partial = target.with_name(f"{target.name}.{os.getpid()}")
        shutil.rmtree(partial, ignore_errors=True)  # of one that was interrupted
        partial.mkdir()
        for file in files:
            copy = partial / file.name
            if stripped:
                subprocess.run(["strip", "-o", str(copy), str(file)], check=True)
            else:
                shutil.copy(file, copy)
            oldlibc.relax(copy)
        try:
            partial.rename(target)
        except OSError:  # another run was faster
            shutil.rmtree(partial)
    return target


class PySync:
    """The running victim; a context manager. ``ask("generate", ...)`` and so on.

    ``script``: another program that takes the same options and talks in the same way.
    """

    def __init__(self, options: Options, script: Path = VICTIM) -> None:
        self.options = options
        self.script = script
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None

    def __enter__(self) -> Self:
        engines, o = fetch(), self.options
        folder = libraries(engines, o.stripped)
        options = {
            "library": str(folder / "libllama.so.0"),
            "first": "" if folder == engines.pysync_libraries else str(oldlibc.substitutes()),
            "model": str(o.model),
            "threads": o.threads,
            "contexts": o.contexts,
            "context": o.context,
            "batch": o.batch,
            "sequences": o.sequences,
            "embedding": o.embedding,
            "repack": o.repack,
            "api": o.api,
            "loading": o.loading,
        }
        self._log = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            with_parent([str(engines.python), str(self.script), json.dumps(options)]),
            env={**os.environ, "GGML_NO_BACKTRACE": "1", **o.env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
        )
        try:
            self._answer()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        return self._running().pid

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError("the victim was not started")
        return self._process

    def _answer(self) -> dict[str, Any]:
        out = self._running().stdout
        assert out is not None
        line = b""
        if select.select([out], [], [], ANSWER_SECONDS)[0]:
            line = out.readline()
        if not line:
            status = self._running().poll()
            raise RuntimeError(f"the victim gave no answer (status {status}): {self.log_tail()}")
        answer = json.loads(line)
        assert isinstance(answer, dict)
        return answer

    def log_tail(self, size: int = 1500) -> str:
        if self._log is None:
            return ""
        at = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, at - size))
        return self._log.read().decode(errors="replace")

    def start(self, action: str, **arguments: Any) -> None:
        """Sends a command without waiting for its answer (see :meth:`finish`)."""
        stdin = self._running().stdin
        assert stdin is not None
        stdin.write(json.dumps({"do": action, **arguments}).encode() + b"\n")
        stdin.flush()

    def finish(self) -> dict[str, Any]:
        """The answer to the command that was started."""
        return self._answer()

    def ask(self, action: str, **arguments: Any) -> dict[str, Any]:
        self.start(action, **arguments)
        return self.finish()

    def stop(self) -> int | None:
        """Ends this very process; its exit status."""
        status = None
        if self._process is not None:
            status = end(self._process)
            if self._process.stdout is not None:
                self._process.stdout.close()
        if self._log is not None and not self._log.closed:
            self._log.close()
        return status
