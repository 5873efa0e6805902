# SPDX-License-Identifier: Apache-2.0
"""Sampled op level: arms op probes for bursts as the budget's controller decides (D5, D6).

The controller (``model/budget.py``) says when; this carries it out on one target, in the
order that keeps the sums honest:

* a burst begins: probes first, then summing;
* it ends: summing first, then, when no summed graph runs any more, the epoch (so that a graph
  which runs all the same is known to have lost its probes), then the probes;
* when every summed graph is accounted, which is when its call has returned, the sums are read.

Taking probes away makes the kernel wait, with perf uprobes for a fifth of a second: a thread
of ours waits with it, while the rings are drained.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from .burstload import LoadMaker
from .errors import ProfinferError, TargetEnded
from .kernel.programs import GgmlPrograms
from .model.budget import BudgetConfig, Controller, Decision, Level, Load, Prices
from .model.sampled import SampledOps
from .model.session import Session
from .model.snapshot import Budget, Overhead, Snapshot, Transition
from .model.totals import CPU
from .sumslots import SumSlots

MAX_TRANSITIONS = 32
LEAST_PAIRS = 4
"""Bursts with tokens on both sides, from which on the measured slowdown is shown."""
PATIENCE_S = 120.0
"""For so long the sums wait for a call to return whose first graphs are among them: the
chunks of a long prompt are one call."""
RETRY_S = 30.0
"""Until the next attempt, when op probes could not be attached."""


@dataclass(slots=True)
class Probes:
    """How the levels of one target's probes are put on and taken off, by group: "ops", "graphs",
    "calls". ``attach`` returns how many; ``detach`` may be called from another thread."""

    attach: Callable[[str], int]
    detach: Callable[[str], None]


@dataclass(slots=True)
class _State:
    armed: bool = False
    summing: bool = False
    epoch: int = 0
    groups: set[str] = field(default_factory=lambda: {"graphs", "calls"})
    unread_since: float | None = None  # when the burst ended whose sums are to be read
    not_before: float = 0.0  # of the next attempt to attach


class BurstDriver:
    """One target, from the moment it is attached to. ``tick`` after every drain, when the
    session (if there is one yet) has been fed."""

    def __init__(
        self,
        programs: GgmlPrograms,
        tgid: int,
        probes: Probes,
        prices: Prices,
        config: BudgetConfig,
        layout: int,
    ) -> None:
        self._programs, self._tgid, self._layout = programs, tgid, layout
        self._probes, self._prices, self._config = probes, prices, config
        self._session: Session | None = None
        self._controller = Controller(config)
        self._constants = programs.types.constants()
        self._sampled = SampledOps()
        self._slots = SumSlots(programs, self._sampled, tgid)
        self._loads = LoadMaker(str(tgid), prices, programs.stats(), programs.graph_clock_ns(tgid))
        self._decision: Decision | None = None
        self._state = _State()
        self._transitions: deque[Transition] = deque(maxlen=MAX_TRANSITIONS)
        self._changes: Counter[str] = Counter()
        self._begun: float | None = None
        self._pool = ThreadPoolExecutor(1, "disarm")
        self._leaving: Future[int] | None = None
        self.notes: list[str] = []
        self.engine_calls_s = 0.0
        """Cost of probes on calls that are described by data, which others put there, since the last tick."""
        self.causes_s: dict[str, float] = {}
        """And of watching waits and page faults."""
        self.busy_s = 0.0
        """Seconds in which graphs ran (calls, where graphs are shed) that have ended."""
        self._mode()

    def bind(self, session: Session) -> None:
        """The session that is fed from now on."""
        self._session = session
        session.work.sampled = self._sampled

    @property
    def armed(self) -> bool:
        """Whether a burst is on."""
        return self._state.armed

    @property
    def left_s(self) -> float | None:
        """How long a burst will go on, None without one: it ends with a tick, so the next one should
        not come later than that."""
        decision = self._decision
        return None if decision is None or not self._state.armed else decision.burst_left_s or 0.0

    @property
    def graphs_seen(self) -> bool:
        """Whether graphs are watched now: that level may be shed."""
        return "graphs" in self._state.groups

    @property
    def free_for_calls(self) -> float:
        """What tokens, graphs, waits and page faults leave over of the budget."""
        decision = self._decision
        if decision is None:
            return self._config.budget_ratio
        return max(0.0, decision.free_ratio - decision.causes_ratio)

    @property
    def free_for_causes(self) -> float:
        """What tokens, graphs and calls that are described by data leave over of it."""
        decision = self._decision
        if decision is None:
            return self._config.budget_ratio
        return max(0.0, decision.free_ratio - decision.engine_calls_ratio)

    # ---- each tick ----------------------------------------------------------------------

    def tick(self, now_s: float) -> None:
        """Decide and act, alone on this machine."""
        load = self.observe(now_s)
        self.follow(self._controller.tick(now_s, [load])[load.target], now_s)

    def observe(self, now_s: float) -> Load:
        """What the controller has to know: first half of a tick where several targets share one."""
        if self._begun is None:
            self._begun = now_s
        if self._leaving is not None and self._leaving.done():
            self._left(self._leaving)
        fresh, self._sampled.fresh = self._sampled.fresh, []
        self._sampled.flush()
        for ran in fresh:
            self._slots.ran(ran)
        cost, self.engine_calls_s = self.engine_calls_s, 0.0
        causes, self.causes_s = self.causes_s, {}
        load = self._loads.make(
            self._session,
            fresh,
            self._programs.stats(),
            summing=len(self._programs.owned_slots()) if self._state.armed else 0,
            graphs_seen=self.graphs_seen,
            clock_ns=self._programs.graph_clock_ns(self._tgid),
        )
        self.busy_s += load.busy_s
        return dataclasses.replace(load, engine_calls_s=cost, causes_s=causes)

    def follow(self, decision: Decision, now_s: float) -> None:
        """Do as the controller says: the other half."""
        self._decision = decision
        begun = now_s if self._begun is None else self._begun
        for change in decision.transitions:
            before, after = change.before.name.lower(), change.after.name.lower()
            self._transitions.append(Transition(change.at_s - begun, before, after, change.reason))
            self._changes[after] += 1
        self._read_when_all_is_known(now_s)
        self._apply(decision, now_s)

    def _read_when_all_is_known(self, now_s: float) -> None:
        since, session = self._state.unread_since, self._session
        if since is None or session is None or self._state.armed:
            return
        if session.unreported(int((now_s - PATIENCE_S) * 1e9)):
            return
        if now_s - since < PATIENCE_S and self._programs.owned_slots():
            return  # one goes on without its probes; what others left in its slot is not lost
        self._state.unread_since = None
        self._read()

    def _read(self, *, last: bool = False) -> None:
        for seen in self._slots.read(last=last):
            if self._session is not None:
                self._session.work.graphs.cover(
                    seen.hash, seen.phases, CPU, seen.executed, seen.fused, seen.uncovered
                )
        self._sampled.end_burst()

    # ---- carrying it out ----------------------------------------------------------------

    def _apply(self, decision: Decision, now_s: float) -> None:
        state = self._state
        for group, least in (("graphs", Level.GRAPH), ("calls", Level.TOKEN)):
            if decision.level < least and group in state.groups:
                state.groups.discard(group)
                self._probes.detach(group)
                if group == "graphs":
                    self._programs.stop_clock(self._tgid)
            elif decision.level >= least and group not in state.groups:
                state.groups.add(group)
                self._probes.attach(group)
        if decision.armed and not state.armed and not self._arm(now_s):
            return
        if decision.summing != state.summing:
            state.summing = decision.summing
            self._mode()
        if state.armed and not decision.armed:
            self._disarm(now_s)

    def _arm(self, now_s: float) -> bool:
        """Put the op probes on; False when that has to wait or cannot be."""
        if self._leaving is not None or now_s < self._state.not_before:
            return False
        self._loads.times.come(time.monotonic_ns())
        try:
            why = None if self._probes.attach("ops") else "no function could be probed"
        except TargetEnded:
            raise
        except ProfinferError as error:
            why = error.what
        if why is None:
            self._state.armed = True
            return True
        self._state.not_before = now_s + RETRY_S
        self._loads.times.gone(time.monotonic_ns())
        note = f"ops: no burst could begin: {why}"
        if note not in self.notes:
            self.notes.append(note)
        return False

    def _disarm(self, now_s: float) -> None:
        state = self._state
        state.armed = False
        state.epoch += 1
        state.unread_since = now_s
        self._mode()
        self._leaving = self._pool.submit(self._take_off)

    def _take_off(self) -> int:
        self._probes.detach("ops")
        return time.monotonic_ns()

    def _left(self, leaving: Future[int]) -> None:
        self._leaving = None
        self._loads.times.gone(leaving.result())

    def _mode(self) -> None:
        mode = self._constants["OPS_SUM" if self._state.summing else "OPS_OFF"]
        self._programs.set_target(self._tgid, layout=self._layout, mode=mode, epoch=self._state.epoch)

    def forget(self) -> None:
        """What ran so far was read by a wrong layout: it means nothing."""
        self._slots.forget()

    def stop(self) -> None:
        """The end is near: nothing is summed any more. The probes go with the programs."""
        if self._state.summing or self._state.armed:
            self._state.armed = self._state.summing = False
            self._state.epoch += 1
            self._mode()
        self._pool.shutdown()
        if self._leaving is not None:
            self._left(self._leaving)

    def finish(self) -> None:
        """After :meth:`stop` and the last records: take what a burst has, attribute the rest."""
        self._read(last=True)
        self._sampled.finish()

    # ---- figures ------------------------------------------------------------------------

    def describe(self, snapshot: Snapshot) -> Snapshot:
        """The snapshot with what the budget did, and what profiling cost."""
        decision, pairs = self._decision, self._loads.measured.pairs
        # Fewer say nothing: with two, Student's t stretches the interval thirteen-fold.
        overall = self._loads.measured.overall() if pairs >= LEAST_PAIRS else None
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
                changes=dict(self._changes),
            )
        notes = [*snapshot.notes, *self.notes]
        if overall is None:
            notes.append(
                f"overhead: measured_ratio is null, it takes {LEAST_PAIRS} bursts with tokens before and"
                f" after, {pairs} were seen"
            )
        elif decision is not None and overall.disagrees(_op_ratio(decision)):
            notes.append("overhead: the estimate lies outside the measured interval, believe the measurement")
        return dataclasses.replace(snapshot, overhead=overhead, budget=budget, notes=tuple(notes))


def _op_ratio(decision: Decision) -> float:
    """The part of the estimate that is measured too: token and graph probes are always there."""
    spent = sum(decision.spent.get(how, 0.0) for how in ("op", "cycle"))
    return spent / decision.busy_s if decision.busy_s > 0 else 0.0
