# SPDX-License-Identifier: Apache-2.0
"""The programs that say why something was slow: scheduler, page faults, barriers.

Each is an object of its own that shares the maps of the ggml programs: where one does not
load, it alone is missing. All are keyed by process; one set serves every target that is in
the ggml programs' map "targets".
"""

from __future__ import annotations

import errno
import platform
import struct
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from ...probes.build import find_object
from ..errors import MachineError
from . import bpfsys, reasons
from .cpuevents import Pulses
from .libbpf import BpfObject
from .links import Link, attach_multi, attach_perf, attach_raw_tracepoint, close_together
from .maps import Map
from .programs import Probe, possible_cpus
from .ring import Ring

Records = npt.NDArray[Any]

PAGE_FAULTS_MINOR, PAGE_FAULTS_MAJOR = 5, 6  # enum perf_sw_ids
MAX_THREADS = 4096
_BATCH = 256


class Part:
    """One loaded object with one ring and its counters. Close it, or use ``with``."""

    object_name: ClassVar[str]
    ring_name: ClassVar[str]
    record: ClassVar[str]
    stats_map: ClassVar[str]
    stats_enum: ClassVar[str]
    shares: ClassVar[tuple[str, ...]]

    def __init__(
        self,
        shared: Mapping[str, int],
        *,
        btf_path: str | None = None,
        rodata: Mapping[str, int] | None = None,
        entries: Mapping[str, int] | None = None,
        room: int = 1,
    ) -> None:
        """Load. ``shared``: descriptors of loaded maps by name; ``entries``: sizes of maps, where
        they are not to be as the object says; ``room``: times the ring's size, a power of two.
        Raises MachineError."""
        self._object = BpfObject(find_object(self.object_name, platform.machine()), btf_path=btf_path)
        self._links: list[Link] = []
        self._ring: Ring | None = None
        try:
            for name in self.shares:
                if name in shared:
                    self._object.share_map(name, shared[name])
            for name, value in (rodata or {}).items():
                self._object.set_rodata(name, value)
            for name, count in (entries or {}).items():
                if name not in shared:
                    self._object.set_max_entries(name, count)
            self._configure()
            usual = self._object.map(self.ring_name).max_entries
            self._object.set_max_entries(self.ring_name, usual * room)
            self._object.load()
            self.types = self._object.types()
            ring = self._object.map(self.ring_name)
            self._ring = Ring(ring.fd, ring.max_entries, self.types.dtype(self.record))
            names = self.types.enum(self.stats_enum)
            self._stat_names = [n[3:].lower() for n in sorted(names, key=names.__getitem__)][:-1]
        except BaseException:
            self.close()
            raise

    def _configure(self) -> None:
        """What is to be set before loading."""

    def map(self, name: str) -> Map:
        """A loaded map, for sharing."""
        return self._object.map(name)

    def drain(self) -> Records:
        """All complete records since the last drain."""
        if self._ring is None:
            raise ValueError("closed")
        return self._ring.drain()

    def fill(self) -> float:
        """Share of the ring that waits to be drained."""
        return 0.0 if self._ring is None else self._ring.available() / self._ring.size

    def stats(self) -> dict[str, int]:
        """The counters by lower-case name without prefix, summed over CPUs."""
        table = self._object.map(self.stats_map)
        width = (table.value_size + 7) & ~7
        raw = bpfsys.map_lookup(table.fd, struct.pack("=I", 0), width * possible_cpus())
        if raw is None:
            return {}
        sums = np.frombuffer(raw, np.uint64).reshape(-1, width // 8).sum(axis=0)
        return dict(zip(self._stat_names, (int(n) for n in sums), strict=True))

    def run_times(self) -> dict[str, tuple[int, int]]:
        """(ns, runs) by program, as far as the kernel was timing them."""
        infos = {name: program.info() for name, program in self._object.programs.items()}
        return {name: (info.run_time_ns, info.run_count) for name, info in infos.items()}

    def detach(self) -> None:
        """Look at nothing until it is attached again. May be called twice."""
        links, self._links = self._links, []
        close_together(links)

    def close(self) -> None:
        """Detach and unload. May be called twice."""
        self.detach()
        if self._ring is not None:
            self._ring.close()
            self._ring = None
        self._object.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class SchedPrograms(Part):
    """Switches, wake-ups and ends of threads of watched processes."""

    object_name, ring_name, record = "sched", "spans", "sched_span"
    stats_map, stats_enum = "sched_stats", "sched_stat"
    shares = ("targets", "threads", "graph_clocks")
    _TRACEPOINTS: ClassVar[dict[str, str]] = {
        "on_switch": "sched_switch",
        "on_wakeup": "sched_wakeup",
        "on_wakeup_new": "sched_wakeup_new",
        "on_exit": "sched_process_exit",
    }

    def _configure(self) -> None:
        for name in ("core_kinds", "cpu_slices"):
            self._object.set_max_entries(name, possible_cpus())

    def attach(self, kinds: Sequence[int]) -> None:
        """Attach all of them; ``kinds[cpu]`` is the kind of that core. Raises MachineError."""
        table = self._object.map("core_kinds")
        for cpu, kind in enumerate(kinds[: table.max_entries]):
            table.update(struct.pack("=I", cpu), struct.pack("=I", kind))
        # Who ran last on each CPU: since when, is not known any more if we were away for a while.
        slices = self._object.map("cpu_slices")
        for cpu in range(slices.max_entries):
            slices.update(struct.pack("=I", cpu), bytes(slices.value_size))
        for program, name in self._TRACEPOINTS.items():
            self._links.append(attach_raw_tracepoint(self._object.program_fd(program), name, typed=True))

    @property
    def attached(self) -> bool:
        """Whether switches are seen."""
        return bool(self._links)

    def seed(self, tgid: int, states: Mapping[int, bool], now_ns: int) -> None:
        """Threads that are there already: whether each is running or ready. A thread that spins
        may not be switched for seconds, and would not be known until then."""
        clock = self._clock(tgid, now_ns)
        for tid, running in list(states.items())[:MAX_THREADS]:
            value = np.zeros(1, self.types.dtype("sched_thread"))
            value["begun"] = value["since"] = now_ns
            value["clock_begun"] = value["clock_since"] = clock
            value["tgid"], value["tid"], value["node"] = tgid, tid, 0xFFFFFFFF
            constants = self.types.constants()
            value["state"] = constants["TS_RUNNING" if running else "TS_OFF"]
            value["cause"] = constants["WC_UNKNOWN"]
            table = self._object.map("sched_threads")
            try:
                bpfsys.map_update(table.fd, struct.pack("=I", tid), value.tobytes(), flags=1)  # BPF_NOEXIST
            except OSError as error:
                if error.errno != errno.EEXIST:  # it was switched meanwhile, or the map is full
                    return

    def _clock(self, tgid: int, now_ns: int) -> int:
        return self.clock(tgid, now_ns) or 0

    def clock(self, tgid: int, now_ns: int) -> int | None:
        """How many ns graphs of the process have run on the CPU; None when none ever did."""
        raw = self._object.map("graph_clocks").lookup(struct.pack("=I", tgid))
        if raw is None:
            return None
        value = np.frombuffer(raw, self.types.dtype("graph_clock"))[0]
        total, since = int(value["total"]), int(value["since"])
        return total + max(now_ns - since, 0) if value["open"] else total

    def threads(self, tids: Iterable[int] | None = None) -> Records:
        """struct sched_thread of every thread that is known now, or of these."""
        table, dtype = self._object.map("sched_threads"), self.types.dtype("sched_thread")
        keys = table.keys() if tids is None else [struct.pack("=I", tid) for tid in tids]
        rows = [raw for key in keys if (raw := table.lookup(key)) is not None]
        return np.frombuffer(b"".join(rows), dtype)

    def entries(self) -> int:
        """How many threads have an entry."""
        return len(self._object.map("sched_threads").keys())

    def forget(self, tids: Iterable[int]) -> None:
        """Delete the entries of threads that are gone."""
        table = self._object.map("sched_threads")
        for tid in tids:
            table.delete(struct.pack("=I", tid))


class FaultPrograms(Part):
    """Page faults of watched processes: one software event per kind and online CPU."""

    object_name, ring_name, record = "faults", "faults", "fault_rec"
    stats_map, stats_enum = "fault_stats", "fault_stat"
    shares = ("targets", "threads", "sched_threads")

    def __init__(
        self,
        shared: Mapping[str, int],
        *,
        btf_path: str | None = None,
        rodata: Mapping[str, int] | None = None,
        entries: Mapping[str, int] | None = None,
        room: int = 1,
    ) -> None:
        self._open: dict[int, Link] = {}
        self._events: dict[int, int] = {}  # one of each CPU's, by which one knows that they are alive
        self._pulses = Pulses()
        # Without the scheduler's programs nobody fills their map.
        entries = {**(entries or {}), "sched_threads": 1}
        super().__init__(shared, btf_path=btf_path, rodata=rodata, entries=entries, room=room)

    def attach(self, cpus: Collection[int]) -> None:
        """Have the events of exactly these CPUs. Call again when CPUs have come or gone (C57).

        One that is offline by now is passed over; raises MachineError when none can be opened.
        """
        for cpu in [cpu for cpu in self._open if cpu not in cpus]:
            self._close_of(cpu)
        refused: OSError | None = None
        for cpu in cpus:
            if cpu in self._open:
                continue
            try:
                self._open[cpu], self._events[cpu] = self._on(cpu)
            except OSError as error:
                refused = error
        if refused is not None and not self._open:
            number = refused.errno or 0
            what = "cannot open the kernel's page-fault events"
            if number in (errno.EPERM, errno.EACCES):
                raise reasons.refused(what, number, reasons.FOR_LOADING) from refused
            raise reasons.resources(what, number) or MachineError(f"{what}: {bpfsys.strerror(number)}")

    def close_stopped(self) -> bool:
        """Close the events of CPUs that have been offline since the last time, for :meth:`attach` to
        open them anew; whether there are some."""
        gone = self._pulses.stopped(self._events)
        for cpu in gone:
            self._close_of(cpu)
        return bool(gone)

    def _close_of(self, cpu: int) -> None:
        self._open.pop(cpu).close()
        del self._events[cpu]

    def _on(self, cpu: int) -> tuple[Link, int]:
        descriptors: list[int] = []
        try:
            for config, program in ((PAGE_FAULTS_MAJOR, "on_major"), (PAGE_FAULTS_MINOR, "on_minor")):
                event = bpfsys.software_event_open(config, -1, cpu, 1)
                descriptors.append(event)
                descriptors.append(bpfsys.link_perf_event(self._object.program_fd(program), event, 0))
        except OSError:
            Link("perf", descriptors, 0).close()
            raise
        return Link("perf", descriptors, 2), descriptors[0]

    @property
    def cpus(self) -> frozenset[int]:
        """CPUs whose faults are seen."""
        return frozenset(self._open)

    def counts(self, tgid: int) -> dict[str, int] | None:
        """Faults of a process since it was watched: minor, major, how many of each have no record
        (minor_unrecorded, major_unrecorded), and of how many the record was lost, that is, wanted;
        None before the first."""
        raw = self._object.map("fault_counts").lookup(struct.pack("=I", tgid))
        if raw is None:
            return None
        value = np.frombuffer(raw, self.types.dtype("fault_count"))[0]
        minor, major = (int(n) for n in value["faults"])
        no_minor, no_major = (int(n) for n in value["unrecorded"])
        return {
            "minor": minor,
            "major": major,
            "minor_unrecorded": no_minor,
            "major_unrecorded": no_major,
            "lost": int(value["lost"]),
        }

    def begin(self, tgid: int) -> None:
        """Count the faults of a process from 0."""
        size = self.types.dtype("fault_count").itemsize
        self._object.map("fault_counts").update(struct.pack("=I", tgid), bytes(size))

    def entries(self) -> int:
        """How many processes have an entry."""
        return len(self._object.map("fault_counts").keys())

    def forget(self, tgid: int) -> None:
        """Nobody asks for the faults of this process any more."""
        self._object.map("fault_counts").delete(struct.pack("=I", tgid))

    def detach(self) -> None:
        """As :meth:`Part.detach`."""
        links, self._open, self._events = list(self._open.values()), {}, {}
        close_together(links)
        super().detach()


class BarrierPrograms(Part):
    """Arrivals at barriers, per op and thread: user-level probes on the op functions and the barrier."""

    object_name, ring_name, record = "barrier", "barriers", "barrier_rec"
    stats_map, stats_enum = "barrier_stats", "barrier_stat"
    shares = ("targets", "sched_threads")

    def __init__(
        self, shared: Mapping[str, int], method: str, *, btf_path: str | None = None, room: int = 1
    ) -> None:
        """``method`` as that of the ggml programs: perf, or anything else for multi links."""
        self._method = "perf" if method == "perf" else "multi"
        super().__init__(shared, btf_path=btf_path, room=room)

    def _configure(self) -> None:
        for program in self._object.programs.values():
            program.as_uprobe(self._method)

    def attach(self, path: str, pid: int, probes: Sequence[Probe]) -> None:
        """Attach to a file's op functions (level BP_OP) and barriers (BP_ARRIVE)."""
        arrive = self.types.constants()["BP_ARRIVE"]
        for name, some in (
            ("on_arrive", [p for p in probes if p.level == arrive]),
            ("on_op", [p for p in probes if p.level != arrive]),
        ):
            if not some:
                continue
            fd = self._object.program_fd(name)
            if self._method == "perf":
                for probe in some:
                    self._links.append(attach_perf(fd, path, probe.offset, 0, pid or -1))
            else:
                self._links.append(attach_multi(fd, path, [p.offset for p in some], pid=pid))


__all__ = ["BarrierPrograms", "FaultPrograms", "Part", "SchedPrograms"]
