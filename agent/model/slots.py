# SPDX-License-Identifier: Apache-2.0
"""Who may use which part of the kernel's sums: a bounded number of slots, given out and recycled.

A slot is one entry of "owners" and a contiguous run of "sums", one element per node. When
room is short the graph that was not used for longest gives way, in two steps, because the
kernel may be adding to its elements and nobody may have read them: first it is *retiring*
(the caller takes the slot away from the graph in the kernel, waits until no execution owns
it, reads the sums), then :meth:`SlotAllocator.release` makes the room free.

A graph that came once does not push out one that comes again and again: a server sees a new
shape with almost every prompt length.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

MAX_WAITING = 1024


@dataclass(frozen=True, slots=True)
class Slot:
    """Slot ``number`` (0-based) with elements [first, first + n_nodes) for ``graph``."""

    number: int
    first: int
    n_nodes: int
    graph: Hashable


class SlotAllocator:
    """``slots``: MAX_SLOTS, ``elements``: MAX_SUMS of events.h. ``graph`` is the caller's key,
    for all targets together: say (tgid, hash)."""

    def __init__(self, slots: int, elements: int) -> None:
        if slots < 1 or elements < 1:
            raise ValueError("at least one slot and one element")
        self._slots = slots
        self._elements = elements
        self._active: OrderedDict[Hashable, Slot] = OrderedDict()  # least recently used first
        self._retiring: dict[int, Slot] = {}
        self._read: set[int] = set()  # of the retiring, those read since
        self._waiting: OrderedDict[Hashable, int] = OrderedDict()  # graphs without room: times asked
        self.evictions = 0

    def get(self, graph: Hashable) -> Slot | None:
        """The slot in use by ``graph``; None when it has none or is retiring."""
        return self._active.get(graph)

    def active(self) -> tuple[Slot, ...]:
        """Slots in use, least recently used first."""
        return tuple(self._active.values())

    def used(self, graph: Hashable) -> None:
        """``graph`` ran; to be told of every execution, or the wrong ones are evicted."""
        if graph in self._active:
            self._active.move_to_end(graph)

    def request(self, graph: Hashable, n_nodes: int) -> Slot | None:
        """A slot for ``graph``: the one it has, or a new one, or None when there is no room now.

        To be asked at each execution of a graph without a slot: from the second time on
        others are made to retire for it (see :meth:`retiring`), and once they are released
        a further request succeeds. A graph with more nodes than there are elements never
        gets one. ValueError for ``n_nodes`` < 1.
        """
        if n_nodes < 1:
            raise ValueError(f"a graph of {n_nodes} nodes")
        slot = self._active.get(graph)
        if slot is not None:
            self._active.move_to_end(graph)
            return slot
        if n_nodes > self._elements or any(s.graph == graph for s in self._retiring.values()):
            return None
        taken = [*self._active.values(), *self._retiring.values()]
        slot = self._place(graph, n_nodes, taken)
        if slot is not None:
            self._active[graph] = slot
            self._waiting.pop(graph, None)
            return slot
        asked = self._waiting.pop(graph, 0) + 1
        self._waiting[graph] = asked
        if len(self._waiting) > MAX_WAITING:
            self._waiting.popitem(last=False)
        if asked > 1:
            self._make_room(graph, n_nodes)
        return None

    def _place(self, graph: Hashable, n_nodes: int, taken: list[Slot]) -> Slot | None:
        if len(taken) >= self._slots:
            return None
        first = 0
        for slot in sorted(taken, key=lambda s: s.first):
            if slot.first - first >= n_nodes:
                break
            first = slot.first + slot.n_nodes
        if first + n_nodes > self._elements:
            return None
        numbers = {slot.number for slot in taken}
        number = next(i for i in range(self._slots) if i not in numbers)
        return Slot(number, first, n_nodes, graph)

    def _make_room(self, graph: Hashable, n_nodes: int) -> None:
        """Retire the least recently used until the graph fits once those that retire are gone."""
        while self._place(graph, n_nodes, list(self._active.values())) is None:
            self.retire(next(iter(self._active)))
            self.evictions += 1

    def retire(self, graph: Hashable) -> None:
        """``graph`` is to lose its slot (its target ended); nothing when it has none."""
        self._waiting.pop(graph, None)
        slot = self._active.pop(graph, None)
        if slot is not None:
            self._retiring[slot.number] = slot

    def retiring(self) -> tuple[Slot, ...]:
        """Slots to take out of the kernel's "known", to wait for, to read and to release."""
        return tuple(self._retiring.values())

    def read(self, number: int) -> None:
        """The sums of slot ``number`` were read, after the last execution that wrote to them."""
        if number in self._retiring:
            self._read.add(number)

    def release(self, number: int) -> None:
        """Give back a retiring slot. ValueError when it is not retiring or was not read since:
        its sums would be lost."""
        if number not in self._retiring:
            raise ValueError(f"slot {number} is not retiring")
        if number not in self._read:
            raise ValueError(f"slot {number} has sums that were not read")
        del self._retiring[number]
        self._read.discard(number)
