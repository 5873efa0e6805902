# SPDX-License-Identifier: Apache-2.0
"""Two recordings compared: what changed is shown, and what did not is not (case C25).

Noise is made as it was measured on a shared machine: slow drift of everything, spells in which a
neighbour takes the core, a few per cent between runs for each operator, and rare long pauses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from profinferd.agent.model import student
from profinferd.agent.model.diff import compare
from profinferd.agent.model.diffdata import Diff, Row
from profinferd.agent.model.tensors import Graph
from profinferd.agent.model.trace import Trace

from . import longtraces, traces
from .graphs import Builder, decoder
from .test_exporters_perfetto import FAULT

LAYERS = 6
GRAPH = decoder(1, 1, 256, layers=LAYERS).graph()
ORDER = longtraces.kernels(GRAPH)
#: Mean ns of a kernel by operator; the head is the longest.
NS = {"MUL_MAT": 80_000, "FLASH_ATTN_EXT": 40_000, "GET_ROWS": 3_000, "SET_ROWS": 2_000}
Change = Callable[[Graph, int], float]


def recording(
    seed: int, *, change: Change = lambda graph, node: 1.0, executions: int = 160, quiet: bool = False,
    graph: Graph = GRAPH, order: Sequence[tuple[int, bool]] = ORDER, everything: float = 1.0,
    pauses: float = 0.002,
) -> Trace:  # fmt: skip
    """A recording of a build in which ``change`` says how much longer a node's kernel takes."""
    random = np.random.default_rng(seed)
    mean = np.array([NS.get(graph.nodes[n].op, 5_000) * change(graph, n) for n, _ in order])
    mean[-1] *= 10
    times = np.tile(mean * everything, (executions, 1))
    if not quiet:
        size = times.shape
        times *= np.exp(random.normal(0, 0.02, size[1]))  # how memory was laid out in this run
        times *= np.exp(random.normal(0, 0.08))  # how busy the machine was in this run
        drift = np.cumsum(random.normal(0, 0.01, size[0]))
        times *= np.exp(drift - drift.mean())[:, None]
        spells = np.repeat(random.random(-(-size[0] // 8)) < 0.15, 8)[: size[0]]
        times *= np.where(spells, 1.6, 1.0)[:, None]
        times *= np.exp(random.normal(0, 0.05, size))
        times += np.where(random.random(size) < pauses, 4_000_000, 0)
        times += random.normal(0, 60, size[1])  # what a probe took in this run
    return longtraces.trace([longtraces.segment(times.astype(np.int64), order)], [graph])


def slower(factor: float, role: str, layer: int | None = None) -> Change:
    def change(graph: Graph, node: int) -> float:
        it = graph.nodes[node]
        return factor if it.role == role and it.op == "MUL_MAT" and layer in (None, it.layer) else 1.0

    return change


def decode_rows(diff: Diff) -> tuple[Row, ...]:
    (phase,) = diff.phases
    assert phase.phase == "decode"
    return phase.significant


@pytest.mark.parametrize("seed", range(6))
def test_two_recordings_of_one_build_do_not_differ(seed: int) -> None:
    diff = compare(recording(2 * seed), recording(2 * seed + 1))
    assert decode_rows(diff) == ()
    assert diff.phases[0].pairs == 160 and diff.phases[0].tested > 100


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("factor", [1.3, 0.7])
def test_one_operator_that_changed_is_the_only_one_shown(seed: int, factor: float) -> None:
    diff = compare(recording(2 * seed), recording(2 * seed + 1, change=slower(factor, "attn_q")))
    (row,) = decode_rows(diff)
    assert (row.op, row.role, row.layers, row.change) == ("MUL_MAT", "attn_q", None, "same")
    assert row.time is not None and row.time.low < factor < row.time.high
    assert row.time.value == pytest.approx(factor, rel=0.12)


@pytest.mark.parametrize("seed", range(2))
def test_one_layer_that_changed_is_the_only_one_shown(seed: int) -> None:
    diff = compare(recording(2 * seed), recording(2 * seed + 1, change=slower(1.5, "ffn_up", 3)))
    (row,) = decode_rows(diff)
    assert (row.op, row.role, row.layers) == ("MUL_MAT", "ffn_up", (3,))
    assert row.time is not None and row.time.value == pytest.approx(1.5, rel=0.15)


def test_usual_times_of_operators_add_up_to_that_of_a_token() -> None:
    """On a machine so busy that nearly every execution has a pause of 4 ms in some layer, but no layer has
    one in most executions: the usual token has none, and neither has its operators."""
    one = compare(recording(1, pauses=0.2), recording(2, pauses=0.2)).phases[0]
    assert one.significant == ()
    for whole, rows in (
        (one.a_usual_seconds, [row.a.usual_seconds for row in one.rows if row.a]),
        (one.b_usual_seconds, [row.b.usual_seconds for row in one.rows if row.b]),
    ):
        assert sum(rows) == pytest.approx(whole, rel=1e-9)
        assert max(rows) < 0.004 < 0.02 < one.a_seconds


def test_what_takes_most_of_the_time_may_be_what_changed() -> None:
    """Most of a token is the head here: it must not pass for the machine."""
    diff = compare(recording(1), recording(2, change=slower(1.4, "output")))
    assert [(row.op, row.role) for row in decode_rows(diff)] == [("MUL_MAT", "output")]


def test_a_machine_that_is_slower_as_a_whole_is_told_apart_from_operators() -> None:
    diff = compare(recording(1, quiet=True), recording(2, quiet=True, everything=1.25))
    (phase,) = diff.phases
    assert phase.significant == ()
    assert phase.common == pytest.approx(1.25, rel=1e-3)
    assert phase.total is not None and phase.total.significant
    assert phase.total.value == pytest.approx(1.25, rel=1e-3)
    assert any("busier machine" in note for note in diff.notes)
    assert diff.exceeded(0.05) == ["decode: time per token +25.0%"]
    assert diff.exceeded(0.30) == []


def test_the_gate_names_what_got_slower() -> None:
    same = compare(recording(1), recording(2))
    assert [line for line in same.exceeded(0.05) if "time per token" not in line] == []
    diff = compare(recording(1, quiet=True), recording(2, quiet=True, change=slower(1.2, "ffn_down")))
    assert "decode: MUL_MAT ffn_down +20.0%" in diff.exceeded(0.05)
    faster = compare(recording(2, quiet=True, change=slower(1.2, "ffn_down")), recording(1, quiet=True))
    assert faster.exceeded(0.05) == []


def test_figures_by_hand() -> None:
    """Two of everything: calls, seconds and bytes per token."""
    (phase,) = compare(recording(1, quiet=True), recording(1, quiet=True)).phases
    up = next(row for row in phase.rows if row.role == "ffn_up")
    assert up.a is not None and up.a == up.b
    assert (up.a.calls, up.a.bytes) == (LAYERS, LAYERS * (512 * 144 + 256 * 4 + 512 * 4))
    assert up.a.seconds == pytest.approx(LAYERS * 80e-6)
    assert (
        phase.a_seconds == phase.b_seconds == pytest.approx(sum(row.a.seconds for row in phase.rows if row.a))
    )
    assert up.time is not None and up.time.value == pytest.approx(1) and not up.time.significant


def test_fusion_is_shown_and_its_halves_are_compared_with_the_whole() -> None:
    """C25: A runs RMS_NORM and MUL in two kernels, B in one."""
    apart = longtraces.kernels(GRAPH, fuse=False)
    diff = compare(recording(1, order=apart), recording(2))
    rows = {row.role: row for row in decode_rows(diff)}
    assert {row.change for row in rows.values()} == {"fused"}
    assert sorted(rows) == ["attn_norm", "ffn_norm", "output_norm"]
    row = rows["attn_norm"]
    assert (row.a_op, row.b_op) == ("RMS_NORM, MUL", "RMS_NORM+MUL")
    assert row.a is not None and row.b is not None
    assert (row.a.calls, row.b.calls) == (2 * LAYERS, LAYERS)
    assert row.time is not None and row.time.value < 0.7
    back = compare(recording(2), recording(1, order=apart))
    assert {row.change for row in decode_rows(back)} == {"split"}


def test_fusion_is_the_same_for_any_number_of_tokens() -> None:
    """Executions with one token and with four, fused and not: no unit of one swallows those of the other."""

    def both(fuse: bool) -> Trace:
        graphs = [decoder(tokens, tokens, 256, layers=2).graph() for tokens in (1, 4)]
        parts, start = [], longtraces.START
        for number, graph in enumerate(graphs):
            order = longtraces.kernels(graph, fuse=fuse)
            times = np.full((20, len(order)), 5000, np.int64)
            parts.append(longtraces.segment(times, order, start=start, graph=number, seq=1 + 100 * number))
            parts[-1].runs["tokens"] = (1, 4)[number]
            start = int(parts[-1].calls["end"][-1]) + 1000
        return longtraces.trace(parts, graphs)

    (phase,) = compare(both(False), both(True)).phases
    assert phase.pairs == 40
    assert {(row.change, row.op, row.role) for row in phase.rows if row.change != "same"} == {
        ("fused", "RMS_NORM+MUL", role) for role in ("attn_norm", "ffn_norm", "output_norm")
    }


def test_added_and_removed_operators() -> None:
    b = decoder(1, 1, 256, layers=LAYERS)
    last = b.nodes[-1]
    b.nodes.append(b.nodes.pop())  # the head stays last
    extra = b.same("SCALE", last)
    extra.name = "result_scaled"
    more = b.graph()
    order = [*ORDER, (len(more.nodes) - 1, False)]
    diff = compare(recording(1), recording(2, graph=more, order=order))
    changed = {row.change: row for row in decode_rows(diff)}
    assert (changed["added"].op, changed["added"].a) == ("SCALE", None)
    back = compare(recording(2, graph=more, order=order), recording(1))
    assert [(row.change, row.op, row.b) for row in decode_rows(back) if row.change != "same"] == [
        ("removed", "SCALE", None)
    ]


def test_names_and_order_do_not_matter() -> None:
    """Two branches swapped, and every tensor called something else."""
    swapped = _two_branches(flip=True, prefix="t")
    plain = _two_branches(flip=False, prefix="u")
    order = [(i, False) for i in range(3)]
    diff = compare(
        recording(1, graph=plain, order=order, quiet=True),
        recording(2, graph=swapped, order=order, quiet=True),
    )
    (phase,) = diff.phases
    assert [row.change for row in phase.rows] == ["same"] * 3


def _two_branches(flip: bool, prefix: str) -> Graph:
    b = Builder()
    x = b.leaf("inp", "f32", 8, 1, flags=1)
    made = {}
    for name in ("gate", "up")[:: -1 if flip else 1]:
        made[name] = b.mul_mat(b.leaf(f"blk.0.ffn_{name}.weight", "f32", 8, 8), x, f"{prefix}{name}")
    b.same("MUL", made["gate"], made["up"], name="product-0")
    return b.graph()


def test_too_few_executions_say_so() -> None:
    diff = compare(recording(1, executions=10), recording(2, executions=12))
    (phase,) = diff.phases
    assert phase.pairs == 10 and phase.total is None and phase.tested == 0
    assert all(row.time is None for row in phase.rows)
    assert any("too few" in note for note in diff.notes)


def test_lost_and_foreign_executions_are_left_out_and_counted() -> None:
    a, b = traces.small(lose=[4]), traces.small()
    diff = compare(a, b)
    assert any(note.startswith("A: 1 executions were not compared") for note in diff.notes)
    assert {p.phase: p.pairs for p in diff.phases} == {"decode": 2, "prefill": 1}
    other = decoder(1, 1, 512, layers=LAYERS).graph()
    nothing = compare(recording(1), recording(1, graph=other))
    assert nothing.phases == () and "nothing to compare" in nothing.notes[0]


def test_faults_and_waits_are_compared_and_are_nobodys_fault() -> None:
    def with_faults(seed: int, each: int) -> Trace:
        trace = recording(seed)
        seqs = np.repeat(trace.runs["seq"][trace.runs["level"] == 10], each)
        rows = np.zeros(len(seqs), [*FAULT, ("seq", "<u4")])
        rows["seq"], rows["node"] = seqs, next(n for n, _ in ORDER if GRAPH.nodes[n].role == "ffn_up")
        segment = next(iter(trace.parts()))
        return longtraces.trace([segment], [GRAPH], records={"faults": rows})

    (phase,) = compare(with_faults(1, 2), with_faults(2, 6)).phases
    up = next(row for row in phase.rows if row.role == "ffn_up")
    assert up.a is not None and up.b is not None and (up.a.faults, up.b.faults) == (2, 6)
    assert up.faults is not None and up.faults.value == pytest.approx(3)
    assert up.a.wait_seconds is None and up.wait is None
    assert phase.significant == ()


@pytest.mark.parametrize(
    ("p", "df", "t"),
    [(0.05, 1, 12.7062), (0.05, 4, 2.7764), (0.01, 10, 3.1693), (0.05, 1e6, 1.95996), (0.002, 20, 3.5518)],
)
def test_students_t_by_the_tables(p: float, df: float, t: float) -> None:
    assert student.quantile(p, df) == pytest.approx(t, rel=1e-4)
    assert student.tail(t, df) == pytest.approx(p, rel=1e-3)
    assert student.tail(-t, df) == student.tail(t, df)
    assert student.tail(math.nan, df) == 1.0


def test_holm_by_hand() -> None:
    assert student.holm([0.04, 0.01, 0.03, 0.5]) == pytest.approx([0.09, 0.04, 0.09, 0.5])
    assert student.holm([]) == []
