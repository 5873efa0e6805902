# SPDX-License-Identifier: Apache-2.0
"""``profinferd record``: keep everything that is seen of a process in one file."""

from __future__ import annotations

import dataclasses
import math
import os
import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..errors import ProfinferError, TargetEnded, TargetError, UsageError
from ..waking import Wakeup
from .attach import (
    POLL_SECONDS,
    _budget,
    _counters,
    _duration,
    _give_way,
    _loader,
    _ops,
    _pid,
    _positive,
    _time,
    _why,
)
from .output import btf_file, invoking_user, say
from .signals import Interrupted, Stop

if TYPE_CHECKING:
    from ..attach import Attachment
    from ..recording.child import StartedProgram
    from ..recording.facts import Facts
    from ..recording.keepers import FlightKeeper, Keeper
    from ..recording.triggers import Triggers
    from ..recording.writer import RecordingWriter

FOLLOW_SECONDS, FOLLOW_POLL = 10.0, 0.05
"""For so long after its start a program's new libraries are looked for this often."""
DEFAULT_WINDOW_BYTES = 256 << 20
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """The checked options of one ``record``."""

    pid: int | None
    command: tuple[str, ...]
    output: str
    duration: float | None
    max_size: int | None
    last: float | None
    triggers: Triggers
    ops: str
    budget: float
    method: str
    loader: str
    btf_path: str | None
    force: bool
    quiet: bool
    sched: bool
    faults: bool
    barriers: bool
    stacks: bool
    counters: tuple[str, ...]


def _size(context: click.Context, option: click.Parameter, value: str | None) -> int | None:
    if value is None:
        return None
    text = value.strip().upper().removesuffix("IB").removesuffix("B")
    unit = text[-1:] if text[-1:] in "KMGT" else ""
    number = _positive(text.removesuffix(unit), ("--max-size", "a size"), "--max-size 500M")
    if number * _UNITS[unit] < 1 << 18:
        raise UsageError(f"--max-size {value!r} is less than 256 KiB", "for example --max-size 500M")
    return int(number * _UNITS[unit])


def _last(context: click.Context, option: click.Parameter, value: str | None) -> float | None:
    if value is None:
        return None
    seconds = _time(value, "--last", "--last 30s")
    if seconds > 3600:
        raise UsageError(f"--last {value!r} is more than an hour", "record without it")
    return seconds


def _optional_pid(context: click.Context, option: click.Parameter, value: str | None) -> int | None:
    return None if value is None else _pid(context, option, value)


@click.command()
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[-- CMD [ARG]…]")
@click.option("-p", "--pid", callback=_optional_pid, metavar="N", help="The process to record.")
@click.option("-o", "output", metavar="FILE", help="Where to; without it, named after program and time.")
@click.option(
    "-d", "--duration", callback=_duration, metavar="TIME", help="Stop after 30 (seconds), 15m, 1h."
)
@click.option("--max-size", callback=_size, metavar="SIZE", help="Stop before the file is larger (500M, 2G).")
@click.option(
    "--last", callback=_last, metavar="S",
    help="Flight recorder: keep the last S seconds in memory, write them on a trigger.",
)  # fmt: skip
@click.option(
    "--trigger",
    "triggers",
    multiple=True,
    metavar="WHAT",
    help="With --last: signal (SIGUSR1, always), p99>50ms (between tokens), verdict. May be repeated.",
)
@click.option(
    "--ops", default="all", show_default=True, callback=_ops, metavar="all|sampled|off",
    help="Record every operator, their sums in bursts, or none.",
)  # fmt: skip
@click.option(
    "--budget", default="1%", show_default=True, callback=_budget, metavar="SHARE",
    help="How much slower the process may get at most (with --ops sampled).",
)  # fmt: skip
@click.option(
    "--attach-method", "method", type=click.Choice(["auto", "multi", "perf"]), default="auto",
    show_default=True, help="How probes are attached: by what the kernel has, or forced.",
)  # fmt: skip
@click.option(
    "--loader", default="libbpf", show_default=True, callback=_loader, metavar="libbpf|bcc",
    help="What loads the probes: bcc compiles them here first.",
)  # fmt: skip
@click.option("--sched/--no-sched", default=True, show_default=True, help="Record what its threads wait for.")
@click.option("--faults/--no-faults", default=True, show_default=True, help="Record its page faults.")
@click.option("--barriers", is_flag=True, help="Record each thread in each operator (with --ops all).")
@click.option("--stacks", is_flag=True, help="Sample where CPU time goes, by native stacks.")
@click.option(
    "--counters", callback=_counters, metavar="EVENTS",
    help="Count performance events by operator: names as perf has them, or rHEX, commas between.",
)  # fmt: skip
@click.option("--btf-path", metavar="FILE", help="Kernel type information, where the kernel brings none.")
@click.option("--force", is_flag=True, help="Replace FILE if it is there.")
@click.option("-q", "--quiet", is_flag=True, help="No progress on stderr.")
@click.option("-v", "--verbose", is_flag=True, help="Show where in the code an internal error came from.")
def record(
    command: tuple[str, ...], pid: int | None, output: str | None, duration: float | None,
    max_size: int | None, last: float | None, triggers: tuple[str, ...], ops: str, budget: float, method: str,
    loader: str, btf_path: str | None, sched: bool, faults: bool, barriers: bool, stacks: bool,
    counters: tuple[str, ...], force: bool, quiet: bool, verbose: bool,
) -> None:  # fmt: skip
    """Record a running process, or a program that is started for it, into one file.

    The file is yours alone (mode 0600), and reading it needs no root: profinferd info, report,
    export and diff do. It can be read while it is written, and whatever ends the recording,
    what was written until then stays readable. Ctrl-C ends it.
    """
    from ..recording.triggers import Triggers

    if (pid is None) == (not command):
        what = "nothing to record" if pid is None else "both --pid and a program are given"
        raise UsageError(what, "give --pid N, or a program and its arguments after --")
    if triggers and last is None:
        raise UsageError("--trigger is for the flight recorder", "use it with --last")
    if barriers and ops != "all":
        raise UsageError("--barriers needs every operator", "use it with --ops all")
    if last is not None and ops == "sampled":
        raise UsageError("--last keeps records, and --ops sampled has none", "use --ops all or off")
    if last is not None and (stacks or counters):
        # These are sums since the beginning, and every figure of a window is of that window.
        raise UsageError("--last keeps records, and --stacks and --counters have none", "leave them out")
    options = Options(
        pid, command, output or _name(pid, command), duration, max_size, last, Triggers.parse(triggers), ops,
        budget, method, loader, None if btf_path is None else btf_file(btf_path), force, quiet,
        sched, faults, barriers, stacks, counters,
    )  # fmt: skip
    _Run(options).run()


