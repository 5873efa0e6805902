# SPDX-License-Identifier: Apache-2.0
"""The scrape server: answers, and stays bounded under connections that mean harm."""

from __future__ import annotations

import contextlib
import errno
import http.client
import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from profinferd.exporters import httpd
from profinferd.exporters.httpd import MAX_CONNECTIONS
from profinferd.exporters.serve import MetricsServer

Log = list[str]


@pytest.fixture
def log() -> Log:
    return []


@pytest.fixture
def server(log: Log, monkeypatch: pytest.MonkeyPatch) -> Iterator[MetricsServer]:
    """A server that echoes the Accept header, and fails when it says so."""
    monkeypatch.setattr(httpd, "DEADLINE_SECONDS", 60.0)  # a client may have to wait for a core

    def render(accept: str) -> tuple[str, bytes]:
        if accept == "fail":
            raise ZeroDivisionError("a defect")
        return "text/plain", f"accept={accept}\n".encode()

    made = MetricsServer("127.0.0.1", 0, render, log.append)
    made.start()
    yield made
    made.close()


def ask(server: MetricsServer, method: str, path: str, accept: str = "x") -> tuple[int, bytes]:
    host, port = server.socket.getsockname()[:2]
    connection = http.client.HTTPConnection(host, port, timeout=60)
    connection.request(method, path, headers={"Accept": accept})
    response = connection.getresponse()
    status, body = response.status, response.read()
    connection.close()
    return status, body


def raw(server: MetricsServer, data: bytes) -> bytes:
    """What comes back for ``data``."""
    with socket.create_connection(server.socket.getsockname()[:2], timeout=60) as sock:
        back = b""
        # A connection that is closed with our bytes unread is reset; that is an answer too.
        with contextlib.suppress(OSError):
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            while chunk := sock.recv(65536):
                back += chunk
        return back


def test_answers(server: MetricsServer) -> None:
    """GET and HEAD of /metrics, with or without a query; nothing else is there."""
    assert ask(server, "GET", "/metrics", "text/plain") == (200, b"accept=text/plain\n")
    assert ask(server, "GET", "/metrics?a=b") == (200, b"accept=x\n")
    assert ask(server, "HEAD", "/metrics") == (200, b"")
    assert ask(server, "GET", "/")[0] == 200
    assert ask(server, "GET", "/../etc/passwd")[0] == 404
    assert ask(server, "POST", "/metrics")[0] == 405
    assert server.url.startswith("http://127.0.0.1:") and server.url.endswith("/metrics")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET /metrics\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01",
        b"GET /metrics HTTP/1.1\r\n",
    ],
)
def test_malformed_requests(server: MetricsServer, data: bytes, log: Log) -> None:
    """Each is a 400, and the server goes on."""
    assert raw(server, data).startswith(b"HTTP/1.1 400 ")
    assert ask(server, "GET", "/metrics")[0] == 200
    assert not log


def test_an_endless_head_is_cut(server: MetricsServer) -> None:
    """No more than the limit is ever held."""
    assert raw(server, b"GET /metrics HTTP/1.1\r\n" + b"A: b\r\n" * 100_000)[:12] in (b"HTTP/1.1 431", b"")
    assert ask(server, "GET", "/metrics")[0] == 200


def test_half_open_connections_are_nothing(server: MetricsServer) -> None:
    """400 that say nothing, or a byte now and then: no thread, few descriptors, scrapes go on."""
    threads, before = threading.active_count(), len(os.listdir("/proc/self/fd"))
    address = server.socket.getsockname()[:2]
    sockets = [socket.create_connection(address, timeout=60) for _ in range(400)]
    for _ in range(20):
        assert ask(server, "GET", "/metrics")[0] == 200
        for sock in sockets:
            with contextlib.suppress(OSError):  # closed to make room
                sock.send(b"G")  # a timeout per read would never end this
    assert threading.active_count() <= threads  # one of an earlier test may have ended meanwhile
    assert len(os.listdir("/proc/self/fd")) - before - len(sockets) <= MAX_CONNECTIONS
    for sock in sockets:
        sock.close()
    assert ask(server, "GET", "/metrics")[0] == 200


