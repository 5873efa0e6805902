# SPDX-License-Identifier: Apache-2.0
"""Units, thousands, and names that cannot hurt a terminal."""

from __future__ import annotations

import math
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profinferd.exporters import text


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "-"),
        (math.nan, "-"),
        (0, "0 s"),
        (1.5e-9, "1.50 ns"),
        (999.6e-9, "1.00 us"),
        (42e-6, "42.0 us"),
        (0.0176, "17.6 ms"),
        (0.99951, "1.00 s"),
        (1.236, "1.24 s"),
        (99.94, "99.9 s"),
        (125, "2 m 05 s"),
        (3599.6, "1 h 00 m"),
        (7260, "2 h 01 m"),
    ],
)
def test_seconds(value: float | None, shown: str) -> None:
    """The unit that a person would use."""
    assert text.seconds(value) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "-"),
        (math.inf, "-"),
        (0, "0"),
        (1234.4, "1,234"),
        (56.94, "56.9"),
        (4, "4.00"),
        (99.96, "100"),
        (9.996, "10.0"),
        (0.25, "0.250"),
        (-3.14159, "-3.14"),
        (0.0000123, "0.0000123"),
    ],
)
def test_number(value: float | None, shown: str) -> None:
    """Three significant digits."""
    assert text.number(value) == shown


def test_plain_and_count() -> None:
    """Whole numbers have no decimals."""
    assert [text.plain(v) for v in (18, 36.585, None)] == ["18", "36.6", "-"]
    assert [text.count(v) for v in (1234567, 0, None)] == ["1,234,567", "0", "-"]
    assert [text.percent(v) for v in (0.6123, None)] == ["61.2%", "-"]


@pytest.mark.parametrize(
    ("part", "whole"), [(1, 0), (1, None), (None, 1), (1, math.nan), (math.inf, 1), (1, -1)]
)
def test_ratio_is_absent(part: float | None, whole: float | None) -> None:
    """C14: never infinite, never NaN."""
    assert text.ratio(part, whole) is None


def test_total_is_of_what_is_known() -> None:
    """The sum of nothing is absent, not 0."""
    assert text.total([1.0, None, 2.0]) == 3.0
    assert text.total([None, math.nan]) is None and text.total([]) is None


@given(st.text(max_size=300), st.integers(min_value=8, max_value=128))
def test_clean_is_printable_and_bounded(name: str, limit: int) -> None:
    """Whatever the target is called."""
    shown = text.clean(name, limit)
    assert len(shown) <= limit
    assert not {unicodedata.category(c) for c in shown} & {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}
    assert text.clean(shown, limit) == shown
    shown.encode("utf-8")


def test_clean_keeps_what_is_readable() -> None:
    """Letters of any script stay; an escape sequence is visible as tampering."""
    assert text.clean("模型-é [b].gguf") == "模型-é [b].gguf"
    assert text.clean("a\x1b[2Jb") == "a\ufffd[2Jb"
