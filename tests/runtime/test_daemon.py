# SPDX-License-Identifier: Apache-2.0
"""The daemon on stub engines: who is found, what is counted, what is left. Truth: the stub's log."""

from __future__ import annotations

import hashlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from profinferd.agent.errors import ProfinferError

from .cases import Engine, copied, engine, library, links, nothing_left, plain, wait_for
from .daemons import Daemon

NAME = f"pfi-case-{os.getpid()}"
"""Of this run alone: another one on this machine has engines of the same file names."""
PREFILL = "run pos=0-3 out=3 us=20"


def decode(stub: Engine, first: int, count: int) -> None:
    """So many tokens, one a call."""
    for position in range(first, first + count):
        stub.order(f"run pos={position} out=0 us=20")


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copies of the stub under names that no other test uses."""
    folder = tmp_path_factory.mktemp("programs")
    copied(engine(), folder, f"{NAME}-one")
    copied(engine("-DVARIANT=2"), folder, f"{NAME}-two")
    copied(plain(), folder, f"{NAME}-plain")
    copied(engine("-DHIDE", strip=True, dynamic=False), folder, f"{NAME}-bare")
    return folder


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    before = links()
    with Daemon(tmp_path_factory.mktemp("daemon"), f"{NAME}*") as made:
        made.scanned()
        yield made
        assert made.stop() == 0, made.log()
        assert not os.path.exists(made.socket)
    nothing_left(before)


def test_found_counted_and_kept(daemon: Daemon, programs: Path) -> None:
    """C17: found by its code; tokens as they were; what an ended process had stays with its target."""
    with Engine(programs / f"{NAME}-one") as stub:
        daemon.wait_for(stub.pid)
        stub.order(PREFILL)
        decode(stub, 4, 10)
        found = daemon.wait_for_tokens(stub.pid, 4, 10)
        assert found["target"] == f"{NAME}-one" and found["report"]["lost"]["total"] == 0
        assert found["report"]["target"]["pid"] == stub.pid
        daemon.wait_for_sample(11, "profinfer_generation_tokens_total", target=f"{NAME}-one")
    wait_for(lambda: daemon.target(stub.pid) is None, "the end to be noticed")
    labels = {"target": f"{NAME}-one"}
    daemon.wait_for_sample(11, "profinfer_generation_tokens_total", **labels)
    daemon.wait_for_sample(0, "profinfer_target_state", **labels, reason="ended")
    # A process of a known file is seen from its first token, though nobody has looked into it yet.
    with Engine(programs / f"{NAME}-one") as stub:
        stub.order(PREFILL)
        decode(stub, 4, 5)
        daemon.wait_for_tokens(stub.pid, 4, 5)
        daemon.wait_for_sample(11 + 6, "profinfer_generation_tokens_total", **labels)
        daemon.wait_for_sample(8, "profinfer_prompt_tokens_total", **labels)
    wait_for(lambda: daemon.target(stub.pid) is None, "the end to be noticed")
    daemon.wait_for_sample(17, "profinfer_generation_tokens_total", **labels)
    log = daemon.log()
    assert log.count("target found") >= 2 and log.count("target lost") >= 2 and "it ended" in log


def test_several_at_once_keep_apart(daemon: Daemon, programs: Path) -> None:
    """Each process has its own tokens, though they share programs, rings and layout."""
    one, two = programs / f"{NAME}-one", programs / f"{NAME}-two"
    with Engine(one) as a, Engine(one) as b, Engine(two) as c:
        for stub in (a, b, c):
            daemon.wait_for(stub.pid)
        for turn in range(6):
            for stub, times in ((a, 1), (b, 2), (c, 3)):
                if turn == 0:
                    stub.order(PREFILL)
                decode(stub, 4 + turn * times, times)
        for stub, times in ((a, 1), (b, 2), (c, 3)):
            found = daemon.wait_for_tokens(stub.pid, 4, 6 * times)
            assert found["report"]["lost"]["total"] == 0
        assert daemon.health()["watched"] >= 3


def test_children_are_seen_too(daemon: Daemon, programs: Path) -> None:
    """C36: a forked child that maps nothing new computes, and is a target of its own."""
    with Engine(programs / f"{NAME}-one") as stub:
        daemon.wait_for(stub.pid)
        stub.order(PREFILL)
        daemon.wait_for_tokens(stub.pid, 4, 0)
        target = {"target": f"{NAME}-one"}
        time.sleep(0.6)  # an answer may be half a second old, and have none of these yet
        before = daemon.sample("profinfer_calls_total", **target)
        foreign = daemon.health()["foreign_events_total"]
        stub.order("fork")

        def seen() -> bool:
            # The child ends with its call: it is a target if it was looked at in time, else counted.
            calls = daemon.sample("profinfer_calls_total", **target) > before
            return calls or daemon.health()["foreign_events_total"] > foreign

        wait_for(seen, "the child's call")
        daemon.wait_for_tokens(stub.pid, 4, 0)


def test_library_loaded_later(daemon: Daemon, programs: Path, tmp_path: Path) -> None:
    """C02, C03: no engine at first; a dlopen brings it; a file without names hides nothing."""
    with Engine(programs / f"{NAME}-plain") as stub:
        time.sleep(0.3)  # long enough to be looked at and found to have nothing
        begun = time.monotonic()
        stub.order(f"load {copied(library(name='libstub.so'), tmp_path)}")
        daemon.wait_for(stub.pid)
        print("seen", round(time.monotonic() - begun, 3), "s after the load")
        stub.order(PREFILL)
        decode(stub, 4, 3)
        daemon.wait_for_tokens(stub.pid, 4, 3)


def test_a_build_without_names_says_so(daemon: Daemon, programs: Path) -> None:
    """C01: it is listed with its reason, as metric too; nobody else is affected."""
    with Engine(programs / f"{NAME}-bare") as stub:
        found = daemon.wait_for(stub.pid, lambda t: t["state"] == "unprofiled")
        assert "no symbols: build-id" in found["reason"]
        daemon.wait_for_sample(0, "profinfer_target_state", target=f"{NAME}-bare", reason="no_symbols")
        with Engine(programs / f"{NAME}-one") as other:
            daemon.wait_for(other.pid)


def test_another_mount_namespace(daemon: Daemon, programs: Path) -> None:
    """C04: the program's path means nothing to us."""
    script = f"mount -t tmpfs none /mnt && cp {programs}/{NAME}-two /mnt/{NAME}-x && exec /mnt/{NAME}-x"
    with Engine(["unshare", "-m", "sh", "-c", script]) as stub:
        daemon.wait_for(stub.pid)
        stub.order(PREFILL)
        decode(stub, 4, 2)
        daemon.wait_for_tokens(stub.pid, 4, 2)


