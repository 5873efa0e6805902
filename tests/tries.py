# SPDX-License-Identifier: Apache-2.0
"""Figures of time on a machine that others use: what is wrong every time is wrong."""

from __future__ import annotations

from collections.abc import Callable


class Blurred(AssertionError):
    """A figure of time, or what follows from one, is off: other work on the machine can do that."""


def timed(right: bool, what: object) -> None:
    """Assert something that only times decide; ``what`` tells of it. Raises Blurred."""
    if not right:
        raise Blurred(what)


def in_one_of(attempts: int, once: Callable[[], None]) -> None:
    """Have ``once`` come to its end in one of so many attempts. Only :class:`Blurred` is another
    attempt's reason: what is counted has to be right each time. Raises what the last one did."""
    told: list[str] = []
    for left in reversed(range(attempts)):
        try:
            once()
        except Blurred as error:
            told.append(str(error))
            if not left:
                raise Blurred(f"in each of {attempts} attempts: " + "; ".join(told)) from error
        else:
            return


__all__ = ["Blurred", "in_one_of", "timed"]
