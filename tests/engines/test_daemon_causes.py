# SPDX-License-Identifier: Apache-2.0
"""The daemon on a real engine whose core is shared, and whose pages are gone; truth is /proc."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from profinferd.agent.model.causes import READY
from tests.runtime.cases import wait_for
from tests.runtime.daemons import Daemon
from tests.tries import in_one_of, timed

from .fetch import Engines
from .models import model, words
from .pysync import Options, PySync
from .test_causes import fault_counts, own_copy, page_out, pin, ready_seconds, thief

NAME = f"pfi-engine-{os.getpid()}"
ATTEMPTS = 6
ENOUGH_SECONDS = 0.3
"""Of waiting, to be compared."""
HELD_SECONDS = 6.0
"""For five seconds a fault is held back of whose page nothing can be told yet."""
WAIT, FAULTS = "profinfer_sched_wait_seconds_total", "profinfer_page_faults_total"


@contextmanager
def watched(tmp_path: Path, source: Path, **options: Any) -> Iterator[tuple[Daemon, PySync, str]]:
    """A daemon that watches one generation program, whose model's name nobody else has."""
    path = own_copy(source, tmp_path)
    path = path.rename(tmp_path / f"{NAME}.gguf")
    # Without operators nothing is shed, whatever the budget thinks of a core that a thief has.
    settings: dict[str, Any] = {
        "targets": {"include": [{"model": path.name}]},
        "profile": {"ops": "off"},
    }
    with (
        Daemon(tmp_path / "d", None, listen="", **settings) as daemon,
        PySync(Options(path, threads=1, **options)) as victim,
    ):
        generate(victim, 3)
        target = daemon.wait_for(victim.pid)["target"]
        generate(victim, 3)
        yield daemon, victim, target


def generate(victim: PySync, n: int) -> None:
    answer = victim.ask("generate", context=0, prompt=words(8), n=n)
    assert len(answer["tokens"]) == n


def settled(daemon: Daemon, pid: int, seconds: float = 2.2) -> None:
    """Until it has looked anew. An answer may be half a second old, and threads are looked after once a
    second, or later where others have the cores: the daemon gives way."""

    def looked() -> float:
        report = daemon.wait_for(pid)["report"]
        return float(report["window_seconds"]) if report is not None else 0.0

    before = looked()
    wait_for(lambda: looked() > before + seconds, "a new look at the process")


def test_a_thief_on_its_core(engines: Engines, tmp_path: Path) -> None:
    """Nearly all its time is in graphs: what the metric says grows as schedstat does."""
    cpu = max(os.sched_getaffinity(0))
    with watched(tmp_path, engines.gemma) as (daemon, victim, target):
        pin(victim.pid, cpu)

        def ready() -> float:
            return sum(daemon.sample(WAIT, target=target, cause=cause.label) for cause in READY)

        with thief(cpu) as other:
            settled(daemon, victim.pid)

            def waits() -> None:
                ours, truth = ready(), ready_seconds(victim.pid)
                while ready_seconds(victim.pid) < truth + ENOUGH_SECONDS:  # soon or late, as the machine is
                    generate(victim, 24)
                settled(daemon, victim.pid)
                ours, truth = ready() - ours, ready_seconds(victim.pid) - truth
                timed(ours == pytest.approx(truth, rel=0.1), (ours, truth))

            in_one_of(ATTEMPTS, waits)
        assert daemon.sample("profinfer_preemptions_total", target=target) > 10
        report = daemon.wait_for(victim.pid)["report"]
        assert other.pid in {taker["pid"] for taker in report["threads"]["takers"]}
        first = report["verdicts"][0]
        assert first["rule"] == "preempted", report["verdicts"]
        # Where people look: the page's summary says it, too, which may be half a second older.
        wait_for(lambda: "Preempted" in daemon.get("/api/live"), "the page's word for it")


def test_pages_that_are_gone(engines: Engines, tmp_path: Path) -> None:
    """The mapped model is dropped from memory: each fault of /proc is there, those of the model are told."""
    with watched(tmp_path, model("dense12-f16"), repack=False) as (daemon, victim, target):

        def seen() -> tuple[float, float]:
            minor, major = (daemon.sample(FAULTS, target=target, kind=kind) for kind in ("minor", "major"))
            return max(minor, 0.0), max(major, 0.0)  # none of a kind yet: no series

        settled(daemon, victim.pid, HELD_SECONDS)
        before, truth = seen(), fault_counts(victim.pid)
        page_out(victim.pid, tmp_path / f"{NAME}.gguf")
        generate(victim, 8)
        settled(daemon, victim.pid)
        if fault_counts(victim.pid)[1] == truth[1]:
            pytest.skip("this file system's pages cannot be dropped")

        def agrees() -> bool:
            now, after = seen(), fault_counts(victim.pid)
            return (now[0] - before[0], now[1] - before[1]) == (after[0] - truth[0], after[1] - truth[1])

        wait_for(agrees, f"the same faults: {seen()} less {before}, {fault_counts(victim.pid)} less {truth}")
        of_model = daemon.sample(FAULTS, target=target, kind="major", mapping="model")
        assert of_model == fault_counts(victim.pid)[1] - truth[1]
        assert daemon.sample("profinfer_model_resident_bytes", target=target) > 0
