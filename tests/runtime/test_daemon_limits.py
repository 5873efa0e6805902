# SPDX-License-Identifier: Apache-2.0
"""The daemon where something is short or wrong: descriptors, memory, clock, privileges, files, churn."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.victims.build import build

from .cases import Engine, copied, engine, library, links, nothing_left, plain, wait_for
from .daemons import DEADLINE, Daemon
from .test_daemon import PREFILL, decode

NAME = f"pfi-limit-{os.getpid()}"
MEMORY = Path("/sys/fs/cgroup/memory")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copied(engine(), tmp_path_factory.mktemp("programs"), f"{NAME}-a")


def counts(daemon: Daemon, program: Path) -> None:
    """One engine is watched and its tokens are right."""
    with Engine(program) as stub:
        daemon.wait_for(stub.pid)
        stub.order(PREFILL)
        decode(stub, 4, 5)
        daemon.wait_for_tokens(stub.pid, 4, 5)


@pytest.mark.parametrize("limit", [64, 192])
def test_few_descriptors(program: Path, tmp_path: Path, limit: int) -> None:
    """Six processes of one engine, 100 connections that say nothing. With 192 all are watched. With
    64 either that, or each says what is missing; the daemon answers, and lives."""
    with Daemon(tmp_path, f"{NAME}*", under=["prlimit", f"--nofile={limit}:{limit}"]) as daemon:
        daemon.scanned()
        with contextlib.ExitStack() as stack:
            idle = [socket.create_connection(("127.0.0.1", daemon.port)) for _ in range(100)]
            stubs = [stack.enter_context(Engine(program)) for _ in range(6)]
            for sock in idle:
                sock.close()
            found = [daemon.wait_for(stub.pid, lambda t: True) for stub in stubs]
            if limit > 64:
                for stub in stubs:
                    daemon.wait_for(stub.pid)
                    stub.order(PREFILL)
                    decode(stub, 4, 2)
                for stub in stubs:
                    daemon.wait_for_tokens(stub.pid, 4, 2)
                daemon.wait_for_sample(6 * 3, "profinfer_generation_tokens_total", target=f"{NAME}-a")
                return
            turned_away = [t for t in found if t["state"] != "watched"]
            if turned_away:
                assert any("Too many open files" in str(t["reason"]) for t in turned_away), turned_away
            assert daemon.get("/healthz") == "ok\n"
            assert daemon.sample("profinfer_daemon_open_files") <= 64
        assert daemon.stop() == 0


def test_descriptors_of_the_dead_are_for_the_living(tmp_path: Path) -> None:
    """One build of an engine after the other: what is kept of those that ended is in nobody's way."""
    with Daemon(tmp_path / "d", f"{NAME}*", under=["prlimit", "--nofile=100:100"]) as daemon:
        daemon.scanned()
        for number in range(16):
            with Engine(copied(engine(), tmp_path, f"{NAME}-{number}")) as stub:
                daemon.wait_for(stub.pid, lambda t: t["state"] in ("watched", "unprofiled"))
                assert daemon.wait_for(stub.pid, lambda t: True)["state"] == "watched", daemon.log()
                stub.order(PREFILL)
                daemon.wait_for_tokens(stub.pid, 4, 0)


def test_who_waits_is_watched_when_there_is_room(program: Path, tmp_path: Path) -> None:
    """targets.max: the second one waits, says so, and is watched once the first has ended."""
    with Daemon(tmp_path, f"{NAME}*", targets={"max": 1}, discovery={"scan_every": "1d"}) as daemon:
        daemon.scanned()
        with Engine(program) as first, Engine(program) as second:
            daemon.wait_for(first.pid, lambda t: t["state"] in ("watched", "waiting"))
            daemon.wait_for(second.pid, lambda t: t["state"] in ("watched", "waiting"))
            stubs = {first.pid: first, second.pid: second}
            states = {t["pid"]: t["state"] for t in daemon.own(NAME)}
            assert sorted(states.values()) == ["waiting", "watched"], states
            (waiting,) = [stubs[pid] for pid, state in states.items() if state == "waiting"]
            (watched,) = [stubs[pid] for pid, state in states.items() if state == "watched"]
            assert "targets.max" in daemon.wait_for(waiting.pid, lambda t: True)["reason"]
            os.kill(watched.pid, signal.SIGKILL)
            daemon.wait_for(waiting.pid)
            waiting.order(PREFILL)
            decode(waiting, 4, 5)
            daemon.wait_for_tokens(waiting.pid, 4, 5)


