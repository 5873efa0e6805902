# SPDX-License-Identifier: Apache-2.0
"""One set of loaded programs for many targets.

Probes on calls and graphs belong to a *file*: they see every process that maps it, also one
that nobody knows of yet, from its first token (map "templates"). Op probes are armed for one
process, in bursts. Each target has a view of the programs that looks like programs of its own:
records come by process, counters too, layouts and the kernel's sums are parts of larger maps.
"""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ..errors import TargetError
from ..kernel.programs import Drained, GgmlPrograms, Probe, Records, possible_cpus
from ..target.facts import TargetInfo
from ..target.process import FileId
from .room import lacking

if TYPE_CHECKING:
    from ..callbook import CallBook
    from ..causes import CauseOptions, Causes

REGIONS = 8
"""Targets whose operators can be sampled at the same time: parts of the kernel's sums."""
REGION_SUMS = 16384
LAYOUTS, TEMPLATES = 64, 256
MAX_UNUSED_FILES = 48
"""Files that stay probed although nobody has them mapped any more, for the next process's first token."""
MAX_STRANGERS, STRANGER_EVENTS, STRANGER_S = 64, 4096, 10.0
"""Processes that were seen before they were looked into: how many, how much of each, how long."""
SPANS_BYTES, FAULTS_BYTES = 128 << 10, 128 << 10
"""Rings of waits and of page faults: 1,600 and 2,300 records between two drains."""
CAUSE_THREADS = 2048
MINOR_PER_SECOND = 2000
"""Minor page faults of a target that are looked at one by one; of the others only the number is known."""
CAUSE_FILES, CAUSE_BYTES, CPU_BYTES = 48, 4 << 20, 4096
"""What the programs on the scheduler and page faults take: descriptors (and four per CPU), memory."""
FREE_FILES, FREE_BYTES = 64, 8 << 20
"""What they have to leave."""
RINGS = ("events", "ops", "nodes", "ints", "raws")


@dataclass(slots=True)
class _FileLink:
    """Probes of one level on one file, for every process. ``users``: targets that want them."""

    name: str
    path: str
    group: str
    probes: tuple[Probe, ...]
    template: int
    attached: bool = False
    since_ns: int = 0
    users: set[int] = field(default_factory=set)
    unused_since: float | None = None


@dataclass(slots=True)
class _File:
    fd: int
    version: tuple[int, int]
    template: int
    links: dict[tuple[Probe, ...], _FileLink] = field(default_factory=dict)


@dataclass(slots=True)
class _Stranger:
    since: float
    parts: list[Drained] = field(default_factory=list)
    events: int = 0


