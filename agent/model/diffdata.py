# SPDX-License-Identifier: Apache-2.0
"""What a comparison of two recordings says. Ratios are B / A; None is absent, with a note."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Ratio:
    """B / A with its 95 % interval. ``p``: the chance of a difference like this without a cause,
    adjusted for all the tests that were made; ``significant``: it is below 0.1 %."""

    value: float
    low: float
    high: float
    p: float
    significant: bool


@dataclass(frozen=True, slots=True)
class Side:
    """One recording's share per token: kernels, seconds (mean, and usual: the median of executions,
    which rare pauses do not move), bytes, faults and waits; None: not known."""

    calls: float
    seconds: float
    usual_seconds: float
    bytes: float | None
    faults: float | None
    wait_seconds: float | None


@dataclass(frozen=True, slots=True)
class Row:
    """One operator. ``change``: same, added (only B), removed (only A), fused (B runs in one kernel what
    A ran in several) or split (the other way round). ``layers``: those that the row is about, None:
    all alike or none. ``op``, ``dtype`` and ``kernel`` of each side, "" where it has none. ``time``:
    how it changed beyond what all operators did (see Phase.common); None: too few executions to tell.
    ``faults`` and ``wait``: ratios of the sides' figures, None where they are absent or too few; they
    depend on what was in memory and who else ran, and do not make a row significant."""

    op: str
    role: str
    shape: tuple[int, ...]
    layers: tuple[int, ...] | None
    change: str
    a_op: str
    b_op: str
    a_dtype: str
    b_dtype: str
    a: Side | None
    b: Side | None
    time: Ratio | None
    faults: Ratio | None = None
    wait: Ratio | None = None


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase. ``pairs`` of executions with the same tokens and KV length were compared.

    ``a_seconds``: time per token, and ``a_usual_seconds`` without rare pauses (every operator's median);
    ``total``: how the latter changed. ``common``: how all operators changed together, which is more often
    the machine than the build; rows are compared with it. ``tested``: differences that were tested.
    """

    phase: str
    pairs: int
    a_executions: int
    b_executions: int
    a_seconds: float
    b_seconds: float
    a_usual_seconds: float
    b_usual_seconds: float
    total: Ratio | None
    common: float | None
    tested: int
    rows: tuple[Row, ...]

    @property
    def significant(self) -> tuple[Row, ...]:
        """Rows that differ: in time, or in what is there."""
        return tuple(
            row
            for row in self.rows
            if row.change != "same" or (row.time is not None and row.time.significant)
        )


@dataclass(frozen=True, slots=True)
class Diff:
    """The whole comparison."""

    phases: tuple[Phase, ...]
    notes: tuple[str, ...]
    schema: int = SCHEMA

    def exceeded(self, limit: float) -> list[str]:
        """What got slower by more than ``limit`` (0.05 is 5 %) and provably so; empty: nothing."""
        found = []
        for phase in self.phases:
            if phase.total is not None and phase.total.significant and phase.total.value > 1 + limit:
                found.append(f"{phase.phase}: time per token +{(phase.total.value - 1) * 100:.1f}%")
            found += [
                f"{phase.phase}: {row.op} {row.role} +{(row.time.value - 1) * 100:.1f}%"
                for row in phase.rows
                if row.time is not None and row.time.significant and row.time.value > 1 + limit
            ]
        return found

    def to_json(self) -> dict[str, Any]:
        """For ``--format json``."""
        document: dict[str, Any] = dataclasses.asdict(self)
        return {"schema": document.pop("schema"), **document}
