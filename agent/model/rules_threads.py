# SPDX-License-Identifier: Apache-2.0
"""Rules about threads: who took their core, how many there are, and how they wait for each other."""

from __future__ import annotations

from .case import Case, counted, listed, ms, percent
from .causes import OpBarrier, Taker
from .verdictdata import Confidence, Verdict

_FEWER = "fewer than {} threads for decode (--threads), more for prefill (--threads-batch)"


def preempted(case: Case) -> Verdict | None:
    """Others ran on the cores that the target's threads wanted."""
    threads = case.snapshot.threads
    if threads is None:
        return None
    takers = sorted((t for t in threads.takers if not t.own), key=lambda t: -t.seconds)
    theirs = sum(t.seconds for t in takers)
    if not theirs:
        return None
    # Waiting for a core after a wake-up is theirs too, in the share that they took.
    cost = case.stalled("preempted", "wakeup") * _share_of_others(case)
    if case.share(cost) < case.limits.least_share:
        return None
    first = takers[0]
    evidence = [
        f"{_who(first)} (pid {first.pid}) took the core {counted(first.preemptions, 'time')}, and compute"
        f" threads waited {ms(first.seconds)} for it",
        f"calls stood still for {ms(cost)}, {percent(case.share(cost))} of their time",
    ]
    if len(takers) > 1 and takers[1].seconds > 0.1 * theirs:
        evidence.append(f"also {listed(_named(t) for t in takers[1:4])}")
    pinned = [t for t in case.workers if t.cpus is not None and len(t.cpus) < threads.online_cpus]
    if pinned:
        evidence.append(f"{len(pinned)} of {len(case.workers)} compute threads may not use every CPU")
    sure = first.seconds >= case.limits.taker_share * theirs
    return Verdict(
        "preempted",
        "high" if sure else "medium",
        case.per_token(cost),
        tuple(evidence),
        "watch less: a smaller --budget, --ops off, or no flame graph; or leave profinferd a core"
        if first.watcher
        else f"move {first.comm} to other cores or lower its priority, or give the engine fewer threads",
    )


def _named(taker: Taker) -> str:
    return f"{_who(taker)} (pid {taker.pid}, {ms(taker.seconds)})"


def _who(taker: Taker) -> str:
    return "profinferd itself" if taker.watcher else taker.comm


def cpu_quota(case: Case) -> Verdict | None:
    """The control group's quota was used up."""
    threads = case.snapshot.threads
    if threads is None or threads.quota is None or threads.quota.cores is None:
        return None
    quota, cores, cost = threads.quota, threads.quota.cores, case.stalled("throttled")
    seen = cost or (quota.throttled_seconds or 0.0)
    if case.share(seen) < case.limits.least_share:
        return None
    evidence = [
        f"its control group may use {cores:g} cores for {counted(len(case.workers), 'compute thread')}"
    ]
    if quota.throttled_seconds is not None:
        evidence.append(
            f"the group was stopped for {ms(quota.throttled_seconds)}"
            + (f" in {quota.throttled_periods} of {quota.periods} periods" if quota.periods else "")
            + ", all its CPUs together"
        )
    if cost:
        evidence.append(f"calls stood still for {ms(cost)}, {percent(case.share(cost))} of their time")
    return Verdict(
        "cpu_quota",
        "high" if cost else "medium",
        case.per_token(min(seen, case.call_seconds)),
        tuple(evidence),
        f"a higher CPU quota (cpu.max), or at most {counted(max(1, int(cores)), 'thread')}",
    )


def low_priority(case: Case) -> Verdict | None:
    """The target waits because it asked to: idle or batch policy, or a nice value."""
    threads = case.snapshot.threads
    # A nice value means nothing to real-time policies.
    low = [
        t
        for t in case.workers
        if t.policy in ("idle", "batch") or (t.policy in ("other", None) and (t.nice or 0) > 0)
    ]
    cost = case.stalled("preempted", "wakeup") * _share_of_others(case)
    if threads is None or not low or case.share(cost) < case.limits.least_share:
        return None
    how = sorted({t.policy if t.policy in ("idle", "batch") else f"nice {t.nice}" for t in low})
    return Verdict(
        "low_priority",
        "high" if any(t.policy == "idle" for t in low) else "medium",
        case.per_token(cost),
        (
            f"{len(low)} of {len(case.workers)} compute threads run with {listed(how)}",
            f"calls stood still for {ms(cost)} while others ran, {percent(case.share(cost))} of their time",
        ),
        "the normal scheduling policy and nice 0",
    )


