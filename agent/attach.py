# SPDX-License-Identifier: Apache-2.0
"""Watching one process: the target is looked into, probes are attached, records become numbers.

This is the one place where the rooms meet. Data flows one way: records from
``agent.kernel`` into the session of ``agent.model``; back flows only which graphs are
known and which layout was chosen.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

from .bursts import BurstDriver, Probes
from .callbook import CallBook
from .callkeeper import CallKeeper, has_levels
from .causekeeper import CauseKeeper
from .causes import CauseOptions, Causes
from .errors import ProfinferError, TargetEnded, TargetError, UsageError
from .held import HeldRecords, calls_only
from .hooks import GROUPS, Attached, Hooks
from .kernel.check import returns_under_seccomp, seccomp_mode
from .kernel.programs import Drained, GgmlPrograms
from .model.budget import BudgetConfig, Decision, Load, Prices
from .model.graphwork import Mark
from .model.plancache import Tables
from .model.records import LOST_STATS, Flag, Level, Records
from .model.report import RATIOS_NULL
from .model.session import Session, Settled
from .model.snapshot import Snapshot
from .model.tensors import Graph
from .model.tokens import Phase
from .opening import look_and_load
from .pace import SETTLING, Pace
from .prices import ASSUMED, prices_here
from .settle import LayoutSettler, layout_fields
from .target.backendname import backend_name
from .target.facts import FileInfo, TargetInfo
from .target.inspect import inspect_target
from .target.layout import Layout
from .target.process import (
    Process,
    alive,
    cpu_seconds,
    end_descriptor,
    engine_files_changed,
    executable_ids,
    model_files,
    open_process,
)
from .targetcauses import TargetCauses
from .targetfacts import facts_for_model
from .tasks import gone, threads_of
from .waking import Wakeup
from .whys import WhyOptions, Whys

Progress = Callable[[str], None]

LOOK_SECONDS = 1.0
"""How often the target's mappings are looked at for libraries loaded since (case C02)."""
TABLE_SECONDS = 0.01
"""How often it is asked whether a library has given out its functions: they are called at once."""
BUSY_SHARE = 0.5
"""Cores that a target uses while we attach, from which on it counts as computing."""
BUSY_SECONDS = 0.02
"""The kernel counts CPU time of who runs in ticks of up to 10 ms: two of them, or nothing is said of it."""
LAYOUT = 0
"""Index in the map "layouts": one target, one layout."""

SECCOMP_FILTER = 2
"""The mode of a sandboxed process in /proc/PID/status (design D13)."""


