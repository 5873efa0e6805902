# SPDX-License-Identifier: Apache-2.0
"""A real engine is recorded, and its report opened: the server's own figures are on the page."""

from __future__ import annotations

import re
import signal
import subprocess
from pathlib import Path

import pytest

from profinferd.agent.recording.reader import Recording
from tests.page.browser import DESKTOP, browser

from . import models, servers
from .fetch import Engines
from .processes import end, with_parent
from .profiler import COMMAND, run

LIMIT = 300.0
ATTEMPTS = 6


def record_one(server: servers.Server, path: Path, tokens: int) -> dict[str, float]:
    """One request of a running server into ``path``; what the server says of it."""
    command = [*COMMAND, "record", "--pid", str(server.pid), "-o", str(path)]
    recorder = subprocess.Popen(with_parent(command), stderr=subprocess.PIPE)
    stream, said = recorder.stderr, ""
    assert stream is not None
    try:
        while "attached" not in said:
            line = stream.readline().decode()
            assert line, said
            said += line
        answer = server.completion(models.words(40), tokens)
        recorder.send_signal(signal.SIGINT)
        _, rest = recorder.communicate(timeout=LIMIT)
        assert recorder.returncode == 0, said + rest.decode()
    finally:
        end(recorder)
        stream.close()
    timings: dict[str, float] = answer["timings"]
    return timings


def test_the_page_of_a_real_run(engines: Engines, tmp_path: Path) -> None:
    """Tokens exactly, time between tokens within 5 %: the server takes the same two moments."""
    recording, page = tmp_path / "run.pfi", tmp_path / "run.html"
    with servers.Server(servers.Options(engines.gemma, threads=1)) as server:
        server.completion(models.words(3, 99), 2)
        for _ in range(ATTEMPTS):  # what the machine does between the two clocks counts in one alone
            recording.unlink(missing_ok=True)
            timings = record_one(server, recording, 48)
            with Recording.open(str(recording)) as read:
                mean = read.trace.snapshot.latency_seconds.inter_token.mean
            assert mean is not None
            if mean * 1e3 == pytest.approx(timings["predicted_per_token_ms"], rel=0.04):
                break
    code, out, err = run("report", str(recording))
    assert code == 0, err
    assert re.search(rf"Generated tokens +{int(timings['predicted_n'])} ", out)
    code, _, err = run("report", str(recording), "--html", str(page))
    assert code == 0, err
    assert page.stat().st_size < 5_000_000
    with browser(tmp_path / "profile") as tab:
        tab.size(DESKTOP)
        tab.open(page)

        def text(selector: str) -> str:
            return str(tab.js("document.querySelector(arguments[0]).innerText", selector))

        assert text("[data-figure=generated] .value") == str(int(timings["predicted_n"]))
        assert f"after {int(timings['prompt_n'])} prompt tokens" in text("[data-figure=generated] .subline")
        number, unit = text("[data-figure=inter_token] .value").split()
        mean_ms = float(number.replace(",", "")) * {"µs": 1e-3, "ms": 1, "s": 1e3}[unit]
        assert mean_ms == pytest.approx(timings["predicted_per_token_ms"], rel=0.05)
        assert text("[data-figure=lost] .value") == "0"
        # Gemma 3 270M has 18 layers; every kernel of it was seen.
        groups = tab.js("[...document.querySelectorAll('[data-group]')].map(g => g.dataset.group)")
        assert [g for g in groups if g.startswith("layer")] == [f"layer {n}" for n in range(18)]
        assert "not seen" not in text("#graph-facts")
        assert tab.errors() == []
