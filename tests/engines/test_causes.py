# SPDX-License-Identifier: Apache-2.0
"""Planted causes on a real engine: a thief on its core, pages that are gone, a late thread."""

from __future__ import annotations

import bisect
import ctypes
import errno
import os
import shutil
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import pytest

from profinferd.agent.attach import Attachment
from profinferd.agent.causes import CauseOptions
from profinferd.agent.model.budget import BudgetConfig
from profinferd.agent.model.causes import Cause, Faults, Threads
from profinferd.agent.target.process import read_maps

from ..groups import small_group
from ..tries import in_one_of, timed
from .fetch import Engines
from .models import model, words
from .pysync import Options, PySync
from .undisturbed import BELOW_THE_THIEF, THIEF, first_in_line

_PIDFD_OPEN, _PROCESS_MADVISE, _MADV_PAGEOUT = 434, 440, 21
_libc = ctypes.CDLL(None, use_errno=True)
DEADLINE = 240.0
"""Generous: a busy machine takes its time, and only a failure waits so long."""
ATTEMPTS = 6
MAJOR = 1
"""Of a record of a fault."""


class Job:
    """A generation that runs while its process is watched."""

    def __init__(self, victim: PySync, attachment: Attachment) -> None:
        self._victim, self.attachment = victim, attachment
        self.pid = victim.pid

    def generate(self, n: int, prompt: int = 8) -> None:
        answers: list[Any] = []
        done = threading.Event()

        def wait() -> None:
            try:
                answers.append(self._victim.ask("generate", context=0, prompt=words(prompt, 3), n=n))
            finally:
                done.set()

        thread = threading.Thread(target=wait)
        thread.start()
        while not done.is_set():
            self.attachment.poll(0.05)
        thread.join()
        self.attachment.poll(0.0)
        assert len(answers[0]["tokens"]) == n

    def set_threads(self, threads: int) -> None:
        self._victim.ask("set_threads", context=0, threads=threads)

    def threads(self) -> Threads:
        found = self.attachment.snapshot().threads
        assert found is not None
        return found

    def faults(self) -> Faults:
        found = self.attachment.snapshot().faults
        assert found is not None
        return found


@contextmanager
def watched(options: Options, ops: str = "off", priority: int = 0, **causes: bool) -> Iterator[Job]:
    """``priority``: real-time, so that nobody below takes its cores; 0: normal scheduling."""
    with PySync(options) as victim:
        victim.ask("generate", context=0, prompt=words(8), n=2)  # warm
        if priority:
            first_in_line(victim.pid, priority)
        # What watching costs is no matter here: four threads on two cores switch 100,000 times a second.
        budget, wanted = BudgetConfig(1.0), CauseOptions(**causes)
        with Attachment.open(victim.pid, ops=ops, budget=budget, causes=wanted) as attachment:
            job = Job(victim, attachment)
            job.generate(3)  # its graphs are known from now on
            yield job


_COMES_AND_GOES = """
import time
while True:
    until = time.monotonic() + 0.01
    while time.monotonic() < until:
        pass
    time.sleep(0.01)
"""


@contextmanager
def thief(cpu: int) -> Iterator[subprocess.Popen[bytes]]:
    """A process that takes half of one core in pieces of 10 ms, whatever else wants to run there."""
    command = ["chrt", "-f", str(THIEF), "taskset", "-c", str(cpu), sys.executable, "-c", _COMES_AND_GOES]
    process = subprocess.Popen(command)
    try:
        until = time.monotonic() + DEADLINE
        while _cpu_ticks(process.pid) < 10:
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.01)
        yield process
    finally:
        process.kill()
        process.wait()


def _cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def ready_seconds(pid: int) -> float:
    """What schedstat says of all threads."""
    return sum(int(p.read_text().split()[1]) for p in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


def fault_counts(pid: int) -> tuple[int, int]:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[7]), int(fields[9])


