# SPDX-License-Identifier: Apache-2.0
"""Pointers that a file stores to its own data: relocated, plain at a fixed address, or as offsets."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import islice
from typing import Protocol

MAX_SCAN = 96 << 20
"""Bytes of a file searched for a text or a pointer."""
MAX_PLACES = 256
"""Occurrences of one text that are looked at in a program at a fixed address."""
MAX_RELOCATIONS = 1 << 20
PT_LOAD, _PF_X = 1, 1
_BLOCK = 1 << 18


class Segment(Protocol):
    """A program header."""

    @property
    def type(self) -> int: ...
    @property
    def flags(self) -> int: ...
    @property
    def offset(self) -> int: ...
    @property
    def vaddr(self) -> int: ...
    @property
    def filesz(self) -> int: ...


class Elf(Protocol):
    """What is needed of an ELF file; :class:`.elf.ElfFile` has it."""

    @property
    def segments(self) -> Iterable[Segment]: ...
    def read(self, vaddr: int, count: int) -> bytes: ...
    def blocks(self, offset: int, count: int, overlap: int = 0) -> Iterator[tuple[int, bytes]]: ...
    def relative_relocations(self) -> Iterator[tuple[int, int]]: ...


class Pointers:
    """Which address of the file's image holds a pointer to which."""

    def __init__(self, elf: Elf) -> None:
        self._elf = elf

    @cached_property
    def _relocated(self) -> dict[int, int]:
        return dict(islice(self._elf.relative_relocations(), MAX_RELOCATIONS))

    def at(self, vaddr: int) -> int | None:
        """The address that the word at ``vaddr`` points to, None when it is no pointer."""
        if self._relocated:
            return self._relocated.get(vaddr)
        word = self._elf.read(vaddr, 8)
        target = int.from_bytes(word, "little")
        return target if len(word) == 8 and self._elf.read(target, 1) else None

    def text_at(self, vaddr: int, limit: int = 96) -> str | None:
        """The printable ASCII text that the word at ``vaddr`` points to; None: no pointer or no such text."""
        target = self.at(vaddr)
        return None if target is None else self._text(target, limit)

    def _text(self, target: int, limit: int) -> str | None:
        raw, end, _ = self._elf.read(target, limit).partition(b"\0")
        if not end or not raw.isascii():
            return None
        text = raw.decode("ascii")
        return text if text.isprintable() else None

    def places(self, texts: Iterable[bytes]) -> dict[bytes, set[int]]:
        """Addresses where each NUL-terminated text begins, as a whole or as the tail of a longer one.

        In a relocated file only those that some word points to: few addresses to look at, where
        a search through all of a big library would cost a hundred milliseconds.
        """
        found: dict[bytes, set[int]] = {text: set() for text in texts}
        longest = max(map(len, found), default=0)
        if self._relocated:
            for target, start in self._beginnings(longest + 1):
                places = found.get(start.partition(b"\0")[0])
                if places is not None and b"\0" in start:
                    places.add(target)
            return found
        return self.search(found)

    def search(self, texts: Iterable[bytes]) -> dict[bytes, set[int]]:
        """As :meth:`places`, whether anything points there or not: a search through all loaded data."""
        found: dict[bytes, set[int]] = {text: set() for text in texts}
        for vaddr, piece in self._pieces(max(map(len, found), default=0)):
            for text, places in found.items():
                at = piece.find(text + b"\0")
                while at >= 0 and len(places) < MAX_PLACES:
                    places.add(vaddr + at)
                    at = piece.find(text + b"\0", at + 1)
        return found

    def _beginnings(self, size: int) -> Iterator[tuple[int, bytes]]:
        """Each address that is pointed to, with the ``size`` bytes there."""
        base, block = 0, b""
        budget = MAX_SCAN
        for target in sorted(set(self._relocated.values())):
            if not base <= target <= base + len(block) - size:
                base, block = target, self._elf.read(target, min(_BLOCK, budget))
                budget -= len(block)
            at = target - base
            yield target, block[at : at + size]

    def holders(self, targets: set[int]) -> list[int]:
        """Addresses of the words that point to one of ``targets``, in order."""
        if not targets:
            return []
        if self._relocated:
            return sorted(v for v, target in self._relocated.items() if target in targets)
        words = [t.to_bytes(8, "little") for t in sorted(targets)]
        pattern = re.compile(b"|".join(re.escape(word) for word in words))
        found: set[int] = set()
        for vaddr, piece in self._pieces(8):
            for match in pattern.finditer(piece):
                if (vaddr + match.start()) % 8 == 0:
                    found.add(vaddr + match.start())
        return sorted(found)

    def offset_tables(self, first: tuple[bytes, ...], places: dict[bytes, set[int]]) -> list[int]:
        """Addresses of tables of 32-bit offsets from their own start, to ``first`` and so on.

        clang turns a constant table of texts that only one function reads into this form.
        """
        starts: list[int] = []
        if not all(places[text] for text in first):
            return starts
        import numpy as np  # here only: the import takes longer than everything else together

        wanted = np.array(sorted(places[first[0]]), dtype=np.int64)
        for vaddr, piece in self._pieces(64):
            skip = -vaddr % 4
            words = np.frombuffer(piece[skip : skip + (len(piece) - skip) // 4 * 4], dtype="<i4").astype(
                np.int64
            )
            at = vaddr + skip + 4 * np.arange(words.size, dtype=np.int64)
            hits = np.nonzero(np.isin(words + at, wanted))[0]
            for index in hits[:MAX_PLACES].tolist():
                start = int(at[index])
                row = words[index : index + len(first)].tolist()
                targets = [start + word for word in row]
                if len(row) == len(first) and all(
                    t in places[f] for t, f in zip(targets, first, strict=True)
                ):
                    starts.append(start)
        return starts

    def text_by_offset(self, start: int, index: int, limit: int = 96) -> str | None:
        """Entry ``index`` of a table that :meth:`offset_tables` found."""
        word = self._elf.read(start + 4 * index, 4)
        return (
            self._text(start + int.from_bytes(word, "little", signed=True), limit) if len(word) == 4 else None
        )

    def _pieces(self, overlap: int) -> Iterator[tuple[int, bytes]]:
        """(address, bytes) of the loaded data; code, which can hold constants too, comes last."""
        load = [s for s in self._elf.segments if s.type == PT_LOAD]
        budget = MAX_SCAN
        for segment in sorted(load, key=lambda s: s.flags & _PF_X):
            size = min(segment.filesz, budget)
            budget -= size
            for offset, piece in self._elf.blocks(segment.offset, size, overlap):
                yield segment.vaddr + offset - segment.offset, piece
