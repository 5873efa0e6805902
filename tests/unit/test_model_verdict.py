# SPDX-License-Identifier: Apache-2.0
"""Verdicts on snapshots whose figures were worked out by hand. No figure in them was measured.

The window of :func:`plain`: 40 tokens decoded in 2 s (50 ms each), 100 prompt tokens in 0.5 s,
41 output rows. A cost of x seconds is therefore x / 41 a token.
"""

from __future__ import annotations

import dataclasses

import pytest

from profinferd.agent.model import case
from profinferd.agent.model import causes as cz
from profinferd.agent.model import snapshot as model
from profinferd.agent.model.clockdata import Clocks, Cooling, CoreClock
from profinferd.agent.model.eventdata import CpuPart, CpuTime
from profinferd.agent.model.limits import LIMITS
from profinferd.agent.model.peaks import Peak, Peaks
from profinferd.agent.model.verdict import RULES, judge
from profinferd.agent.model.verdictdata import Verdict
from profinferd.exporters.table import TableExporter
from profinferd.exporters.verdicts import TITLES

from .snapshots import busy, graph, op

ROWS = 41
PEAKS = Peaks(
    (Peak(1, 20e9, 15e9, 100e9, 400e9), Peak(2, 30e9, 22e9, 200e9, 800e9)), "made up", cache_bytes=32 << 20
)


def plain(**changes: object) -> model.Snapshot:
    """A window in which nothing is wrong, as far as was looked: no threads, no faults, no peaks."""
    one = dataclasses.replace(
        busy(),
        tokens=model.Tokens(prefill=100, decode=40, output_rows=ROWS),
        calls=(model.Call("prefill", 0, 1, 0.5), model.Call("decode", 0, 40, 2.0)),
        graphs=(graph(count=40, seconds=2.0), graph("prefill", 1, 100, seconds=0.5)),
        ops=(),
        notes=(),
    )
    return dataclasses.replace(one, **changes)  # type: ignore[arg-type]


def thread(tid: int = 1, run: float = 2.4, **more: object) -> cz.Thread:
    """A compute thread that had a core whenever it wanted one."""
    figures: dict[str, object] = {
        "leader": tid == 1, "alive": True, "run_seconds": run, "work_run_seconds": run, "seconds": {},
        "waits": {}, "migrations": 0, "kind_changes": 0, "wakeup_max_seconds": 0.0, "policy": "other",
        "nice": 0, "cpus": (0, 1), **more,
    }  # fmt: skip
    return cz.Thread(tid=tid, **figures)  # type: ignore[arg-type]


def stall(phase: str = "decode", **causes: float) -> cz.PhaseWaits:
    """What the calls of a phase lost, by cause."""
    return cz.PhaseWaits(phase, 40, 40, 2.0, causes, {}, max(causes.values(), default=0.0))


def threads(*some: cz.Thread, **more: object) -> cz.Threads:
    """What the scheduler did; nothing unless said."""
    figures: dict[str, object] = {
        "work_seconds": 2.4, "takers": (), "phases": (stall(),), "ops": (),
        "cores": (cz.CoreKind("all", (0, 1)),), "quota": None, "online_cpus": 2, "records": 10,
        "barriers": (), "op_barriers": (), **more,
    }  # fmt: skip
    return cz.Threads(threads=some or (thread(),), **figures)  # type: ignore[arg-type]


def barrier(name: str, role: str, wall: float, work: float, count: int = 2, **late: float) -> cz.OpBarrier:
    """``work`` of all ``count`` threads in ``wall`` seconds of ops."""
    return cz.OpBarrier(name, "q4_K", role, "decode", 400, count, wall, work, wall * count - work, 0.0, late)


def the(verdicts: tuple[Verdict, ...], rule: str) -> Verdict:
    """The one verdict of a rule."""
    (found,) = [v for v in verdicts if v.rule == rule]
    return found


def rules(snapshot: model.Snapshot) -> list[str]:
    """Names in the order in which they are shown."""
    return [v.rule for v in judge(snapshot)]


# ---- nothing, and nothing wrong --------------------------------------------------------------


