# SPDX-License-Identifier: Apache-2.0
"""A program and all that it calls share 512 bytes of stack on kernels before Linux 6.13 (and on machines
whose JIT has no stacks of its own): the newer kernel that tests run on does not say so."""

from __future__ import annotations

import re
import subprocess
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

MAX_STACK, FRAMES, ROUND = 512, 8, 32  # MAX_BPF_STACK, MAX_CALL_FRAMES, and what each frame is rounded up to
OBJECTS = sorted(Path(__file__).resolve().parents[2].glob("probes/*.bpf.o"))
_SECTION = re.compile(r"Disassembly of section (\S+):")
_FUNCTION = re.compile(r"([0-9a-f]+) <(?!LBB)(\S+)>:")
_INSTRUCTION = re.compile(r"\s+(\d+):\s(.*)")
_RELOCATION = re.compile(r"\s+[0-9a-f]+:\s+R_BPF_64_(?:32|64)\s+(\S+)")
_NUMBER = r"(0x[0-9a-f]+|\d+)"


class Program:
    """The functions of an object: bytes of stack, and what they call (callbacks of loops as well)."""

    def __init__(self, listing: str) -> None:
        self.frames: dict[str, int] = {}
        self.calls: dict[str, set[str]] = defaultdict(set)
        self._places: dict[tuple[str, int], str] = {}
        pending: list[tuple[str, int]] = []  # caller, offset in .text
        section = function = text = ""
        for line in listing.splitlines():
            if found := _SECTION.match(line):
                section = found[1]
            elif found := _FUNCTION.match(line):
                function = found[2]
                self.frames[function] = 0
                self._places[section, int(found[1], 16)] = function
            elif found := _RELOCATION.match(line):
                if found[1] == ".text":
                    number = re.search(rf"(?:= |call )(-?{_NUMBER})", text)
                    assert number is not None, text
                    offset = int(number[1], 0)
                    # Of a call: in instructions, from the next one; else the place itself.
                    pending.append((function, (offset + 1) * 8 if text.startswith("call") else offset))
                else:
                    self.calls[function].add(found[1])
            elif found := _INSTRUCTION.match(line):
                text = found[2]
                for deep in re.findall(rf"r10 - {_NUMBER}|r\d+ \+= -{_NUMBER}$", text):
                    size = int(deep[0] or deep[1], 0)
                    if size <= MAX_STACK:  # larger numbers are no places on a stack
                        self.frames[function] = max(self.frames[function], size)
        for caller, offset in pending:
            self.calls[caller].add(self._places[".text", offset])

    def deepest(self, function: str) -> tuple[int, list[str]]:
        """Bytes of the worst chain of calls, and that chain."""
        own = max(ROUND, -(-self.frames[function] // ROUND) * ROUND)
        below = [self.deepest(callee) for callee in self.calls[function] if callee in self.frames]
        most, chain = max(below, default=(0, []))
        return own + most, [function, *chain]


@cache
def program(path: Path) -> Program:
    done = subprocess.run(
        ["llvm-objdump", "-dr", "--no-show-raw-insn", path], capture_output=True, text=True, check=True
    )
    return Program(done.stdout)


@pytest.mark.parametrize("path", OBJECTS, ids=lambda path: path.name)
def test_every_chain_of_calls_fits(path: Path) -> None:
    found = program(path)
    assert found.frames
    for function in found.frames:
        size, chain = found.deepest(function)
        assert size <= MAX_STACK, f"{' > '.join(chain)} takes {size} bytes"
        assert len(chain) <= FRAMES


def test_chains_are_found() -> None:
    """Through calls, global and static, and through the callbacks of loops."""
    (ggml,) = [path for path in OBJECTS if path.name == "ggml.x86_64.bpf.o"]
    calls = program(ggml).calls
    assert "enter_graph" in calls["on_entry"]
    assert "walk_node" in calls["walk_graph"]
    assert "describe_source" in calls["describe_node"]
    (sched,) = [path for path in OBJECTS if path.name == "sched.x86_64.bpf.o"]
    assert "catches_up" in program(sched).calls["on_switch"]
    assert "look_at_slice" in program(sched).calls["send_span"]


def test_too_deep_a_chain_is_seen() -> None:
    """One of 200, 200 and 150 bytes: 224 + 224 + 160."""
    listing = "Disassembly of section uprobe:\n0000000000000000 <top>:\n"
    listing += "       0:\t*(u64 *)(r10 - 200) = r1\n       1:\tcall -1\n"
    listing += "\t\t0000000000000008:  R_BPF_64_32\tmiddle\n"
    listing += "Disassembly of section .text:\n0000000000000000 <middle>:\n"
    listing += "       0:\tr2 = r10\n       1:\tr2 += -200\n       2:\tr3 = 40 ll\n"
    listing += "\t\t0000000000000010:  R_BPF_64_64\t.text\n"
    listing += "0000000000000028 <back>:\n       5:\t*(u64 *)(r10 - 150) = r1\n"
    assert Program(listing).deepest("top") == (608, ["top", "middle", "back"])
