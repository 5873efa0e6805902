# SPDX-License-Identifier: Apache-2.0
"""The control socket: the protocol, its limits, who is answered, and what is left behind."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from profinferd.agent.daemon import control
from profinferd.agent.daemon.client import ControlClient, NoDaemon
from profinferd.agent.daemon.control import MAX_CONNECTIONS, ControlServer
from profinferd.agent.daemon.protocol import MAX_REQUEST
from profinferd.agent.errors import MachineError, ProfinferError, TargetError, UsageError


def fail(request: Any) -> Any:
    raise TargetError("no such target", "look at the list")


def defect(request: Any) -> Any:
    raise ZeroDivisionError("a defect")


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "run" / "p.sock")


@pytest.fixture
def log() -> list[str]:
    return []


@pytest.fixture
def server(path: str, log: list[str]) -> Iterator[ControlServer]:
    handlers = {
        "echo": lambda request: dict(request),
        "fail": fail,
        "defect": defect,
        "snapshot": lambda request: {"targets": []},
        "reload": lambda request: {},
    }
    made = ControlServer(path, handlers, on_error=log.append)
    made.start()
    yield made
    made.close()


def raw(path: str, data: bytes) -> bytes:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(60)
        sock.connect(path)
        back = b""
        with contextlib.suppress(OSError):
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            while piece := sock.recv(65536):
                back += piece
        return back


def test_requests_and_answers(server: ControlServer, path: str, log: list[str]) -> None:
    """Several on one connection; a refusal keeps its words; a defect is said to the daemon's log."""
    with ControlClient(path) as client:
        assert client.ask("echo", a=[1]) == {"op": "echo", "a": [1]}
        assert client.snapshot() == {"targets": []}
        with pytest.raises(ProfinferError, match="no such target: look at the list"):
            client.ask("fail")
        with pytest.raises(ProfinferError, match="does not know"):
            client.ask("other")
        assert client.ask("echo") == {"op": "echo"}
        with pytest.raises(MachineError):
            client.ask("defect")
    until = time.monotonic() + 60  # the connection is closed first, and what was wrong said then
    while not log and time.monotonic() < until:
        time.sleep(0.005)
    assert len(log) == 1 and "ZeroDivisionError" in log[0]


@pytest.mark.parametrize(
    "data", [b"\n", b"x\n", b"[1]\n", b'"a"\n', b"{}\n", b'{"op": 1}\n', b"[" * 4000 + b"\n"]
)
def test_what_is_no_request_is_refused(server: ControlServer, path: str, data: bytes) -> None:
    answer = json.loads(raw(path, data))
    assert answer["ok"] is False and answer["error"]["what"]


def test_a_long_line_and_a_cut_one(server: ControlServer, path: str) -> None:
    assert b"longer than" in raw(path, b" " * (MAX_REQUEST + 10)) or not raw(path, b" " * (MAX_REQUEST + 10))
    assert b"middle of a line" in raw(path, b'{"op"')
    assert json.loads(raw(path, b'{"op":"echo"}\n'))["ok"] is True


def test_idle_and_slow_clients_are_bounded(
    server: ControlServer, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connections that say nothing take the places for a while, and no thread for good."""
    monkeypatch.setattr(control, "IDLE_SECONDS", 0.5)
    before = threading.active_count()
    idle = []
    for _ in range(4 * MAX_CONNECTIONS):
        sock = socket.socket(socket.AF_UNIX)
        with contextlib.suppress(BlockingIOError):
            sock.setblocking(False)
            sock.connect(path)
        idle.append(sock)
    until = time.monotonic() + 60
    answered = False
    while not answered and time.monotonic() < until:
        assert threading.active_count() - before <= MAX_CONNECTIONS
        with contextlib.suppress(ProfinferError), ControlClient(path) as client:
            answered = client.ask("echo") == {"op": "echo"}
        time.sleep(0.05)
    assert answered
    for sock in idle:
        sock.close()


def test_who_may_ask() -> None:
    """A stranger is not answered even where the file's mode would let it in (the kernel names it)."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    code = (
        "import os,socket,sys\nos.setgroups([]);os.setgid(65534);os.setuid(65534)\n"
        "s=socket.socket(socket.AF_UNIX);s.connect(sys.argv[1])\n"
        's.sendall(b\'{"op":"snapshot"}\\n\');print(s.recv(4096).decode())'
    )
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/p.sock"
        server = ControlServer(path, {"snapshot": lambda request: {}})
        server.start()
        os.chmod(folder, 0o755)
        os.chmod(path, 0o777)
        done = subprocess.run(
            ["/usr/bin/python3", "-c", code, path], capture_output=True, text=True, timeout=60, check=False
        )
        server.close()
    assert "permission denied" in done.stdout, done.stderr


def test_members_of_the_group_may_look_and_not_reload(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    path = str(tmp_path / "g.sock")
    server = ControlServer(path, {"snapshot": lambda r: {}, "reload": lambda r: {}}, group="daemon")
    server.start()
    try:
        assert server._answer({"op": "snapshot"}, (65534, frozenset({1})))["ok"]
        assert not server._answer({"op": "snapshot"}, (65534, frozenset({65534})))["ok"]
        assert not server._answer({"op": "reload"}, (65534, frozenset({1})))["ok"]
        assert os.stat(path).st_gid == 1 and stat.S_IMODE(os.stat(path).st_mode) == 0o750
    finally:
        server.close()


def test_what_is_left_of_a_killed_daemon_is_removed_and_a_living_one_is_not(path: str) -> None:
    os.makedirs(os.path.dirname(path))
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(path)
    dead.close()  # the file stays, as after kill -9
    first = ControlServer(path, {})
    first.start()
    with pytest.raises(UsageError, match="another profinferd daemon"):
        ControlServer(path, {})
    first.close()
    assert not os.path.exists(path)
    with pytest.raises(NoDaemon):
        ControlClient(path)
    Path(path).write_text("precious")
    with pytest.raises(UsageError, match="no socket"):
        ControlServer(path, {})
    assert Path(path).read_text() == "precious"