class SharedPrograms:
    """The programs, what is attached to files, and who gets which record."""

    def __init__(self, programs: GgmlPrograms, method: str = "auto", btf_path: str | None = None) -> None:
        self.programs = programs
        self._method, self._btf_path = method, btf_path
        self._calls: CallBook | None = None
        self.causes: Causes | None = None
        """Scheduler and page faults of all targets; see :meth:`load_causes`."""
        self._cause_entries: dict[str, int] = {}
        self._views: dict[int, TargetPrograms] = {}
        self._files: dict[FileId, _File] = {}
        self._free_templates = list(range(TEMPLATES))[::-1]
        self._free_layouts = list(range(LAYOUTS))[::-1]
        self._free_regions = list(range(REGIONS))[::-1]
        self._layout_users: dict[int, set[object]] = {}
        self._opened: dict[tuple[FileId, tuple[int, int]], tuple[int, set[int]]] = {}
        self._strangers: OrderedDict[int, _Stranger] = OrderedDict()
        self._empty = {
            name: np.empty(0, programs.types.dtype(record))
            for name, record in zip(
                RINGS, ("event", "op_hit", "node_desc", "int_chunk", "raw_chunk"), strict=True
            )
        }
        self._numbered = 0
        self.spare_layout: Callable[[], bool] = lambda: False
        """Has whoever remembers layouts give one up; False when there is none to give."""
        self.foreign_events = 0
        """Events of processes that nobody watches (any more)."""

    @classmethod
    def load(cls, method: str, btf_path: str | None, targets: int) -> SharedPrograms:
        """Load; raises MachineError as :meth:`GgmlPrograms.load` does."""
        page = os.sysconf("SC_PAGESIZE")
        programs = GgmlPrograms.load(
            method,
            btf_path=btf_path,
            # A ring counts twice in our memory. Descriptors that find no room are sent again.
            ring_bytes={"ops": page, "nodes": 2 << 20, "sums": REGIONS * REGION_SUMS},
            targets=targets,
        )
        return cls(programs, method, btf_path)

    # ---- records ------------------------------------------------------------------------

    def drain(self, now_s: float) -> tuple[set[int], set[int]]:
        """Empty the rings; (targets that have records now, processes that nobody knows yet)."""
        drained = self.programs.drain()
        seen: set[int] = set()
        strangers: set[int] = set()
        for tgid, part in self._split(drained):
            view = self._views.get(tgid)
            if view is not None:
                view.give(part)
                seen.add(tgid)
            elif self._keep(tgid, part, now_s):
                strangers.add(tgid)
        return seen, strangers

    def _split(self, drained: Drained) -> Iterable[tuple[int, Drained]]:
        arrays = {name: getattr(drained, name) for name in RINGS}
        by = {name: array["tgid"] for name, array in arrays.items() if name != "ops" and len(array)}
        if not by:
            return
        first = int(next(iter(by.values()))[0])
        if all(bool((column == first).all()) for column in by.values()):
            # One engine is what most machines run: nothing is to be sorted or copied then.
            yield first, Drained(**{**arrays, "ops": self._empty["ops"]})
            return
        tgids = np.unique(np.concatenate([np.unique(column) for column in by.values()]))
        for tgid in tgids:
            parts = {
                name: arrays[name][by[name] == tgid] if name in by else self._empty[name] for name in RINGS
            }
            yield int(tgid), Drained(**parts)

    def _keep(self, tgid: int, part: Drained, now_s: float) -> bool:
        """Hold the records of a process that may become a target in a moment."""
        one = self._strangers.get(tgid)
        if one is None:
            while len(self._strangers) >= MAX_STRANGERS:
                self.foreign_events += self._strangers.popitem(last=False)[1].events
            one = self._strangers[tgid] = _Stranger(now_s)
        one.parts.append(part)
        one.events += len(part.events)
        while one.events > STRANGER_EVENTS and len(one.parts) > 1:
            gone = len(one.parts.pop(0).events)
            one.events -= gone
            self.foreign_events += gone
        return True

    def tidy(self, now_s: float, expire_s: float) -> set[FileId]:
        """Let go of strangers that stayed strangers, and of files that nobody maps any more.

        Returns files that were overwritten: their probes are gone, their targets are to be let go.
        """
        changed: set[FileId] = set()
        for tgid in [t for t, one in self._strangers.items() if now_s - one.since > STRANGER_S]:
            self.forget_stranger(tgid)
        for file_id, file in list(self._files.items()):
            if _version(file.fd) != file.version:
                # Overwritten in place: what is probed there now is anybody's guess.
                self._drop_file(file_id)
                changed.add(file_id)
                continue
            old = [
                link
                for link in file.links.values()
                if link.unused_since is not None and now_s - link.unused_since > expire_s
            ]
            if old and len(old) == len(file.links):
                self._drop_file(file_id)
        for file_id in self._unused()[: -MAX_UNUSED_FILES or None]:
            self._drop_file(file_id)
        return changed

    def _unused(self) -> list[FileId]:
        """Files that nobody has mapped any more, the one first that has been so for longest."""
        since = {
            file_id: max(link.unused_since or math.inf for link in file.links.values())
            for file_id, file in self._files.items()
            if file.links
        }
        return sorted((f for f, at in since.items() if at < math.inf), key=lambda f: since[f])

    def _drop_file(self, file_id: FileId) -> None:
        for link in self._files[file_id].links.values():
            self._detach(link)
        self._close_file(file_id)

    def make_room(self) -> bool:
        """Let go of a file that is not needed now, for one that is; False when all are."""
        unused = self._unused()
        if unused:
            self._drop_file(unused[0])
        return bool(unused)

    def forget_stranger(self, tgid: int) -> None:
        """Its records are of no use."""
        one = self._strangers.pop(tgid, None)
        if one is not None:
            self.foreign_events += one.events

    def fill(self) -> float:
        """Share of the fullest ring that waits."""
        return self.programs.fill()

    # ---- targets ------------------------------------------------------------------------

    def view(self, tgid: int, *, sums: bool) -> TargetPrograms:
        """Programs for one process; ``sums``: its operators shall be sampled (see ``region``).

        Raises TargetError when there is no room for one more.
        """
        self._check_layouts()
        try:
            self.programs.add_tally(tgid)
        except OSError as error:
            raise TargetError("too many processes are watched at once", "raise targets.max") from error
        region = self._free_regions.pop() if sums and self._free_regions else None
        view = TargetPrograms(self, tgid, region)
        stranger = self._strangers.pop(tgid, None)
        if stranger is not None:
            for part in stranger.parts:
                view.give(part)
        self._views[tgid] = view
        return view

    def give_region(self, view: TargetPrograms) -> bool:
        """Room for this target's sums; False when there is none."""
        if view.region is None:
            view.region = self._free_regions.pop() if self._free_regions else None
        return view.region is not None

    def ignore(self, tgid: int) -> None:
        """Do not look at this process although it maps a file that is probed."""
        self.programs.set_target(tgid, layout=0, mode=0, flags=self.programs.types.constants()["TG_IGNORED"])
        self.forget_stranger(tgid)

    def heed(self, tgid: int) -> None:
        """The opposite: nothing is said about this process any more."""
        self.programs.forget_target(tgid)

    def released(self, view: TargetPrograms) -> None:
        """Called by a view that is closed."""
        self._views.pop(view.tgid, None)
        self._leave_files(view.tgid)
        if view.region is not None:
            self._free_regions.append(view.region)

    def share_files(self, view: TargetPrograms, info: TargetInfo) -> TargetInfo:
        """The same with descriptors that all targets of a file share; they end with the view.

        ``info`` is used up: what it had open is closed or somebody else's.
        """
        info._open = False
        files = []
        for file in info.files:
            key = (file.file_id, _version(file.fd))
            if key in self._opened:
                os.close(file.fd)
            else:
                self._opened[key] = (file.fd, set())
            fd, users = self._opened[key]
            users.add(view.tgid)
            files.append(dataclasses.replace(file, fd=fd, open_path=f"/proc/self/fd/{fd}"))
        others = tuple(self.share_files(view, other) for other in info.others)
        return dataclasses.replace(info, files=tuple(files), others=others, _open=False)

    def _leave_files(self, tgid: int) -> None:
        for key, (fd, users) in list(self._opened.items()):
            users.discard(tgid)
            if not users:
                os.close(fd)
                del self._opened[key]

    # ---- layouts ------------------------------------------------------------------------

    def layout_slot(self, user: object) -> int:
        """An unused entry of map "layouts"."""
        self._check_layouts()
        slot = self._free_layouts.pop()
        self._layout_users[slot] = {user}
        return slot

    def _check_layouts(self) -> None:
        """That one is free. What is kept for the next process goes before somebody is turned away."""
        while not self._free_layouts:
            if not self.make_room() and not self.spare_layout():
                raise TargetError("too many builds of engines are watched at once", "raise the issue with us")

    def users(self, slot: int) -> int:
        """How many use an entry."""
        return len(self._layout_users.get(slot, ()))

    def use_layout(self, slot: int, user: object) -> None:
        """One more user of an entry."""
        self._layout_users[slot].add(user)

    def leave_layout(self, slot: int, user: object) -> None:
        """One less; the last one frees it."""
        users = self._layout_users.get(slot)
        if users is None:
            return
        users.discard(user)
        if not users:
            del self._layout_users[slot]
            self._free_layouts.append(slot)

    # ---- files --------------------------------------------------------------------------

    def attach(self, view: TargetPrograms, group: str, path: str, probes: Sequence[Probe]) -> int:
        """Probes of a file for every process; returns since when (ns) they are there."""
        status = os.stat(path)
        file_id = (f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}", status.st_ino)
        file = self._files.get(file_id)
        if file is None:
            if not self._free_templates and not self.make_room():
                raise TargetError("too many files of engines are watched at once", "raise the issue with us")
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            file = self._files[file_id] = _File(fd, _version(fd), self._free_templates.pop())
            self.use_layout(view.layout, file_id)
            self.programs.set_template(file.template, layout=view.layout, mode=0)
        key = tuple(probes)
        link = file.links.get(key)
        if link is None:
            self._numbered += 1
            name = f"file {self._numbered}"
            link = _FileLink(name, f"/proc/self/fd/{file.fd}", group, key, file.template)
            file.links[key] = link
        if not link.attached:
            try:
                self.programs.attach(link.name, link.path, 0, link.probes, template=link.template)
            except BaseException:
                del file.links[key]
                if not file.links:
                    self._close_file(file_id)
                raise
            link.attached, link.since_ns = True, time.monotonic_ns()
        link.users.add(view.tgid)
        link.unused_since = None
        return link.since_ns

    def leave(self, view: TargetPrograms, group: str | None, *, ended: bool) -> None:
        """This target needs the probes of ``group`` (None: any) no more.

        Of a target that ended they stay for the next process of that file; where all living
        ones shed the level, they go.
        """
        for file in self._files.values():
            for link in file.links.values():
                if view.tgid not in link.users or (group is not None and link.group != group):
                    continue
                link.users.discard(view.tgid)
                if link.users:
                    continue
                link.unused_since = time.monotonic()
                if not ended:
                    self._detach(link)

    def _detach(self, link: _FileLink) -> None:
        if link.attached:
            link.attached = False
            self.programs.detach(link.name, for_all=False)

    def _close_file(self, file_id: FileId) -> None:
        file = self._files.pop(file_id)
        os.close(file.fd)
        self.programs.set_template(
            file.template, layout=0, mode=0, flags=self.programs.types.constants()["TG_IGNORED"]
        )
        self._free_templates.append(file.template)
        for slot, users in list(self._layout_users.items()):
            if file_id in users:
                self.leave_layout(slot, file_id)

    @property
    def files(self) -> int:
        """Files that are probed."""
        return len(self._files)

    def entries(self) -> dict[str, int]:
        """Entries of the maps whose size depends on what targets do; from any thread."""
        found = {name: len(self.programs.map_keys(name)) for name in ("targets", "threads", "spares")}
        return {**found, **self._cause_entries}

    def call_book(self) -> CallBook:
        """Programs for calls that the catalogue describes by data, loaded when the first process has some.

        Raises MachineError.
        """
        if self._calls is None:
            from ..callbook import CallBook
            from ..kernel.callprograms import CallPrograms

            self._calls = CallBook(CallPrograms.load(self._method, btf_path=self._btf_path))
        return self._calls

    def load_causes(self, options: CauseOptions) -> Causes:
        """Programs on the scheduler and page faults, loaded when the first process is watched; what
        cannot be is in their ``notes``. They see every switch of this machine: see :meth:`unload_causes`."""
        if self.causes is None:
            from ..causes import Causes, CauseSizes

            self.causes = Causes()
            if not (options.sched or options.faults):
                return self.causes
            cpus = possible_cpus()
            why = lacking(CAUSE_FILES + 4 * cpus + FREE_FILES, CAUSE_BYTES + cpus * CPU_BYTES + FREE_BYTES)
            if why is not None:
                self.causes.notes.append(f"scheduler and page faults are not watched: {why}")
                return self.causes
            sizes = CauseSizes(SPANS_BYTES, FAULTS_BYTES, CAUSE_THREADS, MINOR_PER_SECOND)
            self.causes = Causes.load(self.programs, options, self._btf_path, sizes)
        return self.causes

    def tick_causes(self, now_s: float) -> None:
        """To be called once a second."""
        if self.causes is not None:
            self.causes.tick(now_s)
            self._cause_entries = self.causes.entries()

    def fail_causes(self, reason: str) -> None:
        """They are watched no more; targets say so."""
        self._cause_entries = {}
        if self.causes is not None:
            self.causes.close()
            self.causes.notes.append(f"scheduler and page faults are watched no more: {reason}")

    def unload_causes(self) -> None:
        """Nobody is watched: switches and faults of this machine cost nothing any more."""
        causes, self.causes = self.causes, None
        self._cause_entries = {}
        if causes is not None:
            causes.close()

    def close(self) -> None:
        """Detach and unload everything. May be called twice."""
        self.unload_causes()
        if self._calls is not None:
            self._calls.close()
            self._calls = None
        self.programs.close()
        for file in self._files.values():
            os.close(file.fd)
        self._files.clear()
        for fd, _ in self._opened.values():
            os.close(fd)
        self._opened.clear()


