# SPDX-License-Identifier: Apache-2.0
"""A stand-in for the attachment, and a command line that uses it.

Run as a program it is ``profinferd`` with the fake behind it: ``python -m
tests.unit.fake_attachment SCRIPT attach ...``, where SCRIPT is JSON of :class:`Fake`'s
arguments.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from profinferd.agent.errors import MachineError, ProfinferError, TargetError
from profinferd.agent.model.snapshot import Snapshot
from profinferd.agent.waking import Wakeup

from . import snapshots

_ERRORS = {"target": TargetError, "machine": MachineError}


class Fake:
    """Sees something after ``seen_after`` polls; ends after ``ends_after``; fails at ``fails_at``.

    ``watching``: a file that is there once it is polled.
    """

    def __init__(
        self,
        kind: str = "busy",
        seen_after: int | None = 0,
        ends_after: int | None = None,
        fails_at: int | None = None,
        failure: str = "machine",
        sleep: float = 0.0,
        watching: str = "",
    ) -> None:
        self._snapshot: Snapshot = getattr(snapshots, kind)()
        self._seen_after = seen_after
        self._ends_after = ends_after
        self._fails_at = fails_at
        self._failure = failure
        self._sleep = sleep
        self._watching = watching
        self.polls = 0
        self.closed = 0
        self.polled_after_close = False

    @property
    def seen_anything(self) -> bool:
        return self._seen_after is not None and self.polls >= self._seen_after

    def poll(self, timeout_s: float) -> None:
        self.polls += 1
        if self._watching:
            Path(self._watching).touch()
        self.polled_after_close |= bool(self.closed)
        if self._fails_at is not None and self.polls >= self._fails_at:
            if self._failure == "bug":
                raise ZeroDivisionError("a defect")
            error: type[ProfinferError] = _ERRORS[self._failure]
            raise error("the ring went away", "try again")
        time.sleep(min(timeout_s, self._sleep) if self._sleep else 0)

    def wait(self, timeout_s: float, wakeup: Wakeup | None = None) -> None:
        self.poll(timeout_s)

    def alive(self) -> bool:
        return self._ends_after is None or self.polls < self._ends_after

    def snapshot(self) -> Snapshot:
        return self._snapshot

    def close(self) -> None:
        self.closed += 1


def run(script: str, arguments: list[str]) -> int:
    """One command line with the fake that ``script`` describes; returns the exit code."""
    module = importlib.import_module("profinferd.agent.cli.attach")
    wanted = json.loads(script)
    slow, early = wanted.pop("open_seconds", 0.0), wanted.pop("early", False)

    def open_fake(options: object, progress: object, watching: Callable[[], None]) -> Fake:
        print("attaching", file=sys.stderr, flush=True)
        time.sleep(slow)
        watching()
        if early:  # a Ctrl-C of somebody who reads that it is attached
            os.kill(os.getpid(), signal.SIGINT)
        return Fake(**wanted)

    module.open_attachment = open_fake  # type: ignore[attr-defined]
    main = importlib.import_module("profinferd.agent.cli").main
    return int(main(arguments))


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], sys.argv[2:]))
