# SPDX-License-Identifier: Apache-2.0
"""Every query of docs/analysis.md runs on an export and says what the trace says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pytest

from profinferd.agent.model.trace import Trace

from . import longtraces, traces
from .graphs import decoder
from .streams import OP_NS, SETUP
from .test_exporters_tables import write

DOCS = Path(__file__).resolve().parents[2] / "docs" / "analysis.md"
QUERIES = dict(re.findall(r"\*\*(.+?)\*\*\n```sql\n(.+?)```", DOCS.read_text(), re.DOTALL))


def ask(trace: Trace, folder: Path, question: str, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    write("parquet", trace, folder)
    monkeypatch.chdir(folder)  # the paths in views.sql are relative to it
    with duckdb.connect() as database:
        database.execute((folder / "views.sql").read_text())
        (query,) = [text for title, text in QUERIES.items() if question in title]
        return database.execute(query).fetchall()


def test_there_are_ten_and_all_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(QUERIES) == 10
    for title in QUERIES:
        assert ask(traces.small(layers=2), tmp_path, title, monkeypatch), title


def test_what_takes_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = ask(traces.small(), tmp_path, "take the time of decoding", monkeypatch)
    found = {(op, dtype, role): (calls, ms) for op, dtype, role, calls, ms, _ in rows}
    assert found["MUL_MAT", "q4_K", "ffn_up"] == (3, pytest.approx(3 * OP_NS / 1e6))
    assert sum(row[-1] for row in rows) == pytest.approx(100)
    assert sum(row[3] for row in rows) == 3 * 22


def test_rates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = ask(traces.small(), tmp_path, "How fast", monkeypatch)
    (up,) = [row for row in rows if row[2] == "ffn_up"]
    # Only the row that was asked for goes through the last layer's feed-forward part: four kernels
    # of 2 * 256 * 512.
    assert up[3] == pytest.approx(2 * 256 * 512 / OP_NS)


def test_layers_and_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = longtraces.long(8, layers=3, ns=1000)
    layers = ask(trace, tmp_path, "some layers", monkeypatch)
    assert [row[0] for row in layers] == [0, 1, 2]
    # 17 kernels of each layer; the gathers of the last one have no layer in their names, and belong
    # to what they continue.
    nodes = trace.nodes(0)
    assert nodes is not None
    of = np.bincount([nodes.layer[n] for n, _ in longtraces.kernels(_graph(trace)) if nodes.layer[n] >= 0])
    assert [row[1] for row in layers] == pytest.approx(of.tolist())
    ((_, p50, p99, most),) = ask(trace, tmp_path, "at the median", monkeypatch)
    length = (len(longtraces.kernels(_graph(trace))) * 1000 + 500 + 2000) / 1e6
    assert (p50, p99, most) == pytest.approx((length, length, length))
    ((_, between),) = ask(trace, tmp_path, "between calls", monkeypatch)
    assert between == pytest.approx(0.2)


def _graph(trace: Trace) -> Any:
    return trace.graph(0)


def test_the_slowest_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = decoder(layers=1).graph()
    order = longtraces.kernels(graph)
    times = np.full((9, len(order)), 1000, np.int64)
    times[4, 6] = 50_000
    trace = longtraces.trace([longtraces.segment(times, order)], [graph])
    first = ask(trace, tmp_path, "slowest call", monkeypatch)[0]
    assert first == ("MUL_MAT", graph.nodes[order[6][0]].role, 0, 50.0, 1.0)


def test_context_setup_fusion_and_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gap = (1, 2, 7, "ops")
    trace = traces.small(gaps=[gap])
    assert [row[:2] for row in ask(trace, tmp_path, "context grows", monkeypatch)] == [(256, 3)]
    outside = ask(trace, tmp_path, "not in kernels", monkeypatch)
    assert [row[2] for row in outside] == pytest.approx([SETUP / 1e3] * 2)
    fused = {(op, role): (f, k) for op, role, f, k, _ in ask(trace, tmp_path, "were fused", monkeypatch)}
    assert fused["RMS_NORM", "attn_norm"] == (True, 4) and fused["MUL", "attn_norm"] == (None, 0)
    assert ask(trace, tmp_path, "whole", monkeypatch) == [("1700000000-7", 0, True, 7)]
