# SPDX-License-Identifier: Apache-2.0
"""PJRT plugins of several ages: tables and argument structures of other sizes, completion later.

Truth is what the plugin does by construction and the client's own clock. Cases C02, C47, C48.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from profinferd.agent.errors import UsageError
from profinferd.agent.model.calldata import ProgramTotal
from profinferd.agent.model.snapshot import Snapshot
from profinferd.agent.recording.reader import Recording
from tests.runtime.callvictims import Told, only, recorded, watch
from tests.runtime.cases import DEADLINE, ahead
from tests.tries import in_one_of, timed
from tests.victims.build import build

OLD, NEW, FUTURE = 100, 140, 180
MORE = 5
ATTEMPTS = 3
"""Of what only times tell, where others may take the core meanwhile."""


def plugin(functions: int) -> Path:
    flags = (f"-DFUNCTIONS={functions}", f"-DMINOR={functions}")
    return build("fake_pjrt.c", cflags=flags, shared=True, strip=True, name=f"plugin{functions}.so")


def client() -> Path:
    return build("fake_pjrt.c", cflags=("-DCLIENT", "-ldl"), name="pjrt_client")


def program(snapshot: Snapshot, name: str) -> ProgramTotal:
    (found,) = [p for p in snapshot.programs if p.name == name]
    return found


@pytest.mark.parametrize("functions", [OLD, NEW, FUTURE])
@pytest.mark.parametrize("method", ["auto", "perf"])
def test_tables_of_any_size(functions: int, method: str) -> None:
    with Told([client()]) as victim:
        victim.tell(f"load {plugin(functions)}")
        with watch(victim.pid, method=method) as watched:
            ahead(victim.pid)
            waited = float(victim.tell("run 5"))
            polled = float(victim.tell("poll 3"))
            victim.tell("broken 0")
            seen = watched.snapshot()
    assert any(f"version 0.{functions}, {functions} functions" in note for note in seen.notes)
    one = program(seen, "waits")
    assert (one.compiles, one.executions, one.completions, one.errors) == (1, 5, 5, 0)
    assert one.compile_seconds is not None and one.compile_seconds >= 0.003
    # Handed over at once, done after the 40 ms that the plugin's thread takes.
    assert one.dispatch_seconds is not None and one.completion_seconds is not None
    assert one.dispatch_seconds < one.completion_seconds / 4
    assert 5 * 0.040 <= one.completion_seconds <= waited
    assert one.completion_seconds == pytest.approx(waited, rel=0.05, abs=0.05)
    # Without a wait: when the client saw that it was ready.
    other = program(seen, "polls")
    assert other.completions == 3 and other.completion_seconds == pytest.approx(polled, rel=0.05, abs=0.05)
    assert sum(p.errors for p in seen.programs) == 1
    assert seen.lost.total == 0


def test_a_client_that_knows_fewer_fields() -> None:
    """Its structure ends before the events: nothing behind it is read, and no completion is claimed."""
    with Told([client()]) as victim:
        victim.tell(f"load {plugin(NEW)}")
        with watch(victim.pid) as watched:
            victim.tell("small 4")
            seen = watched.snapshot()
    one = program(seen, "knows_less")
    assert (one.executions, one.completions, one.completion_seconds) == (4, 0, None)
    assert one.dispatch_seconds is not None and one.dispatch_seconds > 0


def test_a_plugin_whose_functions_nobody_has_asked_for() -> None:
    """Its table is made when it is asked for: that call is watched, and its functions from then on."""
    with Told([client()]) as victim:
        victim.tell(f"open {plugin(NEW)}")
        with watch(victim.pid) as watched:
            assert any("no table of its functions is in memory yet" in n for n in watched.snapshot().notes)
            assert watched.snapshot().engine_calls == ()
            victim.tell(f"load {plugin(NEW)}")
            until = time.monotonic() + DEADLINE
            while not any(f"{NEW} functions" in note for note in watched.snapshot().notes):
                watched.poll(0.01)
                assert time.monotonic() < until, "the table was never looked for again"
            victim.tell("run 1")
            seen = watched.snapshot()
    assert program(seen, "waits").executions == 1
    assert only(seen, "get_api").count == 1
    assert not any("no table" in note for note in seen.notes)


def test_a_program_that_is_recorded_from_its_start(tmp_path: Path) -> None:
    """It is stopped when its plugin was mapped, until what is there is probed."""
    path = tmp_path / "started.pfi"
    runs = 0

    def talk(tell: Callable[[str], str]) -> None:
        """Until some of it is in the file, and a little more."""
        nonlocal runs
        tell(f"load {plugin(NEW)}")
        until = time.monotonic() + DEADLINE
        while not executions(path):
            tell("run 1")
            runs += 1
            assert time.monotonic() < until, f"nothing of {runs} runs was recorded"
        for _ in range(MORE):
            tell("run 1")

    seen = recorded(client(), path, talk)
    # Whether it had asked for the functions already when it was stopped is a matter of microseconds:
    # then nothing is missing, else what it did until they were probed.
    assert 1 + MORE <= program(seen, "waits").executions <= runs + MORE


def executions(path: Path) -> int:
    """Of all programs that are in a recording so far."""
    try:
        with Recording.open(str(path)) as recording:
            return sum(one.executions for one in recording.trace.snapshot.programs)
    except UsageError:  # nothing was flushed yet
        return 0


def test_a_plugin_that_is_loaded_later() -> None:
    """C02: a second plugin comes while the process is watched for the first one."""
    with Told([client()]) as victim:
        victim.tell(f"load {plugin(OLD)}")
        with watch(victim.pid) as watched:
            victim.tell("run 1")
            victim.tell(f"load {plugin(NEW)}")
            for _ in range(100):
                watched.poll(0.1)
                if any(f"{NEW} functions" in note for note in watched.snapshot().notes):
                    break
            else:
                pytest.fail("the second plugin was never seen")
            victim.tell("run 2")
            seen = watched.snapshot()
    one = program(seen, "waits")
    assert (one.compiles, one.executions, one.completions) == (2, 3, 3)


def test_a_run_on_several_devices_is_done_when_the_last_one_is() -> None:
    """Three devices that take 40, 80 and 120 ms: their events are awaited one after the other."""
    with Told([client()]) as victim:
        victim.tell(f"load {plugin(NEW)}")
        with watch(victim.pid) as watched:
            ahead(victim.pid)
            waited = float(victim.tell("devices 3"))
            seen = watched.snapshot()
    one = program(seen, "spread")
    assert (one.executions, one.completions) == (3, 3)
    assert one.completion_seconds is not None and 3 * 0.120 <= one.completion_seconds <= waited
    assert one.completion_seconds == pytest.approx(waited, rel=0.05, abs=0.05)


def test_completion_that_the_process_is_told_of_by_a_callback() -> None:
    """C48: the callback has no name; it is probed where it lies, from about a second later on."""
    with Told([client()]) as victim:
        victim.tell(f"load {plugin(NEW)}")
        with watch(victim.pid) as watched:
            for _ in range(100):
                watched.poll(0.1)
                victim.tell("callback 1")
                if any(c.call == "ready_callback" for c in watched.snapshot().engine_calls):
                    break
            else:
                pytest.fail("the callback was never probed")
            ahead(victim.pid)
            before = program(watched.snapshot(), "calls_back")
            waited = float(victim.tell("callback 4"))
            after = program(watched.snapshot(), "calls_back")
    assert after.executions - before.executions == 4
    assert after.completions is not None and before.completions is not None
    assert after.completions - before.completions == 4
    taken = (after.completion_seconds or 0.0) - (before.completion_seconds or 0.0)
    assert 4 * 0.040 <= taken <= waited and taken == pytest.approx(waited, rel=0.05, abs=0.05)


def test_the_first_run_is_told_from_the_others() -> None:
    """The plugin takes 15 ms more for a program's first run, before it returns."""
    in_one_of(ATTEMPTS, first_run)


