# SPDX-License-Identifier: Apache-2.0
"""The HTML report in a real browser: no console error, the trace's own numbers, mouse and keyboard."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from selenium.webdriver.common.keys import Keys

from profinferd.agent.model import memory, profile
from profinferd.agent.model.trace import PHASES, Trace

from .browser import DESKTOP, Browser
from .support import (
    NO_PMU,
    SLOW,
    cells,
    choose,
    click,
    drag,
    mouse,
    ns_of,
    point,
    press,
    text,
    wait_for,
)


def ran(tab: Browser) -> float:
    """Seconds that the thread of the page's process has run so far."""
    metrics = tab.driver.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
    return float(next(one["value"] for one in metrics if one["name"] == "TaskDuration"))


def test_opens_without_errors_and_says_what_was_measured(opened: Browser, trace: Trace) -> None:
    assert opened.js("document.getElementById('app').dataset.ready") == "true"
    assert text(opened, "h1") == "toy.gguf"
    latency = trace.snapshot.latency_seconds.inter_token
    assert latency.mean is not None
    assert ns_of(text(opened, "[data-figure=inter_token] .value")) == pytest.approx(
        latency.mean * 1e9, rel=0.01
    )
    assert text(opened, "[data-figure=generated] .value") == "13"
    assert text(opened, "[data-figure=lost] .value") == "1"
    ((decoded,),) = [[c for c in trace.snapshot.calls if c.phase == "decode"]]
    speed = text(opened, "[data-figure=decode] .value").split()[0].replace(",", "")
    assert float(speed) == pytest.approx(12 / decoded.seconds, rel=0.01)
    verdict = text(opened, "[data-rule=memory_bandwidth_bound_decode]")
    assert verdict.lower().startswith("decode waits for memory")
    assert "up to 12.3 ms a token" in verdict and "Evidence with <b>no</b> markup." in verdict


def test_usable_within_two_seconds(tab: Browser, file: Path) -> None:
    """From the start of loading until everything is drawn, in time that the page's thread ran: others
    may have the machine's cores meanwhile. At one of several tries: what a hypervisor takes counts, too."""
    tab.size(DESKTOP)
    tab.driver.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})
    try:
        taken: list[float] = []
        while len(taken) < 5 and not any(seconds < 2 for seconds in taken):
            tab.driver.get("about:blank")  # what comes after it has a process of its own
            tab.open(file)
            taken.append(ran(tab))
        assert 0 < min(taken) < 2, taken
    finally:
        tab.driver.execute_cdp_cmd("Performance.disable", {})


def test_operators_are_the_models(opened: Browser, trace: Trace) -> None:
    wanted: dict[tuple[str, str, str, str], list[float]] = {}
    for row in profile.rows(trace):
        if row.phase == "decode":
            sums = wanted.setdefault((row.op, row.dtype, row.role, row.kernel), [0.0, 0])
            sums[0] += row.seconds
            sums[1] += row.calls
    names = [cells(opened, "ops-table", c) for c in ("op", "dtype", "role", "kernel")]
    times, calls = cells(opened, "ops-table", "time"), cells(opened, "ops-table", "calls")
    shown = {
        key: (ns_of(ns), many)
        for *key_, ns, many in zip(*names, times, calls, strict=True)
        for key in [tuple(key_)]
    }
    assert set(shown) == set(wanted)
    for key, (ns, many) in shown.items():
        assert ns == pytest.approx(wanted[key][0] * 1e9, rel=0.006), key
        assert int(many.split(" + ")[0]) == wanted[key][1]
    assert sum(" + 1" in many for many in calls) == 1  # the kernel whose time is nobody's


def test_sorting_by_mouse_and_keyboard(opened: Browser) -> None:
    def times() -> list[float]:
        return [ns_of(t) for t in cells(opened, "ops-table", "time")]

    assert times() == sorted(times(), reverse=True)
    click(opened, "#ops-table th button[data-column=time]")
    assert times() == sorted(times())
    press(opened, "#ops-table th button[data-column=role]", Keys.ENTER)
    assert cells(opened, "ops-table", "role") == sorted(cells(opened, "ops-table", "role"))
    press(opened, "#ops-table th button[data-column=role]", Keys.SPACE)
    assert cells(opened, "ops-table", "role") == sorted(cells(opened, "ops-table", "role"), reverse=True)
    sort = opened.js(
        "document.querySelector('#ops-table th button[data-column=role]').closest('th').ariaSort"
    )
    assert sort == "descending"


