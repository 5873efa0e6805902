# SPDX-License-Identifier: Apache-2.0
"""Which samples the calls of data-described engines and compiled programs give.

Labels are few by nature: a call's name, kind, state and status, and a program's name; what
tells single calls apart (kernels, tensors) is in the JSON only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from ..agent.model.offload import SCHEDULING
from ..agent.model.snapshot import Snapshot
from .text import clean

CALLS = ("engine_calls_total", "engine_call_seconds_total", "engine_completions_total",
         "engine_completion_seconds_total")  # fmt: skip
UNWATCHED = ("engine_call_unwatched_seconds_total",)
PROGRAMS = ("program_compiles_total", "program_compile_seconds_total", "program_executions_total",
            "program_dispatch_seconds_total", "program_completions_total",
            "program_completion_seconds_total", "program_errors_total")  # fmt: skip
BYTES = ("program_bytes_total",)
OFFLOAD = ("offload_seconds_total",)
PLACED = ("placed_ops_total",)

Row = tuple[tuple[str, ...], Sequence[float | None]]


def call_rows(snapshot: Snapshot, target: str) -> Iterator[Row]:
    """Labels and values of :data:`CALLS`."""
    for one in snapshot.engine_calls:
        labels = (target, one.engine, clean(one.call, 60), one.kind, one.state, str(one.status))
        yield labels, (one.count, one.seconds, one.completed, one.completion_seconds)


def unwatched_rows(snapshot: Snapshot, target: str) -> Iterator[Row]:
    """Labels and values of :data:`UNWATCHED`."""
    found = {(one.engine, one.call): one.unwatched_seconds for one in snapshot.engine_calls}
    for (engine, call), seconds in found.items():
        yield (target, engine, clean(call, 60)), (seconds,)


def program_rows(snapshot: Snapshot, target: str) -> Iterator[Row]:
    """Labels and values of :data:`PROGRAMS`."""
    for one in snapshot.programs:
        labels = (target, clean(one.name or "", 80))
        yield labels, (
            one.compiles, one.compile_seconds, one.executions, one.dispatch_seconds, one.completions,
            one.completion_seconds, one.errors,
        )  # fmt: skip


def byte_rows(snapshot: Snapshot, target: str) -> Iterator[Row]:
    """Labels and values of :data:`BYTES`."""
    for one in snapshot.programs:
        for direction, count in (("in", one.bytes_in), ("out", one.bytes_out)):
            yield (target, clean(one.name or "", 80), direction), (count,)


def offload_rows(snapshot: Snapshot, target: str) -> Iterator[Row]:
    """Labels and values of :data:`OFFLOAD`. What is left for scheduling is the time of the calls less
    these parts: no counter, for a call that is under way has some of its parts already."""
    for one in snapshot.offload.parts if snapshot.offload else ():
        if one.part != SCHEDULING:
            backend = clean(one.backend or "", 40)
            yield (target, one.part, backend, "call"), (one.in_calls_seconds,)
            yield (target, one.part, backend, "between"), (one.between_calls_seconds,)


def placed_rows(snapshot: Snapshot, target: str) -> Iterator[Row]:
    """Labels and values of :data:`PLACED`: roles and shapes together."""
    found: Counter[tuple[str, ...]] = Counter()
    for one in snapshot.placement or ():
        found[target, clean(one.op, 40), clean(one.dtype, 20), clean(one.backend, 40), one.phase] += one.count
    for labels, count in found.items():
        yield labels, (count,)
