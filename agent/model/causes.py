# SPDX-License-Identifier: Apache-2.0
"""Why something was slow, as exporters, verdicts and recordings get it: threads and page faults.

Frozen figures of one target. All seconds; None is absent, never zero. "Work" is the time in
which a graph of the target ran on the CPU. Causes are the names of ``enum wait_cause``.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field


class Cause(enum.IntEnum):
    """``enum wait_cause``: where the time of a thread goes that does not run."""

    PREEMPTED = 0
    YIELDED = 1
    THROTTLED = 2
    WAKEUP = 3
    FUTEX = 4
    FAULT = 5
    IO = 6
    SLEEP = 7
    OTHER = 8
    UNKNOWN = 9

    @property
    def label(self) -> str:
        """The name in JSON and metrics."""
        return self.name.lower()

    @property
    def ready(self) -> bool:
        """Whether the thread could have run."""
        return self <= Cause.WAKEUP


READY = tuple(cause for cause in Cause if cause.ready)
BLOCKED = tuple(cause for cause in Cause if not cause.ready)


@dataclass(frozen=True, slots=True)
class CoreKind:
    """Cores that are alike. ``name`` tells kinds apart on this machine ("all", "fast", "slow", ...).

    ``capacity``: the kernel's relative speed (1024 is the fastest), ``max_mhz``: top frequency,
    ``smt``: threads per core; each None where sysfs does not say. ``siblings``: CPUs that are one core,
    ``clusters``: CPUs that share a cluster's cache; groups of several only.
    """

    name: str
    cpus: tuple[int, ...]
    capacity: int | None = None
    max_mhz: float | None = None
    smt: int | None = None
    siblings: tuple[tuple[int, ...], ...] = ()
    clusters: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Taker:
    """Who took the core from compute threads: ``seconds`` they waited after losing it to this one.

    ``own``: another thread of the target itself. ``watcher``: the process that says so.
    """

    comm: str
    pid: int
    preemptions: int
    seconds: float
    own: bool = False
    watcher: bool = False


@dataclass(frozen=True, slots=True)
class BarrierShare:
    """One thread at the barriers of traced ops: of ``wall_seconds`` it worked ``work_seconds``, and
    waited ``idle_seconds`` until the last of its peers had arrived, too.

    Of the waiting it was ``blocked_seconds`` asleep, else spinning. What is left of the wall time went
    into the barrier itself and into the probes. ``ready`` and ``paging``: part of the work time in
    which it had no core, or waited for a page. ``late``: ops in which it was the last to arrive,
    ``late_seconds`` by how much in sum.
    """

    tid: int
    ops: int
    wall_seconds: float
    work_seconds: float
    idle_seconds: float
    blocked_seconds: float
    ready_seconds: float
    paging_seconds: float
    late: int
    late_seconds: float

    @property
    def idle_share(self) -> float | None:
        """Share of the ops' time that this thread waited for others."""
        return None if self.wall_seconds <= 0 else self.idle_seconds / self.wall_seconds


@dataclass(frozen=True, slots=True)
class OpBarrier:
    """Barriers of one kind of op. ``idle_seconds`` all threads together waited for their last one.

    ``late`` seconds (how much later the last thread came than the median one) by why it was late:
    preempted, paging, slow_core, work.
    """

    op: str
    dtype: str
    role: str
    phase: str
    ops: int
    threads: int
    wall_seconds: float
    work_seconds: float
    idle_seconds: float
    blocked_seconds: float
    late: Mapping[str, float] = field(default_factory=dict)

    @property
    def idle_share(self) -> float | None:
        """Share of all threads' time in these ops that was spent waiting for others."""
        whole = self.wall_seconds * self.threads
        return None if whole <= 0 else self.idle_seconds / whole


@dataclass(frozen=True, slots=True)
class Thread:
    """One compute thread. ``leader``: it entered graphs itself (thread 0), else a worker.

    ``run_seconds`` is all of its running; the ``work_`` figures are while graphs ran.
    ``cores``: running by kind of core. ``waits`` and ``seconds`` by cause, while graphs ran.
    ``policy`` and ``nice`` as the kernel has them ("other", "batch", "idle", "fifo", "rr",
    "deadline"); ``cpus`` it may run on. ``alive`` False: it has ended.
    """

    tid: int
    leader: bool
    alive: bool
    run_seconds: float
    work_run_seconds: float
    seconds: Mapping[str, float]
    waits: Mapping[str, int]
    migrations: int
    kind_changes: int
    wakeup_max_seconds: float
    cores: Mapping[str, float] = field(default_factory=dict)
    policy: str | None = None
    nice: int | None = None
    cpus: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class PhaseWaits:
    """What waiting cost the calls of one phase.

    ``stalled``: seconds, by cause, in which at least one compute thread did not run although a
    graph of the call did (the others then wait for it at the next barrier): no second counts
    twice. ``own``: of the calling thread alone. ``tokens`` as submitted; ``calls`` in sum.
    ``worst``: the longest stall of one call.
    """

    phase: str
    calls: int
    tokens: int
    seconds: float
    stalled: Mapping[str, float]
    own: Mapping[str, float]
    worst: float
    majors: int = 0
    minors: int = 0


