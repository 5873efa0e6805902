# SPDX-License-Identifier: Apache-2.0
"""Page faults with their addresses, against the process's own counts (cases C09, C27, C57)."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import time
from pathlib import Path

import pytest

from profinferd.agent.causes import SHARED, CauseOptions, Causes
from profinferd.agent.kernel import bpfsys
from profinferd.agent.kernel.causes import FaultPrograms
from profinferd.agent.kernel.programs import GgmlPrograms
from profinferd.agent.kernel.residency import by_cachestat, by_mincore, resident_bytes
from profinferd.agent.target.process import open_process
from profinferd.agent.targetcauses import TargetCauses

from .waits import Waits, watching

PAGE = os.sysconf("SC_PAGESIZE")
PAGES = 3000


def test_each_fault_once_with_its_address() -> None:
    with Waits() as victim, Waits() as other, watching(victim.pid, sched=False) as watch:
        victim.settle()
        minor0, major0 = victim.faults()
        (address,) = victim.do(f"anon {PAGES}")
        other.do(f"anon {PAGES}")  # nobody watches this one
        victim.settle()
        minor, major = victim.faults()
        records = watch.causes.drain()["page_faults"]
        assert watch.causes.faults is not None
        assert watch.causes.faults.counts(victim.pid) == {
            "minor": minor - minor0, "major": major - major0, "minor_unrecorded": 0, "major_unrecorded": 0,
            "lost": 0,
        }  # fmt: skip
        assert len(records) == minor - minor0 + major - major0
        assert set(records["tgid"].tolist()) == {victim.pid}
        inside = records[(records["addr"] >= address) & (records["addr"] < address + PAGES * PAGE)]
        assert sorted(inside["addr"].tolist()) == [address + i * PAGE for i in range(PAGES)]
        assert (inside["wait_ns"] == 2**64 - 1).all()  # the scheduler is not watched: not known


def test_majors_of_a_dropped_file(tmp_path: Path) -> None:
    """C27: a mapped file of 2 MiB that was dropped, without read-ahead: each page is read from disk."""
    path = tmp_path / "data"
    path.write_bytes(os.urandom(2 << 20))
    os.sync()
    with Waits() as victim, watching(victim.pid) as watch:
        victim.do("spin 1")
        victim.settle()
        watch.causes.drain()
        minor0, major0 = victim.faults()
        (address,) = victim.do(f"touch {path}")
        victim.settle()
        minor, major = victim.faults()
        if major == major0:
            pytest.skip("this file system's pages cannot be dropped")
        records = watch.causes.drain()["page_faults"]
        majors = records[records["kind"] == 1]
        assert len(majors) == major - major0
        assert len(records) - len(majors) == minor - minor0
        assert ((majors["addr"] >= address) & (majors["addr"] < address + (2 << 20))).all()
        blocked = int(watch.row(victim.pid)["wait_ns"][5]) / 1e9
        assert sum(majors["wait_ns"].tolist()) / 1e9 <= blocked + 1e-6
        assert majors["wait_ns"].max() < 10**12


def test_more_than_can_be_recorded() -> None:
    """Beyond the limit faults are counted, by kind, without an address: none is lost from the sums."""
    with Waits() as victim, GgmlPrograms.load("auto") as programs:
        shared = programs.map_descriptors(SHARED)
        with FaultPrograms(shared, rodata={"max_per_second": 100}) as faults:
            faults.attach(range(os.cpu_count() or 1))
            victim.settle()
            programs.set_target(victim.pid, layout=0, mode=0)
            minor0, _ = victim.faults()
            victim.do(f"anon {PAGES}")
            victim.settle()
            counts = faults.counts(victim.pid)
            records = faults.drain()
            assert counts is not None and counts["minor"] == victim.faults()[0] - minor0
            assert counts["minor_unrecorded"] == counts["minor"] - len(records)
            assert counts["minor_unrecorded"] >= PAGES - 1000
            assert faults.stats()["limited"] == counts["minor_unrecorded"]


def test_cpus_that_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """C57: ENODEV of an offline CPU is passed over; one that comes online is opened at the next look."""
    online = sorted(os.sched_getaffinity(0))
    gone = set(online[1:])
    real = bpfsys.software_event_open

    def fake(config: int, pid: int, cpu: int, period: int) -> int:
        if cpu in gone:
            raise OSError(errno.ENODEV, "no such device")
        return real(config, pid, cpu, period)

    monkeypatch.setattr(bpfsys, "software_event_open", fake)
    with GgmlPrograms.load("auto") as programs, FaultPrograms(programs.map_descriptors(SHARED)) as faults:
        faults.attach(online)
        assert faults.cpus == {online[0]}
        gone.clear()
        faults.attach(online)
        assert faults.cpus == set(online)
        faults.attach(online[:1])
        assert faults.cpus == {online[0]}
    assert not [fd for fd in os.listdir("/proc/self/fd") if "bpf_link" in _link(fd)]


_DISABLE = 0x2400 | 1  # PERF_EVENT_IOC_DISABLE: an event stops as it does when its CPU goes offline


def test_a_cpu_that_was_offline_between_two_looks() -> None:
    """C57: the list of CPUs is the same, and the events of one of them are dead: at the next look
    they are opened anew, and every fault from then on is seen."""
    cpu = max(os.sched_getaffinity(0))
    with Waits() as victim, watching(victim.pid, sched=False) as watch:
        faults = watch.causes.faults
        assert faults is not None
        now = time.monotonic()
        watch.causes.tick(now)
        for task in os.listdir(f"/proc/{victim.pid}/task"):
            os.sched_setaffinity(int(task), {cpu})
        for descriptor in faults._open[cpu]._descriptors[::2]:
            fcntl.ioctl(descriptor, _DISABLE)
        for later in (2, 4):  # the first look finds out how long it has been enabled until then
            time.sleep(0.002)
            watch.causes.tick(now + later)
        victim.settle()
        minor0, _ = victim.faults()
        before = (faults.counts(victim.pid) or {"minor": 0})["minor"]
        victim.do(f"anon {PAGES}")
        victim.settle()
        after = (faults.counts(victim.pid) or {"minor": 0})["minor"]
        assert after - before == victim.faults()[0] - minor0 >= PAGES


def _link(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EOPNOTSUPP, errno.ENODEV, errno.ENXIO, errno.EACCES])
def test_events_that_cannot_be_opened(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """C09: each errno: page faults are absent with the reason, the scheduler is there all the same."""

    def refuse(*arguments: int) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(bpfsys, "software_event_open", refuse)
    with GgmlPrograms.load("auto") as programs:
        causes = Causes.load(programs, CauseOptions())
        try:
            (note,) = causes.notes
            assert note.startswith("page faults cannot be watched:")
            assert errno.errorcode[number] in note or "page-fault events" in note
            assert causes.faults is None and causes.sched is not None
        finally:
            causes.close()


def test_a_kernel_without_btf(tmp_path: Path) -> None:
    """Only the scheduler needs it: that is absent with the reason, faults are watched."""
    broken = tmp_path / "btf"
    broken.write_bytes(b"no btf")
    with GgmlPrograms.load("auto") as programs:
        causes = Causes.load(programs, CauseOptions(), btf_path=str(broken))
        try:
            assert causes.sched is None and causes.faults is not None
            (note,) = causes.notes
            assert note.startswith("the scheduler cannot be watched:")
        finally:
            causes.close()


def test_an_object_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FaultPrograms, "object_name", "missing")
    with GgmlPrograms.load("auto") as programs:
        causes = Causes.load(programs, CauseOptions())
        try:
            assert causes.faults is None and "make setup" in causes.notes[0]
        finally:
            causes.close()


def test_two_targets_of_one_set_of_programs() -> None:
    """Everything is by process: two are watched by the same programs, each gets its own."""
    with Waits() as one, Waits() as two, watching(one.pid, two.pid) as watch:
        told: dict[int, int] = {one.pid: 0, two.pid: 0}
        targets = []
        for victim in (one, two):
            process = open_process(victim.pid)

            def sink(records: object, pid: int = victim.pid) -> None:
                assert isinstance(records, dict)
                if "page_faults" in records:
                    assert set(records["page_faults"]["tgid"].tolist()) == {pid}
                    told[pid] += len(records["page_faults"])

            targets.append(TargetCauses(watch.causes, process, [sink]))
        one.do("anon 100")
        two.do("anon 200")
        watch.causes.pump()
        assert told[one.pid] >= 100 and told[two.pid] >= 200
        for target in targets:
            target.feed({})
            target.finish()
        counts = [t._fault_figures() for t in targets]
        assert all(c is not None for c in counts)
        assert [c.of("minor") for c in counts if c] == [told[one.pid], told[two.pid]]
        targets[0].close()
        assert watch.causes.targets == targets[1:]
        targets[1].close()


def test_residency(tmp_path: Path) -> None:
    """cachestat and mincore say the same, of a file of which half is in memory."""
    path = tmp_path / "file"
    size = 256 * PAGE
    path.write_bytes(os.urandom(size))
    os.sync()
    fd = os.open(path, os.O_RDONLY)
    try:
        assert resident_bytes(fd) == size
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        if by_mincore(fd, size) == 256:
            pytest.skip("this file system's pages cannot be dropped")
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead
        assert len(os.pread(fd, 128 * PAGE, 0)) == 128 * PAGE
        assert by_mincore(fd, size) == 128
        assert by_cachestat(fd) in (128, None)  # None: Linux before 6.5
        assert resident_bytes(fd) == 128 * PAGE
    finally:
        os.close(fd)


def test_the_shape_of_the_context() -> None:
    """Where the address lies in the context of a perf program is fixed for good (UAPI): behind the
    registers. A wrong place would give addresses of nothing."""
    assert struct.calcsize("21Q") == 168  # x86-64's struct pt_regs