@pytest.fixture
def memory_group() -> Iterator[Path]:
    """A memory control group of version 1, to be filled in."""
    group = MEMORY / f"pfi-test-{os.getpid()}"
    if not (MEMORY / "memory.limit_in_bytes").exists():
        pytest.skip("there is no memory control group of version 1 here")
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here ({error.strerror})")
    yield group
    wait_for(lambda: not (group / "cgroup.procs").read_text(), "the group to be empty")
    group.rmdir()


def into(group: Path) -> list[str]:
    """A command that runs what follows in a control group."""
    return ["sh", "-c", f'echo $$ >{group}/cgroup.procs && exec "$@"', "sh"]


def test_96_mebibytes(program: Path, tmp_path: Path, memory_group: Path) -> None:
    """With what the kernel keeps for it counted: rings, maps, page cache of its own files."""
    (memory_group / "memory.limit_in_bytes").write_text(str(96 << 20))
    with Daemon(tmp_path, f"{NAME}*", under=into(memory_group)) as daemon:
        daemon.scanned()
        counts(daemon, program)
        assert daemon.sample("profinfer_daemon_resident_bytes") < 96 << 20
        events = (memory_group / "memory.oom_control").read_text()
        assert "under_oom 0" in events and "oom_kill 0" in events
        assert daemon.stop() == 0


def test_target_killed_for_memory(tmp_path: Path, memory_group: Path, program: Path) -> None:
    """The kernel ends it in the middle of a token: the call did not return, what came before counts."""
    (memory_group / "memory.limit_in_bytes").write_text(str(64 << 20))
    (memory_group / "memory.swappiness").write_text("0")
    with Daemon(tmp_path, f"{NAME}*") as daemon:
        daemon.scanned()
        with Engine([*into(memory_group), str(program)]) as stub:
            daemon.wait_for(stub.pid)
            stub.order(PREFILL)
            decode(stub, 4, 3)
            daemon.wait_for_tokens(stub.pid, 4, 3)
            used = int((memory_group / "memory.usage_in_bytes").read_text())
            (memory_group / "memory.limit_in_bytes").write_text(str(used + (1 << 19)))
            # Each kernel of this call takes an eighth of that.
            stub.send("run hoard pos=7 out=0 us=0")
            assert stub.process.wait(120) == -9, "the kernel has ended it"
            assert "oom_kill 0" not in (memory_group / "memory.oom_control").read_text()
            wait_for(lambda: daemon.target(stub.pid) is None, "the end to be noticed")
        daemon.wait_for_sample(4, "profinfer_generation_tokens_total", target=f"{NAME}-a")
        daemon.wait_for_sample(0, "profinfer_daemon_map_entries", map="threads")


