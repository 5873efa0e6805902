# SPDX-License-Identifier: Apache-2.0
"""Waits and page faults in the daemon, against what the system says about the same processes."""

from __future__ import annotations

import contextlib
import os
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from profinferd.agent.attach import Attachment
from profinferd.agent.daemon.shared import SharedPrograms

from .callvictims import Told
from .cases import Engine, ahead, copied, engine, wait_for
from .daemons import DEADLINE, Daemon
from .test_backends import program as backends
from .test_daemon import PREFILL, decode
from .waits import one_cpu

NAME = f"pfi-causes-{os.getpid()}"
WAIT, FAULTS = "profinfer_sched_wait_seconds_total", "profinfer_page_faults_total"
READY = ("preempted", "yielded", "throttled", "wakeup")
MAPS = ("sched_threads", "fault_counts")
HELD_SECONDS = 6.0
"""For five seconds a fault is held back of whose page nothing can be told yet."""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copied(engine(), tmp_path_factory.mktemp("programs"), f"{NAME}-a")


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    # Nothing is shed: what the budget thinks of so busy a machine is no matter here.
    profile = {"ops": "off", "budget": "90%"}
    with Daemon(tmp_path_factory.mktemp("daemon"), f"{NAME}*", profile=profile) as made:
        made.scanned()
        yield made


@contextlib.contextmanager
def known(daemon: Daemon, program: Path, under: tuple[str, ...] = ()) -> Iterator[Engine]:
    """A stub whose graph was read, and which sleeps."""
    with Engine([*under, str(program)]) as stub:
        daemon.wait_for(stub.pid)
        stub.order(PREFILL)
        decode(stub, 4, 2)
        daemon.wait_for_tokens(stub.pid, 4, 2)
        yield stub


@contextlib.contextmanager
def busy(cpu: int) -> Iterator[int]:
    """A process that computes on one core, with a weight by which it gets there before others."""
    command = ["nice", "-n", "-15", "taskset", "-c", str(cpu), sys.executable, "-c", "while True: pass"]
    process = subprocess.Popen(command)
    try:
        wait_for(lambda: _ticks(process.pid) >= 5, "the busy process to run")
        yield process.pid
    finally:
        process.kill()
        process.wait()


def _ticks(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11])


