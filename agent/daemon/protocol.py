# SPDX-License-Identifier: Apache-2.0
"""The control socket's protocol: one JSON object a line, each way, bounded in length.

A request is ``{"op": NAME, ...}``, an answer ``{"ok": true, "result": ...}`` or
``{"ok": false, "error": {"what", "remedy"}}``. Several requests may follow each other on a
connection. ``docs/control.md`` describes the operations.
"""

from __future__ import annotations

import json
import socket
import time
from typing import Any

SOCKET = "/run/profinferd/profinferd.sock"
"""Where the daemon listens unless its configuration says otherwise."""
MAX_REQUEST = 4096
"""Bytes of a request, its line break included."""
MAX_ANSWER = 32 << 20
"""Bytes of an answer: 64 targets with a few thousand operators each are a tenth of it."""


class ProtocolError(Exception):
    """The other end does not speak the protocol, or too slowly, or too much."""


class LineSocket:
    """Lines over a connected socket, each with a limit and a deadline."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._rest = b""

    def receive(self, limit: int, deadline: float) -> bytes | None:
        """The next line without its break; None at the end of the stream.

        ``deadline`` on the monotonic clock. Raises ProtocolError (too long, cut off) or
        TimeoutError.
        """
        pieces, size = [self._rest], len(self._rest)
        self._rest = b""
        while b"\n" not in pieces[-1]:
            if size > limit:
                raise ProtocolError(f"a line is longer than {limit} bytes")
            self._limit(deadline)
            piece = self._socket.recv(min(1 << 16, limit + 1))
            if not piece:
                if size:
                    raise ProtocolError("the connection ended in the middle of a line")
                return None
            pieces.append(piece)
            size += len(piece)
        line, _, self._rest = b"".join(pieces).partition(b"\n")
        if len(line) >= limit:
            raise ProtocolError(f"a line is longer than {limit} bytes")
        return line

    def send(self, message: object, deadline: float) -> None:
        """One object as a line. Raises TimeoutError when it is not taken in time."""
        view = memoryview(encode(message))
        while view:
            self._limit(deadline)
            view = view[self._socket.send(view) :]

    def _limit(self, deadline: float) -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._socket.settimeout(left)


def encode(message: object) -> bytes:
    """``message`` as one line of ASCII JSON."""
    return json.dumps(message, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> dict[str, Any]:
    """The object in ``line``; ProtocolError when it is none."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ProtocolError("a line is not JSON") from error
    if not isinstance(message, dict):
        raise ProtocolError("a line is not a JSON object")
    return message
