# SPDX-License-Identifier: Apache-2.0
"""The tests' own tools: engines are fetched once, servers run, and nothing outlives a test."""

from __future__ import annotations

from pathlib import Path

import pytest

from . import models, servers
from .fetch import Engines, fetch


def test_a_second_fetch_is_offline(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is there is not asked for again: pip is not run at all."""
    monkeypatch.setattr("tests.engines.fetch._pip", lambda packages: pytest.fail("pip was run"))
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
