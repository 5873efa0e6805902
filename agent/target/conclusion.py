# SPDX-License-Identifier: Apache-2.0
"""From what was found in each file to what can be seen of the process."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass, field

from ..errors import TargetError
from .catalogue import Catalogue, Engine
from .engine_file import FileFacts
from .facts import FileFailure, FileInfo, TargetInfo
from .layout_known import KNOWN
from .layout_types import Layout
from .process import MappedFile, Process
from .text import printable


@dataclass(slots=True)
class Found:
    """What the children said, by number of the file."""

    facts: dict[int, list[FileFacts]]
    failed: dict[int, str]
    nameless: tuple[int, str, str] | None = None
    all_nameless: dict[int, tuple[int, str, str]] = field(default_factory=dict)
    names: dict[int, dict[int, str]] = field(default_factory=dict)
    again: set[int] = field(default_factory=set)
    """Those of ``failed`` for which the file is not to blame."""
    costly: set[int] = field(default_factory=set)
    """Those of ``failed`` that took more CPU time than a file may."""


def conclude(
    process: Process, mapped: list[MappedFile], descriptors: dict[int, int],
    catalogue: Catalogue, found: Found, models: tuple[str, ...],
) -> TargetInfo:  # fmt: skip
    failures = tuple(
        FileFailure(printable(mapped[n].path, 4096), why) for n, why in sorted(found.failed.items())
    )
    every = [facts for several in found.facts.values() for facts in several]
    names = {facts.engine for facts in every if facts.hooks}
    if not names:
        raise _nothing(process, mapped, found, failures)
    # What has operators comes first, then what others do not merely compute with.
    engines = sorted(
        (engine for engine in catalogue.engines if engine.engine in names),
        key=lambda engine: (not engine.sources, engine.beneath),
    )
    used: set[int] = set()
    infos: list[TargetInfo] = []
    for engine in engines:
        facts_of = {n: f for n, several in found.facts.items() for f in several if f.engine == engine.engine}
        files, notes = _files(mapped, descriptors, facts_of, used)
        if not infos:
            notes += [f"{os.path.basename(f.path)} was not looked into: {f.reason}" for f in failures]
        first = failures if not infos else ()
        infos.append(_whole(process, engine, files, first, models, notes, mapped))
    return dataclasses.replace(infos[0], others=tuple(infos[1:]))


def _files(
    mapped: list[MappedFile], descriptors: dict[int, int], facts_of: dict[int, FileFacts], used: set[int]
) -> tuple[list[FileInfo], list[str]]:
    """The files of one engine, and notes. A file of two engines is opened twice (``used``)."""
    files: list[FileInfo] = []
    notes: list[str] = []
    for number, facts in sorted(facts_of.items()):
        provider = _provider(number, facts_of)
        file = mapped[number]
        levels = dict.fromkeys(hook.level for hook in facts.hooks)
        fd = descriptors[number] if number not in used else os.dup(descriptors[number])
        used.add(number)
        files.append(
            FileInfo(
                path=printable(file.path, 4096), open_path=f"/proc/self/fd/{fd}",
                fd=fd, file_id=(file.dev, file.inode), build_id=facts.build_id,
                role="+".join(levels), machine=facts.machine, symbols=facts.symbols, hooks=tuple(facts.hooks),
                refused=tuple(facts.refused), op_source=facts.op_source, complete=facts.complete,
                tables=provider.tables if provider else None,
                layouts=_layouts(provider or facts), table=facts.table,
            )
        )  # fmt: skip
        name = printable(os.path.basename(file.path))
        notes += [f"{name}: {problem}" for problem in facts.problems]
        notes += [f"{name}: {r.symbol} is not probed as wanted: {r.reason}" for r in facts.refused]
    return files, notes


def _whole(
    process: Process, engine: Engine, files: list[FileInfo], failures: tuple[FileFailure, ...],
    models: tuple[str, ...], notes: list[str], mapped: list[MappedFile],
) -> TargetInfo:  # fmt: skip
    """The files together: levels, the poorest source of operators, the tables that most files share."""
    present = {hook.level for file in files for hook in file.hooks}
    levels = tuple(level for level in engine.levels() if level in present)
    notes += [f"{level} level is not available: its functions were not found" for level in engine.levels()
              if level not in present]  # fmt: skip
    order = {source.name: place for place, source in enumerate(engine.sources)}
    running = sorted((f for f in files if f.op_source), key=lambda f: order.get(f.op_source or "", 0))
    main = running[0] if running else next((f for f in files if f.tables), files[0])
    complete = bool(running) and all(f.complete for f in running)
    if running and not complete:
        notes.append("operator times are incomplete: no function of this build sees every operator")
    return TargetInfo(
        process=process, engine=engine.engine, label=engine.label, files=tuple(files), failures=failures,
        levels=levels, op_source=running[-1].op_source if running else None, complete=complete,
        tables=main.tables, layouts=main.layouts, models=models, notes=tuple(notes),
        seen=frozenset((m.dev, m.inode) for m in mapped),
    )  # fmt: skip


def _layouts(facts: FileFacts) -> tuple[Layout, ...]:
    """Candidates; every known one for a file that says nothing (the live graph decides)."""
    return tuple(facts.layouts) or tuple(KNOWN)


def _provider(number: int, facts_of: dict[int, FileFacts]) -> FileFacts | None:
    """Whose operator table applies to a file: its own, a needed library's, or the only one."""
    own = facts_of[number]
    if own.tables is not None:
        return own
    having = [facts for facts in facts_of.values() if facts.tables is not None]
    for facts in having:
        if facts.soname and facts.soname in own.needed:
            return facts
    return having[0] if len(having) == 1 else None


def _nothing(
    process: Process, mapped: list[MappedFile], found: Found, failures: tuple[FileFailure, ...]
) -> TargetError:
    """The error for a process in which no function of an engine was found."""
    if found.nameless is not None:
        number, engine, identity = found.nameless
        name = printable(os.path.basename(mapped[number].path))
        known = f"build-id {identity}" if identity else "and no build-id"
        where = f" in /usr/lib/debug/.build-id/{identity[:2]}/" if identity else ""
        return TargetError(
            f"no symbols: {known} ({name} in process {process.pid} is a {engine} build without names)",
            f"install its debug file{where} or run a build that is not fully stripped",
        )
    problems = [p for several in found.facts.values() for facts in several for p in facts.problems]
    if problems:
        return TargetError(
            f"process {process.pid} has an engine that cannot be seen: {problems[0]}",
            "attach again when it has begun to compute",
        )
    refused = [r for several in found.facts.values() for facts in several for r in facts.refused]
    if refused:
        return TargetError(
            f"process {process.pid} has an engine whose functions cannot be probed ({refused[0].symbol}: "
            f"{refused[0].reason})", "run another build of the engine",
        )  # fmt: skip
    hint = ""
    if failures:
        first = f"first {os.path.basename(failures[0].path)}: {failures[0].reason}"
        hint = f" ({len(failures)} of its files could not be read, {first})"
    return TargetError(
        f"no inference engine found in process {process.pid}{hint}",
        "give the pid of the process that runs the model; it must have loaded its libraries",
    )