def both_counts(job: Job) -> tuple[tuple[int, int], Faults]:
    """The kernel's account and ours, between which nothing happened, and with nothing held back: what
    cannot be told yet of the pages is in no count for some seconds."""
    causes = job.attachment._target_causes
    assert causes is not None
    until = time.monotonic() + DEADLINE
    while True:
        job.attachment.poll(0.05)
        before, ours = fault_counts(job.pid), job.faults()
        if fault_counts(job.pid) == before and not causes._faults.holds:
            return before, ours
        assert time.monotonic() < until


def pin(pid: int, cpu: int) -> None:
    for name in os.listdir(f"/proc/{pid}/task"):
        os.sched_setaffinity(int(name), {cpu})


def ready(threads: Threads) -> float:
    """While graphs ran."""
    return sum(threads.seconds(cause) for cause in Cause if cause.ready)


def all_ready(job: Job) -> float:
    """Between graphs, too; read when all its threads are asleep, so that nothing moves meanwhile."""
    sched = job.attachment._causes.sched
    assert sched is not None
    until = time.monotonic() + DEADLINE
    while True:
        rows = sched.threads()
        mine = rows[rows["tgid"] == job.pid]
        ended = mine["state"] == 2
        if (ended | ((mine["state"] != 0) & (mine["woken"] == 0))).all():
            break
        assert time.monotonic() < until
        time.sleep(0.005)
    return sum(int(mine["wait_ns"][:, cause].sum()) for cause in Cause if cause.ready) / 1e9


def test_a_thief_is_named(engines: Engines) -> None:
    """Its core is shared with a busy process: who, how long, which tokens paid; against schedstat."""
    cpu = max(os.sched_getaffinity(0))
    with watched(Options(model("dense24-q4_0"), threads=1), priority=BELOW_THE_THIEF) as job:
        pin(job.pid, cpu)
        with thief(cpu) as other:
            all0, truth0, ours0 = all_ready(job), ready_seconds(job.pid), ready(job.threads())
            job.generate(60)
            whole, truth, seen = all_ready(job) - all0, ready_seconds(job.pid) - truth0, job.threads()
        assert whole == pytest.approx(truth, rel=0.1)
        ours = ready(seen) - ours0
        assert 0.2 * whole < ours <= 1.01 * whole
        assert seen.preemptions > 0
        (leader,) = (t for t in seen.threads if t.leader)
        assert leader.tid == job.pid and leader.cpus == (cpu,)
        named = {taker.pid: taker for taker in seen.takers}
        assert named[other.pid].comm.startswith("python") and not named[other.pid].own
        assert named[other.pid].seconds > 0.2 * ours
        decode = next(p for p in seen.phases if p.phase == "decode")
        assert decode.tokens == 2 + 59
        assert 0.85 * ours <= sum(decode.stalled.values()) + sum(
            s for p in seen.phases if p.phase != "decode" for s in p.stalled.values()
        )
        # Records are of compute threads of this process alone, and few.
        waits = sum(t.waits.get("preempted", 0) + t.waits.get("wakeup", 0) for t in seen.threads)
        assert seen.records <= 4 * waits + 8


def test_a_quiet_engine_waits_for_nobody(engines: Engines) -> None:
    """Nothing planted: no faults but the kernel's own, no quota, and what it waited is what schedstat says,
    too."""
    in_one_of(ATTEMPTS, waits_for_nobody)


def waits_for_nobody() -> None:
    with watched(Options(model("dense2-q8_0"), threads=1)) as job:
        (_, before), faults = both_counts(job)
        before -= faults.of("major")
        truth0, ours0 = ready_seconds(job.pid), ready(job.threads())
        job.generate(40)
        truth, seen = ready_seconds(job.pid) - truth0, job.threads()
        assert ready(seen) - ours0 <= truth * 1.05 + 0.002
        assert [t.tid for t in seen.threads] == [job.pid]
        assert seen.seconds(Cause.THROTTLED) == 0
        assert seen.threads[0].policy == "other" and seen.quota is not None
        (_, majors), faults = both_counts(job)
        assert faults.of("major") == majors - before
        timed(majors == before, f"{majors - before} pages were taken from memory by others")
        timed(seen.seconds(Cause.FAULT) < 0.01, seen)


