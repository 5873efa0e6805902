# SPDX-License-Identifier: Apache-2.0
"""Look into a process before attaching: which engine, which functions, where to probe.

The files are opened here, by the kernel's own links to what is mapped, and handed as
descriptors to a short-lived child (:mod:`.inspect_child`), which does the parsing and the
disassembling under limits. What comes back is checked against types and a size. A child
that crashes or hangs costs the file that it was looking at, nothing else.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import MachineError, TargetEnded
from .calldata import CallEntry
from .catalogue import Catalogue, Engine, Hook, load_catalogue
from .child import Child
from .conclusion import Found, conclude
from .engine_file import CALL, TABLE, FileFacts
from .facts import FileFailure, FileInfo, HookRefusal, HookSite, TargetInfo
from .process import (
    FileId,
    MappedFile,
    Process,
    alive,
    executable_files,
    executable_ids,
    model_files,
    open_process,
)

if TYPE_CHECKING:
    from .factscache import FactsCache

__all__ = [
    "FileFailure",
    "FileInfo",
    "HookRefusal",
    "HookSite",
    "TargetInfo",
    "inspect_target",
    "start_child",
]

TIMEOUT = 60.0
"""Of the clock on the wall; see ``inspect_child`` for the CPU time of one file."""
SPARE_FDS = 64
MAX_CRASHES = 3
_MACHINES = ("x86_64", "aarch64")


class _Answer(msgspec.Struct, forbid_unknown_fields=True):
    """One line of the child; exactly one of the kinds is set."""

    start: int | None = None
    file: int | None = None
    failed: str | None = None
    facts: list[FileFacts] | None = None
    names: dict[str, str] | None = None
    nameless: int | None = None
    engine: str | None = None
    build_id: str | None = None
    done: bool = False


def inspect_target(
    target: int | Process,
    catalogue: Catalogue | None = None,
    timeout: float = TIMEOUT,
    child: Child | None = None,
    cache: FactsCache | None = None,
) -> TargetInfo:
    """Everything needed to attach to a process; close the result (it holds open files).

    Raises TargetError (no such process, no engine, no symbols, ...), TargetEnded,
    MachineError (not permitted). ``timeout`` in seconds bounds each of at most four children.
    ``child``: one from :func:`start_child`, to save its start-up time; it is used up. ``cache``:
    what is known of files already, and learns the rest; no child is needed for what is in it.
    """
    try:
        process = target if isinstance(target, Process) else open_process(target)
        if cache is None:
            child = child or start_child()
        return _look(process, child, catalogue, timeout, cache)
    finally:
        if child is not None:
            child.close()


def _look(
    process: Process,
    child: Child | None,
    catalogue: Catalogue | None,
    timeout: float,
    cache: FactsCache | None,
) -> TargetInfo:
    mapped = executable_files(process.pid)
    if not mapped and not alive(process):
        raise TargetEnded(f"process {process.pid} ended while it was looked at")
    descriptors: dict[int, int] = {}
    unreadable: dict[int, str] = {}
    kept: set[int] = set()
    root = f"/proc/{process.pid}/root"
    catalogue = catalogue or load_catalogue()
    try:
        worth = list(range(len(mapped)))
        if cache is not None:
            worth = cache.look(mapped, root, catalogue, timeout)
        most = _descriptors()
        for number in worth:
            try:
                if len(descriptors) >= most:
                    raise OSError(errno.EMFILE, "more files than may be open at once (ulimit -n)")
                descriptors[number] = open_mapped(mapped[number])
            except OSError as error:
                unreadable[number] = error.strerror or "cannot be opened"
        gone = _gone(process.pid, mapped, unreadable)
        models = tuple(model_files(process.pid))
        asked = {n: Asked(mapped[n].path, root, fd) for n, fd in descriptors.items()}
        if cache is not None:
            found = cache.found(mapped, descriptors)
        else:
            found = ask_files(child or start_child(), asked, catalogue, timeout)
        _look_into_tables(process, mapped, asked, catalogue, found, timeout)
        found.failed.update(unreadable)
        if not alive(process):
            raise TargetEnded(f"process {process.pid} ended while it was looked at")
        info = conclude(process, mapped, descriptors, catalogue, found, models)
        info.catalogue = catalogue
        info.seen -= gone
        kept = {file.fd for one in (info, *info.others) for file in one.files}
        return info
    finally:
        for fd in descriptors.values():
            if fd not in kept:
                os.close(fd)


def _gone(pid: int, mapped: Sequence[MappedFile], unreadable: dict[int, str]) -> frozenset[FileId]:
    """Files that were unmapped since they were listed, as a driver is that was only tried: what is not
    there is no failure. They are taken out of ``unreadable``."""
    if not unreadable:
        return frozenset()
    there = executable_ids(pid)
    gone = {n: (mapped[n].dev, mapped[n].inode) for n in unreadable}
    gone = {n: file_id for n, file_id in gone.items() if file_id not in there}
    for number in gone:
        del unreadable[number]
    return frozenset(gone.values())


def _look_into_tables(
    process: Process, mapped: list[MappedFile], asked: Mapping[int, Asked],
    catalogue: Catalogue, found: Found, timeout: float,
) -> None:  # fmt: skip
    """Functions that only a table in the target's memory names: find it, and look at them.

    What is in ``found`` may be kept by others, and is replaced, not changed.
    """
    tables: dict[tuple[int, str], str] = {}
    again: dict[int, Asked] = {}
    if all(catalogue.engine(facts.engine).table is None for some in found.facts.values() for facts in some):
        return
    from .functable import find_table  # and numpy with it, which most who look do not need

    for number, several in list(found.facts.items()):
        for facts in several:
            engine = catalogue.engine(facts.engine)
            if engine.table is None or all(h.symbol != engine.table.returned_by for h in facts.hooks):
                continue
            table = find_table(process.pid, mapped[number], engine.table)
            if table is None:
                why = f"no table of its functions is in memory yet ({engine.table.returned_by})"
                # The function that gives the table is watched until then, if it is described as a call.
                left = [h for h in facts.hooks if h.event != TABLE]
                _replace(found, number, replace(facts, hooks=left, problems=[*facts.problems, why]))
            else:
                tables[number, facts.engine] = table.description
                again[number] = replace(asked[number], slots=table.offsets)
    if not again:
        return
    child = start_child()
    try:
        looked = ask_files(child, again, catalogue, timeout)
    finally:
        child.close()
    for number, several in looked.facts.items():
        for facts in several:
            if (number, facts.engine) in tables:
                facts.hooks = [h for h in facts.hooks if h.event != TABLE]
                facts.table = tables[number, facts.engine]
                _replace(found, number, facts)


def _replace(found: Found, number: int, facts: FileFacts) -> None:
    found.facts[number] = [facts if f.engine == facts.engine else f for f in found.facts[number]]


def _descriptors() -> int:
    """How many files may be held open for one look."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return limit - min(SPARE_FDS, limit // 2)


