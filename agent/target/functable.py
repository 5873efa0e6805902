# SPDX-License-Identifier: Apache-2.0
"""A table of functions in the memory of a process: functions of a library that exports no names.

The table is recognised by what it says of itself (its own size, and the size of a structure
inside it) and by what it holds: nearly all of its words are addresses of the library's code.
The memory is only read, in bounded pieces; nothing in it is believed without both signs.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .calldata import FunctionTable
from .memory import AbsentMemory, read_memory
from .process import MappedFile, Mapping, read_maps

MAX_SCAN = 128 << 20
PIECE = 1 << 20
MAX_TABLE = 16 << 10
"""Bytes of a table; PJRT's has 1,100 today."""
IN_CODE = 0.9
"""Share of the words that must be addresses of the library's code."""
MAX_BSS = 16 << 20


@dataclass(frozen=True, slots=True)
class Found:
    """``offsets``: in the file, by name of the function. ``description``: what it says of itself."""

    offsets: dict[str, int]
    description: str


def find_table(pid: int, file: MappedFile, table: FunctionTable) -> Found | None:
    """The table of this library, None when its memory holds none (it may be made later).

    Raises TargetEnded or MachineError as :func:`.memory.read_memory` does.
    """
    code = [m for m in file.mappings if "x" in m.perms]
    if not code:
        return None
    budget = MAX_SCAN
    for mapping in _data(pid, file):
        for raw in _pieces(pid, mapping, min(budget, mapping.end - mapping.start)):
            found = _search(raw, table, code)
            if found is not None:
                return found
            budget -= len(raw)
    return None


def _data(pid: int, file: MappedFile) -> Iterator[Mapping]:
    """What the library may write or have relocated; what follows it without a file is its zeroed part."""
    ends = set()
    for mapping in file.mappings:
        if "x" not in mapping.perms and "r" in mapping.perms and ("w" in mapping.perms or mapping.offset):
            ends.add(mapping.end)
            yield mapping
    for mapping in read_maps(pid):
        zeroed = mapping.start in ends and not mapping.inode and "rw" in mapping.perms
        if zeroed and mapping.end - mapping.start <= MAX_BSS:
            yield mapping


def _pieces(pid: int, mapping: Mapping, size: int) -> Iterator[bytes]:
    """Overlapping pieces, so that a table at a seam is whole in one."""
    at = mapping.start
    while at < mapping.start + size:
        count = min(PIECE + MAX_TABLE, mapping.end - at)
        try:
            yield read_memory(pid, at, count)
        except AbsentMemory:
            return  # a hole, or it went
        at += PIECE


def _search(raw: bytes, table: FunctionTable, code: list[Mapping]) -> Found | None:
    """The first table in ``raw``, in time that depends on its size alone, whatever it is made of."""
    words = np.frombuffer(raw[: len(raw) // 8 * 8], "<u8")
    inner = table.inner_size_at // 8
    if len(words) <= inner:
        return None
    at = np.flatnonzero(words[inner:] == table.inner_size)
    sizes = words[at]
    fits = (sizes > table.first) & (sizes <= MAX_TABLE) & (sizes % 8 == 0)
    at, sizes = at[fits], sizes[fits].astype(np.int64)
    begin, end = at + table.first // 8, at + sizes // 8
    whole = (end <= len(words)) & (end - begin >= 8)
    begin, end = begin[whole], end[whole]
    if not len(begin):
        return None
    before = np.concatenate(([0], np.cumsum(_in_code(words, code))))
    good = np.flatnonzero(before[end] - before[begin] >= IN_CODE * (end - begin))
    if not len(good):
        return None
    first, last = int(begin[good[0]]), int(end[good[0]])
    offsets = [_file_offset(int(word), code) for word in words[first:last].tolist()]
    named = {name: offset for name, offset in zip(table.slots, offsets, strict=False) if offset is not None}
    place = 8 * first - table.first
    return Found(named, _describe(raw, place, 8 * last - place, len(offsets), table))


def _in_code(words: npt.NDArray[np.uint64], code: list[Mapping]) -> npt.NDArray[np.bool_]:
    """Which words are addresses of code. Mappings do not overlap."""
    ordered = sorted(code, key=lambda mapping: mapping.start)
    starts = np.array([m.start for m in ordered], np.uint64)
    ends = np.array([m.end for m in ordered], np.uint64)
    which = np.searchsorted(starts, words, side="right") - 1
    inside: npt.NDArray[np.bool_] = (which >= 0) & (words < ends[which])
    return inside


def _describe(raw: bytes, at: int, size: int, functions: int, table: FunctionTable) -> str:
    """Version, if there is one after the inner structure's size and pointer, and the size."""
    major, minor = struct.unpack_from("<ii", raw, at + table.inner_size_at + 16)
    return f"version {major}.{minor}, {functions} functions, {size} bytes"


def _file_offset(address: int, code: list[Mapping]) -> int | None:
    for mapping in code:
        if mapping.start <= address < mapping.end:
            return address - mapping.start + mapping.offset
    return None
