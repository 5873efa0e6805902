# SPDX-License-Identifier: Apache-2.0
"""The table: what it says, how wide it is, and that a target cannot write into it."""

from __future__ import annotations

import dataclasses
import io

import pytest
from rich.cells import cell_len
from rich.console import Console

from profinferd.agent.model.snapshot import Snapshot
from profinferd.exporters.summary import coverage, phase_ops, rates
from profinferd.exporters.table import TableExporter

from . import snapshots


def line_with(shown: str, start: str) -> list[str]:
    """The words of the line that begins with ``start``."""
    return next(line.split() for line in shown.splitlines() if line.strip().startswith(start))


def test_what_a_person_asks_first() -> None:
    """Tokens a second, waits, and where the time goes, with units."""
    shown = TableExporter().render(snapshots.busy())
    assert "llama-server (pid 4242)" in shown and "toy-270m-q4_k_m.gguf" in shown
    # 41 tokens in 0.75 s inside calls; the failed calls are in neither figure.
    assert line_with(shown, "decode  ") == ["decode", "41", "41", "750", "ms", "54.7"]
    assert line_with(shown, "inter-token")[:4] == ["inter-token", "41", "18.3", "ms"]
    # Ops of 0.68 s and a setup of 0.01 s: ffn_up had 0.5 s, in 738 calls for 41 tokens.
    assert line_with(shown, "72.5%") == ["72.5%", "MUL_MAT", "q4_K", "ffn_up", "18", "678", "4.00", "2.00"]
    assert line_with(shown, "1.4%") == ["1.4%", "setup"]
    assert "failed calls 2 with status 1" in shown
    assert "overhead is not measured yet" in shown


def test_what_it_costs() -> None:
    """Estimate, budget, measurement with its interval, and what the ops level does or why it is shed."""
    line = "slowdown 0.31% of 1.00%, measured 0.28%"
    interval = " (-0.10% to 0.66%)"
    assert f"{line}{interval}\n" in TableExporter().render(snapshots.sampled())  # all is over
    live = TableExporter(width=120, height=39).render(snapshots.sampled())
    assert f"{line}{interval}  ops waiting for the next period\n" in live
    # What is being done goes before what does not fit beside it.
    narrow = TableExporter(height=39).render(snapshots.sampled())
    assert f"{line}  ops waiting for the next period\n" in narrow
    shed = TableExporter(width=120).render(snapshots.sampled("graph", "qos: 3.9 tokens/s, 4 wanted"))
    assert "shed to graph: qos: 3.9 tokens/s, 4 wanted" in shed
    assert "slowdown" not in TableExporter().render(snapshots.busy())


def test_shares_are_of_the_whole() -> None:
    """Ops and setup of a phase add up to 1, whatever is listed."""
    for section in phase_ops(snapshots.busy()):
        setup = (section.setup or 0.0) / (section.seconds or 1.0)
        assert sum(row.share or 0.0 for row in section.rows) + setup == pytest.approx(1.0)


