# SPDX-License-Identifier: Apache-2.0
"""Where a thread's time goes, against what the system says about the same thread."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from profinferd.agent.model.causes import Cause
from profinferd.agent.target.process import open_process
from profinferd.agent.target.quota import group_times
from profinferd.agent.targetcauses import TargetCauses

from ..groups import quota_group
from ..tries import in_one_of, timed
from .cases import ahead
from .waits import ANSWER_SECONDS, Waits, one_cpu, watching

ATTEMPTS = 6
"""Others take cores meanwhile, and so does a hypervisor."""


@pytest.mark.parametrize(
    ("order", "cause", "least"),
    [
        ("sleep 120", Cause.SLEEP, 0.12),
        ("futex 120", Cause.FUTEX, 0.12),
        ("poll 120", Cause.OTHER, 0.12),
        ("spin 120", None, 0.12),
    ],
)
def test_causes_of_waits(order: str, cause: Cause | None, least: float) -> None:
    """And the identity that running and all waits make up the time since it was first seen."""
    in_one_of(ATTEMPTS, lambda: causes_of_waits(order, cause, least))


def causes_of_waits(order: str, cause: Cause | None, least: float) -> None:
    with Waits() as victim, watching(victim.pid, faults=False) as watch:
        at0 = time.monotonic()  # the wait that it is in at the first look began after this
        victim.do("spin 1")  # it is known from now on
        watch.settle(victim)
        before, run0 = watch.seconds(victim.pid), victim.schedstat()
        kernel0 = int(watch.row(victim.pid)["run_ns"].sum())
        victim.do(order)
        watch.settle(victim)
        after, run1, at1 = watch.seconds(victim.pid), victim.schedstat(), time.monotonic()
        row = watch.row(victim.pid)
        spent = {c: after[c] - before[c] for c in Cause}
        ran = (int(row["run_ns"].sum()) - kernel0) / 1e9
        # The scheduler's account leaves out what a hypervisor took of a core meanwhile.
        timed(ran == pytest.approx(run1[0] - run0[0], abs=0.001), (ran, run1[0] - run0[0]))
        ready = sum(spent[c] for c in Cause if c.ready)
        timed(ready == pytest.approx(run1[1] - run0[1], rel=0.1, abs=0.001), (ready, run1[1] - run0[1]))
        if cause is None:
            assert ran >= 0.99 * least
        else:
            assert spent[cause] >= least
        others = [c for c in Cause if not c.ready and c not in (cause, Cause.OTHER)]
        timed(sum(spent[c] for c in others) < 0.05, spent)
        # Between two looks while it sleeps, in which only its waiting for orders has not been added yet.
        whole = int(row["since"]) - int(row["begun"])
        parts = int(row["run_ns"].sum()) + int(row["wait_ns"].sum())
        assert parts == pytest.approx(whole, abs=1000)
        assert at1 - at0 >= ran + sum(spent.values())


def test_each_switch_is_counted_once() -> None:
    """Switches of the watched thread equal those of /proc, and no other process's are among them."""
    with Waits() as victim, Waits() as other, watching(victim.pid, faults=False) as watch:
        victim.do("spin 1")
        watch.settle(victim)
        assert watch.causes.sched is not None
        seen0, truth0 = watch.causes.sched.stats()["switches"], victim.switches()
        for _ in range(40):
            victim.do("poll 1")
            other.do("poll 1")
        watch.settle(victim)
        seen, truth = watch.causes.sched.stats()["switches"] - seen0, victim.switches() - truth0
        assert seen == truth >= 80
        rows = watch.causes.sched.threads()
        assert set(rows["tgid"].tolist()) == {victim.pid}


def test_a_switch_that_was_not_traced() -> None:
    """Seen on this project's own machine: the kernel switches to a thread and says nothing. Its entry
    is put back to what it was before that; what it ran and waited is right all the same."""
    in_one_of(ATTEMPTS, not_traced)