def test_exec_and_pid_namespace(daemon: Daemon, programs: Path) -> None:
    """A shell becomes an engine, in a PID namespace of its own; the pid is ours to name."""
    command = ["unshare", "-p", "-f", "--kill-child", str(programs / f"{NAME}-two")]
    with Engine(command) as stub:
        children = Path(f"/proc/{stub.process.pid}/task/{stub.process.pid}/children").read_text().split()
        daemon.wait_for(int(children[0]))
        stub.order(PREFILL)
        daemon.wait_for_tokens(int(children[0]), 4, 0)


def test_containers_are_named(daemon: Daemon, programs: Path) -> None:
    """C54: the container's id from /proc/PID/cgroup, whatever the version."""
    root = Path("/sys/fs/cgroup/memory")
    root = root if root.is_dir() else Path("/sys/fs/cgroup")
    identity = hashlib.sha256(NAME.encode()).hexdigest()
    group = root / f"{NAME}-docker" / identity
    try:
        group.mkdir(parents=True)
    except OSError as error:
        pytest.skip(f"no cgroup can be made here ({error.strerror})")
    try:
        command = ["sh", "-c", f"echo $$ >{group}/cgroup.procs && exec {programs}/{NAME}-one"]
        with Engine(command) as stub:
            found = daemon.wait_for(stub.pid)
            assert found["container"] == identity and found["target"] == identity[:12]
            stub.order(PREFILL)
            daemon.wait_for_tokens(stub.pid, 4, 0)
            daemon.wait_for_sample(4, "profinfer_prompt_tokens_total", target=identity[:12])
    finally:
        wait_for(lambda: not (group / "cgroup.procs").read_text(), "the group to be empty")
        group.rmdir()
        group.parent.rmdir()


