# SPDX-License-Identifier: Apache-2.0
"""Watching the calls of one process that the catalogue describes by data alone.

Works beside :class:`.attach.Attachment`, which owns it: files are attached as they are
found, figures are read when a snapshot is made. Which probes are there at a time, as the budget
allows, is :mod:`.callprobes`'.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from .callbook import CallBook
from .callfollow import Followed, followed, named
from .callprobes import LOOK_SECONDS, CallProbes, index_of
from .errors import ProfinferError, TargetEnded, TargetError
from .kernel.callprograms import CallPrograms
from .model.calldata import CallFigures, CallTotal, Offload, ShedCalls
from .model.callrows import CallRow, devices, memory, programs, text_of, totals
from .model.offload import offload
from .target.backendname import backend_name
from .target.engine_file import CALL
from .target.facts import FileInfo, HookSite, TargetInfo
from .target.process import FileId, Mapping, Process, cpu_seconds, read_maps
from .target.text import printable

MAX_ROUNDS, MAX_ROUNDS_IN_ALL = 3, 64
"""How often functions that were given by address are looked into: at a time, for one process."""
GUESSED = "programs: prefill and decode are a guess, from how often two of them run and how long"


class CallWatch:
    """Counts and times calls of one process. Close it, or use ``with``."""

    def __init__(
        self, process: Process, book: CallBook, budget: float, free: float, *, owned: bool, records: bool
    ) -> None:
        """``owned``: the book serves this process alone, and is closed with the watch."""
        self.process = process
        self._book, self._owned = book, owned
        self._programs, self._catalogue = book.programs, book.catalogue
        self._probes = CallProbes(process, book, budget, free, records=records)
        self._free = free
        self._told: set[int] = set()
        self._followed: set[int] = set()
        self._rounds = 0
        self._notes: list[str] = []
        self._wide: set[str] = set()
        self._looked: float | None = None
        self._clock = (time.monotonic(), cpu_seconds(process.pid), 0.0)
        self._maps: list[Mapping] = []
        self._given = 0
        self._functions: dict[int, str | None] = {}
        self._names: dict[tuple[str, int], str] = {}
        self._before: list[CallRow] | None = None
        self._final: CallFigures | None = None

    @staticmethod
    def wanted(info: TargetInfo) -> bool:
        """Whether anything in the process is described that way."""
        return any(_calls(file) for one in (info, *info.others) for file in one.files)

    @staticmethod
    def offloading(info: TargetInfo) -> bool:
        """Whether all that is described that way in the process is backends of its engine (what has
        a call by which it is watched): nothing to tell of while the CPU computes everything."""
        catalogue = info.catalogue
        return catalogue is not None and all(
            catalogue.engine(one.engine).watch is not None
            for one in (info, *info.others)
            if any(_calls(file) for file in one.files)
        )

    @classmethod
    def open(
        cls, info: TargetInfo, *, method: str = "auto", budget: float = 1.0, free: float | None = None,
        btf_path: str | None = None, records: bool = False, book: Callable[[], CallBook] | None = None,
    ) -> CallWatch:  # fmt: skip
        """Attach to everything in the process that is described by data.

        ``budget`` for all probes, and ``free``: the part of it that is for these (None: all of it).
        ``book`` gives programs that serve other processes, too; None: load some for this one.
        Raises MachineError, or TargetError when nothing of it could be attached.
        """
        free = budget if free is None else free
        if book is None:
            loaded = CallPrograms.load(method, btf_path=btf_path, records=records)
            mine = CallBook(loaded, info.catalogue)
            watch = cls(info.process, mine, budget, free, owned=True, records=records)
        else:
            watch = cls(info.process, book(), budget, free, owned=False, records=records)
        try:
            watch.add(info)
        except BaseException:
            watch.close()
            raise
        return watch

    @property
    def sites(self) -> int:
        """Places that can be probed."""
        return self._probes.sites

    # ---- attaching ----------------------------------------------------------------------

    def add(self, info: TargetInfo) -> None:
        """Attach to files that are not attached yet."""
        failures: list[TargetError] = []
        for one in (info, *info.others):
            for file in one.files:
                if hooks := self._wanted_of(one.engine, file):
                    self._probe(one.engine, file.file_id, file.open_path, file.machine, hooks, failures)
                if file.table:
                    self._note(f"{os.path.basename(file.path)}: {file.table}")
        if failures and not self.sites:
            raise failures[0]

    def _probe(
        self, engine: str, file_id: FileId, open_path: str, machine: str, hooks: Sequence[HookSite],
        failures: list[TargetError],
    ) -> None:  # fmt: skip
        numbers = {self._book.number(engine, index_of(hook), machine) for hook in hooks}
        self._programs.set_target(self.process.pid, sorted(numbers - self._told))
        self._told |= numbers
        self._probes.add(engine, file_id, open_path, hooks, failures)

    def _wanted_of(self, engine: str, file: FileInfo) -> list[HookSite]:
        """Hooks of a file that are to be attached now and are not yet."""
        about = self._catalogue.engine(engine)
        only = about.watch.call if about.watch and engine not in self._wide else None
        return [
            hook
            for hook in _calls(file)
            if not self._probes.knows(file.file_id, hook) and only in (None, about.calls[index_of(hook)].call)
        ]

    def _widen(self, now: float, info: TargetInfo, rows: Sequence[tuple[int, CallRow]]) -> None:
        """Probe the rest of an engine when the call that it is watched by has something to tell, and
        something of the budget is left."""
        if self._free <= 0:
            return
        for engine in {self._book.meanings[n].engine for n in self._told} - self._wide:
            watch = self._catalogue.engine(engine).watch
            if watch is None:
                self._wide.add(engine)
                continue
            values: set[int | None] = set()
            for _, row in rows:
                if row.meaning.engine == engine and row.meaning.call == watch.call:
                    pairs = zip(row.meaning.fields, row.values, strict=False)
                    values |= {value for one, value in pairs if one.name == watch.field}
            if len(values - {None}) > 1:
                self._wide.add(engine)
                self._probes.go_together(engine)
                self._probes.tick(now, self._busy(), self._free)  # a trial begins
                self.add(info)
                self._before = [row for _, row in self._rows()]

    def _note(self, text: str) -> None:
        if text not in self._notes:
            self._notes.append(text)

    def _follow(self, rows: Sequence[tuple[int, CallRow]]) -> None:
        """Functions that the process was given by address: probe them as what they are called.

        Several may go by one name: each round has a name once. A round is a child process that we
        wait for, so there are few at a time, and few in all: whoever has more makes them up.
        """
        wanted: dict[str, list[dict[str, int]]] = {}
        planned: set[int] = set()
        for key, row in rows:
            entry = self._book.entries[key]
            for one, value in zip(entry.fields, row.values, strict=False):
                name = one.function if isinstance(one.function, str) else text_of(row)
                if one.function and value and name and value not in self._followed and value not in planned:
                    rounds = wanted.setdefault(row.meaning.engine, [])
                    place = next((some for some in rounds if name not in some), None)
                    if place is None and len(rounds) < MAX_ROUNDS:
                        rounds.append(place := {})
                    if place is not None:
                        place[name] = value
                        planned.add(value)
        for engine, rounds in wanted.items():
            for addresses in rounds:
                self._rounds += 1
                if self._rounds > MAX_ROUNDS_IN_ALL:
                    self._note(
                        "not all functions that it has asked for by name are probed: there are too many"
                    )
                    return
                self._followed |= set(addresses.values())
                with followed(self.process.pid, self._catalogue.engine(engine), addresses) as files:
                    for file in files:
                        self._attach_followed(engine, file)

    def _name_functions(self, rows: Iterable[tuple[int, CallRow]]) -> None:
        """Of functions of the process that calls are told apart by: what its symbol tables call them."""
        new = {
            value
            for _, row in rows
            for one, value in zip(row.meaning.fields, row.values, strict=False)
            if one.code and not one.library and value and value not in self._functions
        }
        if not new:
            return
        self._functions.update(dict.fromkeys(new))  # none has a name, as far as is known
        with contextlib.suppress(ProfinferError, OSError):
            self._functions.update(named(self.process.pid, new))

    def _attach_followed(self, engine: str, file: Followed) -> None:
        new = [hook for hook in file.hooks if not self._probes.knows(file.file_id, hook)]
        if new:
            self._probe(engine, file.file_id, file.open_path, file.machine, new, [])

    # ---- running ------------------------------------------------------------------------

    def look(self, now: float, info: TargetInfo) -> None:
        """Probe what has become of interest, at most once a second. ``now`` in seconds; ``info``: what is
        known of the process, open."""
        if self._looked is not None and now - self._looked < LOOK_SECONDS:
            return
        self._looked = now
        rows = list(self._rows())
        self._widen(now, info, rows)
        if any(one.function for n in self._told for one in self._book.entries[n].fields):
            with contextlib.suppress(TargetEnded):  # the caller asks whether it is alive
                self._follow(rows)
        self._name_functions(rows)

    def keep(self, now: float, free: float) -> float:
        """Keep the budget, of which ``free`` is for calls; cheap while there is nothing to decide.
        Returns seconds of cost since the last time."""
        self._free = free
        if self._probes.due(now):
            try:
                self._probes.tick(now, self._busy(), free)
            except TargetEnded:
                pass  # the caller asks whether it is alive
            except ProfinferError as error:
                self._note(f"calls that were not watched for a while are not watched again: {error.what}")
        return self._probes.charged_s()

    @property
    def hurried(self) -> bool:
        """Whether :meth:`keep` should be asked again soon."""
        return self._probes.hurried

    def _busy(self) -> float:
        """Seconds since the last time in which the process computed or was inside calls: no more than
        have passed, for the cost may be one thread's. Both by clocks that are read now: when a turn
        began says nothing, for attaching takes time, and what was busy meanwhile would be lost."""
        now, cpu = time.monotonic(), cpu_seconds(self.process.pid)
        inside = sum(row.ns for _, row in self._rows() if row.state == 0) / 1e9
        before, self._clock = self._clock, (now, cpu, inside)
        return max(0.0, min(now - before[0], cpu - before[1] + inside - before[2]))

    def awaits_table(self, info: TargetInfo) -> bool:
        """Whether functions of a library are still to be given out by a table that it has not made."""
        return any(
            file.table is None
            and any(self._catalogue.engine(one.engine).gives_table(h.symbol) for h in file.hooks)
            for one in (info, *info.others)
            for file in one.files
        )

    def table_was_given(self) -> bool:
        """Whether such a table was asked for since the last time that this was."""
        given = sum(
            row.count
            for number, row in self._rows()
            if self._catalogue.engine(row.meaning.engine).gives_table(self._book.entries[number].symbol)
        )
        before, self._given = self._given, given
        return given > before

    def seen(self) -> bool:
        """Whether any call was seen."""
        return self._hits() > 0

    def _hits(self) -> int:
        return sum(int(value["count"]) for _, value in self._programs.sums(self.process.pid))

    def records(self) -> Any:
        """Records since the last time (struct call_record), where they were asked for."""
        return self._programs.records()

    def figures(self) -> CallFigures:
        """Everything seen so far; after :meth:`close`, the last state."""
        if self._final is not None:
            return self._final
        rows = [row for _, row in self._rows()]
        stats = self._programs.stats()
        # Of shared programs nobody knows whose loss it was.
        lost = {f"call_{n}": v for n, v in stats.items() if n != "hits" and v and self._owned}
        with contextlib.suppress(TargetEnded):  # names are those of the last look then
            self._maps = read_maps(self.process.pid) or self._maps
        added = self._totals(rows)
        notes = list(dict.fromkeys([*self._notes, *self._probes.notes]))
        gaps = self._probes.unwatched()
        compiled = programs(rows, {engine for engine, _ in gaps})
        calls = tuple(
            dataclasses.replace(one, unwatched_seconds=gaps.get((one.engine, one.call), 0.0)) for one in added
        )
        shed = tuple(
            ShedCalls(engine, call or None, why.calls_per_second, why.ratio)
            for (engine, call), why in self._probes.shed.items()
        )
        notes += _told_of(shed, gaps)
        cost, busy = self._probes.cost
        if any(one.phase_guess for one in compiled):
            notes.append(GUESSED)
        return CallFigures(
            calls, compiled, memory(calls), tuple(notes),
            sum(row.count for row in rows), self._offload(calls), lost, shed, cost, busy,
            self._probes.budget_ratio,
        )  # fmt: skip

    def _totals(self, rows: Sequence[CallRow]) -> tuple[CallTotal, ...]:
        for key, address in devices(rows).items():
            if key not in self._names and (name := backend_name(self.process.pid, address)) is not None:
                self._names[key] = name
        return totals(rows, self._code_name, self._names)

    def _offload(self, calls: Sequence[CallTotal]) -> Offload | None:
        """Where the time goes, of an engine that is watched by one call until there is something to see."""
        engines = {e for e in self._wide if self._catalogue.engine(e).watch is not None}
        if self._before is None:
            return None
        before = self._totals(self._before)
        return offload([c for c in calls if c.engine in engines], before)

    def _rows(self) -> Iterable[tuple[int, CallRow]]:
        for key, value in self._programs.sums(self.process.pid):
            number = int(key["call"])
            if number not in self._told:
                continue
            meaning = self._book.meanings[number]
            present = int(value["present"])
            values = tuple(int(v) if present >> i & 1 else None for i, v in enumerate(value["value"]))
            row = CallRow(
                meaning, int(key["state"]), int(key["status"]), int(value["count"]), int(value["ns"]),
                int(value["max_ns"]), int(value["untimed"]), int(value["done"]), int(value["done_ns"]),
                tuple(int(n) for n in value["sum"]), values, bytes(value["text"]),
            )  # fmt: skip
            yield number, row

    def _code_name(self, address: int) -> str:
        if name := self._functions.get(address):
            return name
        for mapping in self._maps:
            if mapping.start <= address < mapping.end and mapping.path:
                name = printable(os.path.basename(mapping.path))
                return f"{name}+{address - mapping.start + mapping.offset:#x}"
        return f"{address:#x}"

    def close(self) -> None:
        """Detach. The last figures stay available. May be called twice."""
        if self._final is None:
            try:
                self._probes.detach()
                self._name_functions(self._rows())
                self._final = self.figures()
            finally:
                if self._owned:
                    self._book.close()
                else:
                    self._programs.forget_target(self.process.pid)

    def __enter__(self) -> CallWatch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _told_of(shed: Sequence[ShedCalls], gaps: Collection[tuple[str, str]]) -> list[str]:
    """Notes on what was not watched all the time."""
    notes = [
        f"{one.call or f'calls of {one.engine}'}: watched in short trials only, {one.calls_per_second:.0f} a"
        f" second would cost {one.cost_ratio:.1%} of its time; its figures are of those trials (--budget)"
        for one in shed
    ]
    away = {(one.engine, one.call) for one in shed}
    back = sorted(call for engine, call in gaps if not {(engine, call), (engine, None)} & away)
    if back:
        notes.append(f"not watched for some time, to stay within the budget: {', '.join(back)}")
    return notes


def _calls(file: FileInfo) -> list[HookSite]:
    return [hook for hook in file.hooks if hook.event.startswith(CALL)]


__all__ = ["CallWatch"]
