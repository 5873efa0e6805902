# SPDX-License-Identifier: Apache-2.0
"""Kernels of two traces by what they are, not by name or place: so that they can be compared.

A node is known by its role, operator, shapes and layer. Where one build runs two nodes in one
kernel and the other does not, both are one *unit* on both sides.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .nodetable import NodeTable
from .tensors import Graph
from .trace import PHASES, Table, Trace

_CPU_LEVEL = 10
Ints = npt.NDArray[np.int64]


class Kind(NamedTuple):
    """What a node is, whatever its layer. ``shape`` of its weight, or else the length of a row of its
    result (-1: the cache's length)."""

    op: str
    role: str
    shape: tuple[int, ...]


class NodeId(NamedTuple):
    """One node of a graph by structure; ``nth`` of its kind in its layer."""

    kind: Kind
    layer: int
    nth: int


class Stratum(NamedTuple):
    """Executions that may be compared: the same tokens at the same (padded) KV length. ``part``: of a
    graph that was split, which part."""

    phase: str
    tokens: int
    kv_length: int
    part: int


Kernel = tuple[NodeId, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Order:
    """One order of kernels of one graph, with the types and bytes that go with them."""

    kernels: tuple[Kernel, ...]
    ops: tuple[str, ...]
    dtypes: tuple[str, ...]
    bytes: Ints  # -1: not known
    place: dict[int, int]  # node -> kernel


@dataclass(slots=True)
class Executions:
    """Executions of one stratum in order of time: which order, when, how long each kernel."""

    orders: list[int] = field(default_factory=list)
    times: list[Ints] = field(default_factory=list)
    begins: list[int] = field(default_factory=list)
    seqs: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Sides:
    """One trace, ready to be compared. ``left_out``: executions of which not all kernels have a time."""

    orders: list[Order] = field(default_factory=list)
    strata: dict[Stratum, Executions] = field(default_factory=lambda: defaultdict(Executions))
    left_out: int = 0


def read(trace: Trace) -> Sides:
    """All whole executions of a trace: not warm-up, not failed, nothing lost."""
    side = Sides()
    known: dict[tuple[int, bytes], int] = {}
    for s in trace.parts():
        runs = s.runs
        good = (runs["level"] == _CPU_LEVEL) & (runs["n_ops"] > 0) & (runs["graph"] >= 0)
        good &= ~runs["failed"] & ~runs["warmup"]
        parts: Counter[int] = Counter()
        for row in np.flatnonzero(good).tolist():
            run = runs[row]
            ops = s.ops[int(run["first_op"]) : int(run["first_op"]) + int(run["n_ops"])]
            part = parts[int(run["parent"])] if run["parent"] >= 0 else 0
            parts[int(run["parent"])] += 1
            if run["partial"] or not bool(ops["timed"].all()):
                side.left_out += 1
                continue
            index = int(run["graph"])
            key = index, ops["node"].tobytes() + ops["fused"].tobytes()
            if key not in known:
                graph, table = trace.graph(index), trace.nodes(index)
                if graph is None or table is None:
                    side.left_out += 1
                    continue
                known[key] = len(side.orders)
                side.orders.append(_order(graph, table, ops))
            info = trace.facts.graphs[index]
            stratum = Stratum(PHASES[int(run["phase"])], int(run["tokens"]), info.kv_length or 0, part)
            its = side.strata[stratum]
            its.orders.append(known[key])
            its.times.append(np.maximum(ops["end"] - ops["begin"], 1))
            its.begins.append(int(run["begin"]))
            its.seqs.append(int(run["seq"]))
    return side


def _order(graph: Graph, table: NodeTable, ops: Table) -> Order:
    ids = _ids(graph)
    kernels: list[Kernel] = []
    names, dtypes, moved, place = [], [], [], {}
    for node, fused in zip(ops["node"].tolist(), ops["fused"].tolist(), strict=True):
        members = [node, node + 1] if fused and node + 1 < len(ids) else [node]
        for member in members:
            place[member] = len(kernels)
        kernels.append(tuple(ids[member] for member in members))
        names.append("+".join(graph.nodes[member].op for member in members))
        dtypes.append(table.dtype[node])
        moved.append(int((table.fused_bytes if len(members) > 1 else table.bytes)[node]))
    return Order(tuple(kernels), tuple(names), tuple(dtypes), np.array(moved, dtype=np.int64), place)


def _ids(graph: Graph) -> list[NodeId]:
    seen: Counter[tuple[Kind, int]] = Counter()
    out = []
    for node in graph.nodes:
        weight = None if node.weight is None else graph.leaves[node.weight]
        shape = _row_length(node.ne, graph) if weight is None else weight.ne
        op = node.op if node.sub_op is None else f"{node.op} {node.sub_op}"
        kind, layer = Kind(op, node.role, shape), -1 if node.layer is None else node.layer
        out.append(NodeId(kind, layer, seen[kind, layer]))
        seen[kind, layer] += 1
    return out


def _row_length(shape: tuple[int, ...], graph: Graph) -> tuple[int, ...]:
    """What does not change from execution to execution: the length of a row, which in attention may be
    that of the cache. How many rows there are depends on tokens, and heads show in weights."""
    return (-1 if shape[0] > 1 and shape[0] == graph.kv_length else shape[0],)


@dataclass(frozen=True, slots=True, eq=False)
class Units:
    """Nodes that are compared together, over both traces. ``of`` a node: which unit."""

    members: tuple[tuple[NodeId, ...], ...]
    of: dict[NodeId, int]


def units(sides: Iterable[Sides]) -> Units:
    """Nodes that run in one kernel anywhere belong together everywhere."""
    parent: dict[NodeId, NodeId] = {}

    def root(node: NodeId) -> NodeId:
        parent.setdefault(node, node)
        while parent[node] != node:
            parent[node] = node = parent[parent[node]]
        return node

    for side in sides:
        for order in side.orders:
            for kernel in order.kernels:
                first = root(kernel[0])
                for other in kernel[1:]:
                    parent[root(other)] = first
    groups: dict[NodeId, list[NodeId]] = defaultdict(list)
    for node in parent:
        groups[root(node)].append(node)
    members = tuple(tuple(group) for group in groups.values())
    return Units(members, {node: i for i, group in enumerate(members) for node in group})


def matrix(side: Sides, its: Executions, chosen: range, found: Units) -> npt.NDArray[np.float64]:
    """ns[execution, unit] of the chosen executions; NaN where the unit did not run."""
    out = np.full((len(chosen), len(found.members)), np.nan)
    orders = np.array([its.orders[i] for i in chosen])
    for number in np.unique(orders).tolist():
        rows = np.flatnonzero(orders == number)
        places = np.array([found.of[kernel[0]] for kernel in side.orders[number].kernels])
        times = np.stack([its.times[chosen[i]] for i in rows]).astype(np.float64)
        order = np.argsort(places, kind="stable")
        own, first = np.unique(places[order], return_index=True)
        out[np.ix_(rows, own)] = np.add.reduceat(times[:, order], first, axis=1)
    return out
