# SPDX-License-Identifier: Apache-2.0
"""``profinferd calibrate``: what probes cost on this machine, measured now and kept for ``attach``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from .output import btf_file, say, write_data

if TYPE_CHECKING:
    from ..kernel.calibration import Calibration, Figure

STATE = "/var/lib/profinferd"
"""Where ``attach`` looks for the figures."""
_ROWS = {
    ("op", "trace"): "operator, recorded",
    ("op", "sum"): "operator, added up",
    ("other_thread", ""): "operator, another thread",
    ("graph", ""): "graph, entry and return",
    ("call", ""): "call, entry and return",
    ("walk", ""): "node of an unknown graph",
}
_SITES = {"emulated": "emulated", "stepped": "single-stepped"}


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
    """Measure what probes cost on this machine; takes about 2 s.

    Nothing but a process of our own is touched. attach uses the figures kept in
    the default folder, and measures where there are none.
    """
    from ..kernel import calibration  # loads numpy and libbpf: not for --help or a usage error
    from ..kernel.calibrate import measure

    found = measure(
        method,
        quick=quick,
        btf_path=None if btf_path is None else btf_file(btf_path),
        progress=(lambda line: None) if quiet else say,
    )
    # Printed first: a folder that cannot be written does not make the figures worse.
    write_data(found.to_json() if format_ == "json" else table(found))
    if not quick:
        calibration.store(Path(state), found)
        if not quiet:
            say(f"kept in {state}")


def table(found: Calibration) -> str:
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
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _interval(figure: Figure, unit: float = 1.0, digits: int = 0) -> str:
    return f"{figure.low / unit:,.{digits}f} to {figure.high / unit:,.{digits}f}"
