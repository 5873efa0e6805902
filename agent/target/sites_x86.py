# SPDX-License-Identifier: Apache-2.0
"""Where an x86-64 function may be probed.

A probe replaces an instruction for everybody who passes it, so a site must be passed exactly
once per call, and the kernel must find the return address at ``[rsp]`` when it is to be replaced.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import capstone
from capstone import x86_const as x86

from .jumps_x86 import Jump, Jumps
from .site import MAX_MOVED, MOVED_UNKNOWN, Refusal, Site
from .uprobe_x86 import NOP5, emulated_kind, kernel_refuses

MAX_PROLOGUE = 48
"""Instructions looked at from the entry; a prologue is shorter."""
_MAX_INSN = 15
_ENDBR64 = b"\xf3\x0f\x1e\xfa"
_ARGUMENTS = ("rdi", "rsi", "rdx", "rcx", "r8", "r9")
_ALIASES = {
    "edi": "rdi", "di": "rdi", "dil": "rdi",
    "esi": "rsi", "si": "rsi", "sil": "rsi",
    "edx": "rdx", "dx": "rdx", "dl": "rdx", "dh": "rdx",
    "ecx": "rcx", "cx": "rcx", "cl": "rcx", "ch": "rcx",
    "r8d": "r8", "r8w": "r8", "r8b": "r8",
    "r9d": "r9", "r9w": "r9", "r9b": "r9",
    "esp": "rsp", "sp": "rsp", "spl": "rsp",
}  # fmt: skip
_LEAVES = frozenset(
    ["hlt", "int3", "syscall", "sysenter", "xabort", "xbegin", "xend", "loop", "loope", "loopne"]
)
_WRITES_RSP = frozenset(["enter", "leave"])


@dataclass(frozen=True)
class Step:
    """An instruction of the straight line from the entry, with what happened before it."""

    at: int
    """Bytes from the function's start."""
    raw: bytes
    text: str
    moved: int
    rsp_writer: str | None
    """The first instruction before this one that wrote ``rsp``."""
    argument_writer: str | None
    bare: bool
    """Nothing but landing pads and nops before it."""


class Function:
    """One function's code: the straight line from its entry, and its jumps, each looked at once.

    ``code`` may be shorter or longer than ``size``; ``size`` 0 means unknown.
    """

    def __init__(self, code: bytes, vaddr: int, size: int, arg_regs: int, file_offset: int = 0) -> None:
        self.code = code[:size] if size > 0 else code
        self.vaddr = vaddr
        self.whole = 0 < size <= len(code)
        self.file_offset = file_offset
        self._arguments = frozenset(_ARGUMENTS[: max(0, arg_regs)])

    @cached_property
    def line(self) -> tuple[list[Step], str]:
        """Steps up to and including the first branch, and why there is none beyond the last."""
        return _walk(self.code, self.vaddr, self._arguments)

    @cached_property
    def jumps(self) -> Jumps:
        return Jumps(self.code, self.vaddr)

    def check(self, at: int, want_return: bool, stack_args: bool) -> str | None:
        """Why not to probe the instruction at ``at`` (bytes from the start); None: it may be probed."""
        if not 0 <= at < len(self.code):
            return "outside the function"
        found = self._step(at)
        if isinstance(found, str):
            return found
        refused = kernel_refuses(found.raw)
        if refused is not None:
            return refused
        kind = emulated_kind(found.raw)
        if at != 0:
            reason = self._beyond_entry(found, kind, want_return, stack_args)
            if reason is not None:
                return reason
        return self._passed_once(found, kind)

    def site(self, at: int) -> Site:
        """The site at a place that :meth:`check` accepted."""
        [step] = [step for step in self.line[0] if step.at == at]
        kind = emulated_kind(step.raw)
        return Site(
            offset=self.file_offset + at,
            vaddr=self.vaddr + at,
            moved=step.moved,
            kind=kind or "first byte",
            emulated=kind is not None,
            ret_ok=step.rsp_writer is None,
            insn=step.raw.hex(),
        )

    def _step(self, at: int) -> Step | str:
        steps, end = self.line
        for step in steps:
            if step.at == at:
                return step
            if step.at < at < step.at + len(step.raw):
                return f"in the middle of the instruction {step.text} at +{step.at}"
        return end

    def _beyond_entry(self, step: Step, kind: str | None, want_return: bool, stack_args: bool) -> str | None:
        if want_return and step.rsp_writer is not None:
            return (
                f"{step.rsp_writer} before it moved the stack pointer: a return probe would overwrite "
                "what lies there and not the return address"
            )
        if stack_args and step.moved == MOVED_UNKNOWN:
            return f"{step.rsp_writer} before it moved the stack pointer by an amount that cannot be known"
        if step.argument_writer is not None:
            return f"{step.argument_writer} before it overwrites an argument register"
        if kind is None:
            return f"{step.text} is single-stepped: it costs as much as the first byte and is less safe"
        if kind == "nop" and not step.bare:
            # A kernel that turns a 5-byte nop into a call pushes below rsp: only at the very
            # entry is nothing of the function's own there.
            return "a nop inside the function may be turned into a call that overwrites the red zone"
        if not self.whole and not step.bare:
            return "the end of the function is not known: a jump back to here cannot be excluded"
        return None

    def _passed_once(self, step: Step, kind: str | None) -> str | None:
        for jump in self.jumps.into(step.at):
            return _loop_reason(jump)
        # A push that is passed twice would unbalance the stack; any other instruction could well
        # be the target of a switch inside a loop, and such targets are not in the code.
        if kind != "push" and not step.bare:
            through = self.jumps.through_table()
            if through is not None:
                return f"the function jumps through a table at +{through}: its targets are not known"
        return None


