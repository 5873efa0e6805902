# SPDX-License-Identifier: Apache-2.0
"""Where ``top`` gets its figures: the running daemon, or a process that it attaches to by itself.

Both give the answer of the control socket's ``snapshot`` (docs/control.md).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from ..daemon.client import ControlClient
from ..errors import ProfinferError
from ..model.snapshot import Snapshot
from ..version import version

SPEED_SECONDS = 5.0
"""The token rate shown is that of the last seconds."""
REFRESH_SECONDS = 0.5


class Source(Protocol):
    """Gives answers; ``label`` says in a few words where they come from."""

    label: str

    def fetch(self) -> dict[str, Any]: ...
    def close(self) -> None: ...


class DaemonSource:
    """Asks the daemon; a new connection each time, so that its restart is survived."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.label = "daemon"
        self.fetch()

    def fetch(self) -> dict[str, Any]:
        """Raises ProfinferError when there is no answer."""
        with ControlClient(self._path) as client:
            return client.snapshot()

    def close(self) -> None:
        """Nothing is held open."""


class Watched(Protocol):
    """What is needed of ``profinferd.agent.attach.Attachment``."""

    def poll(self, timeout_s: float) -> None: ...
    def alive(self) -> bool: ...
    def snapshot(self) -> Snapshot: ...
    def close(self) -> None: ...


class OwnSource:
    """Watches one process by itself, on a thread; ``open_`` attaches and may raise."""

    def __init__(self, pid: int, open_: Callable[[], Watched]) -> None:
        self.label = f"attached to {pid}"
        self._pid = pid
        self._lock = threading.Lock()
        self._latest: dict[str, Any] | None = None
        self._state, self._reason = "watched", ""
        self._speeds: deque[tuple[float, int]] = deque()
        self._asked = threading.Event()
        self._watched = open_()
        self._thread = threading.Thread(target=self._run, name="top", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        due = 0.0
        try:
            while not self._asked.is_set() and self._watched.alive():
                self._watched.poll(0.25)
                if (now := time.monotonic()) >= due:
                    due = now + REFRESH_SECONDS
                    self._publish(self._watched.snapshot(), now)
            state, reason = "ended", "" if self._asked.is_set() else "the process ended"
        except ProfinferError as error:
            state, reason = "unprofiled", str(error)
        with self._lock:
            self._state, self._reason = state, reason

    def _publish(self, snapshot: Snapshot, now: float) -> None:
        rows = snapshot.counters.generation_tokens if snapshot.counters is not None else 0
        self._speeds.append((now, rows))
        while len(self._speeds) > 2 and now - self._speeds[0][0] > SPEED_SECONDS:
            self._speeds.popleft()
        (then, before) = self._speeds[0]
        span = now - then
        report = snapshot.to_json_dict()
        target = snapshot.target
        model = f" {target.model}" if target.model else ""
        with self._lock:
            self._latest = {
                "target": target.exe.rpartition("/")[2] + model,
                "pid": self._pid,
                "start_time": 0,
                "tokens_per_second": (rows - before) / span if span > 0 and rows > before else None,
                "report": report,
            }

    def fetch(self) -> dict[str, Any]:
        """The latest; a process of which nothing is known yet has a state only."""
        with self._lock:
            known = self._latest or {"target": f"process {self._pid}", "pid": self._pid, "report": None}
            targets = [{**known, "state": self._state, "reason": self._reason}]
        return {"schema": 1, "version": version(), "targets": targets}

    def close(self) -> None:
        """Take the probes away."""
        self._asked.set()
        self._thread.join(10)
        self._watched.close()