def test_too_little_to_say_anything() -> None:
    assert judge(plain(tokens=model.Tokens(0, 0, 0), calls=(), graphs=())) == ()
    assert judge(plain(tokens=model.Tokens(4, 7, 8))) == ()
    assert judge(plain(tokens=model.Tokens(None, None, None))) == ()


def test_nothing_wrong_says_what_was_not_looked_at() -> None:
    (verdict,) = judge(plain())
    assert (verdict.rule, verdict.confidence, verdict.seconds_per_token) == ("nothing_wrong", "low", None)
    assert "40 tokens were decoded at 50 ms each" in verdict.evidence[0]
    assert sum(text.startswith("not looked at:") for text in verdict.evidence) == 4


def test_a_quiet_machine_has_none_of_the_others() -> None:
    """Small waits, a short preemption, cold page faults: below every threshold."""
    quiet = plain(
        threads=threads(
            thread(1), thread(2),
            takers=(cz.Taker("kworker", 7, 2, 0.01),),
            phases=(stall(preempted=0.01, wakeup=0.01, fault=0.02),),
            op_barriers=(barrier("MUL_MAT", "ffn_up", 1.0, 1.9),),
        ),
        faults=cz.Faults((cz.FaultCount("major", "model", 3, 0.02),), (), None, 0),
        peaks=PEAKS,
        clocks=Clocks((CoreClock(0, 10, 3490.0, 3500.0, 3500.0),), (), 0),
        ops=(op(seconds=2.0, bytes=8_000_000_000, flops=14_000_000_000),),
    )  # fmt: skip
    (verdict,) = judge(quiet)
    assert verdict.rule == "nothing_wrong"
    assert verdict.confidence == "high"
    # 8 GB in 2 s are 4 GB/s, of the 30 that two threads can read.
    assert "decode reads at 13 % of what this machine's memory can" in verdict.evidence


# ---- the machine's limits --------------------------------------------------------------------


def decode(gigabytes: float, gigaflops: float = 10.0, dtype: str = "f16") -> model.Op:
    """All decode's work in one op of 2 s."""
    return op(dtype=dtype, seconds=2.0, bytes=int(gigabytes * 1e9), flops=int(gigaflops * 1e9))


@pytest.mark.parametrize(
    ("gigabytes", "expected"),
    [(20.0, None), (25.0, "medium"), (32.0, "high"), (48.0, "high"), (51.0, None)],
)
def test_memory_bound_decode(gigabytes: float, expected: str | None) -> None:
    """One thread reads 20 GB/s at most: 2 s are 40 GB. 51 GB cannot have come from memory."""
    verdicts = judge(plain(peaks=PEAKS, threads=threads(thread()), ops=(decode(gigabytes),)))
    if expected is None:
        assert "memory_bandwidth_bound_decode" not in [v.rule for v in verdicts]
        return
    verdict = the(verdicts, "memory_bandwidth_bound_decode")
    assert verdict.confidence == expected
    least = min(gigabytes / 20, 2.0)
    assert verdict.seconds_per_token == pytest.approx(least / ROWS)
    assert f"{gigabytes / 2:.3g} GB/s, {gigabytes / 40 * 100:.0f} % of the 20 GB/s" in verdict.evidence[0]
    assert f"{gigabytes / 40 * 1e3:,.0f} MB" in verdict.evidence[1]  # by graph


def test_not_memory_bound_when_arithmetic_takes_longer_or_caches_hold_it() -> None:
    # 30 GB at 20 GB/s: 75 % of 2 s. 180 GFLOP at 100 GFLOP/s: 90 %.
    arithmetic = plain(peaks=PEAKS, threads=threads(thread()), ops=(decode(30.0, 180.0),))
    assert "memory_bandwidth_bound_decode" not in rules(arithmetic)
    # 30 GB in 40 graphs are 750 MB each: caches of 1 GB hold that.
    cached = dataclasses.replace(PEAKS, cache_bytes=1 << 30)
    one = plain(peaks=cached, threads=threads(thread()), ops=(decode(30.0),))
    assert "memory_bandwidth_bound_decode" not in rules(one)
    # With half of the time spent waiting, a rate says nothing.
    waits = threads(thread(), phases=(stall(preempted=1.0),))
    assert "memory_bandwidth_bound_decode" not in rules(
        plain(peaks=PEAKS, threads=waits, ops=(decode(30.0),))
    )


