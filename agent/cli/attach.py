# SPDX-License-Identifier: Apache-2.0
"""``profinferd attach``: watch a running process until told to stop, then say what was seen."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Protocol

import click

from ...exporters.json_export import JsonExporter
from ..errors import TargetEnded, UsageError
from ..model.snapshot import Snapshot
from ..waking import Wakeup
from .output import PrivateFile, btf_file, say, write_data
from .signals import Interrupted, Stop
from .view import View, choose_view

# prometheus-client (and rich, for tables) take 20 MiB together: who needs neither does not pay.
if TYPE_CHECKING:
    from ..whys import WhyOptions
    from .listen import Published

POLL_SECONDS = 0.5
"""How long an exec of the target may go unnoticed; signals, and its end, end the sleep."""
_DEFAULT = click.core.ParameterSource.DEFAULT
NICE = 10
"""How much we give way: at 10, a tenth of a core where all are wanted."""
STACK_HERTZ = 99
"""Samples a second of each thread: not in step with anything that happens a hundred times a second."""
MAX_COUNTERS = 8
Progress = Callable[[str], None]


class Watched(Protocol):
    """What this command needs of ``profinferd.agent.attach.Attachment``."""

    seen_anything: bool

    def poll(self, timeout_s: float) -> None: ...
    def wait(self, timeout_s: float, wakeup: Wakeup | None = None) -> None: ...
    def alive(self) -> bool: ...
    def snapshot(self) -> Snapshot: ...
    def close(self) -> None: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """The checked options of one ``attach``."""

    pid: int
    duration: float | None
    ops: str
    budget: float
    floor: float | None
    format: str
    listen: tuple[str, int] | None
    method: str
    loader: str
    btf_path: str | None
    output: str | None
    quiet: bool
    stacks: str | None = None
    counters: tuple[str, ...] = ()
    sched: bool = True
    faults: bool = True
    barriers: bool = False


class End(enum.Enum):
    """Why the watching ended."""

    FAILED = enum.auto()
    DURATION = enum.auto()
    ASKED = enum.auto()
    TARGET = enum.auto()


def open_attachment(options: Options, progress: Progress, watching: Callable[[], None]) -> Watched:
    """Attaches to the target. ``watching`` is called when all probes are in place, before that is said.
    Raises the errors that the exit codes 2 to 5 stand for."""
    from ..attach import Attachment  # loads numpy and libbpf: not for --help or a usage error
    from ..causes import CauseOptions
    from ..model.budgetdata import BudgetConfig

    watched = Attachment.open(
        options.pid,
        method=options.method,
        ops=options.ops,
        budget=BudgetConfig(options.budget, qos_min_tokens_per_second=options.floor),
        btf_path=options.btf_path,
        loader=options.loader,
        why=_why(options.stacks is not None, options.counters),
        causes=CauseOptions(options.sched, options.faults, options.barriers),
        progress=progress,
        watching=watching,
    )
    _give_way()
    return watched


def _why(stacks: bool, counters: Sequence[str]) -> WhyOptions | None:
    if not stacks and not counters:
        return None
    from ..kernel.perfsys import parse_event
    from ..whys import WhyOptions

    return WhyOptions(STACK_HERTZ if stacks else 0, tuple(parse_event(name) for name in counters))


def _counters(context: click.Context, option: click.Parameter, value: str | None) -> tuple[str, ...]:
    from ..kernel.perfsys import parse_event

    names = tuple(name.strip() for name in (value or "").split(",") if name.strip())
    for name in names:
        try:
            parse_event(name)
        except ValueError:
            raise UsageError(
                f"--counters {name!r} is no event",
                "for example --counters cycles,instructions,l3d_cache_refill=r2a",
            ) from None
    if len(set(names)) != len(names) or len(names) > MAX_COUNTERS:
        raise UsageError(f"--counters takes at most {MAX_COUNTERS} events, each once", "name fewer")
    return names


def _pid(context: click.Context, option: click.Parameter, value: str) -> int:
    text = value.strip()
    if not (text.isascii() and text.isdigit() and len(text) <= 10 and int(text) > 0):
        raise UsageError(f"--pid {value!r} is not a process id", "give a number, as ps -e shows it")
    return int(text)


_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def _positive(text: str, what: tuple[str, str], example: str, value: str | None = None) -> float:
    """The number in ``text``; ``value``: what was written, unit and all."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number > 0):
        written = text if value is None else value
        raise UsageError(f"{what[0]} {written!r} is not {what[1]}", f"for example {example}")
    return number


def _time(value: str, name: str, example: str) -> float:
    """Seconds, or a time with its unit, as the daemon's configuration has it too."""
    text = value.strip()
    unit = _UNITS.get(text[-1:], 0)
    what = (name, "a time such as 30, 30s, 15m or 1h")
    return _positive(text[:-1] if unit else text, what, example, value) * (unit or 1)


def _duration(context: click.Context, option: click.Parameter, value: str | None) -> float | None:
    return None if value is None else _time(value, "--duration", "-d 10")


