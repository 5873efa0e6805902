# SPDX-License-Identifier: Apache-2.0
"""Sampled op level: arms op probes for bursts as the budget's controller decides (D5, D6).

The controller (``model/budget.py``) says when; this carries it out on one target, in the
order that keeps the sums honest:

* a burst begins: probes first, then summing;
* it ends: summing first, then, when no summed graph runs any more, the epoch (so that a graph
  which runs all the same is known to have lost its probes), then the probes, then the sums
  are read.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from .kernel.programs import GgmlPrograms, Records
from .model.budget import BudgetConfig, Controller, Decision, Level, Load, PhaseLoad, Prices
from .model.overhead import MeasuredOverhead, Token
from .model.sampled import Ran, SampledOps
from .model.session import Session
from .model.slots import Slot, SlotAllocator
from .model.snapshot import Budget, Overhead, Snapshot, Transition
from .model.tokens import Phase
from .model.totals import CPU

MAX_TRANSITIONS = 32
RATE_SECONDS = 1.0
"""Token rates are taken over at least this long: a tick sees a token or two."""


@dataclass(slots=True)
class Probes:
    """How the levels of one target's probes are put on and taken off."""

    attach: Callable[[str], None]
    """By group: "ops", "graphs", "calls"."""
    detach: Callable[[str], None]


@dataclass(slots=True)
class _Rate:
    """Decode tokens against the seconds in which there was something to decode."""

    tokens: int = 0
    seconds: float = 0.0
    latest: float | None = None

    def add(self, tokens: int, seconds: float) -> float | None:
        self.tokens += tokens
        self.seconds += seconds
        if self.seconds >= RATE_SECONDS:
            self.latest = self.tokens / self.seconds if self.tokens else None
            self.tokens, self.seconds = 0, 0.0
        return self.latest


@dataclass(slots=True)
class _State:
    armed: bool = False
    summing: bool = False
    epoch: int = 0
    groups: set[str] = field(default_factory=lambda: {"graphs", "calls"})


