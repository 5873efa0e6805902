# SPDX-License-Identifier: Apache-2.0
"""Our own programs on our own victim, and how often they must have run.

Everything that is measured is attached once; beside each probed function lies one with the
same code that is not probed, so that a cost is the difference of two calls one right after
the other, and nothing has to be attached and detached between them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from types import TracebackType
from typing import Self

import numpy as np

from ..errors import MachineError
from . import victim_code, victim_graph
from .programs import GgmlPrograms, Probe
from .victim import Victim

LAYOUT = 15
"""Entry of the map "layouts": the last one, so that a target may have the first meanwhile."""
_GROUP = "calibration"
_ROUNDS = 256
"""Calls or graphs at a time, at most: the ring "events" holds a thousand records."""
_LAST_SLOT, _SUMS = 255, 65536
"""Of the maps "owners" and "sums" (MAX_SLOTS, MAX_SUMS of events.h)."""
_WORDS = 64
"""Where in the victim's data the words of ``watch`` lie; the graph comes behind."""


class Bench:
    """A victim and the loaded programs. Close it; the programs belong to the caller.

    ``made``: what the programs must have counted of this bench, by name of ``stats()``.
    """

    def __init__(self, programs: GgmlPrograms, victim: Victim) -> None:
        self.programs = programs
        self.victim = victim
        self.made: Counter[str] = Counter()
        self._constants = programs.types.constants()
        self._before = programs.stats()
        self._hash: int | None = None
        base = victim.data_address + _WORDS
        content, self._graph = victim_graph.build(base)
        victim.data[_WORDS : _WORDS + len(content)] = content
        self._tgid = victim.pid

    @staticmethod
    def data_size() -> int:
        """Bytes that a victim must share."""
        return _WORDS + victim_graph.size()

    # ---- attaching ----------------------------------------------------------------------

    def open(self, *, stepped: bool, calls_at: Collection[str]) -> None:
        """Attach to the emulated sites, to the stepped ones if wanted, to calls at those named."""
        op, graph, call = (self._constants[n] for n in ("OPP_DISPATCH", "LV_CPU", "LV_DECODE"))
        probes = [self._probe(op, "op"), self._probe(graph, "run", True)]
        if stepped:
            probes += [self._probe(op, "op_stepped"), self._probe(graph, "graph_stepped", True)]
        probes += [self._probe(call, _at("call", site), True) for site in calls_at]
        state = {"state": self._constants["LY_CHOSEN"]}
        self.programs.set_layout(LAYOUT, {**victim_graph.FIELDS, **state})
        self.set_mode("trace")
        self.programs.attach(_GROUP, self.victim.path, self._tgid, probes)
        self._meet_graph()

    @staticmethod
    def _probe(level: int, name: str, returns: bool = False) -> Probe:
        return Probe(level, victim_code.offset(name), 0, returns)

    def set_mode(self, mode: str) -> None:
        """``trace`` or ``sum``: what op hits of graphs that begin from now on do."""
        number = self._constants["OPS_SUM" if mode == "sum" else "OPS_TRACE"]
        self.programs.set_target(self._tgid, layout=LAYOUT, mode=number)

    def _meet_graph(self) -> None:
        """Have the graph described, walked and known, as an engine's is from its second run on."""
        self.victim.call("run", self._graph.known, self.victim.function("plain"))
        events = self.programs.drain().events
        begun = events[(events["tgid"] == self._tgid) & (events["kind"] == self._constants["EV_GRAPH_BEGIN"])]
        if len(begun) != 1 or begun[0]["flags"] & self._constants["EF_FAULT"] or not begun[0]["n_pos"]:
            raise MachineError("the probes cannot read the graph of a process of ours", "report this kernel")
        self.made["hits_graph"] += 2
        self.made["walked"] += victim_graph.NODES
        self._hash = int(begun[0]["hash"])
        self.programs.confirm(self._tgid, self._hash)
        # The last slot and the last sums: a session gives them out from the first one on.
        self.programs.give_slot(self._tgid, self._hash, _LAST_SLOT, _SUMS - victim_graph.NODES)

    # ---- measuring ----------------------------------------------------------------------

    def sample(self, kind: str, site: str, mode: str, count: int) -> float:
        """ns of one hit, pair or node (see ``calibration.HitCost``), measured over ``count``.

        Of op hits and nodes, ``count`` is that of the graphs they are in.
        """
        if kind == "op":
            return self._op(site, mode, count)
        if kind == "walk":
            return self._walk(count)
        measures = {"other_thread": self._other_thread, "graph": self._graphs, "call": self._calls}
        return measures[kind](site, count)

    def _op(self, site: str, mode: str, graphs: int) -> float:
        """An op hit on thread 0, over ``graphs`` executions."""
        victim, name = self.victim, _at("op", site)
        self.set_mode(mode)
        run, graph = victim.function("run"), self._graph.known
        without = victim.call("repeat", run, graph, victim.function(_at("plain", site)), graphs)
        self._drain(graphs, mode, 0)
        probed = victim.call("repeat", run, graph, victim.function(name), graphs)
        hits = graphs * victim_graph.KERNELS
        self._drain(graphs, mode, hits)
        self.made["hits_graph"] += 4 * graphs
        self.made["hits_op"] += hits
        return (probed - without) / hits

    def _other_thread(self, site: str, hits: int) -> float:
        """An op hit on a thread that runs no graph."""
        self.made["hits_other_thread"] += hits
        return self._difference(_at("op", site), _at("plain", site), 0, self._graph.tensor, hits)

    def _graphs(self, site: str, pairs: int) -> float:
        """Entry and return of a graph that is recognised."""
        pairs = min(pairs, _ROUNDS)
        self.set_mode("trace")
        probed, plain = ("run", "plain_run") if site == "emulated" else ("graph_stepped", "plain_stepped")
        op = self.victim.function("plain")  # what graphs with nodes to run call; not probed
        cost = self._difference(probed, plain, self._graph.known, op, pairs)
        self.made["hits_graph"] += 2 * pairs
        self._drain(pairs, "trace", 0)
        return cost

    def _calls(self, site: str, pairs: int) -> float:
        """Entry and return of a call."""
        pairs = min(pairs, _ROUNDS)
        cost = self._difference(_at("call", site), _at("plain", site), 0, self._graph.batch, pairs)
        self.made["hits_call"] += 2 * pairs
        self._drain(0, "", 0)
        return cost

    def _walk(self, graphs: int) -> float:
        """One node of a graph that is looked at as a whole."""
        victim, graphs = self.victim, min(graphs, _ROUNDS)
        self.set_mode("trace")
        run, op = victim.function("run"), victim.function("plain")
        known = victim.call("repeat", run, self._graph.known, op, graphs)
        walked = victim.call("repeat", run, self._graph.walked, op, graphs)
        self.made["hits_graph"] += 4 * graphs
        self.made["walked"] += graphs * victim_graph.NODES
        self._drain(2 * graphs, "trace", 0)
        return (walked - known) / graphs / victim_graph.NODES

    def _difference(self, probed: str, plain: str, a: int, b: int, times: int) -> float:
        victim = self.victim
        without = victim.call("repeat", victim.function(plain), a, b, times)
        return (victim.call("repeat", victim.function(probed), a, b, times) - without) / times

    def _drain(self, graphs: int, mode: str, accepted: int) -> None:
        """Take the records out of the rings, and see that the programs did what is measured."""
        events = self.programs.drain().events
        events = events[events["tgid"] == self._tgid]
        begun = events[events["kind"] == self._constants["EV_GRAPH_BEGIN"]]
        ended = events[events["kind"] == self._constants["EV_GRAPH_END"]]
        wanted = self._constants["EF_KNOWN"]
        if mode:
            wanted |= self._constants["EF_SUMMED" if mode == "sum" else "EF_TRACED"]
        if len(begun) != graphs or not np.all(begun["flags"] == wanted):
            raise self._wrong(f"{graphs} graphs", f"{int(np.sum(begun['flags'] == wanted))}")
        if (seen := int(ended["accepted"].sum())) != accepted:
            raise self._wrong(f"{accepted} op hits", f"{seen}")

    @staticmethod
    def _wrong(made: str, seen: str) -> MachineError:
        return MachineError(
            f"the probes cannot be measured: of {made} of our own process they saw {seen}",
            "try another --attach-method, and report this kernel",
        )

    def verify(self) -> None:
        """Raise MachineError unless every hit was counted and nothing was lost."""
        now = self.programs.stats()
        seen = {name: now[name] - self._before[name] for name in now}
        for name, made in {**dict.fromkeys(seen, 0), **self.made}.items():
            counts = name.startswith("hits_") or name == "walked"
            if counts and seen[name] != made:
                raise self._wrong(f"{made} {name}", f"{seen[name]}")
            if not counts and seen[name]:
                raise self._wrong("all hits", f"{seen[name]} fewer ({name})")

    # ---- arming -------------------------------------------------------------------------

    def arm(self) -> None:
        """Attach two op probes to functions that nobody calls."""
        dispatch, fused = self._constants["OPP_DISPATCH"], self._constants["OPP_FUSED2"]
        probes = [self._probe(dispatch, "armed"), self._probe(fused, "armed_too")]
        self.programs.attach(_GROUP + "-cycle", self.victim.path, self._tgid, probes)

    def disarm(self) -> None:
        """Take them away."""
        self.programs.detach(_GROUP + "-cycle")

    def close(self) -> None:
        """Detach and forget the victim and its graph."""
        self.disarm()
        self.programs.detach(_GROUP)
        if self._hash is not None:
            self.programs.resend(self._tgid, self._hash)
            self._hash = None
        self.programs.forget_target(self._tgid)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _at(name: str, site: str) -> str:
    return f"{name}_stepped" if site == "stepped" else name
