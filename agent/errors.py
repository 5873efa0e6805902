# SPDX-License-Identifier: Apache-2.0
"""The one family of errors, and the exit codes that the command line promises.

Whatever goes wrong for a reason that a person can act on is raised as one of these and
caught once, in :mod:`profinferd.agent.cli`. Anything else is a defect of ours (exit 1).
"""

from __future__ import annotations

import enum


class ExitCode(enum.IntEnum):
    """Exit codes of every command (the README lists them for scripts)."""

    DONE = 0
    INTERNAL = 1
    USAGE = 2
    TARGET = 3
    MACHINE = 4
    ENDED = 5
    DIFFERS = 6
    INTERRUPTED = 130


class ProfinferError(Exception):
    """An expected failure: what went wrong, why, and what to do, in one line.

    ``remedy`` is a sentence that tells the person what to do; it may be empty when
    nothing can be done.
    """

    exit_code = ExitCode.INTERNAL

    def __init__(self, what: str, remedy: str = "") -> None:
        self.what = " ".join(what.split())
        self.remedy = " ".join(remedy.split())
        super().__init__(f"{self.what}: {self.remedy}" if self.remedy else self.what)


class UsageError(ProfinferError):
    """A wrong option, argument or configuration."""

    exit_code = ExitCode.USAGE


class TargetError(ProfinferError):
    """This process cannot be profiled (no engine, unknown layout, no such process, ...)."""

    exit_code = ExitCode.TARGET


class MachineError(ProfinferError):
    """This machine cannot do it: a missing privilege or kernel feature."""

    exit_code = ExitCode.MACHINE


class TargetEnded(ProfinferError):
    """The target ended before anything was seen."""

    exit_code = ExitCode.ENDED


def defect(error: Exception) -> ProfinferError:
    """What is no expected failure, as one of ours."""
    return ProfinferError(f"internal error: {type(error).__name__}: {error}")
