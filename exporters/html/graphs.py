# SPDX-License-Identifier: Apache-2.0
"""Graphs with what each node took: the few that took most of the time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ...agent.model.tensors import EMPTY_OPS, Graph, Tensor
from ...agent.model.trace import PHASES, Table, Trace
from ..text import clean

MAX_GRAPHS = 6
MAX_NODES = 8_000
_NAME = 80


def choose(trace: Trace) -> list[tuple[int, int]]:
    """(graph, phase) pairs that are drawn, most time first: of each topology and phase the graph
    that took most; of nodes at most so many that the page stays small."""
    sums = trace.sums
    pairs = _added(sums, sums["ns"])
    if not pairs:
        runs = trace.runs[trace.runs["graph"] >= 0]
        pairs = _added(runs, runs["end"] - runs["begin"])
    best: dict[tuple[str, int], tuple[int, int]] = {}
    for (graph, phase), ns in pairs.items():
        info = trace.facts.graphs[graph]
        if not info.known:
            continue
        key = (info.topology or str(graph), phase)
        if key not in best or ns > pairs[best[key]]:
            best[key] = (graph, phase)
    found: list[tuple[int, int]] = []
    nodes = 0
    for graph, phase in sorted(best.values(), key=lambda pair: -pairs[pair]):
        nodes += trace.facts.graphs[graph].n_nodes
        if len(found) == MAX_GRAPHS or (found and nodes > MAX_NODES):
            break
        found.append((graph, phase))
    return found


def _added(rows: Table, ns: npt.NDArray[np.int64]) -> dict[tuple[int, int], int]:
    """(graph, phase) -> ns of all its rows."""
    keys, where = np.unique(rows["graph"].astype(np.int64) * 256 + rows["phase"], return_inverse=True)
    total = np.zeros(len(keys), np.int64)
    np.add.at(total, where, ns)
    return {(key // 256, key % 256): value for key, value in zip(keys.tolist(), total.tolist(), strict=True)}


def note(trace: Trace, kept: Sequence[tuple[int, int]]) -> str | None:
    """What of the graphs is not drawn."""
    known = len({(g.topology, g.tokens, g.kv_length) for g in trace.facts.graphs if g.known})
    if not kept:
        return "No graph was described in this recording."
    unknown = sum(not g.known for g in trace.facts.graphs)
    parts = []
    if known > len(kept):
        parts.append(
            f"{len(kept)} of {known} graphs are drawn:"
            " of each structure and phase the one that took most time."
        )
    if unknown:
        parts.append(f"{unknown} graphs ran whose nodes are not known.")
    return " ".join(parts) or None


def documents(trace: Trace, kept: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
    """The graphs that were chosen."""
    found = []
    for index, phase in kept:
        graph = trace.graph(index)
        if graph is not None:
            found.append(_document(trace, index, phase, graph))
    return found


def shape(tensor: Tensor) -> str:
    """``640 x 4``: without trailing ones."""
    ne = list(tensor.ne)
    while len(ne) > 1 and ne[-1] == 1:
        ne.pop()
    return " × ".join(str(n) for n in ne)


def memory_of(graph: Graph, index: int) -> str:
    """i: in place (its result lies in another tensor's memory), v: only a view, n: its own."""
    node = graph.nodes[index]
    if node.op in EMPTY_OPS:
        return "v"
    return "i" if node.view_src else "n"


def _document(trace: Trace, index: int, phase: int, graph: Graph) -> dict[str, Any]:
    info, table = trace.facts.graphs[index], trace.nodes(index)
    runs = trace.runs[(trace.runs["graph"] == index) & (trace.runs["phase"] == phase)]
    mine = runs[runs["n_ops"] > 0] if (runs["n_ops"] > 0).any() else runs
    sums = trace.sums[(trace.sums["graph"] == index) & (trace.sums["phase"] == phase)]
    n = len(graph.nodes)
    calls, ns, seen, fused = (np.zeros(n + 1, np.int64) for _ in range(4))
    inside = sums[sums["node"] < n]
    np.add.at(calls, inside["node"], inside["calls"])
    np.add.at(ns, inside["node"], inside["ns"])
    np.add.at(seen, inside["node"], inside["calls"] + inside["untimed"])
    np.add.at(
        fused, inside["node"][inside["fused"]] + 1, (inside["calls"] + inside["untimed"])[inside["fused"]]
    )
    state = "".join(_state(graph, i, seen, fused, len(sums) > 0) for i in range(n))
    heads = {i - 1 for i in range(n) if state[i] == "f"}
    count = len(mine)
    whole = int((mine["end"] - mine["begin"]).sum()) / count if count else None
    timed = int(ns.sum()) / count if count and len(sums) else None
    cost = _costs(table, heads) if table is not None else ([None] * n, [None] * n)
    parts = [
        PHASES[phase],
        f"{info.tokens} token" + ("" if info.tokens == 1 else "s") if info.tokens is not None else "",
        f"KV {info.kv_length}" if info.kv_length is not None else "",
        f"{n} nodes",
    ]
    return {
        "id": f"{info.hash:016x}",
        "topology": graph.topology,
        "label": ", ".join(part for part in parts if part),
        "phase": phase,
        "count": count,
        "ns": None if whole is None else round(whole),
        "setup": None if timed is None or whole is None else max(0, round(whole - timed)),
        "nodes": {
            "name": [clean(node.name, _NAME) for node in graph.nodes],
            "op": [node.op if node.sub_op is None else f"{node.op} {node.sub_op}" for node in graph.nodes],
            "type": [node.type for node in graph.nodes],
            "dtype": [node.dtype for node in graph.nodes],
            "shape": [shape(node) for node in graph.nodes],
            "role": [node.role for node in graph.nodes],
            "layer": [-1 if node.layer is None else node.layer for node in graph.nodes],
            "state": state,
            "memory": "".join(memory_of(graph, i) for i in range(n)),
            "repacked": [int(node.kernel == "repack") for node in graph.nodes],
            "weight": [int(node.weight is not None) for node in graph.nodes],
            "ns": [round(int(ns[i]) / int(calls[i])) if calls[i] else None for i in range(n)],
            "calls": calls[:n].tolist(),
            "flops": cost[0],
            "bytes": cost[1],
        },
        "leaves": {
            "name": [clean(leaf.name, _NAME) for leaf in graph.leaves],
            "kind": [leaf.kind.value for leaf in graph.leaves],
            "type": [leaf.type for leaf in graph.leaves],
            "shape": [shape(leaf) for leaf in graph.leaves],
            "role": [leaf.role for leaf in graph.leaves],
            "bytes": [leaf.nbytes for leaf in graph.leaves],
        },
        "edges": sorted(set(graph.edges())),
        "inputs": sorted(
            {(s.leaf, node.index) for node in graph.nodes for s in node.sources if s.leaf is not None}
        ),
        "note": _graph_note(graph),
    }  # fmt: skip


def _state(graph: Graph, i: int, seen: Any, fused: Any, watched: bool) -> str:
    """By first letter: executed, fused, skipped, uncovered; ? where it cannot be told."""
    if seen[i]:
        return "e"
    if fused[i]:
        return "f"
    if graph.fault[i] or (graph.expected[i] and not watched):
        return "?"
    return "u" if graph.expected[i] else "s"


def _costs(table: Any, heads: set[int]) -> tuple[list[int | None], list[int | None]]:
    """FLOPs and bytes of each node as it ran: a fused pair's at its first node."""
    both = []
    for alone, fused in ((table.flops, table.fused_flops), (table.bytes, table.fused_bytes)):
        column: list[int | None] = []
        for i in range(len(alone)):
            value = 0 if i - 1 in heads else int(fused[i] if i in heads else alone[i])
            column.append(None if value < 0 else value)
        both.append(column)
    return both[0], both[1]


def _graph_note(graph: Graph) -> str | None:
    parts = []
    if graph.cut:
        parts.append(f"The engine's graph has {graph.n_nodes} nodes and was cut.")
    if graph.faults:
        parts.append(f"{graph.faults} nodes could not be read.")
    if graph.unresolved:
        parts.append(f"{graph.unresolved} sources were computed elsewhere and are not drawn.")
    return " ".join(parts) or None
