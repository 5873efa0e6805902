# SPDX-License-Identifier: Apache-2.0
"""Which graphs are known: descriptors on their way, plans of complete graphs, both bounded."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .graph import Graph, Incomplete, TypeTraits, build_graph
from .plans import OpKey, Plan
from .records import Records, group_by_seq
from .resize import Skeleton, resized

_Key = tuple[int, int]

_MAX_DESCS = 1 << 16
_MAX_SEQS = 256
_MAX_BOOK = 4096
#: How often a graph is asked for again before it is taken as it is.
_MAX_TRIES = 3


@dataclass(frozen=True, slots=True)
class Tables:
    """The engine's own names, by number."""

    ops: Sequence[str]
    types: Sequence[TypeTraits | None] | None
    unary: Sequence[str] = ()
    glu: Sequence[str] = ()


class PlanCache:
    """Plans by (tgid, hash), least recently used first.

    ``plans`` are remembered in all, the last ``graphs`` of them built with their graph.
    """

    def __init__(self, tables: Tables, *, plans: int, graphs: int) -> None:
        self.tables = tables
        """By which graphs are read from now on; may be replaced."""
        self._max_plans = max(plans, 1)
        self._max_graphs = max(graphs, 1)
        self._plans: OrderedDict[_Key, Plan] = OrderedDict()
        self._with_graph: OrderedDict[_Key, None] = OrderedDict()
        self._templates: OrderedDict[tuple[int, bytes], _Key] = OrderedDict()
        self._names: dict[OpKey, OpKey] = {}
        self._parts: OrderedDict[int, list[Records]] = OrderedDict()
        self._held = 0
        self._tries: OrderedDict[_Key, int] = OrderedDict()
        self._asked: OrderedDict[_Key, None] = OrderedDict()
        self.confirmed: list[_Key] = []
        self.resend: list[_Key] = []
        #: Told of every graph that is built: its key, nodes, descriptors, n_nodes, cut.
        self.built: Callable[[_Key, Graph, Records, int, bool], None] | None = None

    def __len__(self) -> int:
        return len(self._plans)

    @property
    def held(self) -> int:
        """Descriptors that no graph has asked for yet."""
        return self._held

    def get(self, tgid: int, hash: int) -> Plan | None:
        """The plan of a hash, if it is known and still remembered."""
        plan = self._plans.get((tgid, hash))
        if plan is not None:
            self._plans.move_to_end((tgid, hash))
        return plan

    def plans(self) -> list[tuple[int, Plan]]:
        """(tgid, plan) of all remembered ones."""
        return [(tgid, plan) for (tgid, _), plan in self._plans.items()]

    def take(self, descs: Records) -> None:
        """Descriptors as they arrive; those that no graph asks for fall out again."""
        if not len(descs):
            return
        for seq, part in group_by_seq(descs):
            # A copy: the slice would keep the whole drained array alive.
            self._parts.setdefault(seq, []).append(part.copy())
            self._held += len(part)
        while self._parts and (self._held > _MAX_DESCS or len(self._parts) > _MAX_SEQS):
            self._pop(next(iter(self._parts)))

    def build(self, tgid: int, hash: int, seq: int, n_nodes: int, *, cut: bool) -> bool:
        """Make the plan of a graph whose descriptors were sent as ``seq``; True if it is new.

        What is incomplete is asked for again; so is, a few times, a graph with nodes whose
        memory could not be read (case C10): it is used as it is meanwhile.
        """
        parts = self._pop(seq)
        key = (tgid, hash)
        if not parts:
            self._again(key)
            return False
        descs = np.concatenate(parts)
        skeleton = Skeleton.of(descs, n_nodes, cut=cut)
        sibling = self._sibling(tgid, skeleton)
        if skeleton is not None and sibling is not None and sibling.graph is not None:
            graph = resized(sibling.graph, skeleton, hash)
            self.confirmed.append(key)
            self._tries.pop(key, None)
            self._asked.pop(key, None)
            if self.built is not None:
                self.built(key, graph, descs, n_nodes, cut)
            return self._keep(key, graph, skeleton, sibling)
        built = build_graph(
            descs, n_nodes, self.tables.ops, self.tables.types,
            hash=hash, unary=self.tables.unary, glu=self.tables.glu, cut=cut,
        )  # fmt: skip
        if isinstance(built, Incomplete):
            self._again(key)
            return False
        if not built.faults or not self._again(key):
            self.confirmed.append(key)
            self._tries.pop(key, None)
        self._asked.pop(key, None)
        if self.built is not None:
            self.built(key, built, descs, n_nodes, cut)
        return self._keep(key, built, skeleton)

    def evict(self) -> list[tuple[_Key, Plan]]:
        """What no longer fits; the caller folds its sums."""
        gone = []
        while len(self._plans) > self._max_plans:
            key, plan = self._plans.popitem(last=False)
            self._with_graph.pop(key, None)
            gone.append((key, plan))
        return gone

    def want(self, tgid: int, hash: int, *, known: bool = True) -> None:
        """The kernel thinks that we know this graph, and we do not: once per loss.

        ``known`` False: it has only described it, in an execution that never ended, it seems.
        """
        key = (tgid, hash)
        if not known and key in self._tries:
            return  # it came, in parts, and is asked for as often as that is worth
        if key not in self._asked:
            self._asked[key] = None
            _bound(self._asked)
            self.resend.append(key)

    def _sibling(self, tgid: int, skeleton: Skeleton | None) -> Plan | None:
        """A plan, its graph not released, of the same nodes in other dimensions."""
        key = self._templates.get((tgid, skeleton.key)) if skeleton is not None else None
        plan = self._plans.get(key) if key is not None else None
        return plan if plan is not None and plan.graph is not None else None

    def _keep(self, key: _Key, graph: Graph, skeleton: Skeleton | None, sibling: Plan | None = None) -> bool:
        old = self._plans.get(key)
        if old is not None and old.facts.faults <= graph.faults:
            self._plans.move_to_end(key)
            return False
        if len(self._names) > _MAX_BOOK:
            self._names.clear()
        if skeleton is not None and sibling is not None:
            self._plans[key] = sibling.resized(graph, skeleton.dims())
        else:
            self._plans[key] = Plan.of(graph, self._names)
        if skeleton is not None:
            # The latest one, which keeps its graph longest.
            self._templates[key[0], skeleton.key] = key
            self._templates.move_to_end((key[0], skeleton.key))
            while len(self._templates) > self._max_graphs:
                self._templates.popitem(last=False)
        self._plans.move_to_end(key)
        self._with_graph[key] = None
        while len(self._with_graph) > self._max_graphs:
            oldest, _ = self._with_graph.popitem(last=False)
            self._plans[oldest].release()
        return True

    def _pop(self, seq: int) -> list[Records]:
        parts = self._parts.pop(seq, [])
        self._held -= sum(len(part) for part in parts)
        return parts

    def _again(self, key: _Key) -> bool:
        tries = self._tries.get(key, 0) + 1
        self._tries[key] = tries
        _bound(self._tries)
        if tries <= _MAX_TRIES:
            self.resend.append(key)
            return True
        return False


def _bound(book: OrderedDict[_Key, Any]) -> None:
    while len(book) > _MAX_BOOK:
        book.popitem(last=False)
