# SPDX-License-Identifier: Apache-2.0
"""Addresses become mappings and tensors; faults are added up by them (case C27)."""

from __future__ import annotations

import pytest

from profinferd.agent.model.addresses import (
    ANON,
    COMPUTE,
    FILE,
    GGUF,
    GRAPH,
    KV,
    MODEL,
    STACK,
    UNKNOWN,
    WEIGHTS,
    AddressBook,
    Area,
    Piece,
    layer_of,
)
from profinferd.agent.model.paging import HOLD_NS, SHOWN_TENSORS, FaultStore

from .causerecords import Records, records
from .graphs import Builder, decoder

S = 1_000_000_000
NO_TIME = 2**64 - 1


def placed() -> tuple[Builder, dict[str, int]]:
    """A decoder whose norm weights lie in the model's mapping, all else where it was built."""
    b = decoder(layers=2)
    at: dict[str, int] = {}
    for node in b.nodes:
        for source in node.src:
            if source is not None and source.op == "NONE":
                at[source.name if isinstance(source.name, str) else ""] = source.data
    return b, at


def book() -> tuple[AddressBook, dict[str, int]]:
    b, at = placed()
    made = AddressBook()
    weight = at["blk.0.attn_q.weight"]
    made.set_areas(
        [
            Area(0x1000, 0x9000, MODEL, 0x100, 0),
            Area(0x9000, 0xA000, FILE),
            Area(0xB000, 0xC000, STACK),
            Area(weight - 4096, weight + 4096, MODEL, 0x10000, 1),
            Area(0x7F0000000000 << 8, 0x7FFF00000000 << 8, ANON),
        ]
    )
    made.set_file(
        0, [Piece(0x200, 0x300, "token_embd.weight"), Piece(0x300, 0x400, "blk.7.attn_k.weight", 7)]
    )
    made.add_graph(b.graph())
    return made, at


def test_every_kind_of_address() -> None:
    made, at = book()
    known = made.find(at["blk.1.ffn_up.weight"] + 100)
    assert (known.mapping, known.tensor, known.layer, known.source) == (
        WEIGHTS,
        "blk.1.ffn_up.weight",
        1,
        GRAPH,
    )
    cache = made.find(at["cache_k_l1"])
    assert (cache.mapping, cache.tensor, cache.layer) == (KV, "cache_k_l1", 1)
    mapped = made.find(at["blk.0.attn_q.weight"])
    assert (mapped.mapping, mapped.tensor, mapped.source) == (MODEL, "blk.0.attn_q.weight", GRAPH)
    # 0x1100 is byte 0x200 of the file: the mapping begins at 0x100.
    by_file = made.find(0x1100)
    assert (by_file.mapping, by_file.tensor, by_file.layer, by_file.source) == (
        MODEL, "token_embd.weight", None, GGUF,
    )  # fmt: skip
    assert made.find(0x12FF).tensor == "blk.7.attn_k.weight" and made.find(0x1300).tensor is None
    assert made.find(0x1300).mapping == MODEL
    assert made.find(at["inp_out_ids"]).mapping == COMPUTE
    assert [made.find(a).mapping for a in (0x9000, 0xB000, 0xD000, 0)] == [FILE, STACK, UNKNOWN, UNKNOWN]
    assert made.outside > 0 and made.inside > 0


def test_hostile_graphs_and_mappings() -> None:
    """Impossible pointers and sizes: an answer, not an error."""
    b = decoder(layers=1)
    for node in b.nodes:
        node.data = 2**64 - 8
        for source in node.src:
            if source is not None:
                source.data, source.ne = 2**64 - 4, (2**62, 2**62, 1, 1)
    made = AddressBook()
    made.add_graph(b.graph())
    assert made.find(2**64 - 2).mapping in (UNKNOWN, COMPUTE)
    assert made.find(0).mapping == UNKNOWN


def faults(*rows: dict[str, int], **every: int) -> Records:
    return records("fault_rec", *rows, **{"tgid": 7, "wait_ns": NO_TIME, **every})


