# SPDX-License-Identifier: Apache-2.0
"""``profinferd export`` and ``profinferd diff`` on recordings: files, streams, exit codes."""

from __future__ import annotations

import json
import os
import re
import resource
import stat
from pathlib import Path

import pytest

from profinferd.agent.cli import main
from profinferd.agent.model.trace import Trace
from profinferd.agent.recording.reader import Recording
from profinferd.exporters.formats import FORMATS

from . import test_recording, traces
from .perfetto_reader import parse
from .test_model_diff import recording, slower


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A recording."""
    path = tmp_path / "run.pfi"
    test_recording.record(path)
    return path


def test_a_file_for_its_owner_alone(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "t.pftrace"
    assert main(["export", str(run), "--format", "perfetto", "-o", str(out)]) == 0
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    assert len(parse(out.read_bytes()).of("op")) == 88
    printed, said = capsys.readouterr()
    assert printed == "" and said.startswith(f"wrote {out} (")
    assert main(["export", str(run), "--format", "chakra", "-o", str(out), "-q"]) == 0
    assert capsys.readouterr() == ("", "")


def test_two_names_that_are_no_files(
    run: Path, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    """/dev/null and /dev/stdout mean what they always do; other devices, pipes and links do not."""
    command = ["export", str(run), "--format", "folded", "-q"]
    assert main(command) == 0
    wanted = capfdbinary.readouterr().out
    assert main([*command, "-o", "/dev/stdout"]) == 0
    assert capfdbinary.readouterr() == (wanted, b"")
    before = os.stat("/dev/null")
    assert main([*command, "-o", "/dev/null"]) == 0
    assert capfdbinary.readouterr() == (b"", b"")
    assert os.path.samestat(os.stat("/dev/null"), before)
    pipe, link = tmp_path / "pipe", tmp_path / "null"
    os.mkfifo(pipe)
    link.symlink_to("/dev/null")
    for path in ("/dev/zero", str(pipe), str(link)):
        assert main([*command, "-o", path]) == 2
        out, err = capfdbinary.readouterr()
        assert out == b"" and (b"not a regular file" in err or b"symbolic link" in err)


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_every_format_is_written(name: str, run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = ["export", str(run), "--format", name, "-o", str(out), "-q"]
    if name == "svg" and not any(os.access(f"{p}/dot", os.X_OK) for p in os.environ["PATH"].split(":")):
        assert main(command) == 4
        return
    assert main(command) == 0
    files = [p for p in out.rglob("*") if p.is_file()] if out.is_dir() else [out]
    assert files and all(stat.S_IMODE(p.stat().st_mode) == 0o600 and p.stat().st_size for p in files)
    if out.is_dir():
        assert all(stat.S_IMODE(p.stat().st_mode) == 0o700 for p in [out, *out.rglob("*")] if p.is_dir())
        assert main(command) == 0, "and again into the same folder"
    assert not list(tmp_path.rglob(".*")), "no temporary file is left"


def test_without_a_name_data_goes_to_stdout(run: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert main(["export", str(run), "--format", "folded"]) == 0
    out, err = capfdbinary.readouterr()
    assert b"server;decode;layer 0;ffn_up;MUL_MAT q4_K 3000\n" in out and err == b""
    assert main(["export", str(run), "--format", "perfetto"]) == 0
    assert len(parse(capfdbinary.readouterr().out).of("op")) == 88


def test_recorded_samples_of_cpu_time(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["export", str(run), "--format", "stacks"]) == 0
    assert capsys.readouterr().out == "main;mul_mat 3\nmain;sample 1\n"
    assert main(["export", str(run), "--format", "flame"]) == 0
    assert "mul_mat" in capsys.readouterr().out
    assert main(["report", str(run)]) == 0
    assert re.search(r"CPU time, by 4 samples\n.*\n *75.0%  kernels +30.0 ms", capsys.readouterr().out)
    for option in (["--from", "0"], ["--anonymise"], ["--no-times"]):
        assert main(["export", str(run), "--format", "stacks", *option]) == 2
        assert "leave --" in capsys.readouterr().err
    without = tmp_path / "without.pfi"
    monkeypatch.setattr(test_recording, "SAMPLES", None)
    test_recording.record(without)
    assert main(["export", str(without), "--format", "flame"]) == 2
    assert "record with --stacks" in capsys.readouterr().err


def test_a_stretch_of_time(run: Path, tmp_path: Path) -> None:
    with Recording.open(str(run)) as opened:
        begin = opened.trace.facts.begin_ns
        second = opened.trace.calls[1]
    start, end = (f"{(int(second[field]) - begin) / 1e9:.9f}" for field in ("begin", "end"))
    out = tmp_path / "t"
    options = ["--format", "perfetto", "-o", str(out), "--from", start, "--to", end]
    assert main(["export", str(run), *options]) == 0
    assert [t.name for t in parse(out.read_bytes()).of("token")] == ["decode"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--format", "parquet"], "writes a folder: say which with -o"),
        (["--format", "csv"], "writes a folder"),
        (["--format", "folded", "--from", "3", "--to", "3"], "--to is not after --from"),
        (["--format", "dot", "--graph", "99"], "no graph 99"),
        (["--format", "folded", "--no-times"], "leave --no-times out"),
        (["--format", "yaml"], "'yaml' is not one of"),
        ([], "Missing option '--format'"),
    ],
)
def test_wrong_usage_is_one_line(
    options: list[str], message: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(run), *options]) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err and err.count("\n") == 1


def test_what_is_no_recording(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    foreign = tmp_path / "x.pfi"
    foreign.write_text("hello")
    for command in (["export", str(foreign), "--format", "dot"], ["diff", str(foreign), str(foreign)]):
        assert main(command) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_a_failed_export_leaves_what_was_there(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "g.dot"
    out.write_text("before")
    assert main(["export", str(run), "--format", "dot", "--graph", "99", "-o", str(out)]) == 2
    assert out.read_text() == "before" and not list(tmp_path.glob(".g.dot*"))


@pytest.mark.parametrize(
    "command",
    [
        ["report", "{run}", "--html", "{other}"],
        ["export", "{run}", "--format", "folded", "-o", "{run}"],
        ["export", "{run}", "--format", "csv", "-o", "{other}"],
        ["diff", "{copy}", "{run}", "-o", "{other}"],
    ],
)
def test_a_recording_is_not_overwritten_by_what_is_made_of_it(
    command: list[str], run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other, copy = tmp_path / "other.pfi", tmp_path / "copy.pfi"
    other.hardlink_to(run)
    copy.write_bytes(run.read_bytes())
    before = run.read_bytes()
    assert main([part.format(run=run, other=other, copy=copy) for part in command]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "is the recording that is to be read" in err and err.count("\n") == 1
    assert run.read_bytes() == before and other.samefile(run)


def test_a_folder_that_grows_keeps_the_views_of_all_its_tables(run: Path, tmp_path: Path) -> None:
    """What another recording was watched for, and this one was not; what is no table is left alone."""
    duckdb = pytest.importorskip("duckdb")
    out = tmp_path / "traces"
    command = ["export", str(run), "--format", "parquet", "-o", str(out), "-q"]
    assert main(command) == 0
    (out / "faults").rename(out / "sched_spans")
    for hostile in ("x'; DROP", "notes"):
        (out / hostile).mkdir()
    (out / "x'; DROP" / "host=h").mkdir()
    assert main(command) == 0
    with duckdb.connect() as database:
        views = (out / "views.sql").read_text().replace("read_parquet('", f"read_parquet('{out}/")
        database.execute(views)
        names = {row[0] for row in database.execute("SELECT view_name FROM duckdb_views()").fetchall()}
        assert {"ops", "faults", "sched_spans"} <= names and "notes" not in names
        (rows,) = database.execute("SELECT count(*) FROM sched_spans").fetchone()
        assert rows == 2


@pytest.mark.parametrize("name", ["csv", "parquet"])
def test_half_a_folder_is_not_left(
    name: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No room for one of the tables: none of them is there, or all are as they were before."""
    out = tmp_path / "deep" / "out"
    command = ["export", str(run), "--format", name, "-o", str(out)]

    def limited() -> int:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, hard))  # bytes; some tables are smaller
        try:
            return main(command)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    out.parent.mkdir()
    assert limited() == 4
    assert "File too large" in capsys.readouterr().err
    assert not list(out.parent.iterdir())
    assert main(command) == 0
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert min(map(len, before.values())) < 3000 < max(map(len, before.values()))
    assert limited() == 4
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


