# SPDX-License-Identifier: Apache-2.0
"""``--listen``: the latest snapshot, served to Prometheus."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from ...exporters.prometheus import PrometheusExporter, Seen
from ...exporters.serve import MetricsServer
from ...exporters.text import clean
from ..errors import UsageError
from ..model.snapshot import Snapshot
from ..version import version
from .output import say

LOOPBACK = "127.0.0.1"


FRESH_SECONDS = 0.25
"""A snapshot that is younger will do."""
PATIENCE_SECONDS = 2.0
"""A scrape waits no longer for a new one: while attaching, and when all is over, none comes."""


class Published:
    """The latest snapshot: made by the thread that watches when one that answers a scrape asks.

    Scrapes come every some seconds; snapshots made on the chance of one would cost more than
    all the rest of watching. They are frozen, so one reference is all that is shared.
    """

    def __init__(self, wake: Callable[[], None] = lambda: None) -> None:
        """``wake`` is called when a snapshot is wanted."""
        self._wake = wake
        self._latest: tuple[Seen, ...] = ()
        self._made_at = -PATIENCE_SECONDS
        self._made = threading.Condition()
        self.wanted = False

    def set(self, snapshot: Snapshot, seen_anything: bool) -> None:
        """Publishes ``snapshot``; the target is called idle until something was seen."""
        with self._made:
            self._latest = (Seen(snapshot, "ok" if seen_anything else "idle"),)
            self._made_at, self.wanted = time.monotonic(), False
            self._made.notify_all()

    def __call__(self) -> tuple[Seen, ...]:
        asked = time.monotonic()
        with self._made:
            if asked - self._made_at >= FRESH_SECONDS:
                self.wanted = True
                self._wake()
                self._made.wait_for(lambda: self._made_at >= asked, PATIENCE_SECONDS)
            return self._latest


def parse_address(text: str) -> tuple[str, int]:
    """(host, port) of ``HOST:PORT``, ``[V6]:PORT``, ``:PORT`` or ``PORT``; raises UsageError.

    Without a host it is the loopback address: what a target does is not for the network
    unless somebody says so.
    """
    host, _, port = text.strip().rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        port = ""  # an IPv6 address without brackets: where the port begins is a guess
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= 65535):
        raise UsageError(f"--listen {clean(text)!r} is not HOST:PORT", "for example --listen 127.0.0.1:9847")
    return host or LOOPBACK, int(port)


def serve(address: tuple[str, int], published: Published) -> MetricsServer:
    """A running server on ``address``; raises UsageError when it cannot be bound."""
    exporter = PrometheusExporter(published, version())
    lock = threading.Lock()

    def render(accept: str) -> tuple[str, bytes]:
        with lock:  # the exporter remembers which series were admitted
            return exporter.scrape(accept)

    host, port = address
    try:
        server = MetricsServer(host, port, render, lambda line: say(f"profinferd: {line}"))
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not a host name"
        raise UsageError(
            f"cannot listen on {clean(host)}:{port} ({why})", "choose another address or port with --listen"
        ) from error
    server.start()
    return server
