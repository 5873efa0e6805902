# SPDX-License-Identifier: Apache-2.0
"""Which part of the kernel's sums serves which graphs of a target.

A shape that comes again gets a slot of its own. Others are added up in spare slots, one for
each number of nodes and size that was met; and what nothing at all is known of (the first
prompt after we attached) in one of a few larger ones.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from .kernel.programs import GgmlPrograms
from .model.plans import Plan
from .model.records import Flag
from .model.sampled import Coverage, Ran, SampledOps
from .model.slots import Slot, SlotAllocator

ANY_NODES = 4096
"""Nodes of the largest graph that is added up before anything is known of it."""
ANY_SIZES = (range(1), range(1, 5), range(5, 17))
"""Size classes of the larger spare slots: one token, up to 31, more (or not known)."""
SIZE_UNKNOWN = 16
MAX_ONCE = 1024


@dataclass(frozen=True, slots=True)
class _Shape:
    hash: int


@dataclass(frozen=True, slots=True)
class _Size:
    n_nodes: int
    size_class: int


def size_class(tokens: int) -> int:
    """As the kernel side has it: log2, 15 at most."""
    return min(15, tokens.bit_length() - 1) if tokens > 0 else SIZE_UNKNOWN


class SumSlots:
    """Slots of one target, which is the only one of these programs."""

    def __init__(self, programs: GgmlPrograms, sampled: SampledOps, tgid: int) -> None:
        self._programs, self._sampled, self._tgid = programs, sampled, tgid
        slots, elements = programs.capacity()
        n = len(ANY_SIZES)
        self._any = [
            Slot(slots - 1 - i, elements - (i + 1) * ANY_NODES, ANY_NODES, _Size(0, i)) for i in range(n)
        ]
        self._slots = SlotAllocator(slots - n, elements - n * ANY_NODES)
        self._once: OrderedDict[int, None] = OrderedDict()  # shapes that were met once
        for slot, sizes in zip(self._any, ANY_SIZES, strict=True):
            programs.clear_sums(slot.first, slot.n_nodes)
            sampled.lend(slot.number)
            for size in sizes:
                programs.give_spare(tgid, 0, size, slot.number, slot.first, slot.n_nodes)

    def ran(self, ran: Ran) -> None:
        """See to it that the next graph like this one has a slot, if there is room."""
        shape, size = _Shape(ran.run.hash), _Size(ran.run.n_nodes, size_class(ran.run.tokens))
        self._slots.used(shape)
        self._slots.used(size)
        plan = ran.plan
        if plan is None or not plan.n or ran.run.flags & Flag.FAULT:
            return
        mine = self._slots.get(shape)
        if mine is not None:
            if ran.run.flags & Flag.DESCRIBED:  # the kernel had forgotten it
                self._programs.give_slot(self._tgid, shape.hash, mine.number, mine.first)
        elif shape.hash in self._once:
            self._give(shape, plan)
        else:
            self._once[shape.hash] = None
            if len(self._once) > MAX_ONCE:
                self._once.popitem(last=False)
            if self._slots.get(size) is None:
                self._lend(size)

    def _give(self, shape: _Shape, plan: Plan) -> None:
        slot = self._slots.request(shape, plan.n)
        if slot is None:
            return
        self._programs.clear_sums(slot.first, slot.n_nodes)
        self._sampled.give(slot.number, plan, self._programs.sums(slot.first, slot.n_nodes))
        # Not known there (any more): it will be described, and given its slot, again.
        self._programs.give_slot(self._tgid, shape.hash, slot.number, slot.first)

    def _lend(self, size: _Size) -> None:
        slot = self._slots.request(size, size.n_nodes)
        if slot is None:
            return
        self._programs.clear_sums(slot.first, slot.n_nodes)
        self._sampled.lend(slot.number)
        self._programs.give_spare(
            self._tgid, size.n_nodes, size.size_class, slot.number, slot.first, slot.n_nodes
        )

    def read(self, *, last: bool = False) -> Iterator[Coverage]:
        """The sums of all slots that no execution writes to; ``last``: of all."""
        writing = set() if last else set(self._programs.owned_slots())
        for slot in (*self._any, *self._slots.active()):
            if slot.number not in writing:
                yield from self._read(slot)
        for slot in self._slots.retiring():
            graph = slot.graph
            if isinstance(graph, _Shape):
                self._programs.take_slot(self._tgid, graph.hash)
            elif isinstance(graph, _Size):
                self._programs.give_spare(self._tgid, graph.n_nodes, graph.size_class, None)
            if slot.number not in writing:
                yield from self._read(slot)
                self._slots.read(slot.number)
                self._slots.release(slot.number)
                self._sampled.take(slot.number)

    def _read(self, slot: Slot) -> list[Coverage]:
        if isinstance(slot.graph, _Shape):
            return self._sampled.read(slot.number, self._programs.sums(slot.first, slot.n_nodes))
        used = self._sampled.spare_nodes(slot.number)
        used = slot.n_nodes if used is None else min(used, slot.n_nodes)
        found = self._sampled.read_spare(slot.number, self._programs.sums(slot.first, used))
        self._programs.clear_sums(slot.first, used)
        return found

    def forget(self) -> None:
        """What was summed so far was read by a wrong layout."""
        for slot in self._any:
            self._sampled.spoil(slot.number)
