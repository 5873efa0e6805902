# SPDX-License-Identifier: Apache-2.0
"""All targets: found, admitted, drained, kept within one budget, and let go.

Everything here runs on the daemon's loop but :meth:`Manager.current` and what it returns. A
target's failure is that target's: it is unprofiled with a reason, and the others go on.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import MachineError, ProfinferError, TargetEnded, defect
from ..pace import Pace
from ..target.process import Process, alive
from .config import Config
from .heap import trim
from .log import Log
from .retries import Retries, passes
from .rules import Candidate, wanted
from .scout import Found, Scout
from .target import (
    ENDED,
    EXCLUDED,
    TOO_MANY,
    UNPROFILED,
    WAITING,
    WATCHED,
    Files,
    Target,
    label_of,
    reason_code,
)

if TYPE_CHECKING:
    from ...exporters.prometheus import Seen
    from ..causes import Causes
    from ..model.budget import Controller, Decision, Prices
    from ..target.facts import TargetInfo
    from ..target.layout import Layout
    from .shared import SharedPrograms, TargetPrograms

IDLE_PAUSE = 1.0
"""Between two turns while nothing is watched and the kernel announces nothing."""
KNOWN_PAUSE = 0.25
ALIVE_S = 1.0
"""How often it is asked whether a target still runs."""
BUDGET_S = 0.25
"""How often the budget is looked at; more often during a burst."""
FRESH_S = 0.5
"""A snapshot that is younger is not made again."""
MAX_OTHERS = 640
"""Processes that are remembered although they are not watched: with those that are, as many as the kernel's
programs can be told of (1,024). Of more than these, the oldest are forgotten, and looked at again."""
OTHERS_EACH = 4
"""A part of them is asked each second whether it still runs: each is once in so many."""
CALIBRATE_RETRY_S = 600.0
SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)
"""What is nobody's fault, and passes."""
_DAC_READ_SEARCH, _SYS_PTRACE = 2, 19  # of linux/capability.h
CAUSES_IDLE_S = 30.0
"""How long nothing is watched until the programs on the machine's scheduler and page faults go."""
PROGRAM_FILES, KEPT_FILES = 40, 16
"""Descriptors that the programs take, and what has to be left for whoever asks, bursts and looking."""
TRIM_SOON_S, TRIM_S = 3.0, 60.0
"""Memory that is free is given back so long after a process was found, and while some are watched."""
NO_ROOM = "ops: too many targets are sampled at once"
NOT_YET = "ops: what probes cost here is being measured first"
MAX_LAYOUTS = 32
"""Sets of engine files whose layout is remembered."""


@dataclass(frozen=True, slots=True)
class Published:
    """What others see, made at one moment. ``seen`` is for exporters, ``targets`` for the socket."""

    at_s: float
    seen: tuple[Seen, ...]
    targets: tuple[dict[str, Any], ...]


