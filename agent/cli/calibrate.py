# SPDX-License-Identifier: Apache-2.0
"""``profinferd calibrate``: what probes cost on this machine, measured now and kept for ``attach``."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..errors import MachineError
from .output import btf_file, say, write_data

if TYPE_CHECKING:
    from ..kernel.calibration import Calibration, Figure
    from ..model.peaks import Peaks

STATE = "/var/lib/profinferd"
"""Where ``attach`` looks for the figures."""
_ROWS = {
    ("op", "trace"): "operator, recorded",
    ("op", "sum"): "operator, added up",
    ("other_thread", ""): "operator, another thread",
    ("graph", ""): "graph, entry and return",
    ("call", ""): "call, entry and return",
    ("walk", ""): "node of an unknown graph",
    ("wait", ""): "wait of a thread",
    ("wait_record", ""): "a record of it, besides",
    ("other_switch", ""): "switch of another process",
    ("fault", ""): "page fault",
}
_SITES = {"emulated": "emulated", "stepped": "single-stepped", "": "none"}


@click.command()
@click.option(
    "--attach-method",
    "method",
    type=click.Choice(["auto", "session", "multi", "perf"]),
    default="auto",
    show_default=True,
    help="How probes are attached: by what the kernel has, or forced.",
)
@click.option(
    "--format",
    "format_",
    type=click.Choice(["table", "json"]),
    default="table",
    show_default=True,
    help="What is printed.",
)
@click.option("--quick", is_flag=True, help="Only the most frequent hits, in 0.2 s; not kept.")
@click.option(
    "--state",
    default=STATE,
    show_default=True,
    metavar="DIR",
    help="Where the figures are kept.",
)
@click.option("--btf-path", metavar="FILE", help="Kernel type information, where the kernel brings none.")
@click.option("-q", "--quiet", is_flag=True, help="No progress on stderr.")
@click.option("-v", "--verbose", is_flag=True, help="Show where in the code an internal error came from.")
def calibrate(
    method: str, format_: str, quick: bool, state: str, btf_path: str | None, quiet: bool, verbose: bool
) -> None:
    """Measure what probes cost on this machine, and what it can do at most; takes about 5 s.

    Nothing but processes of our own is touched, but memory and all CPUs are busy for some
    seconds. attach uses the figures kept in the default folder; where there are none it
    measures what probes cost, and leaves the machine's peaks to you.
    """
    from ..kernel import calibration  # loads numpy and libbpf: not for --help or a usage error
    from ..kernel.calibrate import measure
    from ..kernel.peaks import available_bytes, measure_peaks, memory_room, store_peaks
    from ..model.peaks import Peaks
    from ..target.quota import memory_left

    found = measure(
        method,
        quick=quick,
        btf_path=None if btf_path is None else btf_file(btf_path),
        progress=(lambda line: None) if quiet else say,
    )
    peaks, unwritten = None, None
    if not quick:
        # Kept before anything else can go wrong. A folder that cannot be written does not make the
        # figures worse: it is told at the end.
        try:
            calibration.store(Path(state), found)
        except MachineError as error:
            unwritten = error
        try:
            peaks = measure_peaks(
                room=memory_room(available_bytes(), memory_left()),
                progress=(lambda line: None) if quiet else say,
            )
        except MachineError as error:
            peaks = Peaks((), reason=error.what)
    write_data(_json(found, peaks) if format_ == "json" else table(found, peaks))
    if unwritten is not None:
        raise unwritten
    if not quick:
        if peaks is not None and peaks.by_threads:
            store_peaks(Path(state), peaks)
        if not quiet:
            say(f"kept in {state}")


def _json(found: Calibration, peaks: Peaks | None) -> str:
    """One object: the calibration's, and its ``peaks`` (null with --quick)."""
    document = json.loads(found.to_json())
    document["peaks"] = None if peaks is None else dataclasses.asdict(peaks)
    return json.dumps(document, indent=2) + "\n"


def table(found: Calibration, peaks: Peaks | None = None) -> str:
    """The figures for people."""
    head = ("per hit, to the target", "instruction", "ns", "95 % interval")
    rows = [
        (
            _ROWS.get((h.kind, h.mode), h.kind),
            _SITES.get(h.site, h.site),
            f"{h.cost.ns:,.0f}",
            _interval(h.cost),
        )
        for h in found.ns_per_hit
    ]
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(4)]
    lines = [f"{found.machine}, Linux {found.kernel}, attached with {found.method}", ""]
    lines += [
        f"{row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]:>{widths[3]}}"
        for row in (head, *rows)
    ]
    lines.append("")
    if found.ns_per_cycle_wait is None or found.ns_per_cycle_stall is None:
        lines.append("arming and disarming: not measured")
    else:
        wait, stall = found.ns_per_cycle_wait, found.ns_per_cycle_stall
        lines.append(
            f"arming and disarming: {wait.ns / 1e6:.1f} ms ({_interval(wait, 1e6, 1)}), "
            f"the target stands still for {stall.ns / 1e6:.2f} ms of it ({_interval(stall, 1e6, 2)})"
        )
    if peaks is not None:
        lines += ["", *_peaks(peaks)]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _peaks(peaks: Peaks) -> Iterator[str]:
    if not peaks.by_threads:
        yield f"what this machine can do at most: not measured, {peaks.reason}"
        return
    columns = (
        ("threads", [str(peak.threads) for peak in peaks.by_threads]),
        ("reading, GB/s", [_giga(peak.read_bytes_per_second, 1) for peak in peaks.by_threads]),
        ("STREAM triad, GB/s", [_giga(peak.triad_bytes_per_second, 1) for peak in peaks.by_threads]),
        ("float32, GFLOP/s", [_giga(peak.flops_per_second, 0) for peak in peaks.by_threads]),
        ("8-bit, GOP/s", [_giga(peak.int8_ops_per_second, 0) for peak in peaks.by_threads]),
    )
    yield f"at most, with {peaks.instructions}"
    for row in zip(*([title, *cells] for title, cells in columns), strict=True):
        yield "  ".join(f"{cell:>{len(column[0])}}" for cell, column in zip(row, columns, strict=True))


def _giga(rate: float | None, digits: int) -> str:
    return "-" if rate is None else f"{rate / 1e9:,.{digits}f}"


def _interval(figure: Figure, unit: float = 1.0, digits: int = 0) -> str:
    return f"{figure.low / unit:,.{digits}f} to {figure.high / unit:,.{digits}f}"