def _cpus_allowed(case: Case) -> int:
    """CPUs that the compute threads may use together."""
    online = case.snapshot.threads.online_cpus if case.snapshot.threads is not None else 0
    allowed: set[int] = set()
    for thread in case.workers:
        allowed |= set(thread.cpus if thread.cpus is not None else range(online))
    return min(len(allowed), online)


def _share_of_others(case: Case) -> float:
    """Of the cores that were taken, by time, what processes other than the target itself took. Where
    nothing was taken threads waited after a wake-up: for each other if they are too many."""
    takers = case.snapshot.threads.takers if case.snapshot.threads is not None else ()
    lost = sum(t.seconds for t in takers)
    if not lost:
        return 0.0 if len(case.workers) > _cpus_allowed(case) else 1.0
    return sum(t.seconds for t in takers if not t.own) / lost


def more_threads_than_cores(case: Case) -> Verdict | None:
    """More compute threads than CPUs that they may use."""
    threads, cpus = case.snapshot.threads, _cpus_allowed(case)
    if threads is None or len(case.workers) < 2 or len(case.workers) <= cpus:
        return None
    cost = case.stalled("preempted", "wakeup", "yielded") * (1 - _share_of_others(case))
    if case.share(cost) < case.limits.least_share:
        return None
    return Verdict(
        "more_threads_than_cores",
        "high",
        case.per_token(cost),
        (
            f"{len(case.workers)} compute threads share {counted(cpus, 'CPU')}",
            f"they took each other's core, and calls stood still for {ms(cost)},"
            f" {percent(case.share(cost))} of their time",
        ),
        f"--threads {cpus}",
    )


def too_many_threads(case: Case) -> Verdict | None:
    """Threads that wait for each other longer than a further thread is worth.

    Samples of CPU time tell best: probes make operators longer, and barriers not. Without them,
    traced barriers do.
    """
    cpu = case.snapshot.cpu_time
    samples = {part.part: part.samples for part in cpu.parts} if cpu is not None else {}
    if cpu is not None and samples.get("barrier"):
        return _sampled_barriers(case, samples["barrier"], samples.get("kernels", 0), cpu.hertz)
    spread = [op for op in _barriers(case) if not _carried(case, op)]
    wall = sum(op.wall_seconds * op.threads for op in spread)
    idle = sum(_unexplained(op) for op in spread)
    if not wall:
        return None
    threads = max(op.threads for op in spread)
    cores = case.snapshot.threads.online_cpus if case.snapshot.threads is not None else threads
    share = idle / wall
    if threads < 2 or threads > cores or share < case.limits.barrier_share:
        return None
    # With one thread less, what is left of the wall time grows by its share of the work.
    cost = share * sum(op.wall_seconds for op in spread) * _scale(case, spread)
    if case.share(cost) < case.limits.least_share:
        return None
    confidence: Confidence = "medium" if share < 2 * case.limits.barrier_share else "high"
    small = sorted(spread, key=lambda op: -op.idle_seconds)[:3]
    return Verdict(
        "too_many_threads",
        confidence,
        case.per_token(cost),
        (
            f"{threads} threads wait for each other {percent(share)} of their time",
            f"most in {listed(f'{op.op} {op.role}'.strip() for op in small)}",
        ),
        _FEWER.format(threads),
    )


def _sampled_barriers(case: Case, barrier: int, kernels: int, hertz: int) -> Verdict | None:
    """The same by samples of CPU time: of all that threads spent in kernels and at barriers."""
    threads = len(case.workers)
    cores = case.snapshot.threads.online_cpus if case.snapshot.threads is not None else 0
    whole = barrier + kernels
    if not 2 <= threads <= cores or whole < case.limits.barrier_samples:
        return None
    # Between graphs workers wait for the next one, which is nobody's fault. While one thread is held
    # up the others wait for it: that has verdicts of its own.
    between = sum(max(t.run_seconds - t.work_run_seconds, 0.0) for t in case.workers if not t.leader)
    held_up = case.stalled("preempted", "yielded", "throttled", "wakeup", "fault", "io") * (threads - 1)
    idle, computing = barrier / hertz - between - held_up, whole / hertz - between
    share = idle / computing if 0 < idle < computing else 0.0
    cost = share * case.call_seconds
    if share < case.limits.barrier_share or case.share(cost) < case.limits.least_share:
        return None
    return Verdict(
        "too_many_threads",
        "medium" if share < 2 * case.limits.barrier_share else "high",
        case.per_token(cost),
        (
            f"{threads} threads wait for each other {percent(share)} of their time, by"
            f" {barrier:,} of {whole:,} samples of CPU time",
        ),
        _FEWER.format(threads),
    )


