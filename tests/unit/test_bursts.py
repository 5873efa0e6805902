# SPDX-License-Identifier: Apache-2.0
"""Carrying out the budget's decisions: in which order, and what when it cannot be done."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterable
from typing import Any, cast

import numpy as np
import pytest

from profinferd.agent.burstload import LoadMaker, ProbeTimes
from profinferd.agent.bursts import RETRY_S, BurstDriver, Probes
from profinferd.agent.errors import MachineError, TargetEnded, TargetError
from profinferd.agent.kernel.programs import GgmlPrograms
from profinferd.agent.model.budget import BudgetConfig, Controller, Decision, Level, Load, Prices
from profinferd.agent.model.calls import GraphRun
from profinferd.agent.model.records import Flag
from profinferd.agent.model.records import Level as Depth
from profinferd.agent.model.sampled import Ran
from profinferd.agent.model.tokens import Phase
from profinferd.agent.sumslots import ANY_NODES, SIZE_UNKNOWN, size_class

from .streams import CALL_BEGIN, CALL_END, CPU, GRAPH_BEGIN, GRAPH_END, SCHED, Stream, session
from .test_model_sampled import NODE_SUM, Engine

PRICES = Prices(1000, 1000, 1000, 1e6)
SUMMED = Flag.SUMMED


class Programs:
    """What the driver asks of the kernel's side, written down."""

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.owned: list[int] = []
        self.spares: dict[tuple[int, int], int | None] = {}
        self.own: dict[int, int] = {}
        self.elements = np.zeros(65536, NODE_SUM)
        self.types = self

    def constants(self) -> dict[str, int]:
        return {"OPS_OFF": 0, "OPS_SUM": 2}

    def capacity(self) -> tuple[int, int]:
        return 256, len(self.elements)

    def stats(self) -> dict[str, int]:
        return {"hits_call": 0, "hits_graph": 0, "hits_op": 0}

    def owned_slots(self) -> list[int]:
        return self.owned

    def graph_clock_ns(self, tgid: int) -> int:
        return 0

    def stop_clock(self, tgid: int) -> None:
        self.log.append("stop clock")

    def set_target(self, tgid: int, *, layout: int, mode: int, epoch: int) -> None:
        self.log.append(f"{'sum' if mode else 'off'} {epoch}")

    def give_spare(
        self, tgid: int, nodes: int, size: int, slot: int | None, first: int = 0, elements: int = 0
    ) -> None:
        self.spares[nodes, size] = slot

    def give_slot(self, tgid: int, hash_: int, slot: int, first: int) -> bool:
        self.own[hash_] = slot
        return True

    def take_slot(self, tgid: int, hash_: int) -> None:
        del self.own[hash_]

    def sums(self, first: int, count: int) -> Any:
        return self.elements[first : first + count].copy()

    def clear_sums(self, first: int, count: int) -> None:
        self.elements[first : first + count] = np.zeros((), NODE_SUM)


class Told:
    """A controller that is told what to decide."""

    def __init__(self) -> None:
        self.armed = self.summing = False
        self.level = Level.OP

    def tick(self, now_s: float, loads: Iterable[Load]) -> dict[str, Decision]:
        (load,) = loads
        return {
            load.target: Decision(
                load.target, self.level, self.armed, self.summing, None, None, "told", "told", (), 0, 0, {},
                0.0, 1.0,
            )
        }  # fmt: skip


