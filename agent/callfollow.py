# SPDX-License-Identifier: Apache-2.0
"""Functions that a process takes by address at run time: where they lie, and how to probe them.

A library may hand out addresses of functions that have no name in any table (case C45). Each
address is turned into a place in its file, and looked at by the child as any function is.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from .target.catalogue import Catalogue, Engine
from .target.engine_file import IN_MEMORY
from .target.facts import HookSite
from .target.inspect import Asked, ask_files, start_child
from .target.process import FileId, find_open_path, read_maps
from .target.process import Mapping as MemoryMap

TIMEOUT = 20.0


@dataclass(frozen=True, slots=True)
class Followed:
    """Functions of one file; ``open_path`` is good while the context is open."""

    file_id: FileId
    open_path: str
    machine: str
    hooks: tuple[HookSite, ...]


def named(pid: int, addresses: Iterable[int]) -> dict[int, str]:
    """Names of the functions that begin at these addresses, of those that have one.

    Raises TargetEnded and MachineError as looking into a process does.
    """
    maps = [m for m in read_maps(pid) if "x" in m.perms and m.inode]
    per_file: dict[FileId, tuple[MemoryMap, dict[int, int]]] = {}
    for address in addresses:
        mapping = next((m for m in maps if m.start <= address < m.end), None)
        if mapping is not None:
            places = per_file.setdefault(mapping.file_id, (mapping, {}))[1]
            places[address - mapping.start + mapping.offset] = address
    asked: dict[int, Asked] = {}
    wanted: list[dict[int, int]] = []
    try:
        for mapping, places in per_file.values():
            path = find_open_path(pid, mapping)
            if path:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
                asked[len(wanted)] = Asked(mapping.path, f"/proc/{pid}/root", fd, places=list(places))
                wanted.append(places)
        if not asked:
            return {}
        child = start_child()
        try:
            found = ask_files(child, asked, Catalogue(engines=[]), TIMEOUT)
        finally:
            child.close()
        return {
            wanted[number][place]: name
            for number, names in found.names.items()
            for place, name in names.items()
            if place in wanted[number]
        }
    finally:
        for one in asked.values():
            os.close(one.fd)


def symbol_of(engine: Engine, name: str) -> str | None:
    """The catalogue's symbol for a function asked for as ``name``: its newest version."""
    known = {call.symbol for call in engine.calls}
    return next((s for s in (f"{name}_v3", f"{name}_v2", name) if s in known), None)


@contextmanager
def followed(pid: int, engine: Engine, addresses: Mapping[str, int]) -> Iterator[list[Followed]]:
    """The functions at these addresses, by the names that they were asked for.

    What the catalogue does not know, or lies in no file, is left out. Raises TargetEnded and
    MachineError as looking into a process does.
    """
    maps = [m for m in read_maps(pid) if "x" in m.perms and m.inode]
    per_file: dict[FileId, tuple[MemoryMap, dict[str, int]]] = {}
    for name, address in addresses.items():
        symbol = symbol_of(engine, name)
        mapping = next((m for m in maps if m.start <= address < m.end), None)
        if symbol is not None and mapping is not None:
            slots = per_file.setdefault(mapping.file_id, (mapping, {}))[1]
            slots[symbol] = address - mapping.start + mapping.offset
    descriptors: list[int] = []
    try:
        out: list[Followed] = []
        for file_id, (mapping, slots) in per_file.items():
            path = find_open_path(pid, mapping)
            if not path:
                continue
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
            descriptors.append(fd)
            out += _look(pid, engine, file_id, mapping.path, fd, slots)
        yield out
    finally:
        for fd in descriptors:
            os.close(fd)


def _look(
    pid: int, engine: Engine, file_id: FileId, path: str, fd: int, slots: Mapping[str, int]
) -> Iterator[Followed]:
    child = start_child()
    try:
        asked = Asked(path, f"/proc/{pid}/root", fd, slots)
        found = ask_files(child, {0: asked}, Catalogue(engines=[engine]), TIMEOUT)
    finally:
        child.close()
    for facts in found.facts.get(0, []):
        hooks = tuple(hook for hook in facts.hooks if hook.source == IN_MEMORY)
        yield Followed(file_id, f"/proc/self/fd/{fd}", facts.machine, hooks)