def test_whoever_says_nothing_loses_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where nobody else needs its place, and when it sends a byte now and then."""
    monkeypatch.setattr(httpd, "DEADLINE_SECONDS", 0.3)
    server = MetricsServer("127.0.0.1", 0, lambda accept: ("text/plain", b""), print)
    server.start()
    with socket.create_connection(server.socket.getsockname()[:2], timeout=60) as sock:
        until = time.monotonic() + 60
        with pytest.raises(OSError):
            while time.monotonic() < until:
                sock.send(b"G")
                time.sleep(0.05)
    assert server.refused == 1
    server.close()


def test_a_reader_that_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds nobody up, and loses the connection."""
    monkeypatch.setattr(httpd, "DEADLINE_SECONDS", 60.0)
    body = b"x" * 50_000_000
    asked: list[str] = []

    def render(accept: str) -> tuple[str, bytes]:
        asked.append(accept)
        return "text/plain", body if accept == "all" else b""

    server = MetricsServer("127.0.0.1", 0, render, print)
    server.start()
    request, address = b"GET /metrics HTTP/1.1\r\nAccept: all\r\n\r\n", server.socket.getsockname()[:2]
    with socket.create_connection(address) as sock:
        sock.sendall(request)
        for _ in range(10):
            assert ask(server, "GET", "/metrics")[0] == 200
    monkeypatch.setattr(httpd, "DEADLINE_SECONDS", 0.5)
    with socket.create_connection(address) as sock:
        sock.sendall(request)
        until = time.monotonic() + 60
        # A machine that stood still meanwhile may have let it lose the connection before it had asked.
        while server._connections or not (server.refused or asked.count("all") == 2):
            assert time.monotonic() < until
            time.sleep(0.05)
    server.close()


def test_who_goes_on_sending_is_not_listened_to_for_ever(server: MetricsServer) -> None:
    """The answer is sent; of what comes after the request a little is read, however fast it comes."""

    class Endless:
        """A client whose bytes are always there already."""

        asked = 0
        sent = b""

        def recv(self, size: int) -> bytes:
            self.asked += 1
            assert self.asked < 100
            return b"GET / HTTP/1.1\r\n\r\n" if self.asked == 1 else b"x" * size

        def send(self, data: memoryview) -> int:
            self.sent += bytes(data)
            return len(data)

        def shutdown(self, how: int) -> None: ...
        def close(self) -> None: ...

    client = Endless()
    connection = httpd._Connection(client, time.monotonic() + 60, secure=False)  # type: ignore[arg-type]
    server._connections[id(connection)] = connection
    server._serve(connection)
    assert client.sent.startswith(b"HTTP/1.1 200 ") and client.asked < 100


def test_no_watch_for_a_connection_is_not_the_end(
    server: MetricsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel watches so many descriptors of a user and no more."""
    real, left = server._selector.register, 2

    def register(*given: Any) -> Any:
        nonlocal left
        left -= 1
        if left >= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*given)

    monkeypatch.setattr(server._selector, "register", register)
    for _ in range(2):
        with pytest.raises(OSError):
            ask(server, "GET", "/metrics")
    assert ask(server, "GET", "/metrics")[0] == 200
    assert server.refused == 2


def test_a_defect_is_said_and_survived(server: MetricsServer, log: Log) -> None:
    """The scrape that failed ends; the person reads one line; the next scrape works."""
    with pytest.raises(http.client.RemoteDisconnected):
        ask(server, "GET", "/metrics", "fail")
    assert len(log) == 1 and "ZeroDivisionError" in log[0]
    assert ask(server, "GET", "/metrics")[0] == 200


def test_the_port_is_free_afterwards() -> None:
    """Stopping gives everything back, and a port in use is an OSError."""
    first = MetricsServer("127.0.0.1", 0, lambda accept: ("text/plain", b""), print)
    first.start()
    port = first.socket.getsockname()[1]
    with pytest.raises(OSError):
        MetricsServer("127.0.0.1", port, lambda accept: ("text/plain", b""), print)
    first.close()
    second = MetricsServer("127.0.0.1", port, lambda accept: ("text/plain", b""), print)
    second.start()
    second.close()
