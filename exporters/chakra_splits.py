# SPDX-License-Identifier: Apache-2.0
"""A graph that runs on several backends: its parts in order, and what passes between them.

The engine's scheduler copies what a part needs from another one; the copy is a leaf of the part,
named ``backend#tensor#n``. By that name the maker is found.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ..agent.model.roles import plain_name
from ..agent.model.trace import Segment, Trace

_BACKEND, _CPU_LEVEL = 9, 10
_CPU = "CPU"


@dataclass(frozen=True, slots=True)
class Transfer:
    """Tensor ``name`` of ``size`` bytes (None: unknown) from backend ``source`` to ``target``.

    In the part that makes it ``node`` is set, in the part that needs it ``leaf``.
    """

    number: int
    name: str
    size: int | None
    source: int
    target: int
    node: int | None = None
    leaf: int | None = None


def executions(s: Segment, backends: Sequence[str]) -> Iterator[tuple[int, list[int]]]:
    """(row of the outermost graph, rows of the parts that compute, in order), by time.

    Parts on the CPU are the CPU's own graphs, where kernels are seen; parts elsewhere are what was
    handed to their backend. A graph without parts is its own.
    """
    inner: dict[int, list[int]] = defaultdict(list)
    for row in np.flatnonzero(s.runs["parent"] >= 0).tolist():
        inner[int(s.runs["parent"][row])].append(row)
    roots = np.flatnonzero(s.runs["parent"] < 0)
    for root in roots[np.argsort(s.runs["begin"][roots], kind="stable")].tolist():
        parts = [row for row in inner[root] if _computes(s, row, backends)]
        parts.sort(key=lambda row: int(s.runs["begin"][row]))
        yield root, parts or [root]


def _computes(s: Segment, row: int, backends: Sequence[str]) -> bool:
    level, backend = int(s.runs["level"][row]), int(s.runs["backend"][row])
    if level == _CPU_LEVEL:
        return True
    name = backends[backend] if 0 <= backend < len(backends) else None
    return level == _BACKEND and name is not None and name != _CPU


def transfers(trace: Trace, parts: Sequence[tuple[int, int]]) -> list[tuple[Transfer, ...]]:
    """What passes between the parts of a graph, for each part. ``parts``: (graph, backend), in order."""
    makers: dict[str, tuple[int, int]] = {}  # name of a tensor -> (part, node), the latest
    found: list[list[Transfer]] = [[] for _ in parts]
    number = 0
    for part, (index, target) in enumerate(parts):
        graph = trace.graph(index)
        if graph is None:
            continue
        for place, leaf in enumerate(graph.leaves):
            maker = makers.get(plain_name(leaf.name)) if "#" in leaf.name else None
            if maker is None:
                continue
            about = (number, plain_name(leaf.name), leaf.nbytes, parts[maker[0]][1], target)
            found[maker[0]].append(Transfer(*about, node=maker[1]))
            found[part].append(Transfer(*about, leaf=place))
            number += 1
        for node in graph.nodes:
            if graph.expected[node.index] and node.name:
                makers[plain_name(node.name)] = (part, node.index)
    return [tuple(moved) for moved in found]
