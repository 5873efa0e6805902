# SPDX-License-Identifier: Apache-2.0
"""Counters from bursts against workloads whose truth is known (design D12, case C18)."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from profinferd.agent.model.ratio import KindTotal
from profinferd.agent.model.sampling import Execution, Sampler

NODE_SUM = np.dtype(
    [
        ("time", "u8"),
        ("calls", "u4"),
        ("fused", "u4"),
        ("min", "u4"),
        ("max", "u4"),
        ("bucket", "u4", (16,)),
    ]
)
OPS = ("MUL_MAT", "FLASH_ATTN_EXT", "RMS_NORM")
NODES = ("RMS_NORM", "MUL_MAT", "FLASH_ATTN_EXT", "MUL_MAT")
SETUP = 0.01
Workload = list[list[tuple[str, str, bool, int]]]


def shares(topology: str, phase: str, progress: float) -> list[float]:
    """True shares of graph time of the four nodes; attention grows with the KV length."""
    attention = (0.1 if phase == "decode" else 0.3) + 0.3 * progress + (0.1 if topology == "b" else 0.0)
    norm = 0.05
    rest = 1 - SETUP - norm - attention
    return [norm, 0.75 * rest, attention, 0.25 * rest]


class Kernel:
    """The kernel's side: sums of one slot, as ggml.bpf.c keeps them."""

    def __init__(self, n: int = len(NODES), start: int = 0) -> None:
        self.sums = np.zeros(n, NODE_SUM)
        for name in ("calls", "fused", "bucket"):
            self.sums[name] = start  # near 2**32: fields wrap

    def add(self, node: int, seconds: float, fused: bool = False) -> None:
        ns = round(seconds * 1e9)
        one = self.sums[node : node + 1]
        d = min(ns, 2**32 - 1)
        with np.errstate(over="ignore"):
            one["time"] += np.uint64(ns)
            if not one["calls"] or d < one["min"]:
                one["min"] = d
            one["max"] = np.maximum(one["max"], np.uint32(d))
            one["calls"] += np.uint32(1)
            one["fused"] += np.uint32(fused)
            one["bucket"][:, min(15, max(0, d.bit_length() - 9))] += np.uint32(1)


@dataclass
class World:
    """A target with one slot per topology, and the truth beside."""

    rng: random.Random
    sampler: Sampler
    noise: float = 0.05
    start: int = 0
    kernels: dict[str, Kernel] = field(default_factory=dict)
    truth: dict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))
    calls: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    graphs: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def slot(self, topology: str) -> int:
        if topology not in self.kernels:
            kernel = self.kernels[topology] = Kernel(start=self.start)
            self.sampler.give(len(self.kernels) - 1, topology, NODES, kernel.sums)
        return list(self.kernels).index(topology)

    def run(
        self, topology: str, phase: str, summed: bool, progress: float = 0.0, nodes: int = len(NODES)
    ) -> None:
        """One execution; with ``nodes`` below four its probes went away after that many."""
        base = 0.02 if phase == "decode" else 0.3
        mean = (SETUP, *shares(topology, phase, progress))
        parts = [base * share * self.rng.lognormvariate(0, self.noise) for share in mean]
        slot = self.slot(topology)
        for i, op in enumerate(NODES):
            self.truth[phase, op] += parts[i + 1]
            self.calls[phase, op] += 1
            if summed and i < nodes:
                self.kernels[topology].add(i, parts[i + 1], fused=i == 0)
        self.seconds[phase] += sum(parts)
        self.graphs[phase] += 1
        execution = Execution(topology, phase, sum(parts), slot if summed else None, nodes == len(NODES))
        self.sampler.ran([execution])

    def end_burst(self) -> None:
        for i, kernel in enumerate(self.kernels.values()):
            self.sampler.read(i, kernel.sums)
        self.sampler.end_burst()


def by_op(total: KindTotal) -> dict[Any, Any]:
    return {op.key: op for op in total.ops}


