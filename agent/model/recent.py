# SPDX-License-Identifier: Apache-2.0
"""What happened of late: a snapshot less an earlier one of the same target.

A target is watched for days, and what slows it comes for a minute: in sums over all that time it
would cost nothing. So whoever watches on judges the last seconds. Pure arithmetic.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, TypeVar

from .causes import Faults, Threads
from .clockdata import Clocks, CoreClock
from .snapshot import Snapshot

T = TypeVar("T")

_TOKENS = (
    "prefill", "decode", "output_rows", "verify", "verify_rows", "verify_accepted", "encode", "encode_rows",
    "warmup", "ambiguous",
)  # fmt: skip
_GRAPH_KEY = ("id", "topology", "phase", "backend", "tokens", "rows", "kv_length", "split", "timing")
_GRAPH = (
    "count", "sampled", "seconds", "setup_seconds", "untimed_seconds", "whole_seconds", "failed", "warmup",
)  # fmt: skip
_OP_KEY = ("op", "dtype", "role", "kernel", "backend", "phase")
_THREAD = (
    "run_seconds", "work_run_seconds", "seconds", "waits", "migrations", "kind_changes", "cores",
)  # fmt: skip
_PHASE = ("calls", "tokens", "seconds", "stalled", "own", "majors", "minors")
_BARRIER = (
    "ops", "wall_seconds", "work_seconds", "idle_seconds", "blocked_seconds", "ready_seconds",
    "paging_seconds", "late", "late_seconds",
)  # fmt: skip
_OP_BARRIER = ("ops", "wall_seconds", "work_seconds", "idle_seconds", "blocked_seconds", "late")


def since(now: Snapshot, then: Snapshot) -> Snapshot:
    """``now`` with everything that verdicts rest on counted from ``then`` on.

    Latencies, contexts, histograms and counters for monitoring stay those of the whole window, and
    so do samples of CPU time; what the earlier one lacks counts from the beginning.
    """
    return dataclasses.replace(
        now,
        window_seconds=max(now.window_seconds - then.window_seconds, 0.0),
        tokens=_less(now.tokens, then.tokens, _TOKENS),
        calls=_rows(now.calls, then.calls, ("phase", "status"), ("count", "seconds")),
        graphs=_rows(now.graphs, then.graphs, _GRAPH_KEY, _GRAPH),
        ops=_rows(now.ops, then.ops, _OP_KEY, ("calls", "seconds", "flops", "bytes", "untimed")),
        threads=None if now.threads is None else _threads(now.threads, then.threads),
        faults=None if now.faults is None else _faults(now.faults, then.faults),
        clocks=None if now.clocks is None else _clocks(now.clocks, then.clocks),
        verdicts=None,
    )


class Recent:
    """The last ``seconds`` of one target, and at most ``step`` more (half of them by default) where
    somebody looks often enough; a snapshot is kept for each step."""

    def __init__(self, seconds: float, step: float | None = None) -> None:
        self._step = seconds / 2 if step is None else step
        self._seconds = seconds
        self._bases: deque[tuple[float, Snapshot]] = deque()

    def look(self, now_s: float, snapshot: Snapshot) -> Snapshot:
        """``snapshot`` was made now, after all others: that of the last seconds."""
        while len(self._bases) > 1 and self._bases[1][0] <= now_s - self._seconds:
            self._bases.popleft()
        if not self._bases or now_s - self._bases[-1][0] >= self._step:
            self._bases.append((now_s, _base(snapshot)))
        at_s, base = self._bases[0]
        # In the first seconds all there is counts: nothing was before.
        return snapshot if at_s > now_s - self._seconds else since(snapshot, base)


def _base(snapshot: Snapshot) -> Snapshot:
    """Without what is never subtracted: it is kept for minutes."""
    return dataclasses.replace(
        snapshot, notes=(), contexts=(), histograms=None, counters=None, hardware=None, cpu_time=None,
        verdicts=None, engine_calls=(), engine_calls_shed=(), causes_shed=(), programs=(), engine_memory=(),
        placement=None, offload=None,
    )  # fmt: skip


def _threads(now: Threads, then: Threads | None) -> Threads:
    if then is None:
        return now
    quota = now.quota
    if quota is not None and then.quota is not None:
        quota = _less(quota, then.quota, ("throttled_seconds", "throttled_periods", "periods"))
    takers = _rows(now.takers, then.takers, ("comm", "pid", "own"), ("preemptions", "seconds"))
    op = ("op", "dtype", "role")
    return dataclasses.replace(
        _less(now, then, ("work_seconds", "records", "unwatched_seconds")),
        threads=_rows(now.threads, then.threads, ("tid", "leader"), _THREAD),
        takers=tuple(taker for taker in takers if taker.preemptions),
        phases=_rows(now.phases, then.phases, ("phase",), _PHASE),
        ops=_rows(now.ops, then.ops, op, ("seconds", "majors")),
        quota=quota,
        barriers=None
        if now.barriers is None
        else _rows(now.barriers, then.barriers or (), ("tid",), _BARRIER),
        op_barriers=None
        if now.op_barriers is None
        else _rows(now.op_barriers, then.op_barriers or (), (*op, "phase", "threads"), _OP_BARRIER),
    )


def _faults(now: Faults, then: Faults | None) -> Faults:
    if then is None:
        return now
    counts = _rows(now.counts, then.counts, ("kind", "mapping"), ("count", "seconds"))
    tensor = ("tensor", "layer", "mapping", "source")
    tensors = _rows(now.tensors, then.tensors, tensor, ("majors", "minors", "seconds"))
    return dataclasses.replace(
        _less(now, then, ("unrecorded", "unwatched_seconds")),
        counts=tuple(count for count in counts if count.count),
        tensors=tuple(
            sorted((t for t in tensors if t.majors or t.minors), key=lambda t: -(t.seconds or 0.0))
        ),
    )


def _clocks(now: Clocks, then: Clocks | None) -> Clocks:
    if then is None:
        return now
    before = {core.cpu: core for core in then.cores}
    cores = tuple(_core(core, before.get(core.cpu)) for core in now.cores)
    return dataclasses.replace(_less(now, then, ("throttle_events",)), cores=cores)


def _core(now: CoreClock, then: CoreClock | None) -> CoreClock:
    if then is None or then.samples > now.samples:
        return now
    samples = now.samples - then.samples
    whole = now.mean_mhz * now.samples - then.mean_mhz * then.samples
    return dataclasses.replace(now, samples=samples, mean_mhz=whole / samples if samples else now.mean_mhz)


# ---- rows ------------------------------------------------------------------------------------


def _rows(now: Iterable[T], then: Iterable[T], key: tuple[str, ...], names: tuple[str, ...]) -> tuple[T, ...]:
    """Rows of ``now``, each less the row of ``then`` with the same key, if there is one."""
    keyed: Callable[[T], Hashable] = lambda row: tuple(getattr(row, name) for name in key)  # noqa: E731
    before = {keyed(row): row for row in then}
    return tuple(row if (old := before.get(keyed(row))) is None else _less(row, old, names) for row in now)


def _less(now: T, then: T, names: tuple[str, ...]) -> T:
    changed = {name: _minus(getattr(now, name), getattr(then, name)) for name in names}
    return dataclasses.replace(now, **changed)  # type: ignore[type-var]


def _minus(now: Any, then: Any) -> Any:
    """Never less than nothing: what was forgotten meanwhile began anew."""
    if now is None or then is None:
        return now
    if isinstance(now, Mapping):
        found = {key: _minus(value, then.get(key, 0)) for key, value in now.items()}
        return {key: value for key, value in found.items() if value}
    return now - then if now >= then else now