def test_sampled_ops_count_by_the_graphs_they_are_of() -> None:
    """Live, ops come after their graphs: 18 calls a token stay 18, and the title says of how many."""
    one = snapshots.sampled()
    kinds = {"ffn_up": 18, "ffn_down": 4}
    late = dataclasses.replace(
        one,
        graphs=(snapshots.graph(executed=22, sampled=7),),
        ops=tuple(snapshots.op(role=role, calls=7 * calls, seconds=0.1) for role, calls in kinds.items()),
    )
    shown = TableExporter().render(late)
    assert "in 7 of 41 graphs so far" in shown
    listed = [line.split() for line in shown.splitlines() if "MUL_MAT" in line]
    assert {words[3]: words[4] for words in listed} == {"ffn_up": "18", "ffn_down": "4"}
    settled = dataclasses.replace(
        late, ops=tuple(dataclasses.replace(o, calls=o.calls // 7 * 41) for o in late.ops)
    )
    assert "in 41 graphs\n" in TableExporter().render(settled)


def test_coverage_counts_executions() -> None:
    """Uncovered nodes are named, never hidden."""
    one = snapshots.busy()
    assert coverage(one) is not None
    holed = dataclasses.replace(one, graphs=(snapshots.graph(executed=400, uncovered=2),))
    assert "graph coverage 99.5%, up to 2 of 402 kernels uncovered" in TableExporter().render(holed)
    assert "graph coverage 100.0%, 0 uncovered" in TableExporter().render(one)
    hardly = dataclasses.replace(one, graphs=(snapshots.graph(executed=9999, uncovered=1),))
    assert "graph coverage 99.9%" in TableExporter().render(hardly)  # never rounded up to all
    assert coverage(snapshots.idle()) is None


def test_a_mixed_call_raises_no_rate() -> None:
    """Tokens of mixed calls are in the token counts, but their time is in neither phase."""
    one = snapshots.busy()
    mixed = dataclasses.replace(
        one,
        calls=(*one.calls, dataclasses.replace(one.calls[0], phase="mixed", seconds=1.0)),
        tokens=dataclasses.replace(one.tokens, prefill=1006, decode=44),
        graphs=(*one.graphs, snapshots.graph("mixed", 1, 1003)),
    )
    speeds = {rate.phase: rate.tokens_per_second for rate in rates(mixed)}
    assert speeds["decode"] == pytest.approx(41 / 0.75) and speeds["prefill"] == pytest.approx(6 / 0.06)


def test_absent_is_not_zero() -> None:
    """C14: an idle target has dashes, no figure and no error."""
    shown = TableExporter().render(snapshots.idle())
    assert "no calls yet" in shown and "no ops" in shown
    assert "nan" not in shown.lower() and "inf " not in shown
    assert line_with(shown, "first token") == ["first", "token", "0", "-", "-", "-", "-"]
    still = dataclasses.replace(
        snapshots.busy(), ops=(snapshots.op(seconds=0.0, calls=0),), graphs=(), calls=()
    )
    assert line_with(TableExporter().render(still), "-  MUL_MAT")[5:] == ["-", "-", "-"]


def crowded() -> Snapshot:
    """Long names and large figures everywhere."""
    ops = tuple(
        snapshots.op(
            f"OPERATOR_WITH_A_LONG_NAME_{i}",
            "iq2_xxs_r4",
            f"ffn_gate_shared_experts_{i}",
            seconds=1e3 + i,
            calls=123_456_789,
            kernel="repack_8x8",
            flops=9e15,
            bytes=8e14,
        )
        for i in range(40)
    )
    return dataclasses.replace(
        snapshots.busy(), ops=ops, notes=("a note that is longer than any terminal is wide " * 5,)
    )


@pytest.mark.parametrize("width", [80, 100, 120])
@pytest.mark.parametrize(
    "make", [snapshots.busy, snapshots.sampled, snapshots.idle, snapshots.hostile, crowded]
)
def test_it_fits(width: int, make: object) -> None:
    """No line is wider than the terminal, and the last column is never cut at 80."""
    shown = TableExporter(width=width).render(make())  # type: ignore[operator]
    assert max(map(cell_len, shown.splitlines())) <= width
    if make is not snapshots.idle:
        assert "GB/s\n" in shown


def test_it_uses_the_width_that_is_there() -> None:
    """More columns at 120."""
    assert "kernel" in TableExporter(width=120).render(snapshots.busy())
    assert "kernel" not in TableExporter(width=80).render(snapshots.busy()).split("graph coverage")[0]


@pytest.mark.parametrize("height", [24, 30, 50])
def test_the_live_table_fits_the_height(height: int) -> None:
    """A table taller than the terminal cannot be redrawn in place."""
    many = dataclasses.replace(crowded(), notes=(), budget=snapshots.sampled().budget)
    console = Console(file=io.StringIO(), width=80, height=height, force_terminal=True)
    table = TableExporter(width=80, height=height - 1)
    lines = ["".join(part.text for part in line) for line in console.render_lines(table.renderable(many))]
    assert height - 2 <= len(lines) <= height
    assert sum("OPERATOR" in line for line in lines) >= 5 if height < 30 else 8


def test_notes_hang() -> None:
    """The second line of a note begins under the first word of it."""
    one = dataclasses.replace(snapshots.busy(), notes=("word " * 30, "another"))
    notes = TableExporter().render(one).split("\nnotes\n")[1].splitlines()
    assert [line[:8] for line in notes] == ["  - word", "    word", "  - anot"]


def test_hostile_names() -> None:
    """No escape sequence, no markup, no line of the target's own making."""
    plain, hostile = TableExporter().render(snapshots.busy()), TableExporter().render(snapshots.hostile())
    assert "[red]" in hostile and "[/red]MUL" in hostile and "[bold]x" in hostile
    assert not [c for c in hostile if ord(c) < 32 and c != "\n"]
    assert "\u202e" not in hostile and "\udcff" not in hostile
    assert hostile.count("(pid ") == plain.count("(pid ") == 1


def test_colour_only_when_asked() -> None:
    """NO_COLOR and pipes get plain text."""
    assert "\x1b" not in TableExporter().render(snapshots.busy())
    assert "\x1b[36mMUL_MAT" in TableExporter(color=True).render(snapshots.busy())


def test_ascii_only() -> None:
    """A terminal without block characters gets bars of another kind."""
    assert TableExporter(width=120, ascii_only=True).render(snapshots.busy()).isascii()
