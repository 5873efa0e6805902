# SPDX-License-Identifier: Apache-2.0
"""What watching waits and page faults costs one target: counted, priced, and kept within its budget.

What is decided is in ``model/causebudget.py``. The kernel counts every wait and fault anyway; here they
are looked at once a second, in a trial more often, and as soon as so much was done that the budget is
at stake.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping

from .model.budget import Prices
from .model.callbudget import DEPTH
from .model.causebudget import FAULTS, WAITS, CauseBudget, CauseDecision, Seen
from .model.causes import ShedPart
from .model.snapshot import Snapshot
from .targetcauses import TargetCauses

LOOK_SECONDS, HURRY_SECONDS = 1.0, 0.05
LOOK_SHARE = 0.01
"""Of our time that looking may take: some processes have thousands of threads."""
CYCLE_S = 0.0005
"""What attaching to the scheduler and to page faults again costs the target: the kernel changes code that
all CPUs run."""
PERIOD_S = 5.0
WORDS = {WAITS: "threads: waits", FAULTS: "faults: page faults"}


class CauseKeeper:
    """One target."""

    def __init__(self, target: TargetCauses, prices: Prices, budget_ratio: float) -> None:
        """``budget_ratio``: of the target's time, for all probes. From 1 on everything is watched."""
        self.prices = prices
        self._target = target
        self._budget_ratio = budget_ratio
        self._budget = CauseBudget(target.causes.parts(), period_s=PERIOD_S)
        self._decision: CauseDecision | None = None
        self._looked_s: float | None = None
        self._look_s = 0.0  # how long the last look took
        self._counts = target.counts()
        self._hits = target.causes.hits()
        self._busy_ns = target.busy_ns()
        self._reported_s = 0.0
        self._ever_shed: set[str] = set()
        self._graphs = True

    @property
    def hurried(self) -> bool:
        """Whether :meth:`keep` should be asked again soon."""
        return self._decision is not None and self._decision.hurry

    def keep(
        self, now_s: float, reported_s: float, free_ratio: float, *, graphs: bool = True
    ) -> Mapping[str, float]:
        """Shed what costs too much, and take it up again; cheap while nothing is to be decided.

        ``reported_s``: how long graphs and calls of it took that have ended, all together. ``free_ratio``:
        of the budget, what is left for waits, page faults and operators. ``graphs``: whether these are
        watched; waits count while they run. Returns seconds of cost since the last time, by part.
        """
        self._graphs = graphs
        if self._looked_s is None:
            self._looked_s, self._reported_s = now_s, reported_s
        if not self._due(now_s, free_ratio):
            return {}
        begun = time.monotonic()
        busy = self._busy(now_s, reported_s)
        seen = self._seen(busy)
        free = 1.0 if self._budget_ratio >= 1 else max(0.0, free_ratio)
        # Where others are watched all the same, nothing has to be attached for a trial.
        cycle = 0.0 if all(map(self._target.causes.attached, self._target.causes.parts())) else CYCLE_S
        useless = () if graphs else (WAITS,)
        decision = self._decision = self._budget.tick(now_s, busy, free, seen, cycle, useless)
        self._ever_shed |= decision.shed.keys()
        self._target.watch(decision.watched)
        self._looked_s, self._hits = now_s, self._target.causes.hits()
        self._look_s = time.monotonic() - begun
        return decision.charged

    def _due(self, now_s: float, free_ratio: float) -> bool:
        passed = now_s - (self._looked_s or 0.0)
        if passed < max(HURRY_SECONDS, self._look_s / LOOK_SHARE):
            return False
        if passed >= LOOK_SECONDS or self.hurried:
            return True
        hits = self._target.causes.hits()
        new = {part: count - self._hits.get(part, 0) for part, count in hits.items()}
        cost = new.get(WAITS, 0) * self.prices.wait_ns + new.get(FAULTS, 0) * self.prices.fault_ns
        return cost * 1e-9 > DEPTH * free_ratio * PERIOD_S

    def _busy(self, now_s: float, reported_s: float) -> float:
        """Seconds since the last look in which it computed: while graphs ran on the CPU, and calls that
        have returned, of which no more counts than has passed."""
        running, busy_ns = self._busy_ns, self._target.busy_ns()
        before, passed = self._reported_s, now_s - (self._looked_s or now_s)
        self._busy_ns, self._reported_s = busy_ns, reported_s
        return max((busy_ns - running) / 1e9, min(reported_s - before, passed), 0.0)

    def _seen(self, busy_s: float) -> dict[str, Seen]:
        before, now = self._counts, self._target.counts()
        self._counts = now
        waits, records = now.waits - before.waits, now.records - before.records
        faults = max(0, now.faults - before.faults)  # programs that are gone have no counts
        seconds = (waits * self.prices.wait_ns + records * self.prices.wait_record_ns) * 1e-9
        if WAITS not in self._target.watched and self._decision is not None and WAITS in self._decision.shed:
            # Other targets need the programs: they run here, too, and look no further.
            came = self._decision.shed[WAITS].per_second * busy_s
            if self._target.causes.attached(WAITS):
                seconds += came * 2 * self.prices.other_switch_ns * 1e-9
        return {WAITS: Seen(waits, seconds), FAULTS: Seen(faults, faults * self.prices.fault_ns * 1e-9)}

    def describe(self, snapshot: Snapshot) -> Snapshot:
        """The snapshot with what was shed, and what the programs cost this machine."""
        switches = self._target.causes.switches()
        seconds = None if switches is None else switches * self.prices.other_switch_ns * 1e-9
        return dataclasses.replace(
            snapshot,
            causes_shed=self.shed(),
            notes=(*snapshot.notes, *self.notes()),
            overhead=dataclasses.replace(snapshot.overhead, machine_seconds=seconds),
        )

    def shed(self) -> tuple[ShedPart, ...]:
        """What is watched in short trials only."""
        shed = {} if self._decision is None else self._decision.shed
        return tuple(ShedPart(part, why.per_second, why.ratio) for part, why in sorted(shed.items()))

    def notes(self) -> list[str]:
        """What was not watched all the time, and why."""
        shed = {one.part: one for one in self.shed()}
        found = []
        for part, words in WORDS.items():
            if (one := shed.get(part)) is not None:
                found.append(
                    f"{words} are watched in short trials only, {one.per_second:.0f} a second would cost"
                    f" {one.cost_ratio:.1%} of its time; figures are of those trials (--budget)"
                )
            elif part in self._ever_shed:
                found.append(f"{words} were not watched for some time, to stay within the budget")
            elif self._target.unwatched_ns(part) and self._graphs:
                found.append(f"{words} were not watched for some time, for graphs were not")
        return found
