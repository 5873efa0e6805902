# SPDX-License-Identifier: Apache-2.0
"""Verdicts about threads on a real engine, each with its cause planted."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from profinferd.agent.attach import Attachment
from profinferd.agent.model.causes import Cause
from profinferd.agent.model.records import Records
from profinferd.agent.model.snapshot import Snapshot
from profinferd.agent.model.verdict import judge
from profinferd.agent.model.verdictdata import Verdict
from profinferd.agent.whys import WhyOptions

from ..groups import quota_group, throttled_seconds
from ..tries import in_one_of, timed
from .fetch import Engines
from .models import model, words
from .pysync import Options, PySync
from .test_causes import Job, _cpu_ticks, all_ready, pin, ready_seconds, thief, watched
from .undisturbed import BELOW_THE_THIEF, BURST_SECONDS, first_in_line

TOKENS = 60
ROUNDS = 3
SAMPLES = 1200
ATTEMPTS = 6
"""A hypervisor may take a core from who is first in line, too."""

needs_bcc = pytest.mark.skipif(
    not Path("/usr/lib/python3/dist-packages/bcc").is_dir(), reason="BCC is not installed here"
)


def verdicts(job: Job) -> dict[str, Verdict]:
    """By rule; of the whole window."""
    return {v.rule: v for v in judge(job.attachment.snapshot())}


def beside(job: Job, other: subprocess.Popen[bytes], tokens: int) -> None:
    """Answers until the other process had a core for 50 ms meanwhile, whenever that comes to it."""
    before, until = _cpu_ticks(other.pid), time.monotonic() + 120
    while True:
        job.generate(tokens)
        if _cpu_ticks(other.pid) - before >= 5:
            return
        assert time.monotonic() < until, "the thief took nothing"


def two_cores() -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one core only")


def test_the_thief_comes_first(engines: Engines) -> None:
    cpu = max(os.sched_getaffinity(0))
    with watched(Options(model("dense24-q4_0"), threads=1), priority=BELOW_THE_THIEF) as job:
        pin(job.pid, cpu)
        with thief(cpu) as other:
            beside(job, other, TOKENS)
        first = judge(job.attachment.snapshot())[0]
    assert first.rule == "preempted"
    assert f"pid {other.pid}" in " ".join(first.evidence)
    assert first.seconds_per_token is not None
    assert first.seconds_per_token > 0


def test_one_of_two_threads_on_a_loaded_core(engines: Engines) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        pytest.skip("one core only")
    with watched(Options(model("dense2-q8_0"), threads=2), priority=BELOW_THE_THIEF) as job:
        workers = [int(t) for t in os.listdir(f"/proc/{job.pid}/task") if int(t) != job.pid]
        for tid in workers:
            os.sched_setaffinity(tid, {cpus[1]})
        with thief(cpus[1]) as other:
            beside(job, other, 6 * TOKENS)
        found = verdicts(job)["preempted"]
    assert f"pid {other.pid}" in " ".join(found.evidence)
    assert any("may not use every CPU" in text for text in found.evidence)


def test_a_target_that_gives_way(engines: Engines) -> None:
    """SCHED_IDLE beside a busy process: it waits because it asked to."""
    cpu = max(os.sched_getaffinity(0))
    with watched(Options(model("dense2-q8_0"), threads=1)) as job:
        pin(job.pid, cpu)
        os.sched_setscheduler(job.pid, os.SCHED_IDLE, os.sched_param(0))
        with thief(cpu) as other:
            beside(job, other, 3 * TOKENS)
        seen = job.attachment.snapshot()
    rules = {v.rule: v for v in judge(seen)}
    assert "low_priority" in rules, (rules, seen.threads)
    found = rules["low_priority"]
    assert found.confidence == "high"
    assert "run with idle" in found.evidence[0]


def until_all_compute(job: Job, threads: int) -> None:
    """Answers until so many threads had a core, and none of them next to nothing of what the others had:
    one that gets none while the others take its work is no compute thread."""

    def ran() -> dict[str, int]:
        return {p.parent.name: int(p.read_text().split()[0]) for p in
                Path(f"/proc/{job.pid}/task").glob("*/schedstat")}  # fmt: skip

    before, until = ran(), time.monotonic() + 120
    while True:
        job.generate(8)
        ours = [ns - before.get(tid, 0) for tid, ns in ran().items()]
        if sum(ns > 0.2 * max(ours) for ns in ours) >= threads:
            return
        assert time.monotonic() < until, ours


@pytest.mark.parametrize("cpus", [1, 2])
def test_more_threads_than_cpus(cpus: int, engines: Engines) -> None:
    """Four threads on the one CPU, or the two, that they may use."""
    allowed = sorted(os.sched_getaffinity(0))[:cpus]
    if len(allowed) < cpus:
        pytest.skip("one core only")
    with watched(Options(model("dense2-q8_0"), threads=4)) as job:
        for name in os.listdir(f"/proc/{job.pid}/task"):
            os.sched_setaffinity(int(name), allowed)
        until_all_compute(job, 4)
        found = verdicts(job)["more_threads_than_cores"]
    assert f"4 compute threads share {cpus} CPU{'s' if cpus > 1 else ''}" == found.evidence[0]
    assert found.confidence == "high"
    assert found.try_ == f"--threads {cpus}"


def test_more_threads_than_cpus_with_nobody_else_there(engines: Engines) -> None:
    """Four threads on both cores, which no other program gets: the only verdict there is."""
    two_cores()
    if len(os.sched_getaffinity(0)) >= 4:
        pytest.skip("this machine has cores enough for four threads")

    def once() -> None:
        with PySync(Options(model("dense2-q8_0"), threads=4)) as victim:
            seen = undisturbed(victim, 12)
        assert seen.threads is not None
        rules = [v.rule for v in judge(seen)]
        timed(rules == ["more_threads_than_cores"], rules)
        timed(sum(seen.threads.phases[0].stalled.values()) > 0, seen.threads.phases)

    in_one_of(ATTEMPTS, once)


def undisturbed(victim: PySync, tokens: int) -> Snapshot:
    """Short answers of an engine whose cores nobody else gets."""
    victim.ask("generate", context=0, prompt=words(8), n=2)
    first_in_line(victim.pid)
    with Attachment.open(victim.pid, ops="off") as attachment:
        for _ in range(ROUNDS):
            answer = victim.ask("generate", context=0, prompt=words(8, 3), n=tokens)
            burst = answer["calls"][-1]["end"] - answer["calls"][0]["begin"]
            timed(burst < BURST_SECONDS * 1e9, f"{burst / 1e9:.2f} s at a stretch: others were let in")
            attachment.poll(0.05)
        return attachment.snapshot()


@pytest.mark.parametrize("threads", [1, 2])
def test_a_quiet_engine_has_none_of_them(threads: int, engines: Engines) -> None:
    """With as many threads as there are cores, and with one."""
    if threads > 1:
        two_cores()

    def once() -> None:
        with PySync(Options(model("dense2-q8_0"), threads=threads)) as victim:
            seen = undisturbed(victim, TOKENS)
        assert seen.tokens.decode == ROUNDS * (TOKENS - 1)
        rules = [v.rule for v in judge(seen)]
        timed(rules == ["nothing_wrong"], rules)

    in_one_of(ATTEMPTS, once)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_cpu_quota(threads: int, engines: Engines) -> None:
    """A control group with less than its threads want. By the group's own count of the time in which
    its CPUs were stopped, which is of all threads, also between graphs."""
    if threads > 1:
        two_cores()
    options = Options(model("dense24-q4_0"), threads=threads)
    with quota_group(0.3 * threads) as group, watched(options) as job:
        sched = job.attachment._causes.sched
        assert sched is not None
        (group / "cgroup.procs").write_text(str(job.pid))
        all_ready(job)  # nothing of it runs any more
        before, ready = throttled_seconds(group), ready_seconds(job.pid)
        ours = throttled(sched.threads(), job.pid)
        job.generate(5 * TOKENS)
        all_ready(job)
        truth, ready = throttled_seconds(group) - before, ready_seconds(job.pid) - ready
        ours = throttled(sched.threads(), job.pid) - ours
        seen = job.threads()
        found = verdicts(job)["cpu_quota"]
        rows = job.attachment.snapshot().tokens.output_rows
    assert truth > 0.3
    # A CPU is stopped when its time is up, a thread when it comes back from the kernel; and one that
    # may run again waits for a core after that.
    assert 0.7 * truth <= ours <= 1.1 * truth + ready
    stalled = sum(p.stalled.get("throttled", 0.0) for p in seen.phases)
    assert 0.5 * ours / threads <= stalled <= 1.01 * ours
    assert found.confidence == "high" and found.seconds_per_token == pytest.approx(stalled / (rows or 0))
    assert f"may use {0.3 * threads:g} cores for {threads} compute thread" in found.evidence[0]


def throttled(rows: Records, pid: int) -> float:
    """Seconds of all its threads by our count."""
    return float(rows["wait_ns"][rows["tgid"] == pid][:, Cause.THROTTLED].sum()) / 1e9


# ---- threads that wait for each other --------------------------------------------------------


def measured(name: str, threads: int) -> float:
    """Seconds of a token with nothing attached, by the engine's own program around each call."""
    with PySync(Options(model(name), threads=threads)) as victim:
        victim.ask("generate", context=0, prompt=words(8), n=2)
        first_in_line(victim.pid)
        found: list[float] = []
        for _ in range(ROUNDS):
            calls = victim.ask("generate", context=0, prompt=words(8, 3), n=TOKENS)["calls"][1:]
            found.append(sum(c["end"] - c["begin"] for c in calls) / len(calls) / 1e9)
            time.sleep(0.05)
    return min(found)


