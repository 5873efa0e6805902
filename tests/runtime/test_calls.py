# SPDX-License-Identifier: Apache-2.0
"""Engines that are described by data alone: the worked example of docs/adding-an-engine.md, run.

The independent truth is what the victim was told to do and its own clock.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pytest

from profinferd.agent import callprice
from profinferd.agent.attach import Attachment
from profinferd.agent.callbook import CallBook
from profinferd.agent.callprice import ASSUMED, price_of_call
from profinferd.agent.callwatch import CallWatch
from profinferd.agent.errors import TargetError
from profinferd.agent.kernel.callprograms import CallPrograms
from profinferd.agent.target.inspect import inspect_target
from tests.runtime.callvictims import ROOT, Told, only, profinferd, watch
from tests.runtime.cases import DEADLINE, ahead
from tests.victims.build import build

PAGE = ROOT / "docs" / "adding-an-engine.md"
METHODS = ("auto", "multi", "perf")


@pytest.fixture(scope="module")
def description(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The YAML of the page, in a folder of its own."""
    text = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(text) == 1
    folder = tmp_path_factory.mktemp("engines")
    (folder / "my_npu.yaml").write_text(text[0])
    return folder


@pytest.fixture(scope="module")
def program() -> Path:
    library = build("my_npu.c", shared=True)
    flags = ("-DPROGRAM", f"-L{library.parent}", "-lmy_npu", f"-Wl,-rpath,{library.parent}")
    return build("my_npu.c", cflags=flags, name="npu_program")


