# SPDX-License-Identifier: Apache-2.0
"""Where an arm64 function may be probed.

The return address is in ``x30`` until the function signs or saves it, and a return probe
replaces the register: a site with a return must come before anything that touches ``x30``. That
is normally the first instruction, ``bti c`` and ``paciasp`` included.
"""

from __future__ import annotations

import sys
from array import array
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import capstone
from capstone import arm64_const as arm

from .site import MAX_MOVED, MOVED_UNKNOWN, Refusal, Site
from .uprobe_arm64 import kernel_refuses, simulated_kind

MAX_PROLOGUE = 48
_WORD = 4
_LANDING = frozenset([0xD503201F, 0xD503241F, 0xD503245F, 0xD503249F, 0xD50324DF])
"""nop, and bti with its kinds."""
# (mask, value, lowest bit and width of the distance) of b and bl, b.cond, cbz and cbnz, tbz and tbnz
_JUMPS = (
    (0x7C000000, 0x14000000, 0, 26),
    (0xFF000000, 0x54000000, 5, 19),
    (0x7E000000, 0x34000000, 5, 19),
    (0x7E000000, 0x36000000, 5, 14),
)
_COMPARES = frozenset(["cmp", "cmn", "tst", "ccmp", "ccmn"])
_TOUCHES_LR = ("pac", "aut", "xpac")


@dataclass(frozen=True)
class Step:
    """An instruction of the straight line from the entry, with what happened before it."""

    at: int
    word: int
    text: str
    moved: int
    sp_writer: str | None
    lr_user: str | None
    """The first instruction before this one that read, signed, saved or wrote ``x30``."""
    argument_writer: str | None
    bare: bool


