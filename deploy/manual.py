# SPDX-License-Identifier: Apache-2.0
"""Writes man pages and shell completion from the command line itself.

``python deploy/manual.py --root DIR`` puts them where a system looks for them under DIR:
profinferd(1), one page per command, and completion for bash, zsh and fish.
"""

from __future__ import annotations

import argparse
import gzip
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import click
from click.shell_completion import get_completion_class

from profinferd.agent.cli import cli
from profinferd.agent.version import version

PROGRAM = "profinferd"
EXIT_CODES = (
    ("0", "Done; also after Ctrl-C or SIGTERM once something was seen, and for an idle target."),
    ("1", "A defect of profinferd; -v shows where."),
    ("2", "Wrong usage or configuration."),
    ("3", "This process cannot be profiled."),
    ("4", "This machine cannot: a privilege or kernel feature is missing, and the message says which."),
    ("5", "The process ended before anything was seen."),
    ("6", "diff: the difference is larger than --fail-above allows."),
    ("130", "Interrupted before anything was seen."),
)
FILES = (
    ("/etc/profinferd/profinferd.yaml", "Configuration of the daemon; every key is explained there."),
    ("/run/profinferd/profinferd.sock", "Where status and top ask the daemon."),
    ("/var/lib/profinferd", "What probes cost on this machine, as it was measured."),
)
COMPLETIONS = {
    "bash": "usr/share/bash-completion/completions/profinferd",
    "zsh": "usr/share/zsh/vendor-completions/_profinferd",
    "fish": "usr/share/fish/vendor_completions.d/profinferd.fish",
}


def main() -> int:
    options = argparse.ArgumentParser(description="Write man pages and shell completion.")
    options.add_argument("--root", type=Path, required=True)
    given = options.parse_args()
    for name, text in pages():
        path = given.root / "usr/share/man/man1" / f"{name}.1.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(text.encode(), 9, mtime=0))
        print(path)
    for shell, place in COMPLETIONS.items():
        path = given.root / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(completion(shell))
        print(path)
    return 0


def completion(shell: str) -> str:
    """The script that asks profinferd itself for the words that fit."""
    kind = get_completion_class(shell)
    if kind is None:
        raise ValueError(f"click knows no completion for {shell}")
    return kind(cli, {}, PROGRAM, "_PROFINFERD_COMPLETE").source().strip() + "\n"


def pages() -> Iterator[tuple[str, str]]:
    """(name, roff) of every page."""
    context = click.Context(cli, info_name=PROGRAM)
    commands = {
        name: command
        for name in cli.list_commands(context)
        if (command := cli.get_command(context, name)) is not None and not command.hidden
    }
    yield PROGRAM, _main_page(context, commands)
    for name, command in commands.items():
        yield f"{PROGRAM}-{name}", _page(name, command, context, tuple(commands))


def _main_page(context: click.Context, commands: dict[str, click.Command]) -> str:
    lines = [*_head(PROGRAM, "profiler of running local LLM engines"), ".SH SYNOPSIS",
             f".B {PROGRAM}", r"\fICOMMAND\fR [\fIOPTION\fR]...", ".SH DESCRIPTION"]  # fmt: skip
    lines += [
        _roff(str(cli.help)),
        ".PP",
        _roff(
            "Nothing is asked of the process that is watched: no flag, no rebuild, no restart. Small eBPF "
            "programs sit on a few of its functions; what they may cost is bounded, measured and shown."
        ),
        ".SH COMMANDS",
    ]
    for name, command in commands.items():
        lines += [".TP", rf"\fB{_roff(PROGRAM)}\-{_roff(name)}\fR(1)", _roff(_first(command))]
    lines += [".SH OPTIONS", *_options(cli, context)]
    lines += _common()
    return "\n".join(lines) + "\n"


def _page(name: str, command: click.Command, parent: click.Context, names: tuple[str, ...]) -> str:
    context = click.Context(command, info_name=name, parent=parent)
    usage = " ".join(command.collect_usage_pieces(context))
    lines = [*_head(f"{PROGRAM}-{name}", _first(command)), ".SH SYNOPSIS", rf".B {PROGRAM} {_roff(name)}",
             _roff(usage), ".SH DESCRIPTION"]  # fmt: skip
    for number, paragraph in enumerate(re.split(r"\n\s*\n", (command.help or "").strip())):
        lines += [".PP"] * bool(number) + [_roff(" ".join(paragraph.replace("\b", "").split()))]
    lines += [".SH OPTIONS", *_options(command, context)]
    others = [f"{PROGRAM}", *(f"{PROGRAM}-{other}" for other in names if other != name)]
    lines += _common(others)
    return "\n".join(lines) + "\n"


def _head(name: str, what: str) -> list[str]:
    title = name.upper().replace("-", r"\-")
    line = f'.TH {title} 1 "" "{PROGRAM} {version()}" "User Commands"'
    said = what.rstrip(".").replace("\n", " ")
    return [line, ".SH NAME", rf"{_roff(name)} \- {_roff(said[:1].lower() + said[1:])}"]


def _options(command: click.Command, context: click.Context) -> Iterator[str]:
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is not None:
            yield ".TP"
            yield rf"\fB{_roff(record[0])}\fR"
            yield _roff(" ".join(record[1].split()))


def _common(others: list[str] | None = None) -> Iterator[str]:
    yield ".SH EXIT STATUS"
    for code, meaning in EXIT_CODES:
        yield from (".TP", rf"\fB{code}\fR", _roff(meaning))
    yield ".SH FILES"
    for path, meaning in FILES:
        yield from (".TP", rf"\fI{_roff(path)}\fR", _roff(meaning))
    yield ".SH ENVIRONMENT"
    yield from (".TP", r"\fBNO_COLOR\fR", "No colours in tables.")
    if others:
        yield ".SH SEE ALSO"
        yield ",\n".join(rf"\fB{_roff(name)}\fR(1)" for name in others)


def _first(command: click.Command) -> str:
    """The first sentence of what a command says about itself."""
    text = " ".join((command.help or "").split())
    return re.split(r"(?<=[.;])\s|;", text)[0].rstrip(".;") if text else command.name or ""


def _roff(text: str) -> str:
    """Plain text for roff: no character of it is taken for a command."""
    escaped = text.replace("\\", r"\e").replace("-", r"\-")
    return re.sub(r"(?m)^([.'])", r"\\&\1", escaped)


if __name__ == "__main__":
    sys.exit(main())
