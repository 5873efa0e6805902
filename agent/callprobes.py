# SPDX-License-Identifier: Apache-2.0
"""Probes on the calls of one process that the catalogue describes: which are there, as the budget allows.

What is decided is in ``model/callbudget.py``; the kernel keeps the limits that follow from it, so that
they hold also when we are late.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .callbook import CallBook
from .errors import MachineError, TargetEnded, TargetError
from .kernel.callprograms import UNLIMITED, CallFamily, CallLimit, CallProbe
from .model.callbudget import CallBudget, CallDecision, ShedUnit, Spent, Unit
from .target.engine_file import CALL
from .target.facts import HookSite
from .target.process import FileId, Process, alive, find_open_path, read_maps

CYCLE_S = 0.001
"""What attaching and detaching some sites costs a running target (design D5)."""
LOOK_SECONDS = 1.0
"""How often it is looked at what was spent while nothing is to be decided."""


@dataclass(frozen=True, slots=True)
class Place:
    """A site of a function in a file."""

    file_id: FileId
    hook: HookSite


class CallProbes:
    """Those of one process. ``sites``: places that are known."""

    def __init__(
        self, process: Process, book: CallBook, budget_ratio: float, free_ratio: float, *, records: bool
    ) -> None:
        """``free_ratio``: the part of the budget that is for calls, until :meth:`tick` says otherwise."""
        self.process = process
        self.sites = 0
        self.notes: list[str] = []
        self._book, self._programs, self._catalogue = book, book.programs, book.catalogue
        self._records = records
        self._budget = CallBudget(budget_ratio)
        self._decision: CallDecision = self._budget.tick(time.monotonic(), 0.0, free_ratio, {}, {}, 0.0)
        self._places: dict[Unit, list[Place]] = {}
        self._known: set[tuple[FileId, int]] = set()
        self._attached: set[Unit] = set()
        self._families: dict[Unit, set[str]] = {}
        self._together: set[str] = set()
        self._stepped: set[Unit] = set()
        self._around: set[str] = set()
        self._limits: dict[str, int] = {}
        self._ticked: float | None = None
        self._moved = self._begun = True
        self._charged_s = 0.0

    # ---- what there is to probe ---------------------------------------------------------

    def knows(self, file_id: FileId, hook: HookSite) -> bool:
        """Whether this place was added."""
        return (file_id, hook.site.offset) in self._known

    def go_together(self, engine: str) -> None:
        """From now on all calls of this engine are watched or none: they say where time goes only
        when none is missing."""
        self._together.add(engine)
        self._budget.join(engine)
        whole = (engine, "")
        for unit in [u for u in self._places if u[0] == engine and u[1]]:
            self._programs.regroup(self._group(unit), self._group(whole))
            self._places.setdefault(whole, []).extend(self._places.pop(unit))
            self._families.setdefault(whole, set()).update(self._families.pop(unit))
            for some in (self._attached, self._stepped):
                if unit in some:
                    some.discard(unit)
                    some.add(whole)

    def add(
        self, engine: str, file_id: FileId, open_path: str, hooks: Sequence[HookSite],
        failures: list[TargetError],
    ) -> None:  # fmt: skip
        """Probe functions of a file that is open at ``open_path``.

        What does not work goes to ``failures`` and the notes. Raises MachineError and TargetEnded.
        """
        by_unit: dict[Unit, list[HookSite]] = {}
        for hook in hooks:
            entry = self._catalogue.engine(engine).calls[index_of(hook)]
            unit = (engine, "" if engine in self._together else entry.call)
            by_unit.setdefault(unit, []).append(hook)
            self._families.setdefault(unit, set()).add(entry.call)
            if not hook.site.emulated:
                self._stepped.add(unit)
            if entry.around:
                self._around.add(engine)
        self._set_limits([engine])
        for unit, some in by_unit.items():
            shed = unit in self._decision.shed
            if not shed:
                self._watched(unit, watched=True)
                self._attached.add(unit)
            works = list(some) if shed else self._attach(unit, open_path, some, failures)
            self._places.setdefault(unit, []).extend(Place(file_id, hook) for hook in works)
            self._known |= {(file_id, hook.site.offset) for hook in works}
            self.sites += len(works)

    def _group(self, unit: Unit) -> str:
        return f"calls of {self.process.pid}: {unit[0]} {unit[1]}"

    def _watched(self, unit: Unit, *, watched: bool) -> None:
        for call in self._families[unit]:
            number = self._book.family_of(unit[0], call)
            self._programs.watch_family(self.process.pid, number, watched=watched)

    def _attach(
        self, unit: Unit, open_path: str, hooks: Sequence[HookSite], failures: list[TargetError]
    ) -> list[HookSite]:
        """All of them with few links; where that fails, each by itself. Returns those that work."""
        probes = [self._probe(unit[0], hook) for hook in hooks]
        pid = self.process.pid
        try:
            self._programs.attach(self._group(unit), open_path, pid, probes)
            return list(hooks)
        except MachineError:
            raise
        except TargetError as error:
            if not alive(self.process):
                raise TargetEnded(f"process {pid} ended while probes were attached") from error
        done: list[HookSite] = []
        for hook, probe in zip(hooks, probes, strict=True):
            try:
                self._programs.attach(self._group(unit), open_path, pid, [probe])
                done.append(hook)
            except TargetError as error:
                failures.append(error)
                self._note(f"{hook.symbol} is not probed: {error.what}")
        return done

    def _probe(self, engine: str, hook: HookSite) -> CallProbe:
        number = self._book.number(engine, index_of(hook), "")
        return CallProbe(number, hook.site.offset, hook.site.moved, hook.ret, not hook.site.emulated)

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    # ---- the budget ---------------------------------------------------------------------

    @property
    def hurried(self) -> bool:
        """Whether it should soon be looked again: calls come, and what they cost is not known yet."""
        return self._decision.trial and (self._moved or self._begun)

    def due(self, now_s: float) -> bool:
        """Whether there is something to decide."""
        if self._ticked is None or now_s - self._ticked >= LOOK_SECONDS:
            return True
        return any(
            self._programs.spent_ns(self.process.pid, self._book.set_of(engine)) >= limit
            for engine, limit in self._limits.items()
        )

    def tick(self, now_s: float, busy_s: float, free_ratio: float) -> None:
        """Put probes on and take them off. ``busy_s``: since the last time; ``free_ratio``: of the budget."""
        self._ticked = now_s
        spent = {unit: self._spent(unit) for unit in self._places}
        before = self._budget.account.spent["engine_call"]
        prices = {unit: self._price(unit) for unit in self._places}
        decision = self._budget.tick(now_s, busy_s, free_ratio, spent, prices, CYCLE_S)
        self._moved = self._budget.account.spent["engine_call"] > before
        # A trial that only begins has nothing to show yet, and may soon be over.
        self._begun = decision.trial and not self._decision.trial
        self._decision = decision
        gone = self._attached - decision.watched
        self._programs.detach(*(self._group(unit) for unit in gone))
        self._attached -= gone
        for unit in gone:
            self._watched(unit, watched=False)
        back = decision.watched - self._attached
        for unit in back:
            self._watched(unit, watched=True)
        self._set_limits({engine for engine, _ in self._places})
        if back:
            self._put_back(back)

    def _spent(self, unit: Unit) -> Spent:
        found = [self._family(unit[0], call) for call in self._families[unit]]
        return Spent(
            sum(f.hits for f in found), sum(f.skipped for f in found), sum(f.spent_ns for f in found) / 1e9
        )

    def _family(self, engine: str, call: str) -> CallFamily:
        return self._programs.family(self.process.pid, self._book.family_of(engine, call))

    def _price(self, unit: Unit) -> float:
        """Seconds that a watched call of it costs: as they did, for some of them may be dear and rare."""
        prices = self._book.prices(stepped=bool(self._stepped))
        spent = self._spent(unit)
        if spent.calls:
            paid = spent.seconds - spent.skipped * prices.over / 1e9
            return min(max(paid / spent.calls, prices.watched / 1e9), prices.stepped / 1e9)
        return (prices.stepped if unit in self._stepped and unit[1] else prices.watched) / 1e9

    def _set_limits(self, engines: Iterable[str]) -> None:
        """What may be spent from now on, shared by the engines."""
        decision, pid = self._decision, self.process.pid
        prices = self._book.prices(stepped=bool(self._stepped))
        share = 1e9 / max(1, len({engine for engine, _ in self._families}))
        for engine in engines:
            number = self._book.set_of(engine)
            limit = hard = UNLIMITED
            if decision.grant_s != float("inf"):
                limit = self._programs.spent_ns(pid, number) + int(decision.grant_s * share)
                hard = limit + int(decision.more_s * share)
            whole = engine in self._together and engine in self._around
            self._limits[engine] = limit
            self._programs.set_limit(pid, number, CallLimit(limit, hard, prices, whole, self._records))

    def _put_back(self, units: Iterable[Unit]) -> None:
        """Attach units again that were shed."""
        maps = {m.file_id: m for m in read_maps(self.process.pid) if "x" in m.perms and m.inode}
        opened: dict[FileId, int] = {}
        try:
            for unit in units:
                by_file: dict[FileId, list[HookSite]] = {}
                for place in self._places[unit]:
                    by_file.setdefault(place.file_id, []).append(place.hook)
                for file_id, hooks in by_file.items():
                    path = find_open_path(self.process.pid, maps[file_id]) if file_id in maps else ""
                    if not path:
                        continue  # no longer mapped
                    if file_id not in opened:
                        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
                        opened[file_id] = os.open(path, flags)
                    self._attach(unit, f"/proc/self/fd/{opened[file_id]}", hooks, [])
                self._attached.add(unit)
        finally:
            for fd in opened.values():
                os.close(fd)

    def charged_s(self) -> float:
        """What it did cost since the last time that this was asked."""
        spent = self._budget.account.spent["engine_call"]
        fresh, self._charged_s = spent - self._charged_s, spent
        return fresh

    @property
    def budget_ratio(self) -> float:
        """For all probes together."""
        return self._budget.budget_ratio

    @property
    def cost(self) -> tuple[float, float]:
        """Seconds of cost, and of busy time, since the beginning."""
        account = self._budget.account
        return account.spent["engine_call"] + account.spent["cycle"], account.busy_s

    @property
    def shed(self) -> Mapping[Unit, ShedUnit]:
        """What is not watched now."""
        return self._decision.shed

    def unwatched(self) -> dict[Unit, float]:
        """By engine and call, seconds since it is known in which it was not watched; only what has some."""
        found = {
            (unit[0], call): self._family(unit[0], call).unwatched_ns / 1e9
            for unit, calls in self._families.items()
            for call in calls
        }
        return {one: seconds for one, seconds in found.items() if seconds > 0}

    def detach(self) -> None:
        """Take everything off."""
        self._programs.detach(*(self._group(unit) for unit in self._places))


def index_of(hook: HookSite) -> int:
    """Which call of its engine's description it is."""
    return int(hook.event.removeprefix(CALL))