def test_peaks_are_those_of_as_many_threads() -> None:
    """25 GB in 2 s: 62 % of what one thread can read, 42 % of what two can."""
    ops = (decode(25.0),)
    assert "memory_bandwidth_bound_decode" in rules(plain(peaks=PEAKS, threads=threads(thread()), ops=ops))
    both = threads(thread(1), thread(2))
    assert "memory_bandwidth_bound_decode" not in rules(plain(peaks=PEAKS, threads=both, ops=ops))
    # A second thread that did next to nothing is no compute thread.
    lazy = threads(thread(1), thread(2, 0.01))
    assert "memory_bandwidth_bound_decode" in rules(plain(peaks=PEAKS, threads=lazy, ops=ops))
    # Without scheduler records, hits of op probes tell: as many on other threads as on the first.
    counters = model.Counters(0, 0, 0, (), {"op": 1000, "op_other_thread": 1000})
    assert "memory_bandwidth_bound_decode" not in rules(plain(peaks=PEAKS, counters=counters, ops=ops))


def prefill(gigaflops: float, dtype: str, gigabytes: float = 1.0) -> model.Op:
    """All prefill's work in one op of 0.5 s."""
    flops, moved = int(gigaflops * 1e9), int(gigabytes * 1e9)
    return op(dtype=dtype, phase="prefill", seconds=0.5, flops=flops, bytes=moved)


@pytest.mark.parametrize(
    ("gigaflops", "dtype", "expected"),
    [
        (10.0, "f32", None),  # 0.1 s of 0.5
        (20.0, "f32", "medium"),  # 0.2 s
        (30.0, "f16", "high"),  # 0.3 s
        (30.0, "q4_K", None),  # integers: 0.075 s
        (80.0, "q8_0", "medium"),  # 0.2 s
    ],
)
def test_compute_bound_prefill(gigaflops: float, dtype: str, expected: str | None) -> None:
    verdicts = judge(plain(peaks=PEAKS, threads=threads(thread()), ops=(prefill(gigaflops, dtype),)))
    if expected is None:
        assert "compute_bound_prefill" not in [v.rule for v in verdicts]
        return
    verdict = the(verdicts, "compute_bound_prefill")
    rate = 400 if dtype.startswith("q") else 100
    assert verdict.confidence == expected
    assert verdict.seconds_per_token == pytest.approx(gigaflops / rate / ROWS)
    assert f"{gigaflops / 0.5:.3g} GFLOP/s" in verdict.evidence[0]
    assert f"{gigaflops / rate / 0.5 * 100:.0f} % of the time" in verdict.evidence[0]


def test_prefill_that_also_waits_for_memory_is_not_compute_bound() -> None:
    """6 GB at 20 GB/s take 0.3 s, the arithmetic of 20 GFLOP 0.2 s."""
    one = plain(peaks=PEAKS, threads=threads(thread()), ops=(prefill(20.0, "f32", 6.0),))
    assert "compute_bound_prefill" not in rules(one)


def test_without_peaks_nothing_is_said_about_limits() -> None:
    for peaks in (None, Peaks((), reason="not measured")):
        found = rules(plain(peaks=peaks, threads=threads(thread()), ops=(decode(30.0), prefill(40.0, "f32"))))
        assert found == ["nothing_wrong"]
    unknown = op(seconds=2.0, bytes=None, flops=None)
    assert rules(plain(peaks=PEAKS, threads=threads(thread()), ops=(unknown,))) == ["nothing_wrong"]


