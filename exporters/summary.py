# SPDX-License-Identifier: Apache-2.0
"""What a person wants to know of a snapshot: rates, shares, coverage. Pure arithmetic.

Ratios are made here and nowhere else, and are None (absent) where a part is absent or the
whole is zero.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..agent.model.snapshot import Op, Snapshot
from .text import ratio, total

PHASE_ORDER = ("decode", "prefill", "mixed", "verify", "encode", "other")


@dataclass(frozen=True, slots=True)
class Rate:
    """One phase: tokens submitted and time inside its successful calls (seconds)."""

    phase: str
    tokens: int | None
    calls: int
    seconds: float | None

    @property
    def tokens_per_second(self) -> float | None:
        return ratio(self.tokens, self.seconds)


@dataclass(frozen=True, slots=True)
class OpRow:
    """Ops of one kind summed over kernels and backends; ``share`` is of the phase's graph time."""

    op: str
    dtype: str
    role: str
    kernel: str
    backend: str
    share: float | None
    calls: int
    seconds: float | None
    flops: float | None
    bytes: float | None

    @property
    def seconds_per_call(self) -> float | None:
        return ratio(self.seconds, self.calls)

    @property
    def flops_per_second(self) -> float | None:
        return ratio(self.flops, self.seconds)

    @property
    def bytes_per_second(self) -> float | None:
        return ratio(self.bytes, self.seconds)


@dataclass(frozen=True, slots=True)
class PhaseOps:
    """The ops of one phase, largest first; ``per`` is what ``calls / units`` is counted by.

    Sampled ops come after their graphs: ``known`` of the ``graphs`` executions are in
    ``rows`` so far, and ``units`` are those of the known ones.
    """

    phase: str
    rows: tuple[OpRow, ...]
    graphs: int
    known: int
    per: str
    units: float
    seconds: float | None
    setup: float | None
    untimed: float | None


def rates(snapshot: Snapshot) -> tuple[Rate, ...]:
    """One entry per phase that had a successful call.

    Tokens are those of the phase's own calls, so that a mixed call raises neither rate:
    its tokens are counted by the graphs of that phase. Where only one phase of calls has
    tokens of a kind, that is the token count itself.
    """
    found = []
    for phase in _phases(call.phase for call in snapshot.calls if call.status == 0):
        calls = [c for c in snapshot.calls if c.phase == phase and c.status == 0]
        found.append(
            Rate(
                phase, _tokens(snapshot, phase), sum(c.count for c in calls), total(c.seconds for c in calls)
            )
        )
    return tuple(found)


def _tokens(snapshot: Snapshot, phase: str) -> int | None:
    mixed = any(c.count for c in snapshot.calls if c.phase == "mixed" and c.status == 0)
    if not mixed and phase == "decode":
        return snapshot.tokens.decode
    if not mixed and phase == "prefill":
        return snapshot.tokens.prefill
    parts = [
        g.tokens * (g.count - g.failed)
        for g in snapshot.graphs
        if g.phase == phase and not g.split and g.tokens is not None
    ]
    return sum(parts) if parts else None


def failed_calls(snapshot: Snapshot) -> tuple[tuple[int, int], ...]:
    """(status, how many) of calls that did not return 0, in the order of the status."""
    counts: dict[int, int] = {}
    for call in snapshot.calls:
        if call.status != 0:
            counts[call.status] = counts.get(call.status, 0) + call.count
    return tuple(sorted(counts.items()))


def phase_ops(snapshot: Snapshot) -> tuple[PhaseOps, ...]:
    """The ops of every phase that has some, in the order that a person asks for them."""
    return tuple(_one_phase(snapshot, phase) for phase in _phases(op.phase for op in snapshot.ops))


def _one_phase(snapshot: Snapshot, phase: str) -> PhaseOps:
    graphs = [g for g in snapshot.graphs if g.phase == phase]
    groups: dict[tuple[str, str, str, str, str], list[Op]] = {}
    for op in (op for op in snapshot.ops if op.phase == phase):
        key = (op.op, op.dtype, op.role, op.kernel, op.backend)
        groups.setdefault(key, []).append(op)
    setup = total(g.setup_seconds for g in graphs)
    ops_time = total(op.seconds for ops in groups.values() for op in ops)
    untimed = total(g.untimed_seconds for g in graphs) or None
    whole = total((ops_time, setup, untimed))
    rows = [
        OpRow(
            *key,
            share=ratio(spent := total(op.seconds for op in ops), whole),
            calls=sum(op.calls for op in ops),
            seconds=spent,
            flops=total(op.flops for op in ops),
            bytes=total(op.bytes for op in ops),
        )
        for key, ops in groups.items()
    ]
    rows.sort(key=lambda row: (-(row.seconds or 0.0), row.op, row.dtype, row.role))
    executions = sum(g.count for g in graphs if not g.split)
    tokens = snapshot.tokens.decode if phase == "decode" else None
    per, units = ("token", tokens) if tokens else ("graph", executions)
    known = _known(snapshot, phase)
    return PhaseOps(
        phase, tuple(rows), executions, round(executions * known), per, units * known, whole, setup, untimed
    )


def _known(snapshot: Snapshot, phase: str) -> float:
    """The share of a phase's executions whose kernels are in its ops: 1 where all are recorded."""
    graphs = [g for g in snapshot.graphs if g.phase == phase]
    if all(g.sampled == g.count for g in graphs):
        return 1.0
    ran = sum(g.executed * g.count for g in graphs if g.executed is not None)
    counted = sum(op.calls + op.untimed for op in snapshot.ops if op.phase == phase)
    return min(1.0, ratio(counted, ran) or 1.0)


@dataclass(frozen=True, slots=True)
class Coverage:
    """Kernels seen of those that had to run; of each kind of graph its worst execution.

    ``ratio`` is therefore a lower bound unless it is 1; ``worst`` uncovered kernels of
    ``kernels`` is the graph that was seen worst.
    """

    ratio: float
    worst: int
    kernels: int


def coverage(snapshot: Snapshot) -> Coverage | None:
    """None when no graph was seen at op level."""
    seen = covered = 0
    worst, kernels = -1, 0
    for graph in snapshot.graphs:
        if graph.executed is None or graph.uncovered is None or not graph.sampled:
            continue
        seen += graph.executed * graph.sampled
        covered += (graph.executed + graph.uncovered) * graph.sampled
        if graph.uncovered > worst:
            worst, kernels = graph.uncovered, graph.executed + graph.uncovered
    part = ratio(seen, covered)
    return None if part is None else Coverage(part, worst, kernels)


def _phases(present: Iterable[str]) -> list[str]:
    names = set(present)
    return [p for p in PHASE_ORDER if p in names] + sorted(names - set(PHASE_ORDER))
