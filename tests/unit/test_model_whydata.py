# SPDX-License-Identifier: Apache-2.0
"""The shapes of verdicts, peaks, counters and CPU time in the JSON."""

from __future__ import annotations

import dataclasses
import json

from profinferd.agent.model.eventdata import CpuPart, CpuTime, Events, EventTotal, OpEvents
from profinferd.agent.model.peaks import ABSENT, Peak, Peaks
from profinferd.agent.model.verdictdata import Verdict
from profinferd.exporters.json_export import JsonExporter

from .snapshots import busy


def test_what_was_not_looked_at_is_null() -> None:
    document = json.loads(JsonExporter().render(busy()))
    assert {document[k] for k in ("counters", "cpu_time", "peaks", "verdicts")} == {None}


def test_the_form_of_each() -> None:
    snapshot = dataclasses.replace(
        busy(),
        verdicts=(Verdict("paging", "high", 0.01, ("3 faults",), "more memory"),),
        peaks=Peaks((Peak(1, 1e10, 8e9, 5e10),), "a machine", 1.5, "avx2"),
        hardware=Events(
            (EventTotal("cycles", None, None, "no PMU"), EventTotal("page-faults", 3, 1.0)),
            (OpEvents("MUL_MAT", "q4_K", "output", "", "CPU", "decode", 2, {"page-faults": 2}),),
            {"page-faults": 1},
            threads=1,
        ),
        cpu_time=CpuTime(99, 4, 0, 0.05, 0.04, (CpuPart("kernels", 4, 0.04, 1.0),), (("a;b", 4),)),
    )
    document = json.loads(JsonExporter().render(snapshot))
    assert document["verdicts"] == [
        {
            "rule": "paging",
            "confidence": "high",
            "seconds_per_token": 0.01,
            "evidence": ["3 faults"],
            "try": "more memory",
        }
    ]
    assert document["peaks"]["by_threads"][0]["flops_per_second"] == 5e10
    assert document["counters"]["events"][0] == {
        "event": "cycles",
        "value": None,
        "running_ratio": None,
        "reason": "no PMU",
    }
    assert document["counters"]["ops"][0]["values"] == {"page-faults": 2}
    assert "hardware" not in document
    assert "folded" not in document["cpu_time"]


def test_the_peak_for_a_number_of_threads() -> None:
    peaks = Peaks(tuple(Peak(n, n * 1e9, None, None) for n in (1, 2, 4)))
    found = [peaks.at(n) for n in (0, 1, 3, 4, 9, None)]
    assert [p.threads for p in found if p is not None] == [1, 1, 2, 4, 4, 4]
    assert ABSENT.at(1) is None
    assert ABSENT.reason
