# SPDX-License-Identifier: Apache-2.0
"""Waits and page faults as rows for Prometheus. What was not watched has none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..agent.model.causes import Cause
from ..agent.model.snapshot import Snapshot

Row = tuple[tuple[str, ...], Sequence[float | None]]

WAITS = ("sched_wait_seconds_total",)
PREEMPTIONS = ("preemptions_total",)
FAULTS = ("page_faults_total",)
UNWATCHED = ("cause_unwatched_seconds_total",)
RESIDENT = ("model_resident_bytes",)


def wait_rows(snapshot: Snapshot, target: str) -> Iterator[Row]:
    """Labels target, cause. Every cause from the start, at 0: a counter has to begin somewhere."""
    if snapshot.threads is not None:
        for cause in Cause:
            yield (target, cause.label), (snapshot.threads.seconds(cause),)


def preemption_rows(snapshot: Snapshot, target: str) -> Iterator[Row]:
    """Label target."""
    if snapshot.threads is not None:
        yield (target,), (snapshot.threads.preemptions,)


def fault_rows(snapshot: Snapshot, target: str) -> Iterator[Row]:
    """Labels target, kind, mapping."""
    if snapshot.faults is not None:
        for one in snapshot.faults.counts:
            yield (target, one.kind, one.mapping), (one.count,)


def unwatched_rows(snapshot: Snapshot, target: str) -> Iterator[Row]:
    """Labels target, what."""
    if snapshot.threads is not None:
        yield (target, "waits"), (snapshot.threads.unwatched_seconds,)
    if snapshot.faults is not None:
        yield (target, "faults"), (snapshot.faults.unwatched_seconds,)


def resident_rows(snapshot: Snapshot, target: str) -> Iterator[Row]:
    """Label target."""
    if snapshot.faults is not None and snapshot.faults.model is not None:
        yield (target,), (snapshot.faults.model.resident_bytes,)