def test_attention_grows_with_the_cache() -> None:
    """10 tokens each at 40, 50, 60 ms: 50 % more; 10 * 10 ms + 10 * 20 ms too much."""
    graphs = tuple(
        graph(count=10, kv_length=length, seconds=10 * each)
        for length, each in ((256, 0.04), (512, 0.05), (768, 0.06))
    )
    ops = (op(seconds=0.9, bytes=0), op("FLASH_ATTN_EXT", "", "", seconds=0.6))
    verdict = the(judge(plain(graphs=graphs, ops=ops)), "kv_growth_slows_attention")
    assert verdict.seconds_per_token == pytest.approx(0.3 / ROWS)
    assert verdict.confidence == "high"
    assert "40 ms with a cache of 256 and 60 ms with one of 768, 50 % more" in verdict.evidence[0]
    assert "attention takes 40 %" in verdict.evidence[1]
    # Not the attention: it takes too little for that.
    little = (ops[0], dataclasses.replace(ops[1], seconds=0.05))
    assert "kv_growth_slows_attention" not in rules(plain(graphs=graphs, ops=little))
    # Too few of each, and no growth.
    few = tuple(dataclasses.replace(g, count=7) for g in graphs)
    assert "kv_growth_slows_attention" not in rules(plain(graphs=few, ops=ops))
    flat = tuple(dataclasses.replace(g, seconds=0.4) for g in graphs)
    assert "kv_growth_slows_attention" not in rules(plain(graphs=flat, ops=ops))


def test_frequency_and_heat() -> None:
    """Cores at 1.2 of 2.4 GHz: half of the 2.5 s in calls at most."""
    slow = (CoreClock(0, 5, 1200.0, 2400.0, 1200.0), CoreClock(1, 5, 2390.0, 2400.0, 2400.0))
    verdict = the(judge(plain(clocks=Clocks(slow))), "low_frequency")
    assert verdict.seconds_per_token == pytest.approx(1.25 / ROWS)
    assert verdict.evidence == ("CPU 0 ran at 1,200 MHz of 2,400", "it is allowed 1,200 MHz")
    hot = the(judge(plain(clocks=Clocks(slow, (Cooling("cpufreq-cpu0", 2, 5),), 7))), "thermal_throttling")
    assert hot.confidence == "high"
    assert "the processor slowed itself for heat 7 times" in hot.evidence
    assert "cpufreq-cpu0 cools at step 2 of 5" in hot.evidence
    only = the(judge(plain(clocks=Clocks(slow[1:], (), 3))), "thermal_throttling")
    assert only.seconds_per_token is None
    # Seen too seldom, or fast enough.
    seldom = (dataclasses.replace(slow[0], samples=2), slow[1])
    assert rules(plain(clocks=Clocks(seldom))) == ["nothing_wrong"]


# ---- threads ---------------------------------------------------------------------------------


def test_a_thief_is_named() -> None:
    takers = (
        cz.Taker("stress", 77, 120, 0.5),
        cz.Taker("cron", 78, 3, 0.1),
        cz.Taker("me", 4242, 5, 0.2, True),
    )
    verdict = judge(plain(threads=threads(thread(), takers=takers, phases=(stall(preempted=0.8),))))[0]
    # Others took 0.6 of the 0.8 s that were taken.
    assert (verdict.rule, verdict.confidence) == ("preempted", "high")
    assert verdict.seconds_per_token == pytest.approx(0.6 / ROWS)
    assert "stress (pid 77) took the core 120 times" in verdict.evidence[0]
    assert "500 ms" in verdict.evidence[0]
    assert "600 ms, 24 % of their time" in verdict.evidence[1]
    assert "cron (pid 78, 100 ms)" in verdict.evidence[2]
    assert "stress" in verdict.try_


def test_calls_do_not_stand_still_longer_than_they_last() -> None:
    """A flight recorder's window of 2 s of decoding, into which a call of 6 s reaches that it does not
    count: of these 8 s waiting took 6, which is three quarters, and 1.5 s of the calls at hand. A
    prefill of which nothing is counted has no part in it."""
    reaching = cz.PhaseWaits("decode", 41, 41, 8.0, {"preempted": 6.0}, {}, 5.0)
    before = cz.PhaseWaits("prefill", 1, 900, 9.0, {"preempted": 9.0}, {}, 9.0)
    one = plain(
        tokens=model.Tokens(prefill=0, decode=40, output_rows=40),
        calls=(model.Call("decode", 0, 40, 2.0),),
        graphs=(graph(count=40, seconds=2.0),),
        threads=threads(thread(), takers=(cz.Taker("stress", 77, 9, 15.0),), phases=(reaching, before)),
    )
    verdict = judge(one)[0]
    assert verdict.evidence[1] == "calls stood still for 1.5 s, 75 % of their time"
    assert verdict.seconds_per_token == pytest.approx(1.5 / 40)


