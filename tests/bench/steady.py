# SPDX-License-Identifier: Apache-2.0
"""What a watcher takes that has been there for a while: its CPU and memory, and what it says itself of
the slowdown. Windows are too short for that: a burst comes every five seconds, and whoever watches a
board watches it all night."""

from __future__ import annotations

import time
from dataclasses import dataclass

from . import usage
from .rows import Row
from .stats import Estimate
from .target import Target
from .watchers import watching

SETTLING = 5.0
"""Seconds in which graphs are met for the first time and the first burst is over."""


@dataclass(frozen=True, slots=True)
class Steady:
    """``cpu``: cores over ``seconds``. ``estimated``: slowdown as its budget has it, ``measured``: op
    probes alone, of tokens inside bursts against neighbours outside; None where it does not say."""

    row: str
    threads: int
    seconds: float
    cpu: float
    peak_kib: int
    estimated: float | None
    measured: Estimate | None


def steady(target: Target, row: Row, threads: int, seconds: float) -> Steady:
    """While the target decodes without a pause. Raises WatchFailed."""
    with target.busy(threads), watching(row, target.pid, ()) as watcher:
        if watcher.pid is None:
            raise ValueError("nobody watches")
        time.sleep(SETTLING)
        before, begun = usage.cpu_ns(watcher.pid), time.monotonic()
        time.sleep(seconds)
        spent, wall = usage.cpu_ns(watcher.pid) - before, time.monotonic() - begun
        peak = usage.peak_kib(watcher.pid)
        seen = watcher.finish()
    return Steady(row.key, threads, wall, spent / 1e9 / wall, peak, seen.estimated, seen.measured)