def steady(seed: int, sampled: int = 10, gap: int = 30, bursts: int = 12, **world: Any) -> World:
    w = World(random.Random(seed), Sampler(), **world)
    for _ in range(bursts):
        for i in range(gap + sampled):
            w.run("a", "decode", i >= gap)
        w.end_burst()
    return w


def test_totals_are_unbiased_and_the_stated_error_is_right() -> None:
    """Over many runs the mean error vanishes and errors are as large as stated (C18)."""
    scores = []
    errors = []
    runs = 120
    for seed in range(runs):
        w = steady(seed, sampled=6, gap=14, bursts=12, noise=0.2)
        for op, total in by_op(w.sampler.phases()["decode"]).items():
            true = w.truth["decode", op]
            errors.append((total.seconds - true) / true)
            scores.append((total.seconds - true) / total.stderr)
    assert abs(np.mean(errors)) < 3 * np.std(errors) / np.sqrt(runs)
    assert np.std(errors) < 0.03
    # Twelve bursts: about 7 degrees of freedom, whose 95 % quantile is 2.36.
    assert 0.7 < np.sqrt(np.mean(np.square(scores))) < 1.3
    # The ops of one run are not independent: the experiment itself is good to 2 %.
    assert np.mean(np.abs(scores) < 2.36) > 0.95 - 0.04


def test_drift_within_and_between_bursts_does_not_add_up() -> None:
    """Attention grows all along; the estimate follows without lagging half a period."""
    w = World(random.Random(1), Sampler(), noise=0.02)
    for period in range(40):
        for i in range(100):
            w.run("a", "decode", i >= 85, progress=(period * 100 + i) / 4000)
        w.end_burst()
    for op, total in by_op(w.sampler.phases()["decode"]).items():
        # The first burst has no neighbour before it: half a period of drift, once.
        assert total.seconds == pytest.approx(w.truth["decode", op], rel=0.01), op
        assert abs(total.seconds - w.truth["decode", op]) < 4 * total.stderr + 0.005 * total.seconds


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    """Bursts of (topology, phase, summed, nodes): phases change at any moment, also inside a
    burst; topologies come and go; bursts may meet nothing; probes may go away early. A
    prompt shares its slot with decode, which a real one does only when it has one token."""
    step = st.tuples(
        st.sampled_from(["a", "a", "b"]),
        st.sampled_from(["decode", "decode", "prefill"]),
        st.booleans(),
        st.sampled_from([4, 4, 4, 4, 0, 2]),
    )
    return draw(st.lists(st.lists(step, max_size=25), min_size=1, max_size=8))


def played(workload: Workload, start: int, noise: float) -> Iterator[World]:
    w = World(random.Random(7), Sampler(min_graphs=3), noise=noise, start=start)
    for burst in workload:
        for topology, phase, summed, nodes in burst:
            w.run(topology, phase, summed, nodes=nodes if summed else 4)
            yield w
        w.end_burst()
        yield w
    w.sampler.finish()
    yield w


@settings(max_examples=60, deadline=None)
@given(workloads(), st.sampled_from([0, 2**32 - 3]))
def test_counters_are_monotone_and_add_up(workload: Workload, start: int) -> None:
    """D12: nothing goes backwards; ops and setup are the attributed seconds; phases that
    were never sampled have no ops; all graphs are counted (also across wraps)."""
    last: dict[tuple[str, Hashable], float] = {}
    last_calls: dict[tuple[str, Hashable], float] = {}
    for w in played(workload, start, 0.05):
        for phase, total in w.sampler.phases().items():
            assert total.graphs == w.graphs[phase]
            assert total.seconds == pytest.approx(w.seconds[phase])
            assert total.graphs_sampled <= total.graphs
            assert total.attributed_seconds + total.pending_seconds == pytest.approx(total.seconds)
            ops = sum(op.seconds for op in total.ops)
            assert ops + total.setup_seconds == pytest.approx(total.attributed_seconds, abs=1e-6)
            if not total.bursts:
                assert total.ops == ()
            for op in total.ops:
                assert op.seconds >= last.get((phase, op.key), 0.0) - 1e-12
                assert op.calls >= last_calls.get((phase, op.key), 0.0) - 1e-9
                last[phase, op.key], last_calls[phase, op.key] = op.seconds, op.calls
        kinds = w.sampler.kinds()
        assert sum(k.graphs for k in kinds) == sum(w.graphs.values())