class Function:
    """One function's code; arguments as :class:`.sites_x86.Function`."""

    def __init__(self, code: bytes, vaddr: int, size: int, arg_regs: int, file_offset: int = 0) -> None:
        code = code[:size] if size > 0 else code
        self.code = code[: len(code) - len(code) % _WORD]
        self.vaddr = vaddr
        self.whole = size > 0 and size - len(self.code) < _WORD
        self.file_offset = file_offset
        self._arguments = frozenset(f"x{i}" for i in range(min(8, max(0, arg_regs))))

    @cached_property
    def line(self) -> tuple[list[Step], str]:
        """Steps up to and including the first branch, and why there is none beyond the last."""
        return _walk(self.code, self.vaddr, self._arguments)

    @cached_property
    def _jumps(self) -> tuple[list[tuple[int, int]], list[int]]:
        return _jumps(self.code)

    def check(self, at: int, want_return: bool, stack_args: bool) -> str | None:
        """Why not to probe the instruction at ``at`` (bytes from the start); None: it may be probed."""
        if not 0 <= at < len(self.code):
            return "outside the function"
        steps, end = self.line
        if at % _WORD:
            return f"in the middle of the instruction at +{at - at % _WORD}"
        if at // _WORD >= len(steps):
            return end
        step = steps[at // _WORD]
        refused = kernel_refuses(step.word)
        if refused is not None:
            return refused
        if at != 0:
            reason = self._beyond_entry(step, want_return, stack_args)
            if reason is not None:
                return reason
        return self._passed_once(step)

    def site(self, at: int) -> Site:
        """The site at a place that :meth:`check` accepted."""
        step = self.line[0][at // _WORD]
        kind = simulated_kind(step.word)
        return Site(
            offset=self.file_offset + at,
            vaddr=self.vaddr + at,
            moved=step.moved,
            kind=kind or ("first byte" if at == 0 else "stepped"),
            emulated=kind is not None,
            ret_ok=step.lr_user is None,
            insn=step.word.to_bytes(_WORD, "little").hex(),
        )

    def _beyond_entry(self, step: Step, want_return: bool, stack_args: bool) -> str | None:
        if want_return and step.lr_user is not None:
            return (
                f"{step.lr_user} before it signs, saves or changes the return address in x30: "
                "a return probe would have no effect or break the return"
            )
        if stack_args and step.moved == MOVED_UNKNOWN:
            return f"{step.sp_writer} before it moved the stack pointer by an amount that cannot be known"
        if step.argument_writer is not None:
            return f"{step.argument_writer} before it overwrites an argument register"
        if simulated_kind(step.word) is None and not self._may_step_beyond(step):
            return (
                f"{step.text} is single-stepped: it costs as much as the first instruction and is less safe"
            )
        if not self.whole and not step.bare:
            return "the end of the function is not known: a jump back to here cannot be excluded"
        return None

    def _may_step_beyond(self, step: Step) -> bool:
        """Whether the entry itself cannot be probed, and nothing before ``step`` forbids stopping there.

        Functions with thread-local variables often begin with reading tpidr_el0. Between an
        exclusive load and its store nothing may be probed: the store would fail for ever.
        """
        before = [one.word for one in self.line[0] if one.at < step.at]
        return _refused_but_harmless(before[0]) and not any(_exclusive(word) for word in before)

    def _passed_once(self, step: Step) -> str | None:
        direct, through = self._jumps
        for at, target in direct:
            if 0 <= target <= step.at:
                return f"the jump at +{at} goes back to +{target}: the site is passed more than once per call"
        if not step.bare and through:
            return f"the function jumps through a table at +{through[0]}: its targets are not known"
        return None


def choose(function: Function, want_return: bool, stack_args: bool) -> tuple[Site | None, list[Refusal]]:
    """The first simulated instruction that may be probed, else the first instruction if that may be."""
    refusals: list[Refusal] = []
    steps, end = function.line
    for step in steps:
        if simulated_kind(step.word) is None:
            continue
        reason = function.check(step.at, want_return, stack_args)
        if reason is None:
            return function.site(step.at), refusals
        refusals.append(Refusal(function.vaddr + step.at, reason))
    if refusals and refusals[0].vaddr == function.vaddr:
        return None, refusals
    reason = function.check(0, want_return, stack_args) if steps else end
    if reason is None:
        return function.site(0), refusals
    for step in steps[1:]:
        if simulated_kind(step.word) is None and function.check(step.at, want_return, stack_args) is None:
            return function.site(step.at), refusals
    refusals.append(Refusal(function.vaddr, reason))
    return None, refusals


def _walk(code: bytes, vaddr: int, arguments: frozenset[str]) -> tuple[list[Step], str]:
    decoder = capstone.Cs(capstone.CS_ARCH_ARM64, capstone.CS_MODE_LITTLE_ENDIAN)
    decoder.detail = True
    steps: list[Step] = []
    moved = 0
    sp_writer: str | None = None
    lr_user: str | None = None
    argument_writer: str | None = None
    bare = True
    for insn in decoder.disasm(code[: MAX_PROLOGUE * _WORD], vaddr):
        at = len(steps) * _WORD
        word = int.from_bytes(insn.bytes, "little")
        text = f"{insn.mnemonic} {insn.op_str}".strip()
        steps.append(Step(at, word, text, moved, sp_writer, lr_user, argument_writer, bare))
        place = f"{text} at +{at}"
        if _leaves(insn):
            return steps, f"behind {place}, which leaves the straight line from the entry"
        read, written = _accesses(insn)
        if "sp" in written or _writes_back_sp(insn):
            moved = _moved(insn, moved)
            sp_writer = sp_writer or place
        if "x30" in read | written or "x30" in _operands(insn) or insn.mnemonic.startswith(_TOUCHES_LR):
            lr_user = lr_user or place
        if argument_writer is None and written & arguments:
            argument_writer = place
        bare = bare and word in _LANDING
    if len(steps) >= MAX_PROLOGUE:
        return steps, f"more than {MAX_PROLOGUE} instructions from the entry"
    return steps, f"behind bytes at +{len(steps) * _WORD} that are not a known instruction"


def _family(name: str) -> str:
    if name in ("lr", "w30"):
        return "x30"
    if name in ("sp", "wsp"):
        return "sp"
    return "x" + name[1:] if name[:1] == "w" and name[1:].isdigit() else name


def _accesses(insn: Any) -> tuple[set[str], set[str]]:
    read, written = ({_family(insn.reg_name(r) or "") for r in regs} for regs in insn.regs_access())
    if insn.mnemonic in _COMPARES:
        return read | written | _operands(insn), {"nzcv"}
    # The decoder says nothing about the operands of some instructions (swp, cas, ldadd, smov): written.
    return read, written | (_operands(insn) - read - written)


def _operands(insn: Any) -> set[str]:
    return {_family(insn.reg_name(o.reg) or "") for o in insn.operands if o.type == arm.ARM64_OP_REG}


def _leaves(insn: Any) -> bool:
    word = int.from_bytes(insn.bytes, "little")
    kind = simulated_kind(word)
    return (
        (kind is not None and kind != "adr")
        or word & 0xFE000000 == 0xD6000000
        or word & 0xFF000000 == 0xD4000000
    )


def _refused_but_harmless(word: int) -> bool:
    """A move from a system register, or a load relative to the program counter."""
    return word & 0xFFF00000 == 0xD5300000 or word & 0x3B000000 == 0x18000000


def _exclusive(word: int) -> bool:
    return word & 0x3F000000 == 0x08000000


def _writes_back_sp(insn: Any) -> bool:
    return bool(insn.writeback) and any(
        o.type == arm.ARM64_OP_MEM and o.mem.base == arm.ARM64_REG_SP for o in insn.operands
    )


def _moved(insn: Any, before: int) -> int:
    """``moved`` after an instruction that writes ``sp``."""
    if before == MOVED_UNKNOWN:
        return MOVED_UNKNOWN
    operands = insn.operands
    after = -1
    if insn.id in (arm.ARM64_INS_SUB, arm.ARM64_INS_ADD):
        on_sp = [o.type == arm.ARM64_OP_REG and o.reg == arm.ARM64_REG_SP for o in operands[:2]]
        if all(on_sp) and len(operands) == 3 and operands[2].type == arm.ARM64_OP_IMM:
            amount = operands[2].imm << (operands[2].shift.value if operands[2].shift.type else 0)
            after = before + amount if insn.id == arm.ARM64_INS_SUB else before - amount
    elif _writes_back_sp(insn) and operands[-1].type == arm.ARM64_OP_MEM:
        after = before - operands[-1].mem.disp  # pre-indexed: the displacement is in the operand
    return after if 0 <= after <= MAX_MOVED else MOVED_UNKNOWN


def _jumps(code: bytes) -> tuple[list[tuple[int, int]], list[int]]:
    """((place, target) of every direct jump, places of register jumps), bytes from the start.

    Calls of the function's own start are recursion and left out.
    """
    direct: list[tuple[int, int]] = []
    through: list[int] = []
    words = array("I", code)
    if sys.byteorder != "little":
        words.byteswap()
    for index, word in enumerate(words):
        at = index * _WORD
        if word & 0xFEFFF800 == 0xD61F0000:
            through.append(at)
            continue
        for mask, value, low, width in _JUMPS:
            if word & mask == value:
                distance = (word >> low) & ((1 << width) - 1)
                distance -= (distance >> (width - 1)) << width
                target = at + distance * _WORD
                if target or word & 0xFC000000 != 0x94000000:
                    direct.append((at, target))
    return direct, through
