# SPDX-License-Identifier: Apache-2.0
"""The daemon's configuration: defaults, what the shipped example says, and errors that say where."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from profinferd.agent.daemon.config import RESTART, Config, Profile, load, needs_restart, parse, seconds
from profinferd.agent.errors import UsageError

EXAMPLE = Path(__file__).resolve().parents[2] / "deploy" / "profinferd.yaml"


def keys(value: Any, place: str = "") -> set[str]:
    """Every key of nested mappings."""
    if not isinstance(value, dict):
        return set()
    return {f"{place}{k}" for k in value} | {
        inner for k, v in value.items() for inner in keys(v, f"{place}{k}.")
    }


def test_the_example_documents_every_key_with_its_default() -> None:
    """Read by another parser: all keys there are, each as the daemon has it without a file."""
    text = EXAMPLE.read_text()
    assert load(str(EXAMPLE)) == Config()
    assert keys(yaml.safe_load(text)) == keys(msgspec.to_builtins(Config()))


def test_without_a_file_all_defaults_hold() -> None:
    assert parse(b"", "x") == parse(b"# nothing\n", "x") == Config()


@pytest.mark.parametrize(
    ("text", "line", "key", "why"),
    [
        ("http:\n  listne: 1\n", 2, "http.listne", "no such key"),
        ("htpp: {}\n", 1, "htpp", "no such key"),
        ("# a\n\nprofile:\n  ops: everything\n", 4, "profile.ops", "everything"),
        ("profile:\n  ops: off\n  budget: 140%\n", 3, "profile.budget", "between 0 and 100"),
        ("profile:\n  ops: off\n  budget: 1\n", 3, "profile.budget", "1% or 100%"),
        ("profile:\n  ops: off\n  budget: 1.0\n", 3, "profile.budget", "1% or 100%"),
        ("http:\n\n  listen: 127.0.0.1\n", 3, "http.listen", "not HOST:PORT"),
        ("http:\n\n  listen: 127.0.0.1:99999\n", 3, "http.listen", "not HOST:PORT"),
        ("targets:\n  max: 3\n  expire_after: soon\n", 3, "targets.expire_after", "not a duration"),
        ("targets:\n  max: 3\n  expire_after: 90d\n", 3, "targets.expire_after", "between 1s and 30d"),
        ("discovery:\n\n  scan_every: 0s\n", 3, "discovery.scan_every", "between 1s and 1d"),
        ("otlp:\n\n  every: 2d\n", 3, "otlp.every", "between 1s and 1d"),
        ("http:\n  listen: null\notlp:\n  endpoint: http://a\n", 4, "otlp.endpoint", "needs http.listen"),
        ("state: null\n", 1, "state", "null"),
        ("targets:\n  max: many\n", 2, "targets.max", "int"),
        ("targets:\n  exclude:\n    - program: a\n    - {}\n", 3, "targets.exclude[1]", "at least one of"),
        ("targets:\n  exclude:\n    - program: a\n      prgram: b\n", 0, "prgram", "no such key"),
        ("targets:\n  expire_after: 15\n", 2, "targets.expire_after", "str"),
        ("log:\n  level: info\n  level: debug\n", 3, "log.level", "twice"),
        ("http: [\n", 2, "", ""),
        ("a: &x 1\nb: *x\n", 1, "", "anchors"),
        ('http:\n  listen: "\\xZZ"\n', 2, "", ""),
        ("- a\n", 1, "", "object"),
    ],
)
def test_an_error_names_file_line_and_key(text: str, line: int, key: str, why: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(text.encode(), "/etc/x.yaml")
    said = str(caught.value)
    assert "/etc/x.yaml, line " in said and key in said and why in said
    assert "\n" not in said
    if line:
        found = re.search(r", line (\d+)", said)
        assert found is not None and abs(int(found[1]) - line) <= (key != "profile.budget"), said


def test_off_is_a_word_where_it_is_documented_as_one() -> None:
    """To YAML it is false, as no and off are for whoever switches something off."""
    assert parse(b"profile: {ops: off}", "x").profile.ops == "off"
    assert parse(b"profile: {ops: 'off', sched: off, faults: no}", "x").profile == Profile(
        ops="off", sched=False, faults=False
    )
    (rule,) = parse(
        b"targets: {include: [{user: 1000, container: 123456789012, unit: ~}]}", "x"
    ).targets.include
    assert (rule.user, rule.container, rule.unit) == ("1000", "123456789012", None)


def test_a_section_with_all_keys_commented_out() -> None:
    """It is as if it were not there; of anything else, null is what it says."""
    assert parse(b"http:\n#  listen: 1\nlog:\ntargets:\n", "x") == Config()
    assert parse(b"http:\n  listen:\n", "x").http.listen is None


def test_broken_bytes_and_bombs() -> None:
    """Not UTF-8, endless nesting, references that multiply: an error each, at once."""
    for data in (b"\xff\xfe", b"[" * 5000, b"a: &a [1]\n" + b"b: [*a, *a]\n", b"!!python/object:os.system x"):
        with pytest.raises(UsageError):
            parse(data, "x")


def test_a_missing_and_a_huge_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read"):
        load(str(tmp_path / "none"))
    huge = tmp_path / "huge"
    huge.write_bytes(b"#" * (2 << 20))
    with pytest.raises(UsageError, match="larger"):
        load(str(huge))


def test_durations_and_shares() -> None:
    assert [seconds(t) for t in ("30s", "15m", "1h", "2d")] == [30.0, 900.0, 3600.0, 172800.0]
    assert parse(b"profile: {budget: 0.02}", "x").profile.budget_ratio == 0.02
    assert parse(b"profile: {budget: 2%}", "x").profile.budget_ratio == 0.02


def test_what_needs_a_restart_is_what_the_example_marks() -> None:
    """Each key with "(restart)" in the comment above it, and no other."""
    marked, section, comment = [], "", ""
    for line in EXAMPLE.read_text().splitlines():
        if line.strip().startswith("#"):
            comment += line
            continue
        found = re.match(r"( *)([a-z_]+):(.*)", line)
        if found is not None:
            if not found[1]:
                section = found[2]
            if "(restart)" in comment:
                # A comment over several keys in a row is of all of them.
                marked.append(f"{section}.{found[2]}" if found[1] else section)
            if line.startswith("  sched:"):
                continue
        comment = ""
    assert sorted(marked) == sorted(RESTART)


def test_a_changed_key_that_waits_for_a_restart_is_named() -> None:
    before = parse(b"http: {listen: 127.0.0.1:1}", "x")
    after = parse(
        b"{http: {listen: 127.0.0.1:2}, profile: {budget: 2%, sched: off}, log: {level: debug}}", "x"
    )
    assert needs_restart(before, after) == ["http.listen", "profile.sched"]
    assert needs_restart(after, after) == []