@settings(max_examples=40, deadline=None)
@given(workloads())
def test_without_noise_totals_are_the_truth(workload: Workload) -> None:
    """Where shares do not vary, every kind that was sampled once is exact, partial executions
    and all, unless phases with different shares had to share one slot's sums."""
    for burst in workload:
        for t in "ab":
            assume(len({phase for topology, phase, summed, _ in burst if topology == t and summed}) <= 1)
    *_, w = played(workload, 2**32 - 5, 0.0)
    for kind in w.sampler.kinds():
        if not kind.bursts:
            continue
        attributed = kind.attributed_seconds
        assert attributed == pytest.approx(kind.seconds)
        true = shares(kind.topology, kind.phase, 0.0)
        expected: dict[str, float] = defaultdict(float)
        for op, share in zip(NODES, true, strict=True):
            expected[op] += share * attributed
        for key, op_total in by_op(kind).items():
            assert op_total.seconds == pytest.approx(expected[key], rel=1e-5), key
            assert op_total.calls == pytest.approx(kind.graphs * NODES.count(key))


def test_everything_sampled_is_exact_with_no_error() -> None:
    """With every graph summed nothing is inferred."""
    w = steady(3, gap=0, noise=0.4)
    total = w.sampler.phases()["decode"]
    for op, row in by_op(total).items():
        assert row.seconds == pytest.approx(w.truth["decode", op], rel=1e-6)
        assert row.stderr == 0
        assert row.calls == w.calls["decode", op]
    assert total.graphs_sampled == total.graphs


def test_phase_changes_in_mid_burst() -> None:
    """A prompt of another shape inside a burst: each phase has its own shares."""
    w = World(random.Random(5), Sampler(min_graphs=1), noise=0.02)
    for _ in range(10):
        for i in range(40):
            phase = "prefill" if i in (3, 4, 33, 34) else "decode"
            w.run("p" if phase == "prefill" else "d", phase, i >= 28)
        w.end_burst()
    for phase in ("decode", "prefill"):
        for op, total in by_op(w.sampler.phases()[phase]).items():
            assert total.seconds == pytest.approx(w.truth[phase, op], rel=0.02), (phase, op)
            assert total.calls == w.calls[phase, op]


def test_one_shape_in_two_phases_shares_its_slot() -> None:
    """A one-token prompt has the shape of a decode step: calls go by executions, seconds by
    graph seconds, so that neither phase has more op time than graph time."""
    sampler = Sampler(min_graphs=1)
    kernel = Kernel()
    sampler.give(0, "a", NODES, kernel.sums)
    for phase, seconds, times in (("decode", 0.02, 9), ("prefill", 0.04, 1)):
        for _ in range(times):
            for i in range(4):
                kernel.add(i, seconds / 4)
            sampler.ran([Execution("a", phase, seconds, 0)])
    sampler.read(0, kernel.sums)
    sampler.end_burst()
    phases = sampler.phases()
    assert phases["decode"].attributed_seconds == pytest.approx(0.18)
    assert phases["prefill"].attributed_seconds == pytest.approx(0.04)
    assert by_op(phases["decode"])["MUL_MAT"].calls == 18
    assert by_op(phases["prefill"])["MUL_MAT"].calls == 2
    assert by_op(phases["prefill"])["RMS_NORM"].seconds == pytest.approx(0.01)


