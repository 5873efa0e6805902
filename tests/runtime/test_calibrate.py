# SPDX-License-Identifier: Apache-2.0
"""Measuring what probes cost: counted against the calls that were made, whatever they cost here."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from profinferd.agent.cli import main
from profinferd.agent.errors import MachineError
from profinferd.agent.kernel import bench as bench_module
from profinferd.agent.kernel import bpfsys, calibrate, calibration, causeprices, victim_code
from profinferd.agent.kernel.bench import Bench
from profinferd.agent.kernel.causeprices import Waiting
from profinferd.agent.kernel.causes import SchedPrograms
from profinferd.agent.kernel.programs import GgmlPrograms
from profinferd.agent.kernel.victim import Victim
from profinferd.agent.kernel.victim_graph import KERNELS, NODES
from profinferd.agent.kernel.waits_child import WAIT
from profinferd.agent.kernel.watch import Watch
from profinferd.agent.model.causes import Cause

from .cases import DEADLINE

METHODS = ["session", "multi", "perf"]
NO_MDWE = 77

# Refuses executable memory that was writable, as systemd's MemoryDenyWriteExecute does, and
# sees that it is refused, before the command line runs.
UNDER_MDWE = f"""
import ctypes, errno, mmap, os, sys
libc = ctypes.CDLL(None, use_errno=True)
if libc.prctl(65, ctypes.c_ulong(1), *[ctypes.c_ulong(0)] * 3):
    sys.exit({NO_MDWE})
try:
    mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
except OSError as error:
    assert error.errno == errno.EACCES
else:
    sys.exit("writable and executable memory was given out")
from profinferd.agent.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module", params=METHODS)
def programs(request: pytest.FixtureRequest) -> Iterator[GgmlPrograms]:
    with load(request.param) as loaded:
        yield loaded


def load(method: str) -> GgmlPrograms:
    try:
        return GgmlPrograms.load(method)
    except MachineError as error:
        if method != "session":
            raise
        pytest.skip(f"this kernel has no uprobe sessions: {error.what}")


def links_of(programs: GgmlPrograms) -> set[int]:
    """Ids of the links that hold one of these programs, as the kernel lists them."""
    names = ("on_session", "on_entry", "on_return", "on_op_dispatch", "on_op_fused2")
    mine = set()
    for name in names:
        if name in programs._object.programs:
            try:
                mine.add(programs._object.programs[name].info().id)
            except LookupError:  # not loaded for this method
                continue
    assert len(mine) >= 3
    return {link.id for link in bpfsys.links() if link.program_id in mine}


def test_every_hit_is_counted(programs: GgmlPrograms) -> None:
    """The programs' own counters against the calls that the victim was told to make."""
    before = programs.stats()
    with Victim(Bench.data_size()) as victim, Bench(programs, victim) as bench:
        bench.open(stepped=True, calls_at=["emulated"])
        assert links_of(programs)
        for site in ("emulated", "stepped"):
            for mode in ("trace", "sum"):
                bench.sample("op", site, mode, 3)
            bench.sample("other_thread", site, "", 50)
            bench.sample("graph", site, "", 20)
        bench.sample("call", "emulated", "", 30)
        bench.sample("walk", "emulated", "", 2)
        bench.verify()
        after = programs.stats()
    seen = {name: after[name] - before[name] for name in after if after[name] != before[name]}
    # Graphs: one to be met, 2 * 3 around each op sample (4 of them), 20 twice, 2 * 2 walked.
    assert seen == {
        "hits_op": 4 * 3 * KERNELS,
        "hits_other_thread": 2 * 50,
        "hits_graph": 2 * (1 + 4 * 2 * 3 + 2 * 20 + 2 * 2),
        "hits_call": 2 * 30,
        "walked": (1 + 2) * NODES,
    }
    assert not links_of(programs)


def test_added_up_where_it_is_said_to_be(programs: GgmlPrograms) -> None:
    """Mode sum: each kernel of the graph once per execution, nothing for the views between."""
    sums = programs._object.map("sums")
    dtype = programs.types.dtype("node_sum")
    first = sums.max_entries - NODES

    def calls() -> list[int]:
        values = [sums.lookup(struct.pack("=I", first + i)) or b"" for i in range(NODES)]
        return [int(np.frombuffer(value, dtype)[0]["calls"]) for value in values]

    before = calls()
    with Victim(Bench.data_size()) as victim, Bench(programs, victim) as bench:
        bench.open(stepped=False, calls_at=())
        bench.sample("op", "emulated", "sum", 5)
    assert [b - a for a, b in zip(before, calls(), strict=True)] == [5, 0] * KERNELS


