# SPDX-License-Identifier: Apache-2.0
"""The overhead budget: when op probes are armed, for how long, and what is shed (design D6).

The budget is a slowdown: cost on the target's critical path over the seconds it was busy.
Each target has an account in seconds of cost. Busy time pays in at the budget's rate, every
probe hit and every arm/disarm cycle is charged; nothing can be saved up, there is only debt.
A burst may begin when the debt is paid and ``period_s`` has passed since the last one began,
so the cost from one burst's begin to the next is within the budget of that time by
construction, whatever the workload does meanwhile: if hits turn out dearer than planned the
burst is cut at its allowance and, for what it overshot, the next one waits. A burst is
planned for ``planned_share`` (< 1/2) of a period's budget: two bursts in any one stretch of
``period_s`` are then within it too. Where even ``min_graphs`` cost more, the period grows.

All targets share a second account, which the wall clock pays into: together they cost the
machine no more than the budget either. A period's money is divided among the active ones,
and who has waited longest goes first. Bursts of several targets may overlap as long as all
they may cost fits into one period's budget.

A burst is armed also while its target idles: this costs it nothing and is the one way to
meet the first graphs of a request, its prefill. Only every other burst may begin so;
otherwise decode would always be sampled at its shortest KV length.

What is shed when the budget or ``qos_min_tokens_per_second`` is not kept: op, then graph,
then token level (``levels.py``). Times are seconds of the caller's clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from .accounts import CAUSES, HOW, Account, Rates
from .budgetdata import BudgetConfig, Burst, Decision, Load, PhaseLoad, Prices
from .callbudget import FILL
from .levels import Level, LevelMachine, Transition, Verdict

__all__ = [
    "BudgetConfig",
    "Burst",
    "Controller",
    "Decision",
    "Level",
    "Load",
    "PhaseLoad",
    "Prices",
    "Transition",
]

#: Without activity for so long, a target idles.
IDLE_S = 1.0
#: So long a target is only watched whose first graphs are still to come.
FIRST_LOOK_S = 0.25
#: Hits are counted when they happen and busy time when a graph's call is known: of less busy time
#: than this no ratio is made (9 ms of a target that waited for a core were charged for 20).
LEAST_BUSY_S = 0.1
_GOLDEN = 0.6180339887498949
_MAX_CORRECTION = 20.0


@dataclass(slots=True)
class _Running:
    burst: Burst
    begun_s: float
    cost_s: float
    first_graph_s: float | None = None
    graphs: int = 0
    closing_since: float | None = None

    def left_s(self, now_s: float) -> float:
        """Seconds until its graphs, its allowance or its time are used up, at the rates so far."""
        if self.closing_since is not None:
            return 0.0
        passed = 0.0 if self.first_graph_s is None else now_s - self.first_graph_s
        if not self.graphs or passed <= 0:
            return max(0.0, self.burst.expected_s - passed)
        rest = (self.burst.graphs - self.graphs) / self.graphs
        if self.cost_s > 0:
            rest = min(rest, (self.burst.allowance_s - self.cost_s) / self.cost_s)
        return max(0.0, min(passed * rest, self.burst.max_seconds - passed))


@dataclass(slots=True)
class _Target:
    levels: LevelMachine
    rates: Rates
    account: Account
    first_seen_s: float
    last_end_s: float
    next_at_s: float
    running: _Running | None = None
    activity: str = "waiting for the first graphs"
    active: bool = False  # something ran since the last tick
    from_idle: bool = False
    defer_s: float = 0.0  # busy seconds that a burst after an idle one still lets pass
    draws: int = 0
    bursts: int = 0
    cut: int = 0
    correction: float = 1.0
    prices: Prices = field(default_factory=lambda: Prices(0, 0, 0, 0))


class Controller:
    """Decides at each tick. Ticks may come at any interval; what a burst may overshoot is
    what happens between two of them, so ticks during a burst should be short (0.1 s)."""

    def __init__(self, config: BudgetConfig) -> None:
        self.config = config
        self._targets: dict[str, _Target] = {}
        self._machine = Account()
        self._now_s: float | None = None

    def tick(self, now_s: float, loads: Iterable[Load]) -> dict[str, Decision]:
        """One decision per target in ``loads``; a target that is not in it has ended.

        ValueError when time runs backwards or a target comes twice.
        """
        dt = 0.0 if self._now_s is None else now_s - self._now_s
        if dt < 0:
            raise ValueError("time runs backwards")
        self._now_s = now_s
        by_name = {}
        for load in loads:
            if load.target in by_name:
                raise ValueError(f"target {load.target} comes twice")
            by_name[load.target] = load
        self._targets = {
            name: self._targets.get(name) or self._new(name, now_s, i) for i, name in enumerate(by_name)
        }
        self._machine.pay(self.config.budget_ratio * dt)
        for name, load in by_name.items():
            self._observe(now_s, dt, self._targets[name], load)
        # Only when all have been charged: what one leaves over is there for the others.
        self._machine.lapse()
        transitions: dict[str, tuple[Transition, ...]] = {}
        waiting = False
        for name in sorted(by_name, key=lambda n: self._targets[n].last_end_s):
            target, load = self._targets[name], by_name[name]
            change = target.levels.step(now_s, self._verdict(target))
            transitions[name] = (change,) if change else ()
            if change and change.before == Level.NOTHING:
                target.rates.restart()
            if target.running:
                self._continue(now_s, dt, target, target.running, load)
            elif not waiting:
                waiting = self._begin(now_s, target)
        return {name: self._decision(now_s, name, transitions[name]) for name in by_name}

    def _new(self, name: str, now_s: float, draws: int) -> _Target:
        period = self.config.period_s
        levels = LevelMachine(
            name,
            confirm_s=period / 4,
            settle_s=period,
            hold_s=2 * period,
            max_hold_s=64 * period,
            top=self.config.top,
        )
        return _Target(levels, Rates(period / 4), Account(), now_s, float("-inf"), now_s, draws=draws)

    def _observe(self, now_s: float, dt: float, target: _Target, load: Load) -> None:
        prices = target.prices = load.prices
        cost = {
            "call": load.call_hits * prices.call_ns * 1e-9,
            "graph": (load.graph_hits * prices.graph_ns + load.walked * prices.walk_ns) * 1e-9,
            "op": load.op_hits * prices.op_ns * 1e-9 * target.correction,
            "engine_call": load.engine_calls_s,
            **{how: load.causes_s.get(how, 0.0) for how in CAUSES},
        }
        would = sum(p.graphs * p.hits_per_graph for p in load.phases.values()) * prices.op_ns * 1e-9
        graphs = sum(p.graphs for p in load.phases.values() if p.hits_per_graph)
        target.active = load.busy_s > 0 or graphs > 0 or load.summing > 0
        target.rates.add(dt, load.busy_s, cost, would, graphs, load.tokens_per_second)
        target.account.pay(self.config.budget_ratio * load.busy_s, load.busy_s)
        self._charge(target, cost)
        target.account.lapse()
        if target.running:
            target.running.cost_s += cost["op"]
        elif load.in_burst is not None and load.in_burst_estimate:
            # Moved only as far as the measurement insists, and never below calibration.
            low = max(0.0, load.in_burst.low) / load.in_burst_estimate
            high = max(0.0, load.in_burst.high) / load.in_burst_estimate
            target.correction = min(_MAX_CORRECTION, max(1.0, low, min(target.correction, high)))

    def _charge(self, target: _Target, cost: Mapping[str, float]) -> None:
        target.account.charge(cost)
        self._machine.charge(cost)

    def _graph_cost(self, target: _Target) -> float:
        return target.rates.cost_per_graph() * target.correction

    def _always_on(self, target: _Target) -> float:
        return target.rates.always_on() if target.rates.busy_s() >= LEAST_BUSY_S else 0.0

    def _least(self, target: _Target) -> float:
        """Cost of the shortest burst worth having."""
        return target.prices.cycle_ns * 1e-9 + self.config.min_graphs * self._graph_cost(target)

    def _payback(self, target: _Target) -> float:
        """Busy seconds that pay for the shortest burst."""
        rates = target.rates
        room = max(0.0, self.config.budget_ratio - rates.always_on())
        # What waits and page faults take beyond their part is shed within a second, and no reason
        # to shed operators for longer than that.
        free = room - rates.ratio("engine_call") - min(rates.causes(), FILL * room)
        return self._least(target) / free if free > 0 else float("inf")

    def _armed_slowdown(self, target: _Target) -> float:
        return target.rates.op_ratio() * target.correction

    def _verdict(self, target: _Target) -> Verdict:
        config, rates, level = self.config, target.rates, target.levels.level
        if level == Level.NOTHING:
            # Nothing is known of a target without probes: only a trial tells.
            return Verdict(fits=True, why_fits="trial after a pause")
        if not rates.recent():
            return Verdict()
        enough = rates.busy_s() >= LEAST_BUSY_S
        for lowest, ratio, what in (
            (Level.TOKEN, rates.ratio("call"), "token probes"),
            (Level.GRAPH, rates.always_on(), "token and graph probes"),
        ):
            if level >= lowest and ratio > config.budget_ratio and enough:
                return Verdict(f"budget: {what} alone cost {ratio:.2%}")
        payback = self._payback(target)
        if level == Level.OP and payback > config.max_period_s and enough:
            return Verdict(f"budget: a burst of {config.min_graphs} graphs takes {payback:.0f} s to pay for")
        floor, rate = config.qos_min_tokens_per_second, rates.tokens_per_second
        need = 0.0
        if floor is not None and rate is not None:
            armed = 1 + self._armed_slowdown(target)
            need = floor * (armed if level == Level.OP and not target.running else 1.0)
            if rate < need:
                return Verdict(f"qos: {rate:.1f} tokens/s, {floor:g} wanted", known=False)
            need = floor * (armed if level == Level.GRAPH else 1.0) * (1 + config.margin)
        if floor is not None and (rate is None or rate < need):
            return Verdict()
        if level == Level.TOKEN:
            fits = rates.ratio("call") + rates.graph_if_on() <= 0.7 * config.budget_ratio
        else:
            fits = payback <= 0.7 * config.max_period_s
        return Verdict(fits=fits, why_fits="recovered: budget and token rate allow it again")

    def _begin(self, now_s: float, target: _Target) -> bool:
        """Arm if it is time; True when the target waits for the machine's account alone."""
        config = self.config
        if target.levels.level < Level.OP:
            target.activity = "op level shed"
            return False
        floor, rate = config.qos_min_tokens_per_second, target.rates.tokens_per_second
        if floor is not None and rate is not None and rate < floor * (1 + self._armed_slowdown(target)):
            target.activity = "waiting: token rate too close to its floor"
            return False
        # A look at the workload before the first plan; where nothing happens, the sooner we are
        # armed the likelier we meet the first prompt.
        look = IDLE_S if math.isfinite(target.rates.idle_s) else FIRST_LOOK_S
        if now_s - target.first_seen_s < look and not self._graph_cost(target):
            return False
        if now_s < target.next_at_s:
            target.activity = "waiting for the next period"
            return False
        share = config.planned_share * config.budget_ratio * config.period_s
        if target.account.debt_s > 0.01 * share:
            target.activity = "waiting: the last burst is not paid for"
            return False
        if target.defer_s > 0 and target.from_idle:
            target.defer_s -= target.rates.last_busy_s
            target.activity = "waiting: not at the start of a request again"
            return False
        burst = self._plan(target)
        running = [t.running for t in self._targets.values() if t.running]
        outstanding = sum(max(0.0, run.burst.allowance_s - run.cost_s) for run in running)
        limit = config.budget_ratio * config.period_s
        if self._machine.debt_s + outstanding + burst.allowance_s > limit and (
            outstanding > 0 or self._machine.debt_s > 0.01 * share
        ):
            target.activity = "waiting: other targets use the budget"
            return True
        cycle = target.prices.cycle_ns * 1e-9
        self._charge(target, {"cycle": cycle})
        target.running = _Running(burst, now_s, cycle)
        target.from_idle = target.rates.idle_s >= IDLE_S
        target.bursts += 1
        target.activity = "burst"
        return False

    def _plan(self, target: _Target) -> Burst:
        config, rates = self.config, target.rates
        others = (t for t in self._targets.values() if t is not target)
        sharing = 1 + sum(1 for t in others if t.levels.level == Level.OP and t.rates.recent())
        free = max(0.0, config.budget_ratio - rates.beside_ops())
        period = config.planned_share * free * config.period_s / sharing
        cost = self._graph_cost(target)
        cycle = target.prices.cycle_ns * 1e-9
        if cost <= 0:
            # Nothing ran yet: the allowance alone ends the burst.
            return Burst(config.min_graphs, config.max_burst_s, max(period, 2 * cycle))
        allowance = max(period * min(1.0, rates.utilisation()), self._least(target))
        graphs = int((allowance - cycle) / cost + 1e-9)
        graphs = min(config.max_graphs, max(config.min_graphs, graphs))
        each = rates.seconds_per_graph()
        return Burst(graphs, config.max_burst_s, allowance, min(graphs * each, config.max_burst_s))

    def _continue(self, now_s: float, dt: float, target: _Target, run: _Running, load: Load) -> None:
        run.graphs += load.summed
        if run.first_graph_s is None and target.active:
            run.first_graph_s = max(run.begun_s, now_s - dt)  # something ran since the last tick
        if target.levels.level < Level.OP:
            target.cut += 1
            self._end(now_s, target, run, "op level shed")
            return
        floor, rate = self.config.qos_min_tokens_per_second, target.rates.tokens_per_second
        allowance = run.burst.allowance_s
        if run.closing_since is None:
            why = ""
            if run.cost_s >= allowance and run.graphs < run.burst.graphs:
                why = "dearer than planned"
            elif floor is not None and rate is not None and rate < floor:
                why = "token rate below its floor"
            over = run.first_graph_s is not None and now_s - run.first_graph_s >= run.burst.max_seconds
            if not (why or over or run.graphs >= run.burst.graphs):
                target.activity = "burst" if run.first_graph_s is not None else "armed, waiting for graphs"
                return
            run.closing_since = now_s
            target.cut += bool(why)
            target.activity = f"burst cut: {why}" if why else "burst ends"
        # A graph that began summed is let run to its end, unless that costs too much.
        late = now_s - run.closing_since > self.config.max_period_s
        if not load.summing or run.cost_s > 1.25 * allowance or late:
            self._end(now_s, target, run, target.activity)

    def _end(self, now_s: float, target: _Target, run: _Running, activity: str) -> None:
        target.running = None
        target.activity = activity
        target.last_end_s = now_s
        target.draws += 1
        # A sequence that fills [0, 1) evenly: a workload of our own period is not always
        # met at the same point, without a random number.
        draw = target.draws * _GOLDEN % 1.0
        begun = run.begun_s if run.first_graph_s is None else max(run.begun_s, run.first_graph_s)
        target.next_at_s = begun + self.config.period_s * (1 + 0.1 * draw)
        target.defer_s = draw * self.config.period_s / 2

    def _decision(self, now_s: float, name: str, transitions: tuple[Transition, ...]) -> Decision:
        target = self._targets[name]
        run = target.running
        level = target.levels.level
        next_burst: float | None = None
        if level == Level.OP:
            free = max(0.0, self.config.budget_ratio - target.rates.beside_ops())
            income = free * target.rates.utilisation()
            debt = target.account.debt_s
            wait = debt / income if debt > 0 and income > 0 else 0.0
            next_burst = 0.0 if run else max(0.0, target.next_at_s - now_s, wait)
        return Decision(
            target=name,
            level=level,
            armed=run is not None,
            summing=run is not None and run.closing_since is None,
            burst=run.burst if run else None,
            next_burst_s=next_burst,
            reason=target.levels.reason,
            activity=target.activity,
            transitions=transitions,
            bursts=target.bursts,
            bursts_cut=target.cut,
            spent={how: target.account.spent[how] for how in HOW},
            busy_s=target.account.busy_s,
            correction=target.correction,
            burst_left_s=None if run is None else run.left_s(now_s),
            free_ratio=max(0.0, self.config.budget_ratio - self._always_on(target)),
            engine_calls_ratio=target.rates.ratio("engine_call"),
            causes_ratio=target.rates.causes(),
        )
