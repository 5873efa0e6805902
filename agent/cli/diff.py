# SPDX-License-Identifier: Apache-2.0
"""``profinferd diff``: what changed from one recording to another, operator by operator."""

from __future__ import annotations

import re

import click

from ...exporters.text import clean
from ..errors import ExitCode, UsageError
from .output import PrivateFile, refuse_input, say, write_data

_LIMIT = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*(%?)")


@click.command()
@click.argument("a", metavar="A", type=click.Path())
@click.argument("b", metavar="B", type=click.Path())
@click.option("--fail-above", metavar="LIMIT", help="Exit with 6 if B is slower by more than this: 5%.")
@click.option(
    "--format",
    "format_",
    type=click.Choice(["table", "json"]),
    default="table",
    show_default=True,
    help="What is printed.",
)
@click.option("--all", "everything", is_flag=True, help="Operators that did not change as well.")
@click.option("-o", "output", metavar="FILE", help="Save the JSON as well.")
@click.option("-q", "--quiet", is_flag=True, help="No progress on stderr.")
@click.option("-v", "--verbose", is_flag=True, help="Show where in the code an internal error came from.")
def diff(
    a: str,
    b: str,
    fail_above: str | None,
    format_: str,
    everything: bool,
    output: str | None,
    quiet: bool,
    verbose: bool,
) -> int:
    """Show what changed from recording A to recording B.

    Operators are matched by what they are, not by name or order, and compared
    on executions with the same tokens and context length. Noise of the machine
    is told apart from change. Needs no privileges.
    """
    limit = None if fail_above is None else _limit(fail_above)
    from ...exporters import difftable
    from ...exporters.json_export import dumps
    from ..model.diff import compare
    from ..recording.reader import Recording

    if output is not None:
        refuse_input(output, [a, b])
    file = None if output is None else PrivateFile(output)
    try:
        with Recording.open(a) as first, Recording.open(b) as second:
            found = compare(first.trace, second.trace)
        if file is not None:
            file.write(dumps(found.to_json()))
    finally:
        if file is not None:
            file.close()
    write_data(
        dumps(found.to_json()) if format_ == "json" else difftable.render(found, everything=everything)
    )
    if limit is not None and all(phase.total is None for phase in found.phases):
        raise UsageError(
            "too little could be compared for --fail-above to tell anything",
            "record both with --ops all and the same prompts, for longer",
        )
    exceeded = [] if limit is None else found.exceeded(limit)
    for line in exceeded:
        say(f"above {clean(fail_above or '', 20)}: {line}")
    return int(ExitCode.DIFFERS if exceeded else ExitCode.DONE)


def _limit(text: str) -> float:
    """``5%`` or ``0.05``."""
    match = _LIMIT.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"--fail-above {clean(text, 40)!r} is not a share", "give one like 5% or 0.05")
    value = float(match.group(1))
    return value / 100 if match.group(2) else value
