# SPDX-License-Identifier: Apache-2.0
"""One recording, read back from its file: every way out says the same numbers.

Each format is read by its own means: the page's document, Perfetto's and Chakra's own classes,
pyarrow, a JSON parser, and the terminal's text. What they are compared with is the recording's
summary, which comes from other code (the session's running sums), not from the ops.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from profinferd.agent.model.trace import PHASES, Trace
from profinferd.agent.recording.reader import Recording
from profinferd.exporters import Choice
from profinferd.exporters.html.document import document
from profinferd.exporters.reporttable import ReportExporter

from . import test_exporters_chakra, test_exporters_perfetto, test_recording
from .test_exporters_tables import rows_of_json, rows_of_parquet, write

Key = tuple[str, str, str]
"""Phase, operator (of the first node of a fused pair), role."""
Sums = dict[Key, tuple[int, int]]
"""Kernels and ns."""


def add(found: list[tuple[Key, int, int]]) -> Sums:
    calls: Counter[Key] = Counter()
    ns: Counter[Key] = Counter()
    for key, n, time in found:
        calls[key] += n
        ns[key] += time
    return {key: (calls[key], ns[key]) for key in calls}


def of_summary(trace: Trace) -> Sums:
    return add([((o.phase, o.op, o.role), o.calls, round(o.seconds * 1e9)) for o in trace.snapshot.ops])


def of_page(trace: Trace) -> Sums:
    profile = json.loads(json.dumps(document(trace, "run.pfi", "test")))["profile"]
    rows, names = profile["rows"], profile["names"]
    found = []
    for i in range(len(rows["op"])):
        key = (PHASES[rows["phase"][i]], names["op"][rows["op"][i]], names["role"][rows["role"][i]])
        found.append((key, rows["calls"][i], rows["ns"][i]))
    return add(found)


def of_perfetto(trace: Trace) -> Sums:
    parsed = test_exporters_perfetto.export(trace)
    calls, found = parsed.of("token"), []
    for op in parsed.of("op"):
        (call,) = [c for c in calls if c.begin <= op.begin and op.end <= c.end]
        name, role = op.name.split(" ", 1)
        found.append(((call.name, name.split("+")[0], role), 1, op.end - op.begin))
    return add(found)


def of_chakra(trace: Trace) -> Sums:
    about, nodes, _ = test_exporters_chakra.export(trace)
    calls = trace.calls
    found = []
    for node in test_exporters_chakra.comp(nodes):
        said = test_exporters_chakra.attributes(node)
        at = said["profinfer.start_ns"] + about["profinfer.begin_ns"]
        (call,) = calls[(calls["begin"] <= at) & (at < calls["end"])]
        key = (PHASES[call["phase"]], said["profinfer.op"].split("+")[0], said["profinfer.role"])
        found.append((key, 1, said["profinfer.duration_ns"]))
    return add(found)


def of_rows(rows: list[dict[str, Any]]) -> Sums:
    return add([((r["phase"], r["op"], r["role"]), 1, r["duration_ns"]) for r in rows])


def of_folded(trace: Trace) -> dict[Key, int]:
    from .test_exporters_graphs import export

    found: dict[Key, int] = defaultdict(int)
    for line in export("folded", trace).splitlines():
        stack, ns = line.rsplit(" ", 1)
        _, phase, _, role, op = stack.split(";")
        found[phase, op.split()[0].split("+")[0], role] += int(ns)
    return found


def of_terminal(trace: Trace) -> dict[tuple[str, str, str], list[tuple[str, str]]]:
    """(operator, type, role), as shortened there -> (time, kernels), all rows of all phases."""
    found: dict[tuple[str, str, str], list[tuple[str, str]]] = defaultdict(list)
    line = re.compile(r"\s*[\d.]+%\s+([A-Z_.]+)\s+(\S+)\s+(\S+)\s+([\d.]+ [a-z]+)\s+([\d,]+)\s")
    for text in ReportExporter(width=140, rows=10_000).render(trace).splitlines():
        if match := line.match(text):
            found[match[1], match[2], match[3]].append((match[4], match[5]))
    return found


def check_terminal(trace: Trace, printed: dict[tuple[str, str, str], list[tuple[str, str]]]) -> None:
    """The terminal shows of the two longest phases what the summary says, to the last digit shown."""
    spent: Counter[str] = Counter()
    left: dict[Group, tuple[int, float]] = {}
    for o in trace.snapshot.ops:
        spent[o.phase] += round(o.seconds * 1e9)
        group = (o.phase, o.op, o.dtype, o.role)
        calls, ns = left.get(group, (0, 0.0))
        left[group] = (calls + o.calls, ns + o.seconds * 1e9)
    phases = [phase for phase, _ in spent.most_common(2)]
    left = {group: sums for group, sums in left.items() if group[0] in phases}
    for name, rows in printed.items():
        for time, kernels in rows:
            of_name = [group for group in left if name == as_shown(group)]
            fitting = [group for group in of_name if says(*left[group], time, kernels)]
            assert fitting, (name, time, kernels, [left[group] for group in of_name])
            del left[fitting[0]]
    assert not left


Group = tuple[str, str, str, str]
"""Phase, operator, type, role."""


def as_shown(group: Group) -> tuple[str, str, str]:
    """Of a name that is longer than its column the beginning is shown, and three dots."""
    op, dtype, role = (
        name if len(name) <= room else name[: room - 3] + "..."
        for name, room in zip(group[1:], (20, 19, 19), strict=True)
    )
    return op, dtype or "-", role or "-"


def says(calls: int, ns: float, time: str, kernels: str) -> bool:
    """Whether the texts are of these sums; half a unit of the last digit is what rounding may take."""
    number, unit = time.split()
    scale = {"ns": 1, "us": 1e3, "ms": 1e6, "s": 1e9}[unit]
    last = scale / 10 ** len(number.partition(".")[2])
    return kernels == f"{calls:,}" and abs(float(number) * scale - ns) <= last * 0.5 + 1e-3


def test_all_numbers_agree(tmp_path: Path) -> None:
    path = tmp_path / "run.pfi"
    test_recording.record(path, flushes=3)
    with Recording.open(str(path)) as recording:
        trace = recording.trace
        wanted = of_summary(trace)
        # By hand: three times a prompt and three tokens, 22 kernels of 1 us each.
        assert sum(n for n, _ in wanted.values()) == 3 * 4 * 22
        assert wanted["decode", "MUL_MAT", "ffn_up"] == (9, 9000)
        assert of_page(trace) == wanted
        assert of_perfetto(trace) == wanted
        assert of_chakra(trace) == wanted
        assert of_folded(trace) == {key: ns for key, (_, ns) in wanted.items()}
        for name in ("json", "parquet"):
            (tmp_path / name).mkdir()
            write(name, trace, tmp_path / name, Choice())
        tables = json.loads((tmp_path / "json/export").read_text())
        assert of_rows(rows_of_json(tables, "ops")) == wanted
        assert of_rows(rows_of_parquet(tmp_path / "parquet", "ops")) == wanted
        printed = of_terminal(trace)
        assert len(printed) >= 10
        check_terminal(trace, printed)
        tokens = tables["summary"]["tokens"]
        (said,) = rows_of_json(tables, "recording")
        page = document(trace, "run.pfi", "test")["figures"]
        assert (
            (tokens["decode"], tokens["prefill"])
            == (said["decode_tokens"], said["prefill_tokens"])
            == (9, 15)
        )
        generated = next(f["value"] for f in page if f["label"] == "Generated tokens")
        assert generated == said["output_rows"] == tokens["output_rows"] == pytest.approx(12)
