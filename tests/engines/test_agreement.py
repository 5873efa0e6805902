# SPDX-License-Identifier: Apache-2.0
"""One recording of a real engine, read back from its file: every way out says the same numbers.

As tests/unit/test_agreement.py, whose readers these are, with what made-up recordings have not: times of
all lengths, prompts in several graphs, fused pairs, rearranged weights, experts, waits and faults.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from profinferd.agent.recording.reader import Recording
from profinferd.exporters import Choice
from profinferd.exporters.html.document import document
from tests.unit import test_agreement as ways
from tests.unit.test_exporters_tables import rows_of_json, rows_of_parquet, write

from . import models, servers
from .fetch import Engines
from .test_report import record_one


@pytest.mark.parametrize("model", ["dense2-q4_0", "moe-q8_0"])
def test_all_numbers_agree(model: str, engines: Engines, tmp_path: Path) -> None:
    path = tmp_path / "run.pfi"
    with servers.Server(servers.Options(models.model(model), threads=2)) as server:
        server.completion(models.words(3, 99), 2)
        timings = record_one(server, path, 12)
    with Recording.open(str(path)) as recording:
        trace = recording.trace
        assert trace.snapshot.lost.total == 0 and trace.ops["timed"].all()
        wanted = ways.of_summary(trace)
        assert sum(n for n, _ in wanted.values()) == len(trace.ops) > 12 * 30
        assert ways.of_page(trace) == wanted
        assert ways.of_perfetto(trace) == wanted
        assert ways.of_chakra(trace) == wanted
        assert ways.of_folded(trace) == {key: ns for key, (_, ns) in wanted.items()}
        for name in ("json", "parquet"):
            (tmp_path / name).mkdir()
            write(name, trace, tmp_path / name, Choice())
        tables = json.loads((tmp_path / "json/export").read_text())
        assert ways.of_rows(rows_of_json(tables, "ops")) == wanted
        assert ways.of_rows(rows_of_parquet(tmp_path / "parquet", "ops")) == wanted
        shown = ways.of_terminal(trace)
        assert ("MUL_MAT_ID" if model.startswith("moe") else "MUL_MAT") in {op for op, _, _ in shown}
        ways.check_terminal(trace, shown)
        # Tokens, besides, are the server's own.
        (said,) = rows_of_json(tables, "recording")
        page = {f["id"]: f["value"] for f in document(trace, "run.pfi", "test")["figures"]}
        assert said["prefill_tokens"] == tables["summary"]["tokens"]["prefill"] == timings["prompt_n"]
        assert said["output_rows"] == page["generated"] == timings["predicted_n"]
