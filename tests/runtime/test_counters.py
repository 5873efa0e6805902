# SPDX-License-Identifier: Apache-2.0
"""Events of threads: which a machine has, threads that come later, all without an engine."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from profinferd.agent.kernel.counters import Counters
from profinferd.agent.kernel.perfsys import EventSpec, open_thread_event, parse_event

# Touches fresh pages in a thread each time it is told to, and says how often the kernel's own
# account says that this thread has faulted.
SCRIPT = """
import mmap, os, sys, threading
kept = []
def work(pages, told):
    area = mmap.mmap(-1, pages * mmap.PAGESIZE)
    kept.append(area)
    for at in range(0, len(area), mmap.PAGESIZE):
        area[at] = 1
    with open(f"/proc/self/task/{threading.get_native_id()}/stat") as file:
        told.append(file.read().rpartition(")")[2].split()[7])
    gate.wait()
gate = threading.Event()
for line in sys.stdin:
    told = []
    if line.strip() == "end":
        gate.set()
        print("ended", flush=True)
        continue
    thread = threading.Thread(target=work, args=(int(line), told))
    thread.start()
    while not told:
        pass
    print(told[0], flush=True)
"""


@pytest.fixture
def program() -> Iterator[subprocess.Popen[str]]:
    """The running script."""
    with subprocess.Popen(
        [sys.executable, "-S", "-c", SCRIPT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.kill()


def ask(process: subprocess.Popen[str], line: str) -> str:
    """One line to it, one line back."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()
    return process.stdout.readline().strip()


@pytest.mark.parametrize(
    "number", [errno.ENOENT, errno.EOPNOTSUPP, errno.ENODEV, errno.ENXIO, errno.EACCES, errno.EMFILE, 999]
)
def test_an_event_that_is_refused_is_absent_with_the_reason(number: int) -> None:
    """C09, C57: each errno that hypervisors and drivers answer with; the others are counted."""

    def refuse(spec: EventSpec, tid: int) -> int:
        if spec.name == "cycles":
            raise OSError(number, os.strerror(number))
        return open_thread_event(spec, tid)

    specs = [parse_event("cycles"), parse_event("task-clock")]
    counters = Counters(os.getpid(), specs, "multi", open_event=refuse)
    try:
        counters.look()
        sum(range(100_000))
        counters.look()
        events = {e.event: e for e in counters.events((), ()).events}
    finally:
        counters.close()
    assert events["cycles"].value is None
    assert errno.errorcode.get(number, str(number)) in str(events["cycles"].reason)
    assert (events["task-clock"].value or 0) > 0


def test_without_any_event_nothing_is_loaded() -> None:
    def refuse(spec: EventSpec, tid: int) -> int:
        raise OSError(errno.ENOENT, "none")

    counters = Counters(os.getpid(), [parse_event("cycles")], "multi", open_event=refuse)
    counters.look()
    assert counters.events((), ()).events[0].value is None
    counters.close()


def test_threads_that_come_later_are_counted(program: subprocess.Popen[str]) -> None:
    """C58: events are of one thread each; those of the kernel's account are what is counted."""
    first = int(ask(program, "300"))
    counters = Counters(program.pid, [parse_event("page-faults")], "multi")
    try:
        counters.look()
        assert len(counters._threads) == 2
        ask(program, "500")
        counters.look()
        assert len(counters._threads) == 3
        (event,) = counters.events((), ()).events
        # The third thread was opened after its faults: what it had done before is not ours.
        assert event.value is not None
        assert event.value < 500 < first + 500
        assert ask(program, "end") == "ended"
        until = time.monotonic() + 60
        while len(counters._threads) > 1 and time.monotonic() < until:
            counters.look()
        assert set(counters._threads) == {program.pid}
        (after,) = counters.events((), ()).events
        assert (after.value or 0) >= event.value  # who has gone still counts
    finally:
        counters.close()


def test_all_descriptors_are_closed() -> None:
    before = set(os.listdir("/proc/self/fd"))
    counters = Counters(os.getpid(), [parse_event("task-clock"), parse_event("page-faults")], "multi")
    counters.look()
    assert len(os.listdir("/proc/self/fd")) > len(before)
    counters.close()
    counters.close()
    assert len(os.listdir("/proc/self/fd")) == len(before)
