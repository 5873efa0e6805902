# SPDX-License-Identifier: Apache-2.0
"""Op figures from sums of bursts, against an engine whose every kernel is known (design D12)."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profinferd.agent.model import costs
from profinferd.agent.model.calls import GraphRun
from profinferd.agent.model.plans import OpKey, Plan
from profinferd.agent.model.records import Flag, Level
from profinferd.agent.model.sampled import Coverage, SampledOps
from profinferd.agent.model.sampledcosts import SampledCosts
from profinferd.agent.model.tokens import Phase

from .graphs import decoder, record_dtype
from .streams import Stream

NODE_SUM = record_dtype("node_sum")
SPARE = 200
SETUP_NS = 700
DECODE, PREFILL = Phase.DECODE, Phase.PREFILL


@dataclass
class Engine:
    """Runs decoders, sums them as ggml.bpf.c does, and keeps the truth beside.

    ``own`` shapes have a slot of their own, all others share the spare one.
    """

    noise: float = 0.0
    layers: int = 1
    ops: SampledOps = field(default_factory=SampledOps)
    plans: dict[tuple[int, int, int], Plan] = field(default_factory=dict)
    own: dict[int, int] = field(default_factory=dict)
    sums: dict[int, Any] = field(default_factory=dict)
    seconds: dict[tuple[OpKey, str], float] = field(default_factory=lambda: defaultdict(float))
    calls: dict[tuple[OpKey, str], int] = field(default_factory=lambda: defaultdict(int))
    flops: dict[tuple[OpKey, str], int] = field(default_factory=lambda: defaultdict(int))
    bytes: dict[tuple[OpKey, str], int] = field(default_factory=lambda: defaultdict(int))
    graph_seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    graphs: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    now: int = 1_000_000_000

    def __post_init__(self) -> None:
        self.rng = random.Random(3)
        self.ops.lend(SPARE)
        self.sums[SPARE] = np.zeros(400, NODE_SUM)

    def plan(self, tokens: int, kv: int = 256, layers: int = 0) -> Plan:
        key = (tokens, kv, layers or self.layers)
        if key not in self.plans:
            graph = decoder(tokens, 1, kv, layers=key[2]).graph(hash=len(self.plans) + 1)
            self.plans[key] = Plan.of(graph, {})
        return self.plans[key]

    def give(self, plan: Plan) -> None:
        """A slot of its own."""
        slot = self.own[plan.facts.hash] = len(self.own)
        self.sums[slot] = np.zeros(plan.n, NODE_SUM)
        self.ops.give(slot, plan, self.sums[slot])

    def run(
        self,
        plan: Plan,
        phase: Phase,
        *,
        summed: bool = True,
        until: int | None = None,
        unseen: tuple[int, ...] = (),
        fuse: bool = True,
        known: bool = True,
        experts: dict[int, int] | None = None,
    ) -> None:
        """One execution. ``until``: its probes were gone from this node on; ``unseen``: nodes that
        no probe sees; ``known``: False when its descriptors were lost."""
        graph = plan.graph
        assert graph is not None
        slot = self.own.get(plan.facts.hash, SPARE) if summed else None
        run = GraphRun(
            1, 7, 7, Level.CPU, 0, plan.facts.hash, self.now, 0, plan.n, 0, 0, [], [], None, slot=slot
        )
        self.now += SETUP_NS
        skip = False
        for i in np.flatnonzero(graph.expected).tolist():
            if skip:
                skip = False
                continue
            node = graph.nodes[i]
            fused = fuse and node.op == "RMS_NORM"
            skip = fused
            tokens = plan.facts.n_tokens or 1
            ns = round(1000 * (1 + i % 5) * tokens**0.8 * self.rng.lognormvariate(0, self.noise))
            kernel = f"fused_{graph.nodes[i + 1].op.lower()}" if fused else node.kernel
            key = (OpKey(node.op, node.dtype, node.role, kernel), phase.value)
            self.seconds[key] += ns / 1e9
            self.calls[key] += 1
            cost = costs.cost(graph, i, fused=fused)
            self.flops[key] += cost.flops or 0
            self.bytes[key] += cost.bytes or 0
            self.now += ns
            if slot is not None and (until is None or i < until) and i not in unseen:
                one = self.sums[slot][i : i + 1]
                one["time"] += np.uint64(ns)
                one["calls"] += np.uint32(1)
                one["fused"] += np.uint32(fused)
        run.end = self.now
        if until is not None:
            run.end_flags = Flag.DISARMED
        self.graph_seconds[phase.value] += run.ns / 1e9
        self.graphs[phase.value] += 1
        self.ops.graph_ran(run, plan if known else None, phase, experts or {})

    def read(self) -> list[Coverage]:
        found = []
        for slot, sums in self.sums.items():
            if slot == SPARE:
                used = self.ops.spare_nodes(slot)
                used = len(sums) if used is None else used
                found += self.ops.read_spare(slot, sums[:used].copy())
                sums[:used] = np.zeros((), NODE_SUM)
            else:
                found += self.ops.read(slot, sums.copy())
        self.ops.end_burst()
        return found

    def phase_seconds(self, phase: Phase) -> float:
        return sum(op.seconds for (_, p), op in self.ops.ops().items() if p == phase.value)


def same(engine: Engine, phases: set[str], rel: float = 1e-6) -> None:
    """Estimates equal the truth in these phases."""
    found = engine.ops.ops()
    assert {key for key in found if key[1] in phases} == {k for k in engine.seconds if k[1] in phases}
    for key in (k for k in engine.seconds if k[1] in phases):
        op = found[key]
        assert op.seconds == pytest.approx(engine.seconds[key], rel=rel), key
        assert op.calls == pytest.approx(engine.calls[key])
        assert (op.flops, op.bytes) == (engine.flops[key], engine.bytes[key]), key


def test_all_summed_is_the_truth() -> None:
    """Seconds, calls, FLOPs, bytes; repeated shapes, prompts that come once, phases by turns."""
    engine = Engine(noise=0.3)
    step = engine.plan(1)
    engine.give(step)
    for i in range(6):
        engine.run(step, DECODE)
        engine.run(engine.plan(40 + i), PREFILL)
    engine.read()
    same(engine, {"decode", "prefill"})
    assert all(op.stderr == 0 for op in engine.ops.ops().values())
    assert {p: t.graphs_sampled for p, t in engine.ops.phases().items()} == {"decode": 6, "prefill": 6}
    for phase in ("decode", "prefill"):
        share = engine.ops.setup_share(step.facts.topology, phase)
        assert share == pytest.approx(6 * SETUP_NS / 1e9 / engine.graph_seconds[phase], rel=1e-6)


def test_one_in_four_summed_is_near_the_truth() -> None:
    """Op by op within 2 points of graph time, and the work is that of all graphs."""
    engine = Engine(noise=0.2)
    step = engine.plan(1)
    engine.give(step)
    for burst in range(20):
        for i in range(12):
            engine.run(step, DECODE, summed=i >= 9)
            if i % 4 == 0:
                engine.run(engine.plan(33 + burst * 12 + i), PREFILL, summed=i >= 8)
        engine.read()
    engine.ops.finish()
    found = engine.ops.ops()
    for (key, phase), true in engine.seconds.items():
        whole = engine.graph_seconds[phase]
        op = found[key, phase]
        assert abs(op.seconds - true) < 0.02 * whole and abs(op.seconds - true) < 5 * op.stderr
        assert (op.flops, op.bytes) == (engine.flops[key, phase], engine.bytes[key, phase])
        assert op.calls == pytest.approx(engine.calls[key, phase])


STEP = st.tuples(
    st.sampled_from([1, 1, 1, 4, 40, 41, 42]),  # tokens
    st.booleans(),  # summed
    st.sampled_from([None, None, None, 0, 9]),  # probes gone from this node on
    st.booleans(),  # fused
    st.sampled_from([True, True, True, False]),  # descriptors arrived
)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.lists(STEP, max_size=12), min_size=1, max_size=6))
def test_no_figure_ever_shrinks(bursts: list[list[tuple[int, bool, int | None, bool, bool]]]) -> None:
    """D12: whatever is summed, lost or fused; nor does a phase get more op time than graph time."""
    engine = Engine(noise=0.4)
    engine.give(engine.plan(1))
    last: dict[tuple[OpKey, str], tuple[float, float]] = {}
    for burst in bursts:
        for tokens, summed, until, fuse, known in burst:
            phase = DECODE if tokens < 40 else PREFILL
            engine.run(engine.plan(tokens), phase, summed=summed, until=until, fuse=fuse, known=known)
        engine.read()
        for key, op in engine.ops.ops().items():
            before = last.get(key, (0.0, 0.0))
            assert op.seconds >= before[0] and op.calls >= before[1] - 1e-9
            last[key] = (op.seconds, op.calls)
        for phase in (DECODE, PREFILL):
            assert engine.phase_seconds(phase) <= engine.graph_seconds[phase.value] * (1 + 1e-9)
    engine.ops.finish()
    totals = engine.ops.phases()
    assert {phase: total.graphs for phase, total in totals.items()} == dict(engine.graphs)
    for key, op in engine.ops.ops().items():
        assert op.seconds >= last.get(key, (0.0, 0.0))[0]


def test_a_phase_that_was_never_summed_is_absent() -> None:
    """Not zero: no op of it, its seconds wait, and nothing of it goes to the other phase."""
    engine = Engine()
    engine.give(engine.plan(1))
    for i in range(10):
        engine.run(engine.plan(1), DECODE)
        engine.run(engine.plan(50 + i), PREFILL, summed=False)
    engine.read()
    engine.ops.finish()
    same(engine, {"decode"})
    assert {phase for _, phase in engine.ops.ops()} == {"decode"}
    waits = engine.ops.phases()["prefill"].pending_seconds
    assert waits == pytest.approx(engine.graph_seconds["prefill"])
    assert engine.ops.setup_share(engine.plan(1).facts.topology, "prefill") is None


def test_strangers_in_a_spare_slot() -> None:
    """Two topologies, or phases half and half: nobody can tell whose time it is, so nobody gets
    it; after the reading the slot is as good as new."""
    for others in ([(50, 2)], [(51, 1), (1, 1)]):
        engine = Engine()
        engine.run(engine.plan(50), PREFILL)
        for tokens, layers in others:
            for _ in range(30 if tokens == 1 else 1):
                engine.run(engine.plan(tokens, layers=layers), DECODE if tokens == 1 else PREFILL)
        assert engine.read() == []
        assert engine.ops.ops() == {}
        engine.run(engine.plan(52), PREFILL)
        engine.read()
        assert engine.phase_seconds(PREFILL) > 0


def test_nine_tenths_of_a_spare_slot_speak() -> None:
    """A step of another phase among prompts takes nothing with it and gets nothing."""
    engine = Engine()
    for i in range(12):
        engine.run(engine.plan(60 + i), PREFILL)
    engine.run(engine.plan(1), DECODE)
    engine.read()
    assert {phase for _, phase in engine.ops.ops()} == {"prefill"}
    whole = engine.graph_seconds["prefill"]
    for (key, phase), op in engine.ops.ops().items():
        assert op.seconds == pytest.approx(engine.seconds[key, phase], abs=0.02 * whole)
    assert engine.ops.phases()["decode"].graphs == 1


def test_unknown_graphs_count_and_say_nothing() -> None:
    """Descriptors lost: its seconds are in no op; of the same size in a spare slot it does no harm."""
    engine = Engine()
    for i in range(8):
        engine.run(engine.plan(40 + i), PREFILL, known=i != 3)
    engine.read()
    assert engine.ops.phases()["prefill"].graphs == 8
    assert engine.phase_seconds(PREFILL) < engine.graph_seconds["prefill"]
    alone = Engine()
    alone.run(alone.plan(40), PREFILL, known=False)
    assert alone.read() == [] and alone.ops.ops() == {}


def test_coverage() -> None:
    """Executed, fused and uncovered add up to what has to run; probes that left early hide
    nothing; a graph that no probe saw is uncovered as a whole."""
    engine = Engine()
    plan = engine.plan(1)
    engine.give(plan)
    expected = int(plan.before[plan.n])
    kernels = Stream._dispatch(decoder(1, 1, 256, layers=1))[1]
    halves = sum(fused for _, fused in kernels)
    engine.run(plan, DECODE)
    assert engine.read() == [Coverage(1, frozenset({DECODE}), len(kernels), halves, 0)]
    assert len(kernels) + halves == expected
    engine.run(plan, DECODE, until=10)
    assert engine.read() == []
    mul_mats = tuple(i for i, n in enumerate(plan.graph.nodes) if n.op == "MUL_MAT") if plan.graph else ()
    engine.run(plan, DECODE, unseen=mul_mats)
    (seen,) = engine.read()
    assert (seen.uncovered, seen.executed) == (len(mul_mats), len(kernels) - len(mul_mats))
    engine.run(plan, PREFILL, unseen=tuple(range(plan.n)))
    (seen,) = engine.read()
    assert (seen.executed, seen.fused, seen.uncovered, seen.phases) == (0, 0, expected, frozenset({PREFILL}))
    for tokens in (40, 41):
        engine.run(engine.plan(tokens), PREFILL)
    assert [(c.hash, c.uncovered) for c in engine.read()] == [(2, 0), (3, 0)]


def test_a_slot_that_was_given_away() -> None:
    """An execution that is only accounted now, of a graph whose slot serves another: not summed."""
    engine = Engine()
    engine.give(engine.plan(1))
    engine.own[engine.plan(1, 512).facts.hash] = 0
    engine.run(engine.plan(1, 512), DECODE)
    engine.ops.flush()
    assert engine.ops.phases()["decode"].graphs_sampled == 0
    engine.read()
    assert engine.ops.ops() == {}


def test_what_a_wrong_layout_summed_means_nothing() -> None:
    engine = Engine()
    engine.run(engine.plan(40), PREFILL)
    engine.ops.spoil(SPARE)
    engine.run(engine.plan(41), PREFILL)
    engine.read()
    assert engine.ops.ops() == {}
    assert not engine.sums[SPARE]["calls"].any()
    engine.run(engine.plan(42), PREFILL)
    engine.read()
    assert engine.phase_seconds(PREFILL) > 0


def test_ten_thousand_prompts_take_no_room() -> None:
    """C20: shapes that come once and are never summed hold neither plans nor costs."""
    book = SampledCosts()
    graph = decoder(1, 1, 256, layers=1).graph(hash=1)
    plan = Plan.of(graph, {})
    facts = plan.facts
    for i in range(10_000):
        plan.facts = type(facts)(i + 1, *(getattr(facts, name) for name in list(type(facts).__slots__)[1:]))
        book.ran("t", "prefill", plan)
    waiting = book._waiting["t", "prefill"]
    assert len(waiting.plans) <= 16 and len(waiting.priced) <= len(plan.keys)
    book.commit("t", "prefill")
    key = next(k for k in plan.keys if k.role == "output")
    total = book.total(key, "prefill")
    cost = next(costs.cost(graph, n.index) for n in graph.nodes if n.role == "output")
    assert total is not None and total.flops == 10_000 * (cost.flops or 0)
    for i in range(500):
        book.ran(f"topology {i}", "decode", plan)
    assert len(book._waiting) <= 128


def test_experts_are_those_that_were_used() -> None:
    """D11: bytes of MUL_MAT_ID are those of the experts seen in bursts, on average."""
    from .graphs import Builder

    b = Builder()
    table = b.leaf("blk.0.ffn_up_exps.weight", "q8_0", 64, 32, 8)
    x = b.leaf("x", "f32", 64, 1, 4)
    ids = b.leaf("ids", "i32", 2, 4)
    b.op("MUL_MAT_ID", "f32", (32, 2, 4), table, x, ids, name="ffn_moe_up-0")
    graph = b.graph(hash=5)
    plan = Plan.of(graph, {})
    book = SampledCosts()
    for used in (3, 5):
        book.routed("t", "decode", plan, {0: used})
    for _ in range(10):
        book.ran("t", "decode", plan)
    book.commit("t", "decode")
    total = book.total(plan.keys[0], "decode")
    four = costs.bytes_moved(graph, 0, experts=4)
    assert total is not None and total.bytes_known and total.bytes == 10 * (four or 0)


def test_a_reading_without_a_kernel_forgets_no_fusion() -> None:
    """C25: probes that went away in mid-graph leave nodes uncalled, which does not part a pair."""
    graph = decoder(1, 1, 256, layers=1).graph(hash=1)
    plan = Plan.of(graph, {})
    head = next(n.index for n in graph.nodes if n.op == "RMS_NORM" and n.role == "ffn_norm")
    called, fused, nothing = (np.zeros(plan.n, dtype=np.bool_) for _ in range(3))
    called[:], fused[head] = True, True
    book = SampledCosts()
    book.fuses("t", called, fused)
    book.fuses("t", nothing, nothing)
    book.ran("t", "decode", plan)
    book.commit("t", "decode")
    pair = plan.keys[int(plan.group[plan.n + head])]
    total = book.total(pair, "decode")
    assert total is not None and total.bytes == costs.cost(graph, head, fused=True).bytes
    # Seen to run alone, it is so from then on.
    book.fuses("t", called, nothing)
    book.ran("t", "decode", plan)
    book.commit("t", "decode")
    alone = book.total(plan.keys[int(plan.group[head])], "decode")
    assert alone is not None and alone.bytes >= (costs.cost(graph, head).bytes or 0) > 0
