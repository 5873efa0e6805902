# SPDX-License-Identifier: Apache-2.0
"""Functions of an ELF file by name, without reading the whole symbol table into objects.

A library may have a hundred thousand symbols and we want ten. The dynamic table is asked
through its hash; elsewhere the *string* table is searched for the names first (``find``
runs at memory speed), and only then the symbols whose name begins at one of the places
found. Where a table is missing the next one is asked:

``.symtab``, ``.dynsym`` (by section headers, else by the dynamic section),
``.gnu_debugdata`` (xz-compressed "mini debug info"), a separate debug file
(:mod:`.debugfile`).

A symbol counts only when it is a function, defined, and its address is file-backed code
of *this* file: names may come from a debug file, addresses are always checked here.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .elf_types import ElfError, Symbol

if TYPE_CHECKING:
    from .elf import ElfFile

MAX_TABLE = 256 << 20
MAX_CANDIDATES = 1 << 16
MAX_FOUND = 4096
MAX_CHAIN = 1 << 16
MAX_DEBUGDATA = 16 << 20
MAX_DEBUGDATA_UNPACKED = 64 << 20
_LONGEST = 512
_ENTRY = struct.Struct("<IBBHQQ")
_STT_OBJECT, _STT_FUNC = 1, 2
Entry = tuple[int, int, int, int, int, int]
"""One symbol of the file: (name, info, other, section, value, size)."""
_CLONE = re.compile(rb"(?:\.(?:isra|constprop|lto_priv)(?:\.\d+)?)+\Z")
_PART = re.compile(rb"\.(?:cold|part)(?:\.|\Z)")


@dataclass(slots=True)
class SymbolTable:
    """Where one symbol table lies: symbols and strings in ``elf``, in file bytes."""

    elf: ElfFile
    source: str
    offset: int
    size: int
    strings: int
    strings_size: int
    hash_offset: int | None = None

    def entry(self, index: int) -> Entry | None:
        """The symbol of that number, or None."""
        if index < 0 or (index + 1) * 24 > self.size:
            return None
        raw = self.elf.pread(self.offset + index * 24, 24)
        return _ENTRY.unpack(raw) if len(raw) == 24 else None

    def name(self, at: int) -> bytes:
        """The name at a place of the string table."""
        if not 0 <= at < self.strings_size:
            return b""
        return self.elf.string(self.strings + at, _LONGEST)


def tables_of(elf: ElfFile) -> list[SymbolTable]:
    """The tables inside this file, best first; none is read yet except mini debug info."""
    tables = []
    sections = elf.sections()
    for kind, source in ((2, ".symtab"), (11, ".dynsym")):
        for section in sections:
            if section.type == kind and section.size and section.link < len(sections):
                strings = sections[section.link]
                tables.append(
                    SymbolTable(elf, source, section.offset, min(section.size, MAX_TABLE), strings.offset,
                                min(strings.size, MAX_TABLE), _hash_of(elf) if kind == 11 else None)
                )  # fmt: skip
                break
    if not any(t.source == ".dynsym" for t in tables):
        tables += _dynamic_table(elf)
    return tables + _mini_debug_info(elf)


def _hash_of(elf: ElfFile) -> int | None:
    at = elf.dynamic(0x6FFFFEF5)
    return elf.vaddr_to_offset(at[0]) if at else None


def _dynamic_table(elf: ElfFile) -> list[SymbolTable]:
    """The dynamic symbols of a file whose section headers were stripped."""
    where = [elf.dynamic(tag) for tag in (6, 5, 10)]
    if not all(where):
        return []
    symbols, strings = elf.vaddr_to_offset(where[0][0]), elf.vaddr_to_offset(where[1][0])
    hash_offset = _hash_of(elf)
    if symbols is None or strings is None:
        return []
    # The number of symbols is written nowhere: linkers put the strings right behind them.
    size = strings - symbols if strings > symbols else MAX_TABLE
    size = min(size, MAX_TABLE, elf.size - symbols)
    return [SymbolTable(elf, ".dynsym", symbols, size, strings, min(where[2][0], MAX_TABLE), hash_offset)]


def _mini_debug_info(elf: ElfFile) -> list[SymbolTable]:
    section = elf.section(".gnu_debugdata")
    if section is None or section.size > MAX_DEBUGDATA:
        return []
    import lzma  # only a few distributions write such sections

    from .elf import ElfFile

    unpack = lzma.LZMADecompressor(format=lzma.FORMAT_XZ, memlimit=128 << 20)
    try:
        data = unpack.decompress(elf.pread(section.offset, section.size), MAX_DEBUGDATA_UNPACKED)
        inner = ElfFile(data, f"{elf.label} (.gnu_debugdata)")
        sections = inner.sections()
    except (lzma.LZMAError, EOFError, ElfError):
        return []  # a broken extra table hides nothing: the others are asked
    for section in sections:
        if section.type == 2 and section.size and section.link < len(sections):
            strings = sections[section.link]
            return [
                SymbolTable(
                    inner, ".gnu_debugdata", section.offset, section.size, strings.offset, strings.size
                )
            ]
    return []


# -- looking up -----------------------------------------------------------------------


def find_functions(elf: ElfFile, names: Iterable[str], clones: bool) -> dict[str, list[Symbol]]:
    """See :meth:`.elf.ElfFile.functions`."""
    wanted = {os.fsencode(name): name for name in names}
    found: dict[str, list[Symbol]] = {}
    for table in elf.tables():
        if table.hash_offset is not None:
            for raw in list(wanted):
                symbols = _by_hash(elf, table, raw)
                if symbols:
                    found[wanted.pop(raw)] = symbols
    spare: dict[str, list[Symbol]] = {}
    for table in elf.tables():
        if not wanted:
            return found
        if table.hash_offset is not None and not clones:
            continue
        exact, cloned = _by_scan(elf, table, list(wanted))
        for raw, symbols in exact.items():
            found[wanted.pop(raw)] = symbols
        for raw, symbols in cloned.items():
            spare.setdefault(os.fsdecode(raw), symbols)
    if clones:
        for name in wanted.values():
            if name in spare:
                found[name] = spare[name]
    return found


def _by_hash(elf: ElfFile, table: SymbolTable, name: bytes) -> list[Symbol]:
    """The GNU hash of the dynamic table (its format: any dynamic linker's source)."""
    base = table.hash_offset
    head = table.elf.pread(base, 16) if base is not None else b""
    if base is None or len(head) < 16:
        return []
    buckets, first, words, shift = struct.unpack("<IIII", head)
    if not buckets or not words or shift > 63:
        return []
    value = 5381
    for byte in name:
        value = (value * 33 + byte) & 0xFFFFFFFF
    bloom = int.from_bytes(table.elf.pread(base + 16 + value // 64 % words * 8, 8), "little")
    if not (bloom >> (value % 64)) & (bloom >> ((value >> shift) % 64)) & 1:
        return []
    at = base + 16 + words * 8
    index = int.from_bytes(table.elf.pread(at + value % buckets * 4, 4), "little")
    if index < first:
        return []
    chain = at + buckets * 4 + (index - first) * 4
    found: list[tuple[int, Symbol]] = []
    for step in range(0, MAX_CHAIN, 16):
        hashes = table.elf.pread(chain + step * 4, 64)
        for (other,) in struct.iter_unpack("<I", hashes[: len(hashes) // 4 * 4]):
            if (other | 1) == (value | 1):
                entry = table.entry(index)
                if entry is not None and table.name(entry[0]) == name:
                    _keep(elf, table, entry, name, True, found)
            if other & 1:
                return _best(found)
            index += 1
        if len(hashes) < 64:
            break
    return _best(found)


def _candidates(table: SymbolTable, needles: list[bytes]) -> dict[int, bytes]:
    """Places in the string table where one of the needles begins: {place: the name from there on}.

    Linkers merge tails ("foo" may lie inside "xfoo"), so a place need not begin a string.
    """
    out: dict[int, bytes] = {}
    for base, piece in table.elf.blocks(table.strings, table.strings_size, _LONGEST):
        start = base - table.strings
        for needle in needles:
            at = piece.find(needle)
            while at >= 0:
                end = piece.find(b"\0", at, at + _LONGEST)
                if end >= 0:
                    out[start + at] = piece[at:end]
                    if len(out) >= MAX_CANDIDATES:
                        return out
                at = piece.find(needle, at + 1)
    return out


def _entries(table: SymbolTable, places: dict[int, bytes]) -> Iterator[tuple[bytes, Entry]]:
    """Symbols whose name begins at one of the places."""
    if not places:
        return
    for _, piece in _symbol_blocks(table):
        # One stride-6 view of the words is all the names: no object per symbol.
        names = memoryview(piece).cast("I")[::6].tolist()
        for index, at in enumerate(names):
            if at in places:
                yield places[at], _ENTRY.unpack_from(piece, index * 24)


def _symbol_blocks(table: SymbolTable) -> Iterator[tuple[int, bytes]]:
    step = 24 * 43690
    for at in range(0, table.size, step):
        piece = table.elf.pread(table.offset + at, min(step, table.size - at))
        piece = piece[: len(piece) // 24 * 24]
        if not piece:
            return
        yield at, piece


def _by_scan(
    elf: ElfFile, table: SymbolTable, wanted: list[bytes]
) -> tuple[dict[bytes, list[Symbol]], dict[bytes, list[Symbol]]]:
    """Exact functions, and clones of the names wanted, of one table."""
    places: dict[int, bytes] = {}
    meaning: dict[bytes, tuple[bytes, bool]] = {}
    by_length = sorted(wanted, key=len, reverse=True)
    for at, rest in _candidates(table, _shortest(wanted)).items():
        for name in by_length:
            if not rest.startswith(name):
                continue
            tail = rest[len(name) :]
            if not tail or tail.startswith(b"@"):  # "@@VERSION" in .symtab
                meaning[rest] = (name, True)
            elif _CLONE.match(tail):
                meaning[rest] = (name, False)
            else:
                continue
            places[at] = rest
            break
    exact: dict[bytes, list[tuple[int, Symbol]]] = {}
    cloned: dict[bytes, list[tuple[int, Symbol]]] = {}
    for rest, entry in _entries(table, places):
        name, is_exact = meaning[rest]
        into = exact if is_exact else cloned
        _keep(elf, table, entry, name if is_exact else rest, is_exact, into.setdefault(name, []))
    return (
        {name: best for name, found in exact.items() if (best := _best(found))},
        {name: best for name, found in cloned.items() if (best := _best(found))},
    )


def _shortest(names: list[bytes]) -> list[bytes]:
    """The names without those that begin with another one of them."""
    out: list[bytes] = []
    for name in sorted(names, key=len):
        if not any(name.startswith(other) for other in out):
            out.append(name)
    return out


def _keep(
    elf: ElfFile, table: SymbolTable, entry: Entry, name: bytes, exact: bool,
    found: list[tuple[int, Symbol]], kind: int = _STT_FUNC,
) -> None:  # fmt: skip
    _, info, _, section, value, size = entry
    if info & 15 != kind or section == 0 or len(found) >= MAX_FOUND:
        return
    if kind == _STT_FUNC and not elf.executable_at(value):
        return
    symbol = Symbol(name.decode("ascii", "backslashreplace"), value, min(size, 1 << 40), table.source, exact)
    found.append((info >> 4, symbol))


def _best(found: list[tuple[int, Symbol]]) -> list[Symbol]:
    """Global symbols win over local ones of the same name; each address once."""
    shared = [item for item in found if item[0] != 0] or found
    by_address: dict[int, Symbol] = {}
    for _, symbol in shared:
        by_address.setdefault(symbol.vaddr, symbol)
    return list(by_address.values())


def find_object(elf: ElfFile, name: str) -> Symbol | None:
    """See :meth:`.elf.ElfFile.data`."""
    raw = os.fsencode(name)
    for table in elf.tables():
        places = {
            at: rest for at, rest in _candidates(table, [raw]).items() if rest.partition(b"@")[0] == raw
        }
        found: list[tuple[int, Symbol]] = []
        for _, entry in _entries(table, places):
            _keep(elf, table, entry, raw, True, found, _STT_OBJECT)
        if found:
            return found[0][1]
    return None


def find_prefix(elf: ElfFile, prefix: str) -> list[Symbol]:
    """See :meth:`.elf.ElfFile.matching`; parts are left out, clones are marked."""
    raw = os.fsencode(prefix)
    by_address: dict[int, Symbol] = {}
    for table in elf.tables():
        found: list[tuple[int, Symbol]] = []
        for rest, entry in _entries(table, _candidates(table, [raw])):
            name = rest.partition(b"@")[0]
            if not _PART.search(name):
                _keep(elf, table, entry, name, b"." not in name, found)
        for _, symbol in found:
            by_address.setdefault(symbol.vaddr, symbol)
    return list(by_address.values())


def all_functions(elf: ElfFile) -> Iterator[Symbol]:
    """See :meth:`.elf.ElfFile.symbols`."""
    for table in elf.tables():
        for _, piece in _symbol_blocks(table):
            for entry in _ENTRY.iter_unpack(piece):
                if entry[1] & 15 == _STT_FUNC and entry[3] and elf.executable_at(entry[4]):
                    name = table.name(entry[0]).decode("ascii", "backslashreplace")
                    yield Symbol(name, entry[4], entry[5], table.source)