def first_run() -> None:
    with Told([client()]) as victim:
        victim.tell(f"load {plugin(NEW)}")
        with watch(victim.pid) as watched:
            victim.tell("run 5")
            seen = watched.snapshot()
    one = program(seen, "waits")
    assert (one.executions, one.completions, one.cold) == (5, 5, 1)
    assert one.cold_dispatch_seconds is not None and one.cold_dispatch_seconds >= 0.015
    assert one.dispatch_seconds is not None
    warm = one.dispatch_seconds - one.cold_dispatch_seconds
    timed(warm < 0.015, warm)
    assert one.cold_completion_seconds is not None and one.cold_completion_seconds >= 0.055
    runs = {c.labels["run"]: c.count for c in seen.engine_calls if c.call == "execute"}
    assert runs == {"cold": 1, "warm": 4}
    assert one.phase_guess is None


def test_two_programs_that_alternate_look_like_serving() -> None:
    """A guess, and said to be one: a long run, then five short ones, again and again."""
    in_one_of(ATTEMPTS, alternating)


def alternating() -> None:
    with Told([client()]) as victim:
        victim.tell(f"load {plugin(NEW)}")
        with watch(victim.pid) as watched:
            victim.tell("serve 4")
            seen = watched.snapshot()
    assert {p.name: p.executions for p in seen.programs} == {"slow": 4, "quick": 20}
    guesses = {p.name: p.phase_guess for p in seen.programs}
    timed(guesses == {"slow": "prefill", "quick": "decode"}, seen.programs)
    assert any("a guess" in note for note in seen.notes)


@pytest.mark.parametrize("asked", [0, 1])
def test_copies_between_devices(asked: int) -> None:
    """1000 bytes to a second device and on to a third; 777 more, which only who asks is told."""
    with Told([client()]) as victim:
        victim.tell(f"load {plugin(NEW)}")
        with watch(victim.pid) as watched:
            victim.tell(f"copies {asked}")
            seen = watched.snapshot()
    copies = [c for c in seen.engine_calls if c.call == "copy_to_device"]
    assert sum(c.count for c in copies) == 3
    found = sorted((c.count, c.sums.get("bytes")) for c in copies if c.sums)
    assert found == ([(1, 1000), (2, 1777)] if asked else [(1, 1000), (1, 1000)])
    # A size that nobody said is absent, and those calls are not among the others.
    assert [c.count for c in copies if not c.sums] == ([] if asked else [1])
    assert len({c.labels["device"] for c in copies}) == 2
    stats = sorted(
        (c.sums for c in seen.engine_calls if c.call == "memory_stats"), key=lambda sums: len(sums)
    )
    # The limit is not known to the plugin; the second client knows of the first field alone.
    assert stats == [{"bytes_in_use": 1000}, {"bytes_in_use": 1000, "peak_bytes": 3000}]
