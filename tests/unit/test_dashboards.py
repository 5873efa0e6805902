# SPDX-License-Identifier: Apache-2.0
"""Dashboard and rules: every metric and label that they name is in the registry, and the rules are right."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from profinferd.exporters.registry import METRICS, Kind

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
RULES = DEPLOY / "prometheus/profinfer-rules.yaml"
TESTS = DEPLOY / "prometheus/profinfer-rules.test.yaml"
ADDED = {"instance", "job", "le"}
"""Labels that Prometheus adds, or that every histogram has."""
_NAME = re.compile(r"\bprofinfer_[a-z0-9_]+")
_SELECTOR = re.compile(r"(?<![:\w])(profinfer_[a-z0-9_]+)\{([^}]*)\}")


def names() -> dict[str, set[str]]:
    """Every series name that a scrape can have, with its labels."""
    found = {}
    for metric in METRICS:
        ends = ("_bucket", "_sum", "_count") if metric.kind is Kind.HISTOGRAM else ("",)
        for end in ends:
            found[metric.name + end] = set(metric.labels) | ADDED
    return found


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DEPLOY / "grafana/profinferd.json").read_text())
    return found


def expressions() -> Iterator[tuple[str, str]]:
    """(where, PromQL) of everything that is shipped."""
    board = dashboard()
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            yield f"panel {panel['title']}", target["expr"]
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            yield f"variable {variable['name']}", variable["definition"]
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        for rule in group["rules"]:
            yield rule.get("record") or rule["alert"], rule["expr"]


def test_every_metric_is_in_the_registry() -> None:
    known, seen = names(), set()
    for where, expression in expressions():
        plain = re.sub(r"\w+:profinfer_\w+(:\w+)?", "", expression)  # names of recording rules
        for name in _NAME.findall(plain):
            assert name in known, f"{where}: {name}"
            seen.add(name)
    assert len(seen) > 15


def test_every_label_belongs_to_its_metric() -> None:
    known = names()
    for where, expression in expressions():
        for name, selector in _SELECTOR.findall(expression):
            for label in re.findall(r"([a-z_]+)\s*[=!]", selector):
                assert label in known[name], f"{where}: {name} has no label {label}"


def test_what_is_grouped_by_are_labels() -> None:
    labels = set().union(*names().values())
    for where, expression in expressions():
        for group in re.findall(r"(?:by|on)\s*\(([a-z_, ]*)\)", expression):
            for label in filter(None, (part.strip() for part in group.split(","))):
                assert label in labels, f"{where}: {label}"


def test_recording_rules_are_those_that_alerts_use() -> None:
    recorded, used = set(), set()
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        for rule in group["rules"]:
            recorded |= {rule["record"]} if "record" in rule else set()
            used |= set(re.findall(r"\w+:profinfer_\w+(?::\w+)?", rule["expr"]))
    assert used <= recorded


def test_panels_do_not_overlap_and_fit() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard()["panels"]:
        place = panel["gridPos"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"])
                 for y in range(place["y"], place["y"] + place["h"])}  # fmt: skip
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
    identities = [panel["id"] for panel in dashboard()["panels"]]
    assert len(set(identities)) == len(identities)


needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed (Debian package prometheus)"
)


@needs_promtool
def test_promtool_checks_the_rules() -> None:
    done = subprocess.run(["promtool", "check", "rules", str(RULES)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_promtool_tests_the_rules() -> None:
    """Values worked out by hand, in the file itself."""
    done = subprocess.run(["promtool", "test", "rules", str(TESTS)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_a_wrong_expectation_is_noticed(tmp_path: Path) -> None:
    """The check above can fail."""
    shutil.copy(RULES, tmp_path / RULES.name)
    wrong = tmp_path / TESTS.name
    wrong.write_text(TESTS.read_text().replace("value: 0.0995", "value: 0.0996"))
    done = subprocess.run(["promtool", "test", "rules", str(wrong)], capture_output=True, text=True)
    assert done.returncode != 0


@needs_promtool
def test_every_alert_has_a_test() -> None:
    tested = set(re.findall(r"alertname: (\w+)", TESTS.read_text()))
    assert {name for name, _ in expressions() if name.startswith(("Llm", "Profinferd"))} <= tested


@needs_promtool
def test_the_expressions_of_the_dashboard_are_promql(tmp_path: Path) -> None:
    """Parsed by Prometheus itself, with Grafana's variables filled in."""
    rules: list[dict[str, object]] = []
    for where, expression in expressions():
        if where.startswith("panel"):
            text = expression.replace("$__rate_interval", "5m").replace("$instance", ".*")
            rules.append({"record": "a:b", "expr": text.replace("$target", ".*"),
                          "labels": {"panel": f"{len(rules)}"}})  # fmt: skip
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "g", "rules": rules}]}))
    done = subprocess.run(["promtool", "check", "rules", str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
