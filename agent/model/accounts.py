# SPDX-License-Identifier: Apache-2.0
"""The books of the budget: debt, what was spent, and how a workload looks lately."""

from __future__ import annotations

import math
from collections.abc import Mapping

CAUSES = ("waits", "faults")
HOW = ("call", "graph", "op", "cycle", "engine_call", *CAUSES)
"""What is paid for: hits of probes on calls, graphs and operators, arming and disarming, hits on calls
that the catalogue describes by data (callbudget.py), and watching waits and page faults (causebudget.py)."""


class Account:
    """Seconds of cost that busy time has not paid for yet; money is not saved."""

    def __init__(self) -> None:
        self.debt_s = 0.0
        self.busy_s = 0.0
        self.spent = dict.fromkeys(HOW, 0.0)

    def pay(self, seconds: float, busy_s: float = 0.0) -> None:
        """``seconds`` of cost are allowed for ``busy_s`` more of busy time."""
        self.debt_s -= seconds
        self.busy_s += busy_s

    def charge(self, cost: Mapping[str, float]) -> None:
        """It was spent."""
        for how, seconds in cost.items():
            self.spent[how] += seconds
            self.debt_s += seconds

    def lapse(self) -> None:
        """All of a time was paid and charged: what is left over is not saved."""
        self.debt_s = max(0.0, self.debt_s)


class Rates:
    """Sums that fade with a time constant; quotients of them are the rates of late."""

    def __init__(self, fade_s: float) -> None:
        self._fade_s = fade_s
        self._wall = self._busy = self._would = self._graphs = 0.0
        self._cost = dict.fromkeys(HOW, 0.0)
        self.idle_s = math.inf
        self._graph_per_call = 0.0  # cost of graph probes per cost of token probes
        self._per_graph = 0.0
        self.last_busy_s = 0.0
        self.tokens_per_second: float | None = None

    def add(
        self,
        dt: float,
        busy_s: float,
        cost: Mapping[str, float],
        would: float,
        graphs: int,
        tokens_per_second: float | None,
    ) -> None:
        """What happened in ``dt`` seconds; ``would``: cost of its ``graphs`` were they armed."""
        # Fades with time in which something happened: an idle hour leaves the rates as they were.
        keep = math.exp(-dt / self._fade_s)
        self.last_busy_s = busy_s
        self._wall = self._wall * keep + dt
        self.idle_s = 0.0 if busy_s > 0 or graphs else self.idle_s + dt
        if busy_s > 0 or graphs:
            self._busy = self._busy * keep + busy_s
            self._would = self._would * keep + would
            self._graphs = self._graphs * keep + graphs
            for how, seconds in cost.items():
                self._cost[how] = self._cost[how] * keep + seconds
            if self._graphs > 0:
                self._per_graph = self._would / self._graphs
            if cost.get("graph", 0.0) > 0 and self._cost["call"] > 0:
                self._graph_per_call = self._cost["graph"] / self._cost["call"]
        if tokens_per_second is not None:
            old = self.tokens_per_second
            self.tokens_per_second = (
                tokens_per_second if old is None else old * keep + tokens_per_second * (1 - keep)
            )

    def restart(self) -> None:
        """Nothing was seen for a while: only what lasts is kept."""
        self._wall = self._busy = self._would = self._graphs = 0.0
        self._cost = dict.fromkeys(HOW, 0.0)
        self.tokens_per_second = None

    def recent(self) -> bool:
        """The target did something lately."""
        return self.idle_s <= 4 * self._fade_s

    def utilisation(self) -> float:
        """Busy share of the wall clock; above 1 with several graphs at a time."""
        if self._wall <= 0 or not self.recent():
            return 0.0
        return self._busy / self._wall

    def busy_s(self) -> float:
        """Busy seconds that the rates are made of, fading."""
        return self._busy

    def ratio(self, how: str) -> float:
        """Slowdown by one kind of cost."""
        return self._cost[how] / self._busy if self._busy > 0 else 0.0

    def always_on(self) -> float:
        """Slowdown by token and graph probes."""
        return self.ratio("call") + self.ratio("graph")

    def beside_ops(self) -> float:
        """Slowdown by everything but the operators."""
        return self.always_on() + self.ratio("engine_call") + self.causes()

    def causes(self) -> float:
        """Slowdown by watching waits and page faults."""
        return sum(self.ratio(how) for how in CAUSES)

    def graph_if_on(self) -> float:
        """Slowdown by graph probes if they were there, from when they were."""
        return self.ratio("call") * self._graph_per_call

    def op_ratio(self) -> float:
        """Slowdown by op probes while they are armed, before correction."""
        return self._would / self._busy if self._busy > 0 else 0.0

    def seconds_per_graph(self) -> float:
        """Of the wall clock, from graph to graph; 0: not known."""
        return self._wall / self._graphs if self._graphs > 0 and self.recent() else 0.0

    def cost_per_graph(self) -> float:
        """Seconds of op cost of one graph of the present mix, before correction; 0: not known."""
        return self._per_graph