def not_traced() -> None:
    with Waits() as victim, watching(victim.pid, faults=False) as watch:
        victim.do("spin 1")
        watch.graph_runs(victim.pid)
        sched = watch.causes.sched
        assert sched is not None
        ahead(victim.pid)
        for _ in range(20):  # where others take our core it may be over before we look
            watch.settle(victim)
            asleep = sched.threads([victim.pid]).copy()
            run, ready = victim.schedstat()
            before, missed = watch.seconds(victim.pid), sched.stats()["missed"]
            left = victim.switches()
            victim.start("spin 100")
            until = time.monotonic() + 1
            while (now := watch.row(victim.pid))["state"] != 0 and time.monotonic() < until:
                pass
            if now["state"] == 0 and now["waits"].sum() == asleep["waits"].sum() + 2:
                break  # it was woken, came to a core, and has not left it since
            victim.finish()
        else:
            pytest.fail("it was never seen on the core that it was woken on")
        assert asleep["state"][0] == 1 and asleep["exec_ns"][0] > 0
        on_its_core = victim.switches()
        asleep["woken"], asleep["clock_woken"] = now["woken"], now["clock_woken"]
        sched.map("sched_threads").update(victim.pid.to_bytes(4, "little"), asleep.tobytes())
        # Where we were held up between the look and this, it may be done and asleep by now.
        timed(victim.switches() == on_its_core == left, "it had left its core")
        victim.finish()
        watch.settle(victim)
        after, row = watch.seconds(victim.pid), watch.row(victim.pid)
        spent = (int(row["run_ns"].sum()) - int(asleep["run_ns"][0].sum())) / 1e9
        truth = victim.schedstat()
        assert sched.stats()["missed"] > missed and spent > 0.099
        # The scheduler's account leaves out what a hypervisor took of a core meanwhile.
        timed(spent == pytest.approx(truth[0] - run, rel=0.02, abs=0.001), (spent, truth[0] - run))
        waited = sum(after[c] - before[c] for c in Cause if c.ready)
        timed(waited == pytest.approx(truth[1] - ready, rel=0.1, abs=0.002), (waited, truth[1] - ready))


def test_the_first_switch_to_a_thread_was_not_traced() -> None:
    """As above, and it had never left a core before: it is known that it had not run."""
    in_one_of(ATTEMPTS, first_not_traced)


def first_not_traced() -> None:
    with Waits() as victim, watching(victim.pid, faults=False) as watch:
        victim.do("spin 1")
        sched = watch.causes.sched
        assert sched is not None
        ahead(victim.pid)  # and so are its threads
        for _ in range(20):  # where others take its core it may have left it before we look
            missed = sched.stats()["missed"]
            known = set(sched.threads()["tid"].tolist())
            victim.start("threads 1 200")
            until = time.monotonic() + ANSWER_SECONDS
            while not (new := [r for r in sched.threads() if r["tid"] not in known and r["state"] != 1]):
                assert time.monotonic() < until
            now = new[0].copy()
            if now["state"] == 0 and now["waits"].sum() <= 2:
                break  # nothing but waiting for its first core
            victim.finish()
        else:
            pytest.fail("it was never seen on its first core")
        tid = int(now["tid"])
        for name in ("run_ns", "work_run_ns", "wait_ns", "work_wait_ns", "waits", "work_waits"):
            now[name] = 0
        now["state"], now["since"], now["woken"] = 1, now["begun"], now["begun"]
        sched.map("sched_threads").update(tid.to_bytes(4, "little"), now.tobytes())
        try:
            lines = Path(f"/proc/{victim.pid}/task/{tid}/status").read_text().splitlines()
            left = sum(int(line.split()[1]) for line in lines if "ctxt_switches" in line)
        except (FileNotFoundError, ProcessLookupError):
            left = 1
        # Where we were held up between the look and this, it may have left its core by now.
        timed(left == 0, "it had left its core")
        victim.finish()
        watch.settle(victim)
        (row,) = sched.threads([tid])
        # Of its last milliseconds the scheduler's account says nothing yet when it ends.
        ran = int(row["run_ns"].sum()) / 1e9
        assert ran > 0.18, ran
        assert sched.stats()["missed"] > missed


def test_a_thief_on_the_same_core() -> None:
    """Two busy processes on one core: the wait equals schedstat's, and the other one is named.

    It has a weight with which it gets the core before whatever else runs on this machine.
    """
    in_one_of(ATTEMPTS, a_thief)


