# SPDX-License-Identifier: Apache-2.0
"""Events by op of a real engine against the kernel's account of its threads."""

from __future__ import annotations

import os
from collections import Counter

import pytest

from profinferd.agent.attach import Attachment
from profinferd.agent.kernel.perfsys import parse_event
from profinferd.agent.model.eventdata import Events
from profinferd.agent.whys import WhyOptions

from . import models, pysync, truth
from .fetch import Engines

CLOCK = "task-clock"


def ran_ns(pid: int) -> int:
    """CPU time of all threads, from the scheduler's own statistics."""
    total = 0
    for tid in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{tid}/schedstat") as file:
            total += int(file.read().split()[0])
    return total


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
            before, used = attachment.snapshot().hardware, ran_ns(victim.pid)
            victim.ask("generate", context=0, prompt=models.words(30), n=100)
            used = ran_ns(victim.pid) - used
            attachment.poll(0.5)
            counted = attachment._whys._counters
            assert counted is not None
            readings = counted.counted()
        seen = attachment.snapshot()
    events = seen.hardware
    assert events is not None
    # What lies between the last graph and the answer is in no reading yet.
    assert by_op(events) - by_op(before) == pytest.approx(used, rel=0.02)
    # Of the very readings, nothing is lost.
    for index, name in enumerate((CLOCK, "page-faults")):
        everything = sum(op.values[name] for op in events.ops) + events.unattributed[name]
        assert everything == pytest.approx(sum(r[index] for r in readings.values()), rel=0.01)
    # The same ops as those that were timed.
    timed = {op.op for op in seen.ops}
    assert timed <= {op.op for op in events.ops}
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
