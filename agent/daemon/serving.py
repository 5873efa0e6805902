# SPDX-License-Identifier: Apache-2.0
"""What the daemon answers over HTTP: metrics, health, and the live page."""

from __future__ import annotations

import json
import os
import resource
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

from prometheus_client.metrics_core import Metric as Family

from ...exporters.httpd import HttpServer, Request, Response, get_only
from ...exporters.livepage import SECURITY_HEADERS, page, summary
from ...exporters.prometheus import PrometheusExporter, Seen
from ...exporters.text import clean
from ...exporters.webconfig import WebConfig, WebConfigError, load_web_config
from ..errors import UsageError
from ..version import version
from .config import Http, address
from .manager import Manager, Published

FRESH_S = 0.5
"""An answer that is younger is given again: a flood of scrapes costs what two a second do."""
MAX_GONE = 1024
"""Targets without a process that are remembered."""
JSON = "application/json"
HTML = "text/html; charset=utf-8"
_TICKS = os.sysconf("SC_CLK_TCK")


class Serving:
    """Metrics and page of one daemon. ``close`` it; raises UsageError when it cannot listen."""

    def __init__(
        self,
        http: Http,
        manager: Manager,
        log: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._manager = manager
        self._clock = clock
        self._lock = threading.Lock()
        self._exporter = PrometheusExporter(self._seen, version(), self._own)
        self._published = Published(0.0, (), ())
        self._gone: OrderedDict[str, float] = OrderedDict()  # targets that had a process which ended
        self._over: set[int] = set()
        self._bodies: dict[tuple[str, bool], tuple[float, Response]] = {}
        self._web = _web(http)
        self.scrapes = 0
        manager.on_ended = self._ended
        host, port = address(http.listen or "")
        try:
            self._server = HttpServer(host, port, self._route, log, self._web.tls)
        except (OSError, UnicodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "not a host name"
            raise UsageError(
                f"cannot listen on {clean(host)}:{port} ({why})", "choose another address as http.listen"
            ) from error
        self.url = self._server.url

    def start(self) -> None:
        """Begin to answer."""
        self._server.start()

    def close(self) -> None:
        """May be called twice."""
        self._server.close()

    # ---- requests -----------------------------------------------------------------------

    def _route(self, request: Request) -> Response:
        if (refusal := get_only(request)) is not None:
            return refusal
        if request.path == "/healthz":
            # Whoever starts us again when this fails has no password, and learns nothing.
            return Response(HTTPStatus.OK, body=b"ok\n")
        if (refusal := self._web.refusal(request)) is not None:
            return refusal
        if request.path == "/metrics":
            return self._fresh("metrics", "application/openmetrics-text" in request.headers.get("accept", ""))
        if request.path == "/readyz":
            health = self._manager.health()
            text = f"{health['state']}{': ' + health['reason'] if health['reason'] else ''}\n"
            return Response(HTTPStatus.OK, body=text.encode())
        if request.path == "/api/live":
            return self._fresh("live", False)
        if request.path == "/":
            return Response(HTTPStatus.OK, HTML, page(), SECURITY_HEADERS)
        return Response(HTTPStatus.NOT_FOUND, body=b"Here are /, /metrics, /healthz and /readyz.\n")

    def _fresh(self, what: str, open_metrics: bool) -> Response:
        now = self._clock()
        kept = self._bodies.get((what, open_metrics))
        if kept is not None and now - kept[0] < FRESH_S:
            return kept[1]
        published = self._manager.current()
        response = self._metrics(published, open_metrics) if what == "metrics" else self._live(published)
        self._bodies[what, open_metrics] = (self._clock(), response)
        return response

    def _metrics(self, published: Published, open_metrics: bool) -> Response:
        self.scrapes += 1
        with self._lock:
            self._published = published
            self._expire()
            kind, body = self._exporter.scrape("application/openmetrics-text" if open_metrics else "")
        return Response(HTTPStatus.OK, kind, body)

    def families(self) -> list[Family]:
        """What a scrape would hold, for other ways out; for any thread."""
        published = self._manager.current()
        with self._lock:
            self._published = published
            self._expire()
            return self._exporter.families()

    def _live(self, published: Published) -> Response:
        shown = summary(published.targets)
        data: dict[str, Any] = {
            "version": version(),
            "health": self._manager.health(),
            "targets": shown,
            "not_shown": len(published.targets) - len(shown),
        }
        body = json.dumps(data, ensure_ascii=True, allow_nan=False).encode()
        return Response(HTTPStatus.OK, JSON, body, SECURITY_HEADERS)

    # ---- targets that ended -------------------------------------------------------------

    def _seen(self) -> tuple[Seen, ...]:
        # What was published last may still have a process whose sums are its target's by now.
        here = {one.number for one in self._published.seen}
        self._over &= here
        living = tuple(
            # One that is watched no more has given its figures already, but still says why it is not.
            one
            for one in self._published.seen
            if one.number not in self._over or one.snapshot is None
        )
        there = {one.target for one in living}
        return (*living, *(Seen(None, "ended", label) for label in self._gone if label not in there))

    def _ended(self, seen: Seen) -> None:
        """On the loop's thread: what the process had is part of its target from now on."""
        with self._lock:
            self._exporter.retire(seen)
            self._over.add(seen.number)
            self._gone[seen.target] = self._clock()
            self._gone.move_to_end(seen.target)
            while len(self._gone) > MAX_GONE:
                self._exporter.forget(self._gone.popitem(last=False)[0])

    def _expire(self) -> None:
        """Targets without a process for long end as a whole."""
        now, patience = self._clock(), self._manager.expire_seconds
        for one in self._published.seen:
            if one.target in self._gone and one.snapshot is not None and one.number not in self._over:
                self._gone[one.target] = now
        for label in [label for label, since in self._gone.items() if now - since > patience]:
            del self._gone[label]
            self._exporter.forget(label)

    # ---- the daemon itself --------------------------------------------------------------

    def _own(self) -> Iterator[tuple[str, tuple[str, ...], float]]:
        health = self._manager.health()
        for state in ("watched", "unprofiled", "excluded", "waiting"):
            yield "daemon_targets", (state,), health[state]
        yield from own_figures()
        yield "daemon_foreign_events_total", (), health["foreign_events_total"]
        yield "daemon_announcements_lost_total", (), health["announcements_lost"]
        entries, misses = self._manager.kernel_figures()
        for name, count in entries.items():
            yield "daemon_map_entries", (name,), count
        for name, count in misses.items():
            yield "daemon_recursion_misses_total", (name,), count


def own_figures() -> Iterator[tuple[str, tuple[str, ...], float]]:
    """Descriptors, threads, memory and CPU time of this process."""
    try:
        files = len(os.listdir("/proc/self/fd"))
        threads = len(os.listdir("/proc/self/task"))
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        # Looking takes a descriptor, too: when none is left, that is what is to be told.
        yield "daemon_open_files", (), resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    else:
        yield "daemon_open_files", (), files
        yield "daemon_threads", (), threads
        yield "daemon_resident_bytes", (), pages * resource.getpagesize()
    used = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    yield "daemon_cpu_seconds_total", (), sum(one.ru_utime + one.ru_stime for one in used)


def _web(http: Http) -> WebConfig:
    if http.web_config is None:
        return WebConfig()
    try:
        return load_web_config(http.web_config)
    except WebConfigError as error:
        raise UsageError(str(error), "see http.web_config in deploy/profinferd.yaml") from error
