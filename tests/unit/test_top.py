# SPDX-License-Identifier: Apache-2.0
"""``profinferd top``: what it makes of the socket's answer, what it draws, its keys, and its sources."""

from __future__ import annotations

import asyncio
import copy
import math
import re
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from textual.pilot import Pilot

from profinferd.agent.errors import MachineError, TargetError
from profinferd.agent.model.snapshot import Snapshot
from profinferd.agent.top.app import TopApp
from profinferd.agent.top.rows import MAX_TARGETS, rows
from profinferd.agent.top.sources import OwnSource
from tests.unit import snapshots

LIMIT = 60.0
VERDICT = {
    "rule": "memory_bound",
    "confidence": "high",
    "seconds_per_token": 0.004,
    "evidence": ["decode reaches 9.8 of 11.2 GB/s"],
    "try": "a smaller quantisation",
}


def answer() -> dict[str, Any]:
    """Three processes as the control socket gives them: at work, idle, and not to be profiled."""
    report = snapshots.sampled().to_json_dict()
    report["verdicts"] = [VERDICT]
    watched = {"start_time": 5, "state": "watched", "reason": ""}
    return {
        "schema": 1,
        "targets": [
            {**watched, "target": "a.service", "pid": 1234, "tokens_per_second": 33.5, "report": report},
            {**watched, "target": "idle", "pid": 99, "tokens_per_second": None,
             "report": snapshots.idle().to_json_dict()},
            {"target": "old", "pid": 77, "start_time": 7, "state": "unprofiled", "reason": "no symbols",
             "tokens_per_second": None, "report": None},
        ],
    }  # fmt: skip


class Fixed:
    """A source that gives what it was given, or fails with it."""

    label = "daemon"

    def __init__(self, *answers: dict[str, Any] | Exception) -> None:
        self.answers = list(answers)
        self.asked = 0

    def fetch(self) -> dict[str, Any]:
        one = self.answers[min(self.asked, len(self.answers) - 1)]
        self.asked += 1
        if isinstance(one, Exception):
            raise one
        return copy.deepcopy(one)

    def close(self) -> None: ...


def text_of(app: TopApp) -> str:
    """The screen's text, line by line, out of Textual's own SVG."""
    svg = app.export_screenshot()
    lines: dict[float, list[tuple[float, str]]] = {}
    for attributes, content in re.findall(r"<text ([^>]*)>([^<]*)</text>", svg):
        x, y = (re.search(rf'\b{name}="([0-9.]+)"', attributes) for name in "xy")
        if x and y and "terminal-" in attributes and "clip-path" in attributes:
            plain = content.replace("&#160;", " ").replace("&amp;", "&")
            lines.setdefault(float(y[1]), []).append((float(x[1]), plain))
    return "\n".join("".join(part for _, part in sorted(parts)) for _, parts in sorted(lines.items()))


def drive(
    source: Fixed, steps: Callable[[TopApp, Pilot[None]], Awaitable[None]], size: tuple[int, int] = (120, 36)
) -> None:
    """Run the program without a terminal, wait for its first figures, then take the steps."""

    async def run() -> None:
        app = TopApp(source, every=0.05)
        async with app.run_test(size=size) as pilot:
            # The head says how many there are once they have been drawn.
            await until(pilot, lambda: source.asked >= 2 and " watched of " in text_of(app))
            await pilot.pause()
            await steps(app, pilot)

    asyncio.run(run())


async def shown(app: TopApp, pilot: Pilot[None], pattern: str) -> None:
    """Waits for a text that has it: tables are emptied and filled again for all new figures."""
    await until(pilot, lambda: re.search(pattern, text_of(app)) is not None)


