# SPDX-License-Identifier: Apache-2.0
"""Sums per thread: the present state is in them, compute threads are told apart, nothing falls."""

from __future__ import annotations

import pytest

from profinferd.agent.model.causes import Cause, CoreKind
from profinferd.agent.model.threadsums import MAX_ENDED, Setting, ThreadSums

from .causerecords import Records, records

KINDS = (CoreKind("fast", (0, 1)), CoreKind("slow", (2, 3)))
MS = 1_000_000
TGID = 7


def row(**fields: object) -> Records:
    return records("sched_thread", fields, tgid=TGID, tid=8, cause=9, node=2**32 - 1)


def causes(**ns: int) -> list[int]:
    return [ns.get(cause.label, 0) for cause in Cause]


def test_one_that_runs() -> None:
    """20 ms known, and 5 ms since its last switch, 4 of them while a graph ran."""
    seen = row(since=100 * MS, clock_since=50 * MS, run_ns=[8 * MS, 12 * MS, *[0] * 6], work_run_ns=16 * MS)
    (thread,) = ThreadSums(TGID).figures(seen, now_ns=105 * MS, clock_ns=54 * MS, kinds=KINDS, leaders={8})
    assert thread.run_seconds == pytest.approx(0.025)
    assert thread.work_run_seconds == pytest.approx(0.020)
    assert thread.cores == {"fast": 0.008, "slow": pytest.approx(0.017)}  # where it mostly ran
    assert thread.leader and thread.alive and thread.seconds == {}


@pytest.mark.parametrize(
    ("cause", "woken", "expected"),
    [
        (Cause.PREEMPTED, 100, {"preempted": 0.013}),
        (Cause.FAULT, 0, {"fault": 0.013}),
        (Cause.FUTEX, 106, {"futex": 0.008, "wakeup": 0.005}),
    ],
)
def test_one_that_waits(cause: Cause, woken: int, expected: dict[str, float]) -> None:
    """3 ms of this cause before (5 where it was asleep), 10 ms until now."""
    seen = row(
        state=1, cause=int(cause), since=100 * MS, woken=woken * MS, clock_since=0, clock_woken=6 * MS,
        work_wait_ns=causes(**{cause.label: 2 * MS if cause is Cause.FUTEX else 3 * MS}),
        work_waits=causes(preempted=4, wakeup=1), compute=1,
    )  # fmt: skip
    if cause is Cause.FUTEX:
        seen["work_wait_ns"][0][Cause.WAKEUP] = 1 * MS
    (thread,) = ThreadSums(TGID).figures(seen, now_ns=110 * MS, clock_ns=10 * MS, kinds=KINDS)
    assert thread.seconds == pytest.approx(expected)
    assert thread.waits == {"preempted": 4, "wakeup": 1}


def test_which_threads_compute() -> None:
    """A quarter of the time that graphs run, or flagged by the kernel; a thread of the HTTP pool is none."""
    rows = records(
        "sched_thread",
        {"tid": 1, "work_run_ns": 26 * MS},
        {"tid": 2, "work_run_ns": 24 * MS},
        {"tid": 3, "work_run_ns": 1000, "compute": 1},
        {"tid": 4, "work_run_ns": 10 * MS, "work_wait_ns": causes(preempted=20 * MS)},
        {"tid": 5, "work_run_ns": 90 * MS, "tgid": 99},
        {"tid": 6, "work_run_ns": 10 * MS, "work_wait_ns": causes(futex=80 * MS)},
        state=1, cause=4, since=0, clock_since=100 * MS, tgid=TGID,
    )  # fmt: skip
    sums = ThreadSums(TGID)
    threads = sums.figures(
        rows, now_ns=1, clock_ns=100 * MS, kinds=KINDS, settings={3: Setting("idle", 19, (0,))}
    )
    assert [t.tid for t in threads] == [1, 3, 4]
    assert threads[1].policy == "idle" and threads[1].nice == 19 and threads[1].cpus == (0,)
    # It was shown once: it stays, however little it does from now on.
    again = sums.figures(rows, now_ns=1, clock_ns=10_000 * MS, kinds=KINDS)
    assert {1, 3, 4} <= {t.tid for t in again}


