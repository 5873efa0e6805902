# SPDX-License-Identifier: Apache-2.0
"""Facts about ggml's structures out of the machine code of functions that read one field.

``ggml_get_data`` returns ``tensor->data`` and nothing else: the one displacement in it is the
field's offset. Every such function that the file exports contributes; the rest of the layout comes from
public history and must agree with all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import capstone

from .layout_known import KNOWN
from .layout_types import Layout

if TYPE_CHECKING:
    from .elf import ElfFile
    from .elf_types import Symbol

MAX_CODE = 256
MAX_OFFSET = 4096
_SOON = 6
_UID_MARK = "ggml_graph_next_uid"
# Begins by numbering the graph: a call whose result is stored in it.
_NUMBERS = "ggml_backend_sched_split_graph"
_NUMBERS_CODE = 512
# function -> (field, which of the displacements on the first argument)
_FIRST: dict[str, str] = {
    "ggml_get_data": "t_data",
    "ggml_get_name": "t_name",
    "ggml_graph_n_nodes": "g_n_nodes",
    "ggml_graph_nodes": "g_nodes",
    "ggml_op_desc": "t_op",
    "ggml_element_size": "t_type",
    "ggml_is_view": "t_view_src",
}
_LEAST: dict[str, str] = {"ggml_nelements": "t_ne", "ggml_is_empty": "t_ne", "ggml_is_transposed": "t_nb"}
_WRITTEN: dict[str, str] = {"ggml_set_output": "t_flags", "ggml_set_input": "t_flags"}
_OP_PARAMS = "ggml_get_unary_op"
_NAME_SIZE = "ggml_set_name"
_NAMES = frozenset([*_FIRST, *_LEAST, *_WRITTEN, _OP_PARAMS, _NAME_SIZE, _UID_MARK, _NUMBERS])


@dataclass(frozen=True, slots=True)
class Access:
    """One use of ``[first argument + displacement]``."""

    displacement: int
    written: bool


def facts_of(elf: ElfFile) -> dict[str, int]:
    """Field of :class:`.layout_types.Layout` -> value, for what this file's accessors tell.

    ``g_uid`` is the offset where the file stores the number of a graph, 0 when other accessors are
    there and it is not seen to do so. Fields that two functions see differently are left out.
    """
    found = elf.functions(_NAMES)
    seen: dict[str, set[int]] = {}
    decoder = _decoder(elf.machine())
    for name, symbols in found.items():
        if not symbols or name in (_UID_MARK, _NUMBERS):
            continue
        code = elf.read(symbols[0].vaddr, min(symbols[0].size or 64, MAX_CODE))
        for field, value in _facts(decoder, name, code, elf.machine()):
            if 0 <= value < MAX_OFFSET:
                seen.setdefault(field, set()).add(value)
    facts = {field: values.pop() for field, values in seen.items() if len(values) == 1}
    if "name_end" in facts:
        end = facts.pop("name_end")
        if "t_name" in facts and "name_size" not in facts and end > facts["t_name"]:
            facts["name_size"] = end - facts["t_name"]
    if facts:
        facts["g_uid"] = _uid(elf, decoder, found)
    return facts


def matching(facts: dict[str, int]) -> list[Layout]:
    """Known layouts that agree with the facts, newest first; without facts those without a graph number.

    A number that is read where there is none could make two graphs look like one: it is
    believed only of a file that makes such numbers.
    """
    uid = facts.get("g_uid", 0)
    fitting = [
        layout
        for layout in KNOWN
        if layout.g_uid in (uid, None)
        and all(getattr(layout, field) == value for field, value in facts.items() if field != "g_uid")
    ]
    if len(facts) < 3:
        return fitting
    return [replace(layout, source="accessors") for layout in fitting]


def corrected(facts: dict[str, int]) -> list[Layout]:
    """A layout that no public version has, from the facts: fields were inserted, or names are longer.

    Everything up to a field that a fact fixes is shifted with it. Empty when the facts do not
    reach from the operator to the name, for then too much would be guessed.
    """
    if not {"t_op", "t_data", "t_name"} <= facts.keys():
        return []
    made: list[Layout] = []
    for base in KNOWN:
        if (base.g_uid or 0) != facts.get("g_uid", 0) or base.name_size != 64:
            continue
        size = facts.get("name_size", base.name_size)
        if facts["t_op"] != base.t_op or any(
            field in facts and facts[field] != getattr(base, field)
            for field in (
                "g_n_nodes",
                "g_nodes",
                "t_type",
                "t_ne",
                "t_nb",
                "t_op_params",
                "t_flags",
                "t_view_src",
            )
        ):
            continue
        extra = (facts["t_name"] + size + 7) // 8 * 8
        before_data = facts["t_data"] - base.t_data
        if before_data < 0 or facts["t_name"] < facts["t_data"] + 8:
            continue
        # Explicit padding may follow: how far apart the tensors lie decides.
        least = (extra + 8 + 15) // 16 * 16
        made += [
            replace(
                base,
                name=f"like {base.name}, as its accessors say",
                source="accessors",
                t_data=facts["t_data"],
                t_name=facts["t_name"],
                name_size=size,
                t_extra=extra,
                t_size=t_size,
            )
            for t_size in (least, least + 16)
        ]
    return made


def _decoder(machine: str) -> Any:
    if machine == "aarch64":
        decoder = capstone.Cs(capstone.CS_ARCH_ARM64, capstone.CS_MODE_LITTLE_ENDIAN)
    else:
        decoder = capstone.Cs(capstone.CS_ARCH_X86, capstone.CS_MODE_64)
    decoder.detail = True
    return decoder


def _uid(elf: ElfFile, decoder: Any, found: dict[str, list[Symbol]]) -> int:
    """Offset of the graph's number; 0: none is seen to be stored."""
    known = {layout.g_uid for layout in KNOWN if layout.g_uid is not None}
    numbering = found.get(_NUMBERS)
    if not numbering:
        return min(known) if found.get(_UID_MARK) else 0
    code = elf.read(numbering[0].vaddr, min(numbering[0].size or _NUMBERS_CODE, _NUMBERS_CODE))
    result = "x0" if elf.machine() == "aarch64" else "rax"
    fresh = 0  # instructions for which the result of a call is still in its register
    for insn in decoder.disasm(code, 0):
        operands = insn.operands
        fresh -= 1
        if insn.group(capstone.CS_GRP_CALL):
            fresh = _SOON
        elif fresh > 0 and insn.mnemonic in ("mov", "str") and len(operands) == 2:
            value = operands[1 if insn.mnemonic == "mov" else 0]
            memory = operands[0 if insn.mnemonic == "mov" else 1]
            stored = value.type == capstone.CS_OP_REG and insn.reg_name(value.reg) == result
            in_graph = memory.type == capstone.CS_OP_MEM and memory.mem.disp in known
            if stored and in_graph and insn.reg_name(memory.mem.base) not in ("rsp", "sp"):
                return int(memory.mem.disp)
    return 0


