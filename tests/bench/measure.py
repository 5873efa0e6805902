# SPDX-License-Identifier: Apache-2.0
"""The interleaved run: nothing, a row, nothing, another row, nothing, ..."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from . import usage
from .rows import Row
from .schedule import rounds
from .stats import Estimate, estimate, slowdown
from .target import Target, Window
from .watchers import Seen, WatchFailed, watching

SETTLING = 2.6
"""Seconds of decoding before a window of a row that works in periods."""

Progress = Callable[[str], None]

MOST_FAILURES = 2


@dataclass(frozen=True, slots=True)
class Sample:
    """One window of a row against the windows without anything on both sides.

    ``decode`` and ``prefill``: speed lost, as ratios. ``extra_ns`` a decoded token. ``cpu``:
    cores that the watcher took. ``peak_kib`` None: nobody watched.
    """

    decode: float
    prefill: float
    extra_ns: float
    cpu: float | None
    peak_kib: int | None
    seen: Seen


@dataclass(slots=True)
class Results:
    """Samples by (row, threads), and what the windows without anything say of the machine."""

    samples: dict[tuple[str, int], list[Sample]] = field(default_factory=lambda: defaultdict(list))
    failed: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    token_ns: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    others: list[float] = field(default_factory=list)
    """Cores that other processes took, window by window."""
    stolen: list[float] = field(default_factory=list)
    """Cores that the hypervisor took."""
    cut: list[float] = field(default_factory=list)
    rounds: int = 0

    def gave_up(self, key: str) -> bool:
        """Whether a row failed so often that it is not tried again."""
        return len(self.failed.get(key, ())) >= MOST_FAILURES

    def ratio(self, key: str, threads: int, what: str) -> Estimate | None:
        """Of ``decode`` or ``prefill``; None without samples."""
        values = [getattr(sample, what) for sample in self.samples.get((key, threads), ())]
        return estimate(values) if values else None

    def ns_per_hit(self, key: str, threads: int) -> Estimate | None:
        """Time that a token lost, for each hit on one of its threads."""
        values = [
            s.extra_ns / (s.seen.hits / threads) for s in self.samples.get((key, threads), ()) if s.seen.hits
        ]
        return estimate(values) if values else None

    def of_row(self, key: str) -> list[Sample]:
        """All samples of a row, at any number of threads."""
        return [s for (k, _), some in sorted(self.samples.items()) if k == key for s in some]


def run(
    target: Target, rows: Sequence[Row], functions: Sequence[str], until: float, seed: int, progress: Progress
) -> Results:
    """Measure rounds until the clock (``time.monotonic``) shows ``until``; one at least.

    Ctrl-C ends it as well, and what was measured counts.
    """
    results = Results()
    alive = list(rows)
    try:
        for order in rounds(alive, seed):
            for threads, some in order:
                _chain(target, threads, some, functions, results, until, progress)
            results.rounds += 1
            if time.monotonic() >= until:
                break
    except KeyboardInterrupt:
        progress("interrupted: what was measured until now follows")
    return results


def _chain(
    target: Target,
    threads: int,
    rows: Sequence[Row],
    functions: Sequence[str],
    results: Results,
    until: float,
    progress: Progress,
) -> None:
    before = _nothing(target, threads, results)
    for row in rows:
        if results.gave_up(row.key) or (results.rounds and time.monotonic() >= until):
            continue
        try:
            during, cpu, peak, seen = _watched(target, threads, row, functions)
        except WatchFailed as error:
            results.failed[row.key].append(str(error))
            progress(f"{row.key}: {error}")
            before = _nothing(target, threads, results)
            continue
        after = _nothing(target, threads, results)
        sample = Sample(
            slowdown(before.decode.mean, during.decode.mean, after.decode.mean),
            slowdown(before.prefill, during.prefill, after.prefill),
            during.decode.mean - (before.decode.mean + after.decode.mean) / 2,
            cpu, peak, seen,
        )  # fmt: skip
        results.samples[row.key, threads].append(sample)
        left = max(0.0, until - time.monotonic())
        progress(
            f"round {results.rounds + 1}, {threads} thread{'s' if threads > 1 else ''}, {row.key}: "
            f"decode slower by {100 * sample.decode:.2f} %, prefill by {100 * sample.prefill:.2f} %; "
            f"{left / 60:.1f} min left"
        )
        before = after


def _nothing(target: Target, threads: int, results: Results) -> Window:
    target.settle(threads)
    machine, own, begun = usage.Machine.now(), usage.cpu_ns(target.pid), time.monotonic()
    window = target.window(threads)
    wall = time.monotonic() - begun
    now = usage.Machine.now()
    own_seconds = (usage.cpu_ns(target.pid) - own) / 1e9
    results.others.append(max(0.0, now.busy - machine.busy - own_seconds) / wall)
    results.stolen.append((now.stolen - machine.stolen) / wall)
    results.cut.append(window.decode.cut)
    results.token_ns[threads].append(window.decode.mean)
    return window


def _watched(
    target: Target, threads: int, row: Row, functions: Sequence[str]
) -> tuple[Window, float | None, int | None, Seen]:
    with watching(row, target.pid, functions) as watcher:
        if watcher.pid is None:
            target.settle(threads)
            return target.window(threads, row.at_least), None, None, watcher.finish()
        target.rehearse(threads)
        if row.at_least:
            # The first burst follows attaching at once: begin in the middle of a period.
            target.window(threads, SETTLING)
        before, begun = usage.cpu_ns(watcher.pid), time.monotonic()
        window = target.window(threads, row.at_least)
        wall = time.monotonic() - begun
        try:
            cpu = (usage.cpu_ns(watcher.pid) - before) / 1e9 / wall
            peak = usage.peak_kib(watcher.pid)
        except (LookupError, OSError) as error:
            watcher.finish()  # says why, if it can
            raise WatchFailed("it ended while it watched") from error
        return window, cpu, peak, watcher.finish()


def middle(values: Sequence[float]) -> float | None:
    """Median, None without values."""
    return statistics.median(values) if values else None
