# SPDX-License-Identifier: Apache-2.0
"""Targets without a process: their sums stay for 15 minutes, then they end as a whole.

The clock is the test's; values are those that the processes were said to have had.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import bcrypt
import pytest

from profinferd.agent.daemon.config import Config, Http
from profinferd.agent.daemon.manager import Manager, Published
from profinferd.agent.daemon.serving import MAX_GONE, Serving
from profinferd.exporters.httpd import Request
from profinferd.exporters.prometheus import Seen

from . import snapshots

QUARTER = 15 * 60.0
PROMPT = 6
"""Prompt tokens of ``snapshots.busy()``."""


class FakeManager:
    """Says what the test lets it say."""

    expire_seconds = Config().targets.expire_seconds
    on_ended: Callable[[Seen], None]

    def __init__(self) -> None:
        self.seen: tuple[Seen, ...] = ()

    def current(self) -> Published:
        return Published(0.0, self.seen, ())

    def health(self) -> dict[str, Any]:
        states = ("watched", "unprofiled", "excluded", "waiting")
        return {"foreign_events_total": 0, "announcements_lost": 0, **dict.fromkeys(states, 0)}

    def kernel_figures(self) -> tuple[dict[str, int], dict[str, int]]:
        return {}, {}

    def ends(self, seen: Seen) -> None:
        """A process ends: its last figures are told, then it is seen no more."""
        self.on_ended(seen)
        self.seen = tuple(one for one in self.seen if one.number != seen.number)


class Bench:
    """A server whose clock stands until it is told to go on."""

    def __init__(self) -> None:
        self.manager, self.now = FakeManager(), 1000.0
        self.serving = Serving(
            Http(listen="127.0.0.1:0"), cast(Manager, self.manager), print, lambda: self.now
        )

    def values(self, name: str = "profinfer_prompt_tokens") -> dict[str, float]:
        """By target."""
        return {
            sample.labels["target"]: sample.value
            for family in self.serving.families()
            if family.name == name
            for sample in family.samples
        }

    def series(self, target: str) -> int:
        return sum(
            1
            for family in self.serving.families()
            for sample in family.samples
            if sample.labels.get("target") == target
        )


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.serving.close()


def process(label: str, number: int) -> Seen:
    return Seen(snapshots.busy(), "ok", label, number)


def last(label: str, number: int) -> Seen:
    return Seen(snapshots.busy(), "ended", label, number)


def test_the_default_is_fifteen_minutes() -> None:
    assert Config().targets.expire_seconds == QUARTER


def test_a_gone_target_expires_as_a_whole(bench: Bench) -> None:
    """Nothing falls before; afterwards no family names it, and others are as they were."""
    bench.manager.seen = (process("gone", 1), process("stays", 2))
    assert bench.values() == {"gone": PROMPT, "stays": PROMPT}
    bench.manager.ends(last("gone", 1))
    for passed in (0.0, 1.0, QUARTER / 2, QUARTER):
        bench.now = 1000.0 + passed
        assert bench.values() == {"gone": PROMPT, "stays": PROMPT}, passed
        states = bench.values("profinfer_target_state")
        assert states["gone"] == 0 and states["stays"] == 1
    bench.now += 0.1
    assert bench.values() == {"stays": PROMPT}
    assert bench.series("gone") == 0 and bench.series("stays") > 20


def test_whoever_comes_back_in_time_goes_on(bench: Bench) -> None:
    """Sums go on from where they were, and the time begins anew when that process ends, too."""
    bench.manager.seen = (process("engine", 1),)
    bench.manager.ends(last("engine", 1))
    bench.now += QUARTER - 1
    bench.manager.seen = (process("engine", 2),)
    assert bench.values() == {"engine": 2 * PROMPT}
    bench.now += 10 * QUARTER  # it runs for long, and is asked for now and then
    assert bench.values() == {"engine": 2 * PROMPT}
    bench.manager.ends(last("engine", 2))
    assert bench.values() == {"engine": 2 * PROMPT}
    bench.now += QUARTER
    assert bench.values() == {"engine": 2 * PROMPT}
    bench.now += 0.1
    assert bench.values() == {}


def test_one_that_failed_says_why_and_counts_once(bench: Bench) -> None:
    """Its figures are its target's sums; the process is still there, with the reason of its failure."""
    bench.manager.seen = (process("engine", 1),)
    assert bench.values() == {"engine": PROMPT}
    bench.manager.on_ended(last("engine", 1))
    assert bench.values() == {"engine": PROMPT}, "what was published before"
    bench.manager.seen = (Seen(None, "internal", "engine", 1),)
    assert bench.values() == {"engine": PROMPT}
    (state,) = [f for f in bench.serving.families() if f.name == "profinfer_target_state"]
    assert [(s.labels["reason"], s.value) for s in state.samples] == [("internal", 0)]