def _facts(decoder: Any, name: str, code: bytes, machine: str) -> Iterator[tuple[str, int]]:
    instructions = list(decoder.disasm(code, 0))
    accesses = list(_accesses(instructions, machine))
    if name in _FIRST and accesses:
        yield _FIRST[name], accesses[0].displacement
    elif name in _LEAST and accesses:
        yield _LEAST[name], min(a.displacement for a in accesses)
    elif name in _WRITTEN:
        written = [a.displacement for a in accesses if a.written]
        if written:
            yield _WRITTEN[name], written[0]
    elif name == _OP_PARAMS and accesses:
        yield "t_op", accesses[0].displacement
        if len(accesses) > 1:
            yield "t_op_params", accesses[1].displacement
    elif name == _NAME_SIZE:
        yield from _name_size(instructions, machine)


def _accesses(instructions: list[Any], machine: str) -> Iterator[Access]:
    """Uses of memory, or of an address, at a fixed distance from the first argument, while it is known."""
    first = {"rdi"} if machine == "x86_64" else {"x0"}
    arriving: dict[int, set[str]] = {}
    for insn in instructions:
        first |= arriving.get(insn.address, set())
        for operand in insn.operands:
            if operand.type != capstone.CS_OP_MEM or insn.reg_name(operand.mem.base) not in first:
                continue
            if not operand.mem.index and operand.mem.disp >= 0:
                stores = insn.mnemonic.startswith(("str", "stp", "stur"))
                written = stores if machine == "aarch64" else bool(operand.access & capstone.CS_AC_WRITE)
                yield Access(operand.mem.disp, written)
        added = _address(insn, first, machine)
        if added is not None:
            yield Access(added, False)
        _follow(insn, first, machine)
        if (
            insn.group(capstone.CS_GRP_JUMP)
            and insn.operands
            and insn.operands[-1].type == capstone.CS_OP_IMM
        ):
            arriving[insn.operands[-1].imm] = set(first)
        if _ends(insn):
            first.clear()  # what follows is reached by a jump, or not at all