def test_a_phase_never_sampled_is_absent() -> None:
    """D12: prefill was seen, its ops never: no rows, and its seconds wait visibly."""
    w = World(random.Random(2), Sampler())
    for i in range(40):
        w.run("a", "decode", i >= 20)
        w.run("a", "prefill", False)
    w.end_burst()
    w.sampler.finish()
    prefill = w.sampler.phases()["prefill"]
    assert prefill.ops == () and prefill.attributed_seconds == 0 and prefill.graphs_sampled == 0
    assert prefill.pending_seconds == pytest.approx(w.seconds["prefill"])


def test_idle_then_busy() -> None:
    """Bursts that meet nothing change nothing; the backlog is paid at the next that does."""
    w = steady(4, bursts=4)
    before = w.sampler.phases()
    for _ in range(20):
        w.end_burst()
    assert w.sampler.phases() == before
    for i in range(500):
        w.run("a", "decode", i >= 480)
    waiting = w.sampler.phases()["decode"]
    assert waiting.attributed_seconds == before["decode"].attributed_seconds
    w.end_burst()
    total = w.sampler.phases()["decode"]
    assert total.pending_seconds == 0
    for op, row in by_op(total).items():
        assert abs(row.seconds - w.truth["decode", op]) < 4 * row.stderr


def test_a_handful_of_graphs_waits_for_more() -> None:
    """Two graphs do not speak for a thousand; they are not lost either."""
    w = World(random.Random(6), Sampler(min_graphs=8, min_share=0.05))
    for burst in range(4):
        for i in range(250):
            w.run("a", "decode", i >= 248)
        w.end_burst()
        assert w.sampler.phases()["decode"].bursts == (1 if burst == 3 else 0)
    assert w.sampler.phases()["decode"].graphs_sampled == 8


def test_executions_and_sums_that_disagree() -> None:
    """An end that was lost, executions without probes, only partial ones."""

    def share(feed: Callable[[Sampler, Kernel], None]) -> KindTotal:
        sampler, kernel = Sampler(min_graphs=1), Kernel()
        sampler.give(0, "a", NODES, kernel.sums)
        feed(sampler, kernel)
        sampler.read(0, kernel.sums)
        sampler.end_burst()
        return sampler.phases()["decode"]

    def nodes(kernel: Kernel, n: int = 4) -> None:
        for i in range(n):
            kernel.add(i, 0.005)

    def lost(sampler: Sampler, kernel: Kernel) -> None:
        for i in range(10):
            nodes(kernel)
            if i != 4:
                sampler.ran([Execution("a", "decode", 0.02, 0)])

    def late(sampler: Sampler, kernel: Kernel) -> None:
        for i in range(10):
            sampler.ran([Execution("a", "decode", 0.02, 0)])
            if i >= 4:
                nodes(kernel)

    def partial(sampler: Sampler, kernel: Kernel) -> None:
        nodes(kernel, 2)
        sampler.ran([Execution("a", "decode", 0.02, 0, whole=False)])

    def some_partial(sampler: Sampler, kernel: Kernel) -> None:
        for i in range(5):
            nodes(kernel, 4 if i < 3 else 1)
            sampler.ran([Execution("a", "decode", 0.021, 0, whole=i < 3)])

    total = share(some_partial)
    assert total.graphs_sampled == 3
    ops = by_op(total)
    for op in OPS:
        assert ops[op].seconds == pytest.approx(total.seconds * 0.005 / 0.021 * NODES.count(op), rel=1e-6)
        assert ops[op].calls == 5 * NODES.count(op)
    for feed, sampled in ((lost, 9), (late, 6)):
        total = share(feed)
        assert total.graphs_sampled == sampled
        assert by_op(total)["MUL_MAT"].seconds == pytest.approx(total.seconds / 2, rel=1e-6)
    total = share(partial)
    assert total.graphs_sampled == 0 and total.ops == () and total.pending_seconds == pytest.approx(0.02)


