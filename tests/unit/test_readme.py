# SPDX-License-Identifier: Apache-2.0
"""What the README promises is what the code has."""

from __future__ import annotations

import re
from pathlib import Path

from click.testing import CliRunner

from profinferd.agent.cli import cli
from profinferd.agent.errors import ExitCode

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_exit_codes() -> None:
    """Scripts are written against this table."""
    listed = {int(code) for code in re.findall(r"^\| (\d+) \|", README, re.MULTILINE)}
    assert listed == set(ExitCode)


def test_options_exist() -> None:
    """Every option that is mentioned is one."""
    shown = "".join(CliRunner().invoke(cli, [name, "--help"]).output for name in cli.commands)
    for option in set(re.findall(r"(?<![-\w])--?[a-z][a-z-]*", README)) - {"-y", "-9"}:
        assert re.search(rf"(?<![-\w]){option}(?![-\w])", shown), option


def test_links_lead_somewhere() -> None:
    """The picture is made by a run; everything else is in the repository."""
    for target in re.findall(r"\]\(([^)]+)\)", README):
        if not target.startswith("http") and target != "docs/attach.svg":
            assert (ROOT / target).exists(), target