def ready_truth(pid: int) -> float:
    """Seconds that all its threads were ready and had no core, by the scheduler's own account."""
    return sum(int(p.read_text().split()[1]) for p in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


def faults_truth(pid: int) -> tuple[int, int]:
    """(minor, major) by the memory management's own account."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[7]), int(fields[9])


def threads(daemon: Daemon, pid: int) -> dict[str, Any] | None:
    found = daemon.target(pid)
    assert found is not None and found["report"] is not None
    answer: dict[str, Any] | None = found["report"]["threads"]
    return answer


def waited(daemon: Daemon, target: str) -> dict[str, float]:
    """Seconds by cause."""
    found = {}
    for key, value in daemon.samples().items():
        if key.startswith(f"{WAIT}{{") and f'target="{target}"' in key:
            found[key.partition('cause="')[2].partition('"')[0]] = value
    return found


def entries(daemon: Daemon) -> dict[str, float]:
    found = daemon.samples()
    return {name: found.get(f'profinfer_daemon_map_entries{{map="{name}"}}', 0.0) for name in MAPS}


def settled(daemon: Daemon, pid: int, seconds: float = 2.2) -> None:
    """Until it has looked anew. An answer may be half a second old, and threads that ended are looked
    after once a second, or later where others have the cores: the daemon gives way."""

    def looked() -> float:
        report = daemon.wait_for(pid)["report"]
        return float(report["window_seconds"]) if report is not None else 0.0

    before = looked()
    wait_for(lambda: looked() > before + seconds, "a new look at the process", DEADLINE)


def agree(daemon: Daemon, expected: dict[str, int]) -> None:
    """Until so many entries are left, and a look at ended threads later still."""
    wait_for(lambda: entries(daemon) == expected, f"{expected}", DEADLINE)
    time.sleep(1.6)
    assert entries(daemon) == expected


def test_a_busy_process_on_the_same_core(daemon: Daemon, program: Path) -> None:
    """Waits for the core are the scheduler's own, the other process is named, and the verdict says it."""
    cpu = one_cpu()
    label = f"{NAME}-a"
    with known(daemon, program, ("taskset", "-c", str(cpu))) as stub, busy(cpu) as thief:
        settled(daemon, stub.pid)
        before, truth = waited(daemon, label), ready_truth(stub.pid)
        preempted = daemon.sample("profinfer_preemptions_total", target=label)
        for position in range(6, 12):
            stub.order(f"run pos={position} out=0 us=1500 spin")
        settled(daemon, stub.pid)
        after, truth = waited(daemon, label), ready_truth(stub.pid) - truth
        ready = sum(after[cause] - before[cause] for cause in READY)
        assert truth > 0.2, "it did not have to wait"
        assert ready == pytest.approx(truth, rel=0.1)
        assert after["preempted"] - before["preempted"] > 0.8 * truth
        assert daemon.sample("profinfer_preemptions_total", target=label) > preempted
        found = threads(daemon, stub.pid)
        assert found is not None
        takers = {taker["pid"]: taker for taker in found["takers"]}
        assert takers[thief]["comm"].startswith("python")
        rules = [verdict["rule"] for verdict in daemon.wait_for(stub.pid)["report"]["verdicts"]]
        assert "preempted" in rules, rules
    wait_for(lambda: daemon.target(stub.pid) is None, "the end to be noticed")
    kept = waited(daemon, label)
    assert all(kept[cause] >= after[cause] for cause in after), "what an ended process had stays"


def test_page_faults(daemon: Daemon, program: Path) -> None:
    """As many as the kernel counts for the process, and each once."""
    with known(daemon, program) as stub:
        settled(daemon, stub.pid, HELD_SECONDS)

        def seen() -> tuple[float, float]:
            faults = daemon.wait_for(stub.pid)["report"]["faults"]["counts"]
            return (
                sum(one["count"] for one in faults if one["kind"] == "minor"),
                sum(one["count"] for one in faults if one["kind"] == "major"),
            )

        before, truth = seen(), faults_truth(stub.pid)
        total = daemon.sample(FAULTS, target=f"{NAME}-a", kind="minor")
        for position in range(6, 46):
            stub.order(f"run fresh pos={position} out=0 us=0")
        settled(daemon, stub.pid, HELD_SECONDS)
        minor, major = faults_truth(stub.pid)
        new = minor - truth[0], major - truth[1]
        assert new[0] >= 40, "new memory was touched"
        after = seen()
        assert (after[0] - before[0], after[1] - before[1]) == new
        assert daemon.sample(FAULTS, target=f"{NAME}-a", kind="minor") - total == new[0]
        assert daemon.target(stub.pid)["report"]["lost"]["total"] == 0  # type: ignore[index]
        # Its memory is new: what the pages belong to is known all the same.
        found = daemon.wait_for(stub.pid)["report"]["faults"]["counts"]
        assert "unknown" not in {one["mapping"] for one in found}, found


def test_threads_and_targets_that_end_leave_nothing(daemon: Daemon, program: Path) -> None:
    """C21: threads that come and go with every graph, a forked child, a target that ends or is killed."""
    with known(daemon, program):
        pass  # what its file has for the next process, and the programs on all, are there from now on
    wait_for(lambda: not daemon.own(NAME), "earlier ones to go")
    none, one = {"sched_threads": 0, "fault_counts": 0}, {"sched_threads": 1, "fault_counts": 1}
    agree(daemon, none)
    files = daemon.sample("profinfer_daemon_open_files")
    with known(daemon, program) as stub:
        agree(daemon, one)
        for position in range(6, 26):
            stub.order(f"run workers pos={position} out=0 us=50")
        stub.order("fork")
        settled(daemon, stub.pid)
        wait_for(lambda: [t["pid"] for t in daemon.own(NAME)] == [stub.pid], "the child to go")
        agree(daemon, one)
        found = threads(daemon, stub.pid)
        assert found is not None
        assert sum(not one["alive"] for one in found["threads"]) <= 64
    wait_for(lambda: daemon.target(stub.pid) is None, "the end to be noticed")
    agree(daemon, none)
    # Whoever asks has one, too, for a moment.
    wait_for(lambda: daemon.sample("profinfer_daemon_open_files") <= files, "the descriptors to be as before")


def test_nobody_looks_at_what_is_not_watched(tmp_path: Path, program: Path) -> None:
    """A process that a rule excludes: it has no entry, though it maps a file that is probed."""
    other = copied(engine(), tmp_path, f"{NAME}-other")
    rules = {"include": [{"program": f"{NAME}-a"}]}
    with Daemon(tmp_path / "d", None, targets=rules) as daemon, Engine(other) as excluded:
        daemon.scanned()
        with known(daemon, program) as stub:
            for position in range(6, 16):
                excluded.order(f"run pos={position} out=0 us=100")
                decode(stub, position, 1)
            settled(daemon, stub.pid)
            agree(daemon, {"sched_threads": 1, "fault_counts": 1})


@pytest.mark.parametrize("sched", [True, False])
def test_switched_off(tmp_path: Path, program: Path, sched: bool) -> None:
    """What is not wanted is absent, not zero, and no program for it is loaded."""
    profile = {"sched": sched, "faults": not sched}
    with Daemon(tmp_path, f"{NAME}*", profile=profile) as daemon:
        daemon.scanned()
        with known(daemon, program) as stub:
            settled(daemon, stub.pid)
            report = daemon.wait_for(stub.pid)["report"]
            assert (report["threads"] is not None) is sched
            assert (report["faults"] is not None) is not sched
            names = {key.partition("{")[0] for key in daemon.samples()}
            assert (WAIT in names, FAULTS in names) == (sched, not sched)
            assert ("profinfer_preemptions_total" in names) is sched
            assert "less is watched" not in daemon.log()


def test_no_room_for_them(tmp_path: Path, program: Path) -> None:
    """With few descriptors left, tokens and operators go on; these are absent, and one line says why."""
    with Daemon(tmp_path, f"{NAME}*", under=["prlimit", "--nofile=128:128"]) as daemon:
        daemon.scanned()
        with known(daemon, program) as stub, known(daemon, program) as more:
            settled(daemon, stub.pid)
            settled(daemon, more.pid)
            for one in (stub, more):
                report = daemon.wait_for(one.pid)["report"]
                assert report["threads"] is None and report["faults"] is None
                assert any("of 128 file descriptors" in note for note in report["notes"])
                assert report["lost"]["total"] == 0
            names = {key.partition("{")[0] for key in daemon.samples()}
            assert WAIT not in names and FAULTS not in names
            assert "profinfer_generation_tokens_total" in names
            assert daemon.log().count("less is watched") == 1


DEAR = """
import dataclasses, sys
from profinferd.agent import attach, causekeeper, prices
made = prices.prices_of
prices.ASSUMED = attach.ASSUMED = dataclasses.replace(prices.ASSUMED, wait_ns=100_000, wait_record_ns=0)
prices.prices_of = lambda found, mode: dataclasses.replace(
    made(found, mode), call_ns=1, graph_ns=1, op_ns=1, wait_ns=100_000, wait_record_ns=0, fault_ns=1
)
causekeeper.PERIOD_S = 0.5
from profinferd.agent.cli import main
sys.exit(main(sys.argv[5:]))
"""
"""A daemon to which a wait costs as much as 100 us of work."""


def test_waits_of_one_target_are_shed_and_those_of_the_other_are_not(tmp_path: Path, program: Path) -> None:
    """One budget for each: programs go on for the one, and pass over the other."""
    second = copied(engine(), tmp_path, f"{NAME}-b")
    under = [sys.executable, "-c", DEAR, "x"]
    profile = {"budget": "10%"}
    with (
        Daemon(tmp_path / "d", f"{NAME}*", under=under, profile=profile) as daemon,
        known(daemon, program) as stub,
        Engine(second) as calm,
    ):
        ahead(stub.pid)
        ahead(calm.pid)
        # It computes from its first kernel on: by a few that sleep it would be judged until it has
        # computed for long enough, which is a matter of who else runs.
        daemon.wait_for(calm.pid)
        for words in ("pos=0-3 out=3", "pos=4 out=0", "pos=5 out=0"):
            calm.order(f"run {words} us=1000 spin")
        daemon.wait_for_tokens(calm.pid, 4, 2)
        until, position = time.monotonic() + 2 * DEADLINE, 6

        def work(words: str) -> dict[str, Any]:
            nonlocal position
            position = position % 200 + 6
            stub.order(f"run pos={position} out=0 quiet=1 times=50 {words}")
            calm.order(f"run pos={position} out=0 quiet=1 times=20 us=100 spin")
            assert time.monotonic() < until, daemon.wait_for(stub.pid)["report"]["budget"]
            report: dict[str, Any] = daemon.wait_for(stub.pid)["report"]
            return report

        report = work("us=50")
        while [one["part"] for one in report["causes_shed"]] != ["waits"]:
            report = work("us=50")
        assert any(note.startswith("threads: waits are watched in short trials") for note in report["notes"])
        assert daemon.wait_for(calm.pid)["report"]["causes_shed"] == []
        while report["threads"]["unwatched_seconds"] < 1:
            report = work("us=50")
        other = daemon.wait_for(calm.pid)["report"]
        assert other["threads"]["unwatched_seconds"] == 0 and other["threads"]["threads"]
        assert other["overhead"]["machine_seconds"] > 0
        name = "profinfer_cause_unwatched_seconds_total"
        assert daemon.sample(name, target=f"{NAME}-a", what="waits") >= 1
        assert daemon.sample(name, target=f"{NAME}-a", what="faults") == 0
        assert daemon.sample(name, target=f"{NAME}-b", what="waits") == 0
        assert daemon.sample("profinfer_overhead_seconds_total", target=f"{NAME}-a", how="waits") > 0
        while work("us=100 spin")["causes_shed"]:
            pass


def test_they_end_when_nothing_is_watched(tmp_path: Path, program: Path) -> None:
    """Programs on every switch of the machine are not left behind, and come again with the next target."""
    code = (
        "import sys\nfrom profinferd.agent.daemon import manager\nmanager.CAUSES_IDLE_S = 2.0\n"
        "from profinferd.agent.cli import main\nsys.exit(main(sys.argv[5:]))\n"
    )
    with Daemon(tmp_path, f"{NAME}*", under=[sys.executable, "-c", code, "x"]) as daemon:
        daemon.scanned()
        assert not daemon.programs(), "nothing is loaded on an idle machine"
        with known(daemon, program) as stub:
            whole = daemon.programs()
        wait_for(lambda: daemon.target(stub.pid) is None, "the end to be noticed")
        wait_for(lambda: len(daemon.programs()) < len(whole), "the programs to go")
        with known(daemon, program) as stub:
            wait_for(lambda: len(daemon.programs()) == len(whole), "the programs to come back", DEADLINE)
            settled(daemon, stub.pid)
            assert threads(daemon, stub.pid) is not None


def test_graphs_that_are_not_looked_at(tmp_path: Path) -> None:
    """An engine without graphs has faults, and no waits: nobody knows when it computes."""
    two = copied(backends(), tmp_path, f"{NAME}-two")
    with Daemon(tmp_path / "d", f"{NAME}*") as daemon, Told([two]) as victim:
        daemon.scanned()
        daemon.wait_for(victim.pid)
        victim.tell("3")
        settled(daemon, victim.pid)
        report = daemon.wait_for(victim.pid)["report"]
        assert report["threads"] is None and report["faults"] is not None
        assert any(
            note.startswith("threads: waits count while graphs run, which") for note in report["notes"]
        )
        assert WAIT not in {key.partition("{")[0] for key in daemon.samples()}
        # Nobody would ask for its waits: its switches cost it nothing.
        wait_for(lambda: entries(daemon)["sched_threads"] == 0, "its threads to be let go of", DEADLINE)


def test_a_level_that_is_shed_says_that_waits_stand_still(tmp_path: Path, program: Path) -> None:
    """A floor that nothing reaches sheds operators and graphs. The budget has room for all: graphs of
    the stub last half a millisecond, and on a fast machine watching them costs a hundredth of that."""
    profile = {"qos_min_tokens_per_second": 1e6, "budget": "90%"}
    with Daemon(tmp_path / "d", f"{NAME}*", profile=profile) as daemon, known(daemon, program) as stub:
        position = 6
        until = time.monotonic() + 120
        while "stand still" not in str(daemon.wait_for(stub.pid)["report"]["notes"]):
            assert time.monotonic() < until, daemon.wait_for(stub.pid)["report"]["budget"]
            decode(stub, position, 10)
            position += 10
        lines = [line for line in daemon.log().splitlines() if "level shed" in line]
        assert len(lines) == 2 and "level=op " in lines[0] and "level=graph " in lines[1], lines
        for line in lines:
            assert f"pid={stub.pid} " in line and "tokens/s, 1e+06 wanted" in line, lines


def test_a_level_that_comes_back(tmp_path: Path, program: Path) -> None:
    """Slow tokens shed a level, fast ones bring it back: one line each, with the reason. How fast they
    are is the sleep of the stub's kernels, which takes its core at once when it wakes."""
    profile = {"qos_min_tokens_per_second": 60, "budget": "90%"}
    with Daemon(tmp_path / "d", f"{NAME}*", profile=profile) as daemon, known(daemon, program) as stub:
        ahead(stub.pid)
        until, position = time.monotonic() + 240, 6

        def go_on(us: int, words: str) -> None:
            nonlocal position
            while words not in daemon.log():
                assert time.monotonic() < until, (daemon.wait_for(stub.pid)["report"]["budget"], daemon.log())
                stub.order(f"run pos={position % 200 + 6} out=0 us={us}")
                position += 1

        go_on(3000, "level shed")
        go_on(20, "level back")
        lines = [line for line in daemon.log().splitlines() if "level back" in line]
        # The second level, if slow tokens have shed both, may have come back by now.
        assert 1 <= len(lines) <= daemon.log().count("level shed"), lines
        for line in lines:
            assert " info level back " in line and "recovered" in line and "level=" in line


def test_a_graph_that_is_not_seen_to_end(program: Path) -> None:
    """Where graphs are looked at no more, the clock by which waits count does not run on."""
    with Engine(program) as stub, Attachment.open(stub.pid, ops="off") as watch:
        stub.order(PREFILL, lambda: watch.poll(0.01))
        watch.poll(0.05)
        sched = watch._causes.sched
        assert sched is not None

        def clock() -> int:
            return sched.clock(stub.pid, time.monotonic_ns()) or 0

        before = clock()
        stub.send("run pos=4 out=0 us=100 end=hang at=3")
        wait_for(lambda: clock() > before + 50_000_000, "a graph to run")
        watch._programs.detach("graphs")
        watch._programs.stop_clock(stub.pid)
        stopped = clock()
        time.sleep(0.1)
        assert clock() == stopped > before + 50_000_000


def test_a_region_of_sums_is_free_for_the_next_target() -> None:
    """Whose graph was not seen to end owns its slot: the next target must not wait for it."""
    shared = SharedPrograms.load("auto", None, 8)
    try:
        first = shared.view(1 << 21, sums=True)
        assert first.region is not None
        slot = first.region * first._slots_each() + 3
        shared.programs._object.map("owners").update(struct.pack("=I", slot), struct.pack("=I", 77))
        other = slot + first._slots_each() if first.region == 0 else slot - first._slots_each()
        shared.programs._object.map("owners").update(struct.pack("=I", other), struct.pack("=I", 78))
        assert first.owned_slots() == [3]
        region = first.region
        first.close()
        second = shared.view((1 << 21) + 1, sums=True)
        assert second.region == region and second.owned_slots() == []
        assert shared.programs.owned_slots() == [other], "what others own stays theirs"
    finally:
        shared.close()
