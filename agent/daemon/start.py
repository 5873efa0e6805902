# SPDX-License-Identifier: Apache-2.0
"""Putting the daemon together."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from contextlib import suppress

from ..kernel.privileges import drop_admin
from ..version import version
from .config import Config
from .daemon import Daemon, Serves, Watching
from .heap import keep_little
from .log import Log
from .manager import Manager

NICE = 10
"""The targets come first: at 10, a tenth of a core where all are wanted."""


def start(path: str | None, config: Config, log: Log) -> Daemon:
    """A daemon that is ready to run."""
    _prepare()
    if drop_admin(config.profile.attach_method):
        log.debug("CAP_SYS_ADMIN is given up: this kernel's uprobes do without")
    made: list[Manager] = []

    def watching(wake: Callable[[], None]) -> Watching:
        made.append(Manager(config, log, wake))
        return made[0]

    def serve(settings: Config, say: Callable[[str], None]) -> Serves | None:
        if settings.http.listen is None:
            return None
        from .serving import Serving  # and prometheus-client with it

        serving = Serving(settings.http, made[0], say)
        if settings.otlp.endpoint is None:
            return serving
        from .sending import Sending  # and OpenTelemetry with it

        return Sending(serving, settings.otlp, say)

    return Daemon(path, config, watching, log, serve)


def _prepare() -> None:
    """Give way to targets; have as many descriptors as we may."""
    version()  # reads files, once, while there are descriptors for it
    with suppress(OSError):  # refused: then we compete as before
        os.setpriority(os.PRIO_PROCESS, 0, max(NICE, os.getpriority(os.PRIO_PROCESS, 0)))
    keep_little()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
