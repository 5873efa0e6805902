# SPDX-License-Identifier: Apache-2.0
"""From sums that the kernel keeps during bursts to counters over all graphs (design D7, D12).

Every graph execution is observed: topology, phase, seconds, and the slot its ops were summed
in, if they were. At the end of a burst the sums of each slot are read as differences. What
they mean for the graphs whose ops nobody summed is in ``ratio.py``; here the sums of a slot
are matched with the executions they belong to:

* A slot whose graph ran in two phases since the last reading (a prompt of one token has the
  shape of a decode step): seconds are split by the phases' graph seconds, calls by their
  executions, because one shape means one mix of ops.
* Executions that lost their probes while they ran have some nodes in the sums. Each node is
  scaled to the whole executions by its own calls; with no whole one the sums are dropped.
* More calls than executions (the end of one was lost, or is still to come): likewise.
  Fewer (the probes were not there): only as many executions count as summed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from .ratio import HISTOGRAM_BUCKETS, Floats, Kind, KindTotal, OpTotal, Sample, join

__all__ = ["Execution", "KindTotal", "OpTotal", "Sampler"]

Sums = npt.NDArray[Any]  # of struct node_sum


@dataclass(frozen=True, slots=True)
class Execution:
    """One graph execution that ended.

    ``slot``: the slot it was summed in (EF_SUMMED), None when it was not. ``whole``: False
    when probes went away while it ran (EF_DISARMED) or it never returned.
    """

    topology: str
    phase: str
    seconds: float
    slot: int | None = None
    whole: bool = True


@dataclass(slots=True)
class _Ran:
    graphs: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class _Slot:
    topology: str
    keys: list[Hashable]  # distinct
    key_of_node: npt.NDArray[np.intp]
    read: Sums
    whole: dict[str, _Ran] = field(default_factory=dict)  # by phase, since the last reading
    partial: int = 0

    def clear(self) -> None:
        self.whole.clear()
        self.partial = 0


class Sampler:
    """Counters of one target. Order of calls at the end of a burst:

    stop summing, let the summed executions end, :meth:`ran` with all of them, :meth:`read`
    for each slot, :meth:`end_burst`.

    ``min_graphs``, ``min_share``: how much a burst must have of a kind of graph before it
    speaks for what was not summed (else it is kept for the next burst). ``max_kinds``
    bounds the (topology, phase) pairs; the longest unseen is folded into its phase.
    """

    def __init__(self, *, min_graphs: int = 8, min_share: float = 0.05, max_kinds: int = 128) -> None:
        if min_graphs < 1 or not 0 < min_share <= 1 or max_kinds < 1:
            raise ValueError("min_graphs >= 1, 0 < min_share <= 1, max_kinds >= 1")
        self._min_graphs = min_graphs
        self._min_share = min_share
        self._max_kinds = max_kinds
        self._kinds: OrderedDict[tuple[str, str], Kind] = OrderedDict()
        self._folded: dict[str, KindTotal] = {}
        self._slots: dict[int, _Slot] = {}

    def give(self, slot: int, topology: str, keys: Sequence[Hashable], sums: Sums) -> None:
        """``slot`` now serves a graph: ``keys[n]`` is the op group of node n, ``sums`` its
        elements at this moment (zeroed by the caller, or min and max are another graph's).
        ValueError when the slot is in use or the lengths differ."""
        if slot in self._slots:
            raise ValueError(f"slot {slot} is in use")
        if len(keys) != len(sums):
            raise ValueError(f"{len(keys)} keys for {len(sums)} sums")
        index: dict[Hashable, int] = {}
        key_of_node = np.fromiter((index.setdefault(key, len(index)) for key in keys), np.intp, len(keys))
        self._slots[slot] = _Slot(topology, list(index), key_of_node, sums.copy())

    def take(self, slot: int) -> None:
        """``slot`` serves nothing any more. ValueError while its executions are unread."""
        state = self._slots[slot]
        if state.whole or state.partial:
            raise ValueError(f"slot {slot} has sums that were not read")
        del self._slots[slot]

    def ran(self, executions: Iterable[Execution]) -> None:
        """Executions that ended since the last call, each once.

        ValueError for one that was summed in a slot that serves another topology.
        """
        for execution in executions:
            if execution.slot is not None:
                slot = self._slots.get(execution.slot)
                if slot is None or slot.topology != execution.topology:
                    raise ValueError(f"slot {execution.slot} does not serve {execution.topology}")
                if execution.whole:
                    entry = slot.whole.setdefault(execution.phase, _Ran())
                    entry.graphs += 1
                    entry.seconds += execution.seconds
                else:
                    slot.partial += 1
            self._kind(execution.topology, execution.phase).ran(execution.seconds)

    def _kind(self, topology: str, phase: str) -> Kind:
        kind = self._kinds.get((topology, phase))
        if kind is None:
            kind = self._kinds[topology, phase] = Kind(topology, phase)
            if len(self._kinds) > self._max_kinds:
                _, old = self._kinds.popitem(last=False)
                old.finish()
                self._fold(old.total())
        self._kinds.move_to_end((topology, phase))
        return kind

    def _fold(self, total: KindTotal) -> None:
        before = self._folded.get(total.phase)
        self._folded[total.phase] = total if before is None else join(before, total)

    def read(self, slot: int, sums: Sums) -> None:
        """``sums``: the slot's elements now, when no execution writes to them.

        32-bit fields wrap: at most 2**32 calls of a node may lie between two readings.
        """
        state = self._slots[slot]
        if len(sums) != len(state.read):
            raise ValueError(f"slot {slot} has {len(state.read)} sums, not {len(sums)}")
        new = _difference(sums, state.read)
        state.read = sums.copy()
        whole = {phase: ran for phase, ran in state.whole.items() if ran.seconds > 0}
        graphs = sum(ran.graphs for ran in whole.values())
        seconds = sum(ran.seconds for ran in whole.values())
        state.clear()
        calls = new["calls"].astype(np.float64)
        seen = int(calls.max(initial=0))
        if not graphs or not seen:
            return
        counted = min(1.0, seen / graphs)  # of the executions, how many the sums hold
        scale = np.minimum(1.0, graphs * counted / np.maximum(calls, 1.0))
        n = len(state.keys)
        times: Floats = np.bincount(state.key_of_node, new["time"] * scale * 1e-9, n).astype(np.float64)
        seconds *= counted
        # Ops lie inside their graph; after scaling, their sum need not.
        times = times * min(1.0, seconds / max(float(times.sum()), 1e-12))
        node_calls = np.minimum(calls, graphs * counted)
        key_calls = np.bincount(state.key_of_node, node_calls, n)
        key_fused = np.bincount(state.key_of_node, new["fused"] * scale, n)
        shortest, longest = np.full(n, np.inf), np.zeros(n)
        called = calls > 0
        np.minimum.at(shortest, state.key_of_node[called], sums["min"][called])
        np.maximum.at(longest, state.key_of_node[called], sums["max"][called])
        buckets = np.zeros((n, HISTOGRAM_BUCKETS))
        np.add.at(buckets, state.key_of_node, new["bucket"] * scale[:, None])
        left = round(graphs * counted)
        for phase, ran in whole.items():
            mine = min(left, round(ran.graphs * counted))
            left -= mine
            self._share(
                self._kind(state.topology, phase),
                Sample(
                    keys=state.keys,
                    times=times * (ran.seconds * counted / seconds),
                    calls=key_calls * ran.graphs / graphs,
                    fused=key_fused * ran.graphs / graphs,
                    shortest=shortest,
                    longest=longest,
                    buckets=buckets * (ran.graphs / graphs),
                    graphs=mine,
                    graph_seconds=ran.seconds * counted,
                ),
            )

    @staticmethod
    def _share(kind: Kind, sample: Sample) -> None:
        if sample.graphs and sample.graph_seconds > 0:
            kind.sampled(sample)

    def end_burst(self) -> int:
        """Attribute what was read; how many kinds of graph moved."""
        return sum(kind.attribute(self._min_graphs, self._min_share) for kind in self._kinds.values())

    def finish(self) -> None:
        """The end of the session: also the rest goes to the ops of kinds that were sampled."""
        for kind in self._kinds.values():
            kind.finish()

    def kinds(self) -> tuple[KindTotal, ...]:
        """Counters per (topology, phase); kinds folded away come last, with topology ""."""
        return (*(kind.total() for kind in self._kinds.values()), *self._folded.values())

    def phases(self) -> dict[str, KindTotal]:
        """Counters per phase, over all topologies: these never go backwards."""
        result = dict(self._folded)
        for kind in self._kinds.values():
            total = kind.total()
            result[kind.phase] = join(result[kind.phase], total) if kind.phase in result else total
        return result


def _difference(now: Sums, before: Sums) -> dict[str, Floats]:
    """What was added, per field; unsigned arithmetic undoes one wrap."""
    fields = ("time", "calls", "fused", "bucket")
    return {name: (now[name] - before[name]).astype(np.float64) for name in fields}