def _ops(context: click.Context, option: click.Parameter, value: str) -> str:
    if value not in ("sampled", "all", "off"):
        raise UsageError(f"--ops {value!r} is not known", "use --ops sampled, all or off")
    return value


def _budget(context: click.Context, option: click.Parameter, value: str) -> float:
    text = value.strip()
    try:
        ratio = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        ratio = math.nan
    if ratio == 1 and "%" not in text:
        # The whole of the process's time is hardly meant, and would be taken without a word.
        raise UsageError(f"--budget {value!r} may be 1 % or all of its time", "give --budget 1% or 100%")
    if not 0 < ratio <= 1:
        meant = text if 1 < ratio <= 100 and "%" not in text else "1"  # 5 was written for 5%
        raise UsageError(
            f"--budget {value!r} is not a share between 0 and 100 %", f"for example --budget {meant}%"
        )
    return ratio


def _address(text: str | None) -> tuple[str, int] | None:
    if text is None:
        return None
    from .listen import parse_address

    return parse_address(text)


def _floor(context: click.Context, option: click.Parameter, value: str | None) -> float | None:
    what = ("--qos-min-tokens-per-second", "a positive number")
    return None if value is None else _positive(value, what, "5")


def _loader(context: click.Context, option: click.Parameter, value: str) -> str:
    if value not in ("libbpf", "bcc"):
        raise UsageError(f"--loader {value!r} is not known", "use --loader libbpf or bcc")
    return value


@click.command()
@click.option("-p", "--pid", callback=_pid, required=True, metavar="N", help="The process to watch.")
@click.option(
    "-d",
    "--duration",
    callback=_duration,
    metavar="TIME",
    help="Stop after 30 (seconds), 15m, 1h; without it, at Ctrl-C or when the process ends.",
)
@click.option(
    "--ops",
    default="sampled",
    show_default=True,
    callback=_ops,
    metavar="sampled|all|off",
    help="Time operators in bursts as the budget allows, every one of them, or none.",
)
@click.option(
    "--budget",
    default="1%",
    show_default=True,
    callback=_budget,
    metavar="SHARE",
    help="How much slower the process may get at most (with --ops sampled).",
)
@click.option(
    "--qos-min-tokens-per-second",
    "floor",
    callback=_floor,
    metavar="N",
    help="Watch less when it decodes fewer tokens per second than this (with --ops sampled).",
)
@click.option(
    "--format",
    "format_",
    type=click.Choice(["table", "json"]),
    default="table",
    show_default=True,
    help="What is printed at the end.",
)
@click.option(
    "--listen",
    metavar="HOST:PORT",
    help="Serve the same numbers to Prometheus meanwhile; a PORT alone is on 127.0.0.1.",
)
@click.option(
    "--stacks",
    metavar="FILE",
    help="Sample where CPU time goes, and save the stacks: a flame graph if FILE ends in .svg, else text.",
)
@click.option(
    "--counters",
    callback=_counters,
    metavar="EVENTS",
    help="Count performance events by operator: names as perf has them, or rHEX, commas between.",
)
@click.option("-o", "output", metavar="FILE", help="Save the JSON to FILE too (mode 0600).")
@click.option(
    "--attach-method",
    "method",
    type=click.Choice(["auto", "multi", "perf"]),
    default="auto",
    show_default=True,
    help="How probes are attached: by what the kernel has, or forced.",
)
@click.option(
    "--loader",
    default="libbpf",
    show_default=True,
    callback=_loader,
    metavar="libbpf|bcc",
    help="What loads the probes: bcc compiles them here first, and does not sample.",
)
@click.option("--sched/--no-sched", default=True, show_default=True, help="Watch what its threads wait for.")
@click.option("--faults/--no-faults", default=True, show_default=True, help="Watch its page faults.")
@click.option("--barriers", is_flag=True, help="Time each thread in each operator (with --ops all).")
@click.option("--btf-path", metavar="FILE", help="Kernel type information, where the kernel brings none.")
@click.option("-q", "--quiet", is_flag=True, help="No progress and no live table on stderr.")
@click.option("-v", "--verbose", is_flag=True, help="Show where in the code an internal error came from.")
def attach(
    pid: int,
    duration: float | None,
    ops: str,
    budget: float,
    floor: float | None,
    format_: str,
    listen: str | None,
    stacks: str | None,
    counters: tuple[str, ...],
    output: str | None,
    method: str,
    loader: str,
    btf_path: str | None,
    sched: bool,
    faults: bool,
    barriers: bool,
    quiet: bool,
    verbose: bool,
) -> None:
    """Show where the tokens of a running process go.

    Nothing is restarted, and no file or byte of the process is changed. Ctrl-C prints and
    saves what was seen.
    """
    if loader == "bcc" and click.get_current_context().get_parameter_source("ops") is _DEFAULT:
        ops = "all"  # it does not sample
    if barriers and ops != "all":
        raise UsageError("--barriers needs every operator", "use it with --ops all")
    run(
        Options(
            pid=pid,
            duration=duration,
            ops=ops,
            budget=budget,
            floor=floor,
            format=format_,
            listen=_address(listen),
            method=method,
            loader=loader,
            btf_path=None if btf_path is None else btf_file(btf_path),
            output=output,
            quiet=quiet,
            stacks=stacks,
            counters=counters,
            sched=sched,
            faults=faults,
            barriers=barriers,
        )
    )  # fmt: skip


