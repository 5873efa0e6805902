# SPDX-License-Identifier: Apache-2.0
"""Calls that do not return, threads that end, and processes that are not the target."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from .cases import METHODS, Engine, Watch, call_span, check_ops, engine, links, nothing_left, wait_for


def send_and_wait_until_it_computes(stub: Engine, order: str) -> None:
    """Its operators sleep: the system call that it stands in is another one than the wait for orders."""
    path = Path(f"/proc/{stub.pid}/syscall")
    idle = ""
    while not idle.isdecimal():  # "running" on its way there
        idle = path.read_text().split()[0]
    stub.send(order)
    wait_for(
        lambda: (now := path.read_text().split()[0]).isdecimal() and now != idle, "an operator to be computed"
    )


def open_threads(watch: Watch) -> int:
    """Threads that the kernel side takes to be inside a call."""
    return len(watch.keys("threads"))


def buried(watch: Watch) -> None:
    """Until threads that ended inside calls are gone for good: who has joined one may be ahead of that."""
    wait_for(lambda: open_threads(watch) == 0, "the ended threads' entries to go")


@pytest.mark.parametrize("method", METHODS)
def test_longjmp_out_of_a_call(method: str) -> None:
    """C21: each call that is left by longjmp is one that never returned; those after it are right."""
    with Engine(engine()) as stub, Watch(stub, method) as watch:
        replies = [watch.run("pos=0-3 out=3")]
        for _ in range(3):
            assert watch.run("pos=4 out=0 end=jump at=7")["ended"] == 1
        replies += [watch.run("pos=4 out=0"), watch.run("pos=5 out=0")]
        snapshot = watch.snapshot()
        assert snapshot.unreturned == 3
        assert {call.status: call.count for call in snapshot.calls if call.phase == "decode"} == {0: 2}
        assert sum(call.seconds for call in snapshot.calls) in call_span(*replies)
        assert (snapshot.tokens.prefill, snapshot.tokens.decode) == (4, 2)
        assert open_threads(watch) == 0
        assert any("never returned" in note for note in snapshot.notes)
        # What ran in a call that was left is no op of a graph; it is counted as such.
        assert snapshot.lost.by_kind["abandoned"] > 0


def test_longjmp_many_times() -> None:
    """C21: the kernel's own list of returns does not fill up either (it holds 64)."""
    with Engine(engine()) as stub, Watch(stub) as watch:
        watch.run("pos=0-3 out=3 us=0")
        watch.run("pos=4 out=0 us=0 end=jump at=3 times=200")
        watch.run("pos=4 out=0 us=0 times=20")
        snapshot = watch.snapshot()
        assert snapshot.unreturned == 200
        assert snapshot.tokens.decode == 20 and sum(call.count for call in snapshot.calls) == 21
        assert open_threads(watch) == 0 and watch.stats()["map_full"] == 0


@pytest.mark.parametrize("method", METHODS)
def test_threads_that_end_inside_a_call(method: str) -> None:
    """C21: pthread_exit in a kernel: closed as never returned, and the map of threads stays empty."""
    with Engine(engine()) as stub, Watch(stub, method) as watch:
        watch.run("pos=0-3 out=3")
        assert watch.run("pos=4 out=0 us=0 end=exit at=5")["ended"] == 1
        buried(watch)
        assert watch.snapshot().unreturned == 1
        watch.run("pos=4 out=0 thread")
        snapshot = watch.snapshot()
        assert snapshot.unreturned == 1 and snapshot.tokens.decode == 1


def test_more_threads_than_the_map_holds() -> None:
    """C21: 1,200 threads end inside calls; the map holds 1,024 and none is missed."""
    with Engine(engine()) as stub, Watch(stub) as watch:
        watch.run("pos=0-3 out=3 us=0")
        for _ in range(12):
            watch.run("pos=4 out=0 us=0 layers=1 end=exit at=2 times=100")
        watch.run("pos=4 out=0 us=0")
        buried(watch)
        snapshot = watch.snapshot()
        assert snapshot.unreturned == 1200 and snapshot.tokens.decode == 1
        assert snapshot.lost.by_kind["map_full"] == 0


