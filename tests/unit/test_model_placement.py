# SPDX-License-Identifier: Apache-2.0
"""Which operators ran where: counts and shapes by hand, and what becomes of the bounds."""

from __future__ import annotations

import dataclasses

from rich.console import Console

from profinferd.agent.model.placement import MAX_SHAPES, Placements
from profinferd.agent.model.placementdata import Placement, Shape
from profinferd.agent.model.plans import Plan
from profinferd.agent.model.tokens import Phase
from profinferd.exporters.html.placement import document
from profinferd.exporters.placementtable import section
from profinferd.exporters.table import TableExporter

from . import snapshots
from .graphs import Builder


def plan(columns: int, hash: int, rows: int = 512) -> Plan:
    """Two products of one weight's shape, and a norm over what came from elsewhere."""
    b = Builder()
    x = b.leaf("inp_embd", "f32", 256, columns)
    h = b.same("RMS_NORM", x, name="norm-0")
    b.view("VIEW", h, 256 * columns)
    for name in ("ffn_up", "ffn_gate"):
        b.mul_mat(b.leaf(f"blk.0.{name}.weight", "q4_K", 256, rows), h, f"{name}-0")
    return Plan.of(b.graph(hash=hash), {})


def products(placed: tuple[Placement, ...] | None) -> dict[tuple[str, str, str], Placement]:
    assert placed is not None
    return {(p.backend, p.phase, p.role): p for p in placed if p.op == "MUL_MAT"}


def test_counts_and_shapes() -> None:
    """A prompt of four and three tokens on one device, a token on the CPU; views run nowhere."""
    placements = Placements()
    assert placements.all() is None
    placements.ran(1, 10, Phase.PREFILL, "GPU0", plan(4, 10))
    for _ in range(3):
        placements.ran(1, 11, Phase.DECODE, "GPU0", plan(1, 11))
    placements.ran(1, 11, Phase.DECODE, "CPU", plan(1, 11))
    found = products(placements.all())
    assert {key: p.count for key, p in found.items()} == {
        ("GPU0", "prefill", "ffn_up"): 1, ("GPU0", "prefill", "ffn_gate"): 1,
        ("GPU0", "decode", "ffn_up"): 3, ("GPU0", "decode", "ffn_gate"): 3,
        ("CPU", "decode", "ffn_up"): 1, ("CPU", "decode", "ffn_gate"): 1,
    }  # fmt: skip
    assert found["GPU0", "prefill", "ffn_up"].shapes == (Shape(((256, 512), (256, 4)), (512, 4), 1),)
    assert found["GPU0", "decode", "ffn_up"].shapes == (Shape(((256, 512), (256,)), (512,), 3),)
    assert found["GPU0", "decode", "ffn_up"].dtype == "q4_K"
    assert {p.op for p in placements.all() or ()} == {"MUL_MAT", "RMS_NORM"}


def test_figures_only_grow_and_count_once() -> None:
    placements = Placements()
    for n in range(1, 4):
        placements.ran(1, 11, Phase.DECODE, "GPU0", plan(1, 11))
        assert products(placements.all())["GPU0", "decode", "ffn_up"].count == n


def test_a_graph_that_becomes_known_later() -> None:
    """What ran before its nodes were known is added when they are."""
    placements = Placements()
    placements.ran(1, 11, Phase.DECODE, "GPU0", None)
    assert placements.all() == ()
    placements.ran(1, 11, Phase.DECODE, "GPU0", plan(1, 11))
    assert products(placements.all())["GPU0", "decode", "ffn_up"].count == 2


def test_a_graph_that_was_let_go_of() -> None:
    """A plan outlives its graph: what was worked out of the graph is kept."""
    placements = Placements()
    known = plan(1, 11)
    placements.ran(1, 11, Phase.DECODE, "GPU0", known)
    known.release()
    placements.ran(1, 11, Phase.DECODE, "GPU0", known)
    assert products(placements.all())["GPU0", "decode", "ffn_up"].count == 2


def test_more_shapes_than_are_kept() -> None:
    """All are counted, the first ones by their shape."""
    placements = Placements()
    for columns in range(1, MAX_SHAPES + 6):
        placements.ran(1, columns, Phase.PREFILL, "GPU0", plan(columns, columns))
    one = products(placements.all())["GPU0", "prefill", "ffn_up"]
    assert (one.count, len(one.shapes), one.other_shapes) == (MAX_SHAPES + 5, MAX_SHAPES, 5)


def test_splits_that_stay_unknown_are_bounded() -> None:
    placements = Placements()
    for hash in range(2000):
        placements.ran(1, hash, Phase.PREFILL, "GPU0", None)
    assert placements.all() == () and placements.unknown == 2000 - 1024


def _placed() -> tuple[Placement, ...]:
    shapes = (Shape(((256, 512), (256, 4)), (512, 4), 7), Shape(((256, 512), (256,)), (512,), 5))
    return (
        Placement("CPU", "prefill", "RMS_NORM", "f32", "norm", 30, (Shape(((256, 4),), (256, 4), 30),), 0),
        Placement("GPU0", "prefill", "MUL_MAT", "q4_K", "ffn_up", 12, shapes, 0),
        Placement("GPU0", "decode", "MUL_MAT", "q4_K", "ffn_gate", 10, shapes[1:], 5),
    )


def test_for_people() -> None:
    """One line for an operator on a backend, matrix products first, whatever the phase and role."""
    shown = TableExporter(120).render(dataclasses.replace(snapshots.busy(), placement=_placed()))
    lines = [line.split() for line in shown.splitlines()]
    start = lines.index(["operator", "dtype", "ran", "on", "times", "shapes"])
    assert lines[start + 1] == ["MUL_MAT", "q4_K", "GPU0", "22", "256x512*256", "10,", "256x512*256x4", "7"]
    assert lines[start + 2] == ["RMS_NORM", "f32", "CPU", "30", "256x4", "30"]
    assert "ran on" not in TableExporter(120).render(snapshots.busy())


def test_what_finds_no_room_is_said() -> None:
    console = Console(width=100, record=True, file=None, quiet=True)
    for part in section(_placed(), 100, 1):
        console.print(part)
    assert len(list(section(_placed(), 100, 1))) == 3 and list(section((), 100, 5)) == []


def test_for_the_page() -> None:
    found = document(_placed(), None)
    assert found is not None
    assert [(r["op"], r["backend"], r["phase"], r["count"], r["shapes"]) for r in found["rows"]] == [
        ("MUL_MAT", "GPU0", "prefill", 12, "256x512*256x4 (7), 256x512*256 (5)"),
        ("MUL_MAT", "GPU0", "decode", 10, "256x512*256 (5), others (5)"),
        ("RMS_NORM", "CPU", "prefill", 30, "256x4 (30)"),
    ]
    assert found["parts"] == [] and document(None, None) is None and document((), None) is None
