# SPDX-License-Identifier: Apache-2.0
"""Figures of calls: what exporters get of engines that are described by data alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class CallTotal:
    """One call of an engine with one label and status.

    ``call`` and ``kind`` (compute, copy, wait, memory, compile, other) as the catalogue says;
    ``labels``: what its calls are told apart by. ``state``: outermost; inner (inside another
    call of the engine, and part of its time); recorded (into a graph that is run later, so
    nothing was executed); or overflow (what found no room under its own label). ``seconds``
    is the time of the calling thread inside the function: of a compute call, what it takes to
    hand over the work, not what the device takes. ``untimed`` of the ``count`` have no time.
    ``completed`` calls were seen to be done (an event or a wait told), ``completion_seconds``
    after they began: at the latest, for it is when somebody looked. ``sums``: by field.
    ``unwatched_seconds``: since calls of this name are known, how long they were not watched, because
    they came too often for the budget; what came then is in no figure.
    """

    engine: str
    call: str
    kind: str
    labels: Mapping[str, str | int]
    state: str
    status: int
    count: int
    seconds: float | None
    max_seconds: float | None
    untimed: int
    completed: int | None
    completion_seconds: float | None
    sums: Mapping[str, int] = field(default_factory=dict)
    unwatched_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class ShedCalls:
    """Calls that are watched in short trials only, to stay within the budget: of one name, or (``call``
    None) all of an engine's. What they come to and what watching would cost, as of the last trial."""

    engine: str
    call: str | None
    calls_per_second: float
    cost_ratio: float


@dataclass(frozen=True, slots=True)
class ProgramTotal:
    """One compiled program. None: not seen (compiled before we looked, or never awaited).

    ``bytes_in``: of host buffers, counted with the first program that takes them;
    ``bytes_out``: of its results that were copied to the host. ``completion_seconds``: of the
    ``completions``, from the call to when somebody saw that it was done. ``cold``: of the runs, the
    first one of a program that was compiled while we looked (and its times, which are in the others,
    too). ``phase_guess``: prefill or decode, where two programs alternate as in serving an LLM.
    """

    name: str | None
    compiles: int
    compile_seconds: float | None
    executions: int
    dispatch_seconds: float | None
    completions: int | None
    completion_seconds: float | None
    bytes_in: int | None
    bytes_out: int | None
    errors: int
    size: int | None = None
    cold: int = 0
    cold_dispatch_seconds: float | None = None
    cold_completion_seconds: float | None = None
    phase_guess: str | None = None


@dataclass(frozen=True, slots=True)
class HeldMemory:
    """Memory of a device that was given to the process and taken back while we looked; what
    was given before and taken back since is in neither."""

    engine: str
    allocated_bytes: int
    freed_bytes: int


@dataclass(frozen=True, slots=True)
class OffloadPart:
    """One part of the time: ``compute`` on the CPU, ``handover`` of work to another ``backend``,
    ``wait`` for it, ``copy`` to and from it (which on some backends is where the wait is), or
    ``scheduling``: what is left of the engine's calls. ``count`` calls of the backend's functions."""

    part: str
    backend: str | None
    in_calls_seconds: float
    between_calls_seconds: float
    count: int


@dataclass(frozen=True, slots=True)
class Offload:
    """Where time goes with several backends: ``calls`` of the engine, the time in them, and time in
    the backends' functions between them (results that are waited for later). All parts add up to both."""

    calls: int
    in_calls_seconds: float
    between_calls_seconds: float
    parts: tuple[OffloadPart, ...]


@dataclass(frozen=True, slots=True)
class CallFigures:
    """Everything of :class:`CallTotal` and :class:`ProgramTotal`, and why something is missing.
    ``cost_seconds``: what watching did cost, as estimated, of ``busy_seconds`` of the process."""

    calls: tuple[CallTotal, ...] = ()
    programs: tuple[ProgramTotal, ...] = ()
    memory: tuple[HeldMemory, ...] = ()
    notes: tuple[str, ...] = ()
    hits: int = 0
    offload: Offload | None = None
    lost: Mapping[str, int] = field(default_factory=dict)
    shed: tuple[ShedCalls, ...] = ()
    cost_seconds: float = 0.0
    busy_seconds: float = 0.0
    budget_ratio: float | None = None
