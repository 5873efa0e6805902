# SPDX-License-Identifier: Apache-2.0
"""Experts and backends in the browser: the panels' numbers are those that were planted."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from profinferd.agent.model.calldata import Offload, OffloadPart
from profinferd.agent.model.placementdata import Placement, Shape
from profinferd.exporters import html
from tests.unit import traces
from tests.unit.streams import decode, prompt
from tests.unit.test_model_profile import moe

from .browser import DESKTOP, Browser
from .support import cells


def test_experts_that_were_used(tab: Browser, tmp_path: Path) -> None:
    """8 experts: two products of a prompt used 5 and 8 of them, a token's two were not observed."""
    steps = [
        prompt(0, 5, graph=moe(5), hash=31, experts={0: 5}),
        prompt(5, 5, graph=moe(5), hash=31, experts={0: 8}),
        decode(10, graph=moe(1), hash=32),
    ]
    path = tmp_path / "experts.html"
    made = traces.of_steps([[step] for step in steps])
    path.write_text(html.render(made, "moe.pfi", "profinferd test"), encoding="utf-8")
    tab.size(DESKTOP)
    tab.open(path)
    rows = {
        phase: (role, available, mean, most, runs)
        for phase, role, available, mean, most, runs in zip(
            *(
                cells(tab, "experts-table", name)
                for name in ("phase", "role", "available", "mean", "max", "runs")
            ),
            strict=True,
        )
    }
    assert rows["prefill"] == ("ffn_up_exps", "8", "6.50", "8", "2")
    role, available, mean, most, runs = rows["decode"]
    assert (role, available, runs) == ("ffn_up_exps", "8", "1")
    assert not any(c.isdigit() for c in mean + most), "not observed is not a number"
    assert tab.errors() == []


def test_where_operators_ran(tab: Browser, tmp_path: Path) -> None:
    """Only where something was offloaded; every operator with its backend, counts and shapes."""
    made = traces.small()
    shapes = (Shape(((256, 512), (256, 4)), (512, 4), 7), Shape(((256, 512), (256,)), (512,), 5))
    placed = (
        Placement("CPU", "decode", "RMS_NORM", "f32", "norm", 1200, (Shape(((256,),), (256,), 1200),), 0),
        Placement("GPU0", "decode", "MUL_MAT", "q4_K", "ffn_up", 12, shapes, 0),
    )
    plain, offloaded = tmp_path / "plain.html", tmp_path / "offloaded.html"
    plain.write_text(html.render(made, "a.pfi", "profinferd test"), encoding="utf-8")
    parts = (
        OffloadPart("wait", "GPU0", 0.0, 0.75, 40), OffloadPart("compute", "CPU", 0.25, 0.0, 10),
    )  # fmt: skip
    made.snapshot = dataclasses.replace(
        made.snapshot, placement=placed, offload=Offload(10, 0.25, 0.75, parts)
    )
    offloaded.write_text(html.render(made, "a.pfi", "profinferd test"), encoding="utf-8")
    tab.size(DESKTOP)
    tab.open(plain)
    assert tab.js("document.getElementById('placement')") is None
    tab.open(offloaded)
    names = ("op", "backend", "count", "shapes")
    rows = list(zip(*(cells(tab, "placement-table", name) for name in names), strict=True))
    assert rows == [
        ("RMS_NORM", "CPU", "1,200", "256 (1200)"),
        ("MUL_MAT", "GPU0", "12", "256x512*256x4 (7), 256x512*256 (5)"),
    ]
    shown = [cells(tab, "offload-table", name) for name in ("part", "backend", "share", "between", "each")]
    wait, compute = zip(*shown, strict=True)
    assert wait[:3] == ("wait", "GPU0", "75 %") and compute[:3] == ("compute", "CPU", "25 %")
    assert wait[3:] == ("750 ms", "75.0 ms") and compute[4] == "25.0 ms"
    assert tab.errors() == []
