# SPDX-License-Identifier: Apache-2.0
"""The programs that count and time calls of any engine: loading, telling, reading.

One set of programs serves many processes: everything they keep is by process.
"""

from __future__ import annotations

import platform
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from ...probes.build import find_object
from ..errors import MachineError, ProfinferError
from . import bpfsys
from .libbpf import BpfObject, load_degrading
from .links import Link, attach_multi, attach_perf, attach_raw_tracepoint, close_together
from .programs import METHODS, _pid_means_thread, _try_method, possible_cpus
from .ring import Ring

ENTRY_ONLY, STEPPED = 1 << 32, 2 << 32
UNLIMITED = (1 << 64) - 1
MAX_SUMS = 4096
Rows = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class CallProbe:
    """One site of one file. ``number``: of the call, as :meth:`CallPrograms.describe` was told;
    ``moved``: how far the stack pointer lies below its value at the function's entry; ``stepped``:
    the kernel does not emulate the instruction there."""

    number: int
    offset: int
    moved: int
    returns: bool
    stepped: bool = False

    @property
    def cookie(self) -> int:
        """What the program is told at this site."""
        flags = (0 if self.returns else ENTRY_ONLY) | (STEPPED if self.stepped else 0)
        return self.number | self.moved << 16 | flags


@dataclass(frozen=True, slots=True)
class CallPrices:
    """Nanoseconds of the calling thread, by how the probed instruction is executed: of a call that is
    watched, and of one that is over the limit."""

    watched: float
    stepped: float
    over: float
    over_stepped: float


@dataclass(frozen=True, slots=True)
class CallLimit:
    """What the calls of a set may cost in all: the frequent ones up to ``limit_ns``, others to ``hard_ns``.
    ``whole``: looked at only when a call begins that the others are inside or between."""

    limit_ns: int
    hard_ns: int
    prices: CallPrices
    whole: bool = False
    records: bool = False


@dataclass(frozen=True, slots=True)
class CallFamily:
    """Calls of one name: how many were watched, how many ``skipped``, what both cost; ``unwatched_ns``
    until now."""

    hits: int
    skipped: int
    spent_ns: int
    unwatched_ns: int


