# SPDX-License-Identifier: Apache-2.0
"""``profinferd attach`` around a made-up attachment: exit codes, streams, files."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from profinferd.agent.cli import main
from profinferd.agent.cli.listen import FRESH_SECONDS, Published
from profinferd.agent.errors import MachineError, TargetError
from profinferd.agent.model.snapshot import Snapshot

from .fake_attachment import Fake

ATTACH = importlib.import_module("profinferd.agent.cli.attach")
LISTEN = importlib.import_module("profinferd.agent.cli.listen")

Use = Callable[[Fake], Fake]


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Use:
    """Puts a fake where the attachment would be opened."""

    def put(fake: Fake) -> Fake:
        monkeypatch.setattr(ATTACH, "open_attachment", lambda options, progress, watching: fake)
        return fake

    return put


def test_duration_prints_the_table(use: Use, capsys: pytest.CaptureFixture[str]) -> None:
    """The end of the duration is exit 0, the table on stdout, and the probes are gone."""
    fake = use(Fake(sleep=0.02))
    assert main(["attach", "-p", "1", "-d", "0.05"]) == 0
    out, err = capsys.readouterr()
    assert "MUL_MAT" in out and "decode" in out
    assert "MUL_MAT" not in err
    assert fake.closed == 1 and not fake.polled_after_close


def test_json_is_one_object_alone_on_stdout(use: Use, capsys: pytest.CaptureFixture[str]) -> None:
    """Other programs parse stdout."""
    use(Fake(sleep=0.02))
    assert main(["attach", "-p", "1", "-d", "0.05", "--format", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == 1
    assert [document["tokens"][key] for key in ("prefill", "decode", "output_rows")] == [6, 41, 42]


def test_idle_target_is_done_with_a_note(use: Use, capsys: pytest.CaptureFixture[str]) -> None:
    """A live target that did nothing is no failure."""
    use(Fake("idle", seen_after=None, sleep=0.02))
    assert main(["attach", "-p", "1", "-d", "0.05", "--format", "json"]) == 0
    assert any("idle" in note for note in json.loads(capsys.readouterr().out)["notes"])


def test_target_that_ends_after_something_was_seen(use: Use, capsys: pytest.CaptureFixture[str]) -> None:
    """What was seen is kept and printed, after one more drain."""
    fake = use(Fake(ends_after=3))
    assert main(["attach", "-p", "1", "--format", "json"]) == 0
    assert any("ended" in note for note in json.loads(capsys.readouterr().out)["notes"])
    assert fake.polls == 4


def test_target_that_ends_before_anything_was_seen(use: Use, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 5, one line, nothing on stdout."""
    fake = use(Fake(seen_after=None, ends_after=2))
    assert main(["attach", "-q", "-p", "77"]) == 5
    out, err = capsys.readouterr()
    assert out == "" and "process 77 ended before anything was seen" in err
    assert len(err.strip().splitlines()) == 1
    assert fake.closed == 1


@pytest.mark.parametrize(("failure", "code"), [("machine", 4), ("target", 3), ("bug", 1)])
def test_a_failing_poll_keeps_what_was_seen(
    use: Use, capsys: pytest.CaptureFixture[str], failure: str, code: int
) -> None:
    """The table comes out, then the one line of the error with its exit code."""
    fake = use(Fake(fails_at=3, failure=failure))
    assert main(["attach", "-q", "-p", "1"]) == code
    out, err = capsys.readouterr()
    assert "MUL_MAT" in out
    assert len(err.strip().splitlines()) == 1 and "Traceback" not in err
    assert fake.closed == 1


def test_a_failing_poll_with_nothing_seen_prints_nothing(
    use: Use, capsys: pytest.CaptureFixture[str]
) -> None:
    """An empty table beside an error would say that the target did nothing."""
    use(Fake(seen_after=None, fails_at=1))
    assert main(["attach", "-p", "1"]) == 4
    assert capsys.readouterr().out == ""