def one_thread(case: Case) -> Verdict | None:
    """An operator that one thread computes while the others wait."""
    barriers = _barriers(case)
    wall = sum(op.wall_seconds for op in barriers)
    carried = [op for op in barriers if _carried(case, op)]
    carried = [op for op in carried if op.wall_seconds >= case.limits.one_thread_op_share * wall]
    if not carried:
        return None
    lost = sum(op.wall_seconds * (1 - 1 / op.threads) for op in carried) * _scale(case, barriers)
    if case.share(lost) < case.limits.least_share:
        return None
    worst = max(carried, key=lambda op: op.wall_seconds)
    return Verdict(
        "one_thread_carries_op",
        "high" if worst.ops >= case.limits.kv_count else "medium",
        case.per_token(lost),
        tuple(
            f"{op.op} {op.role}".strip() + f" takes {percent(op.wall_seconds / wall)} of the traced time,"
            f" and of its {op.threads} threads {op.work_seconds / op.wall_seconds:.1f} work"
            for op in sorted(carried, key=lambda op: -op.wall_seconds)[:3]
        ),
        "a build or a type of weights with a parallel kernel for it; more threads do not help",
    )


def slow_core(case: Case) -> Verdict | None:
    """Compute threads on slower cores, for which the faster ones wait."""
    threads = case.snapshot.threads
    if threads is None or len(threads.cores) < 2:
        return None
    speeds = {kind.name: kind.capacity or kind.max_mhz for kind in threads.cores}
    if any(speed is None for speed in speeds.values()):
        return None
    fastest = max(speed for speed in speeds.values() if speed is not None)
    spent: dict[str, float] = {}
    for thread in case.workers:
        for kind, seconds in thread.cores.items():
            spent[kind] = spent.get(kind, 0.0) + seconds
    ran = sum(spent.values())
    slow = {kind: s for kind, s in spent.items() if s and (speeds.get(kind) or fastest) < fastest}
    if not ran or sum(slow.values()) < case.limits.slow_core_share * ran:
        return None
    slowest = min(slow, key=lambda kind: speeds.get(kind) or fastest)
    ratio = (speeds[slowest] or fastest) / fastest
    waited = sum(op.late.get("slow_core", 0.0) for op in _barriers(case)) * _scale(case, _barriers(case))
    mixed = len([kind for kind, s in spent.items() if s > case.limits.slow_core_share * ran]) > 1
    evidence = [
        f"compute threads ran {percent(sum(slow.values()) / ran)} of their time on"
        f" {listed(sorted(slow))} cores, which reach {percent(ratio)} of the fastest"
    ]
    if waited:
        evidence.append(f"the others waited {ms(waited)} for threads on them")
    if mixed:
        evidence.append("every operator ends when its slowest thread does")
    return Verdict(
        "slow_core",
        "high" if waited else "low",
        case.per_token(waited or (1 - ratio) * case.call_seconds),
        tuple(evidence),
        "keep it on the fast cores (taskset, or --cpu-mask), with as many threads as there are of them",
    )


# ---- barriers --------------------------------------------------------------------------------


def _barriers(case: Case) -> tuple[OpBarrier, ...]:
    threads = case.snapshot.threads
    found = () if threads is None or threads.op_barriers is None else threads.op_barriers
    return tuple(op for op in found if op.wall_seconds > 0 and op.threads > 1)


def _held_up(op: OpBarrier) -> float:
    """Seconds that ops lasted longer because a thread had no core, no page or a slow core: that has
    verdicts of its own."""
    late = sum(seconds for why, seconds in op.late.items() if why in ("preempted", "paging", "slow_core"))
    return min(late, op.wall_seconds)


def _unexplained(op: OpBarrier) -> float:
    """Waiting at barriers that is not for a thread held up."""
    return max(op.idle_seconds - _held_up(op) * (op.threads - 1), 0.0)


def _carried(case: Case, op: OpBarrier) -> bool:
    wall = op.wall_seconds - _held_up(op)
    if wall < case.limits.undisturbed_share * op.wall_seconds:
        return False  # too little is left to tell
    return op.threads * wall - _unexplained(op) < case.limits.one_thread_work * wall


def _scale(case: Case, barriers: tuple[OpBarrier, ...] | list[OpBarrier]) -> float:
    """From the traced ops to all of the window."""
    threads = case.snapshot.threads
    wall = sum(op.wall_seconds for op in (threads.op_barriers or ())) if threads is not None else 0.0
    whole = sum(op.seconds for op in case.snapshot.ops)
    return max(1.0, whole / wall) if barriers and wall else 1.0
