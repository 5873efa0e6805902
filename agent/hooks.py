# SPDX-License-Identifier: Apache-2.0
"""Probes on the functions and places of an engine's files, in one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .errors import MachineError, ProfinferError, TargetEnded, TargetError
from .kernel.programs import GgmlPrograms, Probe
from .target.facts import FileInfo, HookSite
from .target.process import Process, alive

GROUPS = {"op": "ops", "graph": "graphs", "call": "calls"}
"""Groups of links by level of the hook, in the order in which they are attached."""
SPLIT = "LV_BACKEND"
"""The event of what is given to one backend; on the CPU it is a graph (LV_CPU)."""


@dataclass(slots=True)
class Attached:
    """What was attached, for people and for the JSON."""

    method: str
    op_source: str | None
    complete: bool
    seconds: float
    sites: int
    busy: bool | None = None
    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        """Add a note, once: bursts and looks for libraries try again and again."""
        if text not in self.notes:
            self.notes.append(text)

    def has_operators_of(self, file: FileInfo) -> None:
        """Operators of this file are seen, by its way of telling them."""
        if file.op_source is not None:
            self.op_source = self.op_source or file.op_source
            self.complete = self.complete and file.complete


class Hooks:
    """Attaches what levels ask for. ``ops``: all, sampled or off.

    What belongs to splits on other backends than the CPU is left out until there are some.
    """

    def __init__(self, process: Process, programs: GgmlPrograms, attached: Attached, ops: str) -> None:
        self.ops = ops
        self.splits = False
        self._process, self._programs, self._attached = process, programs, attached

    def of(self, file: FileInfo, group: str) -> list[HookSite]:
        """The hooks of one group that are wanted of a file."""
        return [hook for hook in file.hooks if GROUPS.get(hook.level) == group and self._wanted(hook)]

    def _wanted(self, hook: HookSite) -> bool:
        if hook.event == SPLIT:
            return self.splits
        return self.ops != "off" or hook.level != "op"

    def attach_group(self, group: str, files: Sequence[FileInfo]) -> int:
        """Attach all hooks of one group, in every file that has some; returns how many.

        When it raises, none is left: the next attempt would attach those a second time.
        """
        failures: list[ProfinferError] = []
        done = 0
        try:
            for file in files:
                done += self.attach(group, file, self.of(file, group), failures)
        except BaseException:
            self._programs.detach(group)
            raise
        return done

    def attach_splits(self, files: Sequence[FileInfo]) -> None:
        """What is given to other backends than the CPU: from now on, for it costs two hits a split."""
        self.splits = True
        failures: list[ProfinferError] = []
        for file in files:
            try:
                splits = [hook for hook in file.hooks if hook.event == SPLIT]
                self._attached.sites += self.attach("graphs", file, splits, failures)
            except TargetEnded:
                return  # the caller asks whether it is alive
            except MachineError as error:
                failures.append(error)
        if failures:
            self._attached.note(f"where operators run is not known: {failures[0].what}")

    def attach(
        self, group: str, file: FileInfo, hooks: Sequence[HookSite], failures: list[ProfinferError]
    ) -> int:
        """All hooks of a file with few links; where that fails, each by itself (case C03)."""
        if not hooks:
            return 0
        pid = self._process.pid
        probes = [self._probe(h) for h in hooks]
        try:
            self._programs.attach(group, file.open_path, pid, probes)
            return len(probes)
        except MachineError:
            raise
        except TargetError as error:
            if not alive(self._process):
                raise TargetEnded(f"process {pid} ended while probes were attached") from error
        done = 0
        for hook, probe in zip(hooks, probes, strict=True):
            try:
                self._programs.attach(group, file.open_path, pid, [probe])
                done += 1
            except TargetError as error:
                failures.append(error)
                self._attached.note(f"{hook.symbol} is not probed: {error.what}")
                if hook.level == "op":
                    self._attached.complete = False
        return done

    def _probe(self, hook: HookSite) -> Probe:
        levels = self._programs.types.constants()
        return Probe(levels[hook.event], hook.site.offset, hook.site.moved, hook.ret)