def _name(pid: int | None, command: tuple[str, ...]) -> str:
    name = os.path.basename(command[0]) if command else f"{_program(pid or 0)}{pid}"
    what = "".join(c if c.isalnum() or c in "-_." else "_" for c in name) or "program"
    return f"{what[:64]}-{time.strftime('%Y%m%d-%H%M%S')}.pfi"


def _program(pid: int) -> str:
    """What the process calls itself, and a dash; "" where that cannot be read, which attaching will tell."""
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip() + "-"
    except OSError:
        return ""


class _Run:
    """One ``record`` from its first check to its last word."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.owner = invoking_user()
        self.program: StartedProgram | None = None
        self.flight: FlightKeeper | None = None
        self.asked_early = False

    def say(self, text: str) -> None:
        if not self.options.quiet:
            say(text)

    def ask(self, *_: object) -> None:
        """SIGUSR1. It may come before there is anything to write; unheard it would end us."""
        if self.flight is None:
            self.asked_early = True
        else:
            self.flight.ask()

    def run(self) -> None:
        """Everything; returns when done, else raises what main() catches."""
        from ..recording.keepers import check_place, make_room
        from ..recording.writer import RecordingWriter

        with ExitStack() as stack:
            wakeup = stack.enter_context(Wakeup())
            stop = stack.enter_context(Stop(wakeup))
            writer = None
            if self.options.last is None:
                make_room(self.options.output, force=self.options.force)
                # Made first: a mistake shows before an hour of watching.
                writer = RecordingWriter(self.options.output, self.owner, self.options.max_size)
                stack.callback(writer.close)
            else:
                stack.callback(signal.signal, signal.SIGUSR1, signal.signal(signal.SIGUSR1, self.ask))
                # Its window would be gone with a failure at the first trigger.
                check_place(self.options.output, self.owner, force=self.options.force)
            with ExitStack() as undo:
                if writer is not None:
                    undo.callback(writer.remove)
                try:
                    # Once it is attached, a Ctrl-C ends the recording and does not throw it away.
                    watched = self.attach(stack, stop)
                    keeper = self.keeper(writer, watched)
                except KeyboardInterrupt:
                    raise Interrupted from None
                undo.pop_all()
            _give_way()  # only now: records already come, and who waits for a core loads slowly
            why = self.watch_and_keep(watched, keeper, stop, wakeup)
            if self.program is not None:
                self.say(f"{self.program.program} ended {self.program.how_it_ended()}")
            self.say(keeper.last_words(why))
            if not watched.seen_anything and why == "asked":
                raise Interrupted
            if not watched.seen_anything and why == "ended":
                raise TargetEnded(
                    "the target ended before anything was seen", "record it while it answers a prompt"
                )

    def attach(self, stack: ExitStack, stop: Stop) -> Attachment:
        """Attach to the process, or start the program and attach to it while it is stopped."""
        if self.options.pid is not None:
            watched = self.attach_to(self.options.pid, stop)
        else:
            from ..recording.child import StartedProgram

            self.program = StartedProgram(self.options.command)
            stack.callback(self.program.end)
            watched = self.attach_to_program(self.program, stop)
        stack.callback(watched.close)
        return watched

    def attach_to(self, pid: int, stop: Stop) -> Attachment:
        from ..attach import Attachment  # loads numpy and libbpf: not for --help or a usage error
        from ..causes import CauseOptions
        from ..model.budgetdata import BudgetConfig

        options = self.options
        return Attachment.open(
            pid, method=options.method, ops=options.ops, budget=BudgetConfig(options.budget),
            btf_path=options.btf_path, loader=options.loader, progress=self.say,
            why=_why(options.stacks, options.counters),
            causes=CauseOptions(options.sched, options.faults, options.barriers), kept=True,
            watching=stop.watching,
        )  # fmt: skip

    def attach_to_program(self, program: StartedProgram, stop: Stop) -> Attachment:
        refused: ProfinferError | None = None
        while True:
            try:
                program.wait_for_engine(stop)
            except TargetEnded as ended:
                raise refused or ended from None
            try:
                return self.attach_to(program.pid, stop)
            except TargetError as error:
                refused = error  # only its name was in there; the engine may still come
                program.go()

    def keeper(self, writer: RecordingWriter | None, watched: Attachment) -> Keeper:
        """Who keeps the records."""
        from ..recording.keepers import FileKeeper, FlightKeeper

        options = self.options
        if writer is not None:
            return FileKeeper(writer, watched, self.facts(watched), options.max_size)
        self.flight = FlightKeeper(
            options.output, self.owner, watched, lambda: self.facts(watched), options.last or 0.0,
            options.max_size or DEFAULT_WINDOW_BYTES, options.triggers, force=options.force, say=self.say,
        )  # fmt: skip
        if self.asked_early:
            self.flight.ask()
        return self.flight

    def facts(self, watched: Attachment) -> Facts:
        """What is known at the beginning."""
        from ..kernel.peaks import load_peaks
        from ..model.plancache import Tables
        from ..prices import STATE
        from ..recording.facts import Facts, Names
        from ..recording.machine import this_machine
        from ..recording.recorder import read_clocks
        from ..version import version

        tables = watched.info.tables
        return Facts(
            target=watched.snapshot().target,
            begin_ns=watched.begun_ns,
            end_ns=time.monotonic_ns(),
            machine=this_machine(watched.process.pid),
            clocks=(read_clocks(),),
            peaks=load_peaks(STATE),
            names=Names.of(Tables(tables.ops, tables.types, tables.unary, tables.glu)) if tables else Names(),
            child=self.program.result() if self.program is not None else None,
            ops=self.options.ops,
            created=time.time(),
            version=version(),
        )

    def watch_and_keep(self, watched: Attachment, keeper: Keeper, stop: Stop, wakeup: Wakeup) -> str:
        """Until something ends it, which is returned, and what is written at the end."""
        if self.program is not None:
            self.program.go()
        failed = True
        try:
            why = self.watch(watched, keeper, stop, wakeup)
            failed = False
            return why
        finally:
            # The target comes first: its probes go before a slow disk is waited for.
            ended_ns = time.monotonic_ns()
            watched.close()
            child = self.program.end() if self.program is not None else None
            keeper.end(child, ended_ns, failed=failed)

    def watch(self, watched: Attachment, keeper: Keeper, stop: Stop, wakeup: Wakeup) -> str:
        from ..recording.machine import memory_of

        begun = shown = time.monotonic()
        if self.program is None:
            begun = watched.begun_ns / 1e9  # what has run since it was attached is in the file
        until = math.inf if self.options.duration is None else begun + self.options.duration
        sampled = 0.0
        why = ""
        while not why:
            now = time.monotonic()
            if stop.asked:
                why = "asked"
            elif now >= until:
                why = "duration"
            elif not watched.alive() or (self.program is not None and not self.program.running()):
                why = "ended"
            young = self.program if now - begun < FOLLOW_SECONDS else None
            pause = POLL_SECONDS if young is None else FOLLOW_POLL
            if why:
                watched.poll(0.0)
            else:
                watched.wait(max(min(pause, until - now), 0.0), wakeup)
            if young is not None and young.new_engine():
                watched.look()
                young.go()
            if now - sampled >= 1.0:
                sampled = now
                keeper.take({"memory": memory_of(watched.process.pid)})
            why = why or keeper.look()
            if now - shown >= (1.0 if sys.stderr.isatty() else 60.0):
                shown = now
                self.say(keeper.progress(now - begun))
        return why
