# SPDX-License-Identifier: Apache-2.0
"""Which instruction of an arm64 function is probed: the return address lives in x30."""

from __future__ import annotations

import shutil

import pytest

from profinferd.agent.target.elf import ElfFile
from profinferd.agent.target.sites import check_site, choose_site

from ..victims.build import build

CROSS = "aarch64-linux-gnu-gcc"
pytestmark = pytest.mark.skipif(shutil.which(CROSS) is None, reason=f"{CROSS} is not installed")

# name: (at, kind, moved) for an entry site with two arguments, then for entry and return; None: no site
EXPECTED: dict[str, tuple[tuple[int, str, int] | None, tuple[int, str, int] | None]] = {
    "plain": ((8, "jcc", 32), (0, "first byte", 0)),
    "signed": ((12, "jcc", 16), (0, "first byte", 0)),
    "leaf_branch": ((8, "jcc", 0), (8, "jcc", 0)),
    "saves_lr": ((4, "jcc", 0), (0, "first byte", 0)),
    "thunk": ((0, "jmp", 0), (0, "jmp", 0)),
    "argument_gone": ((0, "first byte", 0), (0, "first byte", 0)),
    "loop_first": (None, None),
    "loop_head": ((0, "first byte", 0), (0, "first byte", 0)),
    "table": ((0, "first byte", 0), (0, "first byte", 0)),
    "frame": ((8, "jcc", 4096 + 32), (8, "jcc", 4096 + 32)),
    "literal_first": ((4, "stepped", 0), (4, "stepped", 0)),
    "exclusive_first": (None, None),
    "system_first": ((4, "stepped", 0), (4, "stepped", 0)),
    "tls_first": ((4, "stepped", 0), (4, "stepped", 0)),
    "tls_argument_gone": (None, None),
    "tls_exclusive": (None, None),
    "hint_first": (None, None),
    "trap_first": (None, None),
    "signed_return": (None, None),
}

WRONG = [
    ("signed", 8, True, "paciasp at +4 before it signs"),
    ("signed", 12, True, "paciasp at +4 before it signs"),
    ("plain", 8, True, "stp x29, x30, [sp, #-0x20]! at +0 before it signs, saves"),
    ("saves_lr", 4, True, "mov x9, x30 at +0 before it signs, saves"),
    ("plain", 4, False, "single-stepped"),
    ("plain", 2, False, "middle"),
    ("plain", 12, False, "behind cbz"),
    ("tls_first", 0, False, "system registers"),
    ("tls_argument_gone", 4, False, "overwrites an argument register"),
    ("tls_exclusive", 8, False, "single-stepped"),
    ("exclusive_first", 4, False, "single-stepped"),
    ("loop_first", 0, False, "goes back to +0"),
    ("loop_head", 8, False, "overwrites an argument register"),
    ("loop_scratch", 8, False, "goes back to +4"),
    ("swapped", 4, False, "overwrites an argument register"),
    ("argument_gone", 4, False, "overwrites an argument register"),
    ("table", 8, False, "through a table"),
    ("literal_first", 0, False, "relative to the program counter"),
    ("exclusive_first", 0, False, "exclusive"),
    ("system_first", 0, False, "system registers"),
    ("hint_first", 0, False, "hint"),
    ("trap_first", 0, False, "exception"),
    ("signed_return", 0, False, "authenticated"),
]


@pytest.fixture(scope="module")
def victims() -> ElfFile:
    return ElfFile.open(str(build("sites_arm64.S", cc=CROSS)))


def code_of(elf: ElfFile, name: str) -> tuple[bytes, int, int]:
    symbol = elf.function(name)
    assert symbol is not None
    return elf.read(symbol.vaddr, symbol.size), symbol.vaddr, symbol.size


@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.parametrize("want_return", [False, True])
def test_choice(victims: ElfFile, name: str, want_return: bool) -> None:
    code, vaddr, size = code_of(victims, name)
    site, refusals = choose_site(code, vaddr, size, "aarch64", want_return, 2, file_offset=0x4000)
    expected = EXPECTED[name][want_return]
    if expected is None:
        assert site is None
        assert refusals[-1].vaddr == vaddr
        return
    assert site is not None
    assert (site.vaddr - vaddr, site.kind, site.moved) == expected
    assert site.offset - 0x4000 == site.vaddr - vaddr
    assert site.ret_ok or not want_return
    assert check_site(code, vaddr, size, "aarch64", site.vaddr, want_return, arg_regs=2) is None


@pytest.mark.parametrize(("name", "at", "want_return", "words"), WRONG)
def test_wrong_sites_are_refused(victims: ElfFile, name: str, at: int, want_return: bool, words: str) -> None:
    code, vaddr, size = code_of(victims, name)
    refusal = check_site(code, vaddr, size, "aarch64", vaddr + at, want_return, arg_regs=2)
    assert refusal is not None
    assert words in refusal.reason


def test_paciasp_itself_is_before_the_signature(victims: ElfFile) -> None:
    """A function without bti begins with paciasp: a return probe there replaces x30 before it is signed."""
    code, vaddr, size = code_of(victims, "signed")
    site, _ = choose_site(code[4:], vaddr + 4, size - 4, "aarch64", True, 2)
    assert site is not None
    assert (site.vaddr, site.kind, site.ret_ok) == (vaddr + 4, "first byte", True)


def test_compiled_function() -> None:
    """A prologue as the compiler writes it, with and without pointer authentication."""
    source = "extern int g(int);\nint f(int a, int b) { return g(a) + b; }\nint g(int a) { return a; }\n"
    for flags in ([], ["-mbranch-protection=standard"]):
        path = build(
            source + "int main(void) { return f(1, 2); }\n", cc=CROSS, cflags=["-fno-inline", *flags]
        )
        code, vaddr, size = code_of(ElfFile.open(str(path)), "f")
        site, _ = choose_site(code, vaddr, size, "aarch64", True, 2)
        assert site is not None
        assert (site.vaddr, site.ret_ok, site.moved) == (vaddr, True, 0)
