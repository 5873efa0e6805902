# SPDX-License-Identifier: Apache-2.0
"""The control socket: who may ask, and the thread that answers.

Only root and the daemon's own user are answered, and members of the socket's group, as the
kernel names them (SO_PEERCRED, SO_PEERGROUPS). Connections have a deadline as a whole and a
number; an answer is made from what the watching thread has published, so no client can stall it.
"""

from __future__ import annotations

import contextlib
import grp
import os
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..errors import MachineError, ProfinferError, UsageError
from .protocol import MAX_REQUEST, LineSocket, ProtocolError, decode

MAX_CONNECTIONS = 8
IDLE_SECONDS = 10.0
"""How long a connection may wait for its next request, or its answer for being read."""
MODE = 0o750
_SO_PEERGROUPS = 59

Handler = Callable[[Mapping[str, Any]], Any]
"""Request -> result, ready for JSON. Called from a thread of the server; raises ProfinferError."""


class ControlServer:
    """Listens on ``path``; ``handlers`` by operation. ``private`` ones answer root and us alone.

    Raises UsageError when the path is not usable or another daemon answers there.
    """

    def __init__(
        self,
        path: str,
        handlers: Mapping[str, Handler],
        *,
        group: str | None = None,
        private: frozenset[str] = frozenset({"reload"}),
        on_error: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.path = path
        self._handlers, self._private, self._on_error = dict(handlers), private, on_error
        self._gid = _group(group)
        self._room = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._socket = self._bind()
        self._open = True
        self._thread = threading.Thread(target=self._serve, name="control", daemon=True)

    def _bind(self) -> socket.socket:
        folder = os.path.dirname(self.path)
        try:
            if folder:
                os.makedirs(folder, mode=MODE, exist_ok=True)
            self._remove_stale()
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            before = os.umask(0o777 & ~MODE)
            try:
                sock.bind(self.path)
            finally:
                os.umask(before)
            if self._gid is not None:
                os.chown(self.path, -1, self._gid)
            sock.listen(16)
        except OSError as error:
            raise UsageError(
                f"cannot make the control socket {self.path} ({error.strerror or error})",
                "choose another path as control.socket",
            ) from error
        return sock

    def _remove_stale(self) -> None:
        """A socket that a killed daemon left is removed, one that is answered is not."""
        try:
            found = os.lstat(self.path)
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(found.st_mode):
            raise UsageError(f"{self.path} exists and is no socket", "choose another path as control.socket")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(1.0)
            try:
                probe.connect(self.path)
            except ConnectionRefusedError:
                os.unlink(self.path)
                return
        raise UsageError(f"another profinferd daemon listens on {self.path}", "stop it first")

    def start(self) -> None:
        """Begins to answer."""
        self._thread.start()

    def close(self) -> None:
        """Stops answering and removes the socket. May be called twice."""
        if not self._open:
            return
        self._open = False
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept()
        if self._thread.is_alive():
            self._thread.join(2.0)
        self._socket.close()
        Path(self.path).unlink(missing_ok=True)

    def _serve(self) -> None:
        while self._open:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                if not self._open:
                    return
                time.sleep(0.1)  # no descriptor is free just now
                continue
            if not self._room.acquire(blocking=False):
                connection.close()
                continue
            try:
                threading.Thread(target=self._one, args=(connection,), name="control", daemon=True).start()
            except RuntimeError:  # no thread could be started
                self._room.release()
                connection.close()

    def _one(self, connection: socket.socket) -> None:
        try:
            with connection:
                try:
                    self._talk(connection)
                except (OSError, TimeoutError):
                    pass  # the other end is gone or too slow: nobody is left to tell
                except Exception as error:  # noqa: BLE001 - a defect must not end the daemon; it is said
                    self._on_error(f"a control request failed: {type(error).__name__}: {error}")
        finally:
            self._room.release()

    def _talk(self, connection: socket.socket) -> None:
        lines = LineSocket(connection)
        peer = _peer(connection)
        while True:
            try:
                line = lines.receive(MAX_REQUEST, time.monotonic() + IDLE_SECONDS)
                if line is None:
                    return
                answer = self._answer(decode(line), peer)
            except ProtocolError as error:
                answer = _refusal(str(error), "see docs/control.md")
                lines.send(answer, time.monotonic() + IDLE_SECONDS)
                return
            lines.send(answer, time.monotonic() + IDLE_SECONDS)

    def _answer(self, request: dict[str, Any], peer: tuple[int, frozenset[int]]) -> dict[str, Any]:
        operation = request.get("op")
        handler = self._handlers.get(operation) if isinstance(operation, str) else None
        if handler is None:
            known = ", ".join(sorted(self._handlers))
            return _refusal("this daemon does not know the operation", f"it has {known}")
        uid, groups = peer
        ours = uid in (0, os.geteuid())
        if not ours and (operation in self._private or self._gid is None or self._gid not in groups):
            return _refusal("permission denied", "ask as root")
        try:
            return {"ok": True, "result": handler(request)}
        except ProfinferError as error:
            return _refusal(error.what, error.remedy)
        except OSError as error:  # of ours, not of the connection: no descriptor, for one
            return _refusal(f"the daemon is short of something: {error.strerror}", "see its log")


def _refusal(what: str, remedy: str) -> dict[str, Any]:
    return {"ok": False, "error": {"what": what, "remedy": remedy}}


def _peer(connection: socket.socket) -> tuple[int, frozenset[int]]:
    """(uid, groups) of the other end when it connected, by the kernel's own account."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, gid = struct.unpack("3i", raw)
    groups = {gid}
    with contextlib.suppress(OSError):  # Linux 4.13
        more = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 4096)
        groups |= set(struct.unpack(f"{len(more) // 4}I", more))
    return uid, frozenset(groups)


def _group(name: str | None) -> int | None:
    if name is None:
        return None
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        raise MachineError(f"there is no group {name}", "create it, or leave control.group out") from None