def run(options: Options, clock: Callable[[], float] = time.monotonic) -> None:
    """The whole of ``attach``; returns when done (exit 0), else raises what main() catches."""
    with ExitStack() as stack:
        wakeup = stack.enter_context(Wakeup())
        file = None
        if options.output is not None:
            file = PrivateFile(options.output)
            stack.callback(file.close)
        stacks = None
        if options.stacks is not None:
            stacks = PrivateFile(options.stacks)
            stack.callback(stacks.close)
        published = None
        if options.listen is not None:
            from .listen import Published, serve

            published = Published(wakeup.ring)
            server = serve(options.listen, published)
            stack.callback(server.close)
            if not options.quiet:
                say(f"metrics at {server.url}")
        stop = stack.enter_context(Stop(wakeup))
        try:
            progress = (lambda line: None) if options.quiet else say
            watched = open_attachment(options, progress, stop.watching)
        except KeyboardInterrupt:
            raise Interrupted from None
        probes = stack.enter_context(ExitStack())  # closing it twice closes the probes once
        probes.callback(watched.close)
        view = choose_view(quiet=options.quiet)
        end, notes = End.FAILED, []
        try:
            with view:
                end = _watch(watched, options, stop, wakeup, view, published, clock)
            notes = _notes(end, watched.seen_anything)
        finally:
            # Also when polling failed: what was seen until then is the person's.
            if watched.seen_anything or end is End.DURATION:
                # The target comes first: its probes go before a slow terminal, pager or
                # disk is waited for. Closing also settles what was left undecided.
                probes.close()
                snapshot = watched.snapshot()
                _deliver(snapshot, options, file, notes)
                if stacks is not None and snapshot.cpu_time is not None:
                    _save_stacks(snapshot, options, stacks)
    if not watched.seen_anything and end is End.TARGET:
        raise TargetEnded(
            f"process {options.pid} ended before anything was seen", "attach while it answers a prompt"
        )
    if not watched.seen_anything and end is End.ASKED:
        raise Interrupted


def _give_way() -> None:
    """The target comes first: what is done with the records can wait, its threads cannot.

    On a machine whose cores are all busy, the work on a graph that was not seen before (some
    20 ms) would else come from a thread that others spin for at a barrier. The rings hold
    seconds of records.
    """
    with contextlib.suppress(OSError):  # refused: then we compete as before
        os.setpriority(os.PRIO_PROCESS, 0, max(NICE, os.getpriority(os.PRIO_PROCESS, 0)))


def _watch(
    watched: Watched,
    options: Options,
    stop: Stop,
    wakeup: Wakeup,
    view: View,
    published: Published | None,
    clock: Callable[[], float],
) -> End:
    """Polls until something ends it; the last poll comes after the end was noticed."""
    begun = clock()
    until = math.inf if options.duration is None else begun + options.duration
    refresh = begun if view.every < math.inf else math.inf
    while True:
        now = clock()
        end = None
        if stop.asked:
            end = End.ASKED
        elif now >= until:
            end = End.DURATION
        elif not watched.alive():
            end = End.TARGET
        if end:
            watched.poll(0.0)
            return end
        watched.wait(max(min(POLL_SECONDS, until - now, refresh - now), 0.0), wakeup)
        shown = clock() >= refresh
        scraped = published is not None and published.wanted
        if shown or scraped:
            watched.poll(0.0)  # of now, and not of the last time the rings were full enough
            snapshot = watched.snapshot()
            if published is not None:
                published.set(snapshot, watched.seen_anything)
            if shown:
                view.update(snapshot)
                refresh = clock() + view.every


def _notes(end: End, seen: bool) -> list[str]:
    if end is End.TARGET:
        return ["the target ended while it was watched"]
    if not seen:
        return ["the target was idle: no call or graph was seen while attached"]
    return []


def _deliver(snapshot: Snapshot, options: Options, file: PrivateFile | None, notes: list[str]) -> None:
    if notes:
        snapshot = dataclasses.replace(snapshot, notes=(*snapshot.notes, *notes))
    as_json = JsonExporter().render(snapshot) if file is not None or options.format == "json" else ""
    try:
        if file is not None:
            file.write(as_json)
    finally:
        if options.format == "json":
            write_data(as_json)
        else:
            from .terminal import stdout_table

            write_data(stdout_table().render(snapshot))
    if file is not None and not options.quiet:
        say(f"saved {options.output}")


def _save_stacks(snapshot: Snapshot, options: Options, file: PrivateFile) -> None:
    from ...exporters.flamegraph import flame_graph, folded

    if snapshot.cpu_time is None or options.stacks is None:
        return
    if options.stacks.endswith(".svg"):
        model = snapshot.target.model or "no model"
        file.write(flame_graph(snapshot.cpu_time, f"{os.path.basename(snapshot.target.exe)}, {model}"))
    else:
        file.write(folded(snapshot.cpu_time))
    if not options.quiet:
        say(f"saved {options.stacks}")
