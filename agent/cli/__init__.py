# SPDX-License-Identifier: Apache-2.0
"""The command line: one module per command, one place where errors are caught.

Data goes to stdout, everything else to stderr. Exit codes are those of
:class:`profinferd.agent.errors.ExitCode`.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence

import click

from ..errors import ExitCode, ProfinferError
from ..version import version
from .attach import attach as attach_command
from .calibrate import calibrate as calibrate_command
from .check import check as check_command
from .daemon import daemon as daemon_command
from .daemon import status as status_command
from .diff import diff as diff_command
from .export import export as export_command
from .info import info as info_command
from .output import prepare_streams, say, write_data
from .record import record as record_command
from .report import report as report_command
from .signals import Interrupted
from .top import top as top_command

_CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


def _print_version(context: click.Context, option: click.Parameter, wanted: bool) -> None:
    if wanted and not context.resilient_parsing:
        write_data(f"profinferd {version()}\n")
        context.exit()


@click.group(context_settings=_CONTEXT, no_args_is_help=False)
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_print_version,
    help="Print the version and exit.",
)
def cli() -> None:
    """See from outside, without a restart, where the tokens of a local LLM go."""


cli.add_command(attach_command)
cli.add_command(diff_command)
cli.add_command(export_command)
cli.add_command(top_command)
cli.add_command(calibrate_command)
cli.add_command(check_command)
cli.add_command(info_command)
cli.add_command(record_command)
cli.add_command(daemon_command)
cli.add_command(status_command)
cli.add_command(report_command)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code and never raises. The only catch there is."""
    prepare_streams()
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = cli.main(args=given, prog_name="profinferd", standalone_mode=False)
        return int(code or ExitCode.DONE)
    except ProfinferError as error:
        return _fail(str(error), error.exit_code)
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx is not None else "profinferd"
        said = error.format_message()
        see = f"{said} See" if said.endswith("?") else f"{said.rstrip('.')}: see"
        return _fail(f"{see} '{path} --help'", ExitCode.USAGE)
    except click.ClickException as error:
        return _fail(error.format_message(), ExitCode.USAGE)
    except (Interrupted, KeyboardInterrupt, click.Abort):
        return _fail("interrupted before anything was seen", ExitCode.INTERRUPTED)
    except BrokenPipeError:
        return ExitCode.DONE
    except Exception as error:  # noqa: BLE001 - the one place: a defect of ours is exit 1, not a traceback
        if _verbose(given):
            for line in traceback.format_exc().splitlines():
                say(line)
        hint = "" if _verbose(given) else "; -v shows where"
        return _fail(f"internal error: {type(error).__name__}: {error}{hint}", ExitCode.INTERNAL)


def _verbose(arguments: Sequence[str]) -> bool:
    # Asked of the words and not of the parsed options: parsing itself may be what failed.
    return any(word in ("-v", "--verbose") for word in arguments)


def _fail(line: str, code: ExitCode) -> int:
    say(f"profinferd: {' '.join(line.split())}")
    return int(code)
