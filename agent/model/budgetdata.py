# SPDX-License-Identifier: Apache-2.0
"""What goes into the budget's controller and what comes out of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .levels import Level, Transition
from .overhead import Interval


@dataclass(frozen=True, slots=True)
class BudgetConfig:
    """``budget_ratio``: 0.01 is 1 %. ``period_s``: least time from burst to burst, >= 5.
    ``max_period_s``: a burst that takes longer to pay for is not worth its level.
    ``min_graphs``, ``max_graphs``: length of a burst. ``margin``: how much better than the
    threshold things must be for recovery. ValueError when they make no sense."""

    budget_ratio: float = 0.01
    period_s: float = 5.0
    qos_min_tokens_per_second: float | None = None
    min_graphs: int = 8
    max_graphs: int = 128
    max_burst_s: float = 2.5
    planned_share: float = 0.4
    max_period_s: float = 60.0
    margin: float = 0.05
    top: Level = Level.OP

    def __post_init__(self) -> None:
        if not 0 < self.budget_ratio <= 1:
            raise ValueError("the budget is a ratio between 0 and 1")
        if self.period_s < 5 or self.max_period_s < self.period_s:
            raise ValueError("a period is 5 s or longer, and no longer than max_period_s")
        if not 1 <= self.min_graphs <= self.max_graphs or self.max_burst_s <= 0:
            raise ValueError("1 <= min_graphs <= max_graphs, max_burst_s > 0")
        if not 0 < self.planned_share <= 0.5 or not 0 < self.margin < 1:
            raise ValueError("0 < planned_share <= 0.5, 0 < margin < 1")
        floor = self.qos_min_tokens_per_second
        if floor is not None and not 0 < floor < float("inf"):
            raise ValueError("qos_min_tokens_per_second is a positive number")


@dataclass(frozen=True, slots=True)
class Prices:
    """Calibrated cost to the target, ns: of a hit at each level, of one arm/disarm cycle, of a
    node of a graph that is looked at as a whole, of a wait that is watched and a record of it, of a
    switch between others, of a page fault."""

    call_ns: float
    graph_ns: float
    op_ns: float
    cycle_ns: float
    walk_ns: float = 0.0
    wait_ns: float = 0.0
    wait_record_ns: float = 0.0
    other_switch_ns: float = 0.0
    fault_ns: float = 0.0


@dataclass(frozen=True, slots=True)
class PhaseLoad:
    """``graphs`` of one phase that ended since the last tick, and how many op hits one of
    them costs while armed: measured, else expected from its nodes, 0: not known."""

    graphs: int
    hits_per_graph: float


@dataclass(frozen=True, slots=True)
class Load:
    """One target since the last tick.

    ``busy_s``: seconds in which a graph (a call, where graph level is shed) ran; time of one
    that is still running may be counted now or when it ends. Hits are those that really
    happened, on the critical path (threads that trap at the same time count once);
    ``walked``: nodes of graphs that were looked at as a whole, for nothing told that they are known.
    ``engine_calls_s``: what probes on calls cost that are described by data; ``causes_s``: what
    watching waits and page faults did (accounts.CAUSES).
    ``summed``: executions with EF_SUMMED that ended, ``summing``: that run now.
    ``tokens_per_second``: decode speed of the running requests, None when there was none.
    ``in_burst``: the measured slowdown of tokens inside bursts, and ``in_burst_estimate``:
    what their hits explain of it at the calibrated price (both or none).
    """

    target: str
    prices: Prices
    busy_s: float = 0.0
    phases: Mapping[str, PhaseLoad] = field(default_factory=dict)
    call_hits: int = 0
    graph_hits: int = 0
    op_hits: int = 0
    walked: int = 0
    engine_calls_s: float = 0.0
    causes_s: Mapping[str, float] = field(default_factory=dict)
    summed: int = 0
    summing: int = 0
    tokens_per_second: float | None = None
    in_burst: Interval | None = None
    in_burst_estimate: float | None = None


@dataclass(frozen=True, slots=True)
class Burst:
    """``graphs`` executions, or ``max_seconds`` after the first one began; ``allowance_s``
    of cost at most. ``expected_s``: how long that takes at the rate of late, 0: not known."""

    graphs: int
    max_seconds: float
    allowance_s: float
    expected_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do with one target now.

    ``level``: probes that may exist at all. ``armed``: op probes are to be there;
    ``summing``: graphs that begin from now on are to be summed (arm first, then sum; at the
    end of a burst summing stops first, and the probes go when the last summed graph ended).
    ``burst``: the running one, ``burst_left_s``: how long it will go on (0: not known, None: there
    is none). ``next_burst_s``: estimate, None while level OP is shed.
    ``reason``: of the level; ``activity``: what the op level is doing, in words.
    ``spent``: seconds of cost by accounts.HOW, only growing, as estimated;
    ``busy_s``: what they compare with. ``correction``: factor that the measured overhead
    puts on the price of an op hit. ``free_ratio``: of the budget, what token and graph probes leave over;
    of that, ``engine_calls_ratio`` and ``causes_ratio`` are spent at present.
    """

    target: str
    level: Level
    armed: bool
    summing: bool
    burst: Burst | None
    next_burst_s: float | None
    reason: str
    activity: str
    transitions: tuple[Transition, ...]
    bursts: int
    bursts_cut: int
    spent: Mapping[str, float]
    busy_s: float
    correction: float
    burst_left_s: float | None = None
    free_ratio: float = 0.0
    engine_calls_ratio: float = 0.0
    causes_ratio: float = 0.0

    @property
    def estimated_ratio(self) -> float | None:
        """Slowdown since the target was first seen; None before it did anything."""
        return sum(self.spent.values()) / self.busy_s if self.busy_s > 0 else None