def test_policies(engines: Engines) -> None:
    """A target that runs as SCHED_IDLE says so."""
    with watched(Options(model("dense2-q8_0"), threads=1)) as job:
        os.sched_setscheduler(job.pid, os.SCHED_IDLE, os.sched_param(0))
        job.generate(4)
        (leader,) = (t for t in job.threads().threads if t.leader)
        assert leader.policy == "idle"


def test_a_thread_pool_that_is_rebuilt(engines: Engines) -> None:
    """From two threads to one, to four, to two: who has gone stays in the sums, and what all of them
    ran is what the kernel's clock of the process says, which counts ended threads, too, and those that
    did next to nothing."""
    with watched(Options(model("dense2-q8_0"), threads=2)) as job:
        before, truth = ran(job), process_seconds(job.pid)
        for threads in (1, 4, 2, 4, 1, 2):
            job.set_threads(threads)
            job.generate(20)
        all_ready(job)  # nothing of it runs: both sides stand still
        whole, truth = ran(job) - before, process_seconds(job.pid) - truth
        seen = job.threads()
        present = {int(name) for name in os.listdir(f"/proc/{job.pid}/task")}
    assert 0.85 * truth <= whole <= 1.03 * truth + 0.002
    assert {t.tid for t in seen.threads if t.alive} <= present
    assert len([t for t in seen.threads if not t.alive and t.work_run_seconds > 0]) >= 3
    assert {t.tid for t in seen.threads if not t.alive}.isdisjoint(present)


def ran(job: Job) -> float:
    """Seconds on a core, of threads that are there and of those that were."""
    causes = job.attachment._causes
    causes.tick(causes._next_look)  # the look at ended threads that is due each second
    return sum(t.run_seconds for t in job.threads().threads)


def process_seconds(pid: int) -> float:
    """CPU time of a process by its clock (CPUCLOCK_SCHED)."""
    return time.clock_gettime((~pid << 3) | 2)


# ---- pages ---------------------------------------------------------------------------------


def page_out(pid: int, path: Path) -> None:
    """Drop the pages of a mapped file from the process and from memory."""
    fd = _libc.syscall(_PIDFD_OPEN, pid, 0)
    assert fd >= 0
    try:
        for mapping in read_maps(pid):
            if os.path.basename(mapping.path) == path.name:
                where = struct.pack("QQ", mapping.start, mapping.end - mapping.start)
                iov = ctypes.create_string_buffer(where)
                if _libc.syscall(_PROCESS_MADVISE, fd, iov, 1, _MADV_PAGEOUT, 0) < 0:
                    number = ctypes.get_errno()
                    pytest.skip(f"pages cannot be dropped here: {errno.errorcode[number]}")
    finally:
        os.close(fd)


def own_copy(path: Path, folder: Path) -> Path:
    """A file that no other process has mapped: the kernel does not drop pages that are shared."""
    copy = folder / path.name
    with path.open("rb") as source, copy.open("wb") as target:
        shutil.copyfileobj(source, target)
        target.flush()
        os.fsync(target.fileno())
    return copy


def majors_in(path: Path, pid: int, records: list[Any]) -> int:
    """Of these faults, the major ones in the mapping of a file: other pages may be gone, too."""
    maps = [m for m in read_maps(pid) if os.path.basename(m.path) == path.name]
    majors = [int(record["addr"]) for record in records if record["kind"] == MAJOR]
    return sum(any(m.start <= address < m.end for m in maps) for address in majors)


def expected_tensors(pid: int, path: Path) -> Callable[[int], str | None]:
    """Tensor of an address by the mapping and the offsets that the format's own library reads."""
    tensors = sorted((int(t.data_offset), int(t.n_bytes), t.name) for t in gguf.GGUFReader(path).tensors)
    maps = [m for m in read_maps(pid) if os.path.basename(m.path) == path.name]

    def find(address: int) -> str | None:
        for m in maps:
            if m.start <= address < m.end:
                offset = address - m.start + m.offset
                at = bisect.bisect_right(tensors, (offset, 1 << 62, "")) - 1
                if at >= 0 and offset < tensors[at][0] + tensors[at][1]:
                    return str(tensors[at][2])
        return None

    return find