def test_a_thread_pinned_to_a_loaded_core_is_said() -> None:
    pinned = threads(
        thread(1), thread(2, cpus=(1,)), takers=(cz.Taker("stress", 77, 120, 0.5),),
        phases=(stall(preempted=0.5),),
    )  # fmt: skip
    verdict = the(judge(plain(threads=pinned)), "preempted")
    assert "1 of 2 compute threads may not use every CPU" in verdict.evidence


def test_a_quota() -> None:
    quota = cz.Quota(0.5, throttled_seconds=1.2, throttled_periods=18, periods=25)
    verdict = judge(plain(threads=threads(thread(), quota=quota, phases=(stall(throttled=1.0),))))[0]
    assert (verdict.rule, verdict.confidence) == ("cpu_quota", "high")
    assert verdict.seconds_per_token == pytest.approx(1.0 / ROWS)
    assert "may use 0.5 cores" in verdict.evidence[0]
    assert "1.2 s in 18 of 25 periods" in verdict.evidence[1]
    unused = cz.Quota(0.5, throttled_seconds=0.0, throttled_periods=0, periods=25)
    assert rules(plain(threads=threads(thread(), quota=unused))) == ["nothing_wrong"]


def test_low_priority() -> None:
    idle = threads(
        thread(policy="idle"), takers=(cz.Taker("make", 9, 50, 1.0),), phases=(stall(preempted=1.0),)
    )
    verdicts = judge(plain(threads=idle))
    verdict = the(verdicts, "low_priority")
    assert verdict.confidence == "high"
    assert "1 of 1 compute threads run with idle" in verdict.evidence[0]
    nice = threads(thread(nice=10), takers=(cz.Taker("make", 9, 50, 1.0),), phases=(stall(preempted=1.0),))
    assert "nice 10" in the(judge(plain(threads=nice)), "low_priority").evidence[0]
    # It gives way, and nobody came.
    assert rules(plain(threads=threads(thread(policy="idle")))) == ["nothing_wrong"]
    # Real-time threads have a nice value that nothing comes of.
    fifo = threads(thread(nice=5, policy="fifo"), phases=(stall(preempted=1.0),))
    assert "low_priority" not in rules(plain(threads=fifo))
    # Four of them on two CPUs that gave way to each other and to nobody else.
    four = [thread(tid, 1.2, nice=5) for tid in (1, 2, 3, 4)]
    for takers in ((), (cz.Taker("server", 4242, 90, 1.0, True),)):
        own = threads(*four, takers=takers, phases=(stall(wakeup=1.0),))
        assert rules(plain(threads=own)) == ["more_threads_than_cores"]


def test_more_threads_than_cores() -> None:
    four = tuple(thread(tid, 1.2) for tid in (1, 2, 3, 4))
    taken = threads(*four, takers=(cz.Taker("server", 4242, 90, 2.0, True),), phases=(stall(preempted=1.5),))
    verdicts = judge(plain(threads=taken))
    verdict = verdicts[0]
    assert (verdict.rule, verdict.confidence) == ("more_threads_than_cores", "high")
    assert verdict.seconds_per_token == pytest.approx(1.5 / ROWS)
    assert verdict.evidence[0] == "4 compute threads share 2 CPUs"
    assert verdict.try_ == "--threads 2"
    assert "preempted" not in [v.rule for v in verdicts]
    # Two threads that may use one CPU only are too many as well.
    both = threads(
        thread(1, cpus=(1,)), thread(2, cpus=(1,)),
        takers=(cz.Taker("server", 4242, 90, 2.0, True),), phases=(stall(preempted=1.5),),
    )  # fmt: skip
    assert the(judge(plain(threads=both)), "more_threads_than_cores").try_ == "--threads 1"


