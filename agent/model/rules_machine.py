# SPDX-License-Identifier: Apache-2.0
"""Rules about what the machine can do: memory, arithmetic, frequency, and attention's growth."""

from __future__ import annotations

from .case import Case, counted, giga, ms, percent
from .clockdata import CoreClock
from .snapshot import Graph
from .verdictdata import Confidence, Verdict


def memory_bound(case: Case) -> Verdict | None:
    """Decode that reads its weights about as fast as memory can give them."""
    limits, share, peak = case.limits, case.memory_share, case.peak
    if share is None or peak is None or peak.read_bytes_per_second is None or case.disturbed:
        return None
    if not limits.bandwidth_share <= share <= limits.bandwidth_most:
        return None
    ops = case.ops("decode")
    moved, seconds = sum(op.bytes or 0 for op in ops), sum(op.seconds for op in ops)
    per_graph = moved / max(sum(g.count for g in case.graphs("decode")), 1)
    cache = case.snapshot.peaks.cache_bytes if case.snapshot.peaks is not None else None
    if cache is not None and per_graph < cache:
        return None  # the weights of a token fit into the caches
    arithmetic = case.compute_floor("decode")
    if arithmetic is not None and arithmetic > share:
        return None
    threads = counted(peak.threads, "thread")
    evidence = [
        f"decode moves {giga(moved / seconds, 'GB/s')}, {percent(share)} of the"
        f" {giga(peak.read_bytes_per_second, 'GB/s')} that {threads} can read here",
        f"each token reads {per_graph / 1e6:,.0f} MB of weights and cache, which at that rate takes"
        f" {ms(per_graph / peak.read_bytes_per_second)} at least",
    ]
    if arithmetic is not None:
        evidence.append(f"its arithmetic alone would take {percent(arithmetic)} of the time")
    confidence: Confidence = "high" if share >= limits.bandwidth_high else "medium"
    return Verdict(
        "memory_bandwidth_bound_decode",
        confidence,
        # What is computed for nothing: with the bytes gone, their time at the peak is.
        case.per_token(min(share, 1.0) * seconds),
        tuple(evidence),
        "weights of fewer bits, or several sequences in one batch; more threads do not help",
    )


def compute_bound(case: Case) -> Verdict | None:
    """Prefill that computes about as fast as the cores can."""
    limits, share, peak = case.limits, case.compute_share, case.peak
    if share is None or peak is None or share < limits.compute_share or case.disturbed:
        return None
    memory = case.memory_floor("prefill")
    if memory is not None and memory * limits.compute_over_memory > share:
        return None
    ops = case.ops("prefill")
    operations, seconds = sum(op.flops or 0 for op in ops), sum(op.seconds for op in ops)
    threads = counted(peak.threads, "thread")
    evidence = [
        f"prefill computes {giga(operations / seconds, 'GFLOP/s')}; what its types of weights allow"
        f" {threads} here at most would take {percent(share)} of the time",
    ]
    if memory is not None:
        evidence.append(f"moving its bytes would take {percent(memory)} of the time")
    return Verdict(
        "compute_bound_prefill",
        "high" if share >= limits.compute_high else "medium",
        case.per_token(min(share, 1.0) * seconds),
        tuple(evidence),
        "more or faster cores, or an accelerator for prefill; a cached prefix where prompts begin alike",
    )


def kv_growth(case: Case) -> Verdict | None:
    """Decode that slows down as the cache that attention reads grows."""
    limits = case.limits
    at: dict[int, list[Graph]] = {}
    for graph in case.graphs("decode"):
        if graph.kv_length is not None and graph.tokens is not None:
            at.setdefault(graph.kv_length, []).append(graph)
    means = {
        length: (
            sum(g.seconds for g in graphs) / tokens,
            tokens,
        )
        for length, graphs in at.items()
        if sum(g.count for g in graphs) >= limits.kv_count
        and (tokens := sum(g.count * (g.tokens or 0) for g in graphs)) > 0
    }
    if len(means) < 2 or case.disturbed:
        return None
    first, last = min(means), max(means)
    base, end = means[first][0], means[last][0]
    attention = [op for op in case.ops("decode") if op.op == "FLASH_ATTN_EXT" or op.role.startswith("kv")]
    seconds = sum(op.seconds for op in case.ops("decode"))
    share = sum(op.seconds for op in attention) / seconds if seconds else 0.0
    growth = end / base - 1
    if growth < limits.kv_growth or not _rises(means) or share < growth / (1 + growth) / 2:
        return None
    lost = sum((mean - base) * tokens for mean, tokens in means.values() if mean > base)
    return Verdict(
        "kv_growth_slows_attention",
        "high" if len(means) > 2 else "medium",
        case.per_token(lost),
        (
            f"a token took {ms(base)} with a cache of {first} and {ms(end)} with one of {last},"
            f" {percent(growth)} more",
            f"attention takes {percent(share)} of decode",
        ),
        "a shorter context, a cache of a smaller type (--cache-type-k and -v), or flash attention",
    )


def _rises(means: dict[int, tuple[float, int]]) -> bool:
    """Whether longer caches took longer, by their rank: most pairs have to agree."""
    ordered = [means[length][0] for length in sorted(means)]
    pairs = [(a, b) for i, a in enumerate(ordered) for b in ordered[i + 1 :]]
    return sum(b > a for a, b in pairs) >= 0.8 * len(pairs)


def frequency(case: Case) -> Verdict | None:
    """Cores that run slower than they can, because of heat or because somebody set it so."""
    clocks, limits = case.snapshot.clocks, case.limits
    if clocks is None or not case.tokens:
        return None
    slow = [c for c in clocks.cores if _slow(c, limits.frequency_share, limits.frequency_samples)]
    heat = bool(clocks.throttle_events) or bool(clocks.cooling)
    if not slow and not heat:
        return None
    evidence = []
    if slow:
        worst = min(slow, key=lambda c: c.mean_mhz / c.max_mhz)
        evidence.append(
            f"CPU {worst.cpu} ran at {worst.mean_mhz:,.0f} MHz of {worst.max_mhz:,.0f}"
            + (f", {len(slow)} CPUs of {len(clocks.cores)} ran below their top" if len(slow) > 1 else "")
        )
        if worst.limit_mhz is not None and worst.limit_mhz < worst.max_mhz:
            evidence.append(f"it is allowed {worst.limit_mhz:,.0f} MHz")
    if clocks.throttle_events:
        evidence.append(f"the processor slowed itself for heat {counted(clocks.throttle_events, 'time')}")
    evidence += [f"{c.name} cools at step {c.state} of {c.most}" for c in clocks.cooling]
    ratio = min((c.mean_mhz / c.max_mhz for c in slow), default=None)
    return Verdict(
        "thermal_throttling" if heat else "low_frequency",
        "high" if heat and slow else "medium",
        # At most: what waits for memory does not get faster with the core.
        None if ratio is None else case.per_token((1 - ratio) * case.call_seconds),
        tuple(evidence),
        "better cooling, or fewer threads"
        if heat
        else "the performance governor, or a higher scaling_max_freq",
    )


def _slow(core: CoreClock, share: float, samples: int) -> bool:
    return core.samples >= samples and core.mean_mhz < share * core.max_mhz