def _ends(insn: Any) -> bool:
    leaves = any(insn.group(g) for g in (capstone.CS_GRP_RET, capstone.CS_GRP_CALL))
    return leaves or insn.mnemonic in ("jmp", "b", "br", "bl", "blr", "ud2", "brk")


def _address(insn: Any, first: set[str], machine: str) -> int | None:
    """The distance in ``add x0, x0, #256`` (x86's lea has a memory operand)."""
    if machine == "x86_64" or insn.mnemonic != "add" or len(insn.operands) != 3:
        return None
    _, base, amount = insn.operands
    if base.type != capstone.CS_OP_REG or amount.type != capstone.CS_OP_IMM:
        return None
    return int(amount.imm) if insn.reg_name(base.reg) in first else None


def _follow(insn: Any, first: set[str], machine: str) -> None:
    """Registers that hold the first argument after ``insn``."""
    move = insn.mnemonic == "mov" and len(insn.operands) == 2 and insn.operands[1].type == capstone.CS_OP_REG
    copied = (
        insn.reg_name(insn.operands[0].reg) if move and insn.reg_name(insn.operands[1].reg) in first else None
    )
    for register in insn.regs_access()[1]:
        name = insn.reg_name(register)
        first.discard(_wide(name, machine))
    if copied is not None:
        first.add(copied)


def _wide(name: str, machine: str) -> str:
    if machine == "aarch64":
        return "x" + name[1:] if name[:1] == "w" and name[1:].isdigit() else name
    return {
        "edi": "rdi",
        "di": "rdi",
        "dil": "rdi",
        "eax": "rax",
        "edx": "rdx",
        "ecx": "rcx",
        "esi": "rsi",
    }.get(name, name)


def _name_size(instructions: list[Any], machine: str) -> Iterator[tuple[str, int]]:
    """A loop up to the last byte (``cmp $63``), or a copy whose last byte is then cleared.

    ``name_size`` itself, or ``name_end``: the offset behind the array.
    """
    first = {"rdi"} if machine == "x86_64" else {"x0"}
    for insn in instructions:
        operands = insn.operands
        last = operands[-1] if operands else None
        if (
            insn.mnemonic == "cmp"
            and last is not None
            and last.type == capstone.CS_OP_IMM
            and 16 <= last.imm < 512
        ):
            yield "name_size", (int(last.imm) + 1) & ~1
        clears = (
            insn.mnemonic in ("mov", "strb")
            and operands
            and operands[0].type
            in (
                capstone.CS_OP_MEM,
                capstone.CS_OP_REG,
            )
        )
        if clears:
            memory = next((o for o in operands if o.type == capstone.CS_OP_MEM), None)
            zero = machine == "aarch64" and insn.op_str.startswith("wzr")
            zero = zero or (
                machine == "x86_64" and last is not None and last.type == capstone.CS_OP_IMM and not last.imm
            )
            if (
                memory is not None
                and zero
                and insn.reg_name(memory.mem.base) in first
                and not memory.mem.index
            ):
                yield "name_end", int(memory.mem.disp) + 1
        _follow(insn, first, machine)