def test_counts_by_kind_and_mapping() -> None:
    store = FaultStore(7)
    store.book, at = book()
    up = at["blk.1.ffn_up.weight"]
    store.take(
        faults(
            {"addr": up, "kind": 1, "wait_ns": 3_000_000},
            {"addr": up + 5, "kind": 0, "wait_ns": 0},
            {"addr": up, "kind": 1, "tgid": 8},
            {"addr": 0x1100, "kind": 1},
            {"addr": 0xD000, "kind": 0},
        ),
        now_ns=S,
    )
    seen = store.figures({"minor": 12, "major": 2, "minor_unrecorded": 10, "major_unrecorded": 0})
    assert {(c.kind, c.mapping): c.count for c in seen.counts} == {
        ("major", "weights"): 1,
        ("minor", "weights"): 1,
        ("major", "model"): 1,
        ("minor", "unknown"): 11,  # ten without a record
    }
    assert sum(c.count for c in seen.counts) == 14 and seen.unrecorded == 10
    seconds = {(c.kind, c.mapping): c.seconds for c in seen.counts}
    assert seconds["major", "weights"] == pytest.approx(0.003)
    assert seconds["major", "model"] is None  # without the scheduler's programs it is not known
    first = seen.tensors[0]
    assert (first.tensor, first.majors, first.minors, first.seconds) == ("blk.1.ffn_up.weight", 1, 1, 0.003)
    assert seen.of("minor") == 12 and seen.of("major", "model") == 1


def test_what_a_graph_explains_later() -> None:
    """Memory that is touched before the first graph: named when a graph is read, or given up."""
    b, at = placed()
    store = FaultStore(7)
    store.book.set_areas([Area(0x7F0000000000 << 8, 0x7FFF00000000 << 8, ANON)])
    store.take(faults({"addr": at["cache_v_l0"], "ts": S}, {"addr": (0x7F0000000000 << 8) + 9, "ts": S}), S)
    assert store.figures(None).counts == ()  # not to be told yet, and not to be taken back later
    store.book.add_graph(b.graph())
    store.take(faults(), S + 1)
    assert {(c.mapping, c.count) for c in store.figures(None).counts} == {("kv", 1), ("anon", 1)}
    other = FaultStore(7)
    other.book.set_areas([Area(0, 1 << 40, ANON)])
    other.take(faults({"addr": 99, "ts": S}), S)
    other.take(faults(), S + HOLD_NS + 1)
    assert other.figures(None).of("minor", "anon") == 1


def test_counts_never_fall_and_lists_are_bounded() -> None:
    store = FaultStore(7)
    store.book.set_areas([Area(0, 1 << 40, MODEL, 0, 0)])
    store.book.set_file(0, [Piece(n * 4096, n * 4096 + 4096, f"t{n}") for n in range(9000)])
    last = 0
    for n in range(0, 9000, 1000):
        store.take(faults(*({"addr": 4096 * i, "kind": 1, "wait_ns": i} for i in range(n, n + 1000))), S)
        seen = store.figures(None)
        assert seen.of("major", "model") == last + 1000
        last += 1000
    assert len(store._tensors) <= 4096
    assert len(seen.tensors) == SHOWN_TENSORS and seen.tensors[0].tensor == "t8999"


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("blk.12.attn_q.weight", 12),
        ("cache_k_l3", 3),
        ("token_embd.weight", None),
        ("enc.blk.2.ffn", 2),
        ("", None),
    ],
)
def test_layers(name: str, layer: int | None) -> None:
    assert layer_of(name) == layer


def test_a_fault_in_a_mapping_that_is_new_waits_for_the_next_look() -> None:
    """What faulted after the mappings were read may be in a new one; what did before is in none."""
    store = FaultStore(7)
    store.book.add_graph(placed()[0].graph())
    store.book.set_areas([Area(0x1000, 0x2000, FILE)], at_ns=5 * S)
    store.take(
        faults({"addr": 0x8000, "ts": 4 * S}, {"addr": 0x9000, "ts": 6 * S}, {"addr": 0xF000, "ts": 6 * S}),
        now_ns=6 * S,
    )
    assert {c.mapping: c.count for c in store.figures(None).counts} == {"unknown": 1}
    assert store.wants_maps
    store.settle(7 * S)
    assert store.wants_maps, "nobody has looked again"
    store.book.set_areas([Area(0x1000, 0x2000, FILE), Area(0x9000, 0xA000, ANON)], at_ns=8 * S)
    store.settle(8 * S)
    assert {c.mapping: c.count for c in store.figures(None).counts} == {"unknown": 2, "anon": 1}
    assert not store.wants_maps and not store.holds


def test_mappings_that_cannot_be_read_any_more_are_not_waited_for() -> None:
    store = FaultStore(7)
    store.book.set_areas([], at_ns=5 * S)
    store.take(faults({"addr": 0x9000, "ts": 6 * S}), now_ns=6 * S)
    assert store.holds and not store.figures(None).counts
    store.settle(6 * S + HOLD_NS + 1)
    assert {c.mapping: c.count for c in store.figures(None).counts} == {"unknown": 1} and not store.holds
