# SPDX-License-Identifier: Apache-2.0
"""Finding engines: who maps their code, told by the kernel and looked into on a thread of its own.

The loop asks :meth:`Scout.poll` for news. A process is a candidate when it maps a file that is
an engine's or was never looked into; each file is looked into once, whatever process maps it.
Every process is looked at when the daemon starts, every ``scan_every`` seconds, and when the
kernel says that announcements were lost. Where it gives none, new processes are sought every
second and all of them every ten.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from ..errors import MachineError, ProfinferError, TargetEnded, defect
from ..kernel.mmapwatch import MmapWatch
from ..target.catalogue import load_catalogue
from ..target.cgroup import Membership, membership
from ..target.factscache import FactsCache
from ..target.inspect import TargetInfo, inspect_target
from ..target.process import (
    FileId,
    MappedFile,
    Process,
    cpu_seconds,
    executable_files,
    executable_ids,
    open_process,
)
from .heap import trim

FALLBACK_S = 1.0
FALLBACK_ALL_S = 10.0
TIMEOUT = 120.0
"""Of the clock on the wall: we give way to everybody, and a busy machine leaves us a small part."""
CLOSE_S = 15.0
"""How long the end waits for a look that is under way; the service manager waits for twice that."""
RENEW_S = 10.0
"""How often processors are looked at that may have been offline; each look wakes all of them."""
AGAIN_S = 2.0
"""Until a process is looked at again that could not be, for want of a descriptor or of memory."""
MAX_QUEUE = 4096
BATCH = 16
"""Processes whose new files are looked into together."""


@dataclass(frozen=True, slots=True)
class Found:
    """A process that has an engine, or something like one. ``info`` None: ``error`` says why not;
    whoever takes it closes it. ``used_s``: CPU seconds that it had used at ``looked_s`` (monotonic)."""

    process: Process
    info: TargetInfo | None
    error: ProfinferError | None
    member: Membership
    uid: int
    looked_s: float
    used_s: float


class Scout:
    """``wake``: called from the other thread when there is something to poll for."""

    def __init__(self, wake: Callable[[], None], scan_s: float) -> None:
        self.scan_s = scan_s
        self.cache = FactsCache()
        self._wake = wake
        self._watch: MmapWatch | None = None
        self.fallback: str | None = None
        """Why the kernel does not announce new code; None when it does."""
        self.refused: MachineError | None = None
        """Why some process could not be looked at; None when that did not happen."""
        self._catalogue = load_catalogue()
        self._queue: OrderedDict[int, None] = OrderedDict()
        self._scan_wanted = False
        self._scan_all = True
        self._results: deque[Found] = deque()
        self._changed: deque[int] = deque()
        self._watched: frozenset[int] = frozenset()
        self._looked: dict[int, frozenset[FileId]] = {}
        self._condition = threading.Condition()
        self._stop = False
        self._threads = [
            threading.Thread(target=work, name=name, daemon=True)
            for name, work in (("scout", self._run), ("scan", self._run_scans))
        ]
        self._next_scan = self._next_all = self._next_again = self._next_renewal = 0.0
        self._again: dict[int, float] = {}  # could not be looked at just now: when to try again
        self._lost = 0
        self.scans = self.looks = self.dropped = 0
        self._defects: deque[str] = deque(maxlen=16)

    def start(self, now_s: float) -> None:
        """Announcements are listened to first, so that nothing falls between them and the first scan."""
        try:
            self._watch = MmapWatch()
        except MachineError as error:
            self.fallback = error.what
        self._scan(all_of_them=True)
        self._next_scan = now_s + (FALLBACK_S if self._watch is None else self.scan_s)
        self._next_all = now_s + FALLBACK_ALL_S
        for thread in self._threads:
            thread.start()

    @property
    def lost(self) -> int:
        """Announcements that the kernel could not keep for us."""
        return self._lost

    # ---- the loop's side ----------------------------------------------------------------

    def poll(self, now_s: float, watched: frozenset[int]) -> tuple[list[Found], list[int]]:
        """(processes found, watched ones that have mapped new code of an engine)."""
        self._watched = watched
        ours = os.getpid()
        if self._watch is not None:
            for mapped in self._watch.read():
                if mapped.pid != ours and self.cache.verdict((mapped.dev, mapped.inode)) is not False:
                    self.look_at(mapped.pid)
            renewed = False
            if now_s >= self._next_renewal:
                self._next_renewal = now_s + RENEW_S
                renewed = self._watch.renew()
            if renewed or self._watch.lost > self._lost:
                self._lost = self._watch.lost
                self._scan(all_of_them=True)
        if now_s >= self._next_scan:
            every = self._watch is not None or now_s >= self._next_all
            if every:
                self._next_all = now_s + FALLBACK_ALL_S
            self._next_scan = now_s + (FALLBACK_S if self._watch is None else self.scan_s)
            self._scan(all_of_them=every)
        if now_s >= self._next_again:
            self._next_again = now_s + AGAIN_S
            with self._condition:
                due = [pid for pid, at in self._again.items() if now_s >= at]
                for pid in due:
                    del self._again[pid]
            for pid in due:
                self.look_at(pid)
        with self._condition:
            found, changed = list(self._results), list(self._changed)
            self._results.clear()
            self._changed.clear()
        return found, changed

    def defects(self) -> list[str]:
        """What went wrong since this was last asked, and ended one look."""
        found = []
        while self._defects:
            found.append(self._defects.popleft())
        return found

    def descriptors(self) -> list[int]:
        """They become readable when the kernel has announced something."""
        return [] if self._watch is None else self._watch.descriptors()

    def look_at(self, pid: int) -> None:
        """A process that may have an engine."""
        with self._condition:
            if len(self._queue) >= MAX_QUEUE:
                self.dropped += 1
                self._scan_wanted = self._scan_all = True  # nobody is forgotten
            else:
                self._queue[pid] = None
            self._condition.notify_all()

    def look_later(self, pid: int, at_s: float) -> None:
        """Have a process looked at once it is so late, if it is not before."""
        with self._condition:
            self._again[pid] = min(at_s, self._again.get(pid, at_s))

    def _scan(self, *, all_of_them: bool) -> None:
        with self._condition:
            self._scan_wanted = True
            self._scan_all = self._scan_all or all_of_them
            self._condition.notify_all()

    def rescan(self) -> None:
        """Look at every process again, as if none had been seen."""
        with self._condition:
            self._looked.clear()
        self._scan(all_of_them=True)

    def close(self) -> None:
        """May be called twice."""
        with self._condition:
            self._stop = True
            self._condition.notify_all()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(CLOSE_S)
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        while self._results:
            info = self._results.pop().info
            if info is not None:
                info.close()

    # ---- the thread's side --------------------------------------------------------------

    def _run(self) -> None:
        """Those who were announced."""
        while True:
            with self._condition:
                while not (self._stop or self._queue):
                    self._condition.wait()
                if self._stop:
                    return
                pids = [self._queue.popitem(last=False)[0] for _ in range(min(BATCH, len(self._queue)))]
            self._look_safely(pids)

    def _run_scans(self) -> None:
        """Everybody; takes many seconds the first time, and holds up nobody who is announced."""
        while True:
            with self._condition:
                while not (self._stop or self._scan_wanted):
                    self._condition.wait()
                if self._stop:
                    return
                every, self._scan_wanted, self._scan_all = self._scan_all, False, False
            try:
                pids = self._candidates(every)
            except OSError:  # no descriptor, no memory just now
                with self._condition:
                    self._scan_wanted, self._scan_all = True, self._scan_all or every
                    self._condition.wait(AGAIN_S)
                continue
            while pids and not self._stop:
                self._look_safely(pids[:BATCH])
                pids = pids[BATCH:]
            self.scans += 1
            trim()  # the next scan may be hours away

    def _candidates(self, every: bool) -> list[int]:
        """Processes to look at, the largest first: a model takes room."""
        ours = os.getpid()
        found: list[tuple[int, int]] = []
        alive = {int(name) for name in os.listdir("/proc") if name.isdigit()}
        for pid in list(self._looked):
            if pid not in alive:
                self._looked.pop(pid, None)  # the other thread may have been quicker
        for pid in alive:
            if pid == ours or (pid in self._looked and not every):
                continue
            try:
                with open(f"/proc/{pid}/statm", "rb") as file:
                    pages = int(file.read().split()[1])
            except (OSError, IndexError, ValueError):
                continue  # it ended
            if pages:  # kernel threads have none
                found.append((-pages, pid))
        return [pid for _, pid in sorted(found)]

    def _look_safely(self, pids: list[int]) -> None:
        """A defect that some process brings to light must not end the search for all others."""
        try:
            self._look(pids)
        except Exception as error:  # noqa: BLE001 - it is said
            for pid in pids:
                self._looked.pop(pid, None)
            self._defects.append(defect(error).what)
            self._wake()

    def _look(self, pids: list[int]) -> None:
        mapped: dict[int, list[MappedFile]] = {}
        for pid in pids:
            try:
                ids = executable_ids(pid)
                if self._looked.get(pid) == ids and all(self.cache.verdict(one) is False for one in ids):
                    continue
                mapped[pid] = executable_files(pid)
                self._looked[pid] = ids
            except MachineError as error:
                self._looked.pop(pid, None)
                self.refused = error
            except ProfinferError:
                self._looked.pop(pid, None)  # it ended
            except OSError:  # no descriptor, no memory just now
                self._looked.pop(pid, None)
                self.look_later(pid, 0.0)
        missing: dict[FileId, tuple[MappedFile, str]] = {}
        for pid, files in mapped.items():
            for file in self.cache.unknown(files):
                missing.setdefault((file.dev, file.inode), (file, f"/proc/{pid}/root"))
        try:
            self.cache.learn(list(missing.values()), self._catalogue, TIMEOUT)
        except (OSError, ProfinferError):
            # No child could be started just now (no descriptor, no memory): later again.
            for pid in mapped:
                self._looked.pop(pid, None)
            for pid in mapped:
                self.look_later(pid, 0.0)
            return
        for pid, files in mapped.items():
            again_s = self.cache.again_s((f.dev, f.inode) for f in files)
            if again_s is not None:
                # A file could not be looked into, which says nothing about it.
                self._looked.pop(pid, None)
                self.look_later(pid, again_s)
            if any(self.cache.verdict((f.dev, f.inode)) for f in files):
                self._one(pid)

    def _one(self, pid: int) -> None:
        self.looks += 1
        if pid in self._watched:
            with self._condition:
                self._changed.append(pid)
            self._wake()
            return
        try:
            process = open_process(pid)
            member, uid = membership(pid), os.stat(f"/proc/{pid}").st_uid
        except (OSError, ProfinferError):
            return  # it ended, or is no process that could be profiled
        looked_s, used_s = time.monotonic(), cpu_seconds(pid)
        info: TargetInfo | None = None
        error: ProfinferError | None = None
        try:
            info = inspect_target(process, self._catalogue, TIMEOUT, cache=self.cache)
        except TargetEnded:
            return
        except MachineError as caught:
            error, self.refused = caught, caught
        except ProfinferError as caught:
            error = caught
        except OSError:
            self.look_later(pid, 0.0)
            return
        except Exception as caught:  # noqa: BLE001 - a defect that one process meets is that one's
            error = defect(caught)
        with self._condition:
            self._results.append(Found(process, info, error, member, uid, looked_s, used_s))
        self._wake()
