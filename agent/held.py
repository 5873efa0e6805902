# SPDX-License-Identifier: Apache-2.0
"""Records that wait until the layout of the target's structures is chosen."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from .kernel.programs import Drained
from .model.records import Kind

MAX_HELD_EVENTS = 1 << 14
"""Events kept until a live graph has confirmed the layout; the oldest fall out."""


class HeldRecords:
    """Drains in their order, so many that memory stays bounded."""

    def __init__(self) -> None:
        self._drains: deque[Drained] = deque()
        self._events = 0
        #: Events that fell out.
        self.dropped = 0

    def __iter__(self) -> Iterator[Drained]:
        return iter(self._drains)

    def hold(self, drained: Drained) -> None:
        """Keep one more drain."""
        self._drains.append(drained)
        self._events += len(drained.events)
        while self._events > MAX_HELD_EVENTS and len(self._drains) > 1:
            oldest = len(self._drains.popleft().events)
            self._events -= oldest
            self.dropped += oldest

    def keep_calls_only(self) -> None:
        """What was read by a wrong layout is nothing that could be told."""
        self._drains = deque(calls_only(one) for one in self._drains)
        self._events = sum(len(one.events) for one in self._drains)

    def take(self) -> Iterator[Drained]:
        """All of them, the oldest first; none is held afterwards."""
        while self._drains:
            one = self._drains.popleft()
            self._events -= len(one.events)
            yield one


def calls_only(drained: Drained) -> Drained:
    """The records of calls: they need no layout."""
    kind = drained.events["kind"]
    calls = (kind == Kind.CALL_BEGIN) | (kind == Kind.CALL_END) | (kind == Kind.CALL_ABANDONED)
    return Drained(
        drained.events[calls], drained.ops[:0], drained.nodes[:0], drained.ints[:0], drained.raws[:0]
    )