def test_threads_that_wait_for_each_other() -> None:
    """Four threads on four CPUs: of 4 s (1 s of ops) 2.4 s are work; the rest is 40 %."""
    four = tuple(thread(tid) for tid in (1, 2, 3, 4))
    ops = (barrier("MUL_MAT", "ffn_up", 0.6, 1.6, 4), barrier("MUL_MAT", "attn_q", 0.4, 0.8, 4))
    one = plain(threads=threads(*four, online_cpus=4, op_barriers=ops))
    verdict = judge(one)[0]
    assert (verdict.rule, verdict.confidence) == ("too_many_threads", "medium")
    assert verdict.seconds_per_token == pytest.approx(0.4 * 1.0 / ROWS)
    assert "4 threads wait for each other 40 % of their time" in verdict.evidence[0]
    assert "MUL_MAT attn_q" in verdict.evidence[1]
    # The same, but a late peer that had no core explains it: 3 threads waited 0.5 s.
    late = (dataclasses.replace(ops[0], late={"preempted": 0.5}), ops[1])
    assert "too_many_threads" not in rules(plain(threads=threads(*four, online_cpus=4, op_barriers=late)))


def sampled(barrier: int, kernels: int = 240) -> CpuTime:
    """So many samples at 100 Hz."""
    parts = [CpuPart(name, n, n / 100, 0.0) for name, n in (("barrier", barrier), ("kernels", kernels)) if n]
    return CpuTime(100, barrier + kernels, 0, None, 0.0, tuple(parts))


def test_threads_that_wait_for_each_other_by_samples() -> None:
    """The second of two threads ran 2.6 s, 0.2 of them between graphs. Of 2.4 s at barriers and 2.4 s
    in kernels, 2.2 s of 4.6 are waiting for each other: 48 %."""
    both = threads(thread(1), thread(2, 2.6, work_run_seconds=2.4))
    verdict = judge(plain(threads=both, cpu_time=sampled(240)))[0]
    assert (verdict.rule, verdict.confidence) == ("too_many_threads", "medium")
    assert verdict.seconds_per_token == pytest.approx(2.2 / 4.6 * 2.5 / ROWS)
    assert verdict.evidence == (
        "2 threads wait for each other 48 % of their time, by 240 of 480 samples of CPU time",
    )
    # One of them had no core for 1.6 s, in which the other waited at a barrier: 0.6 s are left, 13 %.
    held = threads(*both.threads, phases=(stall(preempted=1.6),))
    assert "too_many_threads" not in rules(plain(threads=held, cpu_time=sampled(240)))
    # Too little, too few samples, more threads than cores (another rule's), a single thread.
    assert rules(plain(threads=both, cpu_time=sampled(90))) == ["nothing_wrong"]
    assert rules(plain(threads=both, cpu_time=sampled(90, 90))) == ["nothing_wrong"]
    three = threads(*both.threads, thread(3))
    assert "too_many_threads" not in rules(plain(threads=three, cpu_time=sampled(240)))
    assert rules(plain(threads=threads(thread()), cpu_time=sampled(240))) == ["nothing_wrong"]
    # Samples are believed before traced barriers, unless they cannot tell barriers from kernels.
    traced = threads(*both.threads, op_barriers=(barrier("MUL_MAT", "ffn_up", 1.0, 1.4),))
    assert "too_many_threads" in rules(plain(threads=traced))
    assert "too_many_threads" not in rules(plain(threads=traced, cpu_time=sampled(60)))
    assert "too_many_threads" in rules(plain(threads=traced, cpu_time=sampled(0)))


def test_one_thread_carries_an_op() -> None:
    """SOFT_MAX: 0.5 s with 1.1 threads' worth of work; three quarters of it could be saved."""
    four = tuple(thread(tid) for tid in (1, 2, 3, 4))
    ops = (barrier("MUL_MAT", "ffn_up", 0.5, 1.9, 4), barrier("SOFT_MAX", "", 0.5, 0.55, 4))
    found = judge(plain(threads=threads(*four, online_cpus=4, op_barriers=ops)))
    verdict = the(found, "one_thread_carries_op")
    assert verdict.seconds_per_token == pytest.approx(0.375 / ROWS)
    assert verdict.evidence == ("SOFT_MAX takes 50 % of the traced time, and of its 4 threads 1.1 work",)
    assert "too_many_threads" not in [v.rule for v in found]