def test_verbose_shows_where_a_defect_is(use: Use, capsys: pytest.CaptureFixture[str]) -> None:
    """-v gives the traceback; without it the line says so."""
    use(Fake(fails_at=1, failure="bug"))
    assert main(["attach", "-p", "1"]) == 1
    assert "-v shows where" in capsys.readouterr().err
    assert main(["attach", "-p", "1", "-v"]) == 1
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (TargetError("process 1 has no engine", "check the pid"), 3),
        (MachineError("no CAP_BPF", "run as root"), 4),
    ],
)
def test_errors_of_opening(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, code: int
) -> None:
    """One line: what, why, what to do."""

    def refuse(options: object, progress: object, watching: object) -> Fake:
        raise error

    monkeypatch.setattr(ATTACH, "open_attachment", refuse)
    assert main(["attach", "-q", "-p", "1"]) == code
    assert capsys.readouterr().err == f"profinferd: {error}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nonsense"],
        ["attach"],
        ["attach", "-p", "0"],
        ["attach", "-p", "-5"],
        ["attach", "-p", "abc"],
        ["attach", "-p", "1", "-d", "0"],
        ["attach", "-p", "1", "-d", "-1"],
        ["attach", "-p", "1", "-d", "nan"],
        ["attach", "-p", "1", "-d", "inf"],
        ["attach", "-p", "1", "--ops", "some"],
        ["attach", "-p", "1", "--loader", "ebpf"],
        ["attach", "-p", "1", "--loader", "bcc", "--ops", "sampled"],
        ["attach", "-p", "1", "--format", "xml"],
        ["attach", "-p", "1", "--attach-method", "ptrace"],
        ["attach", "-p", "1", "--btf-path", "/nonexistent/btf"],
        ["attach", "-p", "1", "--btf-path", __file__],
        ["attach", "-p", "١"],
        ["attach", "-p", "9" * 5000],
        ["attach", "-p", "1", "-d", "10x"],
        ["attach", "-p", "1", "--budget", "0"],
        ["attach", "-p", "1", "--budget", "101%"],
        ["attach", "-p", "1", "--budget", "nan"],
        ["attach", "-p", "1", "--budget", "little"],
        ["attach", "-p", "1", "--qos-min-tokens-per-second", "0"],
        ["attach", "-p", "1", "--qos-min-tokens-per-second", "inf"],
        ["attach", "-p", "1", "--listen", "127.0.0.1"],
        ["attach", "-p", "1", "--listen", "127.0.0.1:99999"],
        ["attach", "-p", "1", "--listen", "::1:9847"],
        ["attach", "-p", "1", "--listen", "198.51.100.7:9847"],
        ["attach", "-p", "1", "-o", "/nonexistent/folder/file"],
        ["attach", "-p", "1", "-o", "/"],
        ["attach", "-p", "1", "-o", "/dev/zero"],
        ["attach", "-p", "1", "extra"],
    ],
)
def test_usage_errors(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 2 and one line, before anything is attached."""
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.strip().splitlines()) == 1 and err.startswith("profinferd: ")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["attach", "-p", "abc"], "--pid 'abc' is not a process id: give a number, as ps -e shows it"),
        (
            ["attach", "-p", "1", "--budget", "5"],
            "--budget '5' is not a share between 0 and 100 %: for example --budget 5%",
        ),
        (
            ["attach", "-p", "1", "--budget", "1"],
            "--budget '1' may be 1 % or all of its time: give --budget 1% or 100%",
        ),
        (["attach", "-p", "1", "-d", "10x"],
         "--duration '10x' is not a time such as 30, 30s, 15m or 1h: for example -d 10"),
        (["record", "-p", "1", "-d", "0m"],
         "--duration '0m' is not a time such as 30, 30s, 15m or 1h: for example -d 10"),
        (["record", "-p", "1", "--last", "s"],
         "--last 's' is not a time such as 30, 30s, 15m or 1h: for example --last 30s"),
        (["atach"], "No such command 'atach'. Did you mean 'attach'? See 'profinferd --help'"),
    ],
)  # fmt: skip
def test_usage_errors_say_what_to_write(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the words of this program, not of its option parser."""
    assert main(arguments) == 2
    assert capsys.readouterr().err == f"profinferd: {line}\n"


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    """Both are data, so on stdout."""
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("profinferd ")
    assert main(["attach", "--help"]) == 0
    assert "--listen" in capsys.readouterr().out


def test_output_file_is_private(use: Use, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """-o saves the JSON beside the table, mode 0600 whatever the umask and the file before."""
    use(Fake(sleep=0.02))
    path = tmp_path / "seen.json"
    path.write_text("old")
    path.chmod(0o666)
    before = os.umask(0)
    try:
        assert main(["attach", "-p", "1", "-d", "0.05", "-o", str(path)]) == 0
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert json.loads(path.read_text())["schema"] == 1
    assert "MUL_MAT" in capsys.readouterr().out
    assert [entry.name for entry in tmp_path.iterdir()] == ["seen.json"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_output_file_belongs_to_the_user_behind_sudo(
    use: Use, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sudo profinferd attach -o FILE leaves a file that the person can read."""
    use(Fake(sleep=0.02))
    monkeypatch.setenv("SUDO_UID", "12345")
    monkeypatch.setenv("SUDO_GID", "12346")
    path = tmp_path / "seen.json"
    assert main(["attach", "-q", "-p", "1", "-d", "0.05", "-o", str(path)]) == 0
    found = path.stat()
    assert (found.st_uid, found.st_gid) == (12345, 12346)


def test_a_link_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As root, writing through a link that somebody else placed is how files get overwritten."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    link = tmp_path / "link"
    link.symlink_to(victim)
    assert main(["attach", "-p", "1", "-o", str(link)]) == 2
    assert "symbolic link" in capsys.readouterr().err
    assert victim.read_text() == "precious"


def test_a_file_that_becomes_a_link_is_refused_and_the_result_printed(
    use: Use, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The check is made again when the file is written; the data still reaches stdout."""
    victim, path = tmp_path / "victim", tmp_path / "seen.json"
    victim.write_text("precious")

    def swap(options: object, progress: object, watching: object) -> Fake:
        path.symlink_to(victim)
        return Fake(sleep=0.02)

    monkeypatch.setattr(ATTACH, "open_attachment", swap)
    assert main(["attach", "-p", "1", "-d", "0.05", "-o", str(path)]) == 2
    assert "MUL_MAT" in capsys.readouterr().out
    assert victim.read_text() == "precious"


def test_hostile_names_do_not_reach_the_terminal(use: Use, capsys: pytest.CaptureFixture[str]) -> None:
    """No control character, no markup interpreted, no line added."""
    use(Fake("hostile", sleep=0.02))
    assert main(["attach", "-p", "1", "-d", "0.05"]) == 0
    out = capsys.readouterr().out
    assert "[red]" in out
    assert not [char for char in out if ord(char) < 32 and char != "\n"]
    assert "\u202e" not in out and "\udcff" not in out


def test_a_scrape_gets_figures_of_now_and_costs_nothing_until_it_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Snapshots are made when somebody asks: whoever asks waits for one that is newer."""
    monkeypatch.setattr(LISTEN, "PATIENCE_SECONDS", 60.0)
    published = Published()
    assert not published.wanted
    first = Fake().snapshot()
    made: list[Snapshot] = []

    def watch() -> None:
        while not made:
            if published.wanted:
                made.append(dataclasses.replace(first, window_seconds=77.0))
                published.set(made[0], True)
            time.sleep(0.01)

    published.set(first, False)
    time.sleep(FRESH_SECONDS)
    watching = threading.Thread(target=watch)
    watching.start()
    (seen,) = published()
    watching.join()
    assert seen.snapshot is made[0]
    monkeypatch.setattr(LISTEN, "FRESH_SECONDS", 600.0)
    (again,) = published()
    assert again is seen and not published.wanted, "a young one will do"


def test_a_scrape_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """While it attaches, and when the target is gone, nobody makes one."""
    monkeypatch.setattr(LISTEN, "PATIENCE_SECONDS", 0.05)
    assert Published()() == ()


@pytest.mark.parametrize(
    ("text", "seconds"), [("10", 10), (" 0.5 ", 0.5), ("30s", 30), ("1.5m", 90), ("2h", 7200), ("1d", 86400)]
)
def test_a_duration_may_have_its_unit(text: str, seconds: float) -> None:
    """As it is written in the daemon's configuration, and as ``--last`` always had it."""
    option = next(one for one in ATTACH.attach.params if one.name == "duration")
    assert option.process_value(click.Context(ATTACH.attach), text) == seconds