@pytest.mark.parametrize("name", ["dense2-f16", "moe-q8_0"])
def test_pages_of_the_model_that_are_gone(name: str, engines: Engines, tmp_path: Path) -> None:
    """C27: every page of the mapped model was dropped: majors and minors equal the process's own,
    each fault goes to its tensor (by the file's offsets), and a mixture of experts names theirs."""
    path = own_copy(model(name), tmp_path)
    with watched(Options(path, threads=1, repack=False), ops="all") as job:
        find = expected_tensors(job.pid, path)
        _, before = both_counts(job)  # the records from here on are all that is not in there
        assert before.model is not None and before.model.loading == "mmap"
        assert before.model.bytes == path.stat().st_size
        then = {t.tensor: t.majors + t.minors for t in before.tensors if t.mapping == "model"}
        majors_then = sum(p.majors for p in job.threads().phases)
        records: list[Any] = []
        job.attachment.sinks.append(lambda kinds: records.extend(kinds.get("page_faults", ())))
        page_out(job.pid, path)
        (minor0, major0), before = both_counts(job)
        job.generate(4)
        (minor, major), after = both_counts(job)
        if major == major0:
            pytest.skip("this file system's pages cannot be dropped")
        assert after.of("major") - before.of("major") == major - major0
        assert after.of("minor") - before.of("minor") == minor - minor0
        of_model = majors_in(path, job.pid, records)
        assert after.of("major", "model") - before.of("major", "model") == of_model > 0
        truth: Counter[str] = Counter()
        for record in records:
            tensor = find(int(record["addr"]))
            if tensor is not None:
                truth[tensor] += 1
        ours = {t.tensor: t.majors + t.minors for t in after.tensors if t.mapping == "model"}
        assert sum(truth.values()) > 20
        assert {t: n - then.get(t, 0) for t, n in ours.items() if n > then.get(t, 0)} == dict(truth)
        assert all(t.source == "graph" for t in after.tensors if t.mapping == "model")
        layers = {t.tensor: t.layer for t in after.tensors}
        assert all(layer == int(t.split(".")[1]) for t, layer in layers.items() if t.startswith("blk."))
        if name.startswith("moe"):
            assert any("_exps" in t for t in truth)
        assert job.threads().seconds(Cause.FAULT) > 0
        assert sum(p.majors for p in job.threads().phases) - majors_then == major - major0
        assert any(op.majors for op in job.threads().ops)


