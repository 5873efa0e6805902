# SPDX-License-Identifier: Apache-2.0
"""What this machine and one of its processes can give, and what is lost where something is missing.

The machine is tried by :mod:`.kernel.check`; the process is only looked into, never attached to.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from .errors import ExitCode, MachineError, ProfinferError
from .kernel.check import Fact, Machine, check_machine, returns_under_seccomp, seccomp_mode
from .kernel.reasons import missing
from .target.catalogue import load_catalogue
from .target.facts import TargetInfo
from .target.inspect import inspect_target
from .target.process import open_process

_FILTER = 2  # mode of a sandboxed process in /proc/PID/status

LOSSES = {
    "btf": "call and return probes need two links instead of one",
    "perf_uprobes": "nothing is lost while many uprobes fit in one link",
    "uprobe_multi": "attaching takes seconds instead of milliseconds; operator bursts are rarer",
    "uprobe_session": "call and return probes cost a little more",
    "sleepable": "a graph whose memory is paged out is not read until it is back",
    "thread_exits": "a thread that dies inside a call is noticed late",
    "returns_under_seccomp": "calls of sandboxed processes are not timed",
    "other_users": "only processes of this user can be watched",
    "map_files": "files that were deleted, or lie in another mount namespace, cannot always be opened",
}
"""What a person does without when an optional thing is missing, by name of the fact."""


@dataclass(frozen=True, slots=True)
class Level:
    """One level of detail of a process: whether it is to be had, and why not (or why not whole)."""

    name: str
    ok: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ProcessReport:
    """What a process can give. ``error`` is None when it can be profiled."""

    pid: int
    program: str | None = None
    engine: str | None = None
    model: str | None = None
    op_source: str | None = None
    layouts: tuple[str, ...] = ()
    levels: tuple[Level, ...] = ()
    notes: tuple[str, ...] = ()
    error: ProfinferError | None = None


@dataclass(frozen=True, slots=True)
class Checkup:
    """Everything that was found. ``blocked`` says why this machine cannot profile at all."""

    machine: Machine
    extra: tuple[Fact, ...]
    blocked: MachineError | None
    process: ProcessReport | None
    kernel: str
    architecture: str

    @property
    def facts(self) -> tuple[Fact, ...]:
        """What was tried, in the order in which one thing stands on another."""
        return (*self.machine.facts, *self.extra)

    @property
    def exit_code(self) -> ExitCode:
        """4 when the machine cannot, else 3 (or what the process's error says), else 0."""
        if self.blocked is not None:
            return ExitCode.MACHINE
        if self.process is not None and self.process.error is not None:
            return self.process.error.exit_code
        return ExitCode.DONE


def check_up(
    pid: int | None = None,
    *,
    btf_path: str | None = None,
    sysfs: Path = Path("/sys"),
    without: Collection[str] = (),
) -> Checkup:
    """Try the machine, and look into process ``pid`` where one is given.

    Takes about half a second. ``sysfs`` and ``without`` as in :func:`.kernel.check.check_machine`.
    """
    machine = check_machine(btf_path=btf_path, sysfs=sysfs, without=without)
    blocked = None
    try:
        machine.require()
    except MachineError as error:
        blocked = error
    process = None if pid is None else look_into(pid)
    return Checkup(machine, privileges(), blocked, process, platform.release(), platform.machine())


def privileges(held: frozenset[str] | None = None) -> tuple[Fact, ...]:
    """What looking into other processes needs; by the capabilities held, which is how the kernel decides."""
    wanted = (
        ("other_users", "looking into processes of other users", ("CAP_SYS_PTRACE", "CAP_DAC_READ_SEARCH")),
        ("map_files", "opening deleted and hidden files that are mapped", ("CAP_CHECKPOINT_RESTORE",)),
    )
    facts = []
    for name, what, needed in wanted:
        lacking = " and ".join(missing(needed, held))
        reason = f"this process lacks {lacking}" if lacking else ""
        facts.append(
            Fact(name, what, not lacking, reason, f"run as root, or give it {lacking}" * bool(lacking))
        )
    return tuple(facts)


def look_into(pid: int) -> ProcessReport:
    """What process ``pid`` can give; what stands against it is in the report, nothing is raised."""
    try:
        process = open_process(pid)
    except ProfinferError as error:
        return ProcessReport(pid, error=error)
    program = os.path.basename(process.exe)
    try:
        if seccomp_mode(pid) == _FILTER:
            returns_under_seccomp()
        with inspect_target(process) as info:
            return _report(info, program)
    except ProfinferError as error:
        return ProcessReport(pid, program, error=error)


def _report(info: TargetInfo, program: str) -> ProcessReport:
    levels = []
    for name in load_catalogue().engine(info.engine).levels():
        refused = [
            f"{r.symbol}: {r.reason}"
            for f in info.files
            for r in f.refused
            if _level_of(info, r.event) == name
        ]
        if name not in info.levels:
            levels.append(Level(name, False, refused[0] if refused else "its functions were not found"))
        elif name == "op" and not info.complete:
            levels.append(Level(name, True, "incomplete: no function of this build sees every operator"))
        else:
            levels.append(Level(name, True))
    return ProcessReport(
        info.process.pid,
        program,
        info.label,
        info.models[0] if info.models else None,
        info.op_source,
        tuple(dict.fromkeys(layout.name for layout in info.layouts)),
        tuple(levels),
        tuple(note for note in info.notes if "level is not available" not in note),
    )


def _level_of(info: TargetInfo, event: str) -> str | None:
    """The level of an event, from the hooks of the same event elsewhere; None where none has it."""
    return next((h.level for f in info.files for h in f.hooks if h.event == event), None)
