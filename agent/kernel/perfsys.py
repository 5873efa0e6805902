# SPDX-License-Identifier: Apache-2.0
"""Performance events of one thread: opening them, and what reading one gives.

The layout is that of ``struct perf_event_attr`` in the kernel's public headers.
"""

from __future__ import annotations

import errno
import os
import struct
from dataclasses import dataclass

from .bpfsys import perf_event_open
from .cpuevents import READ_ENABLED

TYPE_HARDWARE, TYPE_SOFTWARE, TYPE_RAW = 0, 1, 4
_ATTR_SIZE = 112  # PERF_ATTR_SIZE_VER5: Linux 4.1 and later

# enum perf_event_sample_format
SAMPLE_IP, SAMPLE_TID, SAMPLE_CALLCHAIN = 1 << 0, 1 << 1, 1 << 5
# enum perf_event_read_format
READ_RUNNING = 1 << 1
# the bit field of the attribute
_DISABLED, _FREQ = 1 << 0, 1 << 10
_EXCLUDE_KERNEL, _EXCLUDE_HV, _EXCLUDE_GUEST = 1 << 5, 1 << 6, 1 << 20

ABSENT_ERRNOS = {
    errno.ENOENT: "this processor or virtual machine has no such counter",
    errno.EOPNOTSUPP: "this processor or virtual machine does not count it",
    errno.ENODEV: "no unit of this machine counts it",
    errno.ENXIO: "no unit of this machine counts it",
    errno.EINVAL: "this kernel does not know the event",
    errno.EACCES: "it is not allowed here (kernel.perf_event_paranoid)",
    errno.EPERM: "it is not allowed here (kernel.perf_event_paranoid)",
    errno.ENOSYS: "this kernel is built without performance events",
    errno.EMFILE: "too many files are open",
}
"""Why an event cannot be counted, by what the kernel says (cases C09 and C57)."""

SOFTWARE = {
    "cpu-clock": 0, "task-clock": 1, "page-faults": 2, "context-switches": 3, "cpu-migrations": 4,
    "minor-faults": 5, "major-faults": 6,
}  # fmt: skip
HARDWARE = {
    "cycles": 0, "instructions": 1, "cache-references": 2, "cache-misses": 3, "branches": 4,
    "branch-misses": 5, "bus-cycles": 6, "stalled-cycles-frontend": 7, "stalled-cycles-backend": 8,
    "ref-cycles": 9,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class EventSpec:
    """An event by the name that the person gave it: ``type`` and ``config`` as the kernel wants them."""

    name: str
    type: int
    config: int


def parse_event(text: str) -> EventSpec:
    """A name of :data:`HARDWARE` or :data:`SOFTWARE`, or ``rHEX``, optionally ``NAME=rHEX``.

    Raises ValueError.
    """
    name, _, code = text.strip().partition("=")
    code = code or name
    if name and all(c.isalnum() or c in "-_." for c in name) and len(name) <= 40:
        if code in HARDWARE:
            return EventSpec(name, TYPE_HARDWARE, HARDWARE[code])
        if code in SOFTWARE:
            return EventSpec(name, TYPE_SOFTWARE, SOFTWARE[code])
        if code.startswith("r") and 0 < len(code) - 1 <= 16:
            try:
                return EventSpec(name, TYPE_RAW, int(code[1:], 16))
            except ValueError:
                pass
    raise ValueError(text)


def open_thread_event(
    event: EventSpec,
    tid: int,
    *,
    hertz: int = 0,
    sample: int = 0,
    user_only: bool = False,
) -> int:
    """The event of one thread on whatever CPU it runs; returns its descriptor. Raises OSError.

    ``hertz``: samples a second (with ``sample``, what is in one); 0: it only counts. Never
    inherited and never in a group: threads that come later are opened themselves (case C58).
    """
    flags = _EXCLUDE_HV | _EXCLUDE_GUEST
    if user_only:
        flags |= _EXCLUDE_KERNEL
    if hertz:
        flags |= _FREQ
    packed = struct.pack(
        "=IIQQQQQIIQQ",
        event.type, _ATTR_SIZE, event.config, hertz, sample, READ_ENABLED | READ_RUNNING, flags,
        0, 0, 0, 0,
    )  # fmt: skip
    return perf_event_open(packed.ljust(_ATTR_SIZE, b"\0"), tid, -1)


@dataclass(frozen=True, slots=True)
class Reading:
    """What an event has counted: ``value`` in ``running`` of ``enabled`` ns."""

    value: int
    enabled: int
    running: int

    @classmethod
    def from_bytes(cls, raw: bytes) -> Reading:
        """What read() gives. Raises ValueError when it is cut off."""
        if len(raw) < 24:
            raise ValueError("a reading of an event is 24 bytes long")
        return cls(*struct.unpack_from("=QQQ", raw))

    @classmethod
    def of(cls, fd: int) -> Reading:
        """Read a descriptor. Raises OSError."""
        return cls.from_bytes(os.read(fd, 24))
