# SPDX-License-Identifier: Apache-2.0
"""Watching one process: the target is looked into, probes are attached, records become numbers.

This is the one place where the rooms meet. Data flows one way: records from
``agent.kernel`` into the session of ``agent.model``; back flows only which graphs are
known and which layout was chosen.
"""

from __future__ import annotations

import contextlib
import dataclasses
import mmap
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType

from . import pace
from .bursts import BurstDriver, Probes
from .errors import MachineError, ProfinferError, TargetEnded, TargetError, UsageError
from .kernel.check import returns_under_seccomp, seccomp_mode
from .kernel.programs import Drained, GgmlPrograms, Probe
from .model.budget import BudgetConfig, Prices
from .model.records import Kind
from .model.report import RATIOS_NULL
from .model.session import Session
from .model.snapshot import Snapshot
from .model.tensors import Graph
from .prices import prices_here
from .settle import LayoutSettler, layout_fields
from .target.facts import FileInfo, HookSite, TargetInfo
from .target.inspect import inspect_target, start_child
from .target.layout import Layout
from .target.process import Process, alive, engine_files_changed, executable_ids, open_process
from .targetfacts import cpu_seconds, facts_for_model, thread_ids

Progress = Callable[[str], None]

LOOK_SECONDS = 1.0
"""How often the target's mappings are looked at for libraries loaded since (case C02)."""
MAX_HELD_EVENTS = 1 << 14
"""Events kept until a live graph has confirmed the layout; the oldest fall out."""
BUSY_SHARE = 0.5
"""Cores that a target uses while we attach, from which on it counts as computing."""
LAYOUT = 0
"""Index in the map "layouts": one target, one layout."""

GROUPS = {"op": "ops", "graph": "graphs", "call": "calls"}
"""Groups of links by level of the hook, in the order in which they are attached."""

SECCOMP_FILTER = 2
"""The mode of a sandboxed process in /proc/PID/status (design D13)."""


@dataclass(slots=True)
class Attached:
    """What was attached, for people and for the JSON."""

    method: str
    op_source: str | None
    complete: bool
    seconds: float
    sites: int
    busy: bool | None = None
    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        """Add a note, once: bursts and looks for libraries try again and again."""
        if text not in self.notes:
            self.notes.append(text)


