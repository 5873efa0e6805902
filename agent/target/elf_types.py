# SPDX-License-Identifier: Apache-2.0
"""What an ELF file is made of: the pieces that its readers hand around."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import TargetError


class ElfError(TargetError):
    """This file is not an ELF file that can be read, and why."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One program header; addresses and sizes in bytes."""

    type: int
    flags: int
    offset: int
    vaddr: int
    filesz: int
    memsz: int

    @property
    def executable(self) -> bool:
        """Whether the segment is mapped executable."""
        return bool(self.flags & 1)


@dataclass(frozen=True, slots=True)
class Section:
    """One section header; ``offset`` and ``size`` are in the file, in bytes."""

    name: str
    type: int
    flags: int
    vaddr: int
    offset: int
    size: int
    link: int
    entsize: int


@dataclass(frozen=True, slots=True)
class Symbol:
    """One function or object: ``vaddr`` unrelocated, ``size`` in bytes (0: not known).

    ``source`` names the table; ``exact`` is False for a compiler clone of the wanted
    name, whose arguments are not to be trusted.
    """

    name: str
    vaddr: int
    size: int
    source: str
    exact: bool = True
