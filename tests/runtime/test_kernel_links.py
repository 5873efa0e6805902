# SPDX-License-Identifier: Apache-2.0
"""Probes on a victim that calls its functions a known number of times."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from profinferd.agent.errors import MachineError, ProfinferError, TargetError
from profinferd.agent.kernel import bpfsys
from profinferd.agent.kernel.arrays import MappedArray, read_array
from profinferd.agent.kernel.libbpf import BpfObject
from profinferd.agent.kernel.links import (
    HELPERS,
    MAX_HELPERS,
    Link,
    attach_multi,
    attach_perf,
    attach_raw_tracepoint,
    close_together,
    online_cpu,
)
from profinferd.agent.kernel.ring import Ring
from tests.victims.build import build, copy_of

from .cases import wait_for
from .support import Victim, bpf_object, expected_sum, file_offset

ENTRY_FIRST, ENTRY_SECOND, RETURN_FIRST, RETURN_SECOND, EXITS = 0, 1, 2, 3, 15
METHODS = ["multi", "perf"]

VICTIM = build("calls.c")
OFFSETS = [file_offset(VICTIM, "first"), file_offset(VICTIM, "second")]


class Probes:
    """The loaded test object, its counters and its ring."""

    def __init__(self, method: str, stack: ExitStack, **options: int) -> None:
        self.method, self._stack = method, stack
        self.object = stack.enter_context(BpfObject(bpf_object("count")))
        self.object.load_only(["on_entry", "on_return", "on_exit"])
        for name in ("on_entry", "on_return"):
            self.object.programs[name].as_uprobe(method)
        for name, value in options.items():
            self.object.set_rodata(name, value)
        self.object.load()
        self._counts = stack.enter_context(MappedArray(self.object.map("counts"), np.dtype("u8")))
        records = self.object.map("records")
        dtype = self.object.types().dtype("op_hit")
        self.ring = stack.enter_context(Ring(records.fd, records.max_entries, dtype))

    def attach(self, path: str, offsets: list[int], *, ret: bool = False, pid: int = 0) -> list[Link]:
        """Entry cookies 0, 1, … or return cookies 2, 3, …"""
        fd = self.object.program_fd("on_return" if ret else "on_entry")
        cookies = [i + (RETURN_FIRST if ret else ENTRY_FIRST) for i in range(len(offsets))]
        if self.method == "multi":
            new = [attach_multi(fd, path, offsets, cookies, pid=pid, ret=ret)]
        else:
            new = [
                attach_perf(fd, path, offset, cookie, pid or -1, ret=ret)
                for offset, cookie in zip(offsets, cookies, strict=True)
            ]
        for link in new:
            self._stack.enter_context(link)
        return new

    def counts(self) -> list[int]:
        return [int(n) for n in self._counts.read()]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def live(ids: set[int]) -> set[int]:
    """Which of these links the kernel still has."""
    return ids & {link.id for link in bpfsys.links()}


def gone(ids: set[int]) -> None:
    """Until the kernel has none of these links any more: whoever lists all links, as other tests do, holds
    each of them for a moment."""
    wait_for(lambda: not live(ids), "the links to go")


@pytest.mark.parametrize("at_once", [1, 6])
def test_many_links_are_closed_by_few_threads(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    """However many links a group has, and however many groups are let go of at the same time."""
    probes = Probes("multi", stack)
    groups = [[probes.attach(str(VICTIM), OFFSETS)[0] for _ in range(8)] for _ in range(at_once)]
    ids = {link.id for group in groups for link in group}
    assert live(ids) == ids
    lock, closing, most = threading.Lock(), 0, 0
    close, several = Link.close, threading.Event()

    def counted(link: Link) -> None:
        nonlocal closing, most
        with lock:
            closing += 1
            most = max(most, closing)
        if closing > 1 or not several.wait(60):  # two at a time, however late the second one gets a core
            several.set()
        close(link)
        with lock:
            closing -= 1

    monkeypatch.setattr(Link, "close", counted)
    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(close_together, groups))
    gone(ids)
    assert 1 < most <= at_once + min(at_once * HELPERS, MAX_HELPERS)
    assert not any(thread.name == "detach" for thread in threading.enumerate())


def test_a_link_that_cannot_be_closed_does_not_keep_the_others() -> None:
    """The rest is closed all the same, and the error is told."""
    others = [Link("multi", [os.dup(0)], 1) for _ in range(5)]
    with pytest.raises(OSError, match="Bad file descriptor"):
        close_together([others[0], Link("multi", [1 << 20], 1), *others[1:]])
    assert all(link.closed for link in others)


@pytest.mark.parametrize("method", METHODS)
def test_hits_equal_calls(method: str, stack: ExitStack) -> None:
    """Entry and return of two nested functions, from two threads: counts, cookies, values."""
    victim = stack.enter_context(Victim(VICTIM))
    probes = Probes(method, stack)
    probes.attach(str(VICTIM), OFFSETS)
    probes.attach(str(VICTIM), OFFSETS, ret=True)
    assert victim.call(70) == expected_sum(70)
    assert victim.call(30, in_thread=True) == expected_sum(30)
    assert probes.counts()[:4] == [100] * 4
    records = probes.ring.drain()
    assert len(records) == 400
    returned = records[records["node"] == RETURN_SECOND]["ts"]
    assert int(returned.sum()) == expected_sum(70) + expected_sum(30), "the return values are the function's"
    given = records[records["node"] == ENTRY_SECOND]["ts"]
    assert given.tolist() == [*range(70), *range(30)], "the arguments are the function's"


@pytest.mark.parametrize("method", METHODS)
def test_nothing_after_close(method: str, stack: ExitStack) -> None:
    victim = stack.enter_context(Victim(VICTIM))
    probes = Probes(method, stack)
    links = probes.attach(str(VICTIM), OFFSETS) + probes.attach(str(VICTIM), OFFSETS, ret=True)
    ids = {link.id for link in links}
    assert live(ids) == ids
    victim.call(10)
    for link in links:
        link.close()
        link.close()
        assert link.closed
    gone(ids)
    assert victim.call(10) == expected_sum(10)
    assert probes.counts()[:4] == [10] * 4


def test_session(stack: ExitStack) -> None:
    """One link, one program, both ends; a nonzero entry skips the return."""
    victim = stack.enter_context(Victim(VICTIM))
    obj = stack.enter_context(BpfObject(bpf_object("count_session")))
    obj.programs["on_both"].as_uprobe("session")
    obj.load()
    stack.enter_context(attach_multi(obj.program_fd("on_both"), str(VICTIM), OFFSETS[:1], [0], session=True))
    assert victim.call(90) == expected_sum(90)
    assert read_array(obj.map("counts")).tolist() == [90, 60], "every third return was skipped"


@pytest.mark.parametrize("method", METHODS)
def test_only_the_process_that_was_named(method: str, stack: ExitStack) -> None:
    """A pid covers all threads of that process and no other process of the same file."""
    victim, other = stack.enter_context(Victim(VICTIM)), stack.enter_context(Victim(VICTIM))
    probes = Probes(method, stack)
    probes.attach(str(VICTIM), OFFSETS, pid=victim.pid)
    other.call(1000)
    victim.call(5)
    victim.call(5, in_thread=True)
    assert probes.counts()[:2] == [10, 10]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("way", ["fd", "map_files", "root"])
def test_file_by_magic_link(way: str, method: str, stack: ExitStack, tmp_path: Path) -> None:
    """C04: the very file, also when its path is gone or names another file."""
    path = copy_of(VICTIM, tmp_path)
    victim = stack.enter_context(Victim(path))
    probes = Probes(method, stack)
    descriptor = os.open(path, os.O_RDONLY)
    stack.callback(os.close, descriptor)
    if way != "root":
        path.unlink()
        shutil.copy("/bin/true", path)
    mapping = next(
        line.split()[0]
        for line in Path(f"/proc/{victim.pid}/maps").read_text().splitlines()
        if " r-xp " in line
    )
    start, end = (f"{int(part, 16):x}" for part in mapping.split("-"))
    where = {
        "fd": f"/proc/self/fd/{descriptor}",
        "map_files": f"/proc/{victim.pid}/map_files/{start}-{end}",
        "root": f"/proc/{victim.pid}/root{path}",
    }[way]
    probes.attach(where, OFFSETS)
    victim.call(12)
    assert probes.counts()[:2] == [12, 12]


@pytest.mark.parametrize("method", METHODS)
def test_owner_killed(method: str, stack: ExitStack) -> None:
    """kill -9 of whoever attached: the links go by themselves, those of perf one after the other."""
    victim = stack.enter_context(Victim(VICTIM))
    owner = subprocess.Popen(
        [sys.executable, "-m", "tests.runtime.owner", method, str(VICTIM), str(OFFSETS[0])],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert owner.stdin is not None and owner.stdout is not None
    ids = {int(number) for number in owner.stdout.readline().split()}
    assert len(ids) == 2
    assert live(ids) == ids
    assert victim.call(10) == expected_sum(10)
    owner.kill()
    owner.wait()
    gone(ids)
    assert victim.call(10) == expected_sum(10), "the victim is unharmed"
    owner.stdin.close()
    owner.stdout.close()


def test_thread_exits(stack: ExitStack) -> None:
    victim = stack.enter_context(Victim(VICTIM))
    probes = Probes("multi", stack, only_tgid=victim.pid)
    stack.enter_context(attach_raw_tracepoint(probes.object.program_fd("on_exit"), "sched_process_exit"))
    victim.call(1, in_thread=True)
    deadline = time.monotonic() + 60  # joined is not yet buried
    while probes.counts()[EXITS] < 1 and time.monotonic() < deadline:
        time.sleep(0.005)
    assert probes.counts()[EXITS] == 1
    victim.end()
    assert probes.counts()[EXITS] == 2
    with pytest.raises(MachineError, match="no such tracepoint"):
        attach_raw_tracepoint(probes.object.program_fd("on_exit"), "no_such_thing")


def test_discarded_records(stack: ExitStack) -> None:
    victim = stack.enter_context(Victim(VICTIM))
    probes = Probes("multi", stack, discard_every=4)
    probes.attach(str(VICTIM), OFFSETS[1:])
    victim.call(100)
    assert len(probes.ring.drain()) == 75
    assert probes.ring.discarded == 25


def test_full_ring(stack: ExitStack) -> None:
    """C11: counts in maps survive a full ring, and it works again once drained."""
    victim = stack.enter_context(Victim(VICTIM))
    probes = Probes("multi", stack)
    probes.attach(str(VICTIM), OFFSETS[1:])
    victim.call(5000)
    stored = len(probes.ring.drain())
    assert 0 < stored < 5000
    assert probes.counts()[0] == 5000
    victim.call(7)
    again = probes.ring.drain()
    assert again["ts"].tolist() == list(range(7))


def test_counters_of_a_program(stack: ExitStack) -> None:
    """C66: executions that the recursion guard skipped are in the program's info."""
    probes = Probes("multi", stack)
    info = probes.object.programs["on_entry"].info()
    assert info.name == "on_entry"
    assert info.recursion_misses == 0
    assert info.instructions and info.instructions > 10


