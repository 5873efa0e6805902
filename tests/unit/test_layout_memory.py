# SPDX-License-Identifier: Apache-2.0
"""The self-check of layouts on memory images of every known layout, whole and damaged."""

from __future__ import annotations

import random
import struct
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profinferd.agent.errors import TargetError
from profinferd.agent.target.layout import KNOWN, Layout, LiveGraph, check_layout, choose_layout

OPS, TYPES = 101, 43
ARENA, HEADER, CHUNK = 0x7F12_3456_0000, 32, 512
SIZES = (4, 2, 18, 144)
BLOCKS = (1, 1, 32, 256)


def image(layout: Layout, chance: random.Random, n_nodes: int) -> LiveGraph:
    """A graph of plausible operators as ``layout`` would store it, tensors in an arena among garbage."""
    stride = layout.t_size + HEADER
    memory = bytearray(chance.randbytes(n_nodes * stride + CHUNK))
    places = [ARENA + n * stride + HEADER for n in range(n_nodes)]
    weights = [0x7F00_0000_0000 + 400 * n for n in range(20)]
    for n, place in enumerate(places):
        at = place - ARENA
        # ggml's header of the object: offset, size, next, kind
        struct.pack_into("<QQQQ", memory, at - HEADER, at, layout.t_size, place + layout.t_size, 0)
        memory[at : at + layout.t_size] = bytes(layout.t_size)
        kind = chance.randrange(2) if n else 0
        ne = [BLOCKS[kind] * chance.randrange(1, 40), chance.randrange(1, 600), chance.randrange(1, 9), 1]
        if chance.random() < 0.05:
            ne[1] = 0
        nb = [SIZES[kind], SIZES[kind] * ne[0] // BLOCKS[kind], 0, 0]
        nb[2], nb[3] = nb[1] * ne[1], nb[1] * ne[1] * ne[2]
        view = n > 2 and chance.random() < 0.2
        if view and chance.random() < 0.5:  # permuted
            nb[1], nb[2], ne[1], ne[2] = nb[2], nb[1], ne[2], ne[1]
        sources = [places[n - 1] if n else weights[0]]
        sources += [chance.choice(weights + places[:n]) for _ in range(chance.randrange(3))]
        if len(sources) > 2:
            sources[1] = 0  # optional sources leave gaps
        name = chance.choice(
            ["Qcur-0", "norm-11", "kqv_out-3 (view)", f"node_{n}", "ffn_moe_weights_scaled-27"]
        )
        text = name.encode()
        put: list[tuple[int | None, str, list[int]]] = [
            (layout.t_type, "<I", [kind]),
            (layout.t_buffer, "<Q", [0x5555_0000_1000]),
            (layout.t_ne, "<4q", ne),
            (layout.t_nb, "<4Q", nb),
            (layout.t_op, "<I", [chance.randrange(1, OPS)]),
            (layout.t_op_params, "<16i", [chance.randrange(-(1 << 31), 1 << 31) for _ in range(16)]),
            (layout.t_flags, "<I", [chance.choice([16, 16, 18])]),
            (layout.t_src, f"<{len(sources)}Q", sources),
            (layout.t_view_src, "<Q", [chance.choice(weights) if view else 0]),
            (layout.t_view_offs, "<Q", [chance.randrange(1 << 24) * 2 if view else 0]),
            (layout.t_data, "<Q", [0x7F22_0000_0000 + 32 * chance.randrange(1 << 20)]),
            (layout.t_extra, "<Q", [chance.choice([0, 0, 0x5555_0000_2040])]),
        ]
        for where, form, values in put:
            if where is not None:
                struct.pack_into(form, memory, at + where, *values)
        memory[at + layout.t_name : at + layout.t_name + len(text)] = text
        if chance.random() < 0.3:  # the remains of a longer name
            memory[at + layout.t_name + len(text) + 1 :][:5] = b"again"
    graph = bytearray(chance.randbytes(CHUNK))
    struct.pack_into("<iii4xQ", graph, 0, n_nodes, n_nodes, 4, 0x5555_0000_8000)
    if layout.g_uid is not None:
        struct.pack_into("<Q", graph, layout.g_uid, chance.randrange(1 << 20))
    starts = [place - ARENA for place in places]
    return LiveGraph(
        bytes(graph), {n: (places[n], bytes(memory[starts[n] : starts[n] + CHUNK])) for n in range(n_nodes)}
    )


def alike(layout: Layout) -> tuple[object, ...]:
    return tuple(value for name, value in layout.offsets().items() if name not in ("g_uid", "t_flags"))


layouts = st.sampled_from(KNOWN)
seeds = st.integers(0, 1 << 32)


@settings(deadline=None)
@given(layouts, seeds, st.integers(8, 64))
def test_exactly_one_fits(layout: Layout, seed: int, n_nodes: int) -> None:
    """C12: names of 64 and of 128 bytes, fields that came and went: never taken for each other."""
    live = image(layout, random.Random(seed), n_nodes)
    fitting = [k for k in KNOWN if check_layout(k, live, OPS, TYPES) is None]
    assert layout in fitting
    assert {alike(k) for k in fitting} == {alike(layout)}
    assert alike(choose_layout(KNOWN, live, OPS, TYPES)) == alike(layout)


@settings(deadline=None)
@given(layouts, seeds, st.sampled_from([8, 16, 40, 48, 64]))
def test_a_field_that_nobody_knows(layout: Layout, seed: int, moved: int) -> None:
    """C12: a field inserted before data: every known layout is refused.

    (24 and 32 bytes are how far later versions moved it: a fork that adds exactly as much elsewhere
    differs from them in nothing but where a view's source lies.)
    """
    fork = replace(
        layout,
        t_data=layout.t_data + moved,
        t_name=layout.t_name + moved,
        t_extra=layout.t_extra + moved,
        t_size=(layout.t_extra + moved + 8 + 15) // 16 * 16,
    )
    live = image(fork, random.Random(seed), 24)
    equals = [k for k in KNOWN if alike(k) == alike(fork)]
    fitting = [k for k in KNOWN if check_layout(k, live, OPS, TYPES) is None]
    assert {alike(k) for k in fitting} <= {alike(k) for k in equals}, [k.name for k in fitting]


@settings(deadline=None)
@given(layouts, seeds)
def test_garbage(layout: Layout, seed: int) -> None:
    """C12: garbage is refused, with a reason."""
    chance = random.Random(seed)
    live = image(layout, chance, 16)
    random_nodes = {n: (place, chance.randbytes(CHUNK)) for n, (place, _) in live.nodes.items()}
    zeros = {n: (place, bytes(CHUNK)) for n, (place, _) in live.nodes.items()}
    for nodes in (random_nodes, zeros, {}):
        assert check_layout(layout, LiveGraph(live.cgraph, nodes), OPS, TYPES)
    for graph in (b"", bytes(CHUNK), b"\xff" * CHUNK):
        assert check_layout(layout, LiveGraph(graph, live.nodes), OPS, TYPES)
    with pytest.raises(TargetError) as caught:
        choose_layout(KNOWN, LiveGraph(live.cgraph, random_nodes), OPS, TYPES)
    assert "does not fit" in caught.value.what
    assert caught.value.remedy


DAMAGE: list[tuple[str, str, int, str]] = [
    ("t_op", "<I", OPS, f"operator {OPS} is not below"),
    ("t_type", "<I", TYPES, f"type {TYPES} is not below"),
    ("t_ne", "<q", -1, "a dimension"),
    ("t_nb", "<Q", 1 << 60, "a stride"),
    ("t_src", "<Q", 0x1001, "a source"),
    ("t_src", "<Q", 12, "a source"),
    ("t_view_src", "<Q", 1 << 60, "view_src"),
    ("t_data", "<Q", 1 << 60, "its data"),
    ("t_extra", "<Q", 1 << 60, "its extra"),
    ("t_name", "<Q", 0x7F22_0000_0000, "name"),
    ("t_view_offs", "<Q", 1 << 60, "offset"),
]


@pytest.mark.parametrize(("field", "form", "value", "words"), DAMAGE)
@pytest.mark.parametrize("layout", [KNOWN[0], KNOWN[-1]])
def test_one_impossible_value_is_enough(
    layout: Layout, field: str, form: str, value: int, words: str
) -> None:
    live = image(layout, random.Random(7), 20)
    place, data = live.nodes[9]
    changed = bytearray(data)
    struct.pack_into(form, changed, getattr(layout, field), value)
    reason = check_layout(
        layout, LiveGraph(live.cgraph, {**live.nodes, 9: (place, bytes(changed))}), OPS, TYPES
    )
    assert reason is not None
    assert reason.startswith("node 9: ")
    assert words in reason


def test_results_before_they_exist() -> None:
    """Sources come before the nodes that use them; a node never uses itself."""
    layout = KNOWN[0]
    live = image(layout, random.Random(3), 20)
    for target, words in ((15, "computed later"), (4, "the node itself")):
        place, data = live.nodes[4]
        changed = bytearray(data)
        struct.pack_into("<Q", changed, layout.t_src, live.nodes[target][0])
        reason = check_layout(
            layout, LiveGraph(live.cgraph, {**live.nodes, 4: (place, bytes(changed))}), OPS, TYPES
        )
        assert reason is not None
        assert words in reason


def test_a_cast_names_itself_as_its_second_source() -> None:
    layout = KNOWN[0]
    live = image(layout, random.Random(3), 20)
    place, data = live.nodes[4]
    changed = bytearray(data)
    struct.pack_into("<Q", changed, layout.t_src + 8, place)
    cast = LiveGraph(live.cgraph, {**live.nodes, 4: (place, bytes(changed))})
    assert check_layout(layout, cast, OPS, TYPES) is None


def test_cut_memory() -> None:
    """The arena may end before a chunk does: what is missing behind the name is no contradiction."""
    layout = KNOWN[1]
    live = image(layout, random.Random(5), 20)
    last, data = live.nodes[19]
    cut = {**live.nodes, 19: (last, data[:320])}
    assert check_layout(layout, LiveGraph(live.cgraph, cut), OPS, TYPES) is None
    short = {n: (place, data[:100]) for n, (place, data) in live.nodes.items()}
    reason = check_layout(layout, LiveGraph(live.cgraph, short), OPS, TYPES)
    assert reason is not None
    assert "could not be read" in reason


def test_counts_unknown() -> None:
    live = image(KNOWN[1], random.Random(9), 20)
    assert check_layout(KNOWN[1], live, None, None) is None


@settings(deadline=None)
@given(st.binary(max_size=600), st.lists(st.binary(max_size=600), max_size=6), layouts)
def test_any_memory(graph: bytes, nodes: list[bytes], layout: Layout) -> None:
    """Hostile memory: a reason or None, never an exception."""
    check_layout(
        layout, LiveGraph(graph, {n: (0x1000 * n, data) for n, data in enumerate(nodes)}), OPS, TYPES
    )
