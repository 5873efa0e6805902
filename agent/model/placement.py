# SPDX-License-Identifier: Apache-2.0
"""Which operators ran on which backend, and in which shapes, where work is offloaded. Pure."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from .placementdata import Placement, Shape
from .plans import Plan
from .tensors import Graph, Node
from .tokens import Phase

MAX_SHAPES = 16
"""Shapes that are kept of one operator on one backend; the rest is counted together."""
_MAX_KEYS = 2048
_MAX_PROFILES = 256
_MAX_WAITING = 1024

Dims = tuple[int, ...]


class _Kind(NamedTuple):
    op: str
    dtype: str
    role: str
    sources: tuple[Dims, ...]
    result: Dims


class _Key(NamedTuple):
    backend: str
    phase: Phase
    op: str
    dtype: str
    role: str


@dataclass(slots=True)
class _Total:
    count: int = 0
    shapes: dict[tuple[tuple[Dims, ...], Dims], int] = field(default_factory=dict)


class Placements:
    """Executions of splits, added up by what their nodes are.

    Only fed where some backend besides the CPU took work: else everything ran in one place.
    """

    def __init__(self) -> None:
        self._ran: OrderedDict[tuple[int, int], Counter[tuple[Phase, str]]] = OrderedDict()
        self._profiles: OrderedDict[tuple[int, int], Mapping[_Kind, int]] = OrderedDict()
        self._totals: dict[_Key, _Total] = {}
        self.unknown = 0
        """Splits that ran and whose nodes never became known."""
        self.dropped = 0
        """Operators that ran and found no room."""
        self._fed = False

    def ran(self, tgid: int, hash: int, phase: Phase, backend: str, plan: Plan | None) -> None:
        """One execution of a split."""
        self._fed = True
        key = (tgid, hash)
        self._ran.setdefault(key, Counter())[phase, backend] += 1
        if plan is not None and plan.graph is not None and key not in self._profiles:
            self._profiles[key] = _profile(plan.graph)
        while len(self._profiles) > _MAX_PROFILES:
            oldest = next(iter(self._profiles))
            self._fold(oldest)
            del self._profiles[oldest]
        while len(self._ran) > _MAX_WAITING:
            oldest = next(iter(self._ran))
            self._fold(oldest)
            self.unknown += sum(self._ran.pop(oldest, Counter()).values())

    def all(self) -> tuple[Placement, ...] | None:
        """Everything so far, by backend, the most frequent first. None: nothing was offloaded."""
        if not self._fed:
            return None
        for key in list(self._ran):
            self._fold(key)
        order = sorted(self._totals.items(), key=lambda item: (item[0].backend, -item[1].count, item[0]))
        return tuple(_placement(key, total) for key, total in order)

    def _fold(self, key: tuple[int, int]) -> None:
        profile = self._profiles.get(key)
        if profile is None:
            return
        for (phase, backend), runs in self._ran.pop(key, Counter()).items():
            for kind, nodes in profile.items():
                self._add(_Key(backend, phase, kind.op, kind.dtype, kind.role), kind, nodes * runs)

    def _add(self, key: _Key, kind: _Kind, count: int) -> None:
        total = self._totals.get(key)
        if total is None:
            if len(self._totals) >= _MAX_KEYS:
                self.dropped += count
                return
            total = self._totals[key] = _Total()
        total.count += count
        shape = (kind.sources, kind.result)
        if shape in total.shapes or len(total.shapes) < MAX_SHAPES:
            total.shapes[shape] = total.shapes.get(shape, 0) + count


def _profile(graph: Graph) -> Mapping[_Kind, int]:
    """What the nodes of a graph are that run a kernel, and how many of each."""
    found: Counter[_Kind] = Counter()
    for node, runs in zip(graph.nodes, graph.expected.tolist(), strict=True):
        if runs:
            found[_Kind(node.op, node.dtype, node.role, _sources(graph, node), _dims(node.ne))] += 1
    return found


def _sources(graph: Graph, node: Node) -> tuple[Dims, ...]:
    """Of its sources, in their order; one that is computed elsewhere and was not described is left out."""
    tensors = (graph.tensor(source) for source in node.sources)
    return tuple(_dims(tensor.ne) for tensor in tensors if tensor is not None)


def _dims(ne: tuple[int, ...]) -> Dims:
    """Without the ones at the end."""
    last = max((i for i, n in enumerate(ne) if n != 1), default=0)
    return tuple(ne[: last + 1])


def _placement(key: _Key, total: _Total) -> Placement:
    order = sorted(total.shapes.items(), key=lambda item: (-item[1], item[0]))
    shapes = tuple(Shape(sources, result, count) for (sources, result), count in order)
    return Placement(
        key.backend, key.phase.value, key.op, key.dtype, key.role, total.count, shapes,
        total.count - sum(shape.count for shape in shapes),
    )  # fmt: skip
