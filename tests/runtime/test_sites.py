# SPDX-License-Identifier: Apache-2.0
"""Chosen sites under real uprobes: the victim's registers and results stay whole, and every call
is seen once. The wrong sites are shown to do the harm that the rule exists for."""

from __future__ import annotations

import errno
import os
import re
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest

from profinferd.agent.target.elf import ElfFile
from profinferd.agent.target.sites import check_site, choose_site
from profinferd.agent.target.uprobe_x86 import emulated_kind, kernel_refuses

from ..victims.build import build
from .perf_uprobe import PerfUprobe

pytestmark = pytest.mark.skipif(os.uname().machine != "x86_64", reason="the victims are x86-64 code")

CALLS = 500
ENOTSUPP = 524

# Every victim of sites.c that has a site at all.
FUNCTIONS = [
    "push_first",
    "push_after_endbr",
    "five_pushes",
    "branch_after_pushes",
    "realigns",
    "loop_head_jump",
    "loop_head_far",
    "branch_first",
    "call_first",
    "jump_first",
    "nop_first",
    "nop_after_endbr",
    "red_zone_nop",
    "mov_first",
    "argument_gone",
    "argument_gone_low",
    "sub_then_branch",
    "table",
    "looks_like_a_jump",
]


class Victim:
    def __init__(self, names: list[str]) -> None:
        self.path = build("sites.c")
        self.elf = ElfFile.open(str(self.path))
        command = [str(self.path), str(CALLS), *names]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def function(self, name: str) -> tuple[bytes, int, int, int]:
        symbol = self.elf.function(name)
        assert symbol is not None
        offset = self.elf.vaddr_to_offset(symbol.vaddr)
        assert offset is not None
        return self.elf.read(symbol.vaddr, symbol.size), symbol.vaddr, symbol.size, offset

    def finish(self) -> dict[str, tuple[int, int, int]]:
        """{function: (calls, wrong results, calls after which a register was damaged)}."""
        text, _ = self.process.communicate("go\n", timeout=300)
        found = re.findall(r"^(\w+) calls=(\d+) wrong=(\d+) registers=(\d+)$", text, re.M)
        return {name: (int(calls), int(wrong), int(registers)) for name, calls, wrong, registers in found}


@pytest.mark.parametrize("want_return", [False, True])
def test_chosen_sites_leave_the_target_whole(want_return: bool) -> None:
    """One entry (and one return) per call; no result and no callee-saved register changes."""
    victim = Victim(FUNCTIONS)
    entries: dict[str, PerfUprobe] = {}
    returns: dict[str, PerfUprobe] = {}
    with ExitStack() as stack:
        for name in FUNCTIONS:
            code, vaddr, size, offset = victim.function(name)
            site, _ = choose_site(code, vaddr, size, "x86_64", want_return, 2, file_offset=offset)
            assert site is not None, name
            entries[name] = stack.enter_context(PerfUprobe(victim.path, site.offset, victim.process.pid))
            if want_return:
                assert site.ret_ok
                probe = PerfUprobe(victim.path, site.offset, victim.process.pid, ret=True)
                returns[name] = stack.enter_context(probe)
        assert victim.finish() == dict.fromkeys(FUNCTIONS, (CALLS, 0, 0))
        assert {name: probe.count() for name, probe in entries.items()} == dict.fromkeys(FUNCTIONS, CALLS)
        assert {name: probe.count() for name, probe in returns.items()} == dict.fromkeys(returns, CALLS)


@pytest.mark.parametrize(("name", "instruction"), [("branch_after_pushes", "53"), ("five_pushes", "53")])
def test_a_refused_return_site_does_damage(name: str, instruction: str) -> None:
    """What the checker refuses is no superstition: a return probe at a later push ruins the caller."""
    victim = Victim([name])
    code, vaddr, size, offset = victim.function(name)
    at = code.index(bytes.fromhex(instruction))
    assert check_site(code, vaddr, size, "x86_64", vaddr + at, True) is not None
    with PerfUprobe(victim.path, offset + at, victim.process.pid, ret=True):
        seen = victim.finish()
    assert victim.process.returncode < 0 or seen[name][2] == CALLS


