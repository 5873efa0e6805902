# SPDX-License-Identifier: Apache-2.0
"""Tables of a trace as Parquet, CSV and JSON (cases C11, C25)."""

from __future__ import annotations

import csv
import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest

from profinferd.agent.errors import MachineError
from profinferd.agent.model.trace import Trace
from profinferd.exporters import Choice
from profinferd.exporters.formats import FORMATS

from . import longtraces, traces
from .graphs import decoder
from .streams import OP_NS
from .test_exporters_perfetto import FAULT

WHOLE = Choice()
TABLES = ["recording", "graphs", "nodes", "edges", "calls", "runs", "ops", "lost"]


def write(name: str, trace: Trace, folder: Path, choice: Choice = WHOLE) -> list[str]:
    """Exports into a folder as the command does; the paths in order."""
    paths = []
    for path, pieces in FORMATS[name].load().files(trace, choice):
        paths.append(path)
        target = folder / (path or "export")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(b"".join(pieces))
    return paths


def rows_of_csv(folder: Path, table: str) -> list[dict[str, Any]]:
    return list(csv.DictReader(io.StringIO((folder / f"{table}.csv").read_text())))


def rows_of_json(document: Any, table: str) -> list[dict[str, Any]]:
    it = document["tables"][table]
    return [dict(zip(it["columns"], row, strict=True)) for row in it["rows"]]