def test_a_hit_that_is_missing_is_no_cheap_hit(
    programs: GgmlPrograms, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Victim(Bench.data_size()) as victim, Bench(programs, victim) as bench:
        bench.open(stepped=False, calls_at=())
        bench.made["hits_op"] += 1
        with pytest.raises(MachineError, match=r"of 1 hits_op .* saw 0"):
            bench.verify()
    # A victim that calls something else than what is probed.
    monkeypatch.setattr(bench_module, "_at", lambda name, site: "plain")
    with Victim(Bench.data_size()) as victim, Bench(programs, victim) as bench:
        bench.open(stepped=False, calls_at=())
        with pytest.raises(MachineError, match=rf"of {KERNELS} op hits .* saw 0"):
            bench.sample("op", "emulated", "trace", 1)
    assert not links_of(programs)


@pytest.mark.parametrize("method", METHODS)
def test_all_of_it(method: str) -> None:
    lines: list[str] = []
    with load(method) as programs:
        found = calibrate.measure(programs=programs, progress=lines.append)
        assert not links_of(programs)
        assert programs.drain().events.size == 0
    assert (found.method, found.kernel, found.quick) == (method, os.uname().release, False)
    kinds = {(h.kind, h.site, h.mode) for h in found.ns_per_hit}
    expected = {(k, s, m) for s in ("emulated", "stepped") for k, m in (
        ("op", "trace"), ("op", "sum"), ("other_thread", ""), ("graph", ""), ("call", ""))}  # fmt: skip
    expected.add(("walk", "emulated", ""))
    expected |= {(kind, "", "") for kind in calibration.CAUSES}
    if method == "perf":
        expected.remove(("call", "stepped", ""))
    assert kinds == expected
    for hit in found.ns_per_hit:
        assert 0 < hit.cost.ns < 1e8, hit
    for kind in ("op", "other_thread", "graph"):
        emulated, stepped = found.hit(kind), found.hit(kind, site="stepped")
        assert emulated is not None
        assert stepped is not None
        assert stepped.ns > emulated.ns, kind
    watched, other = found.hit("wait"), found.hit("other_switch")
    assert watched is not None and other is not None and watched.ns > 2 * other.ns
    wait, stall = found.ns_per_cycle_wait, found.ns_per_cycle_stall
    assert wait is not None
    assert stall is not None
    assert 0 <= stall.ns < wait.ns
    assert lines
    assert calibration.Calibration.from_json(found.to_json()) == found


def test_what_the_kernel_does_not_time_has_no_price(
    programs: GgmlPrograms, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its run-time statistics take CAP_SYS_ADMIN; prices are assumed then."""

    def refuse() -> int:
        raise PermissionError

    monkeypatch.setattr(bpfsys, "enable_stats", refuse)
    assert causeprices.measure_causes(programs) == ()


def test_waits_and_faults_are_those_of_the_victim(programs: GgmlPrograms) -> None:
    """As often as it was told, and nothing of it is left."""
    with Waiting() as victim:
        victim.ready()
        shared = programs.map_descriptors(("targets", "threads", "graph_clocks"))
        with SchedPrograms(shared) as sched:
            sched.attach([])
            programs.set_target(victim.pid, layout=0, mode=0)
            victim.do(WAIT, 10)  # it is known from now on
            before = sched.threads([victim.pid])["waits"].astype(int)
            victim.do(WAIT, 200)
            waits = sched.threads([victim.pid])["waits"].astype(int) - before
            # Where its peer takes the core as soon as it is woken, it need not be woken itself.
            assert waits[0].sum() - waits[0][Cause.WAKEUP] >= 200
            assert waits[0][[Cause.OTHER, Cause.PREEMPTED]].sum() >= 200
        programs.forget_target(victim.pid)
    targets = programs._object.map("targets").keys()
    clocks = programs._object.map("graph_clocks").keys()
    assert causeprices.measure_causes(programs)
    assert programs._object.map("targets").keys() == targets
    assert programs._object.map("graph_clocks").keys() == clocks


def test_the_quick_one_is_a_part_and_leaves_nothing(programs: GgmlPrograms) -> None:
    known = programs._object.map("known").keys()
    targets = programs._object.map("targets").keys()
    found = calibrate.measure(quick=True, programs=programs)
    assert found.quick
    assert [(h.kind, h.site, h.mode) for h in found.ns_per_hit] == [
        ("op", "emulated", "trace"),
        ("op", "emulated", "sum"),
        ("other_thread", "emulated", ""),
        ("graph", "emulated", ""),
    ]
    assert all(h.cost.ns > 0 for h in found.ns_per_hit)
    assert found.ns_per_cycle_wait is found.ns_per_cycle_stall is None
    assert not links_of(programs)
    assert programs._object.map("known").keys() == known
    assert programs._object.map("targets").keys() == targets


def test_standing_still_is_seen() -> None:
    """A victim that is stopped for 30 ms stood still for that long; one that runs did not."""
    with Victim(Bench.data_size()) as victim, Watch(victim) as watch:
        before = watch.look()
        os.kill(victim.pid, 19)  # SIGSTOP
        os.waitpid(victim.pid, os.WUNTRACED)
        subprocess.run(["sleep", "0.03"], check=True)
        os.kill(victim.pid, 18)  # SIGCONT
        until = 6000
        while (seen := watch.look() - before).still < 2e7 and until:
            subprocess.run(["sleep", "0.01"], check=True)
            until -= 1
    assert 2.5e7 < seen.stalled < seen.at


def test_kept_figures_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    measure = calibrate.measure
    monkeypatch.setattr(calibrate, "measure", lambda *a, **k: made.append(a[0]) or measure(*a, **k))  # type: ignore[func-returns-value]
    first = calibrate.calibrate(tmp_path, "multi", quick=True)
    assert calibrate.calibrate(tmp_path, "multi", quick=True) == first
    assert made == ["multi"]
    path = tmp_path / "calibration-multi.json"
    path.write_text(path.read_text().replace(first.kernel, "2.6.32"))
    again = calibrate.calibrate(tmp_path, "multi", quick=True)
    assert again.kernel == first.kernel
    assert made == ["multi", "multi"]
    assert calibrate.calibrate(tmp_path, "multi", quick=True) == again


def test_figures_are_good_where_they_cannot_be_kept(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    lines: list[str] = []
    found = calibrate.calibrate(tmp_path / "file", "multi", quick=True, progress=lines.append)
    assert found.ns_per_hit
    assert any("cannot be kept" in line for line in lines)


def test_what_others_do_on_its_core_is_not_in_a_price() -> None:
    """Figures are kept, so those of a busy moment would hold for ever. Truth is the clock of the process,
    and what it waited for its core by the kernel's books."""
    one = min(os.sched_getaffinity(0))
    with Victim(Bench.data_size()) as victim:
        os.sched_setaffinity(victim.pid, {one})
        plain, calls = victim.function("plain"), 1 << 20
        while victim.call("repeat", plain, 0, 0, calls) < 50e6:  # a dozen times a scheduler's slice
            calls *= 2
        with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
            try:
                os.sched_setaffinity(other.pid, {one})
                until = time.monotonic() + DEADLINE  # it has to start, too
                while True:
                    before, waited = cpu_ns(victim.pid), waited_ns(victim.pid)
                    begun = time.monotonic_ns()
                    spent = victim.call("repeat", plain, 0, 0, calls)
                    passed, waited = time.monotonic_ns() - begun, waited_ns(victim.pid) - waited
                    assert 0 < spent <= cpu_ns(victim.pid) - before < passed
                    if waited > spent / 4:
                        break
                    assert time.monotonic() < until, "the two never shared their core"
                assert spent <= passed - waited * 0.9
            finally:
                other.kill()


def cpu_ns(pid: int) -> int:
    """What a process has used, by its clock."""
    return time.clock_gettime_ns(~pid << 3 | 2)


def waited_ns(pid: int) -> int:
    """How long its first thread has waited for a core."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1])


def test_a_victim_that_dies_is_one_line() -> None:
    with Victim(Bench.data_size()) as victim:
        victim.call("op")
        with pytest.raises(MachineError, match="killed by signal"):
            victim.call("repeat", 0, 0, 0, 1)  # calls address 0
    with Victim(64, command=["/bin/false"]) as victim, pytest.raises(MachineError, match=r"EPERM|status 1"):
        victim.call("op")
    with pytest.raises(MachineError, match="cannot make a process"):
        Victim(64, command=["/nonexistent/python"])


def test_victims_do_not_outlive_who_started_them() -> None:
    """Also one that runs until it is told to stop (C14: nothing stays behind a kill -9)."""
    code = (
        "import sys, time\n"
        "from profinferd.agent.kernel.victim import Victim\n"
        "from profinferd.agent.kernel.watch import Watch\n"
        "with Victim(64) as victim, Watch(victim):\n"
        "    print(victim.pid, flush=True)\n"
        "    time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        os.kill(pid, 0)
        owner.kill()
    for _ in range(6000):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except FileNotFoundError:
            return
        if state == "Z":
            return
        subprocess.run(["sleep", "0.01"], check=True)
    pytest.fail(f"the victim {pid} runs on")


def test_works_where_memory_is_never_writable_and_executable(tmp_path: Path) -> None:
    """As the daemon's unit demands (MemoryDenyWriteExecute)."""
    command = [sys.executable, "-c", UNDER_MDWE, "calibrate", "--quick", "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode == NO_MDWE:
        pytest.skip("this kernel has no PR_SET_MDWE (Linux 6.3 has it)")
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["ns_per_hit"]) == 4


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = tmp_path / "state"
    assert main(["calibrate", "--attach-method", "multi", "--state", str(state)]) == 0
    out, err = capsys.readouterr()
    assert "attached with multi" in out
    assert "operator, another thread" in out
    assert "measuring hits" in err
    kept = calibration.load(state, "multi")
    assert kept is not None
    assert f"{kept.ns_per_hit[0].cost.ns:,.0f}" in out
    assert main(["calibrate", "--state", str(state / "calibration-multi.json"), "-q"]) == 4
    out, err = capsys.readouterr()
    assert "attached with" in out  # what was measured is not lost
    assert len(err.splitlines()) == 1


def test_code_is_where_it_is_said_to_be() -> None:
    """The victim maps the very bytes that are attached to."""
    with Victim(64) as victim:
        at = victim.function("op")
        with open(f"/proc/{victim.pid}/mem", "rb") as memory:
            memory.seek(at)
            assert memory.read(3) == victim_code.image()[victim_code.offset("op") :][:3]