class Manager:
    """Implements :class:`.daemon.Watching`."""

    def __init__(self, config: Config, log: Log, wake: Callable[[], None]) -> None:
        self._config, self._log, self._wake = config, log, wake
        self._scout = Scout(wake, config.discovery.scan_seconds)
        self._shared: SharedPrograms | None = None
        self._targets: dict[int, Target] = {}
        self._retries = Retries()
        self._controller: Controller | None = None
        self._prices: Prices | None = None
        self._prices_at = 0.0
        self._calibrating: threading.Thread | None = None
        self._prices_came = False
        self._layouts: dict[Files, tuple[Layout, int]] = {}
        self._next_alive = self._next_budget = self._drained_at = 0.0
        self._pace = Pace()
        self._pause = IDLE_PAUSE
        self._watched_at = 0.0
        self._trim_at = math.inf
        self._turn_of = 0
        self._machine_error: ProfinferError | None = None
        self._published = Published(0.0, (), ())
        self._wanted: list[threading.Event] = []
        self._lock = threading.Lock()
        self.on_ended: Callable[[Seen], None] = lambda seen: None
        """Hears the last figures of every process that ended, on the loop's thread."""
        self.found = self.ended = self.failed = 0

    # ---- life ---------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to listen and to look; nothing is loaded before the first engine is found."""
        now = time.monotonic()
        self._scout.start(now)
        if self._config.profile.ops == "sampled" and not _calibrated(self._config.state):
            self._measure(self._config.profile.attach_method, now)
        if self._scout.fallback is not None:
            self._log.warning("new processes are found by looking every second", reason=self._scout.fallback)

    def close(self) -> None:
        """Detach everything. May be called twice."""
        self._scout.close()
        for target in self._targets.values():
            if target.attachment is not None:
                target.attachment.close()
                target.attachment = None
        self._targets.clear()
        if self._shared is not None:
            self._shared.close()
            self._shared = None

    def configure(self, config: Config) -> None:
        """A new configuration: rules and limits hold from now on, budgets at once."""
        before, self._config = self._config, config
        self._scout.scan_s = config.discovery.scan_seconds
        if before.profile != config.profile:
            self._controller = None
        for target in list(self._targets.values()):
            if target.state == WATCHED and not self._wanted_target(target):
                self._let_go(target, "excluded by the new configuration")
            elif target.state == WATCHED and _terms(before) != _terms(config):
                # On other terms: what it has is its target's, and goes on from there.
                self._log.info("target is attached to anew", target=target.label, pid=target.process.pid,
                               reason="the configuration is another")  # fmt: skip
                self._watch_anew(target)
        if before.targets != config.targets or before.profile.ops != config.profile.ops:
            for target in list(self._targets.values()):
                if target.state in (EXCLUDED, WAITING):
                    self._forget(target)
            self._scout.rescan()

    def _wanted_target(self, target: Target) -> bool:
        uid = _uid(target.process.pid)
        candidate = Candidate(target.process.exe, target.model, target.member, uid)
        return wanted(candidate, self._config.targets)

    # ---- each turn ----------------------------------------------------------------------

    def tick(self, now_s: float) -> float:
        """One turn of the loop; returns for how long it may sleep."""
        try:
            return self._turn(now_s)
        except OSError as error:
            # No descriptor, no memory: it passes, or the log says it once a minute.
            self._log.warning("a turn was cut short", reason=error.strerror or str(error))
            return IDLE_PAUSE

    def _turn(self, now_s: float) -> float:
        watching = frozenset(p for p, t in self._targets.items() if t.state == WATCHED)
        found, changed = self._scout.poll(now_s, watching)
        for one in found:
            self._admit_safely(one, now_s)
        for pid in changed:
            self._look_again(pid)
        for what in self._scout.defects():
            self._log.error("looking into processes failed", reason=what)
        if self._shared is not None:
            self._drain(self._shared, now_s)
        if self._prices_came:
            self._sample_now()
        if now_s >= self._next_alive:
            self._next_alive = now_s + ALIVE_S
            if now_s >= self._trim_at:
                self._trim_at = now_s + TRIM_S if watching else math.inf
                trim()
            self._reap()
            self._call_waiting()
            if self._shared is not None:
                self._sample_more(self._shared)
                self._tidy(self._shared, now_s)
                self._tend_causes(self._shared, now_s)
        self._publish_if_asked(now_s)
        if watching:
            return self._pause
        # Probes on files that nobody has mapped now: the first token of the next one is to be met.
        return KNOWN_PAUSE if self._shared is not None and self._shared.files else IDLE_PAUSE

    def descriptors(self) -> list[int]:
        """When one is readable, a turn is worth its while."""
        return self._scout.descriptors()

    def _drain(self, shared: SharedPrograms, now_s: float) -> None:
        fill = max(shared.fill(), shared.causes.fill() if shared.causes is not None else 0.0)
        elapsed, self._drained_at = now_s - self._drained_at, now_s
        _, strangers = shared.drain(now_s)
        self._pump(shared)
        for pid in strangers:
            self._stranger(shared, pid)
        watched = [t for t in self._targets.values() if t.attachment is not None]
        for target in watched:
            if target.programs is not None and target.programs.waiting:
                self._poll(target)
            self._guard(target, functools.partial(self._settle, target))
        self._budget(now_s)
        attachments = [t.attachment for t in watched if t.attachment is not None]
        lefts = [one.burst_left_s for one in attachments if one.burst_left_s is not None]
        self._pause = self._pace.pause(
            elapsed,
            fill,
            settling=any(one.settling for one in attachments),
            burst_s=min(lefts, default=None),
        )

    def _pump(self, shared: SharedPrograms) -> None:
        """After the events, and before anybody takes them: a call is told with every wait in it."""
        if shared.causes is not None:
            self._with_causes(shared, shared.causes.pump)

    def _with_causes(self, shared: SharedPrograms, action: Callable[[], None]) -> None:
        """What goes wrong with waits and page faults ends these, and nothing else."""
        try:
            action()
        except Exception as error:  # noqa: BLE001
            why = error.what if isinstance(error, ProfinferError) else defect(error).what
            shared.fail_causes(why)
            self._log.warning("scheduler and page faults are watched no more", reason=why)

    def _stranger(self, shared: SharedPrograms, pid: int) -> None:
        known = self._targets.get(pid)
        if known is not None and known.state != WATCHED and alive(known.process):
            shared.ignore(pid)
        else:
            self._scout.look_at(pid)

    def _guard(self, target: Target, action: Callable[[], None]) -> bool:
        """Do something with a target; what goes wrong ends the watching of this one alone. False then.

        Raises OSError for what everybody is short of.
        """
        try:
            action()
            return True
        except TargetEnded:
            pass  # reaped within a second
        except ProfinferError as error:
            self._fail(target, error)
        except OSError as error:
            if error.errno in SHORTAGES:
                raise
            self._fail(target, defect(error))
        except Exception as error:  # noqa: BLE001 - a defect that one target meets must not end the others
            self._fail(target, defect(error))
        return False

    def _poll(self, target: Target) -> None:
        attachment = target.attachment
        if attachment is None:
            return
        if not self._guard(target, lambda: attachment.poll(0.0)):
            return
        layout = attachment.layout
        if layout is not None and not target.shares_layout and target.programs is not None:
            # Chosen by a live graph: whoever maps the same files is read by it from the beginning.
            target.shares_layout = True
            if self._shared is not None and target.files not in self._layouts:
                self._layouts[target.files] = (layout, target.programs.layout)
                self._shared.use_layout(target.programs.layout, target.files)
                if len(self._layouts) > MAX_LAYOUTS:
                    self._forget_layout(next(iter(self._layouts)))

    def _forget_layout(self, files: Files) -> None:
        _, slot = self._layouts.pop(files)
        if self._shared is not None:
            self._shared.leave_layout(slot, files)

    def _spare_layout(self) -> bool:
        """Forget one that is remembered for processes yet to come; False when all are in use."""
        for files, (_, slot) in self._layouts.items():
            if self._shared is not None and self._shared.users(slot) == 1:
                self._forget_layout(files)
                return True
        return False

    def _settle(self, target: Target) -> None:
        """What one process has shown holds for those with the same files that started with it: of
        many at once, not every one's graphs reach us whole."""
        attachment, known = target.attachment, self._layouts.get(target.files)
        if attachment is not None and attachment.settling and known is not None:
            attachment.settle_on(known[0])
            target.shares_layout = True

    def _budget(self, now_s: float) -> None:
        sampled = [t for t in self._targets.values() if t.attachment is not None]
        bursting = any(t.attachment is not None and t.attachment.burst_left_s is not None for t in sampled)
        if not sampled or (now_s < self._next_budget and not bursting):
            return
        from ..model.budget import BudgetConfig, Controller, Load

        self._next_budget = now_s + BUDGET_S
        if self._controller is None:
            profile = self._config.profile
            config = BudgetConfig(
                profile.budget_ratio, qos_min_tokens_per_second=profile.qos_min_tokens_per_second
            )
            self._controller = Controller(config)
        loads: dict[str, tuple[Target, Load]] = {}

        def observe(target: Target) -> None:
            load = target.attachment.observe(now_s) if target.attachment is not None else None
            if load is not None:
                loads[load.target] = (target, load)

        for target in sampled:
            self._guard(target, functools.partial(observe, target))
        decisions = self._controller.tick(now_s, [load for _, load in loads.values()])
        for name, (target, _) in loads.items():
            attachment = target.attachment
            if attachment is None:
                continue
            self._tell_levels(target, decisions[name])
            self._guard(target, functools.partial(attachment.follow, decisions[name], now_s))

    def _tell_levels(self, target: Target, decision: Decision) -> None:
        for change in decision.transitions:
            shed = change.after < change.before
            (self._log.warning if shed else self._log.info)(
                "level shed" if shed else "level back",
                target=target.label,
                pid=target.process.pid,
                level=(change.before if shed else change.after).name.lower(),
                reason=change.reason,
            )

    def _tend_causes(self, shared: SharedPrograms, now_s: float) -> None:
        if any(target.state == WATCHED for target in self._targets.values()):
            self._watched_at = now_s
        elif shared.causes is not None and now_s - self._watched_at > CAUSES_IDLE_S:
            shared.unload_causes()
        self._with_causes(shared, lambda: shared.tick_causes(now_s))

    def _causes(self, shared: SharedPrograms) -> Causes:
        from ..causes import CauseOptions

        known, profile = shared.causes, self._config.profile
        causes = shared.load_causes(CauseOptions(profile.sched, profile.faults))
        if causes is not known:
            for note in causes.notes:
                self._log.warning("less is watched", reason=note)
        return causes

    def _tidy(self, shared: SharedPrograms, now_s: float) -> None:
        changed = shared.tidy(now_s, self._config.targets.expire_seconds)
        if not changed:
            return
        for target in list(self._targets.values()):
            if target.state == WATCHED and any(file[0] in changed for file in target.files):
                pid = target.process.pid
                self._log.warning(
                    "target degraded",
                    target=target.label,
                    pid=pid,
                    reason="its engine's file was overwritten",
                )
                self._watch_anew(target)

    def _watch_anew(self, target: Target) -> None:
        self._close(target)
        self._forget(target)
        self._scout.look_at(target.process.pid)

    # ---- targets come -------------------------------------------------------------------

    def _admit_safely(self, found: Found, now_s: float) -> None:
        """What is short for one process must not lose those that were found with it."""
        try:
            self._admit(found, now_s)
        except OSError as error:
            self._log.warning("a process was not looked at", reason=error.strerror or str(error))
            self._scout.look_later(found.process.pid, now_s)

    def _admit(self, found: Found, now_s: float) -> None:
        process = found.process
        self._trim_at = min(self._trim_at, now_s + TRIM_SOON_S)
        known = self._targets.get(process.pid)
        if known is not None:
            if known.key == (process.pid, process.start_time) and known.state == WATCHED:
                if found.info is not None:
                    found.info.close()
                self._look_again(process.pid)
                return
            self._forget(known)
        model = found.info.models[0] if found.info is not None and found.info.models else None
        target = Target(
            process, label_of(found.member, process.exe, model), found.member, model, UNPROFILED,
        )  # fmt: skip
        try:
            self._decide(target, found, now_s)
        finally:
            if target.attachment is None and found.info is not None:
                found.info.close()
        if target.attachment is None and target.state != WATCHED:
            self._bound_others()
        if known is not None and (known.key, known.state) == (target.key, target.state):
            target.since_s = known.since_s
        self._targets[process.pid] = target

    def _decide(self, target: Target, found: Found, now_s: float) -> None:
        candidate = Candidate(target.process.exe, target.model, found.member, found.uid)
        target.files = _files(found.info) if found.info is not None else frozenset()
        watching = sum(1 for t in self._targets.values() if t.state == WATCHED)
        if not wanted(candidate, self._config.targets):
            target.state, target.reason, target.code = EXCLUDED, "excluded by a rule", "excluded"
        elif found.error is not None:
            target.reason, target.code = found.error.what, reason_code(found.error)
        elif watching >= self._config.targets.max:
            target.state, target.code = WAITING, TOO_MANY
            target.reason = f"{watching} processes are watched already (targets.max)"
        elif (failure := self._retries.early(target.key, target.files, now_s)) is not None:
            target.reason, target.code = failure.what, reason_code(failure)
        else:
            try:
                self._attach(target, found, now_s)
            except TargetEnded:
                target.reason, target.code = "it ended while it was attached to", ENDED
            except ProfinferError as error:
                self._failed(target, error, now_s)
            except OSError as error:
                self._failed(target, MachineError(f"it could not be attached to: {error.strerror}"), now_s)
            except Exception as error:  # noqa: BLE001 - a defect that one target meets must not end the others
                self._failed(target, defect(error), now_s)
        if target.state == WATCHED:
            self.found += 1
            self._retries.succeeded(target.key)
            self._log.info(
                "target found",
                target=target.label,
                pid=target.process.pid,
                program=target.process.exe,
                model=target.model,
            )
            return
        if self._shared is not None:
            self._shared.ignore(target.process.pid)
        if target.state == UNPROFILED and target.code != ENDED:
            self._tell_failure(target)

    def _failed(self, target: Target, error: ProfinferError, now_s: float) -> None:
        """An attempt to watch it, or what this has begun. Another one follows if there is hope."""
        target.state, target.reason, target.code = UNPROFILED, error.what, reason_code(error)
        again_s = self._retries.failed(target.key, target.files, error, now_s)
        if passes(error):
            self._scout.look_later(target.process.pid, again_s)

    def _tell_failure(self, target: Target) -> None:
        """Once: it is looked at again with every library that it maps, and in every scan."""
        if self._retries.news(target.key, target.reason):
            self.failed += 1
            self._log.warning(
                "target cannot be profiled",
                target=target.label,
                pid=target.process.pid,
                reason=target.reason,
            )

    def _attach(self, target: Target, found: Found, now_s: float) -> None:
        from ..attach import Attachment, Shared
        from ..model.budget import BudgetConfig

        info = found.info
        if info is None:
            return
        self._have_room(KEPT_FILES + (PROGRAM_FILES if self._shared is None else 0))
        shared = self._programs()
        profile = self._config.profile
        prices = self._prices_here(shared, now_s) if profile.ops == "sampled" else None
        pid = target.process.pid
        has_ops = _has_ops(info)
        programs = shared.view(pid, sums=prices is not None and has_ops)
        try:
            info = shared.share_files(programs, info)
            layout = None
            if target.files in self._layouts:
                layout, slot = self._layouts[target.files]
                programs.use_layout(slot)
                target.shares_layout = True
            ops = "sampled" if prices is not None and programs.region is not None else "off"
            attachment = Attachment.adopt(
                target.process,
                info,
                programs,
                Shared(
                    self._inspector(shared, programs),
                    calls=shared.call_book,
                    layout=layout,
                    causes=self._causes(shared),
                ),
                looked_s=found.looked_s,
                used_s=found.used_s,
                ops=ops,
                config=BudgetConfig(
                    profile.budget_ratio, qos_min_tokens_per_second=profile.qos_min_tokens_per_second
                ),
                prices=prices,
            )
        except BaseException:
            programs.close()
            raise
        if profile.ops == "sampled" and ops == "off" and (has_ops or prices is None):
            attachment.attached.note(NO_ROOM if prices is not None else NOT_YET)
        since_ns, started_ns = programs.since_ns or 0, _started_ns(target.process)
        attachment.seen_since(max(since_ns, started_ns), from_birth=started_ns > since_ns > 0)
        target.attachment, target.programs = attachment, programs
        target.state, target.reason, target.code = WATCHED, "", "ok"

    def _have_room(self, descriptors: int) -> None:
        """Raises OSError where so many are not to be had: without any, nobody gets an answer. What is
        kept for the next process of a file goes before somebody is turned away."""
        from .room import lacking

        while (why := lacking(descriptors, 0)) is not None:
            if self._shared is None or not self._shared.make_room():
                raise OSError(errno.EMFILE, f"{os.strerror(errno.EMFILE)} ({why})")

    def _programs(self) -> SharedPrograms:
        if self._shared is None:
            from .shared import SharedPrograms

            profile = self._config.profile
            try:
                self._shared = SharedPrograms.load(
                    profile.attach_method, profile.btf_path, 2 * self._config.targets.max
                )
            except FileNotFoundError as error:
                raise MachineError(str(error)) from error
            self._machine_error = None
            self._shared.spare_layout = self._spare_layout
            for target in self._targets.values():
                if target.state != WATCHED:
                    self._shared.ignore(target.process.pid)
        return self._shared

    def _inspector(self, shared: SharedPrograms, programs: TargetPrograms) -> Callable[[Process], TargetInfo]:
        from ..target.inspect import inspect_target

        def inspect(process: Process) -> TargetInfo:
            return shared.share_files(programs, inspect_target(process, cache=self._scout.cache))

        return inspect

    def _look_again(self, pid: int) -> None:
        target = self._targets.get(pid)
        if target is not None and target.attachment is not None:
            self._guard(target, target.attachment.look)

    # ---- prices -------------------------------------------------------------------------

    def _prices_here(self, shared: SharedPrograms, now_s: float) -> Prices | None:
        """Of probes on this machine. None while they are measured, by a process of our own."""
        from pathlib import Path

        from ..kernel import calibration
        from ..prices import prices_of

        if self._prices is None:
            kept = calibration.load(Path(self._config.state), shared.programs.method)
            if kept is not None:
                self._prices = prices_of(kept, "sum")
            else:
                self._measure(shared.programs.method, now_s)
        return self._prices

    def _measure(self, method: str, now_s: float) -> None:
        if self._calibrating is None and now_s >= self._prices_at:
            self._prices_at = now_s + CALIBRATE_RETRY_S
            arguments = (method, self._config.state, self._config.profile.btf_path)
            self._calibrating = threading.Thread(
                target=self._calibrate, args=arguments, name="calibrate", daemon=True
            )
            self._calibrating.start()

    def _sample_now(self) -> None:
        """Prices have come: operators of targets that were found before are sampled from now on."""
        self._prices_came = False
        if self._shared is not None and self._prices_here(self._shared, time.monotonic()) is not None:
            self._sample_more(self._shared)

    def _sample_more(self, shared: SharedPrograms) -> None:
        """Targets whose operators are not sampled yet, as far as there is room: whoever came first."""
        prices = self._prices
        if prices is None or self._config.profile.ops != "sampled":
            return
        for target in list(self._targets.values()):
            attachment, programs = target.attachment, target.programs
            if attachment is None or programs is None or programs.region is not None:
                continue
            if not _has_ops(attachment.info):
                attachment.attached.notes = [n for n in attachment.attached.notes if n != NOT_YET]
                continue
            if not shared.give_region(programs):
                return
            if self._guard(target, functools.partial(attachment.sample, prices)):
                notes = attachment.attached.notes
                attachment.attached.notes = [n for n in notes if n not in (NOT_YET, NO_ROOM)]

    def _calibrate(self, method: str, state: str, btf_path: str | None) -> None:
        from .calibrating import calibrate_here

        failure = calibrate_here(method, state, btf_path)
        if failure is not None:
            self._log.warning("what probes cost could not be measured, operators are not sampled",
                              reason=failure)  # fmt: skip
        self._calibrating = None
        self._prices_came = failure is None
        self._wake()

    # ---- targets go ---------------------------------------------------------------------

    def _reap(self) -> None:
        self._turn_of = (self._turn_of + 1) % OTHERS_EACH
        for target in list(self._targets.values()):
            due = target.state == WATCHED or target.process.pid % OTHERS_EACH == self._turn_of
            if due and not alive(target.process):
                self._end(target)

    def _call_waiting(self) -> None:
        """Where there is room again, whoever has waited longest is next."""
        waiting = [t.process.pid for t in self._targets.values() if t.state == WAITING]
        if waiting:
            watched = sum(t.state == WATCHED for t in self._targets.values())
            for pid in waiting[: max(0, self._config.targets.max - watched)]:
                self._scout.look_at(pid)

    def _end(self, target: Target) -> None:
        """The process is gone: what is left in the rings is its, then its sums are the label's."""
        watched = target.attachment is not None
        self._close(target)
        self._forget(target)
        self._retries.forget(target.key)
        if watched:
            self.ended += 1
            self._log.info("target lost", target=target.label, pid=target.process.pid, reason="it ended")

    def _let_go(self, target: Target, reason: str) -> None:
        self._close(target)
        target.state, target.reason, target.code = EXCLUDED, reason, "excluded"
        if self._shared is not None:
            self._shared.ignore(target.process.pid)
        self._log.info("target lost", target=target.label, pid=target.process.pid, reason=reason)

    def _fail(self, target: Target, error: ProfinferError) -> None:
        self._close(target)
        self._failed(target, error, time.monotonic())
        if self._shared is not None:
            self._shared.ignore(target.process.pid)
        self._tell_failure(target)

    def _close(self, target: Target) -> None:
        attachment, target.attachment = target.attachment, None
        if attachment is None:
            return
        if self._shared is not None:
            _, strangers = self._shared.drain(time.monotonic())
            self._pump(self._shared)
            for pid in strangers:
                self._stranger(self._shared, pid)
        try:
            try:
                attachment.poll(0.0)
                attachment.sweep()
            finally:
                attachment.close()
            target.snapshot = attachment.snapshot()
        except Exception as error:  # noqa: BLE001 - it is gone either way; the others go on
            why = error.what if isinstance(error, ProfinferError) else str(defect(error))
            self._log.warning("the last figures of a target are lost", target=target.label, reason=why)
        target.programs = None
        target.tokens_per_second = None
        if target.snapshot is not None:
            self.on_ended(self._seen(target, ended=True))

    def _forget(self, target: Target) -> None:
        if target.attachment is not None:
            self._close(target)
        self._targets.pop(target.process.pid, None)
        if self._shared is not None and target.state != WATCHED:
            self._shared.heed(target.process.pid)

    def _bound_others(self) -> None:
        others = [t for t in self._targets.values() if t.state != WATCHED]
        for target in others[: max(0, len(others) - MAX_OTHERS + 1)]:
            self._forget(target)

    # ---- what is told -------------------------------------------------------------------

    def current(self, timeout_s: float = 2.0) -> Published:
        """The figures as they are now, made by the loop; the last ones if it does not come to it."""
        published = self._published
        if time.monotonic() - published.at_s < FRESH_S:
            return published
        event = threading.Event()
        with self._lock:
            self._wanted.append(event)
        self._wake()
        event.wait(timeout_s)
        return self._published

    def _publish_if_asked(self, now_s: float) -> None:
        with self._lock:
            wanted, self._wanted = self._wanted, []
        if not wanted:
            return
        if now_s - self._published.at_s >= FRESH_S:
            for target in self._targets.values():
                self._guard(target, functools.partial(target.refresh, now_s))
            self._published = Published(
                time.monotonic(),
                tuple(self._seen(t) for t in self._targets.values() if t.state != EXCLUDED),
                tuple(t.describe(now_s) for t in self._targets.values()),
            )
        for event in wanted:
            event.set()

    def _seen(self, target: Target, *, ended: bool = False) -> Seen:
        from ...exporters.prometheus import Seen

        state = target.code
        if not ended and target.state == WATCHED and target.snapshot is not None:
            counters = target.snapshot.counters
            busy = counters is None or any(counters.hits.values())
            # An engine that is described by data has calls, and hits of no level.
            state = "ok" if busy or any(c.count for c in target.snapshot.engine_calls) else "idle"
        # What was watched and is not any more has given its figures to its target's sums.
        snapshot = target.snapshot if ended or target.state == WATCHED else None
        return Seen(snapshot, "ended" if ended else state, target.label, target.number)

    @property
    def expire_seconds(self) -> float:
        """After so long without a process, a target's series end."""
        return self._config.targets.expire_seconds

    def published(self) -> list[dict[str, Any]]:
        """For the control socket."""
        return list(self.current().targets)

    def kernel_figures(self) -> tuple[dict[str, int], dict[str, int]]:
        """(entries by map, runs that the kernel skipped by program); called from other threads."""
        shared = self._shared
        if shared is None:
            return {}, {}
        return shared.entries(), shared.programs.recursion_misses()

    def health(self) -> dict[str, Any]:
        """About the daemon itself; called from other threads, so it reads single fields only."""
        states = [t.state for t in list(self._targets.values())]
        problems = []
        if self._scout.fallback is not None:
            problems.append(f"new processes are found by looking: {self._scout.fallback}")
        if (refused := self._scout.refused) is not None and not _may_look():
            problems.append(f"some processes cannot be looked at: {refused.what}, {refused.remedy}")
        shared = self._shared
        return {
            "state": "degraded" if problems else "ok",
            "reason": "; ".join(problems),
            "watched": states.count(WATCHED),
            "unprofiled": states.count(UNPROFILED),
            "excluded": states.count(EXCLUDED),
            "waiting": states.count(WAITING),
            "found_total": self.found,
            "ended_total": self.ended,
            "failed_total": self.failed,
            "files_known": len(self._scout.cache),
            "files_probed": 0 if shared is None else shared.files,
            "announcements_lost": self._scout.lost,
            "scans_total": self._scout.scans,
            "foreign_events_total": 0 if shared is None else shared.foreign_events,
            "attach_method": None if shared is None else shared.programs.method,
        }