def test_grouping_and_filters(opened: Browser, trace: Trace) -> None:
    rows = [r for r in profile.rows(trace) if r.phase == "decode"]
    click(opened, "#ops .segments button[data-value=layer]")
    by_layer = dict(zip(cells(opened, "ops-table", "layer"), cells(opened, "ops-table", "time"), strict=True))
    for layer in (0, 1, 2):
        ns = sum(r.seconds for r in rows if r.layer == layer) * 1e9
        assert ns_of(by_layer[str(layer)]) == pytest.approx(ns, rel=0.006)
    click(opened, "#ops .segments button[data-value=each]")
    choose(opened, "#filter-op", "MUL_MAT")
    choose(opened, "#filter-layer", "1")
    wanted = [r for r in rows if r.op == "MUL_MAT" and r.layer == 1]
    assert sorted(cells(opened, "ops-table", "role")) == sorted(r.role for r in wanted)
    press(opened, "#filter-words", "ffn")
    assert set(cells(opened, "ops-table", "role")) == {"ffn_gate", "ffn_up", "ffn_down"}
    assert text(opened, "#ops-shown").startswith("3 rows")
    click(opened, "#filter-clear")
    assert f"{len(rows)} rows" in text(opened, "#ops-shown")
    click(opened, f"#ops .segments button[data-value='{PHASES.index('prefill')}']")
    assert "a graph" in text(opened, "#ops-whole")


def test_choosing_a_token(opened: Browser, trace: Trace) -> None:
    """The slowest first; then by buttons, slider and keyboard; its timeline follows."""
    ns = (trace.calls["end"] - trace.calls["begin"]).tolist()
    assert text(opened, "#call-chosen").startswith(f"call {SLOW + 1} of 13 · decode · 1 token")
    detail = wait_for(opened, "#timeline-detail", r"kernels take")
    runs = trace.runs[(trace.runs["call"] == SLOW) & (trace.runs["n_ops"] > 0)]
    assert detail.startswith(f"{int(runs['n_ops'].sum())} kernels take")
    assert ns_of(re.search(r"of (.*?) \(", detail)[1]) == pytest.approx(ns[SLOW], rel=0.01)  # type: ignore[index]
    click(opened, "#call-next")
    assert text(opened, "#call-chosen").startswith(f"call {SLOW + 2} of 13")
    wait_for(opened, "#timeline-call", f"call {SLOW + 2} of 13")
    press(opened, "#call-slider", Keys.HOME)
    assert text(opened, "#call-chosen").startswith("call 1 of 13 · prefill · 5 tokens")
    press(opened, "#call-slider", Keys.ARROW_RIGHT)
    assert text(opened, "#call-chosen").startswith("call 2 of 13")
    click(opened, "#call-slowest")
    assert text(opened, "#call-chosen").startswith(f"call {SLOW + 1} of 13")


def test_a_click_on_the_chart_chooses_and_a_drag_enlarges(opened: Browser, trace: Trace) -> None:
    over = "#tokens .u-over"
    half = opened.js("document.querySelector(arguments[0]).clientWidth", over) / 2
    begin = trace.calls["begin"]
    # The last call lies at the right edge, the fourth at its part of the time shown.
    part = float((begin[3] - begin[0]) / (begin[-1] - begin[0]))
    click(opened, over, 2 * half * part - half)
    assert text(opened, "#call-chosen").startswith("call 4 of 13")
    drag(opened, over)
    assert text(opened, "#call-chosen").startswith("call 4 of 13")
    click(opened, over, half - 1)
    chosen = int(text(opened, "#call-chosen").split()[1])
    assert 4 < chosen < 13  # the right edge is no longer the last call
    click(opened, over, times=2)
    click(opened, over, half - 1)
    assert text(opened, "#call-chosen").startswith("call 13 of 13")


def test_the_timeline_by_keyboard_and_mouse(opened: Browser) -> None:
    canvas = "#timeline-canvas"
    wait_for(opened, "#timeline-detail", r"kernels take")
    press(opened, canvas, Keys.ARROW_RIGHT)
    assert "GET_ROWS token_embd" in text(opened, "#timeline-detail")
    press(opened, canvas, Keys.ARROW_RIGHT)
    detail = text(opened, "#timeline-detail")
    assert "RMS_NORM + MUL attn_norm" in detail and "9.00 µs" in detail
    press(opened, canvas, "+")
    assert not text(opened, "#timeline-view").startswith("0 ns to")
    press(opened, canvas, "0")
    assert text(opened, "#timeline-view").startswith("0 ns to")
    click(opened, "#zoom-in")
    before = text(opened, "#timeline-view")
    drag(opened, canvas)
    assert text(opened, "#timeline-view") != before
    click(opened, "#zoom-all")
    press(opened, canvas, Keys.ESCAPE)
    assert "kernels take" in text(opened, "#timeline-detail")


