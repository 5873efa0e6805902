# SPDX-License-Identifier: Apache-2.0
"""The daemon's life: configuration, sockets, the loop, signals, the end."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from types import FrameType
from typing import Any, Protocol

from ..errors import ProfinferError, UsageError
from ..version import version
from ..waking import Wakeup
from .config import Config, load, needs_restart
from .control import ControlServer
from .log import Log
from .notify import Notifier

RELOAD_SECONDS = 4.0
"""How long who asks for a reload waits for the loop to do it."""


NEWS_S = 0.2
"""Between two turns for the sake of news."""


class Watching(Protocol):
    """The part that looks at targets; all of it runs on the loop's thread, but for ``published``."""

    def start(self) -> None: ...
    def tick(self, now_s: float) -> float: ...
    def descriptors(self) -> list[int]: ...
    def configure(self, config: Config) -> None: ...
    def published(self) -> list[dict[str, Any]]: ...
    def health(self) -> dict[str, Any]: ...
    def close(self) -> None: ...


class Serves(Protocol):
    """An HTTP server."""

    url: str

    def start(self) -> None: ...
    def close(self) -> None: ...


class Daemon:
    """Runs in the foreground until SIGTERM or SIGINT. ``path``: the configuration file, or None."""

    def __init__(
        self,
        path: str | None,
        config: Config,
        watching: Callable[[Callable[[], None]], Watching],
        log: Log,
        serve: Callable[[Config, Callable[[str], None]], Serves | None] | None = None,
    ) -> None:
        self._serve = serve
        self._path, self._config, self._log = path, config, log
        self._started_with = config
        self._notifier = Notifier()
        self._stop = self._wanted = False
        self._answers: list[tuple[threading.Event, list[ProfinferError | None]]] = []
        self._lock = threading.Lock()
        self._begun = time.monotonic()
        self._wakeup = Wakeup()
        self._news_at = 0.0
        self.reloads = self.reload_failures = 0
        self._watching = watching(self.wake)

    def wake(self) -> None:
        """Have the loop turn now; from any thread."""
        self._wakeup.ring()

    def run(self) -> None:
        """Returns when told to stop. Raises ProfinferError when it cannot start."""
        with ExitStack() as stack:
            stack.callback(self._wakeup.close)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                before = signal.signal(number, self._signalled)
                stack.callback(signal.signal, number, before)
            self._wakeup.ring_on_signals()
            stack.callback(self._watching.close)
            self._watching.start()
            control = ControlServer(
                self._config.control.socket,
                {"snapshot": self._snapshot, "health": self._health, "reload": self._reload_asked},
                group=self._config.control.group,
                on_error=lambda line: self._log.error(line),
            )
            stack.callback(control.close)
            self._open(stack)
            control.start()
            self._notifier.ready("watching")
            self._log.info(
                "profinferd is ready", version=version(), seconds=round(time.monotonic() - self._begun, 3)
            )
            self._loop()
            self._notifier.stopping()
            self._log.info("profinferd stops")

    def _open(self, stack: ExitStack) -> None:
        """Other ways in and out."""
        if self._serve is not None:
            serving = self._serve(self._config, lambda line: self._log.error(line))
            if serving is not None:
                stack.callback(serving.close)
                serving.start()
                self._log.info("metrics and page are served", url=serving.url)

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            self._wanted = True
        else:
            self._stop = True

    def _loop(self) -> None:
        while not self._stop:
            now = time.monotonic()
            pause = self._watching.tick(now)
            self._notifier.alive(now)
            if self._wanted:
                self._wanted = False
                self._reload()
                continue
            if self._notifier.interval_s is not None:
                pause = min(pause, self._notifier.interval_s)
            self._sleep(now, max(0.0, pause))

    def _sleep(self, now_s: float, pause: float) -> None:
        """Until it is time, somebody wakes us, or there is news; of news, a few a second are enough."""
        listening = now_s - self._news_at >= NEWS_S
        if not listening:
            pause = min(pause, self._news_at + NEWS_S - now_s)
        news = self._watching.descriptors() if listening else []
        if self._wakeup.sleep(pause, news):
            self._news_at = time.monotonic()

    # ---- reload -------------------------------------------------------------------------

    def _reload(self) -> None:
        with self._lock:
            waiting, self._answers = self._answers, []
        self._notifier.reloading()
        failure: ProfinferError | None = None
        try:
            config = load(self._path)
            self._watching.configure(config)
            self._log.level, self._log.form = config.log.level, config.log.format
            self._config = config
            self.reloads += 1
            self._log.info("configuration read again", file=self._path)
            if keys := needs_restart(self._started_with, config):
                self._log.warning("what has changed needs a restart", keys=", ".join(keys))
        except ProfinferError as error:
            failure = error
            self.reload_failures += 1
            self._log.error("the new configuration is not used, the old one goes on", reason=error.what)
        self._notifier.ready("watching" if failure is None else f"old configuration kept: {failure.what}")
        for event, answer in waiting:
            answer.append(failure)
            event.set()

    def _reload_asked(self, request: Mapping[str, Any]) -> dict[str, Any]:
        event, answer = threading.Event(), list[ProfinferError | None]()
        with self._lock:
            self._answers.append((event, answer))
        self._wanted = True
        self.wake()
        if not event.wait(RELOAD_SECONDS):
            raise UsageError("the reload was not done in time", "see the daemon's log")
        if answer[0] is not None:
            raise answer[0]
        return {"file": self._path, "restart": needs_restart(self._started_with, self._config)}

    # ---- what it tells ------------------------------------------------------------------

    def _snapshot(self, request: Mapping[str, Any]) -> dict[str, Any]:
        return {**self._about(), "targets": self._watching.published()}

    def _health(self, request: Mapping[str, Any]) -> dict[str, Any]:
        return {**self._about(), **self._watching.health()}

    def _about(self) -> dict[str, Any]:
        return {
            "schema": 1,
            "version": version(),
            "pid": os.getpid(),
            "uptime_seconds": round(time.monotonic() - self._begun, 3),
            "configuration": self._path,
            "reloads": self.reloads,
            "reload_failures": self.reload_failures,
            "log_suppressed": self._log.suppressed,
        }
