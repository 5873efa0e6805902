# SPDX-License-Identifier: Apache-2.0
"""Names of operators and types, read from the tables of the very binary that runs.

Numbers mean different things in different builds (an operator inserted in the middle moves all that
follow), so no number is known here: the tables are found by their first names.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .pointers import Pointers

if TYPE_CHECKING:
    from .elf import ElfFile

MAX_NAMES = 1024
_NAME = re.compile(r"[A-Z][A-Z0-9_]{0,39}\Z")
_TYPE_NAME = re.compile(r"[A-Za-z][\x20-\x7e]{0,94}\Z")
_OPS = (b"NONE", b"DUP", b"ADD")
_SYMBOLS = (b"none", b"x")
_UNARY = (b"ABS", b"SGN")
_GLU = (b"REGLU", b"GEGLU")
_FIRST: tuple[tuple[bytes, ...], ...] = (_OPS, _SYMBOLS, _UNARY, _GLU)
_TYPES = (b"f32", b"f16")
_MIN_OPS = 20
# ggml_type_traits is a name, sizes as words, then functions; 24 bytes is the least, today's has 56.
_STRIDES = range(24, 136, 8)
_MAX_GAP = 4
_F32, _F16 = (1, 4), (1, 2)
_Names = dict[tuple[bytes, ...], tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class TypeTraits:
    """A tensor type: ``type_size`` bytes hold ``block_size`` elements. A removed type has zeros."""

    name: str
    block_size: int
    type_size: int


@dataclass(frozen=True, slots=True)
class Tables:
    """The names of one build; the index is the number that tensors carry.

    ``types`` is None when the table of types was not found. A name is '' where the table has
    none. ``unary`` and ``glu`` name the sub-operators in ``op_params`` of UNARY and GLU (empty: not found).
    """

    ops: tuple[str, ...]
    types: tuple[TypeTraits, ...] | None
    unary: tuple[str, ...] = ()
    glu: tuple[str, ...] = ()

    def op(self, number: int) -> str:
        """The engine's name of an operator; ``op_N`` when the table has none for it."""
        return _name(self.ops, number, "op")

    def op_number(self, name: str) -> int | None:
        """The number of an operator in this build, None when it has no such operator."""
        return self.ops.index(name) if name in self.ops else None

    def type(self, number: int) -> str:
        """The engine's name of a type; ``type_N`` when the table has none for it."""
        return _name([t.name for t in self.types or ()], number, "type")

    def type_number(self, name: str) -> int | None:
        """The number of a type in this build, None when it has no such type."""
        return next((n for n, t in enumerate(self.types or ()) if t.name == name), None)

    def traits(self, number: int) -> TypeTraits | None:
        """Name and sizes of a type; None for an unknown or removed one."""
        types = self.types or ()
        known = 0 <= number < len(types) and types[number].block_size > 0
        return types[number] if known else None

    def unary_op(self, number: int) -> str:
        """The name of a sub-operator of UNARY; ``unary_N`` when unknown."""
        return _name(self.unary, number, "unary")

    def glu_op(self, number: int) -> str:
        """The name of a sub-operator of GLU; ``glu_N`` when unknown."""
        return _name(self.glu, number, "glu")


def _name(names: tuple[str, ...] | list[str], number: int, kind: str) -> str:
    known = 0 <= number < len(names) and names[number]
    return names[number] if known else f"{kind}_{number}"


def read_tables(elf: ElfFile) -> Tables | None:
    """The tables in this file, or None when it has no table of operator names.

    Works on stripped files, with either form of relocation or at a fixed address.
    """
    pointers = Pointers(elf)
    places = pointers.places({*_OPS, *_SYMBOLS, *_UNARY, *_GLU, *_TYPES})
    names = _by_pointers(pointers, places)
    if len(names[_OPS]) < _MIN_OPS:
        names = _by_offsets(pointers)
    if len(names[_OPS]) < _MIN_OPS:
        return None
    return Tables(names[_OPS], _types(elf, pointers, places), names[_UNARY], names[_GLU])


