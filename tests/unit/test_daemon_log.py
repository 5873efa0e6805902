# SPDX-License-Identifier: Apache-2.0
"""The log and what the service manager is told."""

from __future__ import annotations

import io
import json
import os
import socket
import threading
from pathlib import Path

import pytest

from profinferd.agent.daemon import notify
from profinferd.agent.daemon.log import BURST, TOTAL, Log
from profinferd.agent.daemon.notify import Notifier


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_line_is_a_line_whatever_is_in_it() -> None:
    """Names of targets come from strangers: no line break, no escape sequence, no forged field."""
    out = io.StringIO()
    log = Log(form="text", stream=out)
    log.info("target found", program='a\nb\x1b[31m" pid=1', pid=7, reason=None)
    text = out.getvalue()
    assert text.count("\n") == 1 and "\x1b" not in text and text.rstrip().endswith("pid=7")
    assert 'program="a\\nb\\u001b[31m\\" pid=1"' in text


def test_json_and_priorities(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    Log(form="json", stream=out).warning("lost", pid=3)
    line = json.loads(out.getvalue())
    assert (line["level"], line["message"], line["pid"]) == ("warning", "lost", 3)
    out = io.StringIO()
    Log(form="json", stream=out).warning("level shed", level="op", time="never")
    line = json.loads(out.getvalue())
    assert (line["level"], line["level_"], line["time_"]) == ("warning", "op", "never")
    monkeypatch.setenv("JOURNAL_STREAM", "8:1")
    out = io.StringIO()
    Log(stream=out).error("bad")
    assert out.getvalue() == "<3>bad\n"


def test_rates_are_bounded_and_what_was_held_back_is_counted() -> None:
    out, clock = io.StringIO(), Clock()
    log = Log(form="text", stream=out, clock=clock)
    for _ in range(1000):
        log.info("again")
    assert out.getvalue().count("\n") == BURST and log.suppressed == 1000 - BURST
    clock.now += 61
    log.info("again")
    assert f"suppressed={1000 - BURST}" in out.getvalue().splitlines()[-1]
    clock.now += 61
    before = out.getvalue().count("\n")
    for i in range(1000):
        log.info(f"message {i}")
    assert out.getvalue().count("\n") - before == TOTAL
    log.error("grave")
    assert "grave" in out.getvalue().splitlines()[-1]


def test_levels() -> None:
    out = io.StringIO()
    log = Log("warning", "text", out)
    log.info("quiet")
    log.debug("quiet")
    assert not out.getvalue()


def test_the_service_manager_is_told(tmp_path: Path) -> None:
    """Datagrams as systemd's own client sends them; half the watchdog's patience between two."""
    path = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(path)
        manager.setblocking(False)
        told = Notifier({"NOTIFY_SOCKET": path, "WATCHDOG_USEC": "4000000", "WATCHDOG_PID": str(os.getpid())})
        assert told.interval_s == 2.0
        told.ready("two\nlines")
        told.alive(10.0)
        told.alive(11.0)
        told.alive(12.0)
        told.reloading()
        told.stopping()
        said = [manager.recv(1000) for _ in range(5)]
    assert said[:3] == [b"READY=1\nSTATUS=two lines", b"WATCHDOG=1", b"WATCHDOG=1"]
    assert said[3].startswith(b"RELOADING=1\nMONOTONIC_USEC=") and said[4] == b"STOPPING=1"
    told.status("nobody listens any more")  # no error
    Notifier({}).ready("nobody asked")
    assert Notifier({"WATCHDOG_USEC": "1", "WATCHDOG_PID": "1"}).interval_s is None


def test_a_manager_that_is_busy_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its queue is full of what others say; one that never reads holds nobody up for long."""
    path = str(tmp_path / "notify")
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as others,
    ):
        manager.bind(path)
        manager.settimeout(120)
        others.setblocking(False)

        def fill() -> None:
            with pytest.raises(BlockingIOError):
                for _ in range(100_000):
                    others.sendto(b"chatter", path)

        fill()
        monkeypatch.setattr(notify, "PATIENCE_S", 60.0)
        told = Notifier({"NOTIFY_SOCKET": path})
        speaker = threading.Thread(target=told.ready, args=("watching",))
        speaker.start()
        while (said := manager.recv(1000)) == b"chatter":
            pass
        assert said == b"READY=1\nSTATUS=watching"
        speaker.join()
        fill()
        monkeypatch.setattr(notify, "PATIENCE_S", 0.01)
        told.stopping()
