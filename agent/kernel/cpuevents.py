# SPDX-License-Identifier: Apache-2.0
"""Events of a processor end with it: one that went offline has none any more when it comes back, and
nothing says so (case C57). But the time that an event was enabled stands still then."""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping

READ_ENABLED = 1 << 0  # of enum perf_event_read_format: what events have to be opened with
_READING = struct.Struct("=QQ")


class Pulses:
    """Looks at the events of some processors now and then; a look takes 1 us of each."""

    def __init__(self) -> None:
        self._enabled: dict[int, int] = {}  # ns by descriptor, at the last look

    def stopped(self, events: Mapping[int, int]) -> frozenset[int]:
        """Processors whose event has stopped since the last look. ``events``: descriptors by processor,
        opened with :data:`READ_ENABLED`. Raises OSError."""
        now = {fd: _READING.unpack(os.read(fd, _READING.size))[1] for fd in events.values()}
        gone = frozenset(cpu for cpu, fd in events.items() if self._enabled.get(fd) == now[fd])
        self._enabled = {fd: now[fd] for cpu, fd in events.items() if cpu not in gone}
        return gone