STEPPING = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>
static int (*real)(clockid_t, struct timespec *);
static long turn;
/* The wall clock jumps by a day, forth and back, whenever it is looked at. */
int clock_gettime(clockid_t id, struct timespec *ts)
{
	int err;
	if (!real)
		real = dlsym(RTLD_NEXT, "clock_gettime");
	err = real(id, ts);
	if (id == CLOCK_REALTIME)
		ts->tv_sec += turn++ & 1 ? 86400 : -86400;
	return err;
}
time_t time(time_t *t)
{
	struct timespec ts;
	clock_gettime(CLOCK_REALTIME, &ts);
	if (t)
		*t = ts.tv_sec;
	return ts.tv_sec;
}
"""


def test_the_wall_clock_steps(program: Path, tmp_path: Path) -> None:
    """Days forth and back at every look: nothing expires, no rate or latency is odd."""
    shim = build(STEPPING, shared=True, name="stepping.so", cflags=("-ldl",))
    with Daemon(tmp_path, f"{NAME}*", environment={"LD_PRELOAD": str(shim)}) as daemon:
        daemon.scanned()
        counts(daemon, program)
        wait_for(lambda: not daemon.own(NAME), "the end to be noticed")
        counts(daemon, program)
        labels = {"target": f"{NAME}-a"}
        daemon.wait_for_sample(12, "profinfer_generation_tokens_total", **labels)
        assert 0 <= daemon.sample("profinfer_inter_token_latency_seconds_sum", **labels) < 60


def test_no_privilege(tmp_path: Path, program: Path) -> None:
    """C32, C63: without a capability it stays up, says what is missing, and is no crash loop."""
    empty = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"]
    with Daemon(tmp_path, f"{NAME}*", under=empty) as daemon, Engine(program) as stub:
        daemon.scanned()
        wait_for(lambda: "CAP_SYS_PTRACE" in daemon.health()["reason"], "the reason")
        health = daemon.health()
        assert health["state"] == "degraded" and "CAP_BPF" in health["reason"]
        assert daemon.target(stub.pid) is None
        assert daemon.log().count("\n") < 12
        assert daemon.stop() == 0


def test_what_a_hardened_unit_hides(tmp_path: Path, program: Path) -> None:
    """C28, C31, C55: no BTF file, no tracefs, no uprobe PMU in /sys: multi links need none of these."""
    hide = (
        "mount --bind /dev/null /sys/kernel/btf/vmlinux && "
        "mount -t tmpfs none /sys/bus/event_source/devices && "
        "{ mount -t tmpfs none /sys/kernel/tracing 2>/dev/null || true; } && mount -o remount,ro,bind /sys; "
        'exec "$@"'
    )
    with Daemon(tmp_path, f"{NAME}*", under=["unshare", "-m", "sh", "-c", hide, "sh"]) as daemon:
        daemon.scanned()
        counts(daemon, program)


def test_nobody_announces_new_code(tmp_path: Path, program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where perf events are forbidden altogether, processes are found by looking."""
    code = (
        "import sys\nfrom profinferd.agent.kernel import mmapwatch\n"
        "from profinferd.agent.errors import MachineError\n"
        "def refuse(self): raise MachineError('no events here')\n"
        "mmapwatch.MmapWatch.__init__ = refuse\n"
        "from profinferd.agent.cli import main\nsys.exit(main(sys.argv[5:]))\n"
    )
    with Daemon(tmp_path, f"{NAME}*", under=[sys.executable, "-c", code, "x"]) as daemon:
        counts(daemon, program)
        assert "no events here" in daemon.health()["reason"]


def test_an_upgrade_while_it_runs(tmp_path: Path) -> None:
    """The engine's file is replaced as packages do it: the old process and a new one are both watched."""
    path = copied(engine(), tmp_path, f"{NAME}-u")
    with Daemon(tmp_path / "d", f"{NAME}-u") as daemon:
        daemon.scanned()
        with Engine(path) as old:
            daemon.wait_for(old.pid)
            old.order(PREFILL)
            shutil.copy(engine("-DVARIANT=2"), tmp_path / "new")
            os.replace(tmp_path / "new", path)
            path.chmod(0o755)
            with Engine(path) as new:
                daemon.wait_for(new.pid)
                new.order(PREFILL)
                decode(new, 4, 2)
                decode(old, 4, 3)
                daemon.wait_for_tokens(new.pid, 4, 2)
                daemon.wait_for_tokens(old.pid, 4, 3)


def test_a_library_overwritten_in_place(tmp_path: Path) -> None:
    """C09's neighbour: bytes change under the probes; they go, and the next process is looked into anew."""
    before = links()
    program = copied(plain(), tmp_path, f"{NAME}-o")
    path = copied(library(name="libover.so"), tmp_path)
    with Daemon(tmp_path / "d", f"{NAME}-o") as daemon:
        daemon.scanned()
        with Engine(program) as stub:
            stub.order(f"load {path}")
            daemon.wait_for(stub.pid)
            assert daemon.health()["files_probed"] == 1
        wait_for(lambda: not daemon.own(NAME), "the end to be noticed")
        path.write_bytes(library("-DVARIANT=3", name="libover.so").read_bytes())
        wait_for(lambda: daemon.health()["files_probed"] == 0, "the probes to go")
        with Engine(program) as stub:
            stub.order(f"load {path}")
            daemon.wait_for(stub.pid)
            stub.order(PREFILL)
            decode(stub, 4, 2)
            daemon.wait_for_tokens(stub.pid, 4, 2)
        assert daemon.stop() == 0
    nothing_left(before)


