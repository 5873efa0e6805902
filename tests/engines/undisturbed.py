# SPDX-License-Identifier: Apache-2.0
"""An engine that has its cores to itself on a machine that others use."""

from __future__ import annotations

import contextlib
import os

import pytest

BELOW_THE_THIEF, THIEF, ABOVE = 2, 5, 20
"""Real-time priorities: of an engine from which a planted thief alone takes the core, of the thief, and
of an engine from which nobody does."""
BURST_SECONDS = 0.5
"""The kernel gives others a core after they have waited for one for about a second: work is done in
bursts that are shorter, with pauses."""


def first_in_line(pid: int, priority: int = ABOVE) -> None:
    """All threads of a process in real-time order: nothing of a lower priority takes their cores.
    Threads that they start inherit it. Skips where that is not allowed."""
    try:
        _each_thread(pid, os.SCHED_FIFO, priority)
    except PermissionError:
        pytest.skip("real-time scheduling is not allowed here: others may take the engine's cores")


def _each_thread(pid: int, policy: int, priority: int) -> None:
    """Also of those that others start meanwhile, until no thread is new."""
    done: set[int] = set()
    while new := {int(name) for name in os.listdir(f"/proc/{pid}/task")} - done:
        for tid in new:
            with contextlib.suppress(ProcessLookupError):
                os.sched_setscheduler(tid, policy, os.sched_param(priority))
        done |= new


def as_others(pid: int) -> None:
    """All threads of a process share their cores again: work that takes seconds is interrupted in
    real-time order, even where nobody else has anything to do."""
    _each_thread(pid, os.SCHED_OTHER, 0)