def test_threads_that_are_held_up_are_not_said_to_share_badly() -> None:
    """As seen on a busy machine: one of two threads had no core, and the other waited for it. The
    late one came 2.54 s after the other."""
    ops = (barrier("MUL_MAT", "attn_k", 2.6, 2.66, preempted=2.54),)
    assert rules(plain(threads=threads(thread(1), thread(2), op_barriers=ops))) == ["nothing_wrong"]
    # A tenth of the lateness is explained: for the rest, one of them works.
    little = (barrier("MUL_MAT", "attn_k", 2.6, 2.66, preempted=0.254),)
    found = rules(plain(threads=threads(thread(1), thread(2), op_barriers=little)))
    assert found == ["one_thread_carries_op"]


def test_a_slow_core_in_the_set() -> None:
    """Big and little (capacity 1024 and 512), as sysfs shows them; figures made up."""
    cores = (cz.CoreKind("fast", (0,), 1024, 2400.0), cz.CoreKind("slow", (1,), 512, 1800.0))
    both = (thread(1, cores={"fast": 2.4}), thread(2, cores={"slow": 2.4}))
    verdict = the(judge(plain(threads=threads(*both, cores=cores))), "slow_core")
    assert verdict.confidence == "low"
    assert verdict.seconds_per_token == pytest.approx(0.5 * 2.5 / ROWS)
    assert "50 % of their time on slow cores, which reach 50 % of the fastest" in verdict.evidence[0]
    traced = threads(*both, cores=cores, op_barriers=(barrier("MUL_MAT", "ffn_up", 1.0, 1.5, slow_core=0.4),))
    verdict = the(judge(plain(threads=traced)), "slow_core")
    assert verdict.confidence == "high"
    assert verdict.seconds_per_token == pytest.approx(0.4 / ROWS)
    fast = (thread(1, cores={"fast": 2.4}), thread(2, cores={"fast": 2.39, "slow": 0.01}))
    assert rules(plain(threads=threads(*fast, cores=cores))) == ["nothing_wrong"]


# ---- paging ----------------------------------------------------------------------------------


def test_paging_names_the_tensors() -> None:
    faults = cz.Faults(
        counts=(cz.FaultCount("major", "model", 300, 0.9), cz.FaultCount("minor", "model", 900)),
        tensors=(
            cz.TensorFaults("blk.3.ffn_up.weight", 3, "model", 200, 10, 0.7, "graph"),
            cz.TensorFaults("output.weight", None, "model", 100, 5, 0.2, "graph"),
            cz.TensorFaults("token_embd.weight", None, "model", 0, 5, None, "graph"),
        ),
        model=cz.ModelMemory("toy.gguf", 500_000_000, 500_000_000, 200_000_000, 0, "mmap"),
        unrecorded=0,
    )
    verdict = judge(plain(faults=faults, threads=threads(thread(), phases=(stall(fault=0.8),))))[0]
    assert (verdict.rule, verdict.confidence) == ("paging", "high")
    assert verdict.seconds_per_token == pytest.approx(0.8 / ROWS)
    assert "300 major page faults, 800 ms of waiting, 32 %" in verdict.evidence[0]
    assert (
        verdict.evidence[1]
        == "most for blk.3.ffn_up.weight (200 major, 700 ms) and output.weight (100 major, 200 ms)"
    )
    assert "200 of 500 MB of toy.gguf" in verdict.evidence[2]
    assert "more memory" in verdict.try_
    # Without scheduler records: the threads' own waiting, less sure.
    assert the(judge(plain(faults=faults)), "paging").confidence == "medium"


# ---- all together ----------------------------------------------------------------------------


def test_the_most_costly_comes_first_and_what_has_no_cost_last() -> None:
    mixed = plain(
        threads=threads(
            thread(),
            takers=(cz.Taker("stress", 77, 120, 0.3),),
            quota=cz.Quota(0.5, 0.1, 2, 25),
            phases=(stall(preempted=0.3, throttled=0.1),),
        ),
        clocks=Clocks((), (), 3),
    )
    assert rules(mixed) == ["preempted", "cpu_quota", "thermal_throttling"]


def test_every_rule_has_words_for_people_and_thresholds_are_data() -> None:
    names = set(TITLES) - {"nothing_wrong", "low_frequency"}
    assert len(RULES) == len(names)
    strict = dataclasses.replace(LIMITS, least_share=0.9)
    one = plain(threads=threads(thread(), takers=(cz.Taker("x", 7, 1, 1.0),), phases=(stall(preempted=1.0),)))
    assert rules(one) == ["preempted"]
    assert [v.rule for v in judge(one, strict)] == ["nothing_wrong"]


