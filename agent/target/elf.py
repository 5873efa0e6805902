# SPDX-License-Identifier: Apache-2.0
"""An ELF file of somebody else, read with suspicion.

The files come from the process that is looked at, so nothing in them is believed: every
offset, size and count is checked against a bound before it is used, everything is read
with ``pread`` from a descriptor (a mapping of a file that shrinks would end us with
SIGBUS), and the only exception that leaves this module for bad contents is
:class:`ElfError`. Only the standard library is used and no section is read before it is
asked for: a 100 MB library with debug information costs a few milliseconds.

Symbols are found by name with :mod:`.symbols`; the structures are those of the System V
ABI (gabi, chapters 4 and 5).
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Self

from . import relocations
from . import symbols as _symbols
from .elf_types import ElfError, Section, Segment, Symbol
from .symbols import SymbolTable
from .text import printable

MAX_SEGMENTS = 1024
MAX_SECTIONS = 65536
MAX_NAME = 4096
MAX_DYNAMIC = 4096
MAX_NOTES = 1 << 20
MAX_READ = 64 << 20
_BLOCK = 1 << 20

__all__ = ["ElfError", "ElfFile", "Section", "Segment", "Symbol"]

_MACHINES = {62: "x86_64", 183: "aarch64"}
_PT_LOAD, _PT_DYNAMIC, _PT_NOTE = 1, 2, 4
_SHT_NOTE, _SHT_NOBITS = 7, 8
_DT_NEEDED, _DT_STRTAB, _DT_SONAME = 1, 5, 14


class ElfFile:
    """A 64-bit little-endian ELF executable or shared object.

    ``source`` is an open descriptor (which stays the caller's) or the bytes of a file;
    ``label`` names it in errors. Raises :class:`ElfError`.
    """

    def __init__(self, source: int | bytes, label: str = "file") -> None:
        self.label = label
        self._fd = source if isinstance(source, int) else -1
        self._data = source if isinstance(source, bytes) else b""
        self._owned = False
        if self._fd >= 0:
            status = os.fstat(self._fd)
            if not stat.S_ISREG(status.st_mode):
                raise self._bad("not a regular file")
            self.size = status.st_size
        else:
            self.size = len(self._data)
        self._sections: list[Section] | None = None
        self._dynamic: dict[int, list[int]] | None = None
        self._tables: list[SymbolTable] | None = None
        self._read_header()

    @classmethod
    def open(cls, path: str, label: str = "") -> ElfFile:
        """Open ``path``; the descriptor is closed by :meth:`close` or the ``with`` block."""
        try:
            # O_NONBLOCK: a fifo put where a library is expected must not stop us.
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "impossible path"
            raise ElfError(f"cannot open {printable(label or path)}: {reason}") from error
        try:
            elf = cls(fd, label or path)
        except ElfError:
            os.close(fd)
            raise
        elf._owned = True
        return elf

    def close(self) -> None:
        """Close the descriptor if :meth:`open` opened it."""
        if self._owned:
            self._owned = False
            os.close(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _bad(self, why: str) -> ElfError:
        return ElfError(f"{printable(self.label)} cannot be read: {why}")

    # -- bytes -----------------------------------------------------------------------

    def pread(self, offset: int, count: int) -> bytes:
        """Up to ``count`` bytes at file offset ``offset``; short at the end of the file."""
        if offset < 0 or count <= 0 or offset >= self.size:
            return b""
        if count > MAX_READ:
            raise self._bad(f"a piece of {count} bytes is more than is ever read at once")
        if self._fd < 0:
            return self._data[offset : offset + count]
        try:
            return os.pread(self._fd, min(count, self.size - offset), offset)
        except OSError as error:
            raise self._bad(f"read error ({error.strerror})") from error

    def blocks(self, offset: int, count: int, overlap: int = 0) -> Iterator[tuple[int, bytes]]:
        """The bytes ``[offset, offset + count)`` in pieces of a megabyte: (file offset, piece).

        Each piece begins ``overlap`` bytes before the end of the one before it.
        """
        end = min(offset + count, self.size)
        while offset < end:
            piece = self.pread(offset, min(_BLOCK, end - offset))
            if not piece:
                return
            yield offset, piece
            if offset + len(piece) >= end or len(piece) <= overlap:
                return
            offset += len(piece) - overlap

    def _exactly(self, offset: int, count: int, what: str) -> bytes:
        data = self.pread(offset, count)
        if len(data) != count:
            raise self._bad(f"{what} lies outside the file")
        return data

    def string(self, offset: int, limit: int = MAX_NAME) -> bytes:
        """The NUL-terminated bytes at file offset ``offset``, cut at ``limit``."""
        short = self.pread(offset, min(128, limit))
        end = short.find(b"\0")
        if end >= 0:
            return short[:end]
        return self.pread(offset, limit).partition(b"\0")[0]

    # -- headers ---------------------------------------------------------------------

    def _read_header(self) -> None:
        head = self.pread(0, 64)
        if head[:4] != b"\x7fELF":
            raise self._bad("not an ELF file")
        if len(head) < 64:
            raise self._bad("its ELF header is cut off")
        if head[4] != 2:
            raise self._bad("it is a 32-bit ELF file; only 64-bit programs can be profiled")
        if head[5] != 1:
            raise self._bad("it is a big-endian ELF file")
        (
            self.type,
            machine,
            _,
            self.entry,
            phoff,
            self._shoff,
            _,
            _,
            phentsize,
            phnum,
            self._shentsize,
            self._shnum,
            self._shstrndx,
        ) = struct.unpack_from("<HHIQQQIHHHHHH", head, 16)
        self._machine = _MACHINES.get(machine, "")
        if not self._machine:
            raise self._bad(f"it is for machine {machine}; only x86-64 and arm64 are known")
        self.segments: list[Segment] = []
        if phnum:
            if phentsize != 56 or phnum > MAX_SEGMENTS:
                raise self._bad("its program headers make no sense")
            raw = self._exactly(phoff, phnum * 56, "its program header table")
            for kind, flags, offset, vaddr, _, filesz, memsz, _ in struct.iter_unpack("<IIQQQQQQ", raw):
                self.segments.append(Segment(kind, flags, offset, vaddr, filesz, memsz))
        self._load = [s for s in self.segments if s.type == _PT_LOAD and s.filesz > 0]

    def machine(self) -> str:
        """``x86_64`` or ``aarch64``."""
        return self._machine

    def sections(self) -> list[Section]:
        """All section headers; empty when they were stripped or make no sense."""
        if self._sections is None:
            self._sections = self._read_sections()
        return self._sections

    def _read_sections(self) -> list[Section]:
        if not self._shoff or self._shentsize != 64:
            return []
        count, names_at = self._shnum, self._shstrndx
        first = self.pread(self._shoff, 64)
        if len(first) < 64:
            return []
        if count == 0:  # more than fit into 16 bits: section 0 holds the number
            count = struct.unpack_from("<Q", first, 32)[0]
        if names_at == 0xFFFF:
            names_at = struct.unpack_from("<I", first, 40)[0]
        if not 0 < count <= MAX_SECTIONS:
            return []
        raw = self.pread(self._shoff, count * 64)
        raw = raw[: len(raw) // 64 * 64]
        rows = list(struct.iter_unpack("<IIQQQQIIQQ", raw))
        names = b""
        if names_at < len(rows):
            names = self.pread(rows[names_at][4], min(rows[names_at][5], _BLOCK))
        out = []
        for name_at, kind, flags, vaddr, offset, size, link, _, _, entsize in rows:
            end = names.find(b"\0", name_at, name_at + MAX_NAME)
            name = names[name_at:end] if end >= 0 else b""
            out.append(
                Section(name.decode("ascii", "replace"), kind, flags, vaddr, offset, size, link, entsize)
            )
        return out

    def section(self, name: str) -> Section | None:
        """The first section of that name that has bytes in the file."""
        for section in self.sections():
            if section.name == name and section.type != _SHT_NOBITS and section.size:
                return section
        return None

    # -- addresses -------------------------------------------------------------------

    def vaddr_to_offset(self, vaddr: int) -> int | None:
        """File offset of a virtual address, by _PT_LOAD; None where no file byte is mapped."""
        for segment in self._load:
            if segment.vaddr <= vaddr < segment.vaddr + segment.filesz:
                return segment.offset + vaddr - segment.vaddr
        return None

    def offset_to_vaddr(self, offset: int) -> int | None:
        """Virtual address of a file offset; the executable mapping when there are two."""
        found: int | None = None
        for segment in self._load:
            if segment.offset <= offset < segment.offset + segment.filesz:
                vaddr = segment.vaddr + offset - segment.offset
                if segment.executable:
                    return vaddr
                found = vaddr if found is None else found
        return found

    def executable_at(self, vaddr: int) -> bool:
        """Whether the address is file-backed code."""
        return any(s.executable and s.vaddr <= vaddr < s.vaddr + s.filesz for s in self._load)

    def read(self, vaddr: int, count: int) -> bytes:
        """Up to ``count`` file bytes at a virtual address; short at the segment's end."""
        for segment in self._load:
            if segment.vaddr <= vaddr < segment.vaddr + segment.filesz:
                inside = vaddr - segment.vaddr
                return self.pread(segment.offset + inside, min(count, segment.filesz - inside))
        return b""

    def read_string(self, vaddr: int, limit: int = MAX_NAME) -> bytes | None:
        """The NUL-terminated bytes at a virtual address; None where nothing is mapped."""
        offset = self.vaddr_to_offset(vaddr)
        return None if offset is None else self.string(offset, limit)

    # -- notes and dynamic section -----------------------------------------------------

    def notes(self) -> Iterator[tuple[bytes, int, bytes]]:
        """(owner, type, contents) of every note in segments, then in sections."""
        areas = [(s.offset, s.filesz) for s in self.segments if s.type == _PT_NOTE]
        areas += [(s.offset, s.size) for s in self.sections() if s.type == _SHT_NOTE]
        for offset, size in areas[:64]:
            data = self.pread(offset, min(size, MAX_NOTES))
            at = 0
            while at + 12 <= len(data):
                namesz, descsz, kind = struct.unpack_from("<III", data, at)
                name_end = at + 12 + namesz
                desc_at = (name_end + 3) & ~3
                if desc_at + descsz > len(data):
                    break
                yield data[at + 12 : name_end].rstrip(b"\0"), kind, data[desc_at : desc_at + descsz]
                at = (desc_at + descsz + 3) & ~3

    def build_id(self) -> str:
        """The GNU build id in hexadecimal; empty when the file has none."""
        for owner, kind, desc in self.notes():
            if owner == b"GNU" and kind == 3 and 2 <= len(desc) <= 64:
                return desc.hex()
        return ""

    def is_go(self) -> bool:
        """Whether the Go linker made it (its own text must get no return probes)."""
        if any(owner == b"Go" for owner, _, _ in self.notes()):
            return True
        return any(s.name in (".gopclntab", ".go.buildinfo", ".note.go.buildid") for s in self.sections())

    def dynamic(self, tag: int) -> list[int]:
        """Values of a tag of the dynamic section, in order."""
        if self._dynamic is None:
            self._dynamic = {}
            for segment in self.segments:
                if segment.type == _PT_DYNAMIC:
                    raw = self.pread(segment.offset, min(segment.filesz, MAX_DYNAMIC * 16))
                    for key, value in struct.iter_unpack("<QQ", raw[: len(raw) // 16 * 16]):
                        if key == 0:
                            break
                        self._dynamic.setdefault(key, []).append(value)
                    break
        return self._dynamic.get(tag, [])

    def _dynamic_strings(self, tag: int) -> list[str]:
        table = self.dynamic(_DT_STRTAB)
        if not table:
            return []
        out = []
        for at in self.dynamic(tag):
            raw = self.read_string(table[0] + at)
            if raw:
                out.append(os.fsdecode(raw))
        return out

    def needed(self) -> list[str]:
        """Names of the shared objects it was linked against."""
        return self._dynamic_strings(_DT_NEEDED)

    def soname(self) -> str:
        """Its own shared object name, or empty."""
        names = self._dynamic_strings(_DT_SONAME)
        return names[0] if names else ""

    # -- relocations -------------------------------------------------------------------

    def relative_relocations(self) -> Iterator[tuple[int, int]]:
        """(address, value) of each relative relocation of both forms, RELA then RELR.

        Addresses and values are unrelocated virtual addresses. RELR keeps the value in
        place, so it is read from the file.
        """
        return relocations.relative(self)

    # -- symbols -----------------------------------------------------------------------

    def tables(self) -> list[SymbolTable]:
        """The symbol tables inside this file, best first: .symtab, .dynsym, .gnu_debugdata."""
        if self._tables is None:
            self._tables = _symbols.tables_of(self)
        return self._tables

    def add_tables(self, tables: Iterable[SymbolTable]) -> None:
        """Look also into these tables (of a separate debug file), after our own."""
        self._tables = [*self.tables(), *tables]

    def functions(self, names: Iterable[str], clones: bool = False) -> dict[str, list[Symbol]]:
        """Functions of exactly these names, all distinct addresses of each.

        With ``clones``, a name that is nowhere found may be answered by compiler clones
        of it (``.isra``, ``.constprop``, ``.lto_priv``), which are marked ``exact`` False:
        their arguments may differ. Parts (``.cold``, ``.part``) are never returned.
        """
        return _symbols.find_functions(self, names, clones)

    def function(self, name: str) -> Symbol | None:
        """The function of exactly this name, or None."""
        found = self.functions([name]).get(name)
        return found[0] if found else None

    def data(self, name: str) -> Symbol | None:
        """The data object of exactly this name, or None (most are local: .symtab only)."""
        return _symbols.find_object(self, name)

    def matching(self, prefix: str) -> list[Symbol]:
        """All functions whose name begins with ``prefix``, one symbol per address."""
        return _symbols.find_prefix(self, prefix)

    def symbols(self) -> Iterator[Symbol]:
        """Every function symbol of every table, as they come (slow on big files)."""
        return _symbols.all_functions(self)
