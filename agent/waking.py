# SPDX-License-Identifier: Apache-2.0
"""Sleep that ends early when it should: rung by signals and other threads, or by a descriptor.

Looking every quarter of a second whether something happened wakes a core four times as often as
the work itself; each time costs more than the look, for caches are cold (``pace.py``).
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterable
from contextlib import suppress
from types import TracebackType
from typing import Self


class Wakeup:
    """One thread sleeps, others (and signal handlers) ring. A context manager; OSError when no
    descriptors are left."""

    def __init__(self) -> None:
        self._read_end, self._write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._signals = False

    def ring(self) -> None:
        """End the sleep, or the next one if nobody sleeps now. From any thread; harmless after close."""
        with suppress(OSError):  # full: rung already
            os.write(self._write_end, b"w")

    def ring_on_signals(self) -> None:
        """Every signal with a Python handler rings: Python itself goes on sleeping after the handler
        (PEP 475). Only in the main thread."""
        signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        self._signals = True

    def sleep(self, seconds: float, descriptors: Iterable[int] = ()) -> set[int]:
        """At most ``seconds`` (rounded up to milliseconds; infinite: until rung). Returns which of
        ``descriptors`` can be read, or are broken, now."""
        poll = select.poll()
        poll.register(self._read_end, select.POLLIN)
        for fd in descriptors:
            poll.register(fd, select.POLLIN)
        ready = {fd for fd, _ in poll.poll(None if seconds == float("inf") else max(seconds, 0.0) * 1e3)}
        if self._read_end in ready:
            ready.remove(self._read_end)
            with suppress(BlockingIOError):
                os.read(self._read_end, 4096)
        return ready

    def close(self) -> None:
        """No more ringing. May be called twice."""
        if self._write_end < 0:
            return
        if self._signals:
            signal.set_wakeup_fd(-1)
        ends, self._read_end, self._write_end = (self._read_end, self._write_end), -1, -1
        for end in ends:
            os.close(end)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