async def until(pilot: Pilot[None], true: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT
    while not true():
        assert time.monotonic() < end, text_of(pilot.app)  # type: ignore[arg-type]
        await pilot.pause(0.02)


# ---- what is shown --------------------------------------------------------------------


def test_rows_are_the_figures_of_the_reports() -> None:
    first, idle, old = rows(answer())
    snapshot = snapshots.sampled()
    assert (first.name, first.pid, first.tokens_per_second) == ("a.service", 1234, 33.5)
    assert first.generated == snapshot.tokens.output_rows
    assert first.inter_token == snapshot.latency_seconds.inter_token.mean
    assert first.overhead == snapshot.overhead.estimated_ratio
    decode = [op for op in snapshot.ops if op.phase == "decode"]
    best = max(decode, key=lambda op: op.seconds)
    assert first.top_op is not None
    assert (first.top_op.op, first.top_op.role) == (best.op, best.role)
    assert math.fsum(op.share or 0 for op in dict(first.phases)["decode"]) == pytest.approx(1)
    assert best.bytes is not None
    assert first.top_op.gb_per_second == pytest.approx(best.bytes / best.seconds / 1e9)
    assert idle.top_op is None
    assert idle.tokens_per_second is None, "absent is not zero"
    assert (old.state, old.reason, old.generated) == ("unprofiled", "no symbols", None)


def test_a_verdict_is_a_line() -> None:
    (line,) = rows(answer())[0].verdicts
    assert line == (
        "memory bound, up to 4.00 ms a token (high confidence): decode reaches 9.8 of 11.2 GB/s"
        " Try: a smaller quantisation"
    )


@pytest.mark.parametrize(
    "hostile",
    [
        {},
        {"targets": None},
        {"targets": [None, 5, "x", []]},
        {"targets": [{}]},
        {"targets": [{"report": {"ops": [None, {"seconds": "x"}, {"seconds": float("nan")}], "tokens": 5}}]},
        {"targets": [{"pid": 1 << 80, "target": "\x1b[31m" * 500, "report": {"notes": ["\x07"] * 1000}}]},
        {"targets": [{"report": {"verdicts": [7, {"rule": 5}, {"rule": "x", "evidence": "y"}]}}]},
        {"targets": [{"pid": n, "report": None} for n in range(10_000)]},
    ],
)
def test_answers_of_another_program(hostile: dict[str, Any]) -> None:
    found = rows(hostile)
    assert len(found) <= MAX_TARGETS
    for row in found:
        assert "\x1b" not in row.name
        assert len(row.notes) <= 20


@pytest.mark.parametrize("size", [(120, 36), (80, 24)])
def test_the_screen(size: tuple[int, int]) -> None:
    wanted = (
        r"2 watched of 3, 33\.5 tokens/s", r"(?m)a\.service  1234 .*33\.5 .*MUL_MAT .*%.* watched",
        "unprofiled: no sy", "decode operators of a.service", "memory bound, up to",
    )  # fmt: skip

    async def steps(app: TopApp, pilot: Pilot[None]) -> None:
        for one in wanted:
            await shown(app, pilot, one)
        for key in ("q quit", "p phase", "s sort", "space pause", "n notes"):
            await until(pilot, lambda key=key: key in " ".join(text_of(app).split()))  # type: ignore[misc]
        assert max(len(one) for one in text_of(app).splitlines()) <= size[0] + 1

    drive(Fixed(answer()), steps, size)


def test_hostile_names_do_not_reach_the_terminal() -> None:
    hostile = answer()
    hostile["targets"][0]["target"] = "[bold red]x[/] \x1b]0;owned\x07"

    async def steps(app: TopApp, pilot: Pilot[None]) -> None:
        await shown(app, pilot, re.escape("[bold red]x[/]"))  # no markup of others is interpreted
        assert "\x1b" not in text_of(app)

    drive(Fixed(hostile), steps)


def test_no_engine() -> None:
    async def steps(app: TopApp, pilot: Pilot[None]) -> None:
        await shown(app, pilot, "no engine runs on this machine")

    drive(Fixed({"targets": []}), steps)


# ---- keys -----------------------------------------------------------------------------


def test_keys_choose_phase_notes_and_pause() -> None:
    source = Fixed(answer())

    async def steps(app: TopApp, pilot: Pilot[None]) -> None:
        phases = [name for name, _ in rows(answer())[0].phases]
        assert len(phases) > 1
        await pilot.press("p")
        await until(pilot, lambda: f"{phases[1]} operators of a.service" in text_of(app))
        await pilot.press("down")
        await until(pilot, lambda: "no operators of idle" in text_of(app))
        asked = source.asked
        await until(pilot, lambda: source.asked >= asked + 3)
        assert "no operators of idle" in text_of(app), "new figures do not change what was chosen"
        await pilot.press("up", "n")
        note = snapshots.sampled().notes[0][:20]
        await until(pilot, lambda: note in text_of(app))
        await pilot.press("space")
        await until(pilot, lambda: "paused" in text_of(app))
        end = time.monotonic() + LIMIT
        asked = -1
        while source.asked != asked:  # one question may have been under way
            assert time.monotonic() < end, "a paused program asks nobody"
            asked = source.asked
            await pilot.pause(0.5)

    drive(source, steps)


def test_the_order_can_be_changed() -> None:
    async def steps(app: TopApp, pilot: Pilot[None]) -> None:
        for order in ("by name", "by cost", "by speed"):
            await pilot.press("s")
            await until(pilot, lambda order=order: order in text_of(app))  # type: ignore[misc]

    drive(Fixed(answer()), steps)


def test_a_daemon_that_goes_away_leaves_old_figures_marked() -> None:
    async def steps(app: TopApp, pilot: Pilot[None]) -> None:
        await shown(app, pilot, "old: no daemon listens")
        await shown(app, pilot, r"(?m)a\.service  1234 .*33\.5")

    drive(Fixed(answer(), MachineError("no daemon listens there")), steps)


def test_it_comes_back() -> None:
    source = Fixed(answer(), MachineError("gone"), answer())

    async def steps(app: TopApp, pilot: Pilot[None]) -> None:
        await until(pilot, lambda: source.asked > 3 and "old:" not in text_of(app))

    drive(source, steps)


# ---- a process of its own -------------------------------------------------------------


class Watched:
    """An attachment that sees what it is told."""

    def __init__(self, error: Exception | None = None) -> None:
        self.closed = False
        self.error = error
        self.ended = threading.Event()

    def poll(self, timeout_s: float) -> None:
        time.sleep(0.01)
        if self.error is not None:
            raise self.error

    def alive(self) -> bool:
        return not self.ended.is_set()

    def snapshot(self) -> Snapshot:
        return snapshots.sampled()

    def close(self) -> None:
        self.closed = True


def state_of(source: OwnSource, wanted: str) -> dict[str, Any]:
    end = time.monotonic() + LIMIT
    while (target := source.fetch()["targets"][0])["state"] != wanted or (
        wanted == "watched" and target["report"] is None
    ):
        assert time.monotonic() < end, target
        time.sleep(0.01)
    found: dict[str, Any] = target
    return found


def test_attaching_by_itself_gives_the_same_kind_of_answer() -> None:
    watched = Watched()
    source = OwnSource(5, lambda: watched)
    target = state_of(source, "watched")
    (row,) = rows({"targets": [target]})
    assert row.pid == 5
    assert row.generated == snapshots.sampled().tokens.output_rows
    watched.ended.set()
    assert state_of(source, "ended")["reason"] == "the process ended"
    source.close()
    assert watched.closed


def test_a_target_whose_layout_does_not_fit_is_said() -> None:
    source = OwnSource(5, lambda: Watched(TargetError("no layout fits", "another build")))
    assert "no layout fits" in state_of(source, "unprofiled")["reason"]
    source.close()


@pytest.mark.parametrize("arguments", [["--pid", "0"], ["--every", "0"], ["--every", "x"], []])
def test_usage(arguments: list[str]) -> None:
    """Without a terminal there is nothing to draw on: one line, exit 2."""
    code = "import sys; from profinferd.agent.cli import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", code, "top", *arguments], capture_output=True, text=True)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
