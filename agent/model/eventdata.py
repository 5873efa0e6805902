# SPDX-License-Identifier: Apache-2.0
"""Performance events (hardware counters) of a target, and where its CPU time went. Figures only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EventTotal:
    """One event over all threads.

    ``value``: scaled for the time it did not count, only growing; None with a ``reason`` where
    this machine cannot count it. ``running_ratio``: share of the threads' time in which it
    really counted (below 1: events took turns).
    """

    event: str
    value: int | None
    running_ratio: float | None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class OpEvents:
    """Events of one kind of op, as in ``Op``; ``values`` by event, of all threads together.

    ``role`` where a weight or a cache names it, else "": what an op of a graph continues is not
    looked up. ``calls`` of all threads.
    """

    op: str
    dtype: str
    role: str
    kernel: str
    backend: str
    phase: str
    calls: int
    values: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Events:
    """``unattributed`` by event: counted, and in no op. ``ipc``, ``stall_ratio`` (cycles stalled
    on the backend by all cycles) and ``dram_bytes`` (cache misses times a line) are None where
    an event they need is absent."""

    events: tuple[EventTotal, ...]
    ops: tuple[OpEvents, ...]
    unattributed: Mapping[str, int]
    threads: int
    ipc: float | None = None
    stall_ratio: float | None = None
    dram_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class CpuPart:
    """CPU time of one part of the program, by samples. ``part``: kernels, barrier, engine,
    tokenizer, sampler, http, system (the operating system), other, unknown."""

    part: str
    samples: int
    seconds: float
    share: float


@dataclass(frozen=True, slots=True)
class CpuTime:
    """Where the target's CPU time went. ``folded``: stacks (root first, ``;`` between frames)
    and their samples; no part of the JSON. ``seconds``: CPU time the threads used meanwhile, by
    the kernel's own account; ``sampled_seconds``: samples times their period."""

    hertz: int
    samples: int
    lost: int
    seconds: float | None
    sampled_seconds: float
    parts: tuple[CpuPart, ...]
    folded: tuple[tuple[str, int], ...] = ()
