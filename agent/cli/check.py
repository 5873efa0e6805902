# SPDX-License-Identifier: Apache-2.0
"""``profinferd check``: what this machine and a process can give; what is missing, why, and what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...exporters.text import clean
from ..errors import ExitCode, UsageError
from ..version import version
from .output import btf_file, write_data

if TYPE_CHECKING:
    from ..checkup import Checkup, ProcessReport
    from ..kernel.check import Fact

SCHEMA = 1


def _pid(context: click.Context, option: click.Parameter, value: str | None) -> int | None:
    if value is None:
        return None
    text = value.strip()
    if not (text.isascii() and text.isdigit() and len(text) <= 10 and int(text) > 0):
        raise UsageError(f"--pid {value!r} is not a process id", "give a number, as ps -e shows it")
    return int(text)


@click.command()
@click.option("-p", "--pid", callback=_pid, metavar="N", help="Look into this process, too.")
@click.option(
    "--format",
    "format_",
    type=click.Choice(["table", "json"]),
    default="table",
    show_default=True,
    help="What is printed.",
)
@click.option("--btf-path", metavar="FILE", help="Kernel type information, where the kernel brings none.")
@click.option("--sysfs", default="/sys", hidden=True, metavar="DIR", help="Where /sys lies (for tests).")
@click.option("--without", multiple=True, hidden=True, metavar="NAME", help="Taken for absent (for tests).")
@click.option("-v", "--verbose", is_flag=True, help="Show where in the code an internal error came from.")
def check(
    pid: int | None,
    format_: str,
    btf_path: str | None,
    sysfs: str,
    without: tuple[str, ...],
    verbose: bool,
) -> int:
    """Try what this machine can do, and say what is missing.

    Every feature is tried on a process of our own; a process given with --pid is
    only looked into. Exit code 0: it can be profiled; 3: this process cannot;
    4: this machine cannot.
    """
    from ..checkup import check_up  # loads numpy and libbpf: not for --help or a usage error

    found = check_up(
        pid,
        btf_path=None if btf_path is None else btf_file(btf_path),
        sysfs=Path(sysfs),
        without=without,
    )
    write_data(json.dumps(as_json(found), indent=1) + "\n" if format_ == "json" else table(found))
    return ExitCode(found.exit_code)


def as_json(found: Checkup) -> dict[str, Any]:
    """One object; fields are added, never renamed. ``reason`` and ``remedy`` are null where it works."""
    from ..checkup import LOSSES

    return {
        "schema": SCHEMA,
        "version": version(),
        "kernel": found.kernel,
        "architecture": found.architecture,
        "usable": found.blocked is None,
        "method": found.machine.method,
        "blocked": None if found.blocked is None else _problem(found.blocked.what, found.blocked.remedy),
        "features": [
            {
                "name": f.name,
                "what": f.what,
                "ok": f.ok,
                "reason": f.reason or None,
                "remedy": f.remedy or None,
                "lost": None if f.ok else LOSSES.get(f.name),
            }
            for f in found.facts
        ],
        "process": None if found.process is None else _process_json(found.process),
    }


def _problem(what: str, remedy: str) -> dict[str, str | None]:
    return {"reason": what, "remedy": remedy or None}


def _process_json(process: ProcessReport) -> dict[str, Any]:
    error = process.error
    return {
        "pid": process.pid,
        "program": process.program,
        "engine": process.engine,
        "model": process.model,
        "usable": error is None,
        "blocked": None if error is None else _problem(error.what, error.remedy),
        "op_source": process.op_source,
        "layouts": list(process.layouts),
        "levels": [{"name": lv.name, "ok": lv.ok, "reason": lv.reason or None} for lv in process.levels],
        "notes": list(process.notes),
    }


def table(found: Checkup) -> str:
    """The same for people: one line per feature, what is missing explained below it."""
    from ..checkup import LOSSES

    lines = [f"Linux {clean(found.kernel, 80)} on {found.architecture}, profinferd {version()}", ""]
    said: set[str] = set()
    for fact in found.facts:
        lines += _feature(fact, LOSSES.get(fact.name), said)
    lines.append("")
    if found.blocked is not None:
        lines.append("This machine cannot profile:")
        lines += _explained(found.blocked.what, found.blocked.remedy)
    else:
        ways = {
            "session": "sessions: one link for entries and returns",
            "multi": "multi links: one for entries, one for returns",
            "perf": "perf events, one per function: slow to attach and to detach",
        }
        lines.append(f"This machine can profile. Probes hang on {ways[str(found.machine.method)]}.")
    if found.process is not None:
        lines += ["", *_process(found.process)]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _feature(fact: Fact, lost: str | None, said: set[str]) -> list[str]:
    """``said``: reasons given so far; one missing privilege takes away many features."""
    lines = [f"  {'yes' if fact.ok else 'NO ':<3}  {fact.what}"]
    if not fact.ok:
        cause = fact.reason.partition(": ")[2]
        if cause in said:
            lines.append("       why: the same reason")
        else:
            lines += _explained(fact.reason, fact.remedy, 7)
        said |= {cause} - {""}
        if lost:
            lines.append(f"       without it: {lost}")
    return lines


def _explained(reason: str, remedy: str, indent: int = 2) -> list[str]:
    blank = " " * indent
    lines = [f"{blank}why: {clean(reason, 400)}"]
    return [*lines, f"{blank}do: {clean(remedy, 400)}"] if remedy else lines


def _process(process: ProcessReport) -> list[str]:
    name = clean(process.program, 40) if process.program else "process"
    if process.error is not None:
        return [f"{name} (pid {process.pid}) cannot be profiled:",
                *_explained(process.error.what, process.error.remedy)]  # fmt: skip
    lines = [f"{name} (pid {process.pid}): {process.engine}, model {clean(process.model or 'not seen', 60)}"]
    for level in process.levels:
        reason = f": {clean(level.reason, 200)}" if level.reason else ""
        lines.append(f"  {'yes' if level.ok else 'NO ':<3}  {_LEVELS.get(level.name, level.name)}{reason}")
    lines += [f"  note: {clean(note, 300)}" for note in process.notes]
    return lines


_LEVELS = {
    "call": "tokens, calls and latencies",
    "graph": "compute graphs",
    "op": "time per operator",
    "api": "calls of the device's interface",
}
