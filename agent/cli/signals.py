# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C, SIGTERM and a lost terminal end the watching, not what was seen."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Self

from ..waking import Wakeup

_PATIENCE = 3
"""So many signals mean that the person does not want to wait for the summary either."""


class Interrupted(Exception):
    """Ctrl-C or SIGTERM before anything was seen.

    Not KeyboardInterrupt, to which click answers with a line of its own.
    """


class Stop:
    """A context in which a signal sets :attr:`asked` instead of ending the process.

    While :attr:`at_once` is true (nothing is seen yet, and attaching may take long) the
    signal raises KeyboardInterrupt; so does an impatient third one at any time.
    """

    def __init__(self, wakeup: Wakeup) -> None:
        """``wakeup`` is rung by every signal."""
        self._wakeup = wakeup
        self.asked = False
        self.at_once = True
        self._count = 0
        self._before: list[tuple[signal.Signals, object]] = []

    def watching(self) -> None:
        """From here on a signal is noticed between two polls, and what was seen is told."""
        self.at_once = False

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            before = signal.getsignal(number)
            if number is signal.SIGHUP and before is signal.SIG_IGN:
                continue  # started with nohup
            signal.signal(number, self._handle)
            self._before.append((number, before))
        self._wakeup.ring_on_signals()
        return self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        self._count += 1
        if self.at_once or self._count >= _PATIENCE:
            raise KeyboardInterrupt

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, before in self._before:
            signal.signal(number, before)  # type: ignore[arg-type]
        self._before.clear()