@dataclass(frozen=True, slots=True)
class Shared:
    """Where the programs watch other processes too, and somebody drives all attachments.

    ``inspect`` looks into the process again. That somebody drains, calls :meth:`Attachment.observe`
    and :meth:`Attachment.follow` for the budget, :meth:`Attachment.look` when code was mapped, and
    keeps ``causes`` going.
    """

    inspect: Callable[[Process], TargetInfo]
    calls: Callable[[], CallBook] | None = None
    """Gives programs for calls that are described by data, asked for when there is something to see
    (loading them takes the kernel 0.2 s); None: those are not watched."""
    layout: Layout | None = None
    """Chosen for the same files in another process, if it was."""
    causes: Causes | None = None
    """Scheduler and page faults, for all of them; None: not watched."""


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
        shared: Shared | None = None,
        causes: Causes | None = None,
    ) -> None:
        self._shared = shared
        self.process = process
        self.info = info
        self.seen_anything = False
        self.session_opened: list[Callable[[Session], None]] = []
        """Told of the session before anything is fed to it."""
        self.fed: list[Callable[[Drained, int], None]] = []
        """Told of every drain that a session was fed with, and when (ns)."""
        self.sinks: list[Callable[[Mapping[str, Records]], None]] = []
        """Told of what each drain found besides events, by kind: sched_spans, page_faults, barriers."""
        self._programs = programs
        self._causes = causes or (shared.causes if shared else None) or Causes()
        self._target_causes: TargetCauses | None = None
        self._ops = ops
        self._config, self._prices = config, prices
        self._driver: BurstDriver | None = None
        self._session: Session | None = None
        self._layout: Layout | None = shared.layout if shared is not None else None
        self._settler = LayoutSettler(info.layouts, info.tables)
        self._held = HeldRecords()
        self._attached: set[tuple[str, int]] = set()
        self._known_code = info.seen
        self._threads = set(process.threads)
        self._next_look = time.monotonic() + LOOK_SECONDS
        self._model_at, self._model_pause = 0.0, LOOK_SECONDS
        self._pace = Pace()
        self._pause, self._drained_at = SETTLING, time.monotonic()
        self._begun_ns = time.monotonic_ns()
        self._final: Snapshot | None = None
        self._keeper: CauseKeeper | None = None
        self._whys = Whys(process)
        self._ended_fd: int | None = None  # readable when the process has ended
        self.attached = Attached(programs.method, None, True, 0.0, 0)
        self._hooks = Hooks(process, programs, self.attached, ops)
        self._calls = CallKeeper(self.attached, config.budget_ratio if config else None)

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
        why: WhyOptions | None = None,
        causes: CauseOptions | None = None,
        kept: bool = False,
        progress: Progress = lambda line: None,
        watching: Callable[[], None] = lambda: None,
    ) -> Attachment:
        """Attach to the process ``pid``.

        ``ops``: all (a record per kernel), sampled (in bursts, as ``budget`` allows) or off.

        ``kept``: every record counts, and not only their sums: rings have more room.

        ``watching`` is called when all probes are in place, before ``progress`` is told so: who is told
        may act on it at once.

        ``loader`` bcc does not sample. Raises TargetError, TargetEnded or MachineError; nothing is
        left attached then.
        """
        if loader == "bcc" and ops == "sampled":
            raise UsageError("--loader bcc cannot sample operators", "use --ops all or off")
        begun = time.monotonic()
        process = open_process(pid)
        used = cpu_seconds(process.pid)
        if seccomp_mode(process.pid) == SECCOMP_FILTER:
            # Before anything is attached: some kernels kill such a process at its first return.
            returns_under_seccomp()
        progress(f"looking into process {process.pid}")
        if loader == "bcc":
            progress("compiling the probes with BCC, which takes some seconds")
        info, programs, loaded = look_and_load(
            process, method=method, btf_path=btf_path, loader=loader, ops=ops, causes=causes, kept=kept
        )
        try:
            # Before anything is attached: it may take seconds, once per machine.
            measured = ops != "off" and loader == "libbpf"
            mode = "sum" if ops == "sampled" else "trace"
            prices = prices_here(programs.method, mode, btf_path, progress) if measured else None
        except BaseException:
            loaded.close()
            programs.close()
            info.close()
            raise
        config = budget or BudgetConfig()
        self = cls(process, info, programs, ops=ops, config=config, prices=prices, causes=loaded)
        self.attached.notes += programs.notes
        self._ended_fd = end_descriptor(process)
        try:
            if loader == "libbpf":
                self._calls.options = {"method": method, "btf_path": btf_path}
            if not has_levels(info):
                self._look_at_calls(begun)
            self._attach_files(info.files)
            if not alive(process):
                raise TargetEnded(f"process {process.pid} ended while probes were attached")
            if why is not None:
                self._whys = Whys(process, why, info, programs.method)
        except BaseException:
            self.close()
            raise
        self._begun_ns = time.monotonic_ns()
        self.attached.seconds = time.monotonic() - begun
        # A generation that was under way kept a core busy; an idle server's threads sleep.
        self.attached.busy = cpu_seconds(process.pid) - used > BUSY_SHARE * self.attached.seconds
        watching()
        progress(
            f"attached to process {process.pid} in {self.attached.seconds * 1e3:.0f} ms "
            f"({self.attached.sites} sites, {programs.method})"
        )
        return self

    @classmethod
    def adopt(
        cls,
        process: Process,
        info: TargetInfo,
        programs: GgmlPrograms,
        shared: Shared,
        *,
        looked_s: float,
        used_s: float,
        ops: str,
        config: BudgetConfig,
        prices: Prices | None,
    ) -> Attachment:
        """Watch a process that was looked into, with programs that others use too. Errors as
        :meth:`open`; ``programs`` and ``info`` are closed then.

        ``used_s``: CPU seconds that it had used at ``looked_s`` (monotonic)."""
        self = cls(process, info, programs, ops=ops, config=config, prices=prices, shared=shared)
        if shared.calls is not None:
            self._calls.options = {"book": shared.calls}
        try:
            if not has_levels(info):
                self._look_at_calls(time.monotonic())
            self._attach_files(info.files)
            if not alive(process):
                raise TargetEnded(f"process {process.pid} ended while probes were attached")
        except BaseException:
            self.close()
            raise
        seconds = time.monotonic() - looked_s
        if seconds >= BUSY_SECONDS:
            self.attached.busy = cpu_seconds(process.pid) - used_s > BUSY_SHARE * seconds
        return self

    @property
    def _sees_graphs(self) -> bool:
        """Whether graphs on the CPU can be seen: while they run, waits count."""
        return any(hook.event == "LV_CPU" for file in self.info.files for hook in file.hooks)

    def _look_at_calls(self, now: float) -> None:
        """Watch calls that are described by data, and splits once other backends than the CPU compute."""
        if self._calls.offloads and not self._hooks.splits and self._attached:
            self._hooks.attach_splits([f for f in self.info.files if f.file_id in self._attached])
        self._calls.look(now, self.info, self._driver)

    def _keep_causes(self, now: float) -> None:
        """Watching waits and page faults stays within what tokens, graphs and calls leave over."""
        if self._keeper is None or self._config is None:
            return
        if self._driver is not None:
            free, graphs = self._driver.free_for_causes, self._driver.graphs_seen
            cost = self._keeper.keep(now, self._driver.busy_s, free, graphs=graphs)
            for part, seconds in cost.items():
                self._driver.causes_s[part] = self._driver.causes_s.get(part, 0.0) + seconds
            return
        totals = self._session.calls.totals.values() if self._session is not None else ()
        reported = sum(total.ns for total in totals) / 1e9
        self._keeper.keep(now, reported, self._config.budget_ratio, graphs=self._sees_graphs)

    def _settled(self, done: Settled, phase: Phase, mark: Mark) -> None:
        for root in done.call.graphs:
            if root.level == Level.SCHED and not any(run.flags & Flag.SAME for run in root.inner):
                self._calls.offloads = True

    def sample(self, prices: Prices) -> None:
        """Begin to sample operators, where only prices were missing; what was counted goes on."""
        if self._driver is not None:
            return
        self._ops = self._hooks.ops = "sampled"
        self._prices = prices
        if self._keeper is not None:
            self._keeper.prices = prices
        for file in self.info.files:
            if file.op_source is not None:
                self.attached.has_operators_of(file)
                self._attached.add(file.file_id)
        if self.attached.op_source is not None:
            self._driver = self._new_driver()
        if self._session is not None:
            self._session.target = facts_for_model(self.info, self._layout, self.attached)

    def seen_since(self, begun_ns: int, *, from_birth: bool) -> None:
        """From when on the process is seen: links that belong to its files may be older than we are.
        ``from_birth``: nothing was under way then."""
        self._begun_ns = begun_ns
        if from_birth:
            self.attached.busy = False

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
            done = 0
            for group in GROUPS.values():
                some = self._hooks.of(file, group)
                armed = self._driver is not None and self._driver.armed
                if group == "ops" and self._ops == "sampled" and not armed:
                    done += len(some)  # attached for bursts only
                else:
                    done += self._hooks.attach(group, file, some, failures)
            if done:
                self._causes.attach_barriers(file, self.process.pid)
                self._attached.add(file.file_id)
                self.attached.sites += done
                if self._ops != "off":
                    self.attached.has_operators_of(file)
        if self._ops == "sampled" and self._driver is None and self.attached.op_source is not None:
            self._driver = self._new_driver()
        # Only now: a graph whose operators have no probes (yet) would look uncovered.
        self._set_mode()
        if self._target_causes is None:
            self._target_causes = TargetCauses(self._causes, self.process, self.sinks, self._programs)
            if self._ops != "all" and self._config is not None and self._causes.parts():
                prices, ratio = self._prices or ASSUMED, self._config.budget_ratio
                self._keeper = CauseKeeper(self._target_causes, prices, ratio)
        if not self._attached and not self._calls.watching:
            self._calls.offloads = True  # calls may be all that there is
            self._look_at_calls(time.monotonic())
        if not self._attached and not self._calls.watching:
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

    def wait(self, timeout_s: float, wakeup: Wakeup | None = None) -> None:
        """Sleep until the rings are to be drained and drain them once; only sleep, if ``timeout_s``
        is over first, ``wakeup`` is rung, or the process has ended: for a caller that looks in
        between whether to go on."""
        due = self._drained_at + self._pause
        now = time.monotonic()
        if now < due:
            pause = min(due - now, timeout_s)
            if wakeup is None:
                time.sleep(pause)
            else:
                wakeup.sleep(pause, () if self._ended_fd is None else (self._ended_fd,))
            if time.monotonic() < due:
                return
        self._drain()

    def _drain(self) -> None:
        fill = max(self._programs.fill(), self._causes.fill())
        before, self._drained_at = self._drained_at, time.monotonic()
        drained = self._programs.drain()
        self._drain_causes()
        if self._layout is None and "graph" in self.info.levels:
            self._settle(drained)
        else:
            # Without graphs there is no layout to wait for.
            self._session = self._session or self._open_session(self._layout)
            self._feed(self._session, drained)
        self.seen_anything = self.seen_anything or self._calls.seen()
        now = time.monotonic()
        if self._shared is not None:
            return
        self._calls.keep(now, self._driver)
        self._keep_causes(now)
        if self._driver is not None:
            with contextlib.suppress(TargetEnded):  # the caller asks whether it is alive
                self._driver.tick(now)
        self._whys.tick(now)
        if now >= self._next_look:
            self._next_look = now + LOOK_SECONDS
            self.look()
            self.sweep()
            self._look_at_calls(now)
        self._pause = self._pace.pause(
            self._drained_at - before,
            fill,
            settling=self._layout is None,
            burst_s=self.burst_left_s,
        )
        if self._look_for_table():
            self._pause = min(self._pause, TABLE_SECONDS)

    def _look_for_table(self) -> bool:
        """Probe functions as soon as the process asks for them; whether some are still to come."""
        if not self._calls.awaits_table(self.info):
            return False
        if self._calls.table_was_given():
            self.look(again=True)
        return True

    def observe(self, now_s: float) -> Load | None:
        """What the budget's controller has to know; None: there is nothing for it to decide."""
        if self._shared is not None:
            self._look_for_table()
            self._look_at_calls(now_s)
            self._calls.keep(now_s, self._driver)
            self._keep_causes(now_s)
        return None if self._driver is None else self._driver.observe(now_s)

    def follow(self, decision: Decision, now_s: float) -> None:
        """Do as the controller says."""
        if self._driver is not None:
            with contextlib.suppress(TargetEnded):
                self._driver.follow(decision, now_s)

    @property
    def settling(self) -> bool:
        """Whether the layout is still to be chosen: every graph is sent in full meanwhile."""
        return self._layout is None and "graph" in self.info.levels

    @property
    def layout(self) -> Layout | None:
        """The layout by which its graphs are read; None while none was chosen."""
        return self._layout

    @property
    def burst_left_s(self) -> float | None:
        """How long probes stay that are there for a short time only, None when there are none."""
        if self._calls.hurried or (self._keeper is not None and self._keeper.hurried):
            return 0.0
        return None if self._driver is None else self._driver.left_s

    def _drain_causes(self) -> None:
        """After the events: a call is told with every wait in it."""
        if self._shared is None:
            self._causes.pump()

    def _settle(self, drained: Drained) -> None:
        """Before the layout is chosen: hold the records, look at the snapshots."""
        self._held.hold(drained)
        self.seen_anything |= len(calls_only(drained).events) > 0
        layout = self._settler.look(drained.raws)
        if layout is not None:
            self.settle_on(layout)

    def settle_on(self, layout: Layout) -> None:
        """This is the layout: a live graph fits it, of this process or of one with the same files."""
        if layout != self._settler.assumed:
            # What was read so far was read at wrong places.
            self._programs.forget_graphs()
            if self._driver is not None:
                self._driver.forget()
            self._held.keep_calls_only()
        fields = layout_fields(layout, self.info.tables, chosen=True)
        self._programs.set_layout(LAYOUT, fields)
        self._whys.set_layout(fields)
        self._layout = layout
        if self._session is None:
            self._session = self._open_session(layout)
        # One that was opened for calls alone, before the library of graphs was there, knows no names.
        self._session.plans.tables = self._names()
        self._session.target = facts_for_model(self.info, layout, self.attached)
        self._session.losses.add("events", self._held.dropped)
        for drained in self._held.take():
            self._feed(self._session, drained)

    def _unsettled(self) -> Session:
        """What calls tell by themselves, while no graph could be read (all of them may fail)."""
        session = self._new_session(None)
        for one in self._held:
            calls = calls_only(one)
            session.feed(calls.events, calls.ops, calls.nodes, calls.ints, now_ns=time.monotonic_ns())
        return session

    def _feed(self, session: Session, drained: Drained) -> None:
        now_ns = time.monotonic_ns()
        if len(drained.events):
            self.seen_anything = True
            self._find_model(session, now_ns / 1e9)
        session.feed(drained.events, drained.ops, drained.nodes, drained.ints, now_ns=now_ns)
        for listener in self.fed:
            listener(drained, now_ns)
        for tgid, hash_ in session.take_confirmed():
            self._programs.confirm(tgid, hash_)
        for tgid, hash_ in session.take_resend():
            self._programs.resend(tgid, hash_)

    def _find_model(self, session: Session, now_s: float) -> None:
        """Who was attached to while it was still being linked has its model only now that it computes."""
        if self.info.models or now_s < self._model_at:
            return
        self._model_pause *= 2  # it may be one that was read, and is no file any more
        self._model_at = now_s + self._model_pause
        with contextlib.suppress(ProfinferError):
            self.info.models = tuple(model_files(self.process.pid))
        if self.info.models:
            session.target = facts_for_model(self.info, self._layout, self.attached)

    def look(self, *, again: bool = False) -> None:
        """Attach to engine libraries that were loaded since the last look (case C02); ``again``: and
        to functions of the same libraries."""
        if not again and not engine_files_changed(self.process, self._known_code):
            return
        try:
            self._known_code = executable_ids(self.process.pid)
            info = self._shared.inspect(self.process) if self._shared else inspect_target(self.process)
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
            self._calls.add(info)
            self._attach_files(info.files)
            self._whys.look_into(info)
        except TargetEnded:
            return
        except ProfinferError as error:
            self.attached.note(f"new libraries are not probed: {error.what}")
        if self._session is not None:
            self._session.target = facts_for_model(info, self._layout, self.attached)

    def sweep(self) -> None:
        """What threads that are gone left open never returns (case C21).

        The kernel says so itself where the exit of threads is watched; this is for the rest.
        """
        threads = threads_of(self.process.pid)
        if self._shared is None:
            self._causes.tick(time.monotonic())
        ended = gone(self.process.pid, self._threads, threads)
        self._threads = threads | self._threads.difference(ended)
        if ended and self._session is not None:
            self._session.sweep(ended, time.monotonic_ns())

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
        if misses := self._programs.recursion_misses():  # a kernel that does not count them has none
            stats["recursion_misses"] = sum(misses.values())
        if self._prices is not None:
            stats["ns_per_hit"] = self._prices.op_ns
        snapshot = session.snapshot(time.monotonic_ns(), stats)
        if self._driver is not None:
            snapshot = self._driver.describe(snapshot)
            # A session before the first graph does not know that it will be sampled.
            kept = tuple(note for note in snapshot.notes if note != RATIOS_NULL)
            snapshot = dataclasses.replace(snapshot, notes=kept)
        if self._target_causes is not None:
            snapshot = self._target_causes.describe(snapshot, graphs=self._sees_graphs)
        if self._keeper is not None:
            snapshot = self._keeper.describe(snapshot)
        notes = [*self.info.notes, *self.attached.notes]
        if self._layout is None and self._settler.reason is not None:
            notes.append(f"graphs: none could be read yet, {self._settler.reason}")
        snapshot = self._calls.describe(snapshot, self.info)
        self.seen_anything |= self._calls.seen()
        return self._whys.describe(dataclasses.replace(snapshot, notes=(*notes, *snapshot.notes)))

    def _new_driver(self) -> BurstDriver:
        if self._config is None or self._prices is None:
            raise ValueError("sampling needs a budget and prices")
        probes = Probes(lambda group: self._hooks.attach_group(group, self.info.files), self._programs.detach)
        driver = BurstDriver(self._programs, self.process.pid, probes, self._prices, self._config, LAYOUT)
        if self._session is not None:
            driver.bind(self._session)
        return driver

    def losses(self) -> dict[str, int]:
        """What was lost so far, by kind; cheap enough for every poll."""
        stats = self._programs.stats()
        kinds = dict(self._session.losses.kinds) if self._session is not None else {}
        for name, kind in LOST_STATS.items():
            kinds[kind] = max(kinds.get(kind, 0), stats.get(name, 0))
        return {**kinds, **self._causes.lost()}

    @property
    def begun_ns(self) -> int:
        """When everything was attached, on the records' clock."""
        return self._begun_ns

    def new_session(self) -> Session:
        """One like that which is fed, empty: for what was recorded to be played through."""
        return self._new_session(self._layout)

    def _open_session(self, layout: Layout | None) -> Session:
        session = self._new_session(layout)
        session.listeners.append(self._settled)
        session.work.namer = lambda address: backend_name(self.process.pid, address)
        for listener in self.session_opened:
            listener(session)
        if self._driver is not None:
            self._driver.bind(session)
        if self._target_causes is not None:
            self._target_causes.bind(session)
        return session

    def _new_session(self, layout: Layout | None) -> Session:
        names = self._names()
        return Session(
            names.ops, names.types, facts_for_model(self.info, layout, self.attached), self._begun_ns,
            unary=names.unary, glu=names.glu,
        )  # fmt: skip

    def _names(self) -> Tables:
        tables = self.info.tables
        if tables is None:
            return Tables((), None)
        return Tables(tables.ops, tables.types, tables.unary, tables.glu)

    def close(self) -> None:
        """Detach. The last snapshot stays available. May be called twice."""
        if self._final is None:
            try:
                if self._driver is not None:
                    self._driver.stop()
                if self._session is not None:
                    drained = self._programs.drain()
                    self._drain_causes()
                    self._feed(self._session, drained)
                    self._session.finish(time.monotonic_ns())
                if self._target_causes is not None:
                    self._target_causes.finish()
                if self._driver is not None:
                    self._driver.finish()
                self._final = self.snapshot()
            finally:
                self._calls.close()
                if self._target_causes is not None:
                    self._target_causes.close()
                if self._shared is None:
                    self._causes.close()
                self._programs.close()
                self.info.close()
                if self._ended_fd is not None:
                    os.close(self._ended_fd)
                    self._ended_fd = None
                if self._final is None:
                    self._whys.close()
                else:
                    self._final = self._whys.finish(self._final)

    def __enter__(self) -> Attachment:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
