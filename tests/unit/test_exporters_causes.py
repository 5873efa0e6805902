# SPDX-License-Identifier: Apache-2.0
"""Waits and faults in the JSON and in a scrape; absent where they were not watched."""

from __future__ import annotations

import dataclasses
import json

from prometheus_client.parser import text_string_to_metric_families

from profinferd.agent.model.causes import (
    CoreKind,
    FaultCount,
    Faults,
    ModelMemory,
    PhaseWaits,
    Quota,
    ShedPart,
    Taker,
    TensorFaults,
    Thread,
    Threads,
)
from profinferd.agent.model.snapshot import Snapshot
from profinferd.exporters.json_export import JsonExporter
from profinferd.exporters.prometheus import PrometheusExporter, Seen
from profinferd.exporters.table import TableExporter

from .snapshots import busy, sampled


def thread(tid: int, **seconds: float) -> Thread:
    return Thread(tid, tid == 1, True, 2.0, 1.0, seconds, {"preempted": 3}, 4, 0, 0.001)


def watched(resident: int | None = 4096) -> Snapshot:
    threads = Threads(
        1.5, (thread(1, preempted=0.25, futex=0.5), thread(2, preempted=0.5)),
        (Taker("stress", 99, 6, 0.75),),
        (PhaseWaits("decode", 10, 10, 1.0, {"preempted": 0.5}, {}, 0.1),),
        (), (CoreKind("all", (0, 1)),), Quota(None), 2, 6,
    )  # fmt: skip
    faults = Faults(
        (FaultCount("major", "model", 7, 0.5), FaultCount("minor", "kv", 11)),
        (TensorFaults("blk.0.ffn_up.weight", 0, "model", 7, 0, 0.5, "graph"),),
        ModelMemory("toy.gguf", 8192, 8192, resident, 0, "mmap"),
        0,
    )
    return dataclasses.replace(busy(), threads=threads, faults=faults)


def scrape(snapshot: Snapshot) -> dict[tuple[str, tuple[str, ...]], float]:
    _, body = PrometheusExporter(lambda: [Seen(snapshot, "ok")], "1").scrape()
    return {
        (s.name, tuple(v for k, v in s.labels.items() if k != "target")): s.value
        for family in text_string_to_metric_families(body.decode())
        for s in family.samples
    }


def test_a_scrape() -> None:
    seen = scrape(watched())
    waits = {k[1][0]: v for k, v in seen.items() if k[0] == "profinfer_sched_wait_seconds_total"}
    assert waits["preempted"] == 0.75 and waits["futex"] == 0.5 and waits["throttled"] == 0
    assert seen["profinfer_preemptions_total", ()] == 6
    assert seen["profinfer_page_faults_total", ("major", "model")] == 7
    assert seen["profinfer_page_faults_total", ("minor", "kv")] == 11
    assert seen["profinfer_model_resident_bytes", ()] == 4096
    # Of what was watched all the time a counter begins at 0.
    assert seen["profinfer_cause_unwatched_seconds_total", ("waits",)] == 0
    one = watched()
    assert one.threads is not None
    shed = dataclasses.replace(one, threads=dataclasses.replace(one.threads, unwatched_seconds=3.5))
    assert scrape(shed)["profinfer_cause_unwatched_seconds_total", ("waits",)] == 3.5


def test_no_name_of_another_process_is_a_label() -> None:
    _, body = PrometheusExporter(lambda: [Seen(watched(), "ok")], "1").scrape()
    assert b"stress" not in body and b"ffn_up.weight" not in body


def test_absent_is_not_zero() -> None:
    names = {name for name, _ in scrape(busy())}
    for name in (
        "sched_wait_seconds_total",
        "preemptions_total",
        "page_faults_total",
        "cause_unwatched_seconds_total",
        "model_resident_bytes",
    ):
        assert f"profinfer_{name}" not in names
    assert ("profinfer_model_resident_bytes", ()) not in scrape(watched(resident=None))
    document = json.loads(JsonExporter().render(busy()))
    assert document["threads"] is None and document["faults"] is None


def test_the_json() -> None:
    document = json.loads(JsonExporter().render(watched()))
    assert document["threads"]["takers"] == [
        {"comm": "stress", "pid": 99, "preemptions": 6, "seconds": 0.75, "own": False, "watcher": False}
    ]
    assert document["threads"]["threads"][0]["seconds"] == {"preempted": 0.25, "futex": 0.5}
    assert document["threads"]["phases"][0]["stalled"] == {"preempted": 0.5}
    assert document["threads"]["barriers"] is None
    assert document["faults"]["counts"][0] == {
        "kind": "major", "mapping": "model", "count": 7, "seconds": 0.5,
    }  # fmt: skip
    assert document["faults"]["tensors"][0]["tensor"] == "blk.0.ffn_up.weight"
    assert document["faults"]["model"]["loading"] == "mmap"


def test_what_is_shed_is_named() -> None:
    """In the JSON with its reason, and in the line of the table that says what watching costs."""
    shed = dataclasses.replace(watched(), causes_shed=(ShedPart("waits", 9000.0, 0.0123),))
    document = json.loads(JsonExporter().render(shed))
    assert document["causes_shed"] == [{"part": "waits", "per_second": 9000.0, "cost_ratio": 0.0123}]
    assert document["threads"]["unwatched_seconds"] == 0
    table = TableExporter(width=160)
    assert "not watched: waits" in table.render(dataclasses.replace(sampled(), causes_shed=shed.causes_shed))
    assert "not watched" not in table.render(sampled())