@pytest.mark.parametrize("method", METHODS)
def test_killed_in_a_call(method: str) -> None:
    """C21: kill -9 while a call runs: what was seen is kept, the call never returned, nothing is left."""
    before = links()
    with Engine(engine()) as stub, Watch(stub, method) as watch:
        replies = [watch.run("pos=0-3 out=3"), watch.run("pos=4 out=0")]
        assert watch.order("run pos=5 out=0 end=hang at=9") == {"hanging": True}
        assert watch.attachment.alive() and open_threads(watch) == 1
        running = watch.snapshot()
        assert running.unreturned == 0 and running.tokens.decode == 1
        stub.kill()
        assert not watch.attachment.alive()
        wait_for(lambda: open_threads(watch) == 0, "the thread's entry to go")
        watch.drain()
        snapshot = watch.snapshot()
        assert snapshot.unreturned == 1
        assert (snapshot.tokens.prefill, snapshot.tokens.decode) == (4, 1)
        assert sum(call.count for call in snapshot.calls) == len(replies)
    nothing_left(before)


@pytest.mark.parametrize("method", METHODS)
def test_a_forked_child(method: str) -> None:
    """C36: calls of a child that the target forks are not the target's."""
    with Engine(engine()) as stub, Watch(stub, method) as watch:
        replies = [watch.run("pos=0-3 out=3")]
        assert watch.order("fork pos=0-9 out=9 us=0 times=3")["status"] == 0
        replies += [watch.run("pos=4 out=0")]
        snapshot = watch.snapshot()
        check_ops(snapshot, replies)
        assert (snapshot.tokens.prefill, snapshot.tokens.decode) == (4, 1)
        counters = snapshot.counters
        assert counters is not None
        assert counters.hits["token"] == 4 and counters.hits["op_other_thread"] == 0


@pytest.mark.parametrize("method", ["session", "perf"])
def test_attached_in_the_middle_of_a_call(method: str) -> None:
    """C21: the end of a call whose begin was not seen is no call; the next one is whole."""
    with Engine(engine()) as stub:
        send_and_wait_until_it_computes(stub, "run pos=0-3 out=3 us=60000")  # some 2 s
        with Watch(stub, method) as watch:
            stub.reply(watch.drain)
            replies = [watch.run("pos=4 out=0"), watch.run("pos=5 out=0")]
            snapshot = watch.snapshot()
            assert sum(call.count for call in snapshot.calls) == 2
            check_ops(snapshot, replies)
            assert snapshot.unreturned == 0 and open_threads(watch) == 0


def test_a_stopped_target() -> None:
    """A target that is stopped in a call and goes on: the call is as long as it was."""
    with Engine(engine()) as stub, Watch(stub) as watch:
        watch.run("pos=0-3 out=3")
        send_and_wait_until_it_computes(stub, "run pos=4 out=0 us=20000")
        os.kill(stub.pid, signal.SIGSTOP)
        time.sleep(0.3)
        os.kill(stub.pid, signal.SIGCONT)
        reply = stub.reply(watch.drain)
        snapshot = watch.snapshot()
        (seconds,) = (call.seconds for call in snapshot.calls if call.phase == "decode")
        assert seconds in call_span(reply)
        assert seconds > 0.3


@pytest.mark.parametrize("method", METHODS)
def test_program_counters(method: str) -> None:
    """C66: what the recursion guard skipped is asked of the kernel, per program, and exported."""
    with Engine(engine()) as stub, Watch(stub, method) as watch:
        watch.run("pos=0-3 out=3 us=0")
        misses = watch.attachment._programs.recursion_misses()
        expected = {"on_op_dispatch", "on_op_fused2", "on_thread_exit"}
        expected |= {"on_session"} if method == "session" else {"on_entry", "on_return"}
        assert set(misses) == expected
        assert watch.snapshot().lost.by_kind["recursion_misses"] == sum(misses.values())
