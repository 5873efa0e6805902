# SPDX-License-Identifier: Apache-2.0
"""Asking a running daemon over its control socket."""

from __future__ import annotations

import os
import socket
import time
from types import TracebackType
from typing import Any, Self

from ..errors import MachineError, ProfinferError
from .protocol import MAX_ANSWER, SOCKET, LineSocket, ProtocolError, decode

TIMEOUT_SECONDS = 5.0


class NoDaemon(MachineError):
    """No daemon listens there (or it ended meanwhile)."""


class ControlClient:
    """A connection to the daemon. Close it, or use ``with``.

    Raises :class:`NoDaemon` when none listens, MachineError when we may not ask; every method
    raises ProfinferError with what the daemon says when it refuses.
    """

    def __init__(self, path: str = SOCKET, timeout: float = TIMEOUT_SECONDS) -> None:
        self._timeout, self._path = timeout, path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._socket.settimeout(timeout)
        try:
            self._socket.connect(path)
        except PermissionError as error:
            self._socket.close()
            raise MachineError(f"{path} may not be used", "ask as root, or join its group") from error
        except OSError as error:
            self._socket.close()
            raise NoDaemon(
                f"no daemon listens on {path} ({error.strerror or error})",
                "start it: systemctl start profinferd, or profinferd daemon",
            ) from error
        self._lines = LineSocket(self._socket)

    def ask(self, op: str, **arguments: Any) -> Any:
        """The result of one operation."""
        deadline = time.monotonic() + self._timeout
        try:
            self._lines.send({"op": op, **arguments}, deadline)
            line = self._lines.receive(MAX_ANSWER, deadline)
            if line is None:
                raise NoDaemon(f"the daemon on {self._path} ended", "see its log")
            answer = decode(line)
        except TimeoutError as error:
            raise MachineError(f"the daemon on {self._path} does not answer", "see its log") from error
        except ProtocolError as error:
            raise MachineError(f"what answers on {self._path} is no profinferd: {error}") from error
        except OSError as error:
            raise NoDaemon(
                f"the daemon on {self._path} went away ({error.strerror})", "see its log"
            ) from error
        if answer.get("ok") is True:
            return answer.get("result")
        refusal = answer.get("error")
        refusal = refusal if isinstance(refusal, dict) else {}
        raise ProfinferError(str(refusal.get("what", "refused"))[:500], str(refusal.get("remedy", ""))[:500])

    def snapshot(self) -> dict[str, Any]:
        """Everything that is watched (``docs/control.md``)."""
        result = self.ask("snapshot")
        return result if isinstance(result, dict) else {}

    def health(self) -> dict[str, Any]:
        """How the daemon itself is."""
        result = self.ask("health")
        return result if isinstance(result, dict) else {}

    def reload(self) -> dict[str, Any]:
        """Read the configuration again. Raises ProfinferError when the new one is wrong (the old goes on)."""
        result = self.ask("reload")
        return result if isinstance(result, dict) else {}

    def close(self) -> None:
        """May be called twice."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def daemon_there(path: str = SOCKET) -> bool:
    """Whether there is a control socket at all; asking may still fail."""
    return os.path.exists(path)


__all__ = ["SOCKET", "ControlClient", "NoDaemon", "daemon_there"]
