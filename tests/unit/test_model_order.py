# SPDX-License-Identifier: Apache-2.0
"""Executions whose kernels come in a known order are measured in a shorter way: same results."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from profinferd.agent.model.alike import Alike
from profinferd.agent.model.opwork import Execution, Measured, measure
from profinferd.agent.model.plans import GraphFacts, Plan
from profinferd.agent.model.records import OP_FUSED, Records
from tests.unit.graphs import record_dtype


def _plan(expected: list[bool]) -> Plan:
    n = len(expected)
    before = np.zeros(n + 1, dtype=np.int32)
    np.cumsum(expected, out=before[1:])
    zeros = np.zeros(2 * n, dtype=np.int64)
    facts = cast(GraphFacts, None)  # measuring asks for none
    group, same, alike = np.zeros(2 * n, dtype=np.int32), np.arange(n, dtype=np.int32), Alike.of((), ())
    return Plan(None, facts, n, before, [], group, frozenset(), alike, same, zeros, zeros)


def _hits(nodes: list[int], times: list[int]) -> Records:
    hits = np.zeros(len(nodes), dtype=record_dtype("op_hit"))
    hits["node"], hits["ts"] = nodes, times
    return hits


def _same(one: Measured, other: Measured) -> None:
    for field in dataclasses.fields(Measured):
        a, b = getattr(one, field.name), getattr(other, field.name)
        np.testing.assert_array_equal(a, b, err_msg=field.name)


@st.composite
def executions(draw: st.DrawFn) -> tuple[list[bool], list[int], list[list[int]], dict[str, Any]]:
    expected = draw(st.lists(st.booleans(), min_size=1, max_size=12))
    ran = draw(st.lists(st.sampled_from(range(len(expected) + 1)), min_size=1, max_size=12))
    nodes = ran if draw(st.integers(0, 9)) == 0 else sorted(set(ran))
    words = [node | (OP_FUSED if draw(st.integers(0, 4)) == 0 else 0) for node in nodes]
    moment = st.integers(0, 1000) | st.sampled_from([0, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
    runs = []
    for _ in range(2):
        times = draw(st.lists(moment, min_size=len(words), max_size=len(words)))
        runs.append(times if draw(st.integers(0, 4)) == 0 else sorted(times))
    rest = {
        "begin": draw(st.integers(0, 1 << 62)) if draw(st.booleans()) else 0,
        "end": draw(st.none() | st.integers(0, 2000) | st.just(1 << 62)),
        "partial": draw(st.booleans()),
    }
    return expected, words, runs, rest


@given(executions())
def test_a_known_order_changes_nothing(
    case: tuple[list[bool], list[int], list[list[int]], dict[str, Any]],
) -> None:
    expected, words, (first, second), rest = case
    known, fresh = _plan(expected), _plan(expected)
    measure(known, Execution(1, 1, rest["begin"], rest["end"], _hits(words, first), rest["partial"], {}))
    later = Execution(1, 1, rest["begin"], rest["end"], _hits(words, second), rest["partial"], {})
    _same(measure(known, later), measure(fresh, later))


def test_an_order_is_remembered_only_without_gaps() -> None:
    plan = _plan([True] * 4)
    measure(plan, Execution(1, 1, 0, 50, _hits([0, 2, 3], [1, 2, 3]), False, {}))
    assert plan.order is None
    measure(plan, Execution(1, 1, 0, 50, _hits([0, 1 | OP_FUSED, 3], [1, 2, 3]), False, {}))
    assert plan.order is not None
    assert (plan.order.slots.tolist(), plan.order.fused, plan.order.head) == ([0, 5, 3], 1, 0)