class Attachment:
    """Probes on one process and the session that they feed. Close it, or use ``with``."""

    def __init__(
        self,
        process: Process,
        info: TargetInfo,
        programs: GgmlPrograms,
        *,
        ops: str,
        config: BudgetConfig | None = None,
        prices: Prices | None = None,
    ) -> None:
        self.process = process
        self.info = info
        self.seen_anything = False
        self._programs = programs
        self._ops = ops
        self._config, self._prices = config, prices
        self._driver: BurstDriver | None = None
        self._session: Session | None = None
        self._layout: Layout | None = None
        self._settler = LayoutSettler(info.layouts, info.tables)
        self._held: deque[Drained] = deque()
        self._held_events = 0
        self._dropped_events = 0
        self._attached: set[tuple[str, int]] = set()
        self._known_code = info.seen
        self._threads = frozenset(process.threads)
        self._next_look = time.monotonic() + LOOK_SECONDS
        self._pause, self._drained_at = pace.SETTLING, time.monotonic()
        self._begun_ns = time.monotonic_ns()
        self._final: Snapshot | None = None
        self.attached = Attached(programs.method, None, True, 0.0, 0)

    @classmethod
    def open(
        cls,
        pid: int,
        *,
        method: str = "auto",
        ops: str = "all",
        budget: BudgetConfig | None = None,
        btf_path: str | None = None,
        loader: str = "libbpf",
        progress: Progress = lambda line: None,
    ) -> Attachment:
        """Attach to the process ``pid``.

        ``ops``: all (a record per kernel), sampled (in bursts, as ``budget`` allows) or off.

        ``loader`` bcc does not sample. Raises TargetError, TargetEnded or MachineError; nothing is
        left attached then.
        """
        if loader == "bcc" and ops == "sampled":
            raise UsageError("--loader bcc cannot sample operators", "use --ops all or off")
        begun = time.monotonic()
        process = open_process(pid)
        used = cpu_seconds(process)
        if seccomp_mode(process.pid) == SECCOMP_FILTER:
            # Before anything is attached: some kernels kill such a process at its first return.
            returns_under_seccomp()
        progress(f"looking into process {process.pid}")
        if loader == "bcc":
            progress("compiling the probes with BCC, which takes some seconds")
        info, programs = _look_and_load(process, method, btf_path, loader, ops)
        try:
            # Before anything is attached: it may take seconds, once per machine.
            measured = ops != "off" and loader == "libbpf"
            mode = "sum" if ops == "sampled" else "trace"
            prices = prices_here(programs.method, mode, btf_path, progress) if measured else None
        except BaseException:
            programs.close()
            info.close()
            raise
        self = cls(process, info, programs, ops=ops, config=budget or BudgetConfig(), prices=prices)
        self.attached.notes += programs.notes
        try:
            self._attach_files(info.files)
            if not alive(process):
                raise TargetEnded(f"process {process.pid} ended while probes were attached")
        except BaseException:
            self.close()
            raise
        self._begun_ns = time.monotonic_ns()
        self.attached.seconds = time.monotonic() - begun
        # A generation that was under way kept a core busy; an idle server's threads sleep.
        self.attached.busy = cpu_seconds(process) - used > BUSY_SHARE * self.attached.seconds
        progress(
            f"attached to process {process.pid} in {self.attached.seconds * 1e3:.0f} ms "
            f"({self.attached.sites} sites, {programs.method})"
        )
        return self

    # ---- attaching ----------------------------------------------------------------------

    def _attach_files(self, files: Sequence[FileInfo]) -> None:
        if self._layout is None:
            assumed = layout_fields(self._settler.assumed, self.info.tables, chosen=False)
            self._programs.set_layout(LAYOUT, assumed)
        self._set_mode()
        failures: list[ProfinferError] = []
        for file in files:
            if file.file_id in self._attached:
                continue
            hooks = [h for h in file.hooks if self._wanted(h)]
            done = 0
            for level, group in GROUPS.items():
                some = [h for h in hooks if h.level == level]
                armed = self._driver is not None and self._driver.armed
                if group == "ops" and self._ops == "sampled" and not armed:
                    done += len(some)  # attached for bursts only
                else:
                    done += self._attach_hooks(group, file, some, failures)
            if done:
                self._attached.add(file.file_id)
                self.attached.sites += done
                if file.op_source is not None and self._ops != "off":
                    self.attached.op_source = self.attached.op_source or file.op_source
                    self.attached.complete = self.attached.complete and file.complete
        if self._ops == "sampled" and self._driver is None and self.attached.op_source is not None:
            self._driver = self._new_driver()
        # Only now: a graph whose operators have no probes (yet) would look uncovered.
        self._set_mode()
        if not self._attached:
            raise (
                failures[0]
                if failures
                else TargetError(
                    f"process {self.process.pid} has no function that could be probed",
                    "run another build of the engine",
                )
            )

    def _set_mode(self) -> None:
        if self._driver is not None:
            return  # it says when to sum
        constants = self._programs.types.constants()
        trace = self._ops == "all" and self.attached.op_source is not None
        mode = constants["OPS_TRACE" if trace else "OPS_OFF"]
        self._programs.set_target(self.process.pid, layout=LAYOUT, mode=mode)

    def _attach_group(self, group: str) -> int:
        """Attach all hooks of one group, in every file that has some; returns how many.

        When it raises, none is left: the next attempt would attach those a second time.
        """
        failures: list[ProfinferError] = []
        done = 0
        try:
            for file in self.info.files:
                hooks = [h for h in file.hooks if GROUPS.get(h.level) == group and self._wanted(h)]
                done += self._attach_hooks(group, file, hooks, failures)
        except BaseException:
            self._programs.detach(group)
            raise
        return done

    def _wanted(self, hook: HookSite) -> bool:
        # Splits on other backends are not looked at yet; a CPU split is an LV_CPU graph.
        if hook.event == "LV_BACKEND":
            return False
        return self._ops != "off" or hook.level != "op"

    def _attach_hooks(
        self, group: str, file: FileInfo, hooks: Sequence[HookSite], failures: list[ProfinferError]
    ) -> int:
        """All hooks of a file with few links; where that fails, each by itself (case C03)."""
        if not hooks:
            return 0
        probes = [self._probe(h) for h in hooks]
        try:
            self._programs.attach(group, file.open_path, self.process.pid, probes)
            return len(probes)
        except MachineError:
            raise
        except TargetError as error:
            if not alive(self.process):
                raise TargetEnded(f"process {self.process.pid} ended while probes were attached") from error
        done = 0
        for hook, probe in zip(hooks, probes, strict=True):
            try:
                self._programs.attach(group, file.open_path, self.process.pid, [probe])
                done += 1
            except TargetError as error:
                failures.append(error)
                self.attached.note(f"{hook.symbol} is not probed: {error.what}")
                if hook.level == "op":
                    self.attached.complete = False
        return done

    def _probe(self, hook: HookSite) -> Probe:
        levels = self._programs.types.constants()
        return Probe(levels[hook.event], hook.site.offset, hook.site.moved, hook.ret)

    # ---- running ------------------------------------------------------------------------

    def poll(self, timeout_s: float) -> None:
        """Drain for ``timeout_s`` seconds (0: once).

        Raises TargetError when no layout fits the live graph.
        """
        until = time.monotonic() + timeout_s
        while True:
            left = until - time.monotonic()
            if left > 0:
                time.sleep(min(self._pause, left))
            self._drain()
            if time.monotonic() >= until:
                return

    def _drain(self) -> None:
        fill, before, self._drained_at = self._programs.fill(), self._drained_at, time.monotonic()
        drained = self._programs.drain()
        if self._layout is None and "graph" in self.info.levels:
            self._settle(drained)
        else:
            # Without graphs there is no layout to wait for.
            self._session = self._session or self._open_session(None)
            self._feed(self._session, drained)
        now = time.monotonic()
        if self._driver is not None:
            with contextlib.suppress(TargetEnded):  # the caller asks whether it is alive
                self._driver.tick(now)
        if now >= self._next_look:
            self._next_look = now + LOOK_SECONDS
            self._look_for_libraries()
            self._sweep()
        self._pause = pace.pause(
            self._drained_at - before,
            fill,
            settling=self._layout is None,
            in_burst=self._driver is not None and self._driver.armed,
        )

    def _settle(self, drained: Drained) -> None:
        """Before the layout is chosen: hold the records, look at the snapshots."""
        self._hold(drained)
        layout = self._settler.look(drained.raws)
        if layout is None:
            return
        if layout != self._settler.assumed:
            # What was read so far was read at wrong places.
            self._programs.forget_graphs()
            if self._driver is not None:
                self._driver.forget()
            self._held = deque(_calls_only(one) for one in self._held)
        self._programs.set_layout(LAYOUT, layout_fields(layout, self.info.tables, chosen=True))
        self._layout = layout
        if self._session is None:
            self._session = self._open_session(layout)
        self._session.target = facts_for_model(self.info, layout, self.attached)
        self._session.losses.add("events", self._dropped_events)
        while self._held:
            self._feed(self._session, self._held.popleft())

    def _hold(self, drained: Drained) -> None:
        self._held.append(drained)
        self._held_events += len(drained.events)
        self.seen_anything |= len(_calls_only(drained).events) > 0
        while self._held_events > MAX_HELD_EVENTS and len(self._held) > 1:
            oldest = len(self._held.popleft().events)
            self._held_events -= oldest
            self._dropped_events += oldest

    def _unsettled(self) -> Session:
        """What calls tell by themselves, while no graph could be read (all of them may fail)."""
        session = self._new_session(None)
        for one in self._held:
            calls = _calls_only(one)
            session.feed(calls.events, calls.ops, calls.nodes, calls.ints, now_ns=time.monotonic_ns())
        return session

    def _feed(self, session: Session, drained: Drained) -> None:
        self.seen_anything |= len(drained.events) > 0
        session.feed(drained.events, drained.ops, drained.nodes, drained.ints, now_ns=time.monotonic_ns())
        for tgid, hash_ in session.take_confirmed():
            self._programs.confirm(tgid, hash_)
        for tgid, hash_ in session.take_resend():
            self._programs.resend(tgid, hash_)

    def _look_for_libraries(self) -> None:
        """Attach to engine libraries that were loaded since the last look (case C02)."""
        if not engine_files_changed(self.process, self._known_code):
            return
        try:
            self._known_code = executable_ids(self.process.pid)
            info = inspect_target(self.process)
        except TargetEnded:
            return  # the caller asks whether it is alive
        except ProfinferError as error:
            # What is attached already goes on.
            self.attached.note(f"new libraries were not looked into: {error.what}")
            return
        before, self.info = self.info, info
        before.close()
        if self._layout is None:
            self._settler = LayoutSettler(info.layouts, info.tables)
        try:
            self._attach_files(info.files)
        except TargetEnded:
            return
        except ProfinferError as error:
            self.attached.note(f"new libraries are not probed: {error.what}")
        if self._session is not None:
            self._session.target = facts_for_model(info, self._layout, self.attached)

    def _sweep(self) -> None:
        """What threads that are gone left open never returns (case C21).

        The kernel says so itself where the exit of threads is watched; this is for the rest.
        """
        threads = thread_ids(self.process)
        gone, self._threads = self._threads - threads, threads
        if gone and self._session is not None:
            self._session.sweep(gone, time.monotonic_ns())

    def alive(self) -> bool:
        """Whether the target still runs (and is not another process with its pid)."""
        return alive(self.process)

    def graphs(self) -> list[Graph]:
        """The graphs that are remembered with their nodes, the most recent ones."""
        return [] if self._session is None else [graph for _, graph in self._session.graphs()]

    def snapshot(self) -> Snapshot:
        """Everything seen so far; after :meth:`close`, the last state."""
        if self._final is not None:
            return self._final
        session = self._session or self._unsettled()
        stats: dict[str, float] = {**self._programs.stats()}
        stats["recursion_misses"] = sum(self._programs.recursion_misses().values())
        if self._prices is not None:
            stats["ns_per_hit"] = self._prices.op_ns
        snapshot = session.snapshot(time.monotonic_ns(), stats)
        if self._driver is not None:
            snapshot = self._driver.describe(snapshot)
            # A session before the first graph does not know that it will be sampled.
            kept = tuple(note for note in snapshot.notes if note != RATIOS_NULL)
            snapshot = dataclasses.replace(snapshot, notes=kept)
        notes = [*self.info.notes, *self.attached.notes]
        if self._layout is None and self._settler.reason is not None:
            notes.append(f"graphs: none could be read yet, {self._settler.reason}")
        return dataclasses.replace(snapshot, notes=(*notes, *snapshot.notes))

    def _new_driver(self) -> BurstDriver:
        if self._config is None or self._prices is None:
            raise ValueError("sampling needs a budget and prices")
        probes = Probes(self._attach_group, self._programs.detach)
        driver = BurstDriver(self._programs, self.process.pid, probes, self._prices, self._config, LAYOUT)
        if self._session is not None:
            driver.bind(self._session)
        return driver

    def _open_session(self, layout: Layout | None) -> Session:
        session = self._new_session(layout)
        if self._driver is not None:
            self._driver.bind(session)
        return session

    def _new_session(self, layout: Layout | None) -> Session:
        tables = self.info.tables
        return Session(
            tables.ops if tables else (),
            tables.types if tables else None,
            facts_for_model(self.info, layout, self.attached),
            self._begun_ns,
            unary=tables.unary if tables else (),
            glu=tables.glu if tables else (),
        )

    def close(self) -> None:
        """Detach. The last snapshot stays available. May be called twice."""
        if self._final is None:
            try:
                if self._driver is not None:
                    self._driver.stop()
                if self._session is not None:
                    self._feed(self._session, self._programs.drain())
                    self._session.finish(time.monotonic_ns())
                if self._driver is not None:
                    self._driver.finish()
                self._final = self.snapshot()
            finally:
                self._programs.close()
                self.info.close()

    def __enter__(self) -> Attachment:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _look_and_load(
    process: Process, method: str, btf_path: str | None, loader: str, ops: str
) -> tuple[TargetInfo, GgmlPrograms]:
    """Look into the target while the kernel verifies the programs: both take a tenth of a second."""
    kind: type[GgmlPrograms] = GgmlPrograms
    if loader == "bcc":
        from .kernel.bcc_loader import BccPrograms

        kind = BccPrograms
    # Only a full trace has records for every kernel; a ring counts twice in our memory.
    rings = {} if ops == "all" else {"ops": mmap.PAGESIZE}
    child = start_child()
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(kind.load, method, btf_path=btf_path, ring_bytes=rings)
        try:
            info = inspect_target(process, child=child)
        except BaseException:
            if loading.exception() is None:
                loading.result().close()
            raise
        try:
            return info, loading.result()
        except BaseException:
            info.close()
            raise


def _calls_only(drained: Drained) -> Drained:
    """The records of calls: they need no layout."""
    kind = drained.events["kind"]
    calls = (kind == Kind.CALL_BEGIN) | (kind == Kind.CALL_END) | (kind == Kind.CALL_ABANDONED)
    return Drained(
        drained.events[calls], drained.ops[:0], drained.nodes[:0], drained.ints[:0], drained.raws[:0]
    )
