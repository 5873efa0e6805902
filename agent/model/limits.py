# SPDX-License-Identifier: Apache-2.0
"""The thresholds of verdicts, all in one place, as data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Shares are of the time inside calls unless said otherwise."""

    least_tokens: int = 8
    """Decode tokens below which nothing is said to be right."""
    least_share: float = 0.02
    """A cause that costs less is not worth a verdict."""
    unwatched_share: float = 0.02
    """Of the window, from which on it matters that waits or page faults were not watched."""
    watched_calls: int = 8
    """Of a phase, at least, from which it is told what the others waited for that were not watched."""

    bandwidth_share: float = 0.6
    """Of the machine's reading rate, from which on decode is held back by memory."""
    bandwidth_high: float = 0.75
    bandwidth_most: float = 1.25
    """More than that of it cannot come from memory: weights are in a cache."""
    compute_share: float = 0.3
    """Of the machine's multiply-adds, from which on prefill is held back by arithmetic. An
    engine's best kernels reach about two thirds."""
    compute_high: float = 0.5
    compute_over_memory: float = 2.0
    """How much further the arithmetic has to be than the memory."""
    disturbed_share: float = 0.2
    """Above this share of waiting, rates say nothing about the machine's limits."""

    taker_share: float = 0.5
    """Of what was taken, from which on one taker is named as the cause with high confidence."""
    worker_share: float = 0.05
    """A thread that ran less than this share of the busiest one is not computing."""
    barrier_share: float = 0.25
    """Of all threads' time, from which on waiting for each other is too much."""
    barrier_samples: int = 200
    """Samples of CPU time in kernels and barriers, at least, that say how much that is."""
    one_thread_work: float = 1.3
    """Threads' worth of work in an op, below which one thread is said to carry it."""
    undisturbed_share: float = 0.5
    """Of an op's time, below which nothing is said of how its threads share it."""
    one_thread_op_share: float = 0.05
    """Of the traced ops' time."""
    slow_core_share: float = 0.05
    """Of running time on slower cores."""
    kv_growth: float = 0.2
    """Growth of a token's time over the window's lengths of the cache."""
    kv_count: int = 8
    """Graphs of one length, at least, that are compared."""
    frequency_share: float = 0.85
    """Of a core's top frequency."""
    frequency_samples: int = 3


LIMITS = Limits()
