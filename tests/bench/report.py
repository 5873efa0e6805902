# SPDX-License-Identifier: Apache-2.0
"""The one page that the benchmark writes, in Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .causes import Cost
from .measure import Results, Sample, middle
from .programs import Ran
from .rows import Row
from .schedule import THREADS
from .stats import Estimate
from .steady import Steady

DASH = "–"
CROSS = "†"


@dataclass(slots=True)
class Findings:
    """Everything that was measured and where; what is empty or None was not."""

    command: str
    date: str
    minutes: float
    facts: Mapping[str, str]
    seconds: float
    prefill: int
    window_tokens: Mapping[int, int]
    rows: Sequence[Row]
    absent: Mapping[str, str]
    results: Results = field(default_factory=Results)
    shares: Mapping[str, float] = field(default_factory=dict)
    functions: Mapping[str, float] = field(default_factory=dict)
    drained: float | None = None
    attach: tuple[float, float] | None = None
    attach_times: int = 0
    calibration: Mapping[str, Any] | None = None
    programs: dict[str, Sequence[Ran]] = field(default_factory=dict)
    causes: Cost | None = None
    steady: list[Steady] = field(default_factory=list)


def page(found: Findings) -> str:
    """The whole page."""
    parts = [
        "# Benchmarks",
        f"Written by `{found.command}` on {found.date} in {found.minutes:.0f} minutes; do not edit.",
        _facts(found),
        "## What watching costs",
        _table(_COST_HEAD, [_cost_row(found, row) for row in found.rows]),
        _under_cost(found),
        *_over_longer_times(found),
        "## What it gives",
        _table(_GAIN_HEAD, [_gain_row(found, row) for row in found.rows if row.kind != "nothing"]),
        "Kernels: those that run in one token, of which two that were fused count once. Time given to the "
        "right operator: overlap of the shares by operator with those of a witness preloaded into the same "
        "process.",
        "## Against the budgets",
        _table(("what", "must reach", "measured", "reached"), _budgets(found)),
        *_program_times(found),
        *_hit_costs(found),
        "## Method",
        _method(found),
    ]
    return "\n\n".join(parts) + "\n"


# ---- cells -------------------------------------------------------------------------------


def percent(found: Estimate | None) -> str:
    """``1.2 % (0.9 to 1.6)``; with a mark where the interval is only a range."""
    if found is None:
        return DASH
    mark = "" if found.reached else f" {CROSS}"
    return f"{_signed(100 * found.value)} % ({_signed(100 * found.low)} to {_signed(100 * found.high)}){mark}"


def _signed(value: float) -> str:
    text = f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}"
    return "0.00" if text == "-0.00" else text


def _number(value: float | None, digits: int = 0, unit: str = "") -> str:
    return DASH if value is None else f"{value:,.{digits}f}{unit}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


# ---- what watching costs --------------------------------------------------------------------

_COST_HEAD = (
    "watched by",
    *(f"decode, {t} thread{'s' * (t > 1)}" for t in THREADS),
    *(f"prefill, {t} thread{'s' * (t > 1)}" for t in THREADS),
    "its CPU",
    "peak memory",
    "pairs",
)


def _cost_row(found: Findings, row: Row) -> list[str]:
    if row.key in found.absent:
        return [row.title, f"absent: {found.absent[row.key]}", *[""] * (len(_COST_HEAD) - 2)]
    results, samples = found.results, found.results.of_row(row.key)
    if not samples and row.key in results.failed:
        return [row.title, f"failed: {results.failed[row.key][-1]}", *[""] * (len(_COST_HEAD) - 2)]
    ratios = [
        percent(results.ratio(row.key, threads, what))
        for what in ("decode", "prefill")
        for threads in THREADS
    ]
    counts = [str(len(results.samples.get((row.key, t), ()))) for t in THREADS]
    return [row.title, *ratios, _cpu(samples), _peak(samples), " + ".join(counts)]


def _cpu(samples: Sequence[Sample]) -> str:
    cpu = [s.cpu for s in samples if s.cpu is not None]
    return DASH if not cpu else f"{100 * sum(cpu) / len(cpu):.2f} %"


def _peak(samples: Sequence[Sample]) -> str:
    peaks = [s.peak_kib for s in samples if s.peak_kib is not None]
    return DASH if not peaks else f"{max(peaks) / 1024:.0f} MiB"


def _under_cost(found: Findings) -> str:
    text = (
        "Speed lost while watched (negative: faster), with the interval that holds it with 95 %. What the "
        "first row shows is noise: differences of its size mean nothing. CPU in percent of one core, mean "
        "over the windows; peak memory is VmHWM."
    )
    all_samples = [
        found.results.ratio(row.key, threads, "decode") for row in found.rows for threads in THREADS
    ]
    if any(one is not None and not one.reached for one in all_samples):
        text += f" {CROSS} too few pairs for 95 %: the range of all."
    return text


def _over_longer_times(found: Findings) -> list[str]:
    if not found.steady:
        return []
    titles = {row.key: row.title for row in found.rows}
    rows = [
        [
            titles[one.row],
            str(one.threads),
            f"{one.seconds:.0f} s",
            f"{100 * one.cpu:.2f} %",
            f"{one.peak_kib / 1024:.0f} MiB",
            _number(one.estimated and 100 * one.estimated, 2, " %"),
            percent(one.measured),
        ]
        for one in found.steady
    ]
    head = (
        "watched by",
        "threads",
        "for",
        "its CPU",
        "peak memory",
        "slowdown, estimated",
        "measured by itself",
    )
    return [
        "## Over longer times",
        _table(head, rows),
        "Watched without a pause, after some seconds in which everything is met for the first time. The two "
        "columns on the right are what the profiler says of itself: its estimate, and what it measured on "
        "the tokens inside its bursts against their neighbours outside, which has the operator probes in "
        "it and not the token and graph probes, with the interval that holds it with 95 %.",
    ]


# ---- what it gives -----------------------------------------------------------------------------

_GAIN_HEAD = (
    "watched by",
    "hits a token (1 thread)",
    "hits a kernel and thread",
    *(f"ns a hit, {t} thread{'s' * (t > 1)}" for t in THREADS),
    "lost records",
    "time given to the right operator",
)


def _gain_row(found: Findings, row: Row) -> list[str]:
    results, samples = found.results, found.results.of_row(row.key)
    if not samples:
        return [row.title, *[DASH] * (len(_GAIN_HEAD) - 1)]
    hits = {t: _hits(found, row, t) for t in THREADS}
    kernels = _kernels(results)
    each = [h / kernels / t for t, h in hits.items() if h is not None and kernels and row.sees_ops]
    lost = [s.seen.lost for s in samples if s.seen.lost is not None]
    share = found.shares.get(row.key)
    return [
        row.title,
        _number(hits[1]),
        " / ".join(f"{e:.2f}" for e in each) or DASH,
        *(_ns(found, row, t, hits[t]) for t in THREADS),
        _number(sum(lost)) if lost else DASH,
        DASH if share is None else f"{100 * share:.1f} %",
    ]


def _hits(found: Findings, row: Row, threads: int) -> float | None:
    """Hits of probes a call, on all threads."""
    if row.kind == "bpftrace":
        # Each entry has its return; every thread calls the functions.
        return 2 * sum(found.functions.values()) * threads if found.functions else None
    samples = found.results.samples.get((row.key, threads), [])
    return middle([s.seen.hits for s in samples if s.seen.hits is not None])


def _kernels(results: Results) -> int | None:
    """Executed in one token: as the row says that misses none."""
    return max((s.seen.kernels or 0 for some in results.samples.values() for s in some), default=0) or None


def _ns(found: Findings, row: Row, threads: int, hits: float | None) -> str:
    """Cost of a hit, where the slowdown is more than noise."""
    ratio = found.results.ratio(row.key, threads, "decode")
    samples = found.results.samples.get((row.key, threads), [])
    if not hits or ratio is None or ratio.low <= 0:
        return DASH
    lost = middle([s.extra_ns for s in samples])
    return DASH if lost is None else _number(lost / (hits / threads))


# ---- budgets -------------------------------------------------------------------------------------


def _budgets(found: Findings) -> list[list[str]]:
    results = found.results
    lines = []
    for key, what, limit in (("default", "default", 0.005), ("all", "`--ops all`", 0.02)):
        for threads in THREADS:
            ratio = results.ratio(key, threads, "decode")
            name = f"decode slowdown, {what}, {threads} thread{'s' * (threads > 1)}"
            lines.append([name, f"≤ {100 * limit:g} %", percent(ratio), verdict(ratio, limit)])
    for threads in THREADS:
        ours, theirs = (results.ratio(key, threads, "decode") for key in ("all", "bpftrace"))
        name = f"`--ops all` against bpftrace, {threads} thread{'s' * (threads > 1)}"
        lines.append([name, "≤ 1/8", *_against(ours, theirs)])
    for threads in THREADS:
        ratio = results.ratio("default", threads, "prefill")
        name = f"prefill slowdown, default, {threads} thread{'s' * (threads > 1)}"
        lines.append([name, "none measurable", percent(ratio), verdict(ratio, 0.0)])
    attach = found.attach and found.attach[0]
    lines.append(_limit("attach, complete", attach, 0.3, 1e3, "ms"))
    for key, most in (("default", 0.01), ("all", 0.01), ("record", 0.03)):
        long = [one.cpu for one in found.steady if one.row == key]
        name, cpu = f"profiler's CPU, {key}, over longer times", max(long, default=None)
        lines.append(_limit(name, cpu, most, 100, "% of a core", digits=2))
    peaks = [s.peak_kib / 1024 for s in results.of_row("default") if s.peak_kib is not None]
    peaks += [one.peak_kib / 1024 for one in found.steady if one.row == "default"]
    lines.append(_limit("profiler's memory, default", max(peaks, default=None), 64.0, 1, "MiB"))
    spent = found.causes.share if found.causes else None
    what = "scheduler and page faults: their programs"
    lines.append(_limit(what, spent, 0.003, 100, "% of a core", digits=3))
    rate = found.drained
    lines.append(
        [
            "ring drained and decoded",
            "≥ 5 M records/s",
            _number(rate and rate / 1e6, 1, " M records/s"),
            DASH if rate is None else _yes(rate >= 5e6),
        ]
    )
    return lines


def verdict(found: Estimate | None, limit: float) -> str:
    """yes or no only where the whole interval says so, and is one of 95 %."""
    if found is None:
        return DASH
    if not found.reached:
        return "undecided"
    if found.high <= limit or (limit <= 0 and found.low <= limit):
        return "yes"
    return "no" if found.low > limit else "undecided"


def _against(ours: Estimate | None, theirs: Estimate | None) -> list[str]:
    if ours is None or theirs is None or theirs.value <= 0:
        return [DASH, DASH]
    ratio = f"1/{theirs.value / ours.value:.1f}" if ours.value > 0 else "not measurable"
    # bpftrace is measured in few rounds, and costs so much that their range will do.
    if ours.reached and ours.high <= theirs.low / 8:
        return [ratio, "yes"]
    return [ratio, "no" if ours.reached and ours.low > theirs.high / 8 else "undecided"]


def _limit(
    what: str, value: float | None, most: float, scale: float, unit: str, digits: int = 0
) -> list[str]:
    reached = DASH if value is None else _yes(value <= most)
    shown = DASH if value is None else f"{value * scale:,.{digits}f} {unit}"
    return [what, f"≤ {most * scale:g} {unit}", shown, reached]


def _yes(reached: bool) -> str:
    return "yes" if reached else "no"


# ---- facts and method ------------------------------------------------------------------------------


def _hit_costs(found: Findings) -> list[str]:
    if not found.calibration:
        return []
    rows = []
    for hit in found.calibration["ns_per_hit"]:
        cost = hit["cost"]
        name = " ".join(part for part in (hit["kind"], hit["mode"]) if part)
        rows.append([name, hit["site"], f"{cost['ns']:,.0f}", f"{cost['low']:,.0f} to {cost['high']:,.0f}"])
    return [
        "## What a hit costs, by calibration",
        _table(("hit", "instruction", "ns", "95 % interval"), rows),
        f"`profinferd calibrate`, attached by {found.calibration['method']}, on a process of ours. Caches of "
        "an engine at work are colder: compare with the table above.",
    ]


#: How names of the programs in probes/sched.bpf.c, faults.bpf.c and barrier.bpf.c begin.
_CAUSES = ("on_switch", "on_wakeup", "on_exit", "on_migrate", "on_minor", "on_major", "on_arrive")


def _program_times(found: Findings) -> list[str]:
    """What the kernel says that our programs took: no noise, and not all there is."""
    if not found.programs:
        return []
    rows = [
        [mode, ran.name, f"{ran.runs_a_token:,.2f}", f"{ran.ns:,.0f}", f"{100 * ran.share:.4f} %"]
        for mode, some in found.programs.items()
        for ran in some
    ]
    sums = []
    for mode, some in found.programs.items():
        causes = sum(ran.share for ran in some if ran.name.startswith(_CAUSES))
        sums.append(
            f"{mode}: {100 * sum(ran.share for ran in some):.3f} %, of which scheduler, page faults and "
            f"barriers {100 * causes:.3f} %"
        )
    return [
        "## What the programs take",
        _table(("watched with", "program", "runs a token", "ns a run", "of the time"), rows),
        "By the kernel's own clock around each run (`kernel.bpf_stats_enabled`), one thread decoding: "
        + "; ".join(sums)
        + ". Traps, tracepoints and our own process come on top.",
    ]


def _facts(found: Findings) -> str:
    facts = dict(found.facts)
    results = found.results
    others, stolen, cut = middle(results.others), middle(results.stolen), results.cut
    if others is not None and stolen is not None:
        facts["while it ran"] = (
            f"others took {100 * others:.1f} % of a core (median of the windows without anything), the "
            f"hypervisor {100 * stolen:.1f} %; {100 * sum(cut) / len(cut):.1f} % of the tokens were cut (see "
            "below)"
        )
    for threads, times in sorted(results.token_ns.items()):
        typical = middle(times)
        if typical:
            facts[f"speed unwatched, {threads} thread{'s' * (threads > 1)}"] = f"{1e9 / typical:.1f} tokens/s"
    if found.attach:
        attach, start = found.attach
        facts["attach"] = (
            f"{1e3 * attach:.0f} ms from the first look until all probes are in place, {1e3 * start:.0f} ms "
            f"from the start of the program (medians of {found.attach_times}, while the target decodes)"
        )
    return "\n".join(f"* {name}: {value}" for name, value in facts.items())


def _method(found: Findings) -> str:
    tokens = " and ".join(f"{n} ({t} thread{'s' * (t > 1)})" for t, n in sorted(found.window_tokens.items()))
    return "\n".join(
        (
            f"* A window: an empty context, a prompt of {found.prefill} tokens, then {tokens} tokens decoded "
            "one by one, so every window has the same KV lengths; of the default, several times that, for "
            "its bursts come seconds apart. The engine reads the monotonic clock after each token; no "
            "request and no sampling lie between.",
            "* Windows alternate: nothing, a row, nothing, another row, … in an order drawn anew each round. "
            "A row is compared with the mean of the windows before and after it. After attaching, a prompt "
            "and a few tokens are discarded.",
            "* A window's value is the mean over its tokens, each cut to 1.5 times the window's median: "
            "longer ones are other processes' doing. The table shows the Hodges-Lehmann median of the "
            "pairs and Wilcoxon's interval, which assume no distribution.",
            "* bpftrace attaches to those functions that this model calls; to the others it would attach for "
            f"nothing, and take minutes to detach. {results_line(found.results)}",
        )
    )


def results_line(results: Results) -> str:
    """How much was measured."""
    pairs = sum(len(some) for some in results.samples.values())
    return f"{pairs} pairs in {results.rounds} whole rounds."
