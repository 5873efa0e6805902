# SPDX-License-Identifier: Apache-2.0
"""``profinferd report``: what it prints and writes, and its errors of one line."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from profinferd.agent.cli import main
from profinferd.agent.errors import ExitCode
from profinferd.exporters.html import pagefile

from .test_recording import record


@pytest.fixture
def recording(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "run.pfi"
    record(path, flushes=2)
    yield path


def test_the_terminal(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two prompts of five tokens and six tokens after them."""
    assert main(["report", str(recording)]) == ExitCode.DONE
    out, err = capsys.readouterr()
    assert out.startswith("toy.gguf\n") and err == ""
    assert re.search(r"Decode .* tokens/s  6 tokens in 6 calls", out)
    assert re.search(r"Generated tokens +8  after 10 prompt tokens", out)


def test_the_page(recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "out.html"
    assert main(["report", str(recording), "--html", str(page)]) == ExitCode.DONE
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("wrote ") and err.count("\n") == 1
    assert stat.S_IMODE(os.stat(page).st_mode) == 0o600
    text = page.read_text()
    assert text.startswith("<!doctype html>") and '"file":"run.pfi"' in text
    assert str(tmp_path) not in text
    assert main(["report", "-q", str(recording), "--html", str(page)]) == ExitCode.DONE
    assert capsys.readouterr() == ("", "")


def error(capsys: pytest.CaptureFixture[str]) -> str:
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("profinferd: ") and err.count("\n") == 1, err
    return err


def test_files_that_are_no_recording(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.txt"
    other.write_text("not a recording\n" * 20)
    page = tmp_path / "out.html"
    for path, said in (
        (other, "is not a recording"),
        (tmp_path / "none", "No such file"),
        (tmp_path, "Is a directory"),
    ):
        for more in ([], ["--html", str(page)]):
            assert main(["report", str(path), *more]) == ExitCode.USAGE
            assert said in error(capsys)
    assert not page.exists()


def test_a_recording_that_is_cut_off(
    recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = recording.read_bytes()
    cut = tmp_path / "cut.pfi"
    cut.write_bytes(whole[: len(whole) // 2])
    assert main(["report", str(cut)]) == ExitCode.USAGE
    assert "cut off" in error(capsys)


def test_places_that_cannot_be_written(
    recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    link = tmp_path / "link.html"
    link.symlink_to(tmp_path / "elsewhere")
    for path, said in (
        (tmp_path / "none" / "x.html", "--html"),
        (link, "symbolic link"),
        (tmp_path, "not a regular"),
    ):
        assert main(["report", str(recording), "--html", str(path)]) == ExitCode.USAGE
        assert said in error(capsys)


def test_without_the_built_page_only_html_fails(
    recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pagefile, "template", lambda: (_ for _ in ()).throw(pagefile.NoPage("was not built")))
    monkeypatch.setattr("profinferd.exporters.html.template", pagefile.template)
    assert main(["report", str(recording)]) == ExitCode.DONE
    capsys.readouterr()
    assert main(["report", str(recording), "--html", str(tmp_path / "x.html")]) == ExitCode.MACHINE
    assert "npm" in error(capsys)
    assert not (tmp_path / "x.html").exists()


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report"]) == ExitCode.USAGE
    assert "FILE" in error(capsys)
