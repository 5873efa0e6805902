# SPDX-License-Identifier: Apache-2.0
"""Names of functions at places in a file: against the linker's own map, and C++ as people write it."""

from __future__ import annotations

import ctypes.util
import subprocess

import pytest

from profinferd.agent.target.elf import ElfFile
from profinferd.agent.target.function_names import demangled, names_in, without_arguments
from tests.victims.build import build

SOURCE = """
#include <stdio.h>
__attribute__((noinline)) void first(void) { puts("1"); }
static __attribute__((noinline)) void second(void) { puts("2"); }
int main(void) { first(); second(); return 0; }
"""


def test_functions_by_place() -> None:
    path = build(SOURCE, name="named")
    listed = subprocess.run(["nm", str(path)], capture_output=True, text=True, check=True).stdout
    wanted = {w[2]: int(w[0], 16) for line in listed.splitlines() if len(w := line.split()) == 3}
    with ElfFile.open(str(path)) as elf:
        places = {name: elf.vaddr_to_offset(wanted[name]) for name in ("first", "second", "main")}
        assert None not in places.values()
        offsets = [place for place in places.values() if place is not None]
        assert names_in(elf, [*offsets, offsets[0] + 1, 1 << 40]) == {v: k for k, v in places.items()}


def test_without_what_it_takes() -> None:
    assert without_arguments("add_one(int*)") == "add_one"
    assert without_arguments("void ns::add<int, (Mode)1>(int*, void (*)(float))") == "ns::add<int, (Mode)1>"
    assert without_arguments("plain") == "plain" and without_arguments(")(") == ")("


def test_names_of_cpp() -> None:
    if ctypes.util.find_library("stdc++") is None:
        pytest.skip("no C++ library on this machine")
    assert demangled("_Z7add_onePi") == "add_one"
    assert demangled("_ZN2ns3addIiEEvPT_") == "ns::add<int>"
    assert demangled("kernel_stub") == "kernel_stub" and demangled("_Z") == "_Z"
