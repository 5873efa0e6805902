# SPDX-License-Identifier: Apache-2.0
"""Two ways of keeping what is watched: all of it in a file, or the last seconds until a trigger."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import numpy.typing as npt

from ..errors import UsageError
from ..model.recent import Recent
from ..model.snapshot import Snapshot
from ..model.trace import Child
from ..model.verdict import judge
from .facts import Facts
from .flight import FlightRecorder
from .recorder import Recorder
from .triggers import TokenWatch, Triggers, verdict_of
from .writer import RecordingWriter

if TYPE_CHECKING:
    from ..attach import Attachment

MAX_FLIGHTS = 100
"""Files that one flight recorder writes; it goes on watching afterwards and writes no more."""
LEAST_STEP_S, STEPS = 1.0, 15
"""A snapshot is made so often a window, and no more often: it takes some ms of a core."""

Records = Mapping[str, npt.NDArray[Any]]
Say = Callable[[str], None]


class Keeper(Protocol):
    """What is done with what an attachment tells."""

    def take(self, records: Records) -> None:
        """Other records, by kind."""

    def look(self) -> str:
        """Between two polls; why the recording has to end, or nothing."""

    def progress(self, seconds: float) -> str:
        """One line: what there is after so many seconds."""

    def end(self, child: Child | None, ended_ns: int, *, failed: bool) -> None:
        """The attachment is closed, what it saw is of before ``ended_ns``. ``failed``: by an error,
        which is being raised."""

    def last_words(self, why: str) -> str:
        """One line: what came of it."""


class FileKeeper:
    """Everything goes into the file of ``writer``, up to ``max_size`` bytes."""

    def __init__(
        self, writer: RecordingWriter, watched: Attachment, facts: Facts, max_size: int | None
    ) -> None:
        self._recorder = Recorder(writer, facts)
        self._writer, self._watched, self._max_size = writer, watched, max_size
        watched.session_opened.append(self._recorder.opened)
        watched.sinks.append(self.take)

    def take(self, records: Records) -> None:
        """See :class:`Keeper`."""
        self._recorder.take(records)

    def look(self) -> str:
        """See :class:`Keeper`."""
        self._recorder.look(self._watched, time.monotonic_ns())
        full = self._max_size is not None and self._writer.next_bytes() > self._max_size
        return "size" if full or self._recorder.full else ""

    def progress(self, seconds: float) -> str:
        """See :class:`Keeper`."""
        rate = self._recorder.bytes_per_second()
        line = f"recorded {seconds:.0f} s, {in_bytes(self._writer.flushed_bytes)}"
        if rate > 0:
            line += f", {in_bytes(rate)}/s: {in_bytes(rate * 3600)} an hour"
            if self._max_size is not None:
                left = max(self._max_size - self._writer.flushed_bytes, 0) / rate
                line += f", full in {in_time(left)}"
        return line

    def end(self, child: Child | None, ended_ns: int, *, failed: bool) -> None:
        """See :class:`Keeper`. A recording of nothing at all leaves no file."""
        if child is not None:
            self._recorder.child(child)
        if not self._watched.seen_anything:
            self._writer.remove()
        elif not failed:
            self._recorder.flush(self._watched.snapshot(), ended_ns, finished=True)
        elif not self._recorder.flushes:
            self._writer.remove()

    def last_words(self, why: str) -> str:
        """See :class:`Keeper`."""
        if not self._watched.seen_anything:
            return "nothing was seen, so nothing was saved"
        because = {"size": ", stopped at --max-size", "ended": ", the target ended"}.get(why, "")
        return f"saved {self._writer.path} ({in_bytes(self._writer.flushed_bytes)}{because})"


class FlightKeeper:
    """The last ``seconds`` are kept in memory; each trigger makes a file of them.

    ``facts``: asked for at each. :meth:`ask` is the trigger of a signal.
    """

    def __init__(
        self, path: str, owner: tuple[int, int] | None, watched: Attachment, facts: Callable[[], Facts],
        seconds: float, max_bytes: int, triggers: Triggers, *, force: bool, say: Say,
    ) -> None:  # fmt: skip
        self.written: list[str] = []
        self._number = 0
        self._path, self._owner, self._watched, self._facts = path, owner, watched, facts
        self._seconds, self._triggers, self._force, self._say = seconds, triggers, force, say
        self._flight = FlightRecorder(seconds, max_bytes)
        self._tokens = TokenWatch(seconds)
        self._asked = False
        self._verdict: str | None = None
        self._recent = Recent(seconds, _step(seconds))
        self._lately: Snapshot | None = None
        self._looked_ns = 0
        watched.session_opened += [self._flight.opened, self._tokens.opened]
        watched.fed.append(self._flight.fed)
        watched.sinks.append(self.take)

    def ask(self, *_: object) -> None:
        """Write at the next look."""
        self._asked = True

    def take(self, records: Records) -> None:
        """See :class:`Keeper`."""
        self._flight.take(records, time.monotonic_ns())

    def look(self) -> str:
        """See :class:`Keeper`."""
        if self._asked:
            # What was done until the signal belongs to it, and may have come since the last drain.
            self._watched.poll(0.0)
        self._look()
        return ""

    def _look(self) -> None:
        now_ns = time.monotonic_ns()
        self._flight.look(self._watched.losses(), now_ns)
        if now_ns - self._looked_ns >= _step(self._seconds) * 1e9:
            self._look_back(now_ns)
        reason = self._triggered(now_ns)
        if reason and len(self.written) < MAX_FLIGHTS:
            self._write(reason, now_ns)

    def progress(self, seconds: float) -> str:
        """See :class:`Keeper`."""
        return f"watching for {seconds:.0f} s, {in_bytes(self._flight.held_bytes)} kept in memory"

    def end(self, child: Child | None, ended_ns: int, *, failed: bool) -> None:
        """See :class:`Keeper`. A trigger that came at last is not forgotten."""
        if self._asked and not failed:
            self._look()

    def last_words(self, why: str) -> str:
        """See :class:`Keeper`."""
        return f"wrote {len(self.written)} files" if self.written else "nothing was written: no trigger came"

    def _triggered(self, now_ns: int) -> str:
        if self._asked:
            self._asked = False
            return "a signal"
        if self._triggers.p99_s is not None:
            p99 = self._tokens.p99(now_ns)
            if p99 is not None and p99 > self._triggers.p99_s:
                return f"p99 between tokens of {p99 * 1e3:.1f} ms"
        if self._triggers.verdict and self._lately is not None and self._looked_ns == now_ns:
            # Of the last seconds alone: in the sums of a whole night no minute stands out.
            before, rule = self._verdict, verdict_of(judge(self._lately))
            self._verdict = rule
            if rule is not None and rule != before:
                return f"verdict {rule}"
        return ""

    def _look_back(self, now_ns: int) -> None:
        self._lately = self._recent.look(now_ns / 1e9, self._watched.snapshot())
        self._looked_ns = now_ns

    def _why(self, snapshot: Snapshot) -> Snapshot:
        """What the kernel only sums up (threads, faults, clocks) of the window, give or take a step."""
        lately = self._lately
        if lately is None:
            return snapshot
        lately = dataclasses.replace(
            snapshot, threads=lately.threads, faults=lately.faults, clocks=lately.clocks, peaks=lately.peaks
        )
        return dataclasses.replace(lately, verdicts=judge(lately))

    def _write(self, reason: str, now_ns: int) -> None:
        if now_ns > self._looked_ns:
            self._look_back(now_ns)
        path = self._next_path()
        make_room(path, force=self._force)
        facts = self._facts()
        note = f"flight recorder: the last {self._seconds:g} s before {reason}"
        facts = dataclasses.replace(facts, notes=(*facts.notes, note))
        size = self._flight.write(path, self._owner, facts, self._watched.new_session, now_ns, self._why)
        self._tokens.clear()
        self.written.append(path)
        self._say(f"{reason}: wrote the last {self._seconds:g} s to {path} ({in_bytes(size)})")

    def _next_path(self) -> str:
        """Of another evening's recordings those that may not be replaced keep their names."""
        self._number += 1
        while not self._force and os.path.lexists(_numbered(self._path, self._number)):
            self._number += 1
        return _numbered(self._path, self._number)


