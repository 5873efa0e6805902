# SPDX-License-Identifier: Apache-2.0
"""Jumps of an x86-64 function back to its first bytes.

Every byte is taken for the start of a jump (a superset of the real ones, whatever the alignment,
in one numpy pass over functions of any size); the few that would land in question are
then confirmed or dismissed by decoding from the entry.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import capstone
import numpy as np
import numpy.typing as npt

MAX_DECODE = 1 << 16
"""Bytes decoded to tell a jump from bytes that look like one; beyond, it counts as a jump."""

_Bytes = npt.NDArray[np.uint8]
_Indices = npt.NDArray[np.int64]


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
        self._bytes: _Bytes = np.frombuffer(code, dtype=np.uint8)
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
        b = self._bytes
        if b.size < 2:
            return None
        jump = (b[:-1] == 0xFF) & ((b[1:] & 0x38) == 0x20)
        register = (b[1:] & 0xC0) == 0xC0
        indexed = ((b[1:] & 0xC0) != 0xC0) & ((b[1:] & 0x07) == 4)
        for at in np.nonzero(jump & (register | indexed))[0].tolist():
            insn = self._covering(at)
            if insn is None:
                return int(at)
            mnemonic, operand = insn
            if (
                mnemonic.endswith("jmp")
                and _address(operand) is None
                and ("[" not in operand or "*" in operand)
            ):
                return int(at)
        return None

    def _candidates(self, last: int) -> list[tuple[int, int, bool]]:
        b = self._bytes
        n = b.size
        found: list[tuple[int, int, bool]] = []

        def add(at: _Indices, target: _Indices, call: bool) -> None:
            hit = (target >= 0) & (target <= last)
            found.extend((int(a), int(t), call) for a, t in zip(at[hit], target[hit], strict=True))

        op = b[: max(0, n - 1)]
        short = (op == 0xEB) | ((op & 0xF0) == 0x70) | ((op >= 0xE0) & (op <= 0xE3))
        at = np.nonzero(short)[0]
        add(at, at + 2 + b[at + 1].astype(np.int8), False)
        for first, second, length, call in (
            (0xE9, None, 1, False),
            (0xE8, None, 1, True),
            (0x0F, 0x80, 2, False),
            (0xC7, 0xF8, 2, False),
        ):
            size = length + 4
            if n < size:
                continue
            mask = b[: n - size + 1] == first
            if second is not None:
                mask &= (b[1 : n - size + 2] & (0xF0 if second == 0x80 else 0xFF)) == second
            at = np.nonzero(mask)[0]
            word = np.zeros(at.size, dtype=np.uint32)
            for i in range(4):
                word |= b[at + length + i].astype(np.uint32) << np.uint32(8 * i)
            add(at, at + size + word.astype(np.int32), call)
        return sorted(found)

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
