# SPDX-License-Identifier: Apache-2.0
"""Structures out of debug information, one compilation unit at a time.

Debug information of a big library has tens of megabytes; the unit that holds a function is found through
the table of address ranges, and only its outermost entries are read. DWARF 4 and 5, 32-bit form,
uncompressed; the numbers are those of the standard. Everything is bounded and a unit that
does not make sense raises :class:`DwarfError`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .elf import ElfFile

MAX_UNIT = 16 << 20
MAX_ABBREVIATIONS = 1 << 19
MAX_RANGES = 8 << 20
MAX_ENTRIES = 200_000
MAX_UNITS = 4096

TAG_ARRAY, TAG_MEMBER, TAG_STRUCTURE, TAG_SUBRANGE = 0x01, 0x0D, 0x13, 0x21
AT_SIBLING, AT_NAME, AT_BYTE_SIZE, AT_UPPER_BOUND, AT_COUNT = 0x01, 0x03, 0x0B, 0x2F, 0x37
AT_MEMBER_LOCATION, AT_DECLARATION, AT_TYPE, AT_STR_OFFSETS_BASE = 0x38, 0x3C, 0x49, 0x72
_COMPRESSED = 0x800
_FORM_64 = 0xFFFFFFF0
_OP_PLUS_UCONST = 0x23
Value = int | bytes | None

# form -> bytes of its value
_FIXED = {
    0x01: 8, 0x05: 2, 0x06: 4, 0x07: 8, 0x0B: 1, 0x0C: 1, 0x0E: 4, 0x11: 1, 0x12: 2, 0x13: 4, 0x14: 8,
    0x17: 4, 0x19: 0, 0x1C: 4, 0x1D: 4, 0x1E: 16, 0x1F: 4, 0x20: 8, 0x24: 8, 0x25: 1, 0x26: 2, 0x27: 3,
    0x28: 4, 0x29: 1, 0x2A: 2, 0x2B: 3, 0x2C: 4, 0x1F20: 4, 0x1F21: 4, 0x10: 4,
}  # fmt: skip
_ULEB = frozenset([0x0F, 0x15, 0x1A, 0x1B, 0x22, 0x23])
_SLEB = 0x0D
_BLOCKS = {0x03: 2, 0x04: 4, 0x0A: 1}
_BLOCK_ULEB = frozenset([0x09, 0x18])
_STRING, _INDIRECT, _IMPLICIT, _FLAG_PRESENT = 0x08, 0x16, 0x21, 0x19
_STRP, _LINE_STRP = 0x0E, 0x1F
_STRX = frozenset([0x1A, 0x25, 0x26, 0x27, 0x28])
_REF_UNIT = frozenset([0x11, 0x12, 0x13, 0x14, 0x15])


class DwarfError(Exception):
    """This debug information cannot be read; the text says what is wrong."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry: ``at`` is its place in the unit, ``end`` that of what follows its own attributes."""

    at: int
    tag: int
    children: bool
    attributes: dict[int, tuple[int, Value]]
    end: int

    def number(self, attribute: int) -> int | None:
        """The value of a numeric attribute."""
        value = self.attributes.get(attribute, (0, None))[1]
        return value if isinstance(value, int) else None


def unit_of(elf: ElfFile, vaddr: int) -> Unit | None:
    """The unit that holds the code at ``vaddr``; None when no table of address ranges says so."""
    section = elf.section(".debug_aranges")
    if section is None or section.flags & _COMPRESSED:
        return None
    data = elf.pread(section.offset, min(section.size, MAX_RANGES))
    at = 0
    while at + 16 <= len(data):
        length, version, unit, address, segment = struct.unpack_from("<IHIBB", data, at)
        if version != 2 or address != 8 or segment or length < 12:
            raise DwarfError("a table of address ranges that cannot be read")
        end = min(at + 4 + length, len(data))
        first = at + 16  # the header's 12 bytes, padded to a multiple of a pair
        for start, count in struct.iter_unpack("<QQ", data[first : end - (end - first) % 16]):
            if start <= vaddr < start + count:
                return Unit(elf, unit)
        at = end
    return None


