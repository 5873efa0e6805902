# SPDX-License-Identifier: Apache-2.0
"""A machine with targets that the budget's controller is tested on: what hits really cost."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from profinferd.agent.model.budget import (
    BudgetConfig,
    Controller,
    Decision,
    Level,
    Load,
    PhaseLoad,
    Prices,
    Transition,
)
from profinferd.agent.model.overhead import Interval
from profinferd.agent.pace import Pace


@dataclass
class Workload:
    """What a target does: decode speed without probes, op hits of one graph, ns of one hit."""

    rate: float = 50.0
    hits: int = 402
    op_ns: float = 1000.0
    always_ns: float = 2000.0
    cycle_ns: float = 700_000.0
    busy: bool = True
    present: bool = True
    noise: float = 0.0
    in_burst: Interval | None = None
    in_burst_estimate: float | None = None


@dataclass
class Tick:
    """What one target did and paid in one tick, and what was decided at its end."""

    at_s: float
    busy_s: float
    cost_s: float
    cycle_s: float  # of that, for arming
    graphs: int
    summed: int
    decision: Decision


@dataclass
class Plant:
    """Targets run as their workload says at each moment; decisions take effect at once."""

    config: BudgetConfig
    workload: Callable[[str, float], Workload]
    names: tuple[str, ...] = ("t",)
    dt: float = 0.1
    seed: int = 1
    paced: bool = False
    """Ticks come as far apart as the product lets them, instead of every ``dt`` seconds."""
    history: dict[str, list[Tick]] = field(default_factory=dict)

    def run(self, seconds: float) -> Plant:
        controller = Controller(self.config)
        rng = random.Random(self.seed)
        decisions: dict[str, Decision] = {}
        due = dict.fromkeys(self.names, 0.0)
        self.history = {name: [] for name in self.names}
        now, step, pace = -self.dt, -1, Pace()
        while now < seconds - self.dt / 2:
            if self.paced and decisions:
                left = [d.burst_left_s for d in decisions.values() if d.burst_left_s is not None]
                self.dt = pace.pause(self.dt, 0.01 * self.dt, burst_s=min(left, default=None))
            now, step = now + self.dt, step + 1
            loads, done = [], {}
            for name in self.names:
                work = self.workload(name, now)
                if not work.present:
                    decisions.pop(name, None)
                    continue
                load, cost, graphs = self._step(name, work, decisions.get(name), due, rng, step)
                loads.append(load)
                done[name] = (load, cost, graphs)
            armed = {name: d.armed for name, d in decisions.items()}
            decisions = controller.tick(now, loads)
            for name, (load, cost, graphs) in done.items():
                d = decisions[name]
                cycle = load.prices.cycle_ns * 1e-9 if d.armed and not armed.get(name) else 0.0
                self.history[name].append(Tick(now, load.busy_s, cost + cycle, cycle, graphs, load.summed, d))
        return self

    def _step(
        self,
        name: str,
        work: Workload,
        decision: Decision | None,
        due: dict[str, float],
        rng: random.Random,
        step: int,
    ) -> tuple[Load, float, int]:
        prices = Prices(work.always_ns, work.always_ns, work.op_ns, work.cycle_ns)
        if not work.busy or step == 0:
            return Load(name, prices), 0.0, 0
        level = decision.level if decision else Level.GRAPH
        armed = decision is not None and decision.armed
        always = 2e-9 * work.always_ns * ((level >= Level.TOKEN) + (level >= Level.GRAPH))
        per_graph = work.hits * work.op_ns * 1e-9 * armed + always
        speed = 1 / (1 / work.rate + per_graph)
        if work.noise:
            speed *= max(0.1, rng.gauss(1, work.noise))
        due[name] += speed * self.dt
        graphs = int(due[name])
        due[name] -= graphs
        seen = level >= Level.GRAPH
        load = Load(
            name,
            prices,
            busy_s=self.dt if level >= Level.TOKEN else 0.0,
            phases={"decode": PhaseLoad(graphs, work.hits)} if seen else {},
            call_hits=2 * graphs if level >= Level.TOKEN else 0,
            graph_hits=2 * graphs if seen else 0,
            op_hits=graphs * work.hits if armed else 0,
            summed=graphs if armed else 0,
            summing=int(decision is not None and decision.summing),
            tokens_per_second=speed if level >= Level.TOKEN else None,
            in_burst=work.in_burst,
            in_burst_estimate=work.in_burst_estimate,
        )
        return load, graphs * per_graph, graphs

    # ---- what tests ask ---------------------------------------------------------------

    def window(self, begin_s: float, end_s: float) -> tuple[float, float]:
        """(cost, busy) seconds of the ticks in (begin, end]."""
        ticks = [t for n in self.names for t in self.history[n] if begin_s < t.at_s <= end_s]
        return sum(t.cost_s for t in ticks), sum(t.busy_s for t in ticks)

    def cycles(self, name: str) -> list[tuple[float, float]]:
        """(cost, busy) from each burst's begin to the next one's."""
        result: list[tuple[float, float]] = []
        bursts = 0
        for tick in self.history[name]:
            # A tick's work was done before its decision.
            if result:
                cost, busy = result[-1]
                result[-1] = (cost + tick.cost_s - tick.cycle_s, busy + tick.busy_s)
            if tick.decision.bursts > bursts:
                bursts = tick.decision.bursts
                result.append((tick.cycle_s, 0.0))
        return result[:-1]  # the last one is not over

    def transitions(self, name: str) -> list[Transition]:
        return [change for tick in self.history[name] for change in tick.decision.transitions]

    def level(self, name: str) -> Level:
        return self.history[name][-1].decision.level