def test_ended_threads_stay_in_the_sums() -> None:
    """A thread pool that is rebuilt over and over: sums never fall, the list does not grow."""
    sums = ThreadSums(TGID)
    before = 0.0
    for n in range(3 * MAX_ENDED):
        live = records(
            "sched_thread", {"tid": 1000 + n, "compute": 1, "work_run_ns": MS}, tgid=TGID, state=2, cause=9
        )
        assert sums.end(live) == [1000 + n]
        threads = sums.figures(live[:0], now_ns=1, clock_ns=1, kinds=KINDS)
        whole = sum(t.work_run_seconds for t in threads)
        assert whole == pytest.approx(before + 0.001)
        before = whole
        assert len(threads) <= MAX_ENDED + 1 and not any(t.alive for t in threads)
    # One that did not compute leaves no trace, and its entry may go all the same.
    assert sums.end(records("sched_thread", {"tid": 5}, tgid=TGID, state=2)) == [5]
    assert len(sums.figures(live[:0], now_ns=1, clock_ns=1, kinds=KINDS)) == MAX_ENDED + 1


def test_what_was_set_aside_is_kept_and_goes_on() -> None:
    """Not watched for a while: what a thread did until then stays, what it does later is added."""
    sums = ThreadSums(TGID)
    first = row(since=100 * MS, clock_since=50 * MS, run_ns=[8 * MS, *[0] * 7], work_run_ns=6 * MS, compute=1)
    assert sums.set_aside(first, 105 * MS, 54 * MS) == [8]
    empty = first[:0]
    (thread,) = sums.figures(empty, now_ns=900 * MS, clock_ns=800 * MS, kinds=KINDS)
    assert thread.alive and thread.run_seconds == pytest.approx(0.013)
    assert thread.work_run_seconds == pytest.approx(0.010)
    # It is watched again, and has run 2 ms since.
    later = row(since=1000 * MS, clock_begun=900 * MS, clock_since=902 * MS, run_ns=[2 * MS, *[0] * 7],
                work_run_ns=2 * MS, state=1, cause=7)  # fmt: skip
    for _ in range(2):  # looking changes nothing
        (thread,) = sums.figures(later, now_ns=1000 * MS, clock_ns=902 * MS, kinds=KINDS)
        assert thread.run_seconds == pytest.approx(0.015)
        assert thread.work_run_seconds == pytest.approx(0.012)
    # And shed once more, and then it ends unwatched.
    assert sums.set_aside(later, 1000 * MS, 902 * MS) == [8] and sums.aside() == [8]
    sums.end_aside([8, 9])
    assert not sums.aside()
    (thread,) = sums.figures(empty, now_ns=0, clock_ns=0, kinds=KINDS)
    assert not thread.alive and thread.run_seconds == pytest.approx(0.015)


def test_what_was_set_aside_ends_while_watched() -> None:
    sums = ThreadSums(TGID)
    sums.set_aside(row(run_ns=[8 * MS, *[0] * 7], work_run_ns=8 * MS, compute=1, state=1, cause=7), 0, 0)
    assert sums.end(row(run_ns=[2 * MS, *[0] * 7], work_run_ns=2 * MS, state=2)) == [8]
    assert not sums.aside()
    (thread,) = sums.figures(row()[:0], now_ns=0, clock_ns=0, kinds=KINDS)
    assert not thread.alive and thread.run_seconds == pytest.approx(0.010)


def test_of_many_that_ended_unwatched_the_oldest_are_one() -> None:
    sums = ThreadSums(TGID)
    rows = records("sched_thread", *({"tid": n, "run_ns": [MS, *[0] * 7]} for n in range(1, MAX_ENDED + 11)),
                   compute=1, state=1, cause=7, tgid=TGID)  # fmt: skip
    sums.set_aside(rows, 0, 0)
    sums.end_aside(sums.aside())
    threads = sums.figures(rows[:0], now_ns=0, clock_ns=0, kinds=KINDS)
    assert len(threads) == MAX_ENDED + 1
    assert sum(one.run_seconds for one in threads) == pytest.approx((MAX_ENDED + 10) * 0.001)