def test_killed_in_a_call(daemon: Daemon, programs: Path) -> None:
    """C21: what was open when it was killed is closed as not returned; the books are empty."""
    with Engine(programs / f"{NAME}-two") as stub:
        daemon.wait_for(stub.pid)
        stub.order(PREFILL)
        daemon.wait_for_tokens(stub.pid, 4, 0)
        lost = daemon.sample("profinfer_lost_records_total", target=f"{NAME}-two")
        stub.send("run pos=4 out=0 us=10000000")
        time.sleep(0.3)
    wait_for(lambda: daemon.target(stub.pid) is None, "the end to be noticed")
    assert daemon.sample("profinfer_prompt_tokens_total", target=f"{NAME}-two") >= 4
    assert daemon.sample("profinfer_lost_records_total", target=f"{NAME}-two") - lost <= 2


def test_the_other_profiler(daemon: Daemon, programs: Path) -> None:
    """Somebody else's uprobe on the same function: both count every call."""
    from .perf_uprobe import PerfUprobe
    from .support import file_offset

    path = programs / f"{NAME}-one"
    with Engine(path) as stub:
        daemon.wait_for(stub.pid)
        with PerfUprobe(path, file_offset(path, "llama_decode"), stub.pid) as other:
            stub.order(PREFILL)
            decode(stub, 4, 7)
            assert other.count() == 8
            daemon.wait_for_tokens(stub.pid, 4, 7)


def test_reload_and_rules(daemon: Daemon, programs: Path) -> None:
    """A wrong file is refused with its line and the old one goes on; a right one holds at once."""
    good = dict(daemon.config)
    with Engine(programs / f"{NAME}-two") as stub:
        daemon.wait_for(stub.pid)
        daemon.path.write_text('{"http": {"listn": 1}}\n')
        with pytest.raises(ProfinferError, match=r"line 1, http\.listn"):
            daemon.reload()
        assert daemon.target(stub.pid) is not None
        failures = daemon.log().count("the new configuration is not used")
        daemon.write({**good, "targets": {**good["targets"], "exclude": [{"program": "*-two"}]}})
        daemon.reload()
        found = daemon.wait_for(stub.pid, lambda t: t["state"] == "excluded")
        assert "rule" in found["reason"] or "configuration" in found["reason"]
        daemon.write(good)
        os.kill(daemon.pid, signal.SIGHUP)
        daemon.wait_for(stub.pid)
        stub.order(PREFILL)
        daemon.wait_for_tokens(stub.pid, 4, 0)
        health = daemon.health()
        assert health["reloads"] >= 2 and health["reload_failures"] == failures >= 1


def test_a_reload_changes_on_what_terms_they_are_watched(programs: Path, tmp_path: Path) -> None:
    """Budget and operators of those that are watched already; what they have done goes on."""
    with Daemon(tmp_path, f"{NAME}*", profile={"ops": "off"}) as daemon:

        def reload(**profile: object) -> None:
            daemon.write({**daemon.config, "profile": profile})
            daemon.reload()

        def budget(target: dict[str, Any]) -> object:
            return ((target["report"] or {}).get("overhead") or {}).get("budget_ratio")

        labels = {"target": f"{NAME}-one"}
        with Engine(programs / f"{NAME}-one") as stub:
            daemon.wait_for(stub.pid)
            stub.order(PREFILL)
            daemon.wait_for_tokens(stub.pid, 4, 0)
            reload(ops="sampled", budget="2%")
            found = daemon.wait_for(stub.pid, lambda t: budget(t) == 0.02)
            assert found["report"]["target"]["attach"]["op_source"] is not None
            decode(stub, 4, 3)
            daemon.wait_for_sample(4, "profinfer_generation_tokens_total", **labels)
            reload(ops="off")
            daemon.wait_for(stub.pid, lambda t: t["report"] and budget(t) is None)
            decode(stub, 7, 2)
            daemon.wait_for_sample(6, "profinfer_generation_tokens_total", **labels)
        assert "needs a restart" not in daemon.log()
        daemon.write({**daemon.config, "profile": {"sched": False}})
        assert daemon.reload()["restart"] == ["profile.sched"]
        assert "what has changed needs a restart keys=profile.sched\n" in daemon.log()


