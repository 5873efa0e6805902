# SPDX-License-Identifier: Apache-2.0
"""How fast the cores were allowed to run, and whether heat slowed them. Figures only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CoreClock:
    """One CPU. ``mean_mhz`` of ``samples`` looks while the target computed; ``max_mhz`` of the
    hardware; ``limit_mhz``: what it was allowed when last looked at (lower: somebody set it so,
    or heat did)."""

    cpu: int
    samples: int
    mean_mhz: float
    max_mhz: float
    limit_mhz: float | None = None


@dataclass(frozen=True, slots=True)
class Cooling:
    """A device that cools by slowing cores, in use: ``state`` of ``most``."""

    name: str
    state: int
    most: int


@dataclass(frozen=True, slots=True)
class Clocks:
    """JSON field ``clocks``. ``throttle_events``: how often the processor slowed itself for heat in
    the window (None: it does not count). Empty with a ``reason`` where the system does not say."""

    cores: tuple[CoreClock, ...]
    cooling: tuple[Cooling, ...] = ()
    throttle_events: int | None = None
    reason: str | None = None