UNPROBEABLE = """
#include <unistd.h>
#include <stdio.h>
__attribute__((naked, noipa)) void good(void) { __asm__("push %rbp\\n pop %rbp\\n ret"); }
__attribute__((naked, noipa)) void evex(void) { __asm__("vmovdqu64 %zmm0, %zmm1\\n ret"); }
__attribute__((naked, noipa)) void locked(void) { __asm__("lock incl (%rsp)\\n ret"); }
__attribute__((naked, noipa)) void trap(void) { __asm__("int3\\n ret"); }
int main(void) { puts("ready"); fflush(stdout); good(); char c; return (int)read(0, &c, 1); }
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="x86-64 instructions")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("bad", ["evex", "locked", "trap"])
def test_instruction_that_cannot_be_probed(bad: str, method: str, stack: ExitStack, tmp_path: Path) -> None:
    """C41: with a running process the kernel refuses; the offset is named, all else stays off."""
    path = copy_of(build(UNPROBEABLE, name="unprobeable"), tmp_path)
    good = [file_offset(path, "good")] * 5
    offset = file_offset(path, bad)
    victim = subprocess.Popen([path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert victim.stdin is not None and victim.stdout is not None
    assert victim.stdout.readline() == b"ready\n"
    probes = Probes(method, stack)
    before = {link.id for link in bpfsys.links()}
    with pytest.raises(TargetError, match=f"offset {offset:#x} of .*unprobeable.*single-step"):
        probes.attach(str(path), [*good, offset, *good] if method == "multi" else [offset])
    program = probes.object.programs["on_entry"].info().id
    wait_for(
        lambda: not any(ln.id not in before and ln.program_id == program for ln in bpfsys.links()),
        "what was attached to go",
    )
    victim.communicate(b"x")
    assert victim.returncode == 1
    victim.stdout.close()


@pytest.mark.parametrize("method", METHODS)
def test_places_that_are_wrong(method: str, stack: ExitStack, tmp_path: Path) -> None:
    """Each with its own words: no such file, no file, beyond the file, no process."""
    probes = Probes(method, stack)
    size = VICTIM.stat().st_size
    for path, offset, pid, says in (
        (str(tmp_path / "absent"), 0, 0, "no such file"),
        (str(tmp_path), 0, 0, "not a regular file"),
        (str(VICTIM), size + 4096, 0, "outside the file"),
        (str(VICTIM), OFFSETS[0], 4194303, "no such process"),
    ):
        with pytest.raises(ProfinferError, match=says) as error:
            probes.attach(path, [offset], pid=pid)
        assert isinstance(error.value, TargetError), says
        assert "\n" not in str(error.value)


def test_a_file_system_without_probes(stack: ExitStack) -> None:
    """/proc holds no code."""
    probes = Probes("multi", stack)
    with pytest.raises(ProfinferError):
        probes.attach("/proc/self/status", [0])


def test_arguments_of_attach_multi() -> None:
    for arguments in (([], []), ([1, 2], [1])):
        with pytest.raises(ValueError, match="one cookie"):
            attach_multi(0, "/x", *arguments)


def test_online_cpu(tmp_path: Path) -> None:
    """C57: processor 0 may be offline."""
    path = tmp_path / "online"
    for text, first in (("0-3\n", 0), ("2\n", 2), ("1,3-4\n", 1)):
        path.write_text(text)
        assert online_cpu(path) == first
    assert online_cpu(tmp_path / "absent") in os.sched_getaffinity(0)
