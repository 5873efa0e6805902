# SPDX-License-Identifier: Apache-2.0
"""``stir.c`` under the real programs: what it does, what was recorded, what is left in it."""

from __future__ import annotations

import os
import select
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from profinferd.agent.kernel.programs import GgmlPrograms, Probe
from profinferd.agent.settle import layout_fields
from profinferd.agent.target.facts import FileInfo, TargetInfo
from profinferd.agent.target.inspect import inspect_target
from profinferd.agent.target.process import read_maps
from tests.victims.build import build

ANSWER_SECONDS = 60.0
LEVELS = ("llama_decode", "ggml_backend_sched_graph_compute_async", "ggml_graph_compute")

Records = npt.NDArray[Any]


def stir() -> Path:
    """The victim, with frame pointers, so that its functions begin as those of stock builds do."""
    return build("stir.c", cflags=("-fno-omit-frame-pointer",))


@dataclass(frozen=True)
class Answer:
    """What the victim counted."""

    finished: int
    left: int
    wrong: int


class Stir:
    """The running victim."""

    def __init__(self, command: Sequence[str] = ()) -> None:
        self.process = subprocess.Popen(
            [*command, str(stir())], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        assert self.line() == "ready"

    @property
    def pid(self) -> int:
        return self.process.pid

    def start(self, what: str, count: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{what} {count}\n".encode())

    def answered(self, seconds: float = 0.0) -> bool:
        """Whether there is an answer (or an end of file) to read."""
        assert self.process.stdout is not None
        return bool(select.select([self.process.stdout], [], [], seconds)[0])

    def line(self) -> str:
        assert self.process.stdout is not None
        if not self.answered(ANSWER_SECONDS):
            raise AssertionError("the victim does not answer")
        return self.process.stdout.readline().decode().rstrip("\n")

    def answer(self) -> Answer:
        line = self.line()
        assert line, f"the victim ended with {self.process.wait(5)}"
        return Answer(**{k: int(v) for k, v in (part.split("=") for part in line.split()[1:])})

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


@dataclass
class Traced:
    """Probes on every function of one victim."""

    victim: Stir
    programs: GgmlPrograms
    info: TargetInfo
    events: list[Records] = field(default_factory=list)
    ops: list[Records] = field(default_factory=list)

    def attach(self) -> None:
        """All groups."""
        levels = self.programs.types.constants()
        (file,) = self.info.files
        for group in ("ops", "graphs"):
            probes = [
                Probe(levels[h.event], h.site.offset, h.site.moved, h.ret)
                for h in file.hooks
                if (h.level == "op") == (group == "ops")
            ]
            self.programs.attach(group, file.open_path, self.victim.pid, probes)

    def detach(self) -> None:
        for group in ("ops", "graphs"):
            self.programs.detach(group)

    def drain(self) -> None:
        drained = self.programs.drain()
        self.events.append(drained.events)
        self.ops.append(drained.ops)

    def tell(self, what: str, count: int) -> Answer:
        """Have it do something, drained all the while."""
        self.victim.start(what, count)
        until = time.monotonic() + ANSWER_SECONDS
        while not self.victim.answered(0.002) and time.monotonic() < until:
            self.drain()
        answer = self.victim.answer()
        self.drain()
        return answer

    def pairs(self, whole: bool = True) -> Pairs:
        assert self.programs.stats()["lost_events"] == 0
        events = np.concatenate([np.zeros(0, self.programs.types.dtype("event")), *self.events])
        return Pairs(events, self.programs.types.constants(), whole)


@contextmanager
def traced(victim: Stir, method: str) -> Iterator[Traced]:
    """Probes on everything in the victim; nothing is attached after the block."""
    with GgmlPrograms.load(method) as programs, inspect_target(victim.pid) as info:
        layout = layout_fields(info.layouts[0], info.tables, chosen=True)
        programs.set_layout(0, layout)
        constants = programs.types.constants()
        programs.set_target(victim.pid, layout=0, mode=constants["OPS_TRACE"])
        one = Traced(victim, programs, info)
        one.attach()
        yield one


class Pairs:
    """Beginnings and ends of what was recorded; every rule that they must obey is checked.

    The victim's functions return the number that their call was given, so an end that was
    put to another call's beginning shows. ``events`` in the order of the ring. ``whole``: the
    probes were there all the time, so graphs lie in the call that began last.
    """

    def __init__(self, events: Records, constants: dict[str, int], whole: bool) -> None:
        ways = ("BEGIN", "END", "ABANDONED")
        kinds = {constants[f"EV_{what}_{way}"]: way for what in ("CALL", "GRAPH") for way in ways}
        self.begun: dict[int, Any] = {}
        self.ended: dict[int, Any] = {}
        self.unpaired: list[Any] = []
        self.kinds: Counter[str] = Counter()
        calls: dict[int, list[Any]] = {}  # by thread: those that are open, innermost last
        number: dict[int, int] = {}  # what the functions of a call return, by seq
        call = constants["LV_DECODE"]
        for event in events:
            kind, seq = kinds[int(event["kind"])], int(event["seq"])
            stack = calls.setdefault(int(event["tid"]), [])
            self.kinds[f"{kind}/{'call' if event['level'] == call else 'graph'}"] += 1
            if kind == "BEGIN":
                assert seq and seq not in self.begun, "a number is given once"
                self.begun[seq] = event
                if event["level"] == call:
                    stack.append(event)
                if event["level"] == call or whole:
                    number[seq] = int(stack[-1]["batch_tokens"])
                continue
            if event["flags"] & constants["EF_UNPAIRED"]:
                assert seq == 0
                self.unpaired.append(event)
                continue
            begin = self.begun[seq]
            assert seq not in self.ended, "nothing ends twice"
            self.ended[seq] = event
            assert (begin["tid"], begin["level"], begin["ts"]) == (
                event["tid"], event["level"], event["begin_ts"],
            ), "an end belongs to its beginning"  # fmt: skip
            if event["level"] == call:
                assert stack.pop()["seq"] == seq, "innermost first"
            if kind == "END" and seq in number:
                assert int(event["status"]) == number[seq], "of the same call"
        self.open = [e for seq, e in self.begun.items() if seq not in self.ended]


def code_of(pid: int, file: FileInfo) -> tuple[int, int]:
    """Compares the executable mappings of a file with the file: (bytes compared, bytes that differ)."""
    same = different = 0
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for mapping in read_maps(pid):
            if (mapping.dev, mapping.inode) != file.file_id or "x" not in mapping.perms:
                continue
            size = mapping.end - mapping.start
            there = os.pread(memory.fileno(), size, mapping.start)
            ours = os.pread(file.fd, size, mapping.offset)
            length = min(len(there), len(ours))
            a, b = (np.frombuffer(x[:length], np.uint8) for x in (there, ours))
            same += length
            different += int((a != b).sum())
    return same, different


def links_of(pid: int) -> set[int]:
    """The BPF links that a process holds, by the kernel's own account of its descriptors."""
    found = set()
    for entry in Path(f"/proc/{pid}/fdinfo").iterdir():
        with suppress(FileNotFoundError):
            for line in entry.read_text().splitlines():
                if line.startswith("link_id:"):
                    found.add(int(line.split()[1]))
    return found


SANDBOX = """
import ctypes, os, struct, sys
from profinferd.agent.kernel.sandboxed import filter_program
steps = filter_program()
code = ctypes.create_string_buffer(steps, len(steps))
program = ctypes.create_string_buffer(struct.pack("=H6xQ", len(steps) // 8, ctypes.addressof(code)), 16)
libc, zero = ctypes.CDLL(None), ctypes.c_ulong(0)
assert libc.prctl(38, ctypes.c_ulong(1), zero, zero, zero) == 0
assert libc.prctl(22, ctypes.c_ulong(2), ctypes.byref(program), zero, zero) == 0
os.execv(sys.argv[1], sys.argv[1:])
"""
"""Runs a program under a filter that kills it at the kernel's own call for return probes."""
