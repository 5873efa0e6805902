# SPDX-License-Identifier: Apache-2.0
"""What is known about a target before anything is attached: files, hooks, sites, names."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Self

from .process import FileId, Process
from .site import Refusal, Site

if TYPE_CHECKING:
    from .catalogue import Catalogue
    from .layout_types import Layout
    from .names import Tables


@dataclass(frozen=True, slots=True)
class HookSite:
    """One function of one file that will be probed, and where.

    ``event`` is a name of ``probes/events.h``. ``entry`` and ``ret`` say what is probed
    there; ``ret`` is False also when the function has no place where a return probe is
    safe. ``exact`` False: a compiler's clone, whose arguments are not to be trusted.
    ``source``: the symbol table that named it.
    """

    symbol: str
    event: str
    level: str
    label: str
    site: Site
    entry: bool
    ret: bool
    exact: bool
    source: str


@dataclass(frozen=True, slots=True)
class HookRefusal:
    """A function that is in the file and cannot be probed (or not as wanted), and why."""

    symbol: str
    event: str
    reason: str
    places: tuple[Refusal, ...] = ()


@dataclass(frozen=True, slots=True)
class FileInfo:
    """One mapped file that holds functions of the engine.

    ``path`` is printable and as the target sees it; ``open_path`` opens the very file as
    long as the TargetInfo is open. ``role`` names the levels it serves ("call",
    "graph+op", ...). ``op_source``: name of the catalogue's source in use, None when the
    file runs no operators. ``tables`` and ``layouts`` are those that apply to this file,
    perhaps found in a library that it needs. ``table``: what a table of functions in memory
    says of itself.
    """

    path: str
    open_path: str
    fd: int
    file_id: FileId
    build_id: str
    role: str
    machine: str
    symbols: str
    hooks: tuple[HookSite, ...]
    refused: tuple[HookRefusal, ...]
    op_source: str | None
    complete: bool
    tables: Tables | None
    layouts: tuple[Layout, ...]
    table: str | None = None


@dataclass(frozen=True, slots=True)
class FileFailure:
    """One mapped file that could not be looked into, and why; others are not affected."""

    path: str
    reason: str


@dataclass(slots=True)
class TargetInfo:
    """A process with an engine. Holds descriptors of its files: close it, or use ``with``.

    ``levels``: those that can be seen. ``op_source`` and ``complete`` speak for all files
    that run operators. ``seen``: executable files at the time of the look, for
    :func:`.process.engine_files_changed`. ``others``: what is known of it as a process of
    other engines; they share ``seen`` and are closed with it. ``catalogue``: what was looked
    for, whose numbers the events of calls are.
    """

    process: Process
    engine: str
    label: str
    files: tuple[FileInfo, ...]
    failures: tuple[FileFailure, ...]
    levels: tuple[str, ...]
    op_source: str | None
    complete: bool
    tables: Tables | None
    layouts: tuple[Layout, ...]
    models: tuple[str, ...]
    notes: tuple[str, ...]
    seen: frozenset[FileId]
    others: tuple[TargetInfo, ...] = ()
    catalogue: Catalogue | None = None
    _open: bool = field(default=True, repr=False)

    def close(self) -> None:
        """Close the descriptors; ``open_path`` of the files is of no use afterwards."""
        if self._open:
            self._open = False
            for file in self.files:
                os.close(file.fd)
            for other in self.others:
                other.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
