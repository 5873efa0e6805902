# SPDX-License-Identifier: Apache-2.0
"""``profinferd attach`` as a real process: signals, broken pipes, terminals, closed streams."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOREVER = {"sleep": 0.05}
LIMIT = 60.0


def command(fake: dict[str, object], *arguments: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "tests.unit.fake_attachment",
        json.dumps(fake),
        "attach",
        "-p",
        "1",
        *arguments,
    ]


def start(fake: dict[str, object], *arguments: str, **more: object) -> subprocess.Popen[str]:
    """A running command whose attachment is being opened."""
    # Under nohup the tests ignore SIGHUP, and a command would inherit that.
    more.setdefault("preexec_fn", lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL))
    process = subprocess.Popen(  # type: ignore[call-overload]
        command(fake, *arguments), cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **more
    )
    assert process.stderr.readline() == "attaching\n"
    return process  # type: ignore[no-any-return]


def wait_for(path: Path) -> None:
    """Until the file is there."""
    until = time.monotonic() + LIMIT
    while not path.exists():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_prints_and_saves_what_was_seen(number: signal.Signals, tmp_path: Path) -> None:
    """Ctrl-C is how most people end it: exit 0 once something was seen."""
    path = tmp_path / "seen.json"
    watching = tmp_path / "watching"
    process = start({**FOREVER, "watching": str(watching)}, "--format", "json", "-o", str(path))
    wait_for(watching)
    process.send_signal(number)
    out, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, err
    assert json.loads(out) == json.loads(path.read_text())
    assert "Traceback" not in err


def test_a_signal_as_soon_as_it_is_attached() -> None:
    """Between the word that it is attached and the first poll it is watching already."""
    process = start({**FOREVER, "early": True}, "-q", "--format", "json")
    out, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, err
    assert json.loads(out)["tokens"]["decode"] > 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_anything_was_seen(number: signal.Signals, tmp_path: Path) -> None:
    """Exit 130, also while attaching still goes on."""
    watching = tmp_path / "watching"
    cases: tuple[dict[str, object], ...] = (
        {**FOREVER, "seen_after": None, "watching": str(watching)},
        {"open_seconds": 600},
    )
    for fake in cases:
        process = start(fake, "-q")
        if "watching" in fake:
            wait_for(watching)
        process.send_signal(number)
        out, err = process.communicate(timeout=LIMIT)
        assert (process.returncode, out) == (130, ""), err
        assert err == "profinferd: interrupted before anything was seen\n"


def test_a_reader_that_goes_away_is_no_error() -> None:
    """``profinferd attach ... | head -1``"""
    reader, writer = os.pipe()
    process = subprocess.Popen(
        command({**FOREVER}, "-q", "-d", "0.3"), cwd=ROOT, text=True, stdout=writer, stderr=subprocess.PIPE
    )
    os.close(writer)
    os.close(reader)
    _, err = process.communicate(timeout=LIMIT)
    assert (process.returncode, err) == (0, "attaching\n")


def test_a_full_disk_is_one_line() -> None:
    """stdout that cannot be written for another reason is said, without a traceback."""
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command({**FOREVER}, "-q", "-d", "0.2"),
            cwd=ROOT,
            text=True,
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=LIMIT,
        )
    assert done.returncode == 4
    assert done.stderr.splitlines()[1:] == [
        "profinferd: cannot write to standard output (No space left on device): use -o FILE"
    ]


def test_closed_streams(tmp_path: Path) -> None:
    """With all three closed, nothing else may take their numbers and the file is still written."""
    path = tmp_path / "seen.json"
    line = " ".join(f"'{word}'" for word in command({**FOREVER}, "-d", "0.2", "-o", str(path)))
    done = subprocess.run(["/bin/sh", "-c", f"exec {line} <&- >&- 2>&-"], cwd=ROOT, timeout=LIMIT)
    assert done.returncode == 0
    assert json.loads(path.read_text())["schema"] == 1


def test_an_encoding_without_the_characters(tmp_path: Path) -> None:
    """Names outside ASCII on an ASCII stdout are escaped, not raised."""
    done = subprocess.run(
        command({**FOREVER, "kind": "hostile"}, "-q", "-d", "0.2"),
        cwd=ROOT, text=True, capture_output=True, timeout=LIMIT,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout.isascii()


def test_no_colour_and_no_cursor_off_a_terminal() -> None:
    """Pipes get plain lines."""
    done = subprocess.run(
        command({**FOREVER}, "-d", "0.3"), cwd=ROOT, text=True, capture_output=True, timeout=LIMIT
    )
    assert "\x1b" not in done.stdout + done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80


@pytest.mark.parametrize("plain", [False, True])
def test_live_table_on_a_terminal(plain: bool) -> None:
    """The live table goes to stderr and is erased; NO_COLOR leaves no colour anywhere."""
    env = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS", "LINES", "FORCE_COLOR")}
    env |= {"TERM": "xterm-256color", **({"NO_COLOR": "1"} if plain else {})}
    main_end, far_end = pty.openpty()
    process = subprocess.Popen(
        command({**FOREVER}, "--format", "json"),
        cwd=ROOT, stdout=subprocess.PIPE, stderr=far_end, stdin=far_end, env=env,
    )  # fmt: skip
    os.close(far_end)
    screen = _read(main_end, until=b"MUL_MAT")
    process.send_signal(signal.SIGINT)
    screen += _read(main_end)
    os.close(main_end)
    out, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 0
    assert json.loads(out)["schema"] == 1
    assert b"MUL_MAT" in screen and b"\x1b[2K" in screen  # drawn, and taken away again
    assert screen.rstrip().endswith(b"\x1b[2K") or b"\x1b[?25h" in screen  # the cursor is back
    assert (b"\x1b[36m" in screen) is not plain


def _read(terminal: int, until: bytes | None = None) -> bytes:
    """What a program writes, until it has written that or is gone."""
    data = b""
    with contextlib.suppress(OSError):  # EIO: the far end is closed
        while (until is None or until not in data) and select.select([terminal], [], [], LIMIT)[0]:
            data += os.read(terminal, 65536)
    return data
