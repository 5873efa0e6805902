# SPDX-License-Identifier: Apache-2.0
"""A graph made from its sibling is the graph that would have been built from nothing."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profinferd.agent.model import graph as graph_module
from profinferd.agent.model import plancache
from profinferd.agent.model.costs import cost
from profinferd.agent.model.graph import Graph
from profinferd.agent.model.plancache import PlanCache, Tables
from profinferd.agent.model.plans import Plan
from profinferd.agent.model.resize import Skeleton, resized

from .graphs import GLU, OPS, TYPES, UNARY, Builder, decoder

shapes = st.tuples(st.integers(0, 40), st.integers(0, 4), st.integers(0, 3).map(lambda n: 256 * n))


def skeleton_of(builder: Builder) -> Skeleton:
    made = Skeleton.of(builder.descs(), len(builder.nodes), cut=False)
    assert made is not None
    return made


def assert_equal(one: Graph, other: Graph) -> None:
    for field in dataclasses.fields(Graph):
        a, b = getattr(one, field.name), getattr(other, field.name)
        if isinstance(a, np.ndarray):
            np.testing.assert_array_equal(a, b, err_msg=field.name)
        else:
            assert a == b, field.name


@settings(max_examples=25, deadline=None)
@given(shapes, shapes, st.booleans(), st.booleans())
def test_a_sibling_is_as_if_built_and_costs_what_each_node_costs(
    first: tuple[int, int, int], second: tuple[int, int, int], flash: bool, tied: bool
) -> None:
    one, two = (decoder(*shape, flash=flash, tied=tied) for shape in (first, second))
    assert skeleton_of(one).key == skeleton_of(two).key
    built = two.graph(hash=7)
    made = resized(one.graph(), skeleton_of(two), 7)
    assert_equal(made, built)
    # The costs follow from the formulas node by node, alike or not.
    plan = Plan.of(one.graph(), {}).resized(made, skeleton_of(two).dims())
    flops, moved = plan.price(np.arange(2 * plan.n))
    for slot in range(2 * plan.n):
        fused, index = divmod(slot, plan.n)
        expected = cost(built, index, fused=bool(fused))
        assert (flops[slot], moved[slot]) == tuple(
            -1 if c is None else c for c in (expected.flops, expected.bytes)
        )


def test_order_and_repeated_leaves_do_not_matter() -> None:
    builder = decoder(5)
    descs = builder.descs()
    shuffled = np.random.default_rng(1).permutation(descs)
    made = Skeleton.of(shuffled, len(builder.nodes), cut=False)
    assert made is not None and made.key == skeleton_of(builder).key
    assert_equal(resized(decoder(9).graph(), made, 0), builder.graph())


def _spoil(descs: npt.NDArray[np.void], field: str, value: object) -> npt.NDArray[np.void]:
    out = descs.copy()
    out[field][3] = value
    return out


@pytest.mark.parametrize(
    ("field", "value"),
    [("name", b"other"), ("op", 2), ("type", 1), ("addr", 1), ("flags", 0), ("data", 77), ("extra", 5),
     ("view_src", 9), ("src", 4), ("op_params", 3), ("buffer", 8)],
)  # fmt: skip
def test_whatever_else_differs_is_no_sibling(field: str, value: object) -> None:
    builder = decoder(5)
    other = Skeleton.of(_spoil(builder.descs(), field, value), len(builder.nodes), cut=False)
    assert other is None or other.key != skeleton_of(builder).key


def test_what_is_incomplete_or_could_not_be_read_has_no_skeleton() -> None:
    builder = decoder(5)
    descs, n = builder.descs(), len(builder.nodes)
    assert Skeleton.of(descs[descs["index"] != 2], n, cut=False) is None
    assert Skeleton.of(_spoil(descs, "fault", 1), n, cut=False) is None
    assert Skeleton.of(np.concatenate((descs, descs[:1])), n, cut=False) is None
    assert Skeleton.of(descs[:0], n, cut=False) is None


def test_a_cache_builds_each_kind_of_graph_once(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[int] = []

    def counting(descs: npt.NDArray[np.void], *args: object, hash: int = 0, **more: object) -> object:
        built.append(hash)
        return graph_module.build_graph(descs, *args, hash=hash, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(plancache, "build_graph", counting)
    cache = PlanCache(Tables(OPS, TYPES, UNARY, GLU), plans=100, graphs=3)
    for seq, tokens in enumerate(range(1, 31), 1):
        builder = decoder(tokens)
        descs = builder.descs()
        descs["seq"] = seq
        cache.take(descs)
        assert cache.build(7, 1000 + seq, seq, len(builder.nodes), cut=False)
        plan = cache.get(7, 1000 + seq)
        assert plan is not None and plan.facts.n_tokens == tokens and plan.facts.hash == 1000 + seq
    assert built == [1001]
    assert len(cache.confirmed) == 30
    # Another process may have other weights at the same addresses: it is looked at by itself.
    descs["seq"] = 99
    cache.take(descs)
    assert cache.build(8, 1030, 99, len(builder.nodes), cut=False)
    assert built == [1001, 1030]
