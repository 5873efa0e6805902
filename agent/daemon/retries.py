# SPDX-License-Identifier: Apache-2.0
"""Attempts to watch a process that failed: when the next one may be made, and what was said of it.

A process that maps one library after the other is looked at each time. An attempt costs the process
probes and us time, so one that failed is not made again at once, unless there are new files of an engine.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from ..errors import ExitCode, ProfinferError
from ..target.factscache import AGAIN_S
from .target import TOO_MANY, Files, Key, reason_code

MAX_REMEMBERED = 1024
"""Processes; those that failed longest ago are forgotten first."""

MAX_FILES = 64
"""Engine files of one process that are tried at once when they appear."""


@dataclass(slots=True)
class _Process:
    files: Files = frozenset()
    """With which it was tried."""
    times: int = 0
    again_s: float = 0.0
    error: ProfinferError | None = None
    told: str = ""


class Retries:
    """Waits after failures are those of files that could not be looked into (``AGAIN_S``)."""

    def __init__(self) -> None:
        self._processes: OrderedDict[Key, _Process] = OrderedDict()

    def __len__(self) -> int:
        return len(self._processes)

    def early(self, key: Key, files: Files, now_s: float) -> ProfinferError | None:
        """Why the last attempt failed, if it is too early for another one; else None."""
        one = self._processes.get(key)
        if one is None or now_s >= one.again_s:
            return None
        new = not files <= one.files and len(one.files) < MAX_FILES
        return None if new else one.error

    def failed(self, key: Key, files: Files, error: ProfinferError, now_s: float) -> float:
        """An attempt has failed, or what it began; returns when another one may be made."""
        one = self._remembered(key)
        one.times = one.times + 1 if files <= one.files else 1
        one.files, one.error = (one.files | files) if len(one.files) < MAX_FILES else one.files, error
        one.again_s = now_s + AGAIN_S[min(one.times, len(AGAIN_S)) - 1]
        return one.again_s

    def news(self, key: Key, reason: str) -> bool:
        """Whether something else was said of this process the last time."""
        one = self._remembered(key)
        before, one.told = one.told, reason
        return before != reason

    def succeeded(self, key: Key) -> None:
        """It is watched: if that ends, it is said, whatever was said before."""
        one = self._processes.get(key)
        if one is not None:
            one.told = ""

    def _remembered(self, key: Key) -> _Process:
        one = self._processes.setdefault(key, _Process())
        self._processes.move_to_end(key)
        while len(self._processes) > MAX_REMEMBERED:
            self._processes.popitem(last=False)
        return one

    def forget(self, key: Key) -> None:
        """The process has ended."""
        self._processes.pop(key, None)


def passes(error: ProfinferError) -> bool:
    """Whether it may go by itself: the machine is short of something, or a defect that met one moment."""
    return error.exit_code in (ExitCode.INTERNAL, ExitCode.MACHINE) or reason_code(error) == TOO_MANY
