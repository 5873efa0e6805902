# SPDX-License-Identifier: Apache-2.0
"""One graph to be drawn: its nodes with their times and states, and how data goes between them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..agent.errors import TargetEnded, UsageError
from ..agent.model.dataflow import dataflow
from ..agent.model.execution import account
from ..agent.model.tensors import EMPTY_OPS, Graph, NodeState
from ..agent.model.trace import Trace
from . import Choice

STATES = {
    NodeState.UNKNOWN: "unknown",
    NodeState.EXECUTED: "executed",
    NodeState.FUSED: "fused",
    NodeState.SKIPPED: "skipped",
    NodeState.UNCOVERED: "not seen",
}


@dataclass(frozen=True, slots=True)
class Box:
    """One node. ``state``: executed, fused (it ran in the kernel of the node before), view or skipped
    (no kernel), not seen, unknown. ``seconds`` of one execution on average; None: none of its own."""

    index: int
    op: str
    name: str | None
    role: str | None
    layer: int | None
    dtype: str
    shape: tuple[int, ...]
    state: str
    in_place: bool
    calls: int
    seconds: float | None
    share: float | None


@dataclass(frozen=True, slots=True)
class Arrow:
    """From node to node. ``kind``: data (a source), memory (what it reads was written there)."""

    source: int
    target: int
    kind: str


@dataclass(frozen=True, slots=True)
class Input:
    """A weight, cache or input that nodes read; ``readers`` are their indices."""

    index: int
    kind: str
    name: str | None
    dtype: str
    shape: tuple[int, ...]
    readers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Drawing:
    """What there is to draw; ``graph`` is its index in the trace."""

    graph: int
    boxes: tuple[Box, ...]
    arrows: tuple[Arrow, ...]
    inputs: tuple[Input, ...]
    executions: int


def busiest(trace: Trace) -> int:
    """The graph whose kernels took most time; without times, the one that ran most often."""
    sums, runs = trace.sums, trace.runs
    size = len(trace.facts.graphs)
    if not size:
        raise TargetEnded("the recording has no graph", "record while the engine computes")
    weight = np.zeros(size)
    if len(sums):
        np.add.at(weight, sums["graph"], sums["ns"])
    else:
        np.add.at(weight, runs["graph"][runs["graph"] >= 0], 1.0)
    for index in np.argsort(-weight, kind="stable").tolist():
        if trace.nodes(index) is not None:
            return int(index)
    raise TargetEnded("the recording has no graph whose nodes are known", "record again")


def draw(trace: Trace, choice: Choice) -> Drawing:
    """The chosen graph with what the trace says of its nodes, all phases together."""
    index = choice.graph if choice.graph is not None else busiest(trace)
    graph = trace.graph(index) if 0 <= index < len(trace.facts.graphs) else None
    if graph is None:
        raise UsageError(
            f"the recording has no graph {index} with known nodes", "profinferd info lists graphs"
        )
    sums = trace.sums[trace.sums["graph"] == index]
    n = len(graph.nodes)
    calls, ns = np.zeros(n, np.int64), np.zeros(n, np.int64)
    np.add.at(calls, sums["node"], sums["calls"])
    np.add.at(ns, sums["node"], sums["ns"])
    seen, place = np.unique(sums["node"], return_index=True)
    state = account(graph, seen, sums["fused"][place]).state
    order = [(int(node), bool(fused)) for node, fused in zip(seen, sums["fused"][place], strict=True)]
    if not order:
        order = [(i, False) for i in range(n) if graph.expected[i]]
    flow = dataflow(graph, order)
    total = int(ns.sum())
    in_place = {k.nodes[-1] for k in flow.kernels if k.in_place}
    boxes = tuple(
        _box(graph, i, int(state[i]), i in in_place, int(calls[i]), int(ns[i]), total, choice)
        for i in range(n)
    )
    arrows = [Arrow(a, b, "data") for a, b in sorted(set(graph.edges())) if a < n and a != b]
    direct = {(a.source, a.target) for a in arrows}
    for kernel in flow.kernels:
        for source in set(kernel.inputs) - set(kernel.producers):
            pair = flow.kernels[source].nodes[-1], kernel.nodes[0]
            if pair not in direct:
                arrows.append(Arrow(*pair, "memory"))
    executions = int((trace.runs["graph"] == index).sum())
    return Drawing(index, boxes, tuple(arrows), _inputs(graph, choice), executions)


def _box(
    graph: Graph, i: int, state: int, in_place: bool, calls: int, ns: int, total: int, choice: Choice
) -> Box:
    node, hidden = graph.nodes[i], choice.anonymise
    word = STATES[NodeState(state)]
    if node.op in EMPTY_OPS and not node.fault:
        word = "view"
    timed = choice.times and calls > 0
    return Box(
        index=i,
        op=node.op if node.sub_op is None else f"{node.op} {node.sub_op}",
        name=None if hidden else node.name or None,
        role=None if hidden else node.role,
        layer=node.layer,
        dtype=node.dtype,
        shape=node.ne,
        state=word,
        in_place=in_place,
        calls=calls,
        seconds=ns / calls / 1e9 if timed else None,
        share=ns / total if timed and total else None,
    )


def _inputs(graph: Graph, choice: Choice) -> tuple[Input, ...]:
    readers: dict[int, list[int]] = {}
    for node in graph.nodes:
        for source in node.sources:
            if source.leaf is not None:
                readers.setdefault(source.leaf, []).append(node.index)
    return tuple(
        Input(
            i, leaf.kind.value, None if choice.anonymise else leaf.name or None, leaf.type, leaf.ne,
            tuple(dict.fromkeys(readers.get(i, ()))),
        )
        for i, leaf in enumerate(graph.leaves)
    )  # fmt: skip
