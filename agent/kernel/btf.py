# SPDX-License-Identifier: Apache-2.0
"""Record types and constants from the BTF of a built BPF object.

``probes/events.h`` is written once: the numpy types and the numbers that user space uses
come from what the compiler made of it.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

_MAX_OBJECT = 64 << 20  # bytes; ours are below 1 MiB
_MAGIC = 0xEB9F

(_INT, _PTR, _ARRAY, _STRUCT, _UNION, _ENUM, _FWD, _TYPEDEF, _VOLATILE, _CONST, _RESTRICT,
 _FUNC, _FUNC_PROTO, _VAR, _DATASEC, _FLOAT, _DECL_TAG, _TYPE_TAG, _ENUM64) = range(1, 20)  # fmt: skip
_QUALIFIERS = (_TYPEDEF, _VOLATILE, _CONST, _RESTRICT, _TYPE_TAG)


class BtfError(ValueError):
    """An object whose BTF is missing or malformed, or a type that is not in it."""


@dataclass(frozen=True)
class _Type:
    kind: int
    name: str
    size_or_type: int
    flag: bool
    extra: tuple[tuple[int, ...], ...]  # members, values, bounds; by kind


@dataclass(frozen=True)
class Variable:
    """A global variable: where it lies in its section's map."""

    name: str
    section: str
    offset: int
    size: int


def _section(data: bytes, wanted: bytes) -> bytes:
    """The content of one section of a little-endian ELF64 file."""
    if data[:6] != b"\x7fELF\x02\x01" or len(data) < 64:
        raise BtfError("not a little-endian ELF64 file")
    table, entry, count, names = (
        struct.unpack_from("<Q", data, 40)[0],
        *struct.unpack_from("<HHH", data, 58),
    )
    if entry != 64 or table + entry * count > len(data) or names >= count:
        raise BtfError("malformed section table")

    def header(i: int) -> tuple[int, int, int]:
        name, offset, size = struct.unpack_from("<I20xQQ", data, table + 64 * i)
        return name, offset, size

    _, names_at, names_size = header(names)
    strings = data[names_at : names_at + names_size]
    for i in range(count):
        name, offset, size = header(i)
        if strings[name : strings.find(b"\0", name)] == wanted:
            if offset + size > len(data):
                break
            return data[offset : offset + size]
    raise BtfError(f"no section {wanted.decode()}")