def _files(info: TargetInfo) -> Files:
    return frozenset((f.file_id, os.fstat(f.fd).st_mtime_ns) for f in info.files)


def _terms(config: Config) -> tuple[object, ...]:
    """On what terms targets are watched, as far as that can change without a restart."""
    profile = config.profile
    return profile.ops, profile.budget_ratio, profile.qos_min_tokens_per_second


def _has_ops(info: TargetInfo) -> bool:
    """Whether it has operators that could be timed: PJRT and CUDA have none."""
    return any(file.op_source is not None for file in info.files)


def _may_look() -> bool:
    """Whether we have what looking into any process takes: one that refuses then is an exception."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        with open("/proc/self/status", encoding="ascii") as file:
            line = next(line for line in file if line.startswith("CapEff:"))
        return all(int(line.split()[1], 16) >> bit & 1 for bit in (_DAC_READ_SEARCH, _SYS_PTRACE))
    return False


def _calibrated(state: str) -> bool:
    """Whether it seems so: what is kept may be of another kernel, which shows when it is needed."""
    try:
        return any(name.startswith("calibration-") for name in os.listdir(state))
    except OSError:
        return False


def _uid(pid: int) -> int:
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return -1


def _started_ns(process: Process) -> int:
    """When the process began, on the records' clock (a start is in ticks after boot)."""
    from ..targetfacts import age_seconds

    return time.monotonic_ns() - int(age_seconds(process) * 1e9)
