# SPDX-License-Identifier: Apache-2.0
"""What exporters get: frozen figures that mirror the JSON contract (design section 4).

None means absent, never zero; ``notes`` say why. Field names are the contract's; fields may
be added, never renamed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .calldata import CallTotal, HeldMemory, Offload, ProgramTotal, ShedCalls
from .causes import Faults, ShedPart, Threads
from .clockdata import Clocks
from .eventdata import CpuTime, Events
from .latency import Histogram, Summary
from .peaks import Peaks
from .placementdata import Placement
from .verdictdata import Verdict

SCHEMA = 1

#: Status of calls whose real one is beyond the bounded number that is told apart.
OTHER_STATUS = -(1 << 31)


@dataclass(frozen=True, slots=True)
class Library:
    """One mapped file of the engine; ``role`` as the catalogue names it."""

    path: str
    build_id: str | None
    role: str | None


@dataclass(frozen=True, slots=True)
class LayoutFacts:
    """Where the structure layout comes from: dwarf, accessors or known; and its name."""

    source: str | None
    name: str | None


@dataclass(frozen=True, slots=True)
class AttachFacts:
    """How the probes hang on the target. ``complete`` False: some kernels have no probe."""

    method: str | None
    op_source: str | None
    complete: bool | None


@dataclass(frozen=True, slots=True)
class Target:
    """The watched process. ``model`` is a file name only."""

    pid: int
    exe: str
    engine: str | None
    model: str | None
    libraries: tuple[Library, ...] = ()
    layout: LayoutFacts = LayoutFacts(None, None)
    attach: AttachFacts = AttachFacts(None, None, None)


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """What the session has to know about its target; ``target`` is passed through.

    ``has_calls``, ``has_graphs``, ``has_ops``: which levels have probes. ``age_seconds``:
    how old the process was when we attached (None: unknown); in an old one, the first call
    is no warm-up. ``busy``: whether it was computing while we attached (None: unknown); then
    a lone token at an unknown position goes on with what we came into, and starts no request.
    ``backends``: names by address of the backend object, where known.
    """

    target: Target
    has_calls: bool = True
    has_graphs: bool = True
    has_ops: bool = True
    age_seconds: float | None = None
    busy: bool | None = None
    backends: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Tokens:
    """Processed tokens by run; ``output_rows`` of prefill and decode runs = generated tokens.

    ``verify`` tokens were submitted for speculation; ``verify_accepted`` of them are known
    to have been kept. ``ambiguous`` of all were classified by shape alone.
    """

    prefill: int | None
    decode: int | None
    output_rows: int | None
    verify: int | None = None
    verify_rows: int | None = None
    verify_accepted: int | None = None
    encode: int | None = None
    encode_rows: int | None = None
    warmup: int | None = None
    ambiguous: int | None = None


@dataclass(frozen=True, slots=True)
class Requests:
    """``started`` prompts; ``first_rows`` of them gave their first row."""

    started: int | None
    first_rows: int | None


@dataclass(frozen=True, slots=True)
class ContextTokens:
    """One context of the engine. ``role``: target, draft, or None when only one kind is seen."""

    context: int
    role: str | None
    calls: int
    tokens: Tokens
    requests: Requests


@dataclass(frozen=True, slots=True)
class Call:
    """Calls that returned ``status``; :data:`OTHER_STATUS` stands for what is one too many."""

    phase: str
    status: int
    count: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Latencies:
    """Seconds; see design D10 for the first two definitions. ``between_calls``: from the return of a
    call that gave a token to the begin of the next one for the same request. There the program samples,
    answers, waits for a core, and on some devices for the result."""

    time_to_first_token: Summary
    inter_token: Summary
    between_calls: Summary = field(default_factory=lambda: Summary(0, None, None, None, None))


@dataclass(frozen=True, slots=True)
class Histograms:
    """The same two as published histograms; neither ever shrinks."""

    time_to_first_token: Histogram
    inter_token: Histogram


@dataclass(frozen=True, slots=True)
class Graph:
    """``seconds`` = ``setup_seconds`` + kernels + ``untimed_seconds`` when all are sampled.

    ``split``: a part of another graph. ``timing``: wall, or enqueue for a backend that
    computes after it returned. ``whole_seconds``: the call of the scheduler around it.
    """

    id: str | None
    topology: str | None
    phase: str
    backend: str
    nodes: int | None
    executed: int | None
    uncovered: int | None
    tokens: int | None
    rows: int | None
    kv_length: int | None
    count: int
    sampled: int
    seconds: float
    setup_seconds: float | None
    fused: int | None = None
    skipped: int | None = None
    untimed_seconds: float | None = None
    whole_seconds: float | None = None
    split: bool = False
    timing: str = "wall"
    failed: int = 0
    warmup: int = 0


@dataclass(frozen=True, slots=True)
class Op:
    """``seconds`` on the critical path; ``untimed`` kernels ran besides the ``calls``."""

    op: str
    dtype: str
    role: str
    kernel: str
    backend: str
    phase: str
    calls: int
    seconds: float
    seconds_stderr: float | None
    flops: int | None
    bytes: int | None
    untimed: int = 0


@dataclass(frozen=True, slots=True)
class Overhead:
    """What profiling costs; ratios of decode speed. ``machine_seconds``: CPU time, of all CPUs together,
    that programs on the scheduler take at switches of any process, watched or not (estimated); None where
    they are not there."""

    budget_ratio: float | None = None
    estimated_ratio: float | None = None
    measured_ratio: float | None = None
    measured_ci95: tuple[float, float] | None = None
    hits: int | None = None
    ns_per_hit: float | None = None
    machine_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Budget:
    """What the budget's controller does. ``level``: the highest level of probes in use (op,
    graph, token, nothing), ``reason``: why not a higher one; ``activity``: of the op level, in
    words. ``spent_seconds``: estimated cost to the target by what it was spent on (call,
    graph, op, cycle, engine_call, waits, faults), only growing; ``bursts`` so far, ``bursts_cut``
    of them ended early. ``transitions``: the latest changes of level, oldest first; ``changes``: how
    often each level was entered, all of them."""

    level: str
    reason: str
    activity: str
    spent_seconds: Mapping[str, float]
    busy_seconds: float
    bursts: int
    bursts_cut: int
    qos_min_tokens_per_second: float | None = None
    transitions: tuple[Transition, ...] = ()
    changes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Transition:
    """At ``at_seconds`` of the window the level changed."""

    at_seconds: float
    before: str
    after: str
    reason: str


@dataclass(frozen=True, slots=True)
class Lost:
    """Records that were not recorded or could not be used, by kind."""

    total: int
    by_kind: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class GraphCount:
    """Outermost graphs of one (phase, backend), counted once whatever they are split into."""

    phase: str
    backend: str
    count: int
    sampled: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Counters:
    """Figures for monitoring: each only grows from one snapshot to the next.

    ``prompt_tokens`` are those of prefill and encode runs. ``graphs`` counts each outermost
    graph once, whatever it was split into. ``hits`` by level; calls, ops, lost records and
    histograms of the snapshot itself never shrink either.
    """

    prompt_tokens: int
    generation_tokens: int
    verify_tokens: int
    graphs: tuple[GraphCount, ...]
    hits: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything seen in the window so far.

    ``unreturned``: calls that were left by a longjmp or by the end of their thread.
    ``budget``: None where no budget is kept. ``histograms`` and ``counters`` are for
    monitoring and no part of the JSON. ``hardware`` is ``counters`` there. ``verdicts``: most
    costly first, None: not judged (yet). ``engine_calls``, ``programs``, ``engine_memory``: of
    engines that are described by data alone (PJRT, CUDA, a device's backend). ``placement``: where
    operators ran, ``offload``: where the time went, None: all on the CPU, as far as was seen.
    """

    target: Target
    window_seconds: float
    tokens: Tokens
    calls: tuple[Call, ...]
    latency_seconds: Latencies
    graphs: tuple[Graph, ...]
    ops: tuple[Op, ...]
    overhead: Overhead
    lost: Lost
    notes: tuple[str, ...]
    requests: Requests = Requests(None, None)
    contexts: tuple[ContextTokens, ...] = ()
    unreturned: int = 0
    budget: Budget | None = None
    threads: Threads | None = None
    faults: Faults | None = None
    histograms: Histograms | None = None
    counters: Counters | None = None
    hardware: Events | None = None
    cpu_time: CpuTime | None = None
    peaks: Peaks | None = None
    clocks: Clocks | None = None
    verdicts: tuple[Verdict, ...] | None = None
    engine_calls: tuple[CallTotal, ...] = ()
    engine_calls_shed: tuple[ShedCalls, ...] = ()
    causes_shed: tuple[ShedPart, ...] = ()
    programs: tuple[ProgramTotal, ...] = ()
    engine_memory: tuple[HeldMemory, ...] = ()
    placement: tuple[Placement, ...] | None = None
    offload: Offload | None = None
    schema: int = SCHEMA

    def to_json_dict(self) -> dict[str, Any]:
        """The object of the contract, ready for ``json.dumps``."""
        order = (
            "schema", "target", "window_seconds", "tokens", "calls", "latency_seconds",
            "graphs", "ops", "overhead", "lost", "notes", "requests", "contexts", "unreturned",
            "budget", "threads", "faults", "hardware", "cpu_time", "peaks", "verdicts", "clocks",
            "engine_calls", "engine_calls_shed", "causes_shed", "programs", "engine_memory", "placement",
            "offload",
        )  # fmt: skip
        return {_RENAMED.get(name, name): _plain(getattr(self, name)) for name in order}

    to_json = to_json_dict


_RENAMED = {"hardware": "counters"}
_UNSHOWN = frozenset({"folded"})
"""Fields that are too long for the JSON; they have formats of their own."""


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = (f.name for f in dataclasses.fields(value) if f.name not in _UNSHOWN)
        return {name.rstrip("_"): _plain(getattr(value, name)) for name in fields}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
