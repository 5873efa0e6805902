# SPDX-License-Identifier: Apache-2.0
"""A small HTTP server for scrapes and a page, bounded in every direction.

One thread serves all connections without ever waiting for one of them. A connection has a
deadline as a whole, a request head has a size, connections have a number: when all places are
taken, the one that has been waiting longest for its client is closed. So 400 connections that
say nothing cost 400 accepts, and a scrape between them is answered.
"""

from __future__ import annotations

import contextlib
import errno
import resource
import selectors
import socket
import ssl
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus

MAX_CONNECTIONS = 64
MAX_HEAD_BYTES = 8192
DEADLINE_SECONDS = 5.0
_PIECE = 1 << 16
_LAST_PIECES = 16
"""Of what a client still sends once it was answered; whoever sends without end gets a reset."""
PLAIN = "text/plain; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Request:
    """``path`` without its query; header names are in lower case."""

    method: str
    path: str
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Response:
    """``headers`` beside Content-Type and Content-Length."""

    status: HTTPStatus
    content_type: str = PLAIN
    body: bytes = b""
    headers: Sequence[tuple[str, str]] = ()


class Refused(Exception):
    """A request that is answered with an error status."""

    def __init__(self, status: HTTPStatus) -> None:
        self.status = status
        super().__init__(status.phrase)


Route = Callable[[Request], Response]


@dataclass(slots=True, eq=False)
class _Connection:
    sock: socket.socket
    deadline: float
    secure: bool  # the TLS handshake is still to be done
    head: bytearray = field(default_factory=bytearray)
    out: memoryview | None = None
    ended: bool = False  # the client has said its last word


