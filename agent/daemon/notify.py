# SPDX-License-Identifier: Apache-2.0
"""What the service manager is told (sd_notify): ready, reloading, stopping, still alive.

The protocol is a datagram to the socket that ``NOTIFY_SOCKET`` names; without the variable
nobody wants to know.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time

PATIENCE_S = 5.0
"""How long a message waits for room in the manager's queue, which a busy machine may fill: one that says
that we are ready must not get lost, or the manager waits in vain, ends us and begins again."""


class Notifier:
    """Tells systemd; ``environ`` is the process's environment, read once."""

    def __init__(self, environ: dict[str, str] | os._Environ[str] = os.environ) -> None:
        self._address = environ.get("NOTIFY_SOCKET", "")
        self._interval_s: float | None = None
        self._next = 0.0
        usec, pid = environ.get("WATCHDOG_USEC", ""), environ.get("WATCHDOG_PID", "")
        if usec.isascii() and usec.isdigit() and pid in ("", str(os.getpid())):
            # Twice within its patience, as systemd advises.
            self._interval_s = int(usec) / 2e6 or None

    @property
    def interval_s(self) -> float | None:
        """How often :meth:`alive` has to be called, seconds; None: nobody watches."""
        return self._interval_s

    def ready(self, status: str) -> None:
        """Start-up (or a reload) is done."""
        self._send(f"READY=1\nSTATUS={_line(status)}")

    def reloading(self) -> None:
        """A new configuration is being read; :meth:`ready` follows."""
        self._send(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self) -> None:
        """On our way out."""
        self._send("STOPPING=1")

    def status(self, text: str) -> None:
        """One line for ``systemctl status``."""
        self._send(f"STATUS={_line(text)}")

    def alive(self, now_s: float) -> None:
        """Called from the loop that must not hang; says so when it is time."""
        if self._interval_s is not None and now_s >= self._next:
            self._next = now_s + self._interval_s
            self._send("WATCHDOG=1")

    def _send(self, text: str) -> None:
        if not self._address.startswith(("/", "@")):
            return
        name = self._address
        address = "\0" + name[1:] if name.startswith("@") else name
        # A manager that does not listen is no reason to stop watching.
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.settimeout(PATIENCE_S)
            sock.sendto(text.encode("utf-8", "replace"), address)


def _line(text: str) -> str:
    return " ".join(text.split())[:200]