def test_nobody_scrapes_while_it_comes_back(bench: Bench) -> None:
    """What decides is whether a process is there when it is asked, not who asked before."""
    bench.manager.seen = (process("engine", 1),)
    bench.manager.ends(last("engine", 1))
    bench.now += 2 * QUARTER
    bench.manager.seen = (process("engine", 2),)
    assert bench.values() == {"engine": 2 * PROMPT}


def test_after_it_expired_it_begins_at_zero(bench: Bench) -> None:
    bench.manager.seen = (process("engine", 1),)
    bench.values()
    bench.manager.ends(last("engine", 1))
    bench.now += QUARTER + 1
    assert bench.values() == {}
    bench.manager.seen = (process("engine", 2),)
    assert bench.values() == {"engine": PROMPT}


def test_its_places_are_free_again(bench: Bench) -> None:
    """More targets one after the other than may be told apart at once: none ends up in "other"."""
    for number in range(1, 400):
        label = f"engine{number}"
        bench.manager.seen = (process(label, number),)
        assert bench.values() == {label: PROMPT}
        bench.manager.ends(last(label, number))
        bench.now += QUARTER + 1
        assert bench.values() == {}


def test_of_very_many_the_oldest_goes_early(bench: Bench) -> None:
    """Bounded even when nothing has expired yet."""
    for number in range(1, MAX_GONE + 11):
        bench.manager.ends(last(f"engine{number}", number))
    assert len(bench.serving._gone) == MAX_GONE
    assert "engine10" not in bench.serving._gone and "engine11" in bench.serving._gone


def test_other_never_falls_while_its_processes_live(bench: Bench) -> None:
    """A place that becomes free is for who comes next: what is in "other" cannot be taken out of it."""
    bench.manager.seen = tuple(process(f"t{number}", number) for number in range(13))
    named = {f"t{number}": PROMPT for number in range(10)}
    assert bench.values() == {**named, "other": 3 * PROMPT}
    bench.manager.ends(last("t0", 0))
    bench.now += QUARTER + 1
    del named["t0"]
    assert bench.values() == {**named, "other": 3 * PROMPT}
    bench.manager.seen += (process("new", 20),)
    assert bench.values() == {**named, "new": PROMPT, "other": 3 * PROMPT}
    bench.manager.ends(last("t12", 12))
    bench.now += QUARTER + 1
    assert bench.values()["other"] == 3 * PROMPT


def test_a_target_that_is_called_other(bench: Bench) -> None:
    """Its end is not the end of what others gave to the series of that name."""
    bench.manager.seen = tuple(process(f"t{number}", number) for number in range(11))
    bench.manager.seen += (process("other", 50),)
    assert bench.values()["other"] == 2 * PROMPT
    bench.manager.ends(last("t10", 10))
    bench.manager.ends(last("other", 50))
    bench.now += QUARTER + 1
    assert bench.values()["other"] == 2 * PROMPT


def test_who_cannot_be_profiled_takes_no_name_from_who_is(bench: Bench) -> None:
    bench.manager.seen = tuple(Seen(None, "no_symbols", f"bare{number}", number) for number in range(12))
    bench.manager.seen += (process("engine", 50),)
    assert bench.values() == {"engine": PROMPT}


def test_health_is_told_without_a_password(tmp_path: Path) -> None:
    """Whoever restarts the service when it does not answer has none; all else asks for it."""
    web = tmp_path / "web.yaml"
    hashed = bcrypt.hashpw(b"secret", bcrypt.gensalt(4)).decode()
    web.write_text(f"basic_auth_users: {{alice: '{hashed}'}}")
    http = Http(listen="127.0.0.1:0", web_config=str(web))
    serving = Serving(http, cast(Manager, FakeManager()), print)
    try:
        for path, status in (
            ("/healthz", 200), ("/readyz", 401), ("/metrics", 401), ("/", 401), ("/api/live", 401),
        ):  # fmt: skip
            assert serving._route(Request("GET", path, {})).status == status, path
        assert serving._route(Request("POST", "/healthz", {})).status == 405
    finally:
        serving.close()