def rows_of_parquet(folder: Path, table: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for file in sorted(folder.glob(f"{table}/*/*/*.parquet")):
        found += pyarrow.parquet.ParquetFile(file).read().to_pylist()
    return found


def test_all_three_have_the_same_rows(tmp_path: Path) -> None:
    begin = int(traces.small().runs["begin"][0])
    faults = np.zeros(2, FAULT)
    faults["ts"], faults["kind"] = [begin + 5, begin + 9], [1, 0]
    trace = traces.small(lose=[3], gaps=[(begin, begin + 9, 7, "ops")], records={"faults": faults})
    for name in ("csv", "json", "parquet"):
        (tmp_path / name).mkdir()
        paths = write(name, trace, tmp_path / name)
        if name == "parquet":
            within = "host=board/date=2023-11-14/1700000000-7.parquet"
            assert paths == [*(f"{table}/{within}" for table in [*TABLES, "faults"]), "views.sql"]
    document = json.loads((tmp_path / "json/export").read_text())
    for table in [*TABLES, "faults"]:
        of_json = rows_of_json(document, table)
        of_parquet = rows_of_parquet(tmp_path / "parquet", table)
        of_csv = rows_of_csv(tmp_path / "csv", table)
        assert [{k: v for k, v in row.items() if k != "recording"} for row in of_parquet] == of_json
        as_text = [{k: "" if v is None else str(v) for k, v in row.items()} for row in of_json]
        assert of_csv == as_text, table
        assert all(row["recording"] == "1700000000-7" for row in of_parquet)


def test_rows_are_those_of_the_trace(tmp_path: Path) -> None:
    trace = traces.small(lose=[3])
    write("json", trace, tmp_path)
    document = json.loads((tmp_path / "export").read_text())
    assert document["schema"] == 1
    assert document["summary"] == json.loads(json.dumps(trace.snapshot.to_json()))
    ops, calls, runs = (rows_of_json(document, t) for t in ("ops", "calls", "runs"))
    assert [(r["begin_ns"], r["duration_ns"]) for r in calls] == [
        (b, e - b) for b, e in trace.calls[["begin", "end"]].tolist()
    ]
    assert [r["phase"] for r in calls] == ["prefill", "decode", "decode", "decode"]
    assert [(r["call"], r["parent"], r["level"]) for r in runs[3:6]] == [
        (1, None, "graph"),
        (1, 3, "split"),
        (1, 3, "cpu"),
    ]
    by_number = sorted(ops, key=lambda r: r["op_number"])
    assert [r["begin_ns"] for r in by_number] == trace.ops["begin"].tolist()
    assert sum(r["duration_ns"] for r in ops if r["timed"]) == int(trace.sums["ns"].sum())
    assert [r["duration_ns"] for r in ops if not r["timed"]] == [2 * OP_NS]
    (head,) = [r for r in by_number if r["role"] == "output" and r["call"] == 1]
    assert (head["op"], head["dtype"], head["layer"], head["flops"]) == (
        "MUL_MAT",
        "q8_0",
        None,
        2 * 256 * 1000,
    )
    assert [r["fused"] for r in by_number if r["op"] == "RMS_NORM"] == [True] * 12
    edges = {(r["graph"], r["source"], r["node"]) for r in rows_of_json(document, "edges")}
    assert edges == {(g, *e) for g in (0, 1) for e in trace.graph(g).edges()}  # type: ignore[union-attr]


def test_parts_of_a_long_trace_are_numbered_through(tmp_path: Path) -> None:
    trace = longtraces.long(12, layers=1, parts=3)
    write("parquet", trace, tmp_path)
    ops, runs, calls = (rows_of_parquet(tmp_path, t) for t in ("ops", "runs", "calls"))
    assert [r["op_number"] for r in ops] == list(range(12 * 22))
    assert [r["run"] for r in runs] == list(range(36)) and [r["call"] for r in calls] == list(range(12))
    of_run = {r["run"]: r for r in runs}
    for row in ops:
        run = of_run[row["run"]]
        assert run["level"] == "cpu" and run["call"] == row["call"] == row["run"] // 3
        assert run["begin_ns"] <= row["begin_ns"] <= run["begin_ns"] + run["duration_ns"]


def test_exports_of_several_recordings_lie_side_by_side(tmp_path: Path) -> None:
    for _ in range(2):
        write("parquet", traces.small(), tmp_path)
    assert len(list(tmp_path.glob("ops/*/*/*.parquet"))) == 1, "the same recording again replaces its file"
    anonymous = Choice(anonymise=True)
    write("parquet", traces.small(), tmp_path, anonymous)
    assert sorted(p.parts[-3] for p in tmp_path.glob("ops/*/*/*.parquet")) == ["host=anonymous", "host=board"]


def test_anonymised_tables_name_nothing(tmp_path: Path) -> None:
    write("csv", traces.small(), tmp_path, Choice(anonymise=True))
    text = "".join(path.read_text() for path in tmp_path.iterdir())
    for secret in ("blk.", "Qcur", "server", "toy.gguf", "board", "cache_k", "6.18.0", "Test CPU"):
        assert secret not in text, secret


def test_a_spreadsheet_takes_no_name_for_a_formula(tmp_path: Path) -> None:
    graph = decoder(layers=1)
    graph.nodes[0].name = "=HYPERLINK(1)"
    s = longtraces.segment(np.full((1, 1), 100, np.int64), [(0, False)])
    write("csv", longtraces.trace([s], [graph.graph()]), tmp_path)
    assert rows_of_csv(tmp_path, "nodes")[0]["name"] == "'=HYPERLINK(1)"


def test_what_is_broken_in_a_name_breaks_no_file(tmp_path: Path) -> None:
    graph = decoder(layers=1)
    graph.nodes[0].name = 'a],["\n,;\x00'
    s = longtraces.segment(np.full((1, 1), 100, np.int64), [(0, False)])
    trace = longtraces.trace([s], [graph.graph()])
    for name in ("csv", "json", "parquet"):
        (tmp_path / name).mkdir()
        write(name, trace, tmp_path / name)
    (of_json,) = rows_of_json(json.loads((tmp_path / "json/export").read_text()), "nodes")[:1]
    assert rows_of_parquet(tmp_path / "parquet", "nodes")[0]["name"] == of_json["name"]
    assert rows_of_csv(tmp_path / "csv", "nodes")[0]["name"] == of_json["name"]


def test_without_pyarrow_the_reason_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MachineError, match=r"profinferd\[analysis\]"):
        write("parquet", traces.small(), tmp_path)
