# SPDX-License-Identifier: Apache-2.0
"""``profinferd report``: a recording for people, on the terminal or as one HTML page."""

from __future__ import annotations

import os
from pathlib import Path

import click

from ...exporters.text import clean
from ..errors import MachineError
from ..version import version
from .output import PrivateFile, refuse_input, say, write_data


@click.command()
@click.argument("file", metavar="FILE", type=click.Path())
@click.option("--html", metavar="FILE", help="Write one self-contained page instead; it opens offline.")
@click.option("-q", "--quiet", is_flag=True, help="No progress on stderr.")
@click.option("-v", "--verbose", is_flag=True, help="Show where in the code an internal error came from.")
def report(file: str, html: str | None, quiet: bool, verbose: bool) -> None:
    """Show what a recording holds: where its tokens' time went, and why.

    FILE was written by profinferd record. Needs no privileges, and nothing of
    the process that was recorded.
    """
    # Loads numpy, and rich or the page: not for --help or a usage error.
    from ..recording.reader import Recording

    if html is None:
        from .terminal import stdout_report

        with Recording.open(file) as recording:
            text = stdout_report().render(recording.trace)
        write_data(text)
        return
    refuse_input(html, [file], "--html")
    out = PrivateFile(html, "--html")
    try:
        page = _page(file)
        out.write(page)
    finally:
        out.close()
    if not quiet:
        say(f"wrote {clean(html, 300)} ({len(page.encode()) / 1e6:.1f} MB): open it in a browser")


def _page(file: str) -> str:
    from ...exporters import html
    from ..recording.reader import Recording

    try:
        html.template()  # before a long recording is read for nothing
    except html.NoPage as error:
        raise MachineError(
            str(error), "install a wheel, or run 'make setup' with Node.js (Debian: npm) in a checkout"
        ) from error
    with Recording.open(file) as recording:
        return html.render(recording.trace, Path(os.fspath(file)).name, f"profinferd {version()}")