@pytest.mark.parametrize("method", METHODS)
def test_the_worked_example(
    description: Path, program: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROFINFERD_ENGINES", str(description))
    with Told([program]) as victim, watch(victim.pid, method=method) as watched:
        ahead(victim.pid)
        taken = sum(float(victim.tell(str(n))) for n in (5, 20))
        watched.poll(0)
        seen = watched.snapshot()
    assert seen.target.engine == "my_npu"
    first = only(seen, "matmul", tensor="blk.0.ffn", dtype="f16")
    assert (first.count, first.sums["bytes"], first.untimed) == (25, 25 * 4096, 0)
    # Handed over at once, and done when the wait is over: by the victim's own clock.
    assert first.completed == 25 and first.completion_seconds is not None and first.seconds is not None
    assert first.completion_seconds == pytest.approx(taken, rel=0.05, abs=0.05)
    assert first.seconds < first.completion_seconds / 4
    second = only(seen, "matmul", tensor="blk.1.ffn", dtype="f32")
    assert (second.count, second.sums["bytes"], second.completed) == (25, 25 * 256, 0)
    assert only(seen, "matmul", tensor="bad", status=-5).count == 2
    assert only(seen, "wait").count == 25
    assert (only(seen, "upload").count, only(seen, "upload").sums["bytes"]) == (2, 2 * 4096)
    assert seen.lost.total == 0


def test_the_command_line_shows_it(description: Path, program: Path) -> None:
    env = {"PROFINFERD_ENGINES": str(description)}
    with Told([program]) as victim:
        watcher = subprocess.Popen(
            [sys.executable, "-m", "profinferd.agent", "attach", "-p", str(victim.pid), "--ops", "off",
             "--budget", "100%"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ, **env},
        )  # fmt: skip
        assert watcher.stderr is not None
        for line in watcher.stderr:
            if "attached to process" in line:
                break
        victim.tell("10")
        victim.__exit__(None, None, None)
        out, err = watcher.communicate(timeout=DEADLINE)
    assert watcher.returncode == 0, err
    assert re.search(r"matmul .*blk\.0\.ffn", out), (out, err)
    assert "my_npu" in out


def test_calls_alone_are_something_seen(
    description: Path, program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever polls knows it: what ends early is shown, and not taken for nothing."""
    monkeypatch.setenv("PROFINFERD_ENGINES", str(description))
    with Told([program]) as victim, watch(victim.pid) as watched:
        watched.poll(0)
        assert not watched.seen_anything
        victim.tell("1")
        watched.poll(0)
        assert watched.seen_anything


def test_an_idle_one_is_said_to_be_idle(description: Path, program: Path) -> None:
    with Told([program]) as victim:
        answer = profinferd(
            "attach", "-p", str(victim.pid), "--ops", "off", "-d", "0.5",
            env={"PROFINFERD_ENGINES": str(description)},
        )  # fmt: skip
    assert answer["engine_calls"] == [] and answer["programs"] == []
    assert any("idle" in note for note in answer["notes"])


def test_without_the_description_it_is_no_engine(program: Path) -> None:
    with Told([program]) as victim, pytest.raises(TargetError, match="no inference engine"):
        watch(victim.pid)


FAST = """
schema: 1
engine: fast
label: fast
marks: [once_a_line]
calls:
  - {symbol: second, call: often, kind: compute}
  - {symbol: once_a_line, call: seldom, kind: other}
"""
FLOOD, RARE = "p 20000 10000", "p 20 4000000"
"""Calls with some microseconds between them, 100,000 a second and more; and with a millisecond."""


@pytest.fixture
def fast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Told]:
    """A process that calls one function as often as it is told, and another once each time."""
    (tmp_path / "fast.yaml").write_text(FAST)
    monkeypatch.setenv("PROFINFERD_ENGINES", str(tmp_path))
    with Told([build("calls.c")]) as victim:
        yield victim


def shed(watched: Attachment) -> set[str | None]:
    return {one.call for one in watched.snapshot().engine_calls_shed}


def flooding(victim: Told, watched: Attachment, enough: Callable[[], bool]) -> int:
    """Have it call without a pause, and poll meanwhile as everybody does, until it is ``enough``.
    Returns how often it was told to."""
    lines, stop = 0, threading.Event()

    def work() -> None:
        nonlocal lines
        while lines < 600 and not stop.is_set():
            victim.tell(FLOOD)
            lines += 1

    worker = threading.Thread(target=work)
    worker.start()
    try:
        while worker.is_alive() and not enough():
            watched.poll(0.05)
    finally:
        stop.set()
        worker.join()
    return lines


@pytest.mark.parametrize("method", METHODS)
def test_a_fast_caller_costs_no_more_than_the_budget(fast: Told, method: str) -> None:
    """C18. The truth is what the victim was told to do: what is over the budget is not looked at from the
    first moment on, is named, and is in no figure; the other call is counted as ever."""
    with watch(fast.pid, budget=0.001, method=method) as watched:
        fast.tell(FLOOD)  # nobody polls meanwhile: the kernel alone keeps the limit
        alone = only(watched.snapshot(), "often")
    assert 0 < alone.count < 10_000, "0.75 ms of budget were spent, and 20,000 calls cost more anywhere"
    assert only(watched.snapshot(), "seldom").count == 1
    with watch(fast.pid, budget=0.05, method=method) as watched:

        def kept() -> bool:
            seen = watched.snapshot()
            return bool(seen.engine_calls_shed) and (seen.overhead.estimated_ratio or 1.0) <= 0.05

        lines = flooding(fast, watched, kept)
        assert kept(), watched.snapshot().overhead
        seen = watched.snapshot()
    often, seldom = only(seen, "often"), only(seen, "seldom")
    assert (seldom.count, seldom.unwatched_seconds) == (lines, 0)
    assert 0 < often.count < lines * 20_000 and often.unwatched_seconds > 0
    (why,) = seen.engine_calls_shed
    assert (why.engine, why.call) == ("fast", "often")
    assert why.calls_per_second > 1000 and why.cost_ratio > 0.025
    assert any("often: watched in short trials only" in note for note in seen.notes)
    assert seen.lost.total == 0


def test_a_call_comes_back_when_it_is_rare_again(fast: Told) -> None:
    """With hysteresis: the next trial tells. From then on every call is counted."""
    with watch(fast.pid, budget=0.05) as watched:
        flooding(fast, watched, lambda: shed(watched) == {"often"})
        assert shed(watched) == {"often"}
        before = gap_of(watched)
        for _ in range(2000):
            fast.tell(RARE)
            watched.poll(0.01)
            if not shed(watched) and before == (before := gap_of(watched)):
                break
        else:
            pytest.fail("it never came back")
        first = only(watched.snapshot(), "often")
        fast.tell("50")
        fast.tell("7")
        last = only(watched.snapshot(), "often")
        assert last.count - first.count == 57
        assert last.unwatched_seconds == first.unwatched_seconds > 0
        assert any(note.startswith("not watched for some time") for note in watched.snapshot().notes)


def gap_of(watched: Attachment) -> float:
    """How long it was not watched so far."""
    return only(watched.snapshot(), "often").unwatched_seconds


def test_two_processes_share_the_programs(
    description: Path, program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One set of programs in the kernel: figures are by process, and one that goes leaves the other."""
    monkeypatch.setenv("PROFINFERD_ENGINES", str(description))
    with CallPrograms.load() as loaded, Told([program]) as one, Told([program]) as two:
        book = CallBook(loaded)
        infos = [inspect_target(victim.pid) for victim in (one, two)]
        first, second = (CallWatch.open(info, book=lambda: book) for info in infos)
        one.tell("3")
        two.tell("8")
        counts = [{c.call: c.count for c in w.figures().calls if not c.status} for w in (first, second)]
        assert [c["wait"] for c in counts] == [3, 8]
        first.close()
        one.tell("5")
        two.tell("2")
        assert {c.call: c.count for c in second.figures().calls if not c.status}["wait"] == 10
        assert {c.call: c.count for c in first.figures().calls if not c.status}["wait"] == 3
        second.close()
        for info in infos:
            info.close()


def test_an_instruction_that_is_stepped_over_costs_more() -> None:
    """Where nothing else can be probed: many times the price of one that the kernel emulates."""
    with CallPrograms.load() as loaded:
        (plain, _), (stepped, _) = price_of_call(loaded), price_of_call(loaded, stepped=True)
        assert plain != ASSUMED.watched and stepped != ASSUMED.stepped, "it could not be measured"
        assert stepped > 1.2 * plain
        assert loaded.sums(os.getpid()) == []


def test_noise_does_not_make_what_is_watched_the_cheaper_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callprice, "_measured", lambda programs, stepped: (500.0, 700.0))
    price, over = price_of_call(cast(CallPrograms, None))
    assert price == over > 0


@pytest.mark.parametrize("method", ["auto", "multi"])
def test_the_price_of_a_call_is_measured(method: str) -> None:
    """Between what a bare probe costs anywhere and what a single-stepped one does, and less for one that
    is over the limit; nothing stays."""
    with CallPrograms.load(method) as loaded:
        price, over = price_of_call(loaded)
        assert 300 < over <= price < 100_000 and price != ASSUMED.watched
        assert loaded.sums(os.getpid()) == []


def test_what_the_kernel_has_added_is_not_written_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """A family whose probes are there already is left alone: calls come between reading and writing."""
    import struct

    from profinferd.agent.kernel.callprograms import CallPrograms

    programs = CallPrograms.load("auto")
    try:
        programs.watch_family(7, 1, watched=True)
        families, key = programs._object.map("families"), struct.pack("=II", 7, 1)
        before = programs._family(7, 1)
        fresh = before.copy()
        fresh["hits"] = 5
        families.update(key, fresh.tobytes())
        monkeypatch.setattr(programs, "_family", lambda tgid, number: before.copy())
        programs.watch_family(7, 1, watched=True)
        monkeypatch.undo()
        assert programs.family(7, 1).hits == 5
        programs.watch_family(7, 1, watched=False)
        closed = int(programs._family(7, 1)["closed_at"][0])
        assert closed > 0
        programs.watch_family(7, 1, watched=False)
        assert int(programs._family(7, 1)["closed_at"][0]) == closed
        programs.watch_family(7, 1, watched=True)
        known = programs.family(7, 1)
        assert known.hits == 5 and known.unwatched_ns > 0
    finally:
        programs.close()
