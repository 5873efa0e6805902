# SPDX-License-Identifier: Apache-2.0
"""The daemon's log: one line an event, quiet, and bounded in how much it says.

Lines are ``message key=value ...`` or JSON objects. Under systemd (``JOURNAL_STREAM``) they carry a
priority instead of a time, which the journal has itself. Names of targets are hostile: control
characters never reach the log.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Literal, TextIO

LEVELS = {"error": 3, "warning": 4, "info": 6, "debug": 7}
"""Name and syslog priority; lower is graver."""
Level = Literal["error", "warning", "info", "debug"]
Value = str | int | float | bool | None

BURST, PER_SECONDS = 10, 60.0
"""Lines of one message in so many seconds; what is beyond is counted and said later."""
TOTAL = 60
"""Lines of all messages in the same time."""
_MAX_MESSAGES = 256


class Log:
    """Thread-safe. ``form``: text, json, or auto (JSON never; the journal's priorities where it listens)."""

    def __init__(
        self,
        level: str = "info",
        form: str = "auto",
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.level, self.form = level, form
        self._stream, self._clock = stream, clock
        self._lock = threading.Lock()
        self._seen: OrderedDict[str, list[float]] = OrderedDict()
        self._all: list[float] = []
        self._held: OrderedDict[str, int] = OrderedDict()
        self.suppressed = 0
        """Lines that were not written."""

    def error(self, message: str, **values: Value) -> None:
        """Something that a person should repair."""
        self._write("error", message, values)

    def warning(self, message: str, **values: Value) -> None:
        """Something is less than it should be."""
        self._write("warning", message, values)

    def info(self, message: str, **values: Value) -> None:
        """Something began or ended as it should."""
        self._write("info", message, values)

    def debug(self, message: str, **values: Value) -> None:
        """For whoever looks for a fault."""
        self._write("debug", message, values)

    def _write(self, level: Level, message: str, values: dict[str, Value]) -> None:
        if LEVELS[level] > LEVELS.get(self.level, 6):
            return
        with self._lock:
            held = self._admit(level, message)
            if held is None:
                return
            if held:
                values = {**values, "suppressed": held}
            line = self._line(level, message, values)
            stream = self._stream or sys.stderr
            try:
                stream.write(line + "\n")
                stream.flush()
            except (OSError, ValueError):
                self.suppressed += 1  # nowhere to say it; status and metrics do

    def _admit(self, level: Level, message: str) -> int | None:
        """How many earlier ones were held back; None: this one is, too."""
        now = self._clock()
        old = now - PER_SECONDS
        times = self._seen.setdefault(message, [])
        self._seen.move_to_end(message)
        times[:] = [t for t in times if t > old]
        self._all[:] = [t for t in self._all if t > old]
        while len(self._seen) > _MAX_MESSAGES:
            self._seen.popitem(last=False)
        if len(times) >= BURST or (len(self._all) >= TOTAL and level != "error"):
            self.suppressed += 1
            self._held[message] = self._held.get(message, 0) + 1
            while len(self._held) > _MAX_MESSAGES:
                self._held.popitem(last=False)
            return None
        times.append(now)
        self._all.append(now)
        return self._held.pop(message, 0)

    def _line(self, level: Level, message: str, values: dict[str, Value]) -> str:
        there = {key: value for key, value in values.items() if value is not None}
        if self.form == "json":
            when = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
            line: dict[str, Value] = {"time": when, "level": level, "message": message}
            # Whoever filters lines by these three must not be misled by what a line is about.
            line |= {key if key not in line else f"{key}_": value for key, value in there.items()}
            return json.dumps(line, ensure_ascii=True)
        text = _plain(message) + "".join(f" {key}={_shown(value)}" for key, value in there.items())
        if self.form == "auto" and os.environ.get("JOURNAL_STREAM"):
            return f"<{LEVELS[level]}>{text}"
        when = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        return f"{when} {level} {text}"


def _plain(text: str) -> str:
    return "".join(c if c.isprintable() else "\ufffd" for c in text)[:1000]


def _shown(value: Value) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    if text and all(c.isalnum() or c in "-_./:%@+," for c in text):
        return text[:500]
    return json.dumps(text[:500], ensure_ascii=True)