def _by_pointers(pointers: Pointers, places: dict[bytes, set[int]]) -> _Names:
    starts = {first: _starts(pointers, places, first) for first in _FIRST}
    return {
        first: _longest(starts, first, 8, lambda start, n: pointers.text_at(start + 8 * n, 48))
        for first in _FIRST
    }


def _by_offsets(pointers: Pointers) -> _Names:
    places = pointers.search(_OPS)
    if not all(places.values()):  # most files: one search is enough to know
        return dict.fromkeys(_FIRST, ())
    places |= pointers.search({*_SYMBOLS, *_UNARY, *_GLU})
    starts = {first: pointers.offset_tables(first, places) for first in _FIRST}
    return {
        first: _longest(starts, first, 4, lambda start, n: pointers.text_by_offset(start, n, 48))
        for first in _FIRST
    }


def _starts(pointers: Pointers, places: dict[bytes, set[int]], first: tuple[bytes, ...]) -> list[int]:
    """Addresses of words that point to ``first[0]`` and are followed by words that point to the rest."""
    return [
        start
        for start in pointers.holders(places[first[0]])
        if all(pointers.at(start + 8 * n) in places[text] for n, text in enumerate(first))
    ]


def _longest(
    starts: dict[tuple[bytes, ...], list[int]],
    first: tuple[bytes, ...],
    width: int,
    text_of: Callable[[int, int], str | None],
) -> tuple[str, ...]:
    """The names of the longest table that begins with ``first``. It ends where a text is no such name or
    repeats one, and where another known table begins: tables may lie back to back."""
    every = {start for found in starts.values() for start in found}
    best: tuple[str, ...] = ()
    for start in starts[first]:
        names: dict[str, None] = {}
        for number in range(MAX_NAMES):
            text = text_of(start, number) if number == 0 or start + width * number not in every else None
            if text is None or not _NAME.match(text) or text in names:
                break
            names[text] = None
        best = max(best, tuple(names), key=len)
    return best


def _types(elf: ElfFile, pointers: Pointers, places: dict[bytes, set[int]]) -> tuple[TypeTraits, ...] | None:
    best: list[TypeTraits] = []
    for start in pointers.holders(places[b"f32"]):
        stride = next((s for s in _STRIDES if pointers.at(start + s) in places[b"f16"]), None)
        if stride is None:
            continue
        # The block size is an int (and zeros) or a long; newer tables have one word more before the size.
        for where in (16, 24):
            types = _type_run(elf, pointers, start, stride, where)
            if len(types) > len(best):
                best = types
    return tuple(best) or None


def _type_run(elf: ElfFile, pointers: Pointers, start: int, stride: int, where: int) -> list[TypeTraits]:
    types: list[TypeTraits] = []
    for number in range(MAX_NAMES):
        entry = _type_entry(elf, pointers, start + number * stride, where)
        if entry is None or (entry.name and any(entry.name == t.name for t in types if t.block_size)):
            break
        types.append(entry)
        if [t.name for t in types[-_MAX_GAP:]] == [""] * _MAX_GAP:
            break
    while types and not types[-1].name:
        types.pop()
    sizes = [(t.block_size, t.type_size) for t in types[:2]]
    return types if sizes == [_F32, _F16] else []


def _type_entry(elf: ElfFile, pointers: Pointers, at: int, where: int) -> TypeTraits | None:
    raw = elf.read(at, where + 8)
    if len(raw) < where + 8 or pointers.at(at + 8) is not None or pointers.at(at + where) is not None:
        return None
    block_size = int.from_bytes(raw[8:16], "little")
    type_size = int.from_bytes(raw[where : where + 8], "little")
    if block_size > 1 << 16 or type_size > 1 << 16 or (block_size == 0) != (type_size == 0):
        return None
    if pointers.at(at) is None:
        return None if block_size or any(raw[:8]) else TypeTraits("", 0, 0)
    name = pointers.text_at(at)
    return TypeTraits(name, block_size, type_size) if name and _TYPE_NAME.match(name) else None
