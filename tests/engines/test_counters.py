# SPDX-License-Identifier: Apache-2.0
"""Events by op of a real engine against the kernel's account of its threads."""

from __future__ import annotations

import ctypes
import os
import struct
from collections import Counter
from contextlib import closing

import pytest

from profinferd.agent.attach import Attachment
from profinferd.agent.kernel.perfsys import parse_event
from profinferd.agent.model.eventdata import Events
from profinferd.agent.whys import WhyOptions
from tests.tries import in_one_of, timed

from . import models, pysync, truth
from .fetch import Engines

CLOCK = "task-clock"
ATTEMPTS = 6
_libc = ctypes.CDLL(None, use_errno=True)


class TaskClock:
    """The kernel's own count of that event, of all threads that a process has now.

    Not its scheduler's statistics: on a virtual machine these are without the time that the host took
    away meanwhile, which the event has.
    """

    def __init__(self, pid: int) -> None:
        self._fds = [self._open(int(tid)) for tid in os.listdir(f"/proc/{pid}/task")]

    @staticmethod
    def _open(tid: int) -> int:
        software, task_clock = 1, 1  # PERF_TYPE_SOFTWARE, PERF_COUNT_SW_TASK_CLOCK
        attributes = struct.pack("IIQ", software, 112, task_clock) + bytes(96)
        fd: int = _libc.syscall(298, attributes, tid, -1, -1, 8)  # PERF_FLAG_FD_CLOEXEC
        assert fd >= 0, os.strerror(ctypes.get_errno())
        return fd

    def ns(self) -> int:
        return sum(struct.unpack("Q", os.read(fd, 8))[0] for fd in self._fds)

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)


def by_op(events: Events | None) -> int:
    """All of one event: in ops, and outside them."""
    assert events is not None
    return sum(op.values[CLOCK] for op in events.ops) + events.unattributed[CLOCK]


@pytest.mark.parametrize("method", ["auto", "perf"])
def test_events_by_op_sum_to_what_the_threads_used(method: str) -> None:
    """C09: an event that this machine has not stays absent beside the others."""
    wanted = tuple(parse_event(name) for name in (CLOCK, "page-faults", "cycles"))
    options = pysync.Options(models.model("dense24-q4_0"), threads=1)
    with pysync.PySync(options) as victim:
        victim.ask("generate", context=0, prompt=models.words(30), n=4)
        with Attachment.open(victim.pid, method=method, ops="all", why=WhyOptions(0, wanted)) as attachment:
            # Its layout is known, and every thread has been read once.
            victim.ask("generate", context=0, prompt=models.words(30), n=2)
            attachment.poll(0.5)

            def sums() -> None:
                before, used = attachment.snapshot().hardware, clock.ns()
                victim.ask("generate", context=0, prompt=models.words(30), n=100)
                used = clock.ns() - used
                attachment.poll(0.5)
                found = by_op(attachment.snapshot().hardware) - by_op(before)
                # What lies between the last graph and the answer is in no reading yet.
                timed(found == pytest.approx(used, rel=0.02), (found, used))

            with closing(TaskClock(victim.pid)) as clock:
                in_one_of(ATTEMPTS, sums)
            counted = attachment._whys._counters
            assert counted is not None
            readings = counted.counted()
        seen = attachment.snapshot()
    events = seen.hardware
    assert events is not None
    # Of the very readings, nothing is lost.
    for index, name in enumerate((CLOCK, "page-faults")):
        everything = sum(op.values[name] for op in events.ops) + events.unattributed[name]
        assert everything == pytest.approx(sum(r[index] for r in readings.values()), rel=0.01)
    # The same ops as those that were timed.
    assert {op.op for op in seen.ops} <= {op.op for op in events.ops}
    products = [op.values[CLOCK] for op in events.ops if (op.op, op.dtype) == ("MUL_MAT", "q4_0")]
    assert len(products) == 8 and sum(products) > 0.4 * by_op(events)
    absent = {e.event: e for e in events.events}["cycles"]
    assert absent.value is not None or absent.reason


@pytest.mark.parametrize("name", ["dense2-q4_k", "moe-q8_0", "tied24-q8_0"])
@pytest.mark.parametrize("threads", [1, 2])
def test_roles_are_those_of_the_weights(
    name: str, threads: int, engines: Engines, witness: truth.Witness
) -> None:
    """Every operator of a weight or the cache, with its type, as often as the witness saw it: each
    thread enters each of them. A tied head and the gather of its rows are one weight and two roles."""
    options = pysync.Options(models.model(name), threads=threads, env=witness.env)
    with pysync.PySync(options) as victim:
        victim.ask("generate", context=0, prompt=models.words(30), n=4)
        wanted = (parse_event(CLOCK),)
        with Attachment.open(victim.pid, ops="all", why=WhyOptions(0, wanted)) as attachment:
            victim.ask("generate", context=0, prompt=models.words(30), n=2)
            attachment.poll(0.5)  # the layout is known
            before = calls(attachment.snapshot().hardware)
            seen = len(witness.runs())
            victim.ask("generate", context=0, prompt=models.words(30), n=20)
            attachment.poll(0.5)
            found = calls(attachment.snapshot().hardware)
        runs = witness.runs()[seen:]
    expected = Counter(
        (op.node.op, op.dtype, op.role) for run in runs for op in run.ops if op.role and op.node.op != "ROPE"
    )
    assert len({role for _, _, role in expected}) >= 12
    for key, count in expected.items():
        # What a thread other than the first ran last is closed by its next operator.
        assert 0 <= threads * count - (found[key] - before[key]) <= threads - 1, key


def calls(events: Events | None) -> Counter[tuple[str, str, str]]:
    assert events is not None
    return Counter({(op.op, op.dtype, op.role): op.calls for op in events.ops})
