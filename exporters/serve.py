# SPDX-License-Identifier: Apache-2.0
"""A small HTTP server for scrapes, bounded in every direction.

``prometheus_client.start_http_server`` gives every half-open connection a thread for good.
Here a connection has a deadline as a whole, a request head has a size, and connections have
a number; what exceeds one of them is closed. The handler of ``http.server`` is not used: its
timeout is per read, so that a byte every few seconds holds a thread for as long as the
sender likes.
"""

from __future__ import annotations

import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable
from http import HTTPStatus

MAX_CONNECTIONS = 8
MAX_HEAD_BYTES = 8192
DEADLINE_SECONDS = 5.0

Render = Callable[[str], tuple[str, bytes]]
"""Accept header -> (content type, body)."""


class Refused(Exception):
    """A request that is answered with an error status."""

    def __init__(self, status: HTTPStatus) -> None:
        self.status = status
        super().__init__(status.phrase)


class _Handler(socketserver.BaseRequestHandler):
    server: MetricsServer
    request: socket.socket

    def handle(self) -> None:
        deadline = time.monotonic() + DEADLINE_SECONDS
        try:
            self._answer(deadline)
        except (OSError, TimeoutError):
            return  # the other end is gone or too slow; nobody is left to tell

    def _answer(self, deadline: float) -> None:
        headers: list[tuple[str, str]] = []
        head_only = False
        try:
            method, path, accept = _parse(_read_head(self.request, deadline))
            head_only = method == "HEAD"
            status, content_type, body = self._route(method, path, accept)
            if status is HTTPStatus.METHOD_NOT_ALLOWED:
                headers.append(("Allow", "GET, HEAD"))
        except Refused as refused:
            status, content_type = refused.status, "text/plain; charset=utf-8"
            body = f"{refused.status.phrase}\n".encode()
        headers += [("Content-Type", content_type), ("Content-Length", str(len(body)))]
        head = f"HTTP/1.1 {status.value} {status.phrase}\r\nConnection: close\r\n"
        head += "".join(f"{name}: {value}\r\n" for name, value in headers) + "\r\n"
        _send(self.request, head.encode("latin-1") + (b"" if head_only else body), deadline)

    def _route(self, method: str, path: str, accept: str) -> tuple[HTTPStatus, str, bytes]:
        plain = "text/plain; charset=utf-8"
        if method not in ("GET", "HEAD"):
            return HTTPStatus.METHOD_NOT_ALLOWED, plain, b"Only GET and HEAD.\n"
        if path == "/metrics":
            content_type, body = self.server.render(accept)
            return HTTPStatus.OK, content_type, body
        if path == "/":
            return HTTPStatus.OK, plain, b"profinferd: see /metrics\n"
        return HTTPStatus.NOT_FOUND, plain, b"Only /metrics is here.\n"


def _limit(sock: socket.socket, deadline: float) -> None:
    """Lets the next call on ``sock`` wait no longer than what is left of the whole."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    sock.settimeout(left)


def _read_head(sock: socket.socket, deadline: float) -> bytes:
    data = b""
    while b"\r\n\r\n" not in data and b"\n\n" not in data:
        if len(data) >= MAX_HEAD_BYTES:
            raise Refused(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        _limit(sock, deadline)
        chunk = sock.recv(MAX_HEAD_BYTES - len(data))
        if not chunk:
            raise Refused(HTTPStatus.BAD_REQUEST)
        data += chunk
    return data


def _parse(head: bytes) -> tuple[str, str, str]:
    """(method, path without query, Accept header) of a request head; raises Refused."""
    lines = head.decode("latin-1").splitlines()
    words = lines[0].split() if lines else []
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        raise Refused(HTTPStatus.BAD_REQUEST)
    accept = ""
    for line in lines[1:]:
        name, _, value = line.partition(":")
        if name.strip().lower() == "accept":
            accept = value.strip()
    return words[0], words[1].partition("?")[0], accept


def _send(sock: socket.socket, data: bytes, deadline: float) -> None:
    view = memoryview(data)
    while view:
        _limit(sock, deadline)
        view = view[sock.send(view) :]


class MetricsServer(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """Serves ``render`` at ``/metrics`` from threads of its own until :meth:`close`.

    ``render`` is called from those threads, at most :data:`MAX_CONNECTIONS` at once, and
    must not touch what another thread changes. ``on_error`` hears in one line of a scrape
    that failed by a defect of ours. Binding raises OSError.
    """

    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = 32

    def __init__(self, host: str, port: int, render: Render, on_error: Callable[[str], None]) -> None:
        info = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        self.address_family = info[0]
        self.render = render
        self.on_error = on_error
        self._room = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__((host, port), _Handler)
        self._thread = threading.Thread(
            target=self.serve_forever, kwargs={"poll_interval": 0.2}, name="metrics", daemon=True
        )

    @property
    def url(self) -> str:
        """Where the metrics are, with the port that was really bound."""
        host, port = self.socket.getsockname()[:2]
        return f"http://[{host}]:{port}/metrics" if ":" in host else f"http://{host}:{port}/metrics"

    def start(self) -> None:
        """Begins to answer."""
        self._thread.start()

    def close(self) -> None:
        """Stops answering and frees the port; safe to call once after :meth:`start`."""
        self.shutdown()
        self.server_close()
        self._thread.join()

    def verify_request(self, request: object, client_address: object) -> bool:
        """Takes a place for this connection, or refuses it when all are taken."""
        return self._room.acquire(blocking=False)

    def process_request(self, request: object, client_address: object) -> None:
        try:
            super().process_request(request, client_address)  # type: ignore[arg-type]
        except RuntimeError:  # no thread could be started, so none gives the place back
            self._room.release()
            raise

    def process_request_thread(self, request: object, client_address: object) -> None:
        try:
            super().process_request_thread(request, client_address)  # type: ignore[arg-type]
        finally:
            self._room.release()

    def handle_error(self, request: object, client_address: object) -> None:
        """Called by the base class inside its ``except``; the connection is closed after it."""
        self.on_error(f"a scrape failed: {sys.exc_info()[1]!r}")