@dataclass(frozen=True, slots=True)
class OpWaits:
    """Waits of the calling thread inside one kind of op, by cause (of the ops that were watched)."""

    op: str
    dtype: str
    role: str
    seconds: Mapping[str, float]
    majors: int = 0


@dataclass(frozen=True, slots=True)
class Quota:
    """CPU quota of the target's control group: ``cores`` at most; None where it has none.

    ``throttled_seconds``, ``throttled_periods`` of ``periods``: as the group counts them, in the window.
    """

    cores: float | None
    throttled_seconds: float | None = None
    throttled_periods: int | None = None
    periods: int | None = None


@dataclass(frozen=True, slots=True)
class Threads:
    """JSON field ``threads``: what the scheduler did with the compute threads.

    ``work_seconds``: time in which graphs ran. ``records``: spans that were recorded, of compute
    threads only. ``online_cpus`` of the machine. ``barriers``, ``op_barriers``: None unless traced.
    ``unwatched_seconds``: of the window, in which nothing of this was watched, to stay within the budget;
    no figure is of that time.
    """

    work_seconds: float
    threads: tuple[Thread, ...]
    takers: tuple[Taker, ...]
    phases: tuple[PhaseWaits, ...]
    ops: tuple[OpWaits, ...]
    cores: tuple[CoreKind, ...]
    quota: Quota | None
    online_cpus: int
    records: int
    barriers: tuple[BarrierShare, ...] | None = None
    op_barriers: tuple[OpBarrier, ...] | None = None
    unwatched_seconds: float = 0.0

    def seconds(self, cause: Cause) -> float:
        """Of all compute threads together, while graphs ran."""
        return sum(one.seconds.get(cause.label, 0.0) for one in self.threads)

    @property
    def preemptions(self) -> int:
        """Times that a compute thread lost its core while it could run and a graph ran."""
        return sum(one.waits.get(Cause.PREEMPTED.label, 0) for one in self.threads)


@dataclass(frozen=True, slots=True)
class ShedPart:
    """Waits or page faults (``part``) that are watched in short trials only, to stay within the budget:
    how many a second there were in the last trial, and what share of the target's time that would cost."""

    part: str
    per_second: float
    cost_ratio: float


@dataclass(frozen=True, slots=True)
class FaultCount:
    """Page faults of one ``kind`` (major, minor) in one ``mapping``.

    Mappings: model (the model's file), weights (in anonymous memory: repacked, or read with
    --no-mmap), kv, compute (the graph's intermediate results), file, anon, stack, unknown.
    ``seconds`` blocked for them; None where not known. A fault is not a page: the kernel maps
    neighbours along (fault-around), and reads ahead.
    """

    kind: str
    mapping: str
    count: int
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class TensorFaults:
    """Faults in one tensor. ``layer`` None where it has none; ``source``: graph (its data pointer)
    or gguf (its place in the file)."""

    tensor: str
    layer: int | None
    mapping: str
    majors: int
    minors: int
    seconds: float | None
    source: str


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """How the model's file is in memory. ``loading``: mmap, mlock (mapped and locked), copied
    (mapped, but weights were repacked into anonymous memory), read (not mapped).

    ``resident_bytes`` of ``bytes`` are in the page cache; None where not to be told.
    """

    file: str
    bytes: int | None
    mapped_bytes: int
    resident_bytes: int | None
    locked_bytes: int | None
    loading: str | None


@dataclass(frozen=True, slots=True)
class Faults:
    """JSON field ``faults``. ``counts`` are exact; ``unrecorded`` of them have no address (they
    are in mapping unknown). ``tensors``: those with the most waiting first, a bounded number.
    ``fault_around_bytes``: what one minor fault in a file maps at most. ``unwatched_seconds``: as of
    :class:`Threads`."""

    counts: tuple[FaultCount, ...]
    tensors: tuple[TensorFaults, ...]
    model: ModelMemory | None
    unrecorded: int
    fault_around_bytes: int | None = None
    unwatched_seconds: float = 0.0

    def of(self, kind: str, mapping: str | None = None) -> int:
        """How many of a kind, everywhere or in one mapping."""
        return sum(c.count for c in self.counts if c.kind == kind and mapping in (None, c.mapping))
