# SPDX-License-Identifier: Apache-2.0
"""How long a victim stands still while probes come and go."""

from __future__ import annotations

import struct
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from ..errors import MachineError
from .victim import Victim

_PATIENCE = 5.0  # seconds


@dataclass(frozen=True, slots=True)
class Seen:
    """ns since some moment, or between two looks.

    ``still``: how long the victim stood still, ``waited``: of this, for a processor that ran
    others (0 where the kernel does not tell: CONFIG_SCHED_INFO).
    """

    at: int
    still: float
    waited: int

    def __sub__(self, other: Seen) -> Seen:
        return Seen(self.at - other.at, self.still - other.still, self.waited - other.waited)

    @property
    def stalled(self) -> float:
        """Time that it stood still and was not merely waiting for its turn."""
        return self.still - self.waited


class Watch:
    """The victim calls functions beside the armed ones without a pause, and notes how long it
    stood still: longer than a microsecond from one look at its clock to the next.

    Words in the data: how many rounds at most (0: stop), clock, threshold, clock ticks stood
    still, how often.
    """

    def __init__(self, victim: Victim) -> None:
        self._victim = victim
        self._ticks_per_ns = 0.0

    def __enter__(self) -> Self:
        victim = self._victim
        self._ticks_per_ns = _rate(victim)
        # The round limit is for the case that nobody says stop: some ten seconds.
        struct.pack_into("=5Q", victim.data, 0, 1 << 29, 0, round(1000 * self._ticks_per_ns) or 1, 0, 0)
        beside = (victim.function(name) for name in ("beside_armed", "beside_armed_too"))
        victim.start("watch", victim.data_address, *beside)
        until = time.monotonic() + _PATIENCE
        while not struct.unpack_from("=Q", victim.data, 8)[0]:  # it has not begun yet
            if time.monotonic() >= until:
                self._stop()
                raise MachineError("the process that probes are measured on does not run")
            time.sleep(0.0005)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()
        if kind is None:
            self._victim.finish()

    def _stop(self) -> None:
        struct.pack_into("=Q", self._victim.data, 0, 0)

    def look(self) -> Seen:
        """What was seen until now."""
        waited = self._waited_ns()
        for _ in range(100):
            ticks = struct.unpack_from("=Q", self._victim.data, 24)[0]
            # Where it went on between the two readings, one knows of the wait and the other not.
            if waited == (again := self._waited_ns()):
                break
            waited = again
        return Seen(time.monotonic_ns(), ticks / self._ticks_per_ns, waited)

    def _waited_ns(self) -> int:
        try:
            fields = Path(f"/proc/{self._victim.pid}/schedstat").read_text().split()
        except OSError:
            return 0
        return int(fields[1])


def _rate(victim: Victim) -> float:
    """Ticks of the processor's clock in one ns."""
    begun, first = victim.clock()
    time.sleep(0.02)
    ended, last = victim.clock()
    if last <= first or ended <= begun:
        raise MachineError("the processor's clock does not advance")
    return (last - first) / (ended - begun)
