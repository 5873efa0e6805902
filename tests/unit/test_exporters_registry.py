# SPDX-License-Identifier: Apache-2.0
"""The registry of metrics: naming rules, the page made from it, and the names of the design."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from profinferd.exporters.registry import METRICS, Kind, markdown, metric

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"


def test_names_follow_the_rules() -> None:
    """Prefix, base units, counters in _total and nothing else, no pid or address in a label."""
    assert len({m.name for m in METRICS}) == len(METRICS)
    for m in METRICS:
        assert re.fullmatch(r"profinfer_[a-z][a-z_]*[a-z]", m.name)
        assert m.name.endswith("_total") is (m.kind is Kind.COUNTER)
        assert not re.search(r"_(ms|us|ns|milli|micro|kb|mb|gb|percent|ratio)(_|$)", m.name)
        if m.unit in ("seconds", "bytes"):
            assert f"_{m.unit}" in m.name
        assert not set(m.labels) & {"pid", "tid", "thread", "tensor", "comm", "address", "le"}
        assert m.help.endswith(".") and "\n" not in m.help and "|" not in m.help


@pytest.mark.parametrize(
    ("short", "labels"),
    [
        ("prompt_tokens_total", ()),
        ("generation_tokens_total", ()),
        ("calls_total", ("phase", "status")),
        ("call_seconds_total", ("phase", "status")),
        ("graphs_total", ("phase", "backend")),
        ("graphs_sampled_total", ("phase", "backend")),
        ("graph_seconds_total", ("phase", "backend")),
        ("op_seconds_total", ("op", "dtype", "role", "phase", "backend")),
        ("op_calls_total", ("op", "dtype", "role", "phase", "backend")),
        ("op_flops_total", ("op", "dtype", "role", "phase", "backend")),
        ("op_bytes_total", ("op", "dtype", "role", "phase", "backend")),
        ("page_faults_total", ("kind", "mapping")),
        ("sched_wait_seconds_total", ("cause",)),
        ("preemptions_total", ()),
        ("hardware_events_total", ("event",)),
        ("overhead_seconds_total", ("how",)),
        ("lost_records_total", ("kind",)),
        ("map_update_failures_total", ()),
        ("recursion_misses_total", ()),
        ("probe_hits_total", ("level",)),
        ("time_to_first_token_seconds", ()),
        ("inter_token_latency_seconds", ()),
        ("target_state", ("reason",)),
        ("model_resident_bytes", ()),
    ],
)
def test_labels_of_the_design(short: str, labels: tuple[str, ...]) -> None:
    """Dashboards and alerts are written against these."""
    assert metric(short).labels == ("target", *labels)


def test_the_rest_of_the_names_is_there() -> None:
    """Those whose labels are not fixed by the design."""
    for short in (
        "dropped_series_total", "target_info", "probe_state", "budget_state", "build_info",
        "machine_memory_bandwidth_bytes_per_second", "machine_flops_per_second",
    ):  # fmt: skip
        metric(short)


def test_the_page_is_current() -> None:
    """docs/metrics.md is what the command prints; run it again after a change."""
    assert PAGE.read_text(encoding="utf-8") == markdown()
