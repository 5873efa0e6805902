# SPDX-License-Identifier: Apache-2.0
"""What the kernel's uprobes do with one x86-64 instruction: emulate, single-step or refuse it.

The refusals were measured by attaching to every one-byte opcode on 6.18, joined with the older
kernels' two-byte table; where kernels differ the instruction counts as refused, because one
refused offset fails a whole multi link. tests/runtime/test_sites.py attaches for real.
"""

from __future__ import annotations

PREFIXES = frozenset({0x26, 0x2E, 0x36, 0x3E, 0x64, 0x65, 0x66, 0x67, 0xF0, 0xF2, 0xF3})
_BAD_PREFIXES = {0x26: "es", 0x2E: "cs", 0x36: "ss", 0x3E: "ds or notrack", 0xF0: "lock"}
_BAD_ONE = frozenset(
    bytes.fromhex(
        "06 07 0e 16 17 1e 1f 27 2f 37 3f 60 61 6c 6d 6e 6f 82 9a cc cd ce cf d4 d6"
        "e4 e5 e6 e7 ea ec ed ee ef f1 f4 fa fb"
    )
)
_BAD_TWO = frozenset(
    bytes.fromhex(
        "00 01 02 03 04 05 06 07 08 09 0a 0b 0c 0d 18 24 25 26 27 30 35 36 37 38 39 3a 3b 3c 3d 3e 3f"
        "78 79 7a 7b 7c 7d a6 a7 ae b8 d0 f0 ff"
    )
)

NOP5 = b"\x0f\x1f\x44\x00\x00"


def emulated_kind(insn: bytes) -> str | None:
    """'push', 'call', 'jmp', 'jcc' or 'nop' when the kernel emulates exactly these bytes, else None.

    Prefixed forms never count: kernels disagree about them.
    """
    size = len(insn)
    first = insn[0] if insn else 0
    if (size == 1 and 0x50 <= first <= 0x57) or (size == 2 and first == 0x41 and 0x50 <= insn[1] <= 0x57):
        return "push"
    if size == 5 and first == 0xE8:
        return "call"
    if (size == 5 and first == 0xE9) or (size == 2 and first == 0xEB):
        return "jmp"
    if (size == 2 and 0x70 <= first <= 0x7F) or (size == 6 and first == 0x0F and 0x80 <= insn[1] <= 0x8F):
        return "jcc"
    if insn in (b"\x90", NOP5):
        return "nop"
    return None


def kernel_refuses(insn: bytes) -> str | None:
    """Why some supported kernel answers errno 524 for this instruction, or None.

    ``insn``: the instruction's bytes, or at least the bytes up to its opcode.
    """
    at = 0
    sixteen = False
    while at < len(insn) and insn[at] in PREFIXES:
        bad = _BAD_PREFIXES.get(insn[at])
        if bad is not None:
            return f"the kernel does not probe instructions with a {bad} prefix (errno 524)"
        sixteen = sixteen or insn[at] == 0x66
        at += 1
    if at < len(insn) and 0x40 <= insn[at] <= 0x4F:
        at += 1
    if at >= len(insn):
        return "no complete instruction there"
    op = insn[at]
    if op in (0xC4, 0xC5, 0x62, 0xD5) or (op == 0x8F and at + 1 < len(insn) and insn[at + 1] & 0x38):
        return "the kernel refuses VEX, EVEX and REX2 encodings, by opcode (errno 524)"
    if op in _BAD_ONE:
        return f"the kernel does not probe opcode {op:02x} (errno 524)"
    if op == 0x8E and at + 1 < len(insn) and (insn[at + 1] >> 3) & 7 == 2:
        return "the kernel does not probe a load of the stack segment (errno 524)"
    if op == 0x0F:
        if at + 1 >= len(insn):
            return "no complete instruction there"
        if insn[at + 1] in _BAD_TWO:
            return f"some kernels do not probe opcode 0f {insn[at + 1]:02x} (errno 524)"
        branch = 0x80 <= insn[at + 1] <= 0x8F
    else:
        branch = op in (0xE8, 0xE9, 0xEB) or 0x70 <= op <= 0x7F
    if sixteen and branch:
        return "the kernel does not probe a branch with a 16-bit prefix (errno 524)"
    return None