class BurstDriver:
    """One target. ``tick`` after every drain, when the session has been fed."""

    def __init__(
        self,
        programs: GgmlPrograms,
        session: Session,
        tgid: int,
        probes: Probes,
        prices: Prices,
        config: BudgetConfig,
        layout: int,
    ) -> None:
        self._programs, self.session, self._tgid = programs, session, tgid
        self._probes, self._prices, self._config, self._layout = probes, prices, config, layout
        self._controller = Controller(config)
        self._constants = programs.types.constants()
        self._slots = SlotAllocator(*programs.capacity())
        self._keys: dict[int, tuple[int, int]] = {}  # (tgid, hash) by slot number
        self._sampled = session.work.sampled = SampledOps()
        self._measured = MeasuredOverhead()
        self._decision: Decision | None = None
        self._state = _State()
        self._rate = _Rate()
        self._stats: dict[str, int] = programs.stats()
        self._decoded = 0
        self._transitions: deque[Transition] = deque(maxlen=MAX_TRANSITIONS)
        self._begun: float | None = None
        self._mode()

    @property
    def armed(self) -> bool:
        """Whether a burst is on: it ends with a tick, so ticks should not be far apart."""
        return self._state.armed

    # ---- each tick ----------------------------------------------------------------------

    def tick(self, now_s: float) -> bool:
        """Decide and act. True when probes were taken away: drain once more, then call
        :meth:`burst_over`."""
        if self._begun is None:
            self._begun = now_s
        load = self._load(now_s)
        decision = self._controller.tick(now_s, [load])[load.target]
        self._decision = decision
        for change in decision.transitions:
            before, after = change.before.name.lower(), change.after.name.lower()
            self._transitions.append(Transition(change.at_s - self._begun, before, after, change.reason))
        return self._apply(decision)

    def _load(self, now_s: float) -> Load:
        fresh, self._sampled.fresh = self._sampled.fresh, []
        self._sampled.flush()
        phases: dict[str, tuple[int, float]] = {}
        busy = 0.0
        for ran in fresh:
            busy += ran.run.ns / 1e9
            self._serve(ran)
            graphs, hits = phases.get(ran.phase.value, (0, 0.0))
            phases[ran.phase.value] = (graphs + 1, hits + _expected_hits(ran))
            self._token(ran)
        stats = self._programs.stats()
        new = {name: value - self._stats.get(name, 0) for name, value in stats.items()}
        self._stats = stats
        decoded = sum(context.tracker.counts.decode for context in self.session.contexts.all())
        tokens, self._decoded = max(0, decoded - self._decoded), decoded
        decode_s = sum(ran.run.ns / 1e9 for ran in fresh if ran.phase is Phase.DECODE)
        return Load(
            target=str(self._tgid),
            prices=self._prices,
            busy_s=busy,
            phases={phase: PhaseLoad(n, hits / n) for phase, (n, hits) in phases.items()},
            call_hits=new.get("hits_call", 0),
            graph_hits=new.get("hits_graph", 0),
            op_hits=new.get("hits_op", 0),
            summed=sum(ran.summed for ran in fresh),
            summing=len(self._programs.owned_slots()) if self._state.armed else 0,
            tokens_per_second=self._rate.add(tokens, decode_s),
            in_burst=self._measured.in_burst(),
            in_burst_estimate=self._measured.in_burst_estimate(),
        )

    def _serve(self, ran: Ran) -> None:
        """See to it that a graph which runs has a slot, if there is room."""
        key = (ran.run.tgid, ran.run.hash)
        self._slots.used(key)
        if ran.plan is None or self._slots.get(key) is not None or not ran.plan.n:
            return
        slot = self._slots.request(key, ran.plan.n)
        if slot is None:
            return
        self._programs.clear_sums(slot.first, slot.n_nodes)
        self._keys[slot.number] = key
        self._sampled.give(slot.number, key[0], ran.plan, self._sums(slot))
        if not self._programs.give_slot(*key, slot.number, slot.first):
            # Evicted there: it will be described, and served, again.
            self._slots.retire(key)

    def _token(self, ran: Ran) -> None:
        """One decode step for the measured overhead."""
        run, plan = ran.run, ran.plan
        if ran.phase is not Phase.DECODE or plan is None or run.end is None:
            return
        token = Token(
            at_s=run.end / 1e9,
            kind=(plan.facts.topology, plan.facts.n_tokens),
            kv_length=plan.facts.kv_length or 0,
            seconds=run.ns / 1e9,
            cost_s=run.hits * self._prices.op_ns * 1e-9,
        )
        if ran.summed:
            self._measured.inside(token)
        elif not self._state.armed:
            self._measured.outside(token)

    def _sums(self, slot: Slot) -> Records:
        return self._programs.sums(slot.first, slot.n_nodes)

    # ---- carrying it out ----------------------------------------------------------------

    def _apply(self, decision: Decision) -> bool:
        state = self._state
        for group, least in (("graphs", Level.GRAPH), ("calls", Level.TOKEN)):
            if decision.level < least and group in state.groups:
                state.groups.discard(group)
                self._probes.detach(group)
            elif decision.level >= least and group not in state.groups:
                state.groups.add(group)
                self._probes.attach(group)
        over = False
        if decision.armed and not state.armed:
            self._probes.attach("ops")
            state.armed = True
        if decision.summing != state.summing:
            state.summing = decision.summing
            self._mode()
        if state.armed and not decision.armed:
            state.armed = False
            state.epoch += 1
            self._mode()
            self._probes.detach("ops")
            over = True
        return over

    def _mode(self) -> None:
        mode = self._constants["OPS_SUM" if self._state.summing else "OPS_OFF"]
        self._programs.set_target(self._tgid, layout=self._layout, mode=mode, epoch=self._state.epoch)

    def burst_over(self) -> None:
        """The probes are gone and the session knows of every graph that ran: read the sums."""
        self._sampled.flush()
        writing = set(self._programs.owned_slots())
        for slot in self._slots.active():
            if slot.number not in writing:
                self._read(slot)
        for slot in self._slots.retiring():
            key = self._keys[slot.number]
            self._programs.take_slot(*key)
            if slot.number not in writing:
                self._read(slot)
                self._slots.read(slot.number)
                self._slots.release(slot.number)
                self._sampled.take(slot.number, *self._keys.pop(slot.number))
        self._sampled.end_burst()

    def _read(self, slot: Slot) -> None:
        seen = self._sampled.read(slot.number, self._sums(slot))
        if seen is not None:
            hash_ = self._keys[slot.number][1]
            self.session.work.graphs.cover(hash_, CPU, seen.executed, seen.fused, seen.uncovered)

    def finish(self) -> None:
        """The end: take what a running burst has, and attribute the rest."""
        if self._state.armed:
            self._state.armed = self._state.summing = False
            self._state.epoch += 1
            self._mode()
        self.burst_over()
        self._sampled.finish()

    # ---- figures ------------------------------------------------------------------------

    def describe(self, snapshot: Snapshot) -> Snapshot:
        """The snapshot with what the budget did, and what profiling cost."""
        decision, overall = self._decision, self._measured.overall()
        estimate = decision.estimated_ratio if decision else None
        overhead: Overhead = dataclasses.replace(
            snapshot.overhead,
            budget_ratio=self._config.budget_ratio,
            estimated_ratio=estimate,
            measured_ratio=overall.value if overall else None,
            measured_ci95=(overall.low, overall.high) if overall else None,
            ns_per_hit=self._prices.op_ns,
        )
        budget = None
        if decision is not None:
            budget = Budget(
                level=decision.level.name.lower(),
                reason=decision.reason,
                activity=decision.activity,
                spent_seconds=dict(decision.spent),
                busy_seconds=decision.busy_s,
                bursts=decision.bursts,
                bursts_cut=decision.bursts_cut,
                qos_min_tokens_per_second=self._config.qos_min_tokens_per_second,
                transitions=tuple(self._transitions),
            )
        notes = list(snapshot.notes)
        if overall is None:
            notes.append("overhead: measured_ratio is null, it takes two bursts with tokens before and after")
        elif estimate is not None and overall.disagrees(estimate):
            notes.append("overhead: the estimate lies outside the measured interval, believe the measurement")
        return dataclasses.replace(snapshot, overhead=overhead, budget=budget, notes=tuple(notes))


def _expected_hits(ran: Ran) -> float:
    """Op hits that this graph costs while armed: measured if it was, else its kernels."""
    if ran.summed and ran.run.hits:
        return float(ran.run.hits)
    return float(ran.plan.before[ran.plan.n]) if ran.plan is not None else 0.0
