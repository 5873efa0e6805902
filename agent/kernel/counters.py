# SPDX-License-Identifier: Apache-2.0
"""Performance events of a process's threads, by op: opened here, read in the kernel at every op.

An event that this machine does not have is absent with the kernel's reason (case C09). Threads
are looked for again and again, each has events of its own (case C58).
"""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import struct
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ...probes.build import find_object
from ..model.eventdata import Events
from ..model.eventsums import Count, EventSums, Kind
from ..model.roles import op_role
from ..tasks import gone, threads_of
from .bpfsys import strerror
from .libbpf import BpfObject
from .links import Link, attach_multi, attach_perf
from .perfsys import ABSENT_ERRNOS, EventSpec, Reading, open_thread_event

MAX_EVENTS = 8
MAX_THREADS = 512

Open = Callable[[EventSpec, int], int]


class Counters:
    """The events ``specs`` of process ``pid``. Close it.

    ``open_event`` is for tests. Raises MachineError when the program does not load.
    """

    def __init__(
        self,
        pid: int,
        specs: Sequence[EventSpec],
        method: str,
        *,
        open_event: Open = open_thread_event,
    ) -> None:
        self._pid = pid
        self._open_event = open_event
        self._method = "perf" if method == "perf" else "multi"
        self._links: list[Link] = []
        self._threads: dict[int, tuple[int, list[int]]] = {}
        self._free = list(range(MAX_THREADS))[::-1]
        reasons: dict[str, str] = {}
        self._specs = [spec for spec in specs[:MAX_EVENTS] if self._has(spec, reasons)]
        self.sums = EventSums([spec.name for spec in self._specs], reasons)
        self._object: BpfObject | None = None
        if self._specs:
            self._object = BpfObject(find_object("counters", platform.machine()))
            try:
                for program in self._object.programs.values():
                    program.as_uprobe(self._method)
                self._object.load()
                self._types = self._object.types()
            except BaseException:
                self.close()
                raise

    def _has(self, spec: EventSpec, reasons: dict[str, str]) -> bool:
        try:
            os.close(self._open_event(spec, self._pid))
        except OSError as error:
            number = error.errno or 0
            if number == errno.ESRCH:
                reasons[spec.name] = "the process has ended"
                return False
            why = ABSENT_ERRNOS.get(number, "the kernel refuses it")
            reasons[spec.name] = f"{why}: {strerror(number)}"
            return False
        return True

    def attach(self, path: str, ops: Sequence[int], fused: Sequence[int], graphs: Sequence[int]) -> None:
        """Read at these offsets of a file: entries of op functions, and of those that compute a norm
        and the product after it, and returns of graphs."""
        if self._object is None:
            return
        for name, offsets, ret in (
            ("on_count_graph_end", graphs, True),
            ("on_count_op", ops, False),
            ("on_count_fused", fused, False),
        ):
            fd = self._object.program_fd(name)
            if self._method == "perf":
                self._links += [attach_perf(fd, path, at, 0, self._pid, ret=ret) for at in offsets]
            elif offsets:
                self._links.append(attach_multi(fd, path, list(offsets), pid=self._pid, ret=ret))

    def set_layout(self, fields: Mapping[str, int]) -> None:
        """Where things are in a tensor, as in ``struct layout``."""
        if self._object is not None:
            names = ("t_op", "t_src", "t_type", "n_src", "t_view_src", "t_flags", "t_name")
            value = struct.pack("=8H", *(fields[name] for name in names), 0)
            self._object.map("count_layouts").update(struct.pack("=I", self._pid), value)

    def look(self) -> None:
        """Open the events of threads that are new, read all, and let go of those that ended."""
        if self._object is None:
            return
        present = threads_of(self._pid)
        for tid, (_, descriptors) in self._threads.items():
            self._read(tid, descriptors)
        for tid in gone(self._pid, self._threads, present):
            self._drop(tid)
        for tid in sorted(present - set(self._threads)):
            if not self._free:
                break
            self._add(tid, self._object)

    def _add(self, tid: int, obj: BpfObject) -> None:
        descriptors: list[int] = []
        try:
            for spec in self._specs:
                descriptors.append(self._open_event(spec, tid))  # noqa: PERF401 - those opened must be closed
        except OSError:
            for fd in descriptors:
                os.close(fd)
            return  # it has ended, or there are too many: its part is missing, not wrong
        slot = self._free.pop()
        table = obj.map("events")
        for index, fd in enumerate(descriptors):
            table.update(struct.pack("=I", slot * MAX_EVENTS + index), struct.pack("=i", fd))
        value = np.zeros(1, self._types.dtype("count_thread"))
        value["slot"], value["n_events"] = slot, len(descriptors)
        obj.map("count_threads").update(struct.pack("=I", tid), value.tobytes())
        self._threads[tid] = (slot, descriptors)

    def _read(self, tid: int, descriptors: Sequence[int]) -> None:
        for spec, fd in zip(self._specs, descriptors, strict=True):
            with contextlib.suppress(OSError, ValueError):
                now = Reading.of(fd)
                self.sums.thread(tid, spec.name, Count(now.value, now.enabled, now.running))

    def _drop(self, tid: int) -> None:
        slot, descriptors = self._threads.pop(tid)
        for fd in descriptors:
            os.close(fd)
        if self._object is not None:
            self._object.map("count_threads").delete(struct.pack("=I", tid))
            for index in range(len(descriptors)):
                self._object.map("events").delete(struct.pack("=I", slot * MAX_EVENTS + index))
        self._free.append(slot)

    def counted(self) -> dict[int, list[int]]:
        """By thread: what each event has counted between the first and the last reading at an op."""
        found = {}
        if self._object is not None:
            table, dtype = self._object.map("count_threads"), self._types.dtype("count_thread")
            for tid in self._threads:
                raw = table.lookup(struct.pack("=I", tid))
                if raw is not None:
                    row = np.frombuffer(raw, dtype)[0]
                    some = zip(row["last"], row["first"], strict=True)
                    found[tid] = [int(a["value"]) - int(b["value"]) for a, b in some][: len(self._specs)]
        return found

    def events(self, ops: Sequence[str], types: Sequence[str]) -> Events:
        """The figures so far; ``ops`` and ``types``: names from the engine's own tables."""
        if self._object is not None:
            table = self._object.map("count_sums")
            dtype = self._types.dtype("count_sum")
            for key in table.keys():  # noqa: SIM118 - a map, not a dict
                raw = table.lookup(key)
                tgid, op, kind, own, slot, leaf = struct.unpack("=3I2HQ", key)
                if raw is None or tgid != self._pid:
                    continue
                row = np.frombuffer(raw, dtype)[0]
                counts = [Count(int(e["value"]), int(e["enabled"]), int(e["running"])) for e in row["events"]]
                name = None if op == 0xFFFFFFFF else ops[op] if op < len(ops) else f"op_{op}"
                role, weight = "", False
                if name is not None and leaf:
                    role, weight = op_role(name, _text(row["name"]), slot)
                kind = kind if weight else own
                known = Kind(name, types[kind] if kind < len(types) else "", role)
                self.sums.op(key, known, int(row["calls"]), counts[: len(self._specs)])
        return self.sums.events(len(self._threads))

    def detach(self) -> None:
        """Take the probes away; what was counted can still be read."""
        while self._links:
            self._links.pop().close()

    def close(self) -> None:
        """Detach, close all events, unload. May be called twice."""
        self.detach()
        for tid in list(self._threads):
            self._drop(tid)
        if self._object is not None:
            self._object.close()
            self._object = None


def _text(name: bytes) -> str:
    return name.split(b"\0", 1)[0].decode("utf-8", "replace")