@pytest.mark.parametrize(
    ("name", "at"), [("loop_head_jump", 8), ("loop_head_far", 7), ("loop_head_first", 0)]
)
def test_a_refused_loop_head_fires_more_than_once(name: str, at: int) -> None:
    victim = Victim([name])
    code, vaddr, size, offset = victim.function(name)
    refusal = check_site(code, vaddr, size, "x86_64", vaddr + at, False)
    assert refusal is not None
    assert "more than once" in refusal.reason
    with PerfUprobe(victim.path, offset + at, victim.process.pid) as probe:
        victim.finish()
        assert probe.count() > 2 * CALLS


# What compilers put at the start of functions, and what the kernel must accept if we say it does.
INSTRUCTIONS = {
    "endbr64": "f30f1efa",
    "push rbp": "55",
    "push r12": "4154",
    "nop5": "0f1f440000",
    "mov rbp, rsp": "4889e5",
    "sub rsp, 8": "4883ec08",
    "and rsp, -64": "4883e4c0",
    "lea r10, [rsp+8]": "4c8d542408",
    "mov rax, fs:[0x28]": "64488b042528000000",
    "movaps": "0f28c8",
    "cvtsi2ss": "f30f2ac0",
    "pushw": "6655",
    "pop rbp": "5d",
    "ret": "c3",
    "jmp [rip]": "ff2500000000",
    "test edi, edi": "85ff",
    "movabs": "48b88877665544332211",
    "movq xmm, rdi": "66480f6ecf",
    "vmovq": "c4e1f96ecf",
    "int3": "cc",
    "hlt": "f4",
    "lock inc": "f0ff07",
    "cs jcc": "2e7400",
    "notrack jmp rax": "3effe0",
    "int 0x80": "cd80",
    "call16": "66e800000000",
    "mov ss, eax": "8ed0",
}
# Here 6.18 and every kernel whose table is known agree.
REFUSED = {
    "vmovq",
    "int3",
    "hlt",
    "lock inc",
    "cs jcc",
    "notrack jmp rax",
    "int 0x80",
    "call16",
    "mov ss, eax",
}


@pytest.fixture(scope="module")
def instructions() -> tuple[Path, int]:
    slots = bytearray(b"\x90" * 16 * len(INSTRUCTIONS))
    for i, insn in enumerate(INSTRUCTIONS.values()):
        slots[16 * i : 16 * i + len(insn) // 2] = bytes.fromhex(insn)
    listed = ",".join(map(str, slots))
    text = (
        "#include <unistd.h>\n"
        'asm(".text\\n.globl table\\n.type table,@function\\n'
        f'table: .byte {listed}\\n.size table,.-table\\n");\n'
        "int main(void) { pause(); }\n"
    )
    path = build(text, name="instructions")
    elf = ElfFile.open(str(path))
    symbol = elf.function("table")
    assert symbol is not None
    offset = elf.vaddr_to_offset(symbol.vaddr)
    assert offset is not None
    return path, offset


def test_the_kernel_agrees(instructions: tuple[Path, int]) -> None:
    """C41: what is held to be probeable attaches to a running process; the refused ones answer 524."""
    path, offset = instructions
    process = subprocess.Popen([path])
    try:
        for i, (name, insn) in enumerate(INSTRUCTIONS.items()):
            refused = kernel_refuses(bytes.fromhex(insn))
            assert (refused is not None) == (name in REFUSED), (name, refused)
            assert not (refused and emulated_kind(bytes.fromhex(insn)))
            try:
                with PerfUprobe(path, offset + 16 * i, process.pid):
                    assert refused is None, name
            except OSError as error:
                assert refused is not None, name
                assert error.errno in (ENOTSUPP, errno.ENOEXEC), name
    finally:
        process.kill()
        process.wait()
