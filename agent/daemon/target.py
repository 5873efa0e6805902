# SPDX-License-Identifier: Apache-2.0
"""One watched process, as the daemon keeps it."""

from __future__ import annotations

import dataclasses
import itertools
import os
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...exporters.text import clean
from ..errors import ExitCode, MachineError, ProfinferError
from ..model.snapshot import Snapshot
from ..target.cgroup import Membership
from ..target.process import FileId, Process

if TYPE_CHECKING:
    from ..attach import Attachment
    from ..model.recent import Recent
    from .shared import TargetPrograms

WATCHED, UNPROFILED, EXCLUDED, WAITING = "watched", "unprofiled", "excluded", "waiting"
TOO_MANY = "too_many"
"""A reason's code: there is no room just now."""
ENDED = "ended"
"""A reason's code: the process is gone, which is nobody's fault."""
RATE_S = 10.0
"""Tokens per second are of the last so many seconds."""
VERDICT_S = 60.0
"""Verdicts are about the last so many seconds, or those since the last time somebody looked."""

Files = frozenset[tuple[FileId, int]]
"""Engine files that a process has mapped, with their change times."""
Key = tuple[int, int]
"""Pid and start time: pids are used again."""


def label_of(member: Membership, program: str, model: str | None) -> str:
    """The same after a restart, and never a process id: unit or container, else program and model."""
    if member.label:
        return clean(member.label, 100)
    name = clean(os.path.basename(program), 60) or "process"
    about = clean(os.path.basename(model or ""), 80)
    return f"{name}:{about}" if about else name


def reason_code(error: ProfinferError) -> str:
    """A label value for why a process is not profiled: few, and without names or numbers."""
    text = error.what
    if error.exit_code == ExitCode.INTERNAL:
        return "internal"
    if error.exit_code == ExitCode.ENDED:
        return ENDED
    for code, words in (
        ("no_symbols", "no symbols"),
        ("no_layout", "layout"),
        (TOO_MANY, "too many"),
        ("not_probed", "probed"),
        ("no_engine", "no inference engine"),
    ):
        if words in text:
            return code
    return "machine" if isinstance(error, MachineError) else "unsupported"


@dataclass(slots=True)
class _Rate:
    """Decode tokens over the last seconds, from snapshots as they are made."""

    points: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=64))

    def add(self, now_s: float, decode: int) -> float | None:
        self.points.append((now_s, decode))
        while len(self.points) > 2 and now_s - self.points[0][0] > RATE_S:
            self.points.popleft()
        first, last = self.points[0], self.points[-1]
        if last[0] - first[0] < 0.5 or last[1] <= first[1]:
            return None
        return (last[1] - first[1]) / (last[0] - first[0])


@dataclass(slots=True, eq=False)
class Target:
    """``attachment`` and ``programs`` are there while it is watched."""

    process: Process
    label: str
    member: Membership
    model: str | None
    state: str
    reason: str = ""
    code: str = "ok"
    since_s: float = field(default_factory=time.monotonic)
    attachment: Attachment | None = None
    programs: TargetPrograms | None = None
    snapshot: Snapshot | None = None
    tokens_per_second: float | None = None
    rate: _Rate = field(default_factory=_Rate)
    recent: Recent | None = None
    files: Files = frozenset()
    shares_layout: bool = False
    number: int = field(default_factory=itertools.count(1).__next__)
    """Of this watching; a process that is let go and found again has another."""

    @property
    def key(self) -> Key:
        """Its identity."""
        return self.process.pid, self.process.start_time

    def refresh(self, now_s: float) -> None:
        """Make a snapshot of what was seen so far."""
        if self.attachment is None:
            return
        whole = self.attachment.snapshot()
        # Imported late: an idle daemon has no use for them.
        from ..model.recent import Recent
        from ..model.verdict import judge

        if self.recent is None:
            self.recent = Recent(VERDICT_S)
        lately = self.recent.look(now_s, whole)
        self.snapshot = dataclasses.replace(whole, verdicts=judge(lately))
        decode = whole.tokens.decode
        self.tokens_per_second = self.rate.add(now_s, decode) if decode is not None else None

    def describe(self, now_s: float) -> dict[str, Any]:
        """An element of ``targets`` of the control socket (``docs/control.md``)."""
        return {
            "target": self.label,
            "pid": self.process.pid,
            "start_time": self.process.start_time,
            "state": self.state,
            "reason": self.reason,
            "unit": self.member.unit,
            "container": self.member.container,
            "pod": self.member.pod,
            "since_seconds": round(now_s - self.since_s, 3),
            "tokens_per_second": self.tokens_per_second,
            "report": None if self.snapshot is None else self.snapshot.to_json_dict(),
        }
