# SPDX-License-Identifier: Apache-2.0
"""Which instruction of an x86-64 function is probed, and why others are not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profinferd.agent.target.elf import ElfFile
from profinferd.agent.target.sites import MOVED_UNKNOWN, check_site, choose_site
from profinferd.agent.target.sites_x86 import Function

from ..victims.build import build


@pytest.fixture(scope="module")
def victims() -> ElfFile:
    return ElfFile.open(str(build("sites.c")))


def code_of(elf: ElfFile, name: str) -> tuple[bytes, int, int]:
    symbol = elf.function(name)
    assert symbol is not None
    return elf.read(symbol.vaddr, symbol.size), symbol.vaddr, symbol.size


# name: (at, kind, moved) for an entry site with two arguments, then for entry and return; None: no site
EXPECTED: dict[str, tuple[tuple[int, str, int] | None, tuple[int, str, int] | None]] = {
    "push_first": ((0, "push", 0), (0, "push", 0)),
    "push_after_endbr": ((4, "push", 0), (4, "push", 0)),
    "five_pushes": ((4, "push", 0), (4, "push", 0)),
    "realigns": ((17, "push", MOVED_UNKNOWN), (0, "first byte", 0)),
    "loop_head_first": (None, None),
    "loop_head_jump": ((0, "first byte", 0), (0, "first byte", 0)),
    "loop_head_far": ((0, "first byte", 0), (0, "first byte", 0)),
    "branch_first": ((7, "jcc", 0), (7, "jcc", 0)),
    "call_first": ((0, "call", 0), (0, "call", 0)),
    "jump_first": ((0, "jmp", 0), (0, "jmp", 0)),
    "nop_first": ((0, "nop", 0), (0, "nop", 0)),
    "nop_after_endbr": ((4, "nop", 0), (4, "nop", 0)),
    "red_zone_nop": ((0, "first byte", 0), (0, "first byte", 0)),
    "mov_first": ((0, "first byte", 0), (0, "first byte", 0)),
    "argument_gone": ((0, "first byte", 0), (0, "first byte", 0)),
    "argument_gone_low": ((0, "first byte", 0), (0, "first byte", 0)),
    "sub_then_branch": ((7, "jcc", 24), (0, "first byte", 0)),
    "table": ((0, "first byte", 0), (0, "first byte", 0)),
    "table_of_addresses": ((0, "first byte", 0), (0, "first byte", 0)),
    "calls_last": ((7, "jcc", 0), (7, "jcc", 0)),
    "looks_like_a_jump": ((4, "push", 0), (4, "push", 0)),
    "vector_first": (None, None),
    "breakpoint_first": (None, None),
    "locked_first": (None, None),
}


@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.parametrize("want_return", [False, True])
def test_choice(victims: ElfFile, name: str, want_return: bool) -> None:
    """C41: a refused first instruction gives no site, and the reason says so."""
    code, vaddr, size = code_of(victims, name)
    site, refusals = choose_site(code, vaddr, size, "x86_64", want_return, 2, file_offset=0x4000)
    expected = EXPECTED[name][want_return]
    if expected is None:
        assert site is None
        assert refusals[-1].vaddr == vaddr
        return
    assert site is not None
    assert (site.vaddr - vaddr, site.kind, site.moved) == expected
    assert site.offset - 0x4000 == site.vaddr - vaddr
    assert site.emulated == (site.kind != "first byte")
    assert bytes.fromhex(site.insn) == code[expected[0] :][: len(site.insn) // 2]
    assert site.ret_ok or not want_return
    assert check_site(code, vaddr, size, "x86_64", site.vaddr, want_return, arg_regs=2) is None
    assert all(r.vaddr != site.vaddr for r in refusals)


# The table of wrong sites that were seen to ruin or to mislead: function, place, for a return, words.
WRONG = [
    ("branch_after_pushes", 1, True, "push rbp at +0 before it moved the stack pointer"),
    ("branch_after_pushes", 5, True, "push rbp at +0 before it moved the stack pointer"),
    ("five_pushes", 15, True, "push r15 at +4 before it moved the stack pointer"),
    ("realigns", 17, True, "and rsp, 0xffffffffffffffc0 at +9 before it moved"),
    ("realigns", 13, True, "before it moved the stack pointer"),
    ("realigns", 13, False, "single-stepped"),
    ("loop_head_jump", 8, False, "goes back to +4"),
    ("loop_head_far", 7, False, "goes back to +4"),
    ("loop_head_first", 0, False, "goes back to +0"),
    ("push_after_endbr", 5, False, "in the middle of the instruction push r13 at +4"),
    ("five_pushes", 2, False, "in the middle of the instruction endbr64 at +0"),
    ("branch_first", 9, False, "behind je"),
    ("call_first", 5, False, "behind call"),
    ("argument_gone", 6, False, "overwrites an argument register"),
    ("argument_gone_low", 7, False, "overwrites an argument register"),
    ("red_zone_nop", 5, False, "red zone"),
    ("table", 17, False, "through a table"),
    ("table_of_addresses", 17, False, "through a table"),
    ("mov_first", 3, False, "single-stepped"),
    ("vector_first", 0, False, "VEX"),
    ("locked_first", 0, False, "lock prefix"),
    ("breakpoint_first", 0, False, "opcode cc"),
    ("push_first", -1, False, "outside"),
    ("push_first", 4096, False, "outside"),
]


@pytest.mark.parametrize(("name", "at", "want_return", "words"), WRONG)
def test_wrong_sites_are_refused(victims: ElfFile, name: str, at: int, want_return: bool, words: str) -> None:
    code, vaddr, size = code_of(victims, name)
    refusal = check_site(code, vaddr, size, "x86_64", vaddr + at, want_return, arg_regs=2)
    assert refusal is not None
    assert refusal.vaddr == vaddr + at
    assert words in refusal.reason


def test_arguments_on_the_stack(victims: ElfFile) -> None:
    """Each push shifts them; where the distance is not known they cannot be read."""
    code, vaddr, size = code_of(victims, "realigns")
    site, _ = choose_site(code, vaddr, size, "x86_64", False, 2, stack_args=True)
    assert site is not None
    assert (site.vaddr, site.moved) == (vaddr, 0)
    code, vaddr, size = code_of(victims, "five_pushes")
    for at, moved in ((4, 0), (9, 8), (11, 16), (13, 24), (15, 32)):
        assert check_site(code, vaddr, size, "x86_64", vaddr + at, False, stack_args=True) is None
        assert Function(code, vaddr, size, 0).site(at).moved == moved


def test_size_unknown_or_cut(victims: ElfFile) -> None:
    """Where a jump back cannot be excluded only the very first instructions qualify."""
    code, vaddr, size = code_of(victims, "sub_then_branch")
    for known in (0, size + 1000):
        site, refusals = choose_site(code, vaddr, known, "x86_64", False, 2)
        assert site is not None
        assert site.vaddr == vaddr
        assert "end of the function is not known" in refusals[0].reason
    code, vaddr, _ = code_of(victims, "push_after_endbr")
    site, _ = choose_site(code, vaddr, 0, "x86_64", True, 2)
    assert site is not None
    assert site.vaddr == vaddr + 4


@pytest.mark.parametrize("code", [b"", b"\x06", b"\xc5", b"\xf0", b"\x66" * 40, b"\x0f", b"\xff" * 16])
def test_no_code(code: bytes) -> None:
    site, refusals = choose_site(code, 0x1000, len(code), "x86_64", True, 2)
    assert site is None
    assert refusals


def test_unknown_machine() -> None:
    site, refusals = choose_site(b"\x55", 0, 1, "riscv", True, 2)
    assert site is None
    assert "riscv" in refusals[0].reason


@given(st.binary(max_size=300), st.booleans(), st.integers(0, 7), st.sampled_from(["x86_64", "aarch64"]))
def test_any_bytes(code: bytes, want_return: bool, arg_regs: int, machine: str) -> None:
    """Hostile code: an answer, never an exception, and what is chosen is accepted by the checker."""
    site, refusals = choose_site(code, 0x7FFF0000, len(code), machine, want_return, arg_regs)
    assert site is not None or refusals
    if site is not None:
        assert (
            check_site(code, 0x7FFF0000, len(code), machine, site.vaddr, want_return, arg_regs=arg_regs)
            is None
        )
        assert site.ret_ok or not want_return