def a_thief() -> None:
    pin = ["taskset", "-c", str(one_cpu())]
    with (
        Waits(pin) as victim,
        Waits(["nice", "-n", "-15", *pin]) as thief,
        watching(victim.pid, faults=False) as watch,
    ):
        victim.do("spin 1")
        watch.settle(victim)
        watch.graph_runs(victim.pid)
        before = victim.schedstat()
        ready0 = sum(watch.seconds(victim.pid)[c] for c in Cause if c.ready)
        victim.start("spin 250")
        thief.do("spin 400")
        victim.finish()
        watch.settle(victim)
        truth = victim.schedstat()[1] - before[1]
        found = watch.seconds(victim.pid)
        timed(truth > 0.1, truth)
        ready = sum(found[c] for c in Cause if c.ready) - ready0
        timed(ready == pytest.approx(truth, rel=0.1), (ready, truth))
        row = watch.row(victim.pid)
        assert row["compute"] == 1 and int(row["work_wait_ns"][Cause.PREEMPTED]) > 0
        spans = watch.causes.drain()["sched_spans"]
        assert set(spans["tid"].tolist()) == {victim.pid}
        taken = spans[spans["cause"] == Cause.PREEMPTED]
        ns = taken["end"] - taken["begin"]
        by_thief = int(ns[taken["by_tgid"] == thief.pid].sum())
        timed(by_thief >= 0.15e9, by_thief)
        assert (taken["by_comm"][taken["by_tgid"] == thief.pid] == b"waits").all()


def test_giving_way() -> None:
    """sched_yield is no preemption."""
    pin = ["taskset", "-c", str(one_cpu())]
    with Waits(pin) as victim, Waits(pin) as other, watching(victim.pid, faults=False) as watch:
        victim.do("spin 1")
        for _ in range(20):  # until it had somebody to give way to
            other.start("spin 150")
            victim.do("yield 40")
            other.finish()
            watch.settle(victim)
            row = watch.row(victim.pid)
            if row["waits"][Cause.YIELDED]:
                break
        assert int(row["waits"][Cause.YIELDED]) > 0
        assert int(row["wait_ns"][Cause.YIELDED]) > 0


def test_a_cpu_quota_is_not_a_preemption() -> None:
    in_one_of(ATTEMPTS, a_quota)


def a_quota() -> None:
    with ExitStack() as stack:
        group = stack.enter_context(quota_group(0.2))
        victim = stack.enter_context(Waits())
        watch = stack.enter_context(watching(victim.pid, faults=False))
        (group / "cgroup.procs").write_text(str(victim.pid))
        victim.do("spin 1")
        then = group_times(victim.pid)
        before, ready = watch.seconds(victim.pid), victim.schedstat()[1]
        victim.do("spin 150")
        watch.settle(victim)
        now, after = group_times(victim.pid), watch.seconds(victim.pid)
        assert then is not None and now is not None and now.cores == pytest.approx(0.2)
        assert then.throttled_seconds is not None and now.throttled_seconds is not None
        truth = now.throttled_seconds - then.throttled_seconds
        found = after[Cause.THROTTLED] - before[Cause.THROTTLED]
        # Where others have its core it may never come to its quota.
        timed(truth > 0.2, truth)
        # Ours lasts until it runs again: on a busy machine it may wait for a core after that.
        most = 1.25 * truth + victim.schedstat()[1] - ready
        timed(0.75 * truth <= found <= most, (truth, found, most))


def test_threads_that_come_and_go() -> None:
    """A pool that is rebuilt while watched: its time stays in the sums, its entries do not."""
    in_one_of(ATTEMPTS, come_and_go)


def come_and_go() -> None:
    with Waits() as victim, watching(victim.pid, faults=False) as watch:
        target = TargetCauses(watch.causes, open_process(victim.pid))
        assert watch.causes.sched is not None
        for n in range(3):
            watch.graph_runs(victim.pid)
            victim.do("threads 20 5")
            watch.settle(victim)
            watch.causes.tick(time.monotonic() + 10 * n + 10)
            rows = watch.causes.sched.threads()
            assert set(rows["tid"].tolist()) == {victim.pid}, "entries of ended threads are left"
            ended = [t for t in target._sums.figures(rows, now_ns=0, clock_ns=0, kinds=()) if not t.alive]
            assert len(ended) == min(20 * (n + 1), 65)
            ran = sum(t.work_run_seconds for t in ended)
            # Where neither the coming nor the leaving of a short one was traced, nobody knows what it ran.
            timed(ran >= 0.95 * 20 * (n + 1) * 0.005, ran)
        assert watch.causes.sched.stats()["map_full"] == 0
        target.close()


