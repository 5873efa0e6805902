# SPDX-License-Identifier: Apache-2.0
"""The JSON object: the keys that other programs rely on, and strictness."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path

import pytest

from profinferd.exporters.json_export import JsonExporter, dumps

from . import snapshots

CONTRACT = {
    "schema": None,
    "target": {"pid", "exe", "engine", "model", "libraries", "layout", "attach"},
    "window_seconds": None,
    "tokens": {"prefill", "decode", "output_rows"},
    "calls": {"phase", "status", "count", "seconds"},
    "latency_seconds": {"time_to_first_token", "inter_token"},
    "graphs": {
        "id",
        "topology",
        "phase",
        "backend",
        "nodes",
        "executed",
        "uncovered",
        "tokens",
        "rows",
        "kv_length",
        "count",
        "sampled",
        "seconds",
        "setup_seconds",
    },
    "ops": {
        "op",
        "dtype",
        "role",
        "kernel",
        "backend",
        "phase",
        "calls",
        "seconds",
        "seconds_stderr",
        "flops",
        "bytes",
    },
    "overhead": {
        "budget_ratio",
        "estimated_ratio",
        "measured_ratio",
        "measured_ci95",
        "hits",
        "ns_per_hit",
    },
    "lost": {"total", "by_kind"},
    "notes": None,
}
"""Keys of the contract; a version may add some, and renames or removes none."""


def strict(text: str) -> dict[str, object]:
    """Parses as a parser would that knows neither NaN nor infinities."""

    def refuse(word: str) -> float:
        raise AssertionError(word)

    document = json.loads(text, parse_constant=refuse)
    assert isinstance(document, dict)
    return document


@pytest.mark.parametrize("kind", ["busy", "idle", "hostile"])
def test_the_contract(kind: str) -> None:
    """Every key is there, whatever was seen: what is not known is null."""
    document = strict(JsonExporter().render(getattr(snapshots, kind)()))
    assert set(CONTRACT) <= set(document)
    assert document["schema"] == 1
    for key, wanted in CONTRACT.items():
        if wanted is not None:
            value = document[key]
            for item in value if isinstance(value, list) else [value]:
                assert isinstance(item, dict) and wanted <= set(item), key
    target, latency = document["target"], document["latency_seconds"]
    assert isinstance(target, dict) and isinstance(latency, dict)
    assert set(target["attach"]) >= {"method", "op_source", "complete"}
    assert set(target["layout"]) >= {"source", "name"}
    for figures in latency.values():
        assert set(figures) >= {"count", "mean", "p50", "p90", "p99"}


def test_hostile_names_survive_strict_parsers() -> None:
    """ASCII only; a lone surrogate, which strict parsers refuse, is replaced."""
    text = JsonExporter().render(snapshots.hostile())
    assert text.isascii()
    json.dumps(strict(text), ensure_ascii=False).encode("utf-8")


def test_what_is_not_finite_is_null() -> None:
    """JSON has no NaN."""
    broken = dataclasses.replace(snapshots.busy(), window_seconds=math.nan)
    assert strict(JsonExporter().render(broken))["window_seconds"] is None


def test_one_item_a_line() -> None:
    """grep and diff work on it; each line of an op is an object of its own."""
    text = JsonExporter().render(snapshots.busy())
    lines = [line for line in text.splitlines() if '"seconds_stderr"' in line]
    assert len(lines) == len(snapshots.busy().ops)
    assert all(isinstance(json.loads(line.rstrip(",")), dict) for line in lines)
    assert text.endswith("}\n")
    assert json.loads(dumps({"a": [], "b": [1, [2]], "c": "x"})) == {"a": [], "b": [1, [2]], "c": "x"}


def test_the_page_describes_every_key() -> None:
    """docs/json.md names each key of the object in code style."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "json.md").read_text()
    named = set(re.findall(r"`([a-z_0-9]+)`", page))
    for key, inner in CONTRACT.items():
        assert {key, *(inner or ())} <= named