class Opened:
    """Stands for an open recording."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *_: object) -> None: ...


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> dict[str, Trace]:
    """Traces by the names that the command is given."""
    traces: dict[str, Trace] = {}
    monkeypatch.setattr(Recording, "open", lambda path: Opened(traces[path]))
    return traces


def test_diff_shows_what_changed_and_the_gate_closes(
    pair: dict[str, Trace], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair |= {"a": recording(2), "b": recording(3, change=slower(1.3, "attn_q")), "same": recording(4)}
    assert main(["diff", "a", "b"]) == 0
    out, err = capsys.readouterr()
    (row,) = [line for line in out.splitlines() if "slower" in line]
    assert row.split()[:5] == ["MUL_MAT", "q4_K", "attn_q", "all", "slower"] and err == ""
    saved = tmp_path / "diff.json"
    assert main(["diff", "a", "b", "--fail-above", "5%", "--format", "json", "-o", str(saved)]) == 6
    out, err = capsys.readouterr()
    assert "above 5%: decode: MUL_MAT attn_q +" in err
    assert out == saved.read_text()
    document = json.loads(out)
    assert document["schema"] == 1
    (phase,) = document["phases"]
    assert [r["role"] for r in phase["rows"] if r["time"] and r["time"]["significant"]] == ["attn_q"]
    assert main(["diff", "a", "b", "--fail-above", "0.5"]) == 0, "30 % is below 50 %"
    capsys.readouterr()
    assert main(["diff", "a", "same", "--fail-above", "5%"]) == 0
    assert "no operator differs" in capsys.readouterr().out
    assert main(["diff", "a", "same", "--all"]) == 0
    assert "ffn_down" in capsys.readouterr().out


def test_diff_of_what_cannot_be_compared(pair: dict[str, Trace], capsys: pytest.CaptureFixture[str]) -> None:
    pair |= {"a": recording(1, executions=5), "b": recording(1, executions=5)}
    assert main(["diff", "a", "b"]) == 0
    assert "record longer" in capsys.readouterr().out
    # A gate that cannot tell does not stand open.
    assert main(["diff", "a", "b", "--fail-above", "5%"]) == 2
    out, err = capsys.readouterr()
    assert "record longer" in out and "too little could be compared for --fail-above" in err
    pair |= {"a": traces.of_steps([]), "b": traces.of_steps([])}
    assert main(["diff", "a", "b", "--fail-above", "5%"]) == 2
    assert "nothing to compare" in capsys.readouterr().out
    for wrong in ("much", "-5%", ""):
        assert main(["diff", "a", "b", "--fail-above", wrong]) == 2