def test_a_kernel_of_the_timeline_in_the_graph(opened: Browser) -> None:
    wait_for(opened, "#timeline-detail", r"kernels take")
    press(opened, "#timeline-canvas", Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    kernel = text(opened, "#timeline-detail")
    assert "MUL_MAT attn_q" in kernel
    click(opened, "#show-in-graph")
    detail = wait_for(opened, "#graph-detail", r"MUL_MAT")
    assert "attn_q" in detail and "Qcur-0" in detail
    opened.until("document.activeElement.dataset.node !== undefined")
    box = opened.js("(r => [r.top, r.bottom, innerHeight])(document.activeElement.getBoundingClientRect())")
    assert box[0] >= 0 and box[1] <= box[2]


def test_the_graph_opens_by_click_and_by_enter(opened: Browser, trace: Trace) -> None:
    graph = trace.graph(1)
    assert graph is not None
    facts = text(opened, "#graph-facts")
    assert (
        facts.startswith(f"{len(graph.nodes)} nodes, {len(set(graph.edges()))} edges")
        and graph.topology in facts
    )
    keys = opened.js("[...document.querySelectorAll('[data-group]')].map(g => g.dataset.group)")
    assert keys == ["input", "layer 0", "layer 1", "layer 2", "output"]
    expanded = "document.querySelector(`[data-group='layer 1']`).getAttribute('aria-expanded')"
    assert opened.js(expanded) == "false"
    press(opened, "[data-group='layer 1']", Keys.ENTER)
    assert opened.js(expanded) == "true"
    wanted = sorted(n.index for n in graph.nodes if n.layer == 1)
    assert (
        sorted(opened.js("[...document.querySelectorAll('[data-node]')].map(n => Number(n.dataset.node))"))
        == wanted
    )
    down = next(n for n in graph.nodes if n.role == "ffn_down" and n.layer == 1)
    opened.js("document.querySelector(`[data-node='${arguments[0]}']`).focus()", down.index)
    detail = wait_for(opened, "#graph-detail", re.escape(down.name))
    assert "q4_K" in detail and "ran as its own kernel" in detail
    classes = opened.js("[...document.querySelectorAll('[data-node]')].map(n => n.getAttribute('class'))")
    assert sum("inplace" in c for c in classes) == 2 and any("view" in c for c in classes)
    assert opened.js("document.querySelectorAll('.fusedline').length") == 2
    click(opened, "#graph-views")
    assert opened.js("document.querySelectorAll('.g-node.view').length") == 0
    click(opened, "#graph-close")
    assert opened.js("document.querySelectorAll('[data-node]').length") == 0
    click(opened, "[data-group='output']")
    assert opened.js("document.querySelectorAll('[data-node]').length") > 0


def test_the_roofline_says_which(opened: Browser, trace: Trace) -> None:
    rows = [r for r in profile.rows(trace) if r.flops and r.bytes]
    kinds = {(r.op, r.dtype, r.role, r.kernel, r.phase) for r in rows}
    assert opened.js("document.querySelectorAll('.roof circle').length") == len(kinds)
    phase = PHASES.index("decode")
    opened.js("document.querySelector(`[data-point='MUL_MAT|q4_K|ffn_down|${arguments[0]}']`).focus()", phase)
    detail = wait_for(opened, "#roofline-detail", "MUL_MAT")
    own = [r for r in rows if r.role == "ffn_down" and r.phase == "decode"]
    flops = sum(r.flops or 0 for r in own) / sum(r.bytes or 0 for r in own)
    assert "MUL_MAT · ffn_down · q4_K" in detail
    assert float(re.search(r"per byte\s+([\d.]+)", detail)[1]) == pytest.approx(flops, rel=0.01)  # type: ignore[index]
    assert opened.js("document.querySelectorAll('.roof .peak').length") == 3


def test_labels_of_roofs_that_lie_close_do_not_cover_each_other(opened: Browser) -> None:
    """One thread reaches nearly what two do, as on a machine whose memory is the limit."""
    boxes = opened.js(
        "[...document.querySelectorAll('.roof g path.peak')].map(p => p.nextElementSibling)"
        ".map(e => e.getBoundingClientRect()).map(b => [b.left, b.top, b.right, b.bottom])"
    )
    assert len(boxes) >= 3
    for i, (left, top, right, bottom) in enumerate(boxes):
        for other in boxes[i + 1 :]:
            apart = right <= other[0] or other[2] <= left or bottom <= other[1] + 2 or other[3] <= top + 2
            assert apart, boxes


def test_memory_is_the_models(opened: Browser, trace: Trace) -> None:
    found = memory.of_graphs(g for g in (trace.graph(0), trace.graph(1)) if g is not None)
    assert found.weight_bytes is not None and found.cache is not None
    said = text(opened, "[data-memory=weights] .value").split()
    assert float(said[0]) * 2**20 == pytest.approx(found.weight_bytes, rel=0.01) and said[1] == "MiB"
    said = text(opened, "[data-memory=kv] .value").split()
    assert float(said[0]) * 2**20 == pytest.approx(found.cache.bytes, rel=0.01)
    assert opened.js("document.querySelectorAll('#memory-layers tbody tr').length") == 4


def test_threads_and_faults_are_the_snapshots(opened: Browser) -> None:
    """Times and counts of tests/page/support.py, as the page writes them."""
    assert cells(opened, "threads-table", "tid") == ["100 (calls)", "101 "]
    assert cells(opened, "threads-table", "running") == ["300 ms", "290 ms"]
    assert cells(opened, "threads-table", "preempted") == ["80.0 ms (7)", "–"]
    assert cells(opened, "threads-table", "futex") == ["10.0 ms (3)", "50.0 ms (40)"]
    titles = opened.js("[...document.querySelectorAll('#threads .bar-title')].map(e => e.textContent.trim())")
    assert titles == ["Thread 100 (calls)", "Thread 101"]
    assert cells(opened, "takers-table", "comm") == ["stress"]
    assert cells(opened, "takers-table", "seconds") == ["80.0 ms"]
    assert cells(opened, "faults-table", "count") == ["345", "12"]
    assert cells(opened, "fault-tensors-table", "name") == ["blk.1.ffn_down.weight"]
    assert "kernels 3.60 s, 90 %" in text(opened, "#cpu-time") and "2 lost" in text(opened, "#cpu-time")
    events = dict(zip(*(cells(opened, "counters-table", c) for c in ("event", "value")), strict=True))
    assert events == {"instructions": "5.00 M", "cycles": "–"}
    assert f"cycles: {NO_PMU}" in text(opened, "#threads")
    # However long a reason is, the counts can be seen.
    box = "document.getElementById('counters-table').closest('.scroll')"
    assert opened.js(f"{box}.scrollWidth <= {box}.clientWidth")
    assert "instructions a cycle: 1.25" in text(opened, "#threads")
    assert "1.5 cores" in text(opened, "#threads") and "65,536 bytes" in text(opened, "#threads")
    assert text(opened, "[data-memory=resident] .value") == "1.00 MiB"


def test_the_timeline_shows_what_threads_did(opened: Browser) -> None:
    """The slow token: preempted by stress for 100 us, and one major fault."""
    wait_for(opened, "#timeline-detail", r"1 page fault\.")
    legend = text(opened, "#timeline .legend")
    assert "preempted" in legend and "running" in legend and "major fault" in legend
    canvas = "#timeline-canvas"
    label = opened.js("document.querySelector(arguments[0]).ariaLabel", canvas)
    assert label.startswith("Timeline: 56 kernels in")
    # The lane of the thread is the third: its middle is 22 + 24 + 8 + 44 + 8 + 11 below the top.
    whole, high = opened.js(
        "(b => [b.width, b.height])(document.querySelector(arguments[0]).getBoundingClientRect())", canvas
    )
    total = ns_of(label.rsplit(" in ", 1)[1])
    x = 96 + (whole - 96) * 100_000 / total
    mouse(opened, ("moved", point(opened, canvas, x - whole / 2, 117 - high / 2), 0))
    assert "preempted: stress · 100 µs" in wait_for(opened, "#timeline .tip", "stress")


def test_losses_are_said(opened: Browser) -> None:
    """Case C11."""
    assert text(opened, "#losses").startswith("1 record was lost. Time around kernels that are missing")
    assert "3 lost_ops" in text(opened, "#gaps")
