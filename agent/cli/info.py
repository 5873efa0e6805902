# SPDX-License-Identifier: Apache-2.0
"""``profinferd info``: what is in a recording, without reading all of it."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Any

import click

from ...exporters.text import clean
from .output import write_data

if TYPE_CHECKING:
    from ..model.trace import Trace


@click.command()
@click.argument("file", metavar="FILE")
@click.option(
    "--format", "format_", type=click.Choice(["table", "json"]), default="table", show_default=True,
    help="How it is printed.",
)  # fmt: skip
@click.option("-v", "--verbose", is_flag=True, help="Show where in the code an internal error came from.")
def info(file: str, format_: str, verbose: bool) -> None:
    """Say what is in a recording: of what, when, how much, and what was lost."""
    from ..recording.reader import Recording

    with Recording.open(file) as recording:
        facts = describe(recording.trace, os.stat(file).st_size)
    write_data(json.dumps(facts, indent=2) + "\n" if format_ == "json" else _table(file, facts))


def describe(trace: Trace, size: int) -> dict[str, Any]:
    """The facts, ready for JSON. Times in seconds, sizes in bytes, None for what is not known."""
    facts, snapshot = trace.facts, trace.snapshot
    child = facts.child
    return {
        "target": {"exe": facts.target.exe, "pid": facts.target.pid, "engine": facts.target.engine,
                   "model": facts.target.model},
        "created": facts.created,
        "version": facts.version,
        "seconds": (facts.end_ns - facts.begin_ns) / 1e9,
        "finished": facts.finished,
        "bytes": size,
        "machine": {"host": facts.machine.host, "kernel": facts.machine.kernel, "arch": facts.machine.arch,
                    "cpu": facts.machine.cpu, "cpus": facts.machine.cpus, "memory": facts.machine.memory},
        "ops": facts.ops,
        "tokens": {"prefill": snapshot.tokens.prefill, "decode": snapshot.tokens.decode,
                   "output_rows": snapshot.tokens.output_rows},
        "records": {"calls": trace.counts.calls, "runs": trace.counts.runs, "ops": trace.counts.ops,
                    "graphs": len(facts.graphs), **trace.kinds},
        "peaks": bool(facts.peaks.by_threads),
        "child": None if child is None else {"program": child.program, "exit_code": child.exit_code,
                                             "signal": child.signal},
        "lost": dict(facts.losses),
        "gaps": len(trace.gaps),
        "notes": [*facts.notes],
    }  # fmt: skip


def _table(file: str, facts: dict[str, Any]) -> str:
    target, machine, tokens, child = facts["target"], facts["machine"], facts["tokens"], facts["child"]
    lost = {kind: count for kind, count in facts["lost"].items() if count}
    about = [
        ("recording", f"{file}, {facts['bytes'] / (1 << 20):.1f} MiB, by profinferd {facts['version']}"),
        ("target", f"{target['exe']} (pid {target['pid']}), {target['engine'] or 'engine not known'},"
                   f" {target['model'] or 'model not known'}"),
        ("machine", f"{machine['host']}, {machine['arch']}, Linux {machine['kernel']}, {machine['cpus']} CPUs"
                    f" ({machine['cpu'] or 'not named'})"),
        ("when", f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(facts['created']))},"
                 f" for {facts['seconds']:.1f} s"),
        ("tokens", f"{_number(tokens['prefill'])} prefill, {_number(tokens['decode'])} decode,"
                   f" {_number(tokens['output_rows'])} output rows"),
        ("records", ", ".join(f"{count:,} {kind}" for kind, count in facts["records"].items())),
        ("lost", ", ".join(f"{count:,} {kind}" for kind, count in lost.items())
                 + f" in {facts['gaps']} gaps" if lost else "nothing"),
    ]  # fmt: skip
    if child is not None:
        about.append(("program", f"{child['program']}, {_ended(child)}"))
    if not facts["finished"]:
        about.append(("note", "the recorder did not end it: the last seconds may be missing"))
    about += [("note", note) for note in facts["notes"]]
    return "".join(f"{name:<10} {clean(text)}\n" for name, text in about)


def _number(value: int | None) -> str:
    return "?" if value is None else f"{value:,}"


def _ended(child: dict[str, Any]) -> str:
    if child["signal"] is not None:
        return f"ended by signal {child['signal']}"
    return "was running" if child["exit_code"] is None else f"ended with status {child['exit_code']}"