def _loop_reason(jump: Jump) -> str:
    if not jump.certain:
        return (
            f"bytes at +{jump.at} may be a jump back to +{jump.target}, and cannot be decoded with certainty"
        )
    return f"the jump at +{jump.at} goes back to +{jump.target}: the site is passed more than once per call"


def choose(function: Function, want_return: bool, stack_args: bool) -> tuple[Site | None, list[Refusal]]:
    """The first emulated instruction that may be probed, else the first byte if that may be."""
    refusals: list[Refusal] = []
    steps, end = function.line
    for step in steps:
        if emulated_kind(step.raw) is None:
            continue
        reason = function.check(step.at, want_return, stack_args)
        if reason is None:
            return function.site(step.at), refusals
        refusals.append(Refusal(function.vaddr + step.at, reason))
    if refusals and refusals[0].vaddr == function.vaddr:
        return None, refusals
    reason = function.check(0, want_return, stack_args) if function.code else end
    if reason is None:
        return function.site(0), refusals
    refusals.append(Refusal(function.vaddr, reason))
    return None, refusals


def _walk(code: bytes, vaddr: int, arguments: frozenset[str]) -> tuple[list[Step], str]:
    steps: list[Step] = []
    moved = 0
    rsp_writer: str | None = None
    argument_writer: str | None = None
    bare = True
    at = 0
    for insn in _decode(code[: MAX_PROLOGUE * _MAX_INSN], vaddr):
        raw = bytes(insn.bytes)
        text = f"{insn.mnemonic} {insn.op_str}".strip()
        steps.append(Step(at, raw, text, moved, rsp_writer, argument_writer, bare))
        place = f"{text} at +{at}"
        if _leaves(insn):
            return steps, f"behind {place}, which leaves the straight line from the entry"
        if len(steps) >= MAX_PROLOGUE:
            return steps, f"more than {MAX_PROLOGUE} instructions from the entry"
        written = _written(insn)
        if "rsp" in written:
            moved = _moved(insn, moved)
            rsp_writer = rsp_writer or place
        if argument_writer is None and written & arguments:
            argument_writer = place
        bare = bare and raw in (_ENDBR64, b"\x90", NOP5)
        at += len(raw)
    return steps, f"behind bytes at +{at} that are not a known instruction"


def _decode(code: bytes, vaddr: int) -> Iterator[Any]:
    decoder = capstone.Cs(capstone.CS_ARCH_X86, capstone.CS_MODE_64)
    decoder.detail = True
    yield from decoder.disasm(code, vaddr)


def _leaves(insn: Any) -> bool:
    groups = (
        capstone.CS_GRP_JUMP,
        capstone.CS_GRP_CALL,
        capstone.CS_GRP_RET,
        capstone.CS_GRP_INT,
        capstone.CS_GRP_IRET,
        capstone.CS_GRP_BRANCH_RELATIVE,
    )
    return any(insn.group(g) for g in groups) or insn.mnemonic in _LEAVES or insn.mnemonic.startswith("ud")


def _written(insn: Any) -> set[str]:
    names = {insn.reg_name(r) for r in insn.regs_access()[1]}
    # An operand that the decoder has no access information for may be written.
    names |= {insn.reg_name(o.reg) for o in insn.operands if o.type == x86.X86_OP_REG and o.access == 0}
    written = {_ALIASES.get(n, n) for n in names if n}
    if insn.mnemonic in _WRITES_RSP or insn.mnemonic.startswith(("push", "pop")):
        written.add("rsp")
    return written


def _moved(insn: Any, before: int) -> int:
    """``moved`` after an instruction that writes ``rsp``."""
    if before == MOVED_UNKNOWN:
        return MOVED_UNKNOWN
    after = before
    operands = insn.operands
    if insn.id == x86.X86_INS_PUSH and 0x66 not in insn.prefix:
        after += 8
    elif (
        insn.id in (x86.X86_INS_SUB, x86.X86_INS_ADD)
        and _is_rsp(operands[0])
        and operands[1].type == x86.X86_OP_IMM
    ):
        after += operands[1].imm if insn.id == x86.X86_INS_SUB else -operands[1].imm
    elif insn.id == x86.X86_INS_LEA and _is_rsp(operands[0]) and _from_rsp(operands[1].mem):
        after -= operands[1].mem.disp
    else:
        return MOVED_UNKNOWN
    return after if 0 <= after <= MAX_MOVED else MOVED_UNKNOWN


def _is_rsp(operand: Any) -> bool:
    return bool(operand.type == x86.X86_OP_REG and operand.reg == x86.X86_REG_RSP)


def _from_rsp(mem: Any) -> bool:
    return bool(mem.base == x86.X86_REG_RSP and mem.index == x86.X86_REG_INVALID)