class Types:
    """The types of one object, by name."""

    def __init__(self, btf: bytes) -> None:
        """Parse raw BTF; raises :class:`BtfError`."""
        try:
            self._types = self._parse(btf)
        except (struct.error, IndexError, ValueError) as error:
            raise BtfError(f"malformed BTF: {error}") from error
        self._named: dict[tuple[int, str], int] = {}
        for number, entry in enumerate(self._types):
            if entry.name:
                self._named.setdefault((entry.kind, entry.name), number)
        self._dtypes: dict[int, np.dtype[Any]] = {}

    @staticmethod
    def _parse(btf: bytes) -> list[_Type]:
        magic, _, _, header, type_at, type_size, string_at, string_size = struct.unpack_from("<HBBIIIII", btf)
        if magic != _MAGIC or header + max(type_at + type_size, string_at + string_size) > len(btf):
            raise BtfError("malformed BTF header")
        strings = btf[header + string_at : header + string_at + string_size]
        at, end = header + type_at, header + type_at + type_size

        def text(offset: int) -> str:
            return strings[offset : strings.index(b"\0", offset)].decode() if offset else ""

        # 32-bit words that follow a type: how many, and whether once per member.
        words = {
            _INT: (1, False), _ARRAY: (3, False), _STRUCT: (3, True), _UNION: (3, True),
            _ENUM: (2, True), _FUNC_PROTO: (2, True), _VAR: (1, False), _DATASEC: (3, True),
            _DECL_TAG: (1, False), _ENUM64: (3, True),
        }  # fmt: skip
        types = [_Type(0, "void", 0, False, ())]
        while at < end:
            name, info, size_or_type = struct.unpack_from("<III", btf, at)
            at += 12
            kind, count = info >> 24 & 0x1F, info & 0xFFFF
            if not 1 <= kind <= _ENUM64:
                raise BtfError(f"unknown BTF kind {kind}")
            width, repeated = words.get(kind, (0, False))
            rows = count if repeated else 1 if width else 0
            flat = struct.unpack_from(f"<{width * rows}I", btf, at)
            at += 4 * width * rows
            extra = tuple(flat[i * width : (i + 1) * width] for i in range(rows))
            types.append(_Type(kind, text(name), size_or_type, bool(info >> 31), extra))
        # Names of members and values are offsets until here.
        return [Types._with_names(entry, text) for entry in types]

    @staticmethod
    def _with_names(entry: _Type, text: Any) -> _Type:
        if entry.kind in (_STRUCT, _UNION, _ENUM, _ENUM64):
            names = tuple((text(row[0]), *row[1:]) for row in entry.extra)
            return _Type(entry.kind, entry.name, entry.size_or_type, entry.flag, names)
        return entry

    def _plain(self, number: int) -> int:
        """The number of the type under typedefs and qualifiers."""
        for _ in range(64):
            if number >= len(self._types):
                raise BtfError(f"no type {number}")
            entry = self._types[number]
            if entry.kind not in _QUALIFIERS:
                return number
            number = entry.size_or_type
        raise BtfError("a circle of typedefs")

    # ---- what callers use ---------------------------------------------------------------

    def dtype(self, name: str) -> np.dtype[Any]:
        """The numpy type of ``struct name`` (or of a typedef), with the compiler's offsets.

        ``char`` arrays become bytes (``S``), other arrays subarrays, pointers ``u8``,
        nested structures nested types.
        """
        for kind in (_STRUCT, _TYPEDEF):
            if (kind, name) in self._named:
                try:
                    return self._dtype(self._named[kind, name], 0)
                except (TypeError, OverflowError, IndexError, ValueError) as error:  # absurd sizes
                    raise BtfError(f"struct {name}: {error}") from error
        raise BtfError(f"struct {name} is not in the object's BTF")

    def structs(self) -> list[str]:
        """Names of the structures in the object."""
        return [name for kind, name in self._named if kind == _STRUCT]

    def enum(self, name: str) -> dict[str, int]:
        """The values of ``enum name`` by their names.

        Compilers before LLVM 16 do not say whether an enum is signed; values are taken as
        unsigned there (bit 31 is a flag in events.h, no enum of it has negative values).
        """
        for kind in (_ENUM, _ENUM64):
            if (kind, name) in self._named:
                return self._values(self._types[self._named[kind, name]])
        raise BtfError(f"enum {name} is not in the object's BTF")

    def constants(self) -> dict[str, int]:
        """Every enum value of the object in one dictionary (C's one name space)."""
        found: dict[str, int] = {}
        for entry in self._types:
            if entry.kind in (_ENUM, _ENUM64):
                found.update(self._values(entry))
        return found

    def variables(self) -> dict[str, Variable]:
        """Global variables by name.

        Offsets are right in the BTF that libbpf holds after opening an object; in the file
        itself the compiler leaves them 0.
        """
        found = {}
        for section in self._types:
            if section.kind == _DATASEC:
                for number, offset, size in section.extra:
                    name = self._types[number].name
                    found[name] = Variable(name, section.name, offset, size)
        return found

    # ---- inside -------------------------------------------------------------------------

    @staticmethod
    def _values(entry: _Type) -> dict[str, int]:
        values: dict[str, int] = {}
        for row in entry.extra:
            name, low = str(row[0]), row[1]
            bits = 64 if entry.kind == _ENUM64 else 32
            value = low | row[2] << 32 if entry.kind == _ENUM64 else low
            if entry.flag and value >> (bits - 1):
                value -= 1 << bits
            values[name] = value
        return values

    def _dtype(self, number: int, depth: int) -> np.dtype[Any]:
        number = self._plain(number)
        if number not in self._dtypes:
            self._dtypes[number] = self._make(self._types[number], depth)
        return self._dtypes[number]

    def _make(self, entry: _Type, depth: int) -> np.dtype[Any]:
        if depth > 16:
            raise BtfError(f"{entry.name or 'a type'} is nested too deeply")
        size = entry.size_or_type
        if entry.kind == _INT:
            signed = entry.extra[0][0] >> 24 & 1
            return np.dtype(f"<{'i' if signed else 'u'}{size}")
        if entry.kind == _PTR:
            return np.dtype("<u8")
        if entry.kind in (_ENUM, _ENUM64):
            return np.dtype(f"<{'i' if entry.flag else 'u'}{size}")
        if entry.kind == _FLOAT:
            return np.dtype(f"<f{size}")
        if entry.kind == _ARRAY:
            element, _, count = entry.extra[0]
            inner = self._types[self._plain(element)]
            if inner.kind == _INT and inner.name == "char":
                return np.dtype(f"S{count}")
            return np.dtype((self._dtype(element, depth + 1), (count,)))
        if entry.kind in (_STRUCT, _UNION):
            names, formats, offsets = [], [], []
            for name, kind, offset in entry.extra:
                if (entry.flag and offset >> 24) or offset % 8:
                    raise BtfError(f"bit field {name} in {entry.name}")
                names.append(str(name))
                formats.append(self._dtype(kind, depth + 1))
                offsets.append((offset & 0xFFFFFF if entry.flag else offset) // 8)
            return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": size})
        raise BtfError(f"{entry.name or 'a type'} of BTF kind {entry.kind} holds no data")


def load_types(path: str | os.PathLike[str]) -> Types:
    """The types of the BPF object (or other ELF file with ``.BTF``) at ``path``."""
    with Path(path).open("rb") as file:
        data = file.read(_MAX_OBJECT + 1)
    if len(data) > _MAX_OBJECT:
        raise BtfError(f"{path} is larger than any BPF object")
    try:
        return Types(_section(data, b".BTF"))
    except (BtfError, struct.error) as error:
        raise BtfError(f"{path}: {error}") from error
