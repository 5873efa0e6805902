# SPDX-License-Identifier: Apache-2.0
"""The ggml probes in the kernel: loading them, telling them what to watch, draining them.

Three ways of attaching, best first: *session* (Linux 6.13: one link for entry and return,
and the return is only asked for where the stack top is code), *multi* (6.6: one link per
direction), *perf* (one event per site and direction, everywhere).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import platform
import re
import struct
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType, TracebackType
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from ...probes.build import find_object
from ..errors import MachineError, ProfinferError
from . import bpfsys
from .arrays import MappedArray, read_array
from .btf import Types
from .libbpf import BpfObject, load_degrading
from .links import Link, attach_multi, attach_perf, attach_raw_tracepoint, close_together
from .loaded import LoadedObject
from .maps import Map
from .ring import Ring, drain_until

METHODS = ("session", "multi", "perf")
RINGS = {"events": "event", "ops": "op_batch", "nodes": "node_desc", "ints": "int_chunk", "raws": "raw_chunk"}
_UPROBES = ("on_session", "on_entry", "on_return", "on_op_dispatch", "on_op_fused2")

PATIENCE = 0.02
"""Seconds to wait for a record that another thread has only reserved so far."""

Records = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Probe:
    """One site of one file: ``level`` is a number of enum event_level or op_probe.

    ``offset`` in bytes of the file; ``moved``: how far the stack pointer lies below its value
    at function entry; ``returns``: whether the return is wanted too; ``template``: index into map
    "templates" + 1, or 0.
    """

    level: int
    offset: int
    moved: int
    returns: bool
    template: int = 0


@dataclass(frozen=True, slots=True)
class Drained:
    """What was in the rings; ``events`` were taken first, so they are never ahead of the rest."""

    events: Records
    ops: Records
    nodes: Records
    ints: Records
    raws: Records


class GgmlPrograms:
    """The loaded programs, their maps, rings and links. Close it, or end the process."""

    notes: ClassVar[tuple[str, ...]] = ()
    """What these programs cannot do and others can, for the report."""
    records: ClassVar[Mapping[str, str]] = RINGS
    """The structure that each ring's records have."""

    def __init__(self, obj: LoadedObject, method: str, types: Types, left_out: Mapping[str, str]) -> None:
        self._object = obj
        self.method = method
        self.types = types
        self.left_out = dict(left_out)
        """Optional programs that the kernel refused, with its reason."""
        self._links: dict[str, list[Link]] = {}
        self._following: set[str] = set()  # groups with probes that open and close frames
        self._generation = 0
        self._flags_left: dict[int, int] = {}
        self._rings: dict[str, Ring] = {}
        self._sums: MappedArray | None = None
        try:
            for name, record in self.records.items():
                ring = obj.map(name)
                self._rings[name] = Ring(ring.fd, ring.max_entries, types.dtype(record))
            self._known, self._graphs = obj.map("known"), obj.map("graphs")
            self._targets, self._layouts = obj.map("targets"), obj.map("layouts")
            self._stats, self._spares = obj.map("stats"), obj.map("spares")
            self._tallies: Map | None = None
            self._stat_names = [name[3:].lower() for name in types.enum("stat") if name != "ST_COUNT"]
            self._watch_thread_exits()
        except BaseException:
            self.close()
            raise

    @classmethod
    def load(
        cls,
        method: str = "auto",
        *,
        btf_path: str | None = None,
        ring_bytes: Mapping[str, int] = MappingProxyType({}),
        targets: int = 0,
    ) -> GgmlPrograms:
        """Load for ``method`` (auto, session, multi, perf).

        ``ring_bytes``: sizes of rings by name, where not those of the object (powers of two,
        whole pages). ``targets``: for so many targets there are counters of their own (see
        :meth:`add_tally`); 0: one set of counters for all.
        Raises MachineError saying what the kernel or this process lacks.
        """
        if method != "auto" and method not in METHODS:
            raise ValueError(f"no attach method {method!r}")
        wanted = METHODS if method == "auto" else (method,)
        failures: list[ProfinferError] = []
        for candidate in wanted:
            try:
                return cls._load_one(candidate, btf_path, ring_bytes, targets)
            except MachineError as error:
                failures.append(error)
        # The last one asks least of the kernel: what it says is what is really missing.
        raise failures[-1]

    @classmethod
    def _load_one(
        cls, method: str, btf_path: str | None, ring_bytes: Mapping[str, int], targets: int
    ) -> GgmlPrograms:
        name = "ggml_session" if method == "session" else "ggml"
        path = find_object(name, platform.machine())

        def configure(obj: BpfObject) -> list[str]:
            names = [n for n in obj.programs if not _superfluous(n, method)]
            for program in names:
                if program in _UPROBES:
                    way = "multi" if method == "session" and program != "on_session" else method
                    obj.programs[program].as_uprobe(way)
            for ring, size in ring_bytes.items():
                obj.set_max_entries(ring, size)
            if targets:
                obj.set_rodata("per_target", 1)
                obj.set_max_entries("tallies", targets)
            return names

        obj, left_out = load_degrading(path, configure, ["on_thread_exit"], btf_path=btf_path)
        try:
            _try_method(obj, method)
            loaded = cls(obj, method, obj.types(), {n: error.what for n, error in left_out.items()})
            loaded._tallies = obj.map("tallies") if targets else None
            return loaded
        except BaseException:
            obj.close()
            raise

    def _watch_thread_exits(self) -> None:
        if "on_thread_exit" in self.left_out:
            return
        try:
            link = attach_raw_tracepoint(self._object.program_fd("on_thread_exit"), "sched_process_exit")
        except MachineError as error:
            # Without it a thread that dies inside a call keeps its entry until swept.
            self.left_out["on_thread_exit"] = error.what
        else:
            self._links.setdefault("", []).append(link)

    # ---- what to watch ------------------------------------------------------------------

    def set_layout(self, index: int, fields: Mapping[str, int]) -> None:
        """Entry ``index`` of map "layouts"; ``fields`` as in ``struct layout``, all of them."""
        value = np.zeros(1, self.types.dtype("layout"))
        for name in value.dtype.names or ():
            if name != "reserved":
                value[name] = fields[name]
        self._layouts.update(struct.pack("=I", index), value.tobytes())

    def set_target(
        self, tgid: int, *, layout: int, mode: int, epoch: int = 0, flags: int = 0, generation: int = 0
    ) -> None:
        """Watch process ``tgid``; ``mode`` is one of enum op_mode, ``flags`` of enum target_flag.

        ``generation`` grows when returns may have been missed in this process.
        """
        flags |= self._flags_left.get(tgid, 0)
        value = self._target(layout, mode, epoch, flags, generation)
        self._targets.update(struct.pack("=I", tgid), value)

    def set_template(self, index: int, *, layout: int, mode: int, flags: int = 0) -> None:
        """What is wanted of processes that :meth:`set_target` has not named, at probes attached
        with this ``template``."""
        flags |= self.types.constants()["TG_TEMPLATE"]
        value = self._target(layout, mode, 0, flags, 0)
        self._object.map("templates").update(struct.pack("=I", index), value)

    def _target(self, layout: int, mode: int, epoch: int, flags: int, generation: int) -> bytes:
        value = np.zeros(1, self.types.dtype("target"))
        value["layout"], value["mode"], value["epoch"] = layout, mode, epoch
        value["flags"], value["generation"] = flags, generation
        return value.tobytes()

    def forget_target(self, tgid: int, hashes: Iterable[int] = ()) -> None:
        """Stop looking at a process (its links are closed by :meth:`detach`), and forget these graphs
        of it: its number may soon be another's."""
        self._flags_left.pop(tgid, None)
        self._targets.delete(struct.pack("=I", tgid))
        for hash_ in hashes:
            self._known.delete(self._hash_key(tgid, hash_))
        if self._tallies is not None:
            self._tallies.delete(struct.pack("=I", tgid))

    def add_tally(self, tgid: int) -> None:
        """Count this process's hits and losses by themselves, from now on; all counts begin at zero.

        OSError(E2BIG): there is no room for one more.
        """
        if self._tallies is None:
            raise ValueError("loaded without counters of single targets")
        size = self._tallies.value_size * possible_cpus()
        bpfsys.map_update(self._tallies.fd, struct.pack("=I", tgid), bytes(size))

    def confirm(self, tgid: int, hash_: int) -> None:
        """All descriptors of this graph have arrived: do not send them again."""
        key = self._hash_key(tgid, hash_)
        old = self._known.lookup(key)
        if old is None:
            return  # evicted: it will be described again, which does no harm
        value = np.frombuffer(old, self.types.dtype("known_graph")).copy()
        value["state"] = self.types.constants()["KN_CONFIRMED"]
        self._known.update(key, value.tobytes())

    def resend(self, tgid: int, hash_: int) -> None:
        """Some descriptors of this graph were lost: send them with its next execution."""
        self._known.delete(self._hash_key(tgid, hash_))

    def take_slot(self, tgid: int, hash_: int) -> None:
        """Add the ops of this graph up no more, from its next execution on."""
        self.give_slot(tgid, hash_, -1, 0)

    def capacity(self) -> tuple[int, int]:
        """(slots, elements of map "sums") that there are to give out."""
        return self._object.map("owners").max_entries, self._object.map("sums").max_entries

    def owned_slots(self) -> list[int]:
        """Slots that an execution is writing to at this moment."""
        return [int(n) for n in np.flatnonzero(read_array(self._object.map("owners"), "u4"))]

    def free_slots(self, first: int, count: int) -> None:
        """Nobody who owned these slots is looked at any more: whose graph was not seen to end, has
        one for good otherwise."""
        owners = self._object.map("owners")
        for slot in self.owned_slots():
            if first <= slot < first + count:
                owners.update(struct.pack("=I", slot), bytes(owners.value_size))

    def stop_clock(self, tgid: int) -> None:
        """Graphs of this process are looked at no more: one that runs now will not be seen to end."""
        clocks, key = self._object.map("graph_clocks"), struct.pack("=I", tgid)
        raw = clocks.lookup(key)
        if raw is None:
            return
        value = np.frombuffer(raw, self.types.dtype("graph_clock")).copy()
        if value["open"][0]:
            value["total"] += np.uint64(max(0, time.monotonic_ns() - int(value["since"][0])))
            value["open"] = 0
            clocks.update(key, value.tobytes())

    def graph_clock_ns(self, tgid: int) -> int:
        """How many ns graphs of the process have run on the CPU, those that run now included: known at
        once, and also of graphs whose records were lost."""
        raw = self._object.map("graph_clocks").lookup(struct.pack("=I", tgid))
        if raw is None:
            return 0
        value = np.frombuffer(raw, self.types.dtype("graph_clock"))[0]
        total, since = int(value["total"]), int(value["since"])
        return total + max(0, time.monotonic_ns() - since) if value["open"] else total

    def sums(self, first: int, count: int) -> Records:
        """Elements of map "sums" (struct node_sum), as they are now."""
        return self._mapped_sums().read(first, count)

    def _mapped_sums(self) -> MappedArray:
        if self._sums is None:
            self._sums = MappedArray(self._object.map("sums"), self.types.dtype("node_sum"))
        return self._sums

    def clear_sums(self, first: int, count: int) -> None:
        """Set elements of map "sums" to zero; nobody may be writing to them."""
        self._mapped_sums().clear(first, count)

    def give_slot(self, tgid: int, hash_: int, slot: int, first: int) -> bool:
        """Have the ops of this graph added up in mode OPS_SUM, from its next execution on.

        Node n then is element ``first + n`` of map "sums", ``slot`` an index of "owners" that
        no other graph uses. False when the kernel does not know the graph (any more).
        """
        key = self._hash_key(tgid, hash_)
        old = self._known.lookup(key)
        if old is None:
            return False
        value = np.frombuffer(old, self.types.dtype("known_graph")).copy()
        value["slot"], value["first"] = slot + 1, first
        self._known.update(key, value.tobytes())
        return True

    def give_spare(
        self, tgid: int, n_nodes: int, size_class: int, slot: int | None, first: int = 0, elements: int = 0
    ) -> None:
        """Have graphs that have no slot of their own added up in ``slot``; None: no more.

        Those of ``n_nodes`` (0: of any number without a spare slot to itself) and ``size_class``
        (log2 of their tokens, or SIZE_UNKNOWN), ``elements`` nodes at most.
        """
        key = np.zeros(1, self.types.dtype("spare_key"))
        key["tgid"], key["n_nodes"], key["size_class"] = tgid, n_nodes, size_class
        if slot is None:
            self._spares.delete(key.tobytes())
            return
        value = np.zeros(1, self.types.dtype("spare_slot"))
        value["slot"], value["first"], value["n_nodes"] = slot + 1, first, elements
        self._spares.update(key.tobytes(), value.tobytes())

    def leave_out(self, tgid: int, flags: int) -> None:
        """Have the programs on the scheduler and page faults pass over this target: TG_NO_WAITS and
        TG_NO_FAULTS of ``flags``, 0: neither. It stays so whatever :meth:`set_target` says later."""
        if flags:
            self._flags_left[tgid] = flags
        else:
            self._flags_left.pop(tgid, None)
        key = struct.pack("=I", tgid)
        raw = self._targets.lookup(key)
        if raw is None:
            return
        names = self.types.constants()
        value = np.frombuffer(raw, self.types.dtype("target")).copy()
        value["flags"] = value["flags"] & ~np.uint32(names["TG_NO_WAITS"] | names["TG_NO_FAULTS"]) | flags
        self._targets.update(key, value.tobytes())

    def forget_graphs(self, tgid: int | None = None) -> None:
        """Forget every graph (of this process): what was read of them was read by a wrong layout."""
        for table in (self._known, self._graphs):
            for key in table.keys():  # noqa: SIM118  (a map, not a dict)
                if tgid is None or struct.unpack_from("=I", key, 8)[0] == tgid:  # as in struct hash_key
                    table.delete(key)

    def _hash_key(self, tgid: int, hash_: int) -> bytes:
        key = np.zeros(1, self.types.dtype("hash_key"))
        key["hash"], key["tgid"] = hash_, tgid
        return key.tobytes()

    def map_descriptors(self, names: Sequence[str]) -> dict[str, int]:
        """Descriptors of maps, for programs that share them; LookupError where one is not there."""
        return {name: self._object.map(name).fd for name in names}

    # ---- links --------------------------------------------------------------------------

    def attach(
        self, group: str, path: str, pid: int, probes: Sequence[Probe], template: int | None = None
    ) -> None:
        """Attach ``probes`` of the file ``path`` for process ``pid`` (0: every process).

        ``group`` names them for :meth:`detach`, ``template`` what is wanted of processes that are
        not named. All or nothing; raises TargetError or MachineError.
        """
        if template is not None:
            probes = [dataclasses.replace(probe, template=template + 1) for probe in probes]
        new: list[Link] = []
        try:
            if self.method == "perf":
                for probe in probes:
                    new += self._attach_perf(path, pid, probe)
            else:
                new += self._attach_multi(path, pid, probes)
        except BaseException:
            for link in new:
                link.close()
            raise
        self._links.setdefault(group, []).extend(new)
        ops = self.types.enum("op_probe").values()
        if any(probe.level not in ops for probe in probes):
            self._following.add(group)

    def _attach_perf(self, path: str, pid: int, probe: Probe) -> list[Link]:
        target = pid or -1
        cookie = _cookie(probe)
        links: list[Link] = []
        try:
            if probe.returns:  # first, as in _attach_multi
                fd = self._object.program_fd("on_return")
                links.append(attach_perf(fd, path, probe.offset, cookie, target, ret=True))
            links.append(attach_perf(self._program_fd(probe), path, probe.offset, cookie, target))
        except BaseException:
            for link in links:
                link.close()
            raise
        return links

    def _attach_multi(self, path: str, pid: int, probes: Sequence[Probe]) -> list[Link]:
        if _pid_means_thread(platform.release()):
            pid = 0  # the programs look at the process themselves
        # One link per program. The returns come first: an entry without its return would
        # leave a frame open, a return without its entry is merely ignored.
        by_program: dict[tuple[int, bool, bool], list[Probe]] = {}
        for probe in probes:
            if probe.returns and self.method == "session":
                key = (self._object.program_fd("on_session"), False, True)
                by_program.setdefault(key, []).append(probe)
                continue
            if probe.returns:
                by_program.setdefault((self._object.program_fd("on_return"), True, False), []).append(probe)
            by_program.setdefault((self._program_fd(probe), False, False), []).append(probe)
        links: list[Link] = []
        try:
            for (fd, ret, session), some in sorted(by_program.items(), key=lambda item: not item[0][1]):
                offsets, cookies = [p.offset for p in some], [_cookie(p) for p in some]
                links.append(attach_multi(fd, path, offsets, cookies, pid=pid, ret=ret, session=session))
        except BaseException:
            for link in links:
                link.close()
            raise
        return links

    def _program_fd(self, probe: Probe) -> int:
        constants = self.types.enum("op_probe")
        if probe.level == constants["OPP_FUSED2"]:
            return self._object.program_fd("on_op_fused2")
        if probe.level == constants["OPP_DISPATCH"]:
            return self._object.program_fd("on_op_dispatch")
        return self._object.program_fd("on_entry")

    def detach(self, group: str, *, for_all: bool = True) -> None:
        """Close the links of a group: at once, for each waits 40 ms and more for the kernel.

        ``for_all`` False: the caller raises the generation of those targets that used them.
        """
        close_together(self._links.pop(group, []))
        if group in self._following:
            # Returns were missed: what is open in the kernel's books is not to be believed.
            self._following.remove(group)
            if not for_all:
                return
            self._generation += 1
            self._object.map("generation").update(bytes(4), struct.pack("=I", self._generation))

    # ---- what was seen ------------------------------------------------------------------

    def drain(self) -> Drained:
        """All complete records since the last drain, ``events`` first.

        What a visible event speaks of was written before it, but may lie behind a record that
        another thread has only reserved so far: that one is waited for.
        """
        events = self._rings["events"].drain()
        rest = [self._rings[name] for name in ("ops", "nodes", "ints", "raws")]
        ends = [ring.reserved for ring in rest] if len(events) else [0] * len(rest)
        parts = [drain_until(ring, end, PATIENCE) for ring, end in zip(rest, ends, strict=True)]
        return Drained(events, unbatched(parts[0]), *parts[1:])

    def fill(self) -> float:
        """Share of the fullest ring that waits to be drained."""
        return max(ring.available() / ring.size for ring in self._rings.values())

    def stats(self, tgid: int | None = None) -> dict[str, int]:
        """The counters of enum stat, by lower-case name without prefix, summed over CPUs.

        Of one process (empty when it has no counters of its own), or of all that have none.
        """
        table, key = self._stats, 0
        if tgid is not None:
            if self._tallies is None:
                return {}
            table, key = self._tallies, tgid
        width = table.value_size
        raw = bpfsys.map_lookup(table.fd, struct.pack("=I", key), width * possible_cpus())
        if raw is None:
            return {}
        counts = np.frombuffer(raw, np.uint64).reshape(-1, width // 8)
        return dict(zip(self._stat_names, (int(n) for n in counts.sum(axis=0)), strict=True))

    def map_keys(self, name: str) -> list[bytes]:
        """The keys that are in a map of the kernel side."""
        return self._object.map(name).keys()

    def recursion_misses(self) -> dict[str, int]:
        """Executions that the kernel skipped, by program: they are in no other number."""
        out: dict[str, int] = {}
        for name, program in self._object.programs.items():
            with contextlib.suppress(LookupError):  # not loaded
                misses = program.info().recursion_misses
                if misses is not None:  # an older kernel does not say
                    out[name] = misses
        return out

    def close(self) -> None:
        """Detach everything and unload. May be called twice."""
        close_together([link for links in self._links.values() for link in links])
        self._links.clear()
        while self._rings:
            self._rings.popitem()[1].close()
        if self._sums is not None:
            self._sums.close()
            self._sums = None
        self._object.close()

    def __enter__(self) -> GgmlPrograms:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _superfluous(program: str, method: str) -> bool:
    """Programs that ``method`` does not attach need not be verified either."""
    return program in ("on_entry", "on_return") and method == "session"


def _pid_means_thread(release: str) -> bool:
    """Whether a multi link's pid is taken for one thread: Linux 6.6 to 6.9 (fixed in 6.10).

    A stable kernel may have the fix; attaching for every process is right there too, and only
    costs other users of the same file a trap.
    """
    numbers = re.match(r"(\d+)\.(\d+)", release)
    return numbers is not None and (6, 6) <= (int(numbers[1]), int(numbers[2])) < (6, 10)


def _cookie(probe: Probe) -> int:
    return probe.level | probe.moved << 8 | probe.template << 24


def _try_method(obj: BpfObject, method: str) -> None:
    """Whether the kernel attaches this way at all: on our own program file, for ourselves.

    Older kernels load the programs and refuse the link (EINVAL), so only trying tells.
    """
    if method == "perf":
        return
    program = obj.program_fd("on_session" if method == "session" else "on_entry")
    trial: Callable[[], Link] = lambda: attach_multi(  # noqa: E731
        program, "/proc/self/exe", [_own_text_offset()], [0], pid=os.getpid(), session=method == "session"
    )
    trial().close()


def _own_text_offset() -> int:
    """File offset of some executable byte of our own interpreter: where its entry point is."""
    with open("/proc/self/exe", "rb") as file:
        head = file.read(64)
        entry, table = struct.unpack_from("=QQ", head, 24)
        size, count = struct.unpack_from("=HH", head, 54)
        file.seek(table)
        headers = file.read(size * count)
    for i in range(count):
        kind, _, offset, address, _, length = struct.unpack_from("=IIQQQQ", headers, i * size)
        if kind == 1 and address <= entry < address + length:
            return int(entry - address + offset)
    raise MachineError("this Python's own program file has no entry point", "use Debian's /usr/bin/python3")


@functools.cache
def possible_cpus() -> int:
    """How many values a per-CPU map holds (sparse numbering included): fixed when the kernel boots,
    and asked for with every drain."""
    with open("/sys/devices/system/cpu/possible", encoding="ascii") as file:
        text = file.read().strip()
    try:
        return int(text.rpartition(",")[2].rpartition("-")[2]) + 1
    except ValueError as error:
        raise MachineError(f"/sys/devices/system/cpu/possible holds {text!r}") from error


def unbatched(ops: Records) -> Records:
    """The op hits (struct op_hit) in records of ring "ops"; other programs send them one by one."""
    if "hit" not in (ops.dtype.names or ()):
        return ops
    hits = ops["hit"]
    width = hits.shape[1]
    used: Records = hits[np.arange(width) < np.minimum(ops["count"], width)[:, None]]
    return used


__all__ = ["METHODS", "Drained", "GgmlPrograms", "Probe", "possible_cpus", "unbatched"]
