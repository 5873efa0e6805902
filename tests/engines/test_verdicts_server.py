# SPDX-License-Identifier: Apache-2.0
"""``profinferd attach``, as a user runs it, ends with verdicts on a stock server."""

from __future__ import annotations

import os
from typing import Any

import pytest

from ..tries import in_one_of, timed
from . import servers
from .fetch import Engines
from .models import model, words
from .profiler import Profiler
from .undisturbed import first_in_line

REQUESTS = 4
ATTEMPTS = 6
"""A hypervisor may take the core all the same."""


def attached(threads: int, undisturbed: bool) -> list[dict[str, Any]]:
    """Verdicts on a server that answers some requests."""
    options = servers.Options(model("dense2-q8_0"), threads=threads)
    with servers.Server(options, servers.first_usable(options)) as server:
        server.completion(words(8), 4)
        if undisturbed:
            first_in_line(server.pid)
        with Profiler(server.pid, "--ops", "sampled") as profiler:
            for number in range(REQUESTS):
                server.completion(words(8, number), 60)
            report = profiler.finish()
    return list(report.json["verdicts"])


def test_more_threads_than_cores(engines: Engines) -> None:
    """Four threads where there are fewer cores, the profiler beside them."""
    cpus = len(os.sched_getaffinity(0))
    if cpus >= 4:
        pytest.skip("this machine has cores enough for four threads")
    in_one_of(ATTEMPTS, lambda: more_threads_than(cpus))


def more_threads_than(cpus: int) -> None:
    verdicts = attached(4, undisturbed=False)
    costs = [v["seconds_per_token"] for v in verdicts if v["seconds_per_token"] is not None]
    assert costs == sorted(costs, reverse=True) and all(cost > 0 for cost in costs)
    assert all(set(v) == {"rule", "confidence", "seconds_per_token", "evidence", "try"} for v in verdicts)
    # Where others take the cores, that is what is wrong.
    timed(any(v["rule"] == "more_threads_than_cores" for v in verdicts), verdicts)
    (found,) = (v for v in verdicts if v["rule"] == "more_threads_than_cores")
    # One that never got a core has not computed.
    share = f"4 compute threads share {cpus} CPU{'s' if cpus > 1 else ''}"
    timed(found["evidence"][0] == share, found["evidence"])
    # They wait so often that it is watched in short trials only.
    assert found["try"] == f"--threads {cpus}" and found["confidence"] in ("high", "medium")


def test_nothing_wrong(engines: Engines) -> None:
    """One thread whose core nobody takes, the profiler included."""

    def once() -> None:
        rules = [v["rule"] for v in attached(1, undisturbed=True)]
        timed(rules == ["nothing_wrong"], rules)

    in_one_of(ATTEMPTS, once)