class CallPrograms:
    """The loaded programs, their maps and links. Close it, or end the process."""

    def __init__(self, obj: BpfObject, method: str, left_out: Mapping[str, str], records: bool) -> None:
        self._object, self.method, self.types = obj, method, obj.types()
        self.constants = self.types.constants()
        self.left_out = dict(left_out)
        self._links: dict[str, list[Link]] = {}
        self._sums, self._stats = obj.map("sums"), obj.map("stats")
        self._key, self._sum = self.types.dtype("call_key"), self.types.dtype("call_sum")
        self._ring: Ring | None = None
        if records:
            ring = obj.map("records")
            self._ring = Ring(ring.fd, ring.max_entries, self.types.dtype("call_record"))
        if "on_thread_exit" not in self.left_out:
            try:
                link = attach_raw_tracepoint(obj.program_fd("on_thread_exit"), "sched_process_exit")
                self._links[""] = [link]
            except MachineError as error:
                self.left_out["on_thread_exit"] = error.what

    @classmethod
    def load(
        cls, method: str = "auto", *, btf_path: str | None = None, records: bool = False
    ) -> CallPrograms:
        """Load for ``method`` (auto, session, multi, perf); ``records``: of each call, too.

        Raises MachineError saying what the kernel or this process lacks.
        """
        failures: list[ProfinferError] = []
        for candidate in METHODS if method == "auto" else (method,):
            try:
                return cls._load_one(candidate, btf_path, records)
            except MachineError as error:
                failures.append(error)
        raise failures[-1]

    @classmethod
    def _load_one(cls, method: str, btf_path: str | None, records: bool) -> CallPrograms:
        name = "calls_session" if method == "session" else "calls"
        unused = ("on_return",) if method == "session" else ()

        def configure(obj: BpfObject) -> list[str]:
            names = [n for n in obj.programs if n not in unused]
            for program in names:
                if program != "on_thread_exit":
                    way = "multi" if method == "session" and program != "on_session" else method
                    obj.programs[program].as_uprobe(way)
            if records:
                obj.set_max_entries("records", 4 << 20)
            return names

        path = find_object(name, platform.machine())
        obj, left_out = load_degrading(path, configure, ["on_thread_exit"], btf_path=btf_path)
        try:
            _try_method(obj, method)
            return cls(obj, method, {n: error.what for n, error in left_out.items()}, records)
        except BaseException:
            obj.close()
            raise

    # ---- what to watch ------------------------------------------------------------------

    def describe(self, number: int, conf: Mapping[str, Any]) -> None:
        """What is read of call ``number``, as :func:`.calldata.encode` says it."""
        value = np.zeros(1, self.types.dtype("call_conf"))
        for name in ("n_fields", "ok", "group", "ok_width", "has", "set", "family"):
            value[name] = conf[name]
        for index, row in enumerate(conf["fields"]):
            for name, item in row.items():
                value["fields"][name][0][index] = item
        self._object.map("confs").update(struct.pack("=I", number), value.tobytes())

    def set_table(self, number: int, bits: Mapping[int, int]) -> None:
        """Bits per element by value of a field."""
        value = np.zeros(1, self.types.dtype("call_table"))
        for index, width in bits.items():
            value["bits"][0][index] = width
        self._object.map("tables").update(struct.pack("=I", number), value.tobytes())

    def set_target(self, tgid: int, numbers: Sequence[int]) -> None:
        """Watch these calls of process ``tgid``, from when their sets have a limit."""
        for number in numbers:  # where their labels go when there is no room for more
            self._sums.update(self._key_bytes(tgid, number), bytes(self._sum.itemsize))

    def set_limit(self, tgid: int, number: int, limit: CallLimit) -> None:
        """What the calls of set ``number`` of a process may cost from now on, beside what they did cost."""
        key = struct.pack("=II", tgid, number)
        accounts = self._object.map("accounts")
        if accounts.lookup(key) is None:
            accounts.update(key, bytes(accounts.value_size))
        value = np.zeros(1, self.types.dtype("call_limit"))
        value["limit_ns"], value["hard_ns"] = limit.limit_ns, limit.hard_ns
        prices = limit.prices
        value["price_ns"][0] = [prices.watched, prices.stepped, prices.over, prices.over_stepped]
        value["flags"] |= self.constants["CT_RECORDS"] if limit.records else 0
        value["flags"] |= self.constants["CT_WHOLE"] if limit.whole else 0
        self._object.map("limits").update(key, value.tobytes())

    def spent_ns(self, tgid: int, number: int) -> int:
        """What the calls of set ``number`` did cost so far."""
        raw = self._object.map("accounts").lookup(struct.pack("=II", tgid, number))
        return 0 if raw is None else int(np.frombuffer(raw, self.types.dtype("call_account"))["spent_ns"][0])

    def family(self, tgid: int, number: int) -> CallFamily:
        """What is known of a family of calls."""
        row = self._family(tgid, number)
        closed_at, unwatched = int(row["closed_at"][0]), int(row["unwatched_ns"][0])
        if closed_at:
            unwatched += max(0, time.monotonic_ns() - closed_at)
        return CallFamily(int(row["hits"][0]), int(row["skipped"][0]), int(row["spent_ns"][0]), unwatched)

    def _family(self, tgid: int, number: int) -> Rows:
        kind = self.types.dtype("call_family")
        raw = self._object.map("families").lookup(struct.pack("=II", tgid, number))
        return np.frombuffer(raw, kind).copy() if raw is not None else np.zeros(1, kind)

    def watch_family(self, tgid: int, number: int, *, watched: bool) -> None:
        """Its probes are about to be attached, or are all gone: while they are there, the kernel writes
        down itself how long it did not look."""
        families, key = self._object.map("families"), struct.pack("=II", tgid, number)
        row, now = self._family(tgid, number), time.monotonic_ns()
        closed_at = int(row["closed_at"][0])
        if watched == (closed_at == 0) and families.lookup(key) is not None:
            return  # some of its probes may be there already: what the kernel adds meanwhile would be lost
        if closed_at:
            row["unwatched_ns"] += max(0, now - closed_at)
        row["closed_at"] = 0 if watched else now
        families.update(key, row.tobytes())

    def _key_bytes(self, tgid: int, number: int) -> bytes:
        key = np.zeros(1, self._key)
        key["tgid"], key["call"], key["state"] = tgid, number, self.constants["CK_OVERFLOW"]
        return key.tobytes()

    def forget_target(self, tgid: int) -> None:
        """Stop looking at a process, and drop what was added up of it."""
        for name in ("limits", "accounts", "families"):
            some = self._object.map(name)
            for raw in some.keys():  # noqa: SIM118  (a map, not a dict)
                if struct.unpack("=II", raw)[0] == tgid:
                    some.delete(raw)
        for raw in self._sums.keys():  # noqa: SIM118  (a map, not a dict)
            if int(np.frombuffer(raw, self._key)["tgid"][0]) == tgid:
                self._sums.delete(raw)

    # ---- links --------------------------------------------------------------------------

    def attach(self, group: str, path: str, pid: int, probes: Sequence[CallProbe]) -> None:
        """Attach ``probes`` of the file ``path`` for process ``pid``; all or nothing.

        ``group`` names them for :meth:`detach`. Raises TargetError or MachineError.
        """
        new: list[Link] = []
        try:
            if self.method == "perf":
                for probe in probes:
                    if probe.returns:  # first: a return without its entry is merely ignored
                        new.append(self._perf("on_return", path, probe, pid, ret=True))
                    new.append(self._perf("on_entry", path, probe, pid, ret=False))
            else:
                new += self._multi(path, 0 if _pid_means_thread(platform.release()) else pid, probes)
        except BaseException:
            for link in new:
                link.close()
            raise
        self._links.setdefault(group, []).extend(new)

    def _perf(self, program: str, path: str, probe: CallProbe, pid: int, *, ret: bool) -> Link:
        fd = self._object.program_fd(program)
        return attach_perf(fd, path, probe.offset, probe.cookie, pid or -1, ret=ret)

    def _multi(self, path: str, pid: int, probes: Sequence[CallProbe]) -> list[Link]:
        both = [p for p in probes if p.returns]
        plan = [("on_entry", [p for p in probes if not p.returns], False, False)]
        if self.method == "session":
            plan.insert(0, ("on_session", both, False, True))
        else:
            plan = [("on_return", both, True, False), ("on_entry", list(probes), False, False)]
        links: list[Link] = []
        try:
            for program, some, ret, session in plan:
                if some:
                    links.append(
                        attach_multi(
                            self._object.program_fd(program), path, [p.offset for p in some],
                            [p.cookie for p in some], pid=pid, ret=ret, session=session,
                        )
                    )  # fmt: skip
        except BaseException:
            for link in links:
                link.close()
            raise
        return links

    def regroup(self, old: str, new: str) -> None:
        """Links of the group ``old`` belong to ``new`` from now on."""
        self._links.setdefault(new, []).extend(self._links.pop(old, []))

    def detach(self, *groups: str) -> None:
        """Close the links of these groups."""
        close_together([link for group in groups for link in self._links.pop(group, [])])

    # ---- what was seen ------------------------------------------------------------------

    def sums(self, tgid: int) -> list[tuple[Any, Any]]:
        """(struct call_key, struct call_sum) of everything added up of a process."""
        found: list[tuple[Any, Any]] = []
        for raw in self._sums.keys():  # noqa: SIM118
            key = np.frombuffer(raw, self._key)[0]
            if int(key["tgid"]) != tgid:
                continue
            value = self._sums.lookup(raw)
            if value is not None:
                found.append((key, np.frombuffer(value, self._sum)[0]))
        return found

    def records(self) -> Rows:
        """Records since the last time; none unless they were asked for."""
        if self._ring is None:
            return np.empty(0, self.types.dtype("call_record"))
        return self._ring.drain()

    def stats(self) -> dict[str, int]:
        """The counters of enum call_stat, by lower-case name without prefix, over all CPUs."""
        width = self._stats.value_size
        raw = bpfsys.map_lookup(self._stats.fd, struct.pack("=I", 0), width * possible_cpus())
        if raw is None:
            return {}
        table = np.frombuffer(raw, np.uint64).reshape(-1, width // 8).sum(axis=0)
        names = [n.removeprefix("CALL_ST_").lower() for n in self.types.enum("call_stat")]
        return dict(zip(names, (int(n) for n in table), strict=False))

    def close(self) -> None:
        """Detach everything and unload. May be called twice."""
        self.detach(*self._links)
        if self._ring is not None:
            self._ring.close()
            self._ring = None
        self._object.close()

    def __enter__(self) -> CallPrograms:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