def test_slots_are_recycled_without_losing_sums() -> None:
    """Many shapes through one slot: every summed graph counts once, the totals stay."""
    rng = random.Random(8)
    sampler = Sampler(min_graphs=1)
    true: dict[str, float] = defaultdict(float)
    for shape in range(30):
        kernel = Kernel(start=2**32 - 2)
        sampler.give(0, "a", NODES, kernel.sums)
        for i in range(6):
            seconds = rng.uniform(0.01, 0.03)
            if i >= 3:
                for n, s in enumerate(shares("a", "decode", 0)):
                    kernel.add(n, seconds * s)
            sampler.ran([Execution("a", "decode", seconds, 0 if i >= 3 else None)])
            for op, s in zip(NODES, shares("a", "decode", 0), strict=True):
                true[op] += seconds * s
        with pytest.raises(ValueError, match="not read"):
            sampler.take(0)
        sampler.read(0, kernel.sums)
        if shape % 4 == 3:
            sampler.end_burst()
        sampler.take(0)
    sampler.finish()
    total = sampler.phases()["decode"]
    assert total.graphs_sampled == 90
    for op, row in by_op(total).items():
        assert row.seconds == pytest.approx(true[op], rel=1e-4)
        assert row.calls == 180 * NODES.count(op)


def test_kinds_are_bounded_and_folding_keeps_the_phase_totals() -> None:
    """C20: hundreds of topologies; the phase's counters neither shrink nor stop."""
    w = World(random.Random(9), Sampler(min_graphs=1, max_kinds=5), noise=0.02)
    last: dict[str, float] = defaultdict(float)
    for n in range(60):
        for i in range(4):
            w.run(f"t{n}", "decode", i >= 2)
        w.end_burst()
        for op, row in by_op(w.sampler.phases()["decode"]).items():
            assert row.seconds >= last[op]
            last[op] = row.seconds
    assert len(w.sampler.kinds()) == 6
    total = w.sampler.phases()["decode"]
    assert total.graphs == 240 and total.graphs_sampled == 120
    for op, row in by_op(total).items():
        assert row.seconds == pytest.approx(w.truth["decode", op], rel=0.03)
        assert row.calls == w.calls["decode", op]


def test_extremes_and_histogram_are_of_the_summed_calls() -> None:
    """min, max and buckets come from the kernel as they are."""
    sampler, kernel = Sampler(min_graphs=1), Kernel(n=1)
    sampler.give(0, "a", ["X"], kernel.sums)
    for ns in (300, 600, 5000):
        kernel.add(0, ns * 1e-9)
        sampler.ran([Execution("a", "decode", 1e-5, 0)])
    sampler.ran([Execution("a", "decode", 1e-5)])
    sampler.read(0, kernel.sums)
    sampler.end_burst()
    (op,) = sampler.phases()["decode"].ops
    assert (op.shortest_ns, op.longest_ns) == (300, 5000)
    assert op.buckets[:5] == (1, 1, 0, 0, 1) and sum(op.buckets) == 3
    assert op.calls == 4


@pytest.mark.parametrize(
    "wrong",
    [
        lambda s, k: s.give(0, "a", NODES, k),
        lambda s, k: s.give(1, "a", NODES[:2], k),
        lambda s, k: s.ran([Execution("b", "decode", 1.0, 0)]),
        lambda s, k: s.ran([Execution("a", "decode", 1.0, 5)]),
        lambda s, k: s.read(0, k[:2]),
    ],
)
def test_misuse_is_refused(wrong: Callable[[Sampler, npt.NDArray[Any]], None]) -> None:
    """A slot belongs to one graph at a time, with one length."""
    sampler = Sampler()
    sums = np.zeros(4, NODE_SUM)
    sampler.give(0, "a", NODES, sums)
    with pytest.raises(ValueError):
        wrong(sampler, sums)
