# SPDX-License-Identifier: Apache-2.0
"""What the kernel's uprobes do with one arm64 instruction: simulate, single-step or refuse it.

From the kernel's decoder (arch/arm64/kernel/probes/decode-insn.c, 5.8 and later; before, the
landing pads and pointer authentication were refused). Not measured on hardware here.
"""

from __future__ import annotations

_SIMULATED = (
    (0xFC000000, 0x14000000, "jmp"),  # b
    (0xFC000000, 0x94000000, "call"),  # bl
    (0xFF000010, 0x54000000, "jcc"),  # b.cond
    (0x7E000000, 0x34000000, "jcc"),  # cbz, cbnz
    (0x7E000000, 0x36000000, "jcc"),  # tbz, tbnz
    (0x1F000000, 0x10000000, "adr"),  # adr, adrp
)
_HINT_MASK, _HINT = 0xFFFFF01F, 0xD503201F
# nop; xpaclri, pacia1716, pacib1716, autia1716, autib1716; pac and aut with z and sp; bti and its kinds
_HINTS_STEPPED = frozenset([0, 7, 8, 10, 12, 14, *range(24, 32), 32, 34, 36, 38])


def simulated_kind(word: int) -> str | None:
    """'jmp', 'call', 'jcc' or 'adr' when every kernel simulates the instruction, else None.

    nop is simulated from 6.13 on only, and not worth a site of its own.
    """
    for mask, value, kind in _SIMULATED:
        if word & mask == value:
            return kind
    return None


def kernel_refuses(word: int) -> str | None:
    """Why the kernel answers errno 524 for this instruction, or None."""
    if simulated_kind(word) is not None:
        return None
    if word & _HINT_MASK == _HINT:
        if (word >> 5) & 0x7F in _HINTS_STEPPED:
            return None
        return "the kernel does not probe this hint instruction (errno 524)"
    if word & 0xFE000000 == 0xD6000000:
        # br, blr, ret are simulated; their authenticating forms and eret are not.
        if word & 0xFF9FFC1F in (0xD61F0000, 0xD60F0000) and (word >> 21) & 3 != 3:
            return None
        return "the kernel does not probe authenticated branches (errno 524)"
    if word & 0xFF000000 == 0xD4000000:
        return "the kernel does not probe instructions that raise an exception (errno 524)"
    if word & 0xFFC00000 == 0xD5000000 and word & 0xFFF80000 != 0xD5080000:
        # System instructions: barriers are stepped, moves to and from system registers are not.
        if word & 0xFFFFF000 == 0xD5033000:
            return None
        return "the kernel does not probe moves to or from system registers (errno 524)"
    if word & 0x3B000000 == 0x18000000:
        return "the kernel does not probe loads relative to the program counter (errno 524)"
    if word & 0x3F000000 == 0x08000000:
        return "the kernel does not probe exclusive or ordered accesses (errno 524)"
    if word >> 16 == 0:
        return "not an instruction"
    return None
