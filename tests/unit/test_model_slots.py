# SPDX-License-Identifier: Apache-2.0
"""Slots of the kernel's sums: bounded, recycled, never unread (case C20)."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profinferd.agent.model.slots import Slot, SlotAllocator


def drained(allocator: SlotAllocator) -> list[Slot]:
    slots = list(allocator.retiring())
    for slot in slots:
        allocator.read(slot.number)
        allocator.release(slot.number)
    return slots


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["request", "request", "request", "used", "retire", "drain"]), st.integers(0, 12)
        ),
        max_size=80,
    )
)
def test_slots_never_overlap_and_nothing_unread_is_reused(steps: list[tuple[str, int]]) -> None:
    """Whatever is asked: slots in use or unread are disjoint, in bounds, one per graph."""
    allocator = SlotAllocator(slots=4, elements=100)
    size = {g: 5 + 7 * g for g in range(13)}
    live: dict[int, Slot] = {}
    for what, graph in steps:
        if what == "request":
            slot = allocator.request(graph, size[graph])
            if slot is not None:
                live[slot.number] = slot
        elif what == "used":
            allocator.used(graph)
        elif what == "retire":
            allocator.retire(graph)
        else:
            for slot in drained(allocator):
                del live[slot.number]
        taken = sorted(live.values(), key=lambda s: s.first)
        assert len(taken) <= 4 and len({s.graph for s in taken}) == len(taken)
        assert all(0 <= s.number < 4 and s.n_nodes == size[int(str(s.graph))] for s in taken)
        ends = [0, *(s.first + s.n_nodes for s in taken)]
        assert all(end <= s.first for end, s in zip(ends, taken, strict=False)) and ends[-1] <= 100
        for slot in taken:
            assert slot in allocator.retiring() or allocator.get(slot.graph) == slot


def test_least_recently_used_gives_way_and_is_read_first() -> None:
    """Eviction takes two steps; until the sums are read the room is not free."""
    allocator = SlotAllocator(slots=2, elements=1000)
    first = allocator.request("a", 10)
    allocator.request("b", 10)
    assert first is not None
    allocator.used("a")
    assert allocator.request("c", 10) is None
    assert allocator.retiring() == ()  # it came once
    assert allocator.request("c", 10) is None
    (old,) = allocator.retiring()
    assert old.graph == "b" and allocator.get("b") is None
    assert allocator.request("c", 10) is None and allocator.request("b", 10) is None
    with pytest.raises(ValueError, match="not read"):
        allocator.release(old.number)
    allocator.read(old.number)
    allocator.release(old.number)
    new = allocator.request("c", 10)
    assert new is not None and new.number == old.number
    assert allocator.get("a") == first and allocator.evictions == 1


def test_shapes_that_come_once_do_not_flush_the_others() -> None:
    """A server with ever new prompt lengths keeps the slots of its decode graphs."""
    allocator = SlotAllocator(slots=8, elements=10_000)
    for g in range(8):
        assert allocator.request(("decode", g), 700)
    for n in range(5000):
        allocator.used(("decode", n % 8))
        assert allocator.request(("prefill", n), 700) is None
    assert allocator.retiring() == () and allocator.evictions == 0


def test_recurring_graphs_beyond_the_slots_all_get_their_turn() -> None:
    """More graphs than slots: each is served now and then."""
    allocator = SlotAllocator(slots=4, elements=4000)
    turns: dict[int, int] = defaultdict(int)
    for n in range(400):
        if allocator.request(n % 9, 900) is not None:
            turns[n % 9] += 1
        drained(allocator)
    assert all(turns[g] for g in range(9))


def test_elements_are_contiguous_and_a_giant_is_refused() -> None:
    """Room is made in one piece; what can never fit evicts nobody."""
    allocator = SlotAllocator(slots=16, elements=100)
    for g in range(10):
        assert allocator.request(g, 10)
    for _ in range(3):
        assert allocator.request("giant", 101) is None
    assert allocator.retiring() == ()
    for _ in range(2):
        assert allocator.request("big", 25) is None
    assert [s.graph for s in drained(allocator)] == [0, 1, 2]
    big = allocator.request("big", 25)
    assert big is not None and (big.first, big.n_nodes) == (0, 25)


def test_release_needs_retirement() -> None:
    """A slot in use cannot be given back, nor one twice."""
    allocator = SlotAllocator(1, 10)
    slot = allocator.request("a", 10)
    assert slot is not None
    allocator.read(slot.number)
    with pytest.raises(ValueError, match="not retiring"):
        allocator.release(slot.number)
    allocator.retire("a")
    # The reading before retirement does not count: the kernel could still add.
    with pytest.raises(ValueError, match="not read"):
        allocator.release(slot.number)
    assert len(drained(allocator)) == 1
    with pytest.raises(ValueError, match="not retiring"):
        allocator.release(slot.number)
    # Nor does the reading for the graph before.
    assert allocator.request("b", 10) is not None
    allocator.retire("b")
    with pytest.raises(ValueError, match="not read"):
        allocator.release(slot.number)
