# SPDX-License-Identifier: Apache-2.0
"""Relative relocations of an ELF file, in both encodings.

They are how a position-independent file stores a pointer to something of its own, so a
table of names in a stripped file is a run of them. RELR is described in the System V ABI
draft ("Relative Relocation Table").
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .elf import ElfFile

MAX_RELOCATIONS = 1 << 22
_RELATIVE = {"x86_64": 8, "aarch64": 1027}
_DT_RELA, _DT_RELASZ, _DT_RELRSZ, _DT_RELR = 7, 8, 35, 36
_STEP = 24 * 43690


def relative(elf: ElfFile) -> Iterator[tuple[int, int]]:
    """See :meth:`.elf.ElfFile.relative_relocations`; at most four million of each form."""
    yield from _rela(elf)
    yield from _relr(elf)


def _areas(elf: ElfFile, address: int, size: int) -> Iterator[tuple[int, int]]:
    """(file offset, bytes) of a table of the dynamic section."""
    for start, count in zip(elf.dynamic(address), elf.dynamic(size), strict=False):
        offset = elf.vaddr_to_offset(start)
        if offset is not None:
            yield offset, count


def _rela(elf: ElfFile) -> Iterator[tuple[int, int]]:
    wanted = _RELATIVE[elf.machine()]
    for offset, size in _areas(elf, _DT_RELA, _DT_RELASZ):
        end = offset + min(size, MAX_RELOCATIONS * 24)
        for at in range(offset, end, _STEP):
            raw = elf.pread(at, min(_STEP, end - at))
            for vaddr, info, addend in struct.iter_unpack("<QQQ", raw[: len(raw) // 24 * 24]):
                if info == wanted:
                    yield vaddr, addend
            if not raw:
                break


def _relr(elf: ElfFile) -> Iterator[tuple[int, int]]:
    count = 0
    for offset, size in _areas(elf, _DT_RELR, _DT_RELRSZ):
        for vaddr in relr_addresses(elf.pread(offset, min(size, 8 * MAX_RELOCATIONS))):
            count += 1
            if count > MAX_RELOCATIONS:
                return
            value = elf.read(vaddr, 8)
            if len(value) == 8:
                yield vaddr, int.from_bytes(value, "little")


def relr_addresses(raw: bytes) -> Iterator[int]:
    """Addresses in a RELR table: an even word is an address, an odd one a bitmap after it."""
    base = 0
    for (word,) in struct.iter_unpack("<Q", raw[: len(raw) // 8 * 8]):
        if not word & 1:
            yield word
            base = word + 8
            continue
        bits, at = word >> 1, base
        while bits:
            if bits & 1:
                yield at
            bits >>= 1
            at += 8
        base += 63 * 8