class Rig:
    """A driver on all that."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.error: Exception | None = None
        self.programs = Programs(self.log)
        self.hold: threading.Event | None = None
        self.now = 100.0
        probes = Probes(self._attach, self._detach)
        programs = cast(GgmlPrograms, self.programs)
        self.driver = BurstDriver(programs, 100, probes, PRICES, BudgetConfig(), 0)
        self.told = self.driver._controller = cast(Any, Told())
        self.log.clear()

    def _attach(self, group: str) -> int:
        if self.error is not None:
            raise self.error
        self.log.append(f"attach {group}")
        return 2

    def _detach(self, group: str) -> None:
        if self.hold is not None:
            assert self.hold.wait(60)
        self.log.append(f"detach {group}")

    def tick(self, armed: bool | None = None, summing: bool | None = None, later: float = 0.1) -> None:
        self.now += later
        self.told.armed = self.told.armed if armed is None else armed
        self.told.summing = self.told.summing if summing is None else summing
        self.driver.tick(self.now)

    def settled(self) -> None:
        until = time.monotonic() + 60
        while self.driver._leaving is not None and time.monotonic() < until:
            self.tick(later=0.001)
        assert self.driver._leaving is None


def test_order_of_a_burst() -> None:
    """Probes before summing; summing ends before the epoch, the epoch before the probes."""
    rig = Rig()
    rig.tick(armed=True, summing=True)
    assert rig.log == ["attach ops", "sum 0"]
    rig.tick(summing=False)
    rig.tick(armed=False)
    rig.settled()
    assert rig.log == ["attach ops", "sum 0", "off 0", "off 1", "detach ops"]


def test_taking_probes_off_keeps_nobody_waiting() -> None:
    """Perf uprobes take a fifth of a second: rings are drained meanwhile, and no burst begins."""
    rig = Rig()
    rig.hold = threading.Event()
    rig.tick(armed=True, summing=True)
    rig.tick(armed=False, summing=False)
    rig.tick(armed=True, summing=True)  # returns although the probes are still there
    assert "detach ops" not in rig.log and rig.log.count("attach ops") == 1
    assert not rig.driver.armed
    rig.hold.set()
    rig.settled()
    rig.tick()
    assert rig.log[-2:] == ["attach ops", "sum 1"]
    rig.driver.stop()


@pytest.mark.parametrize("error", [TargetError("no such place"), MachineError("no more descriptors")])
def test_probes_that_cannot_be_attached(error: Exception) -> None:
    """A note, once; nothing is summed without probes; and another attempt later."""
    rig = Rig()
    rig.error = error
    for _ in range(5):
        rig.tick(armed=True, summing=True)
    assert rig.log == [] and not rig.driver.armed
    rig.tick(later=RETRY_S)
    assert len(rig.driver.notes) == 1 and str(error).split(":")[0] in rig.driver.notes[0]
    rig.error = None
    rig.tick()
    assert rig.log == []
    rig.tick(later=RETRY_S)
    assert rig.log == ["attach ops", "sum 0"]


def test_a_target_that_has_ended_is_no_note() -> None:
    rig = Rig()
    rig.error = TargetEnded("process 100 ended")
    with pytest.raises(TargetEnded):
        rig.tick(armed=True, summing=True)
    assert rig.driver.notes == []


def test_levels() -> None:
    """What is shed is taken off, and put on again."""
    rig = Rig()
    rig.told.level = Level.TOKEN
    rig.tick()
    rig.told.level = Level.NOTHING
    rig.tick()
    rig.told.level = Level.GRAPH
    rig.tick()
    assert rig.log == ["detach graphs", "stop clock", "detach calls", "attach graphs", "attach calls"]


def test_slots_from_the_first_moment() -> None:
    """Every size has a slot before any graph was seen; each class in exactly one."""
    rig = Rig()
    assert set(rig.programs.spares) == {(0, size) for size in range(SIZE_UNKNOWN + 1)}
    assert sorted(set(filter(None, rig.programs.spares.values()))) == [253, 254, 255]
    sizes = [rig.programs.spares[0, size_class(n)] for n in (1, 2, 31, 32, 100_000, 0)]
    assert sizes[0] != sizes[1] == sizes[2] != sizes[3] == sizes[4] == sizes[5]
    assert [size_class(n) for n in (0, 1, 2, 3, 4, 31, 32, 65535, 1 << 20)] == [16, 0, 1, 1, 2, 4, 5, 15, 15]


def test_who_gets_a_slot() -> None:
    """A shape that comes again gets its own, one that came once a spare one of its size."""
    rig = Rig()
    engine = Engine()
    engine.ops = rig.driver._sampled
    step, prompt = engine.plan(1), engine.plan(40)
    for plan, phase in ((prompt, Phase.PREFILL), (step, Phase.DECODE), (step, Phase.DECODE)):
        engine.run(plan, phase, summed=False)
        rig.driver._sampled.fresh[-1].run.tokens = plan.facts.n_tokens or 0
    rig.tick()
    assert set(rig.programs.own) == {step.facts.hash}
    assert {key for key in rig.programs.spares if key[0]} == {(prompt.n, 5), (step.n, 0)}
    assert len({*rig.programs.own.values(), *rig.programs.spares.values()}) == 6
    assert step.n <= ANY_NODES
    # The kernel forgot the graph (its table is bounded) and described it again: so is its slot.
    rig.programs.own.clear()
    engine.run(step, Phase.DECODE, summed=False)
    rig.driver._sampled.fresh[-1].run.flags = Flag.DESCRIBED
    rig.tick()
    assert set(rig.programs.own) == {step.facts.hash}


def test_times_of_probes() -> None:
    """Decode steps while probes come, are there, or go are no undisturbed neighbours."""
    times = ProbeTimes()
    assert times.clear_of(0, 10**12)
    times.come(100)
    assert times.clear_of(0, 99) and not times.clear_of(0, 100) and not times.clear_of(500, 600)
    times.gone(200)
    assert times.clear_of(201, 300) and not times.clear_of(150, 300) and not times.clear_of(50, 250)
    times.gone(400)  # of nothing
    assert times.clear_of(250, 300)


def _ran(plan: Any, begin: int, ns: int, slot: int | None = None, whole: bool = True, hits: int = 0) -> Ran:
    run = GraphRun(1, 7, 7, Depth.CPU, 0, 1, begin, 0, plan.n, 0, 0, [], [], None, slot=slot, hits=hits)
    run.end = begin + ns
    return Ran(run, plan, Phase.DECODE, whole)


def test_tokens_inside_and_outside() -> None:
    """C18: two bursts of steps that are a tenth slower are measured as that; a step that lost its
    probes, or ran while they were taken off, counts on neither side."""
    plan = Engine().plan(1)
    maker = LoadMaker("t", PRICES, {})
    at, ms = 10**12, 10**6
    fresh: list[Ran] = []

    def steps(count: int, ns: int, **more: Any) -> None:
        nonlocal at
        for _ in range(count):
            fresh.append(_ran(plan, at, ns, **more))
            at += ns + ms

    for _ in range(6):
        steps(10, 10 * ms)
        maker.times.come(at)
        steps(8, 11 * ms, slot=3, hits=400)
        steps(1, 500 * ms, slot=3, whole=False)
        steps(5, 900 * ms)  # while the probes go
        maker.times.gone(at)
        at += ms
        load = maker.make(None, fresh, {}, summing=0, graphs_seen=True)
        assert load.summed == 9
        assert load.phases["decode"].hits_per_graph == pytest.approx(
            (8 * 400 + 16 * plan.before[plan.n]) / 24
        )
        fresh = []
    steps(10, 10 * ms)
    load = maker.make(None, fresh, {}, summing=0, graphs_seen=True)
    assert load.in_burst is not None and load.in_burst.value == pytest.approx(0.1, abs=0.001)
    assert load.in_burst_estimate == pytest.approx(400e-6 / (11e-3 - 400e-6), rel=0.01)


def test_busy_time_of_graphs_whose_records_were_lost() -> None:
    """A machine too busy for us to drain the rings: of ten graphs one is told of. Hits are counted all the
    same, and the estimate read 5 to 8 % where 0.8 % was spent; the kernel's clock knows better."""
    plan = Engine().plan(1)
    controller = Controller(BudgetConfig())
    prices = dataclasses.replace(PRICES, call_ns=2000, graph_ns=2000, op_ns=0, cycle_ns=0, walk_ns=0)
    maker = LoadMaker("t", prices, {"hits_call": 0, "hits_graph": 0}, clock_ns=5 * 10**9)
    at, clock, hits = 10**12, 5 * 10**9, 0
    for i in range(100):
        clock, hits, at = clock + 10 * 1_000_000, hits + 10 * 2, at + 10**8
        fresh = [_ran(plan, at, 1_000_000)]
        stats = {"hits_call": hits, "hits_graph": hits}
        load = maker.make(None, fresh, stats, summing=0, graphs_seen=True, clock_ns=clock)
        decision = controller.tick(i / 10, [load])["t"]
    assert decision.busy_s == pytest.approx(1.0)
    assert decision.estimated_ratio == pytest.approx(0.008)
    assert decision.level == Level.OP


