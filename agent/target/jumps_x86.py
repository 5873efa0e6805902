# SPDX-License-Identifier: Apache-2.0
"""Jumps of an x86-64 function back to its first bytes.

Every byte is taken for the start of a jump (a superset of the real ones, whatever the alignment,
in one pass at the speed of a text search); the few that would land in question are
then confirmed or dismissed by decoding from the entry.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import capstone

MAX_DECODE = 1 << 16
"""Bytes decoded to tell a jump from bytes that look like one; beyond, it counts as a jump."""

_SHORT = frozenset([0xEB, *range(0x70, 0x80), *range(0xE0, 0xE4)])
# jmp, call, jcc and xbegin with a 32-bit distance; in the second the distance is negative and above
# -16 MiB, which is what a jump back to the start of a function has. Matches may overlap.
_LONG = re.compile(rb"(?=([\xe8\xe9]|\x0f[\x80-\x8f]|\xc7\xf8))", re.DOTALL)
_LONG_BACK = re.compile(rb"(?=([\xe8\xe9]|\x0f[\x80-\x8f]|\xc7\xf8)...\xff)", re.DOTALL)
# FF /4 through a register, or through memory with an index
_LOADED_WITHIN = 4
_FIELD = re.compile(r"qword ptr \[(?!rsp|rbp|rip)r[a-z0-9]+ \+ (?:0x)?[0-9a-f]+\]")
_TABLE_JUMP = re.compile(rb"(?=\xff(?:[\xe0-\xe7]|[\x24\x64\xa4]))", re.DOTALL)


@dataclass(frozen=True)
class Jump:
    """A jump at ``at`` to ``target`` (bytes from the function's start). ``certain``: decoded as one."""

    at: int
    target: int
    certain: bool


class Jumps:
    """``code`` of the function at ``vaddr``."""

    def __init__(self, code: bytes, vaddr: int) -> None:
        self._code = code
        self._vaddr = vaddr
        self._decoded: list[tuple[int, int, str, str]] = []
        self._reached = 0
        decoder = capstone.Cs(capstone.CS_ARCH_X86, capstone.CS_MODE_64)
        self._stream: Iterator[Any] = decoder.disasm_lite(code[:MAX_DECODE], vaddr)

    def into(self, last: int) -> Iterator[Jump]:
        """Jumps to a place in [0, last]. A call of the function's own start is recursion, not a jump."""
        for at, target, call in self._candidates(last):
            if call and target == 0:
                continue
            insn = self._covering(at)
            if insn is None:
                yield Jump(at, target, certain=False)
                continue
            mnemonic, operand = insn
            relative = mnemonic.startswith(("j", "call", "loop", "xbegin")) or " j" in f" {mnemonic}"
            if relative and _address(operand) == self._vaddr + target:
                yield Jump(at, target, certain=True)

    def through_table(self) -> int | None:
        """Where the function jumps to an address computed from an index; None: nowhere."""
        for match in _TABLE_JUMP.finditer(self._code):
            at = match.start()
            insn = self._covering(at)
            if insn is None:
                return at
            mnemonic, operand = insn
            computed = _address(operand) is None and ("[" not in operand or "*" in operand)
            if computed and mnemonic.endswith("jmp") and not self._of_a_structure(at, operand):
                return at
        return None

    def _of_a_structure(self, at: int, register: str) -> bool:
        """Whether the register that is jumped through was last loaded from a fixed place in a structure:
        a function that is called last. A table's entry is loaded by an index, or computed."""
        before = [insn for insn in self._decoded if insn[0] < at][-_LOADED_WITHIN:]
        for _, _, mnemonic, operand in reversed(before):
            to, _, source = operand.partition(", ")
            if mnemonic == "mov" and to == register:
                return _FIELD.fullmatch(source) is not None
            if mnemonic not in ("test", "cmp") and not mnemonic.startswith("j"):
                return False  # it may write the register, or be what others jump over
        return False

    def _candidates(self, last: int) -> list[tuple[int, int, bool]]:
        """(place, target, whether a call) of everything that could be a jump into [0, last]."""
        code = self._code
        found: list[tuple[int, int, bool]] = []
        # A short jump reaches 128 bytes; a long one from before the last byte may go forward.
        for at in range(min(len(code) - 1, last + 131)):
            if code[at] in _SHORT:
                target = at + 2 + int.from_bytes(code[at + 1 : at + 2], "little", signed=True)
                if 0 <= target <= last:
                    found.append((at, target, False))
        near = list(_LONG.finditer(code, 0, last + 6))
        for match in (*near, *_LONG_BACK.finditer(code)):
            at, end = match.start(), match.end(1)
            target = end + 4 + int.from_bytes(code[end : end + 4], "little", signed=True)
            if end + 4 <= len(code) and 0 <= target <= last:
                found.append((at, target, code[at] == 0xE8))
        return sorted(set(found))

    def _covering(self, at: int) -> tuple[str, str] | None:
        """Mnemonic and operand of the instruction that holds the byte ``at``; None: not decodable."""
        while self._reached <= at:
            insn = next(self._stream, None)
            if insn is None:
                return None
            start = int(insn[0]) - self._vaddr
            self._decoded.append((start, int(insn[1]), insn[2], insn[3]))
            self._reached = start + int(insn[1])
        low, high = 0, len(self._decoded)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._decoded[middle][0] <= at else (low, middle)
        return self._decoded[low][2], self._decoded[low][3]


def _address(operand: str) -> int | None:
    try:
        return int(operand, 0)
    except ValueError:
        return None