def _version(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_size, status.st_mtime_ns


class TargetPrograms(GgmlPrograms):
    """What one target sees of the shared programs. Nothing of the base class's state is there: every
    method that targets use is answered by the shared programs."""

    def __init__(self, shared: SharedPrograms, tgid: int, region: int | None) -> None:
        real = shared.programs
        self._shared, self._real = shared, real
        self.tgid, self.region = tgid, region
        self.method, self.types, self.left_out = real.method, real.types, real.left_out
        self.layout = shared.layout_slot(self)
        self._pending: list[Drained] = []
        self._mode = self._epoch = self._flags = self._generation = 0
        self._spare_keys: set[tuple[int, int]] = set()
        self._said = False
        self._open = True
        self.since_ns: int | None = None
        """Since when every level of it is seen."""
        self.hashes: set[int] = set()

    @property
    def waiting(self) -> bool:
        """Whether there are records that it has not taken yet."""
        return bool(self._pending)

    def give(self, part: Drained) -> None:
        """Records for this target."""
        if self.region:
            slots = part.events["sum_slot"]
            slots[slots > 0] -= self.region * self._slots_each()
        self._pending.append(part)

    def use_layout(self, slot: int) -> None:
        """Read its graphs by a layout that was chosen already."""
        self._shared.use_layout(slot, self)
        self._shared.leave_layout(self.layout, self)
        self.layout = slot

    # ---- what to watch ------------------------------------------------------------------

    def set_layout(self, index: int, fields: object) -> None:
        """As in the base class; ``index`` is ours whatever it says."""
        self._real.set_layout(self.layout, fields)  # type: ignore[arg-type]

    def set_target(
        self, tgid: int, *, layout: int, mode: int, epoch: int = 0, flags: int = 0, generation: int = 0
    ) -> None:
        """As in the base class, for this target."""
        self._mode, self._epoch, self._said = mode, epoch, True
        self._say()

    def _say(self) -> None:
        self._real.set_target(
            self.tgid,
            layout=self.layout,
            mode=self._mode,
            epoch=self._epoch,
            flags=self._flags,
            generation=self._generation,
        )

    def leave_out(self, tgid: int, flags: int) -> None:
        """As in the base class, for this target."""
        self._real.leave_out(self.tgid, flags)

    def confirm(self, tgid: int, hash_: int) -> None:
        """As in the base class."""
        self.hashes.add(hash_)
        self._real.confirm(tgid, hash_)

    def resend(self, tgid: int, hash_: int) -> None:
        """As in the base class."""
        self._real.resend(tgid, hash_)

    def forget_graphs(self, tgid: int | None = None) -> None:
        """Those of this target."""
        self._real.forget_graphs(self.tgid)

    # ---- sums ---------------------------------------------------------------------------

    def _slots_each(self) -> int:
        return self._real.capacity()[0] // REGIONS

    def capacity(self) -> tuple[int, int]:
        """Of this target's region."""
        return self._slots_each(), REGION_SUMS

    @property
    def _base(self) -> tuple[int, int]:
        if self.region is None:
            raise TargetError("the operators of too many targets are sampled at once")
        return self.region * self._slots_each(), self.region * REGION_SUMS

    def owned_slots(self) -> list[int]:
        """As in the base class, of this region."""
        first = self._base[0]
        return [slot - first for slot in self._real.owned_slots() if 0 <= slot - first < self._slots_each()]

    def free_slots(self, first: int, count: int) -> None:
        """As in the base class, of this region."""
        self._real.free_slots(self._base[0] + first, count)

    def graph_clock_ns(self, tgid: int) -> int:
        """As in the base class."""
        return self._real.graph_clock_ns(self.tgid)

    def stop_clock(self, tgid: int) -> None:
        """As in the base class."""
        self._real.stop_clock(tgid)

    def sums(self, first: int, count: int) -> Records:
        """As in the base class, of this region."""
        return self._real.sums(self._base[1] + first, count)

    def clear_sums(self, first: int, count: int) -> None:
        """As in the base class, of this region."""
        self._real.clear_sums(self._base[1] + first, count)

    def give_slot(self, tgid: int, hash_: int, slot: int, first: int) -> bool:
        """As in the base class, of this region; slot -1: none."""
        if slot < 0:
            return self._real.give_slot(tgid, hash_, -1, 0)
        return self._real.give_slot(tgid, hash_, self._base[0] + slot, self._base[1] + first)

    def give_spare(
        self, tgid: int, n_nodes: int, size_class: int, slot: int | None, first: int = 0, elements: int = 0
    ) -> None:
        """As in the base class, of this region."""
        if slot is None:
            self._spare_keys.discard((n_nodes, size_class))
            self._real.give_spare(tgid, n_nodes, size_class, None)
            return
        self._spare_keys.add((n_nodes, size_class))
        base = self._base
        self._real.give_spare(tgid, n_nodes, size_class, base[0] + slot, base[1] + first, elements)

    # ---- links --------------------------------------------------------------------------

    def attach(
        self, group: str, path: str, pid: int, probes: Sequence[Probe], template: int | None = None
    ) -> None:
        """Op probes for this process alone, all others for the file."""
        if group == "ops":
            self._real.attach(f"ops {self.tgid}", path, pid, probes)
            return
        since = self._shared.attach(self, group, path, probes)
        self.since_ns = max(since, self.since_ns or 0)
        bit = self._bit(group)
        if self._flags & bit:
            self._flags &= ~bit
            if self._said:
                self._say()

    def detach(self, group: str, *, for_all: bool = True) -> None:
        """As in the base class. A level that others still need is merely not looked at here."""
        if group == "ops":
            self._real.detach(f"ops {self.tgid}")
            return
        self._flags |= self._bit(group)
        self._generation += 1
        if self._said:
            self._say()
        self._shared.leave(self, group, ended=False)

    def _bit(self, group: str) -> int:
        return self.types.constants()["TG_NO_CALLS" if group == "calls" else "TG_NO_GRAPHS"]

    # ---- what was seen ------------------------------------------------------------------

    def drain(self) -> Drained:
        """What came for this target since the last time."""
        parts, self._pending = self._pending, []
        if not parts:
            return Drained(*(self._shared._empty[name] for name in RINGS))
        if len(parts) == 1:
            return parts[0]
        return Drained(*(np.concatenate([getattr(p, name) for p in parts]) for name in RINGS))

    def fill(self) -> float:
        """Of all targets together."""
        return self._real.fill()

    def stats(self, tgid: int | None = None) -> dict[str, int]:
        """Of this target."""
        return self._real.stats(self.tgid)

    def recursion_misses(self) -> dict[str, int]:
        """Are of the programs, not of one target."""
        return {}

    def close(self) -> None:
        """Leave: what belongs to files stays for others. May be called twice."""
        if not self._open:
            return
        self._open = False
        # Of a process that ended while it was attached to, nobody has taken what it did before.
        self._shared.foreign_events += sum(len(part.events) for part in self._pending)
        self._pending.clear()
        self._real.detach(f"ops {self.tgid}")
        self._shared.leave(self, None, ended=True)
        for n_nodes, size in self._spare_keys:
            self._real.give_spare(self.tgid, n_nodes, size, None)
        self._real.forget_target(self.tgid, self.hashes)
        self._real.stop_clock(self.tgid)
        if self.region is not None:
            # The next target here would take a slot that is owned for one that is being written to.
            self.free_slots(0, self._slots_each())
        self._shared.leave_layout(self.layout, self)
        self._shared.released(self)