def _step(seconds: float) -> float:
    return max(LEAST_STEP_S, seconds / STEPS)


def check_place(path: str, owner: tuple[int, int] | None, *, force: bool) -> None:
    """Whether a recording can be made at ``path`` later, by making one and removing it. Raises as
    :class:`RecordingWriter` does."""
    if force and os.path.lexists(path):
        _refuse_special(path)
        path = os.path.join(os.path.dirname(path), f".{os.urandom(6).hex()}.pfi")  # it stays until then
    RecordingWriter(path, owner).remove()


def _refuse_special(path: str) -> None:
    if os.path.lexists(path) and (os.path.islink(path) or not os.path.isfile(path)):
        raise UsageError(f"-o {path!r} is not a regular file", "give the name of a new or regular file")


def make_room(path: str, *, force: bool) -> None:
    """With ``force`` what is there goes, if it is a plain file. Raises UsageError."""
    if not force:
        return
    _refuse_special(path)
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    except OSError as error:
        raise UsageError(f"cannot replace {path!r} ({error.strerror})", "choose another name") from error


def _numbered(path: str, number: int) -> str:
    if number == 1:
        return path
    stem, ending = os.path.splitext(path)
    return f"{stem}-{number}{ending}"


def in_bytes(size: float) -> str:
    """A size in words."""
    unit = "B"
    for larger in ("KiB", "MiB", "GiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"


def in_time(seconds: float) -> str:
    """A long time in words."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"