class HttpServer:
    """Listens at once; answers from :meth:`start` to :meth:`close` with what ``route`` says.

    ``route`` is called from the server's thread, one request at a time. ``on_error`` hears in one
    line of a request that failed by a defect of ours. Binding raises OSError.
    """

    def __init__(
        self,
        host: str,
        port: int,
        route: Route,
        on_error: Callable[[str], None],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        info = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        self._route, self._on_error, self._tls = route, on_error, tls
        self.socket = socket.socket(info[0], socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self.socket.bind(info[4])
            self.socket.listen(128)
        except OSError:
            self.socket.close()
            raise
        self.socket.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._ours, self._theirs = socket.socketpair()
        self._theirs.setblocking(False)
        self._selector.register(self.socket, selectors.EVENT_READ)
        self._selector.register(self._theirs, selectors.EVENT_READ)
        self._connections: OrderedDict[int, _Connection] = OrderedDict()
        self._closing = False
        # Where descriptors are few, most belong to others.
        self._most = max(4, min(MAX_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 16))
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)
        self.refused = 0
        """Connections that were closed before they were answered."""

    @property
    def url(self) -> str:
        """Where it listens, with the port that was really bound; ends without a slash."""
        host, port = self.socket.getsockname()[:2]
        scheme = "https" if self._tls is not None else "http"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    def start(self) -> None:
        """Begins to answer."""
        self._thread.start()

    def close(self) -> None:
        """Stops answering and frees the port. May be called twice."""
        if self._closing:
            return
        self._closing = True
        with contextlib.suppress(OSError):
            self._ours.send(b"x")
        if self._thread.is_alive():
            self._thread.join()
        for connection in list(self._connections.values()):
            self._drop(connection)
        self._selector.close()
        for sock in (self.socket, self._ours, self._theirs):
            sock.close()

    # ---- the thread ---------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing:
            wait = None
            if self._connections:
                # All have the same patience, so the first one's ends first.
                first = next(iter(self._connections.values()))
                wait = max(0.0, first.deadline - time.monotonic())
            for key, _ in self._selector.select(wait):
                if key.fileobj is self.socket:
                    self._accept()
                elif isinstance(key.data, _Connection):
                    self._serve(key.data)
            now = time.monotonic()
            for connection in list(self._connections.values()):
                if connection.deadline > now:
                    break
                self.refused += connection.out is None
                self._drop(connection)

    def _accept(self) -> None:
        for _ in range(MAX_CONNECTIONS):
            try:
                sock, _ = self.socket.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    self._out_of_descriptors()
                return  # else none waits, or it is gone again
            sock.setblocking(False)
            if len(self._connections) >= self._most:
                oldest = next(iter(self._connections.values()))
                self.refused += 1
                self._drop(oldest)
            if self._tls is not None:
                try:
                    sock = self._tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
                except (OSError, ValueError):
                    sock.close()
                    continue
            connection = _Connection(sock, time.monotonic() + DEADLINE_SECONDS, self._tls is not None)
            self._connections[id(connection)] = connection
            try:
                self._selector.register(sock, selectors.EVENT_READ, connection)
            except OSError:  # no memory, or no more watches: this one goes, the server does not
                self.refused += 1
                self._drop(connection)
                continue
            # What it has to say is often here already: then it never waits among the others.
            self._serve(connection)

    def _out_of_descriptors(self) -> None:
        """Whoever waits to be accepted stays readable: make room, or do not ask again at once."""
        if self._connections:
            self.refused += 1
            self._drop(next(iter(self._connections.values())))
        else:
            time.sleep(0.05)

    def _serve(self, connection: _Connection) -> None:
        try:
            self._advance(connection)
        except (ssl.SSLWantReadError, BlockingIOError, InterruptedError):
            self._await(connection, selectors.EVENT_WRITE if connection.out else selectors.EVENT_READ)
        except ssl.SSLWantWriteError:
            self._await(connection, selectors.EVENT_WRITE)
        except (OSError, ValueError):
            self._drop(connection)  # the other end is gone or speaks no TLS
        except Exception as error:  # noqa: BLE001 - a defect must not end the server; it is said
            self._on_error(f"a request failed: {error!r}")
            self._drop(connection)

    def _await(self, connection: _Connection, events: int) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.modify(connection.sock, events, connection)

    def _advance(self, connection: _Connection) -> None:
        """Goes on until it would block (then that is raised) or the connection is done."""
        if connection.secure and isinstance(connection.sock, ssl.SSLSocket):
            connection.sock.do_handshake()
            connection.secure = False
        while connection.out is None:
            self._read(connection)
        while connection.out:
            connection.out = connection.out[connection.sock.send(connection.out[:_PIECE]) :]
        if not connection.ended:
            # Let the client read the answer before the connection goes: what it still sends
            # would else turn the close into a reset.
            connection.ended = True
            if not isinstance(connection.sock, ssl.SSLSocket):
                connection.sock.shutdown(socket.SHUT_WR)
                with contextlib.suppress(BlockingIOError):
                    for _ in range(_LAST_PIECES):
                        if not connection.sock.recv(_PIECE):
                            break
        self._drop(connection)

    def _read(self, connection: _Connection) -> None:
        head = connection.head
        if b"\r\n\r\n" not in head and b"\n\n" not in head:
            if len(head) >= MAX_HEAD_BYTES:
                self._answer(connection, None, Refused(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE))
                return
            piece = connection.sock.recv(MAX_HEAD_BYTES - len(head))
            if not piece:
                self._answer(connection, None, Refused(HTTPStatus.BAD_REQUEST))
                return
            head += piece
            return
        try:
            request = _parse(bytes(head))
        except Refused as refused:
            self._answer(connection, None, refused)
            return
        self._answer(connection, request, None)

    def _answer(self, connection: _Connection, request: Request | None, refused: Refused | None) -> None:
        if request is not None:
            try:
                response = self._route(request)
            except Refused as why:
                refused = why
        if refused is not None or request is None:
            status = refused.status if refused is not None else HTTPStatus.BAD_REQUEST
            response = Response(status, body=f"{status.phrase}\n".encode())
        lines = [f"HTTP/1.1 {response.status.value} {response.status.phrase}", "Connection: close"]
        lines += [f"{name}: {value}" for name, value in response.headers]
        lines += [f"Content-Type: {response.content_type}", f"Content-Length: {len(response.body)}"]
        head = ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
        only_head = request is not None and request.method == "HEAD"
        connection.out = memoryview(head if only_head else head + response.body)
        # A client that reads slowly has its own time, and does not hold up those that come after.
        connection.deadline = time.monotonic() + DEADLINE_SECONDS
        self._connections.move_to_end(id(connection))

    def _drop(self, connection: _Connection) -> None:
        self._connections.pop(id(connection), None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection.sock)
        connection.sock.close()


def _parse(head: bytes) -> Request:
    """A request head; raises Refused."""
    lines = head.decode("latin-1").splitlines()
    words = lines[0].split() if lines else []
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        raise Refused(HTTPStatus.BAD_REQUEST)
    headers: dict[str, str] = {}
    for line in lines[1:]:
        name, colon, value = line.partition(":")
        if colon:
            headers.setdefault(name.strip().lower(), value.strip())
    return Request(words[0], words[1].partition("?")[0], headers)


def get_only(request: Request) -> Response | None:
    """The refusal of a method that changes something; None for GET and HEAD."""
    if request.method in ("GET", "HEAD"):
        return None
    return Response(
        HTTPStatus.METHOD_NOT_ALLOWED, body=b"Only GET and HEAD.\n", headers=[("Allow", "GET, HEAD")]
    )