def test_a_graph_that_runs_is_busy_before_it_is_told_and_not_twice() -> None:
    """One that takes a second is told of at its end, like one elsewhere that the clock says nothing of."""
    plan = Engine().plan(1)
    maker = LoadMaker("t", PRICES, {})

    def busy(clock: int, *ns: int) -> float:
        fresh = [_ran(plan, 10**12, one) for one in ns]
        return maker.make(None, fresh, {}, summing=0, graphs_seen=True, clock_ns=clock).busy_s

    second = 10**9
    assert [busy(n * second // 4) for n in (1, 2, 3)] == [0.25, 0.25, 0.25]
    assert busy(second, second) == pytest.approx(0.25)
    assert busy(second) == 0.0
    assert busy(second, 2 * second) == pytest.approx(2.0)  # on a device
    assert busy(2 * second, second, second) == pytest.approx(2.0)  # two at a time
    assert busy(0) == 0.0  # the kernel has forgotten its clock
    assert busy(second // 2, second // 2) == pytest.approx(0.5)


def test_busy_by_calls_where_graphs_are_shed() -> None:
    """D6: or a target without graph probes would look idle, and never get them back."""
    stream, to = Stream(), session()
    maker = LoadMaker("t", PRICES, {})
    ns = 0
    for i in range(4):
        begin, seq = stream.now, stream.next_seq()
        stream.event(CALL_BEGIN, seq, 1, call=seq, object=5, batch_tokens=1)
        stream.now += 20_000_000 + i
        stream.event(CALL_END, seq, 1, call=seq, object=5, begin_ts=begin)
        ns += stream.now - begin
    stream.drain(to)
    load = maker.make(to, [], {}, summing=0, graphs_seen=False)
    assert load.busy_s == pytest.approx(ns / 1e9)
    assert maker.make(to, [], {}, summing=0, graphs_seen=False).busy_s == 0


def test_sums_wait_for_the_return_of_the_call() -> None:
    """Three chunks of a prompt are one call: what they are is known when it has returned."""
    stream, to = Stream(), session()
    call = stream.next_seq()
    stream.event(CALL_BEGIN, call, 1, call=call, object=5, batch_tokens=100)
    for i in range(3):
        sched, cpu = stream.next_seq(), stream.next_seq()
        begin = stream.now
        stream.event(GRAPH_BEGIN, sched, SCHED, call=call, hash=9 + i, n_nodes=4)
        stream.event(
            GRAPH_BEGIN, cpu, CPU, call=call, parent=sched, hash=9 + i, n_nodes=4, flags=SUMMED, sum_slot=8
        )
        stream.now += 1_000_000
        stream.event(GRAPH_END, cpu, CPU, call=call, parent=sched, begin_ts=begin)
        if i == 0:
            stream.drain(to)  # the scheduler goes on
            assert to.unreported(0)
        stream.event(GRAPH_END, sched, SCHED, call=call, begin_ts=begin)
        stream.drain(to)
        assert to.unreported(0) and not to.unreported(stream.now)
    stream.event(CALL_END, call, 1, call=call, object=5, begin_ts=1)
    stream.drain(to)
    assert not to.unreported(0)