def test_a_place_for_sampling_becomes_free(programs: Path, tmp_path: Path) -> None:
    """Of two engines one can be sampled at a time: the other is, once that has ended."""
    code = (
        "import sys; from profinferd.agent.daemon import shared; shared.REGIONS = 1\n"
        "from profinferd.agent.cli import main; sys.exit(main(sys.argv[4:]))"
    )
    note = "ops: too many targets are sampled at once"

    def source(target: dict[str, Any] | None) -> object:
        return target and target["report"] and target["report"]["target"]["attach"]["op_source"]

    with (
        Daemon(tmp_path, f"{NAME}*", under=[sys.executable, "-c", code]) as daemon,
        Engine(programs / f"{NAME}-one") as first,
    ):
        daemon.wait_for(first.pid, lambda t: source(t) is not None)
        with Engine(programs / f"{NAME}-two") as second:
            found = daemon.wait_for(second.pid, lambda t: t["state"] == "watched" and t["report"])
            assert source(found) is None and note in found["report"]["notes"]
            first.kill()
            found = daemon.wait_for(second.pid, lambda t: source(t) is not None)
            assert note not in found["report"]["notes"]


def test_hostile_names(daemon: Daemon, programs: Path, tmp_path: Path) -> None:
    """A name with line breaks, quotes and escape sequences: each line of the log is one of its own, and the
    exposition is valid."""
    name = f'{NAME}-\n"evil\\\x1b[31m{{}}=1'
    copied(engine(), tmp_path, name)
    with Engine([str(tmp_path / name)]) as stub:
        daemon.wait_for(stub.pid)
        stub.order(PREFILL)
        daemon.wait_for_tokens(stub.pid, 4, 0)
        done = subprocess.run(
            ["promtool", "check", "metrics"], input=daemon.get("/metrics"), capture_output=True, text=True
        )
        assert done.returncode == 0 and not done.stderr, done.stderr
        for _ in range(10):  # it waits for an answer for some seconds, and the daemon for a core
            done = subprocess.run(
                [sys.executable, "-m", "profinferd.agent", "status", "--socket", daemon.socket],
                capture_output=True,
                text=True,
            )
            if done.returncode == 0:
                break
        assert done.returncode == 0 and "\x1b" not in done.stdout, done.stderr
    text = daemon.log()
    assert "\x1b" not in text and ("evil" in text or daemon.health()["log_suppressed"])
    own = re.compile(r"\d{4}-\d\d-\d\dT\S+ (info|warning|error) \w")
    assert all(own.match(line) for line in text.split("\n")[:-1]), text


def test_what_the_daemon_says_about_itself(daemon: Daemon, programs: Path) -> None:
    """C66 and its own bounds are metrics; health and readiness answer."""
    with Engine(programs / f"{NAME}-one") as stub:
        daemon.wait_for(stub.pid)  # before the first engine there are no programs to speak of
    target = {"target": f"{NAME}-one", "reason": "ended"}
    daemon.wait_for_sample(0, "profinfer_target_state", **target)
    names = {key.partition("{")[0] for key in daemon.samples()}
    assert {
        "profinfer_daemon_open_files",
        "profinfer_daemon_threads",
        "profinfer_daemon_resident_bytes",
    } <= names
    assert {"profinfer_daemon_recursion_misses_total", "profinfer_daemon_map_entries"} <= names
    assert daemon.get("/healthz") == "ok\n" and daemon.get("/readyz").startswith("ok")
    assert daemon.sample("profinfer_daemon_open_files") < 160
    text = daemon.get("/metrics", "application/openmetrics-text")
    assert text.rstrip().endswith("# EOF")


def test_kill_9_leaves_nothing_and_a_restart_starts_anew(programs: Path, tmp_path: Path) -> None:
    """C55: no probe is left; the next one replaces the socket; nothing is counted twice."""
    before = links()
    first = Daemon(tmp_path, f"{NAME}-one").start()
    with Engine(programs / f"{NAME}-one") as stub:
        first.wait_for(stub.pid)
        stub.order(PREFILL)
        first.wait_for_tokens(stub.pid, 4, 0)
        first.kill()
        nothing_left(before)
        decode(stub, 4, 3)
        with Daemon(tmp_path, f"{NAME}-one") as second:
            second.wait_for(stub.pid)
            # Where it was is not known: its first token begins something, however slow it is, for
            # the process did nothing while it was attached to.
            stub.order("run pos=7 out=0 us=60000")
            decode(stub, 8, 4)
            found = second.wait_for_tokens(stub.pid, 1, 4)
            assert found["report"]["tokens"]["output_rows"] == 5
    nothing_left(before)