def start_child() -> Child:
    """Start the child before it is needed: its interpreter takes 0.1 s to be ready.

    Hand it to :func:`inspect_target`, which ends it, or call its ``close``.
    """
    return Child(_command())


def open_mapped(file: MappedFile) -> int:
    """The very file that is mapped; OSError with the reason when it cannot be opened."""
    if not file.open_path:
        raise OSError(0, "no path leads to the very file that is mapped (CAP_CHECKPOINT_RESTORE opens it)")
    fd = os.open(file.open_path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    # The mapping may have been replaced since it was listed.
    if os.fstat(fd).st_ino != file.inode:
        os.close(fd)
        raise OSError(0, "the mapped file changed while it was looked at")
    return fd


def _command() -> list[str]:
    """An interpreter without site packages' start-up files: half the time, nothing of the environment."""
    here = os.path.dirname(os.path.abspath(__file__))
    root = os.path.dirname(os.path.dirname(os.path.dirname(here)))
    paths = [root, *(p for p in sys.path if os.path.isabs(p) and p != root)]
    code = (
        "import sys; sys.path[:] = [p for p in sys.path if p not in sys.argv[1:]] + sys.argv[1:]; "
        "from profinferd.agent.target.inspect_child import main; main()"
    )
    if not sys.executable:
        raise MachineError("the Python interpreter does not know its own path", "start it by its full path")
    return [sys.executable, "-I", "-S", "-c", code, *paths]


def _engine_data(engine: Engine) -> dict[str, object]:
    """The engine as JSON, with what the child would have to work out from the arguments."""
    data: dict[str, Any] = msgspec.to_builtins(engine)
    data["hooks"] = [_hook_data(h) for h in engine.hooks] + [
        _call_data(c, number) for number, c in enumerate(engine.calls)
    ]
    data["calls"] = []
    if engine.table is not None and all(c.symbol != engine.table.returned_by for c in engine.calls):
        data["hooks"].append(_table_data(engine.table.returned_by))
    data["sources"] = [
        {"name": s.name, "level": s.level, "complete": s.complete, "hooks": [_hook_data(h) for h in s.hooks]}
        for s in engine.sources
    ]
    return data


def _hook_data(hook: Hook) -> dict[str, object]:
    data: dict[str, object] = msgspec.to_builtins(hook)
    data["arg_regs"] = {m: hook.arg_regs(m) for m in _MACHINES}
    data["stack_args"] = {m: hook.stack_args(m) for m in _MACHINES}
    return data


def _call_data(call: CallEntry, number: int) -> dict[str, object]:
    """A call as the child knows functions: its event says which one it is."""
    return {
        "label": call.call, "level": "api", "event": f"{CALL}{number}", "symbol": call.symbol,
        "pattern": call.pattern, "slot": call.slot, "required_for": [],
        "probe": ["entry"] if call.entry_only else ["entry", "return"],
        "reads": [call.call] if call.fields else [],
        "arg_regs": {m: call.arg_regs(m) for m in _MACHINES},
        "stack_args": {m: call.stack_args(m) for m in _MACHINES},
    }  # fmt: skip


def _table_data(name: str) -> dict[str, object]:
    """The function that gives a table of functions: not probed, but it shows that there is one."""
    return {
        "label": "table", "level": "api", "event": TABLE, "symbol": name, "pattern": None, "slot": None,
        "required_for": [], "probe": ["entry"], "reads": [], "arg_regs": dict.fromkeys(_MACHINES, 0),
        "stack_args": dict.fromkeys(_MACHINES, False),
    }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Asked:
    """An open file to be looked into: its path as the target has it, and where the target's / is.

    ``slots``: offsets in it of functions that a table in memory names. ``places``: offsets of
    functions whose names alone are asked for.
    """

    path: str
    root: str
    fd: int
    slots: Mapping[str, int] = field(default_factory=dict)
    places: Sequence[int] = ()


def ask_files(
    child: Child, files: Mapping[int, Asked], catalogue: Catalogue, timeout: float, *, each: bool = False
) -> Found:
    """Put the request to a child; after a crash, to another one for the files that are left.

    ``each``: look for nameless builds in every file, not only where no file has names.
    """
    found = Found({}, {})
    engines = [_engine_data(e) for e in catalogue.engines]
    pending, crashes = list(files), 0
    decoder = msgspec.json.Decoder(_Answer)
    while True:
        asked = [
            {
                "file": n,
                "path": files[n].path,
                "root": files[n].root,
                "slots": dict(files[n].slots),
                "places": list(files[n].places),
            }
            for n in pending
        ]
        request = json.dumps({"engines": engines, "files": asked, "each": each}).encode()
        child.send(request, [files[n].fd for n in pending], timeout)
        current: int | None = None
        for line in child.lines(timeout):
            try:
                answer = decoder.decode(line)
            except msgspec.MsgspecError as error:
                child.fail(f"its answer makes no sense ({error})")
                break
            if answer.start is not None:
                current = answer.start
            elif answer.file is not None:
                pending.remove(answer.file)
                if answer.names is not None:
                    found.names[answer.file] = {int(place): name for place, name in answer.names.items()}
                elif answer.facts:
                    found.facts[answer.file] = answer.facts
                elif answer.failed is not None:
                    found.failed[answer.file] = answer.failed
            elif answer.nameless is not None:
                evidence = (answer.nameless, answer.engine or "", answer.build_id or "")
                found.all_nameless[answer.nameless] = evidence
                found.nameless = found.nameless or evidence
            elif answer.done:
                return found
        crashes += 1
        reason, unlucky = child.reason(), child.unlucky
        if current is None or current not in pending or crashes > MAX_CRASHES:
            for number in pending:
                found.failed[number] = f"looking into it failed: {reason}"
                if unlucky or number != current:
                    found.again.add(number)
            return found
        found.failed[current] = f"looking into it failed: {reason}"
        if unlucky:
            found.again.add(current)
        elif child.spent:
            found.costly.add(current)
        pending.remove(current)
        if not pending:
            return found
        child.restart()
