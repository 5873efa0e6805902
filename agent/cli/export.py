# SPDX-License-Identifier: Apache-2.0
"""``profinferd export``: a recording in formats that other tools read."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator

import click

from ...exporters import Choice
from ...exporters.formats import FORMATS, Format
from ...exporters.text import clean
from ..errors import MachineError, UsageError
from .output import PrivateFile, invoking_user, refuse_input, say, write_data

_BINARY = frozenset({"perfetto", "chakra"})


@click.command()
@click.argument("file", metavar="FILE", type=click.Path())
@click.option(
    "--format",
    "format_",
    type=click.Choice(list(FORMATS)),
    required=True,
    help="; ".join(f"{f.name}: {f.about}" for f in FORMATS.values()) + ".",
)
@click.option("-o", "output", metavar="PATH", help="The file to write, or the folder (parquet, csv).")
@click.option("--from", "begin", type=float, metavar="S", help="Leave out what ended before this second.")
@click.option("--to", "end", type=float, metavar="S", help="Leave out what began after this second.")
@click.option("--graph", type=click.IntRange(min=0), metavar="N", help="Which graph is drawn.")
@click.option("--anonymise", is_flag=True, help="Name no model, weight, program or host; round sizes.")
@click.option("--no-times", is_flag=True, help="Structure alone.")
@click.option("-q", "--quiet", is_flag=True, help="No progress on stderr.")
@click.option("-v", "--verbose", is_flag=True, help="Show where in the code an internal error came from.")
def export(
    file: str,
    format_: str,
    output: str | None,
    begin: float | None,
    end: float | None,
    graph: int | None,
    anonymise: bool,
    no_times: bool,
    quiet: bool,
    verbose: bool,
) -> None:
    """Write a recording in a format that other tools read.

    FILE was written by profinferd record. Without -o the data goes to stdout.
    Needs no privileges.
    """
    from ..recording.reader import Recording

    chosen = FORMATS[format_]
    if output is None and not chosen.suffix:
        raise UsageError(f"--format {format_} writes a folder", "say which with -o")
    if output is None and format_ in _BINARY and sys.stdout.isatty():
        raise UsageError(f"--format {format_} is not for a terminal", f"write it with -o NAME{chosen.suffix}")
    if begin is not None and end is not None and end <= begin:
        raise UsageError("--to is not after --from", "give the end of the stretch that you want")
    if output is not None:
        refuse_input(output, [file])
    with Recording.open(file) as recording:
        trace = recording.trace
        first = trace.facts.begin_ns
        window = None
        if begin is not None or end is not None:
            window = (
                first + int((begin or 0.0) * 1e9),
                trace.facts.end_ns + 1 if end is None else first + int(end * 1e9),
            )
        present = frozenset[str]() if output is None or chosen.suffix else _present(output)
        choice = Choice(window=window, graph=graph, anonymise=anonymise, times=not no_times, present=present)
        files = chosen.load().files(trace, choice)
        size, count = _write(chosen, files, output)
    if output is not None and not quiet:
        what = f"{count} files in" if not chosen.suffix else "wrote"
        say(f"{what} {clean(output, 300)} ({size / 1e6:.1f} MB)")


def _present(folder: str) -> frozenset[str]:
    """Tables that earlier exports put into a folder: folders that are partitioned by host."""
    with contextlib.suppress(OSError):
        names = [entry.name for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)]
        return frozenset(
            name for name in names if any(part.startswith("host=") for part in os.listdir(f"{folder}/{name}"))
        )
    return frozenset()


def _write(
    chosen: Format, files: Iterator[tuple[str, Iterable[bytes]]], output: str | None
) -> tuple[int, int]:
    """(bytes, files) written."""
    if output is None:
        for _, pieces in files:
            for piece in pieces:
                write_data(piece)
        return 0, 1
    if chosen.suffix:
        target = PrivateFile(output)
        try:
            size = sum(target.write_pieces(pieces) for _, pieces in files)
        finally:
            target.close()
        return size, 1
    return _write_folder(files, output)


def _write_folder(files: Iterator[tuple[str, Iterable[bytes]]], output: str) -> tuple[int, int]:
    """The same for many files: each gets its name only when all of them are whole. A table that is
    missing among others of one recording would look like one that is empty."""
    size = 0
    made: list[str] = []
    with contextlib.ExitStack() as stack:
        targets: list[PrivateFile] = []
        try:
            for path, pieces in files:
                where = os.path.join(output, path)
                _folders(output, os.path.dirname(where), made)
                targets.append(PrivateFile(where))
                stack.callback(targets[-1].close)
                size += targets[-1].stage(pieces)
            for target in targets:
                target.commit()
        except BaseException:
            stack.close()
            for folder in reversed(made):
                with contextlib.suppress(OSError):  # there is something in it
                    os.rmdir(folder)
            raise
    return size, len(targets)


def _folders(top: str, folder: str, made: list[str]) -> None:
    """Makes ``folder`` and what is missing above it down from ``top``, for the invoking user alone;
    ``made`` gets what was."""
    if os.path.isdir(folder):
        return
    if folder != top and folder != os.path.dirname(folder):
        _folders(top, os.path.dirname(folder) or ".", made)
    try:
        os.mkdir(folder, 0o700)
        made.append(folder)
        if (user := invoking_user()) is not None:
            os.chown(folder, *user, follow_symlinks=False)
    except OSError as error:
        raise MachineError(
            f"cannot make the folder {clean(folder)!r} ({error.strerror})", "choose another one with -o"
        ) from error
