# SPDX-License-Identifier: Apache-2.0
"""The daemon sends to a real OTLP receiver what its engine did, and does not mind when none is there."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.unit.test_exporters_otlp import Receiver, attributes

from .cases import Engine, copied, engine
from .daemons import Daemon

LIMIT = 240.0
NAME = f"pfi-otlp-{os.getpid()}"
CLOSED = "http://127.0.0.1:1/v1/metrics"
"""Nobody is given this port by chance."""


def points(receiver: Receiver, name: str) -> list[Any]:
    metric = receiver.metrics().get(name) if receiver.requests else None
    return [] if metric is None else list(getattr(metric, metric.WhichOneof("data")).data_points)


def test_what_an_engine_did_arrives(tmp_path: Path) -> None:
    """Tokens of the stub by its own orders: five of a prompt, then ten; nothing twice."""
    program = copied(engine(), tmp_path, NAME)
    with (
        contextlib.closing(Receiver()) as receiver,
        Engine(program) as stub,
        Daemon(tmp_path, NAME, otlp={"endpoint": receiver.url, "every": "1s"}) as daemon,
    ):
        until = time.monotonic() + LIMIT
        while not points(receiver, "profinfer.target_state"):
            assert time.monotonic() < until, daemon
            time.sleep(0.05)
        stub.order("run pos=0-4 out=4")
        for position in range(5, 15):
            stub.order(f"run pos={position} out=0")
        while sum(p.as_double for p in points(receiver, "profinfer.generation_tokens")) < 11:
            assert time.monotonic() < until + LIMIT, daemon
            time.sleep(0.05)
        (tokens,) = points(receiver, "profinfer.generation_tokens")
        (prompt,) = points(receiver, "profinfer.prompt_tokens")
        assert (tokens.as_double, prompt.as_double) == (11, 5)
        (first,) = points(receiver, "gen_ai.server.time_to_first_token")
        (per_token,) = points(receiver, "gen_ai.server.time_per_output_token")
        assert (first.count, per_token.count) == (1, 10)
        assert attributes(first)["gen_ai.provider.name"] == "llama.cpp"


def test_an_outage_stops_neither_scrapes_nor_the_end(tmp_path: Path) -> None:
    with Daemon(tmp_path, "no-such-program", otlp={"endpoint": CLOSED, "every": "1s"}) as daemon:
        until = time.monotonic() + LIMIT
        while "does not take metrics" not in daemon.log():
            assert time.monotonic() < until
            time.sleep(0.05)
        assert "profinfer_build_info" in daemon.get("/metrics")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"otlp": {"endpoint": "localhost:4318"}}, "otlp.endpoint"),
        ({"otlp": {"every": "0s"}}, "otlp.every: it is between"),
        (
            {"otlp": {"endpoint": "http://127.0.0.1:1/v1/metrics"}, "http": {"listen": None}},
            "needs http.listen",
        ),
    ],
)
def test_wrong_settings(settings: dict[str, Any], says: str, tmp_path: Path) -> None:
    import yaml

    from profinferd.agent.daemon.config import load
    from profinferd.agent.errors import UsageError

    path = tmp_path / "wrong.yaml"
    path.write_text(yaml.safe_dump(settings))
    with pytest.raises(UsageError, match=says):
        load(str(path))