def test_a_control_group_smaller_than_the_model(engines: Engines, tmp_path: Path) -> None:
    """Every token pages the model in again: majors equal the process's own, decode pays, and the
    largest matrices are named."""
    path = own_copy(model("dense2-f16"), tmp_path)
    size = path.stat().st_size
    with small_group(size // 2) as group, watched(Options(path, threads=1, repack=False), ops="all") as job:
        page_out(job.pid, path)
        (group / "cgroup.procs").write_text(str(job.pid))
        records: list[Any] = []
        job.attachment.sinks.append(lambda kinds: records.extend(kinds.get("page_faults", ())))
        (_, major0), before = both_counts(job)
        records.clear()
        job.generate(5)
        (_, major), after = both_counts(job)
        if majors_in(path, job.pid, records) < 4:
            pytest.skip("the limit does not hold for pages of files here")
        assert after.of("major") - before.of("major") == major - major0
        of_model = majors_in(path, job.pid, records)
        assert after.of("major", "model") - before.of("major", "model") == of_model >= 4
        decode = next(p for p in job.threads().phases if p.phase == "decode")
        assert decode.majors > 0 and decode.stalled["fault"] > 0
        assert after.model is not None and after.model.resident_bytes is not None
        assert after.model.resident_bytes < path.stat().st_size
        waited = [t.tensor for t in after.tensors if t.majors]
        assert waited and all(t.endswith(".weight") for t in waited)


@pytest.mark.parametrize("loading", ["mmap", "read", "mlock", "copied"])
def test_how_the_model_is_in_memory(loading: str, engines: Engines) -> None:
    """C27: mapped, read into memory, locked, and mapped but repacked: told apart."""
    path = model("dense2-q4_k")
    options = Options(path, threads=1, repack=loading == "copied", loading=loading)
    with watched(options, ops="all") as job:
        seen = job.faults().model
        if loading == "mlock" and seen is not None and not seen.locked_bytes:
            pytest.skip("memory cannot be locked here (RLIMIT_MEMLOCK)")
        if loading == "copied" and seen is not None and seen.loading == "mmap":
            pytest.skip("this CPU has no rearranged kernels for this type")
        if loading == "read":
            # The file was closed again: nothing tells its name, and nothing of it is resident for us.
            assert seen is None or (seen.loading == "read" and seen.resident_bytes is None)
        else:
            assert seen is not None and seen.loading == loading
            # All of it was read, but the kernel may take back what nobody uses.
            until = time.monotonic() + DEADLINE
            while (seen := job.faults().model) is None or seen.resident_bytes != in_memory(path):
                assert time.monotonic() < until, (seen, in_memory(path))
                job.attachment.poll(0.1)


def in_memory(path: Path) -> int:
    """Bytes of a file that are, as util-linux says it."""
    command = ["fincore", "--bytes", "--noheadings", "--output", "RES", str(path)]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return min(int(said), path.stat().st_size)


# ---- barriers ------------------------------------------------------------------------------


def test_the_late_thread_and_why(engines: Engines) -> None:
    """One of two threads shares its core with a real-time process that comes and goes: it is late
    at barriers because it was preempted, and the other one waits."""
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        pytest.skip("one core only")
    in_one_of(ATTEMPTS, lambda: the_late_thread(cpus))


def the_late_thread(cpus: list[int]) -> None:
    options = Options(model("dense2-q8_0"), threads=2)
    with watched(options, ops="all", priority=BELOW_THE_THIEF, barriers=True) as job:
        workers = [int(t) for t in os.listdir(f"/proc/{job.pid}/task") if int(t) != job.pid]
        os.sched_setaffinity(job.pid, {cpus[0]})
        for tid in workers:
            os.sched_setaffinity(tid, {cpus[1]})
        job.generate(2)
        before = {b.tid: b for b in job.threads().barriers or ()}
        with thief(cpus[1]) as other:
            for _ in range(10):  # how long that takes is the machine's affair
                job.generate(150)
                seen = job.threads()
                assert seen.barriers is not None and seen.op_barriers is not None
                shares = {b.tid: b for b in seen.barriers}
                assert len(shares) == 2 and job.pid in shares
                (worker,) = (tid for tid in shares if tid != job.pid)
                late = shares[worker].late_seconds - (before[worker].late_seconds if worker in before else 0)
                if late > 0.05:
                    break
        # Some of it at the barrier, before the operator that it is late for.
        assert late > 0.05
        timed(shares[worker].ready_seconds > 0.4 * late, (shares, late))
        # Its peer waited for it, spinning or asleep: about as long as it was late.
        waited = shares[job.pid].wall_seconds - shares[job.pid].work_seconds
        timed(waited > 0.8 * late, (waited, late))
        reasons: Counter[str] = Counter()
        for op in seen.op_barriers or ():
            assert op.threads == 2 and 0 <= (op.idle_share or 0) <= 1
            reasons.update(op.late)
        timed(max(reasons, key=lambda r: reasons[r]) == "preempted", reasons)
        assert {taker.pid for taker in seen.takers} >= {other.pid}
        # Every traced op but each graph's last is there.
        assert (
            job.attachment._target_causes is not None
            and job.attachment._target_causes._barriers.unmatched == 0
        )
