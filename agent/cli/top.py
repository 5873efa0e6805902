# SPDX-License-Identifier: Apache-2.0
"""``profinferd top``: what engines do, live."""

from __future__ import annotations

import sys
from contextlib import closing
from typing import TYPE_CHECKING

import click

from ..errors import UsageError
from .attach import _pid as pid_of
from .output import say

if TYPE_CHECKING:
    from ..top.sources import Source


def _optional_pid(context: click.Context, option: click.Parameter, value: str | None) -> int | None:
    return None if value is None else pid_of(context, option, value)


@click.command()
@click.option("-p", "--pid", callback=_optional_pid, metavar="N", help="Attach to this process by itself.")
@click.option("--socket", "path", metavar="PATH", help="The daemon's control socket.")
@click.option(
    "--every",
    type=click.FloatRange(0.2, 3600),
    default=1.0,
    show_default=True,
    metavar="S",
    help="Seconds between two looks.",
)
@click.option("-v", "--verbose", is_flag=True, help="Show where in the code an internal error came from.")
def top(pid: int | None, path: str | None, every: float, verbose: bool) -> None:
    """Show targets, speed, operators and verdicts, live on the terminal.

    The figures are the daemon's; with --pid, those of one process, watched by top
    itself. Keys: arrows choose a target, p the phase, s the order, n shows notes,
    space stops and goes on, q quits.
    """
    if not sys.stdout.isatty():
        raise UsageError("top needs a terminal", "use status --format json, or attach --format json")
    try:
        from ..top.app import TopApp
    except ImportError as error:
        if error.name and error.name.partition(".")[0] in ("profinferd", "agent"):
            raise
        raise UsageError(f"top needs the Python package {error.name}", "install profinferd[top]") from error
    with closing(_source(pid, path)) as source:
        TopApp(source, every).run()


def _source(pid: int | None, path: str | None) -> Source:
    from ..daemon.client import SOCKET
    from ..top.sources import DaemonSource, OwnSource, Watched

    if pid is None:
        return DaemonSource(path or SOCKET)

    def attach() -> Watched:
        from ..attach import Attachment

        return Attachment.open(pid, ops="sampled", progress=say)

    return OwnSource(pid, attach)
