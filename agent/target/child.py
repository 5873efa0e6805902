# SPDX-License-Identifier: Apache-2.0
"""A helper process that reads one request and answers in lines: bounded in time and size.

Starting an interpreter takes longer than what it is asked to do, so it may be started
early; the descriptors of the files come with the request, over a local socket.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Iterator, Sequence

MAX_ANSWER = 16 << 20
MAX_ERRORS = 4096


HEADER = struct.Struct("<II")
"""What a request begins with: its bytes, and how many descriptors come along."""
FDS_AT_ONCE = 200


class Child:
    """Runs ``command`` with the request's end of a socket as its standard input.

    One request with :meth:`send`, then the answers of :meth:`lines`. It is killed when it
    takes too long or says too much, and in any case by :meth:`close`.
    """

    def __init__(self, command: list[str]) -> None:
        self._command = command
        self._start()

    def _start(self) -> None:
        self._reason, self._errors, self._late = "", b"", False
        self._socket, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                self._command,
                stdin=theirs.fileno(),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={},
                cwd="/",
            )
        except OSError:
            self._socket.close()
            raise
        finally:
            theirs.close()

    def restart(self) -> None:
        """End this one and start another."""
        self.close()
        self._start()

    def send(self, request: bytes, descriptors: Sequence[int], timeout: float) -> None:
        """Hand over the request. A child that is gone already shows in :meth:`lines`."""
        self._socket.settimeout(timeout)
        try:
            self._socket.sendall(HEADER.pack(len(request), len(descriptors)))
            for at in range(0, len(descriptors), FDS_AT_ONCE):
                socket.send_fds(self._socket, [b"\0"], descriptors[at : at + FDS_AT_ONCE])
            self._socket.sendall(request)
        except TimeoutError:
            self._too_late(timeout)
        except (BrokenPipeError, ConnectionResetError):
            pass  # it died: lines() ends at once and reason() says why

    def lines(self, timeout: float) -> Iterator[bytes]:
        """Lines as they come, until the child closes its output or ``timeout`` seconds are over."""
        stdout, stderr = self._process.stdout, self._process.stderr
        if stdout is None or stderr is None:
            return
        deadline = time.monotonic() + timeout
        rest, total = b"", 0
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            selector.register(stderr, selectors.EVENT_READ)
            while selector.get_map():
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    self._too_late(timeout)
                    return
                for key, _ in ready:
                    piece = os.read(key.fd, 1 << 16)
                    if not piece:
                        selector.unregister(key.fileobj)
                    elif key.fileobj is stderr:
                        self._errors = (self._errors + piece)[-MAX_ERRORS:]
                    else:
                        total += len(piece)
                        *lines, rest = (rest + piece).split(b"\n")
                        if total > MAX_ANSWER:
                            self.fail("its answer is too long")
                            return
                        yield from lines

    def fail(self, reason: str) -> None:
        """Kill it; ``reason`` is what :meth:`reason` will say."""
        self._reason = self._reason or reason
        self._process.kill()

    def _too_late(self, timeout: float) -> None:
        self._late = True
        self.fail(f"it took more than {timeout:g} s")

    @property
    def unlucky(self) -> bool:
        """Whether it ended for reasons that are not in what it was asked: the machine had no time for
        it, or somebody killed it (the kernel, for want of memory). Asked again it may well answer."""
        code = self._process.wait()
        return self._late or (not self._reason and code == -signal.SIGKILL)

    @property
    def spent(self) -> bool:
        """Whether it ended because it had used up its CPU time."""
        return not self._reason and self._process.wait() in (-signal.SIGXCPU, -signal.SIGALRM)

    def reason(self) -> str:
        """Why it did not finish, in a few words."""
        code = self._process.wait()
        if self._reason:
            return self._reason
        if code in (-signal.SIGXCPU, -signal.SIGALRM):
            return "it needs too much processor time"
        if code < 0:
            return f"ended by signal {-code}"
        last = self._errors.decode("utf-8", "replace").strip().rpartition("\n")[2]
        return last[:200] or f"exit status {code}"

    def close(self) -> None:
        """Make sure that it is gone, and its pipes with it."""
        self._process.kill()
        self._process.wait()
        self._socket.close()
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()