@needs_bcc
@pytest.mark.parametrize(("name", "too_many"), [("thin24-f16", True), ("dense2-q8_0", False)])
def test_threads_that_have_too_little_to_do(name: str, too_many: bool, engines: Engines) -> None:
    """A second thread makes a model of tiny operators slower, and one of larger ones faster."""
    two_cores()
    in_one_of(ATTEMPTS, lambda: too_little_to_do(name, too_many))


def too_little_to_do(name: str, too_many: bool) -> None:
    with PySync(Options(model(name), threads=2)) as victim:
        victim.ask("generate", context=0, prompt=words(8), n=2)
        first_in_line(victim.pid)
        with Attachment.open(victim.pid, ops="off", why=WhyOptions(997)) as attachment:
            sampler = attachment._whys._sampler
            assert sampler is not None
            until = time.monotonic() + 120
            while sampler.samples < SAMPLES and time.monotonic() < until:
                victim.ask("generate", context=0, prompt=words(8, 3), n=TOKENS)
                attachment.poll(0.05)
        seen = attachment.snapshot()
    one, two = measured(name, 1), measured(name, 2)
    found = {v.rule: v for v in seen.verdicts or ()}
    if too_many:
        timed(one < two and "too_many_threads" in found, (one, two, sorted(found)))
        verdict = found["too_many_threads"]
        # At most: not less than what one thread alone saves, and not more than a token takes.
        took = sum(call.seconds for call in seen.calls) / (seen.tokens.output_rows or 0)
        assert verdict.seconds_per_token is not None
        timed(0.8 * (two - one) < verdict.seconds_per_token < took, (one, two, verdict, took))
        assert verdict.evidence[0].startswith("2 threads wait for each other")
    else:
        timed(two < one and set(found) == {"nothing_wrong"}, (one, two, sorted(found)))
