# SPDX-License-Identifier: Apache-2.0
"""The report at a terminal: the trace's numbers, what is absent, hostile names, narrow terminals."""

from __future__ import annotations

import dataclasses
import re

import pytest

from profinferd.agent.model.causes import Taker, Thread, Threads
from profinferd.agent.model.latency import Summary
from profinferd.agent.model.peaks import Peak, Peaks
from profinferd.agent.model.snapshot import Latencies
from profinferd.agent.model.verdictdata import Verdict
from profinferd.exporters.headline import figures
from profinferd.exporters.reporttable import ReportExporter

from . import traces
from .graphs import decoder
from .streams import Step, decode


def test_sections_and_numbers() -> None:
    trace = traces.small(layers=2)
    verdict = Verdict("paging", "high", 0.0021, ("120 pages were read.",), "Use --mlock.")
    trace.snapshot = dataclasses.replace(
        trace.snapshot, verdicts=(verdict,), peaks=Peaks((Peak(2, 1e12, None, 1e12),))
    )
    text = ReportExporter(width=110).render(trace)
    assert "toy.gguf" in text and "every kernel recorded" in text
    assert "its memory is read from disk  up to 2.10 ms a token  (paging, confidence high)" in text
    assert "try: Use --mlock." in text
    # 39 kernels a graph: 3 decoded, 1 us each, 0.5 us before the first.
    assert "decode: 118 us in 3 graphs, 39.5 us a token" in text
    (down,) = re.findall(r"^ *(\S+)%  MUL_MAT +q4_K +ffn_down +(.*)$", text.split("prefill:")[0], re.M)
    assert down[0] == "5.1" and down[1].split()[:3] == ["6.00", "us", "6"]
    layers = re.findall(r"^ +(\d)  +(\d+\.\d)%  +(\S+ us)", text.split("prefill:")[0], re.M)
    assert [layer for layer, _, _ in layers] == ["0", "1"]
    assert "Wasted: time beyond" in text and "nothing was lost" in text
    assert re.search(r"weights +1\.\d\d MiB", text) and re.search(r"KV cache +4.00 MiB", text)


def test_lost_records_are_said() -> None:
    """Case C11."""
    text = ReportExporter().render(traces.small(lose=[4]))
    assert "1 record was lost (ops 1); their time is in no operator" in text
    assert re.search(r"^ *\d+\.\d%  untimed$", text, re.M)


def test_who_took_the_cores() -> None:
    """A thread of the target itself, and we, are not shown as if they were others."""
    takers = (Taker("server", 42, 741, 3.5, own=True), Taker("stress", 77, 1, 0.5),
              Taker("profinferd", 78, 2, 0.1, watcher=True))  # fmt: skip
    one = Thread(100, True, True, 4.5, 4.0, {"preempted": 4.1}, {"preempted": 744}, 0, 0, 0.001)
    trace = traces.small()
    threads = Threads(4.0, (one,), takers, (), (), (), None, 2, 50)
    trace.snapshot = dataclasses.replace(trace.snapshot, threads=threads)
    text = ReportExporter(width=110).render(trace)
    assert "another thread of its own took the core 741 times: 3.50 s of waiting" in text
    assert "stress (pid 77) took the core once: 500 ms of waiting" in text
    assert "profinferd itself took the core 2 times: 100 ms of waiting" in text
    assert "100*" in text and "* calls the engine" in text


def test_without_peaks_waste_is_absent_with_its_reason() -> None:
    trace = traces.small(peaks=Peaks((), reason="no time to measure"))
    text = ReportExporter(width=100).render(trace)
    assert "absent: no time to measure" in text
    assert "the machine's peak is not measured" in text


def test_an_empty_trace() -> None:
    text = ReportExporter().render(traces.of_steps([]))
    assert "no decode call was seen" in text and "not seen in this window" in text


def test_eighty_columns_are_enough() -> None:
    """Nothing is cut, and no column is missing that a narrow terminal has."""
    text = ReportExporter(width=80).render(traces.small(layers=3))
    tables = text.split("decode: ")[1].split("This recording")[0]
    assert "…" not in tables and "GB/s" in tables and "GFLOP/s" not in tables
    assert "GFLOP/s" in ReportExporter(width=100).render(traces.small(layers=3))


@pytest.mark.parametrize("width", [40, 80, 120])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    text = ReportExporter(width=width, ascii_only=True).render(traces.small(layers=3, lose=[2]))
    assert max(map(len, text.splitlines())) <= width
    assert text.isascii()


def test_hostile_names_cannot_move_the_cursor() -> None:
    b = decoder(1)
    for node in b.nodes:
        node.name = "\x1b[2J\x1b]0;owned\x07"
    trace = traces.of_steps([[Step([0], [0], graph=b, hash=5)], [decode(1, graph=b, hash=5)]])
    target = dataclasses.replace(trace.snapshot.target, model="\x1b[31mred\u202e", exe="/x/\x1b[1m")
    trace.snapshot = dataclasses.replace(trace.snapshot, target=target, notes=("\x1b[2J",))
    text = ReportExporter(width=80).render(trace)
    assert not [char for char in text if not (char.isprintable() or char == "\n")]


def test_headline_figures_are_the_snapshots() -> None:
    trace = traces.small()
    seconds = 0.0125
    latency = Summary(count=7, mean=seconds, p50=0.012, p90=0.013, p99=0.02)
    snapshot = trace.snapshot
    trace.snapshot = dataclasses.replace(
        snapshot, latency_seconds=Latencies(snapshot.latency_seconds.time_to_first_token, latency)
    )
    found = {figure.id: figure for figure in figures(trace)}
    assert found["inter_token"].value == seconds and "p99 20.0 ms" in found["inter_token"].sub
    (decoded,) = (c for c in snapshot.calls if c.phase == "decode")
    assert found["decode"].value == pytest.approx(3 / decoded.seconds)
    assert found["lost"].value == 0 and found["lost"].tone == "good"
    ops = [op for op in snapshot.ops if op.phase == "decode"]
    assert found["bandwidth"].value == pytest.approx(
        sum(o.bytes or 0 for o in ops) / sum(o.seconds for o in ops)
    )
    assert found["overhead"].value is None and found["overhead"].sub
