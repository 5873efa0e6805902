# SPDX-License-Identifier: Apache-2.0
"""``profinferd daemon`` and ``profinferd status``."""

from __future__ import annotations

import json

import click

from .output import write_data


@click.command()
@click.option("-c", "--config", metavar="FILE", help="Configuration; the default file is used if it exists.")
@click.option("--check", "check_only", is_flag=True, help="Only check the configuration.")
@click.option("-v", "--verbose", is_flag=True, help="Log more, and where an internal error came from.")
def daemon(config: str | None, check_only: bool, verbose: bool) -> None:
    """Watch every engine on this machine, in the foreground, until SIGTERM.

    deploy/profinferd.yaml documents the configuration. SIGHUP reads it again.
    """
    from ..daemon.config import load
    from ..daemon.log import Log

    settings = load(config)
    if check_only:
        return
    from ..daemon.start import start

    log = Log("debug" if verbose else settings.log.level, settings.log.format)
    start(config, settings, log).run()


@click.command()
@click.option("--socket", "path", metavar="PATH", help="The daemon's control socket.")
@click.option(
    "--format",
    "format_",
    type=click.Choice(["table", "json"]),
    default="table",
    show_default=True,
    help="What is printed.",
)
def status(path: str | None, format_: str) -> None:
    """What the running daemon watches, and how it is itself."""
    from ..daemon.client import SOCKET, ControlClient

    with ControlClient(path or SOCKET) as client:
        health, snapshot = client.health(), client.snapshot()
    if format_ == "json":
        write_data(json.dumps({**health, "targets": snapshot.get("targets", [])}, indent=1) + "\n")
        return
    from ..daemon.statustable import table

    write_data(table(health, snapshot))