def test_a_thread_that_ends_between_two_looks() -> None:
    """It was read while it ran, and is gone when that is gone through: what it ran since is not lost."""
    with Waits() as victim, watching(victim.pid, faults=False) as watch:
        target = TargetCauses(watch.causes, open_process(victim.pid))
        sched = watch.causes.sched
        assert sched is not None
        watch.graph_runs(victim.pid)
        victim.start("threads 1 200")
        until = time.monotonic() + 30
        while len(rows := sched.threads()) < 2:
            assert time.monotonic() < until
        victim.finish()
        target.sweep(rows)
        (ended,) = (
            t for t in target._sums.figures(sched.threads(), now_ns=0, clock_ns=0, kinds=()) if not t.alive
        )
        assert ended.run_seconds > 0.199
        assert set(sched.threads()["tid"].tolist()) == {victim.pid}
        target.close()


def test_processes_that_nobody_watches_any_more() -> None:
    """What they left in the map goes, while those that live are left alone."""
    with Waits() as living, watching(living.pid, faults=False) as watch:
        with Waits() as short:
            watch.watch(short.pid)
            short.do("spin 1")
            living.do("spin 1")
        assert watch.causes.sched is not None
        watch.causes.tick(time.monotonic())
        assert set(watch.causes.sched.threads()["tgid"].tolist()) == {living.pid}


def test_a_child_is_not_the_target() -> None:
    """It forks while it is watched: what the child runs and faults is in no figure, nor is it recorded."""
    in_one_of(ATTEMPTS, a_child)


def a_child() -> None:
    with Waits() as victim, watching(victim.pid) as watch:
        victim.do("spin 1")
        watch.graph_runs(victim.pid)
        watch.settle(victim)
        watch.causes.drain()
        ran, truth = int(watch.row(victim.pid)["run_ns"].sum()), victim.schedstat()[0]
        minor, _ = victim.faults()
        (child,) = victim.do("fork 60")
        watch.settle(victim)
        ours = (int(watch.row(victim.pid)["run_ns"].sum()) - ran) / 1e9
        its = victim.schedstat()[0] - truth
        assert watch.causes.sched is not None and watch.causes.faults is not None
        assert set(watch.causes.sched.threads()["tgid"].tolist()) == {victim.pid}
        records = watch.causes.drain()
        assert all(child not in some["tgid"].tolist() for some in records.values())
        assert len(records["page_faults"]) == victim.faults()[0] - minor
        assert watch.causes.faults.counts(child) is None
        # The scheduler's account leaves out what a hypervisor took of a core meanwhile.
        timed(ours == pytest.approx(its, abs=0.001) and ours < 0.06, (ours, its))


def test_exec_while_watched() -> None:
    """The same pid runs another program: its thread goes on under the same id."""
    with Waits() as victim, watching(victim.pid, faults=False) as watch:
        victim.do("spin 20")
        before = int(watch.row(victim.pid)["run_ns"].sum())
        victim.do("exec")
        victim.do("spin 20")
        watch.settle(victim)
        assert int(watch.row(victim.pid)["run_ns"].sum()) >= before + 20_000_000
        assert int(watch.row(victim.pid)["state"]) != 2


def test_what_waits_for_a_disk(tmp_path: Path) -> None:
    """Pages of a mapping and reads by system call are told apart. Sums against each other only:
    how long a disk takes is not known to anybody else."""
    in_one_of(ATTEMPTS, lambda: a_disk(tmp_path))


def a_disk(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(os.urandom(8 << 20))
    os.sync()
    with Waits() as victim, watching(victim.pid) as watch:
        victim.do("spin 1")
        watch.settle(victim)
        first = watch.seconds(victim.pid)
        _, major0 = victim.faults()
        victim.do(f"touch {path}")
        watch.settle(victim)
        touched = watch.seconds(victim.pid)
        if victim.faults()[1] == major0:
            pytest.skip("this file system's pages cannot be dropped")
        victim.do(f"read {path}")
        watch.settle(victim)
        read = watch.seconds(victim.pid)
        assert touched[Cause.FAULT] > first[Cause.FAULT]
        # Opening the file and dropping its pages may wait, too, where others use the disk.
        waited = touched[Cause.IO] - first[Cause.IO], read[Cause.FAULT] - touched[Cause.FAULT]
        timed(max(waited) <= 0.02, waited)