def test_shown_at_the_end_of_the_table() -> None:
    one = plain(
        threads=threads(thread(), takers=(cz.Taker("st\x1bress", 7, 9, 1.0),), phases=(stall(preempted=1.0),))
    )
    text = TableExporter(width=100).render(dataclasses.replace(one, verdicts=judge(one)))
    lines = text.splitlines()
    at = lines.index("why")
    assert lines[at + 1].startswith("  others take its cores  up to 24.4 ms a token")
    assert "\x1b" not in text
    assert lines[-1].lstrip().startswith("try: ")


def test_the_profiler_does_not_hide_behind_a_process_name() -> None:
    """Who watches and takes the core says so, and what to do about it."""
    takers = (cz.Taker("python3", 4242, 120, 0.8, watcher=True),)
    verdict = judge(plain(threads=threads(thread(), takers=takers, phases=(stall(preempted=0.8),))))[0]
    assert verdict.rule == "preempted"
    assert "profinferd itself" in verdict.evidence[0] and "python3" not in " ".join(verdict.evidence)
    assert "--budget" in verdict.try_


def shed(calls: int, seconds: float, unwatched: float, **stalled: float) -> cz.Threads:
    """Waits of so many of the 40 decode calls were watched, which took so long."""
    taker = cz.Taker("stress", 9, 5, sum(stalled.values()))
    waits = cz.PhaseWaits("decode", calls, calls, seconds, stalled, {}, 0.0)
    return threads(phases=(waits,), takers=(taker,), unwatched_seconds=unwatched)


def test_nothing_is_concluded_from_what_was_not_watched() -> None:
    """Waits were shed nearly all the time: a few calls say nothing of the others, and that is said."""
    window = plain().window_seconds
    few = judge(plain(threads=shed(7, 0.35, 0.9 * window, preempted=0.2)))
    assert [one.rule for one in few] == ["nothing_wrong"]
    assert "not looked at: what the scheduler did with its threads" in few[0].evidence
    faults = cz.Faults((cz.FaultCount("major", "model", 50, 1.0),), (), None, 0)
    assert "paging" in {one.rule for one in judge(plain(faults=faults))}
    part = dataclasses.replace(faults, unwatched_seconds=0.1 * window)
    (nothing,) = judge(plain(faults=part))
    assert "not looked at: page faults" in nothing.evidence


def test_calls_that_were_watched_stand_for_all() -> None:
    """10 of 40 calls lost 0.1 of their 0.5 s: all of them 0.4 of 2 s, and not 0.1."""
    window = plain().window_seconds
    found = the(judge(plain(threads=shed(10, 0.5, 0.7 * window, preempted=0.1))), "preempted")
    assert found.seconds_per_token == pytest.approx(0.4 / ROWS)
    assert found.confidence == "medium"
    # 0.5 s of 2.5 s in calls, prefill included.
    assert found.evidence[-1] == "from 20 % of the time in calls, in which waits were watched (--budget)"
    # Where next to nothing is missing, they are what they are.
    found = the(judge(plain(threads=shed(40, 2.0, 0.01 * window, preempted=0.4))), "preempted")
    assert found.confidence == "high" and "watched" not in found.evidence[-1]


def test_figures_in_words_have_no_exponent() -> None:
    """Three digits that count, also where they round up to one more, and of what is large or tiny."""
    assert [case.ms(s) for s in (0.0123456, 0.9994, 0.9996, 12.34, 1234.5, 2e-9, 0.0, None)] == [
        "12.3 ms", "999 ms", "1,000 ms", "12.3 s", "1,230 s", "0.000002 ms", "0 ms", "-",
    ]  # fmt: skip
    assert [case.giga(r, "GB/s") for r in (21.34e9, 999.6e9, 1.5e13)] == [
        "21.3 GB/s", "1,000 GB/s", "15,000 GB/s",
    ]  # fmt: skip
    assert [case.percent(s) for s in (0.336, 0.0123, 0.0996, 1e-7)] == ["34 %", "1.2 %", "10 %", "0.00001 %"]