def test_many_come_and_go(tmp_path: Path, program: Path) -> None:
    """C20: a few long ones and many short ones under ever new names: the books stay as large."""
    with Daemon(tmp_path, f"{NAME}*") as daemon:
        daemon.scanned()
        with contextlib.ExitStack() as stack:
            long = [stack.enter_context(Engine(program)) for _ in range(4)]
            for stub in long:
                daemon.wait_for(stub.pid)
                stub.order(PREFILL)

            def short(number: int) -> None:
                with Engine(tmp_path / f"{NAME}-s{number % 40}") as stub:
                    stub.order("run pos=0-3 out=3 us=0")

            def churn(count: int) -> None:
                # Before there are threads: a program that is open for writing in any process, as in one
                # that is just being forked, cannot be started.
                for number in range(40):
                    copied(program, tmp_path, f"{NAME}-s{number}")
                with ThreadPoolExecutor(2) as pool:
                    list(pool.map(short, range(count)))
                wait_for(lambda: len(daemon.own(NAME)) == len(long), "the last ones to be noticed", DEADLINE)
                time.sleep(0.6)  # an answer may be half a second old

            def sizes() -> tuple[int, int, int, int]:
                found = daemon.samples()
                entries = sum(v for k, v in found.items() if "map_entries" in k and '"spares"' not in k)
                return (
                    int(found["profinfer_daemon_open_files"]),
                    int(found["profinfer_daemon_threads"]),
                    int(entries),
                    len(found),
                )

            def settled() -> tuple[int, int, int, int]:
                """What lasts: probes of a burst and the threads that take them off come and go."""
                readings = []
                for _ in range(20):
                    readings.append(sizes())
                    time.sleep(0.1)
                files, threads, entries, samples = zip(*readings, strict=True)
                return min(files), min(threads), min(entries), max(samples)

            churn(80)
            first, resident = settled(), daemon.status("VmRSS")
            churn(80)
            second: tuple[int, int, int, int] = first

            def no_larger() -> bool:
                nonlocal second
                second = settled()
                # Each long one may have got the thread that takes its probes off since.
                return (
                    second[0] <= first[0] + 4 and second[1] <= first[1] + len(long) and second[2] <= first[2]
                )

            until = time.monotonic() + DEADLINE
            while not no_larger():
                assert time.monotonic() < until, f"files, threads, entries, samples: {first}, later {second}"
            assert second[3] <= 2500 and second[3] <= first[3] + 200
            # What is free is given back once a minute.
            wait_for(lambda: daemon.status("VmRSS") <= resident + 6 * 1024, "its memory, KiB", DEADLINE)
            for stub in long:
                decode(stub, 4, 3)
            for stub in long:
                found = daemon.wait_for_tokens(stub.pid, 4, 3)
                assert found["report"]["lost"]["total"] == 0


def test_wrong_starts(tmp_path: Path) -> None:
    """A port that is taken, a file that is wrong: one line, exit 2, no leftovers."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        config = tmp_path / "c.yaml"
        config.write_text(
            f"http: {{listen: '127.0.0.1:{taken.getsockname()[1]}'}}\ncontrol: {{socket: {tmp_path}/s}}\n"
        )
        done = run("-c", str(config))
        assert done.returncode == 2 and "cannot listen on" in done.stderr and "http.listen" in done.stderr
        assert not (tmp_path / "s").exists()
    config.write_text("http:\n  lisen: 1\n")
    done = run("-c", str(config))
    assert done.returncode == 2 and f"{config}, line 2, http.lisen" in done.stderr
    assert done.stderr.count("\n") == 1


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The daemon, which is expected to end by itself."""
    return subprocess.run(
        [sys.executable, "-m", "profinferd.agent", "daemon", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_idle(tmp_path: Path) -> None:
    """Nothing to watch: small, ready at once, and asleep (wake-ups are counted by the kernel). New programs
    of others wake it, too, so one moment of quiet has to be among those that are looked at."""
    with Daemon(tmp_path, "no-such-program") as daemon:
        daemon.scanned()
        wait_for(lambda: daemon.health()["watched"] == 0, "nothing to be watched")
        resident = daemon.status("VmRSS")
        # Somebody else's engine, which no rule includes, is looked into all the same, once: with tables of
        # functions that takes code that is kept.
        others = daemon.health()["excluded"] > 0
        assert resident <= (64 if others else 48) * 1024, "KiB"

        def turns() -> float:
            before, begun = daemon.status("voluntary_ctxt_switches"), time.monotonic()
            time.sleep(3.0)
            return (daemon.status("voluntary_ctxt_switches") - before) / (time.monotonic() - begun)

        wait_for(lambda: turns() <= 10, "ten turns a second or fewer", DEADLINE)
