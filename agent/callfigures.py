# SPDX-License-Identifier: Apache-2.0
"""Figures of calls in a snapshot of everything else."""

from __future__ import annotations

import dataclasses

from .model.calldata import CallFigures
from .model.snapshot import Lost, Snapshot

_OF_TOKENS = ("tokens:", "ops:", "overhead:")


def with_calls(snapshot: Snapshot, figures: CallFigures, *, alone: bool) -> Snapshot:
    """The snapshot with these figures in it.

    ``alone``: the process has no engine with tokens or graphs; notes that those are missing
    would be about nothing.
    """
    if alone:
        kept = tuple(note for note in snapshot.notes if not note.startswith(_OF_TOKENS))
        snapshot = dataclasses.replace(snapshot, notes=kept)
    by_kind = {**snapshot.lost.by_kind, **figures.lost}
    overhead = dataclasses.replace(snapshot.overhead, hits=(snapshot.overhead.hits or 0) + figures.hits)
    if snapshot.budget is None and figures.busy_seconds > 0:
        # Nobody else has an estimate, and nothing else is watched that has a price.
        overhead = dataclasses.replace(
            overhead, estimated_ratio=figures.cost_seconds / figures.busy_seconds,
            budget_ratio=figures.budget_ratio,
        )  # fmt: skip
    return dataclasses.replace(
        snapshot, overhead=overhead, engine_calls_shed=figures.shed,
        engine_calls=figures.calls, programs=figures.programs, engine_memory=figures.memory,
        offload=figures.offload,
        notes=(*figures.notes, *snapshot.notes), lost=Lost(sum(by_kind.values()), by_kind),
    )  # fmt: skip
