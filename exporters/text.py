# SPDX-License-Identifier: Apache-2.0
"""Words and figures for people: units, thousands, and names that cannot hurt a terminal.

Everything that a target can choose (its program name, model file, backend and operator
names) is hostile until it went through :func:`clean`.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable

MISSING = "-"
"""Printed where a figure is absent; zero is printed as 0."""

# Control (Cc), format and bidirectional (Cf), surrogates (Cs), private use (Co),
# unassigned (Cn), line and paragraph separators (Zl, Zp): nothing of a name is lost that
# a person could read, and nothing moves the cursor or reverses a line.
_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})


def clean(name: str, limit: int = 128) -> str:
    """``name`` without anything unprintable, at most ``limit`` characters.

    Each run of unprintable characters becomes one U+FFFD, so that a name which was
    tampered with looks so. Never empty lines, never a partial escape sequence.
    """
    if name.isascii() and name.isprintable():
        return name if len(name) <= limit else name[: limit - 3] + "..."
    out: list[str] = []
    for char in name[: limit * 4]:
        if unicodedata.category(char) not in _HIDDEN:
            out.append(" " if char.isspace() else char)
        elif not out or out[-1] != "\ufffd":
            out.append("\ufffd")
    text = "".join(out)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def finite(value: float | None) -> float | None:
    """``value``, or None where it is absent, NaN or infinite."""
    return value if value is not None and math.isfinite(value) else None


def ratio(part: float | None, whole: float | None) -> float | None:
    """``part / whole``, absent (None) where either is absent or ``whole`` is not positive."""
    above, below = finite(part), finite(whole)
    if above is None or below is None or below <= 0:
        return None
    return finite(above / below)


def total(values: Iterable[float | None]) -> float | None:
    """The sum of the figures that are there; None when none is."""
    known = [value for value in map(finite, values) if value is not None]
    return math.fsum(known) if known else None


def number(value: float | None, digits: int = 3) -> str:
    """A measured figure with ``digits`` significant digits: ``1,234``, ``56.9``, ``4.00``, ``0.250``."""
    value = finite(value)
    if value is None:
        return MISSING
    if value == 0:
        return "0"
    # Rounded before the decimals are chosen, or 99.96 would come out as 100.0.
    size = float(f"{abs(value):.{digits - 1}e}")
    decimals = digits - 1 - math.floor(math.log10(size))
    return f"{value:,.{min(max(decimals, 0), 9)}f}"


def plain(value: float | None) -> str:
    """Like :func:`number`, but a whole number has no decimals: ``18``, ``36.6``."""
    value = finite(value)
    # Not is_integer(): a quotient may be 18.000000000000004.
    whole = value is not None and abs(value - round(value)) <= 1e-9 * abs(value)
    return count(value) if whole else number(value)


def count(value: float | None) -> str:
    """A count with thousands."""
    value = finite(value)
    return MISSING if value is None else f"{value:,.0f}"


def seconds(value: float | None) -> str:
    """A duration in the unit a person would use: ``17.6 ms``, ``1.24 s``, ``2 m 05 s``."""
    value = finite(value)
    if value is None:
        return MISSING
    size = abs(value)
    if size == 0:
        return "0 s"
    if size < 0.9995e-6:
        return f"{number(value * 1e9)} ns"
    if size < 0.9995e-3:
        return f"{number(value * 1e6)} us"
    if size < 0.9995:
        return f"{number(value * 1e3)} ms"
    if size < 100:
        return f"{number(value)} s"
    whole = round(value)
    if whole < 3600:
        return f"{whole // 60} m {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} m"


def percent(value: float | None) -> str:
    """A ratio as a percentage with one decimal."""
    value = finite(value)
    return MISSING if value is None else f"{value * 100:.1f}%"