def units_named(elf: ElfFile, file: str) -> Iterator[Unit]:
    """The units of source files of this name, by walking from unit to unit (clang writes no ranges)."""
    section = elf.section(".debug_info")
    if section is None:
        return
    start = 0
    for _ in range(MAX_UNITS):
        head = elf.pread(section.offset + start, 4)
        length = int.from_bytes(head, "little")
        if start >= section.size or len(head) < 4 or length >= _FORM_64:
            return
        try:
            unit = Unit(elf, start)
            if unit.source() == file:
                yield unit
        except DwarfError:
            pass  # of a version or form that is not read; the next one may be
        start += length + 4


class Unit:
    """The compilation unit at ``start`` in .debug_info."""

    def __init__(self, elf: ElfFile, start: int) -> None:
        self._elf = elf
        info = self._section(".debug_info")
        head = elf.pread(info[0] + start, 12)
        if len(head) < 12 or start >= info[1]:
            raise DwarfError("the unit lies outside the file")
        length, self._version = struct.unpack_from("<IH", head)
        if not 8 <= length <= min(MAX_UNIT, info[1] - start):
            raise DwarfError(f"a unit of {length} bytes")
        self._data = elf.pread(info[0] + start, length + 4)
        if len(self._data) < length + 4:
            raise DwarfError("the unit lies outside the file")
        if self._version == 5:
            kind, address, abbreviations = struct.unpack_from("<BBI", self._data, 6)
            self._first = 12
        elif self._version == 4:
            abbreviations, address = struct.unpack_from("<IB", self._data, 6)
            kind, self._first = 1, 11
        else:
            raise DwarfError(f"version {self._version}")
        if address != 8 or kind not in (1, 3):
            raise DwarfError("not an ordinary unit")
        self._budget = MAX_ENTRIES
        self._abbreviation_offset = abbreviations

    @cached_property
    def _abbreviations(self) -> dict[int, tuple[int, bool, list[tuple[int, int, int]]]]:
        return self._read_abbreviations(self._abbreviation_offset)

    def source(self) -> str:
        """File name of the source that the unit was compiled from."""
        return self.name(self.entry(self._first)).rpartition("/")[2]

    def structures(self, names: set[str]) -> dict[str, Entry]:
        """The complete structures of these names among the outermost entries."""
        found: dict[str, Entry] = {}
        for entry in self.children(self.entry(self._first)):
            if entry.tag == TAG_STRUCTURE and entry.children and AT_DECLARATION not in entry.attributes:
                name = self.name(entry)
                if name in names:
                    found.setdefault(name, entry)
                    if len(found) == len(names):
                        break
        return found

    def children(self, parent: Entry) -> Iterator[Entry]:
        """The direct children of an entry."""
        if not parent.children:
            return
        at = parent.end
        while at < len(self._data):
            entry = self._parse(at)
            if entry is None:
                return
            yield entry
            at = self._behind(entry)

    def entry(self, at: int) -> Entry:
        """The entry at a place in the unit."""
        entry = self._parse(at) if self._first <= at < len(self._data) else None
        if entry is None:
            raise DwarfError("a reference leads nowhere")
        return entry

    def name(self, entry: Entry) -> str:
        """The entry's name, '' when it has none."""
        form, value = entry.attributes.get(AT_NAME, (0, None))
        if isinstance(value, bytes):
            return value.decode(errors="replace")
        if value is None:
            return ""
        if form in _STRX:
            base = self._strings_base
            at = self._section(".debug_str_offsets")[0] + base + 4 * value
            value = int.from_bytes(self._elf.pread(at, 4), "little")
        section = ".debug_line_str" if form == _LINE_STRP else ".debug_str"
        offset, size = self._section(section)
        return self._elf.string(offset + value, 128).decode(errors="replace") if value < size else ""

    def members(self, structure: Entry) -> dict[str, tuple[int, Entry]]:
        """Name -> (byte offset, entry) of a structure's members."""
        found: dict[str, tuple[int, Entry]] = {}
        for entry in self.children(structure):
            if entry.tag == TAG_MEMBER:
                value = entry.attributes.get(AT_MEMBER_LOCATION, (0, None))[1]
                if isinstance(value, bytes) and value[:1] == bytes([_OP_PLUS_UCONST]):
                    value = _uleb(value, 1)[0]
                if isinstance(value, int):
                    found[self.name(entry)] = (value, entry)
        return found

    def length(self, member: Entry) -> int | None:
        """How many elements an array member has."""
        kind = member.number(AT_TYPE)
        if kind is None:
            return None
        array = self.entry(kind)
        for entry in self.children(array) if array.tag == TAG_ARRAY else ():
            if entry.tag == TAG_SUBRANGE:
                upper, count = entry.number(AT_UPPER_BOUND), entry.number(AT_COUNT)
                return count if upper is None else upper + 1
        return None

    @cached_property
    def _strings_base(self) -> int:
        return self.entry(self._first).number(AT_STR_OFFSETS_BASE) or 8

    def _section(self, name: str) -> tuple[int, int]:
        section = self._elf.section(name)
        if section is None or section.flags & _COMPRESSED:
            raise DwarfError(f"no readable {name}")
        return section.offset, section.size

    def _read_abbreviations(self, start: int) -> dict[int, tuple[int, bool, list[tuple[int, int, int]]]]:
        offset, size = self._section(".debug_abbrev")
        data = self._elf.pread(offset + start, min(MAX_ABBREVIATIONS, max(0, size - start)))
        found: dict[int, tuple[int, bool, list[tuple[int, int, int]]]] = {}
        at = 0
        while at < len(data):
            code, at = _uleb(data, at)
            if code == 0:
                break
            tag, at = _uleb(data, at)
            children = bool(_byte(data, at))
            at += 1
            specification: list[tuple[int, int, int]] = []
            while True:
                attribute, at = _uleb(data, at)
                form, at = _uleb(data, at)
                constant = 0
                if form == _IMPLICIT:
                    constant, at = _sleb(data, at)
                if not attribute and not form:
                    break
                specification.append((attribute, form, constant))
            found[code] = (tag, children, specification)
        return found

    def _parse(self, at: int) -> Entry | None:
        self._budget -= 1
        if self._budget < 0:
            raise DwarfError("too many entries")
        start = at
        code, at = _uleb(self._data, at)
        if code == 0:
            return None
        if code not in self._abbreviations:
            raise DwarfError("an entry of an unknown kind")
        tag, children, specification = self._abbreviations[code]
        attributes: dict[int, tuple[int, Value]] = {}
        for attribute, form, constant in specification:
            value, at = self._value(form, at, constant)
            attributes[attribute] = (form, value)
        if at > len(self._data):
            raise DwarfError("an entry beyond the unit's end")
        return Entry(start, tag, children, attributes, at)

    def _value(self, form: int, at: int, constant: int) -> tuple[Value, int]:
        data = self._data
        if form in _FIXED:
            size = _FIXED[form]
            return (1 if form == _FLAG_PRESENT else int.from_bytes(data[at : at + size], "little")), at + size
        if form in _ULEB:
            return _uleb(data, at)
        if form == _SLEB:
            return _sleb(data, at)
        if form == _IMPLICIT:
            return constant, at
        if form == _STRING:
            end = data.find(b"\0", at)
            if end < 0:
                raise DwarfError("a name without an end")
            return data[at:end], end + 1
        if form in _BLOCKS or form in _BLOCK_ULEB:
            if form in _BLOCKS:
                size, at = int.from_bytes(data[at : at + _BLOCKS[form]], "little"), at + _BLOCKS[form]
            else:
                size, at = _uleb(data, at)
            return data[at : at + size], at + size
        raise DwarfError(f"a value of unknown form {form:#x}")

    def _behind(self, entry: Entry) -> int:
        """Where the next sibling begins."""
        if not entry.children:
            return entry.end
        sibling = entry.number(AT_SIBLING)
        if sibling is not None:
            if sibling <= entry.at:
                raise DwarfError("entries that go in circles")
            return sibling
        depth, at = 1, entry.end
        while depth:
            if at >= len(self._data):
                raise DwarfError("an entry without an end")
            child = self._parse(at)
            if child is None:
                depth -= 1
                at = _uleb(self._data, at)[1]
                continue
            skip = child.number(AT_SIBLING) if child.children else None
            if skip is not None and skip > child.at:
                at = skip
            else:
                depth += child.children
                at = child.end
        return at


def _byte(data: bytes, at: int) -> int:
    if at >= len(data):
        raise DwarfError("it ends too early")
    return data[at]


def _uleb(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = _byte(data, at)
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at
        if shift > 70:
            raise DwarfError("a number that is too long")


def _sleb(data: bytes, at: int) -> tuple[int, int]:
    start = at
    value, at = _uleb(data, at)
    bits = 7 * (at - start)
    return (value - (1 << bits) if data[at - 1] & 0x40 else value), at
