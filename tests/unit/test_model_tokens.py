# SPDX-License-Identifier: Apache-2.0
"""Runs of positions and what shapes alone can tell."""

from __future__ import annotations

from itertools import pairwise

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from profinferd.agent.model.tokens import (
    MAX_TOKENS,
    Phase,
    assemble,
    image_run,
    phase_of,
    row_mask,
    shape_phase,
    split_runs,
)


def runs(pos: list[int], rows: list[int]) -> list[tuple[int, int, int]]:
    mask = row_mask(len(pos), np.array(rows, dtype=np.int64))
    assert mask is not None
    return [(r.start, r.length, r.rows) for r in split_runs(np.array(pos, dtype=np.int64), mask)]


def test_runs_of_the_design() -> None:
    assert runs([8, *range(9)], [0, 9]) == [(8, 1, 1), (0, 9, 1)]
    assert runs(list(range(23)), list(range(23))) == [(0, 23, 23)]
    assert runs([5], []) == [(5, 1, 0)] and runs([5], [0]) == [(5, 1, 1)]
    assert runs([7, 7, 7], [0, 1, 2]) == [(7, 1, 1)] * 3
    assert runs(list(range(8, 21)), [0, 12]) == [(8, 1, 1), (9, 12, 1)]
    assert runs(list(range(8, 21)), [0]) == [(8, 1, 1), (9, 12, 0)]


@given(st.lists(st.integers(-5, 5000), min_size=1, max_size=80), st.data())
def test_runs_partition_the_tokens(pos: list[int], data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.integers(0, len(pos) - 1), unique=True))
    mask = row_mask(len(pos), np.array(rows, dtype=np.int64))
    assert mask is not None
    found = split_runs(np.array(pos), mask)
    assert [p for r in found for p in range(r.start, r.start + r.length)] == pos
    assert sum(r.rows for r in found) == len(rows)
    for run in found:
        assert run.next == run.start + run.length
        # A row is at the end of its run, or every token has one.
        assert run.rows in (0, run.length) or (run.rows == 1 and run.last_row)
    for a, b in pairwise(found):
        assert b.start != a.next or a.rows or b.rows


def test_rows_that_name_no_token() -> None:
    assert row_mask(3, np.array([3])) is None and row_mask(3, np.array([-1])) is None
    assert row_mask(3, None) is not None


def test_assembling_positions() -> None:
    inline = list(range(8))
    whole = assemble(100, inline, [(72, list(range(72, 100))), (8, list(range(8, 72)))])
    assert whole is not None and whole.tolist() == list(range(100))
    assert assemble(100, inline, [(8, list(range(8, 72)))]) is None
    assert assemble(100, inline, [(9, list(range(9, 100))), (9, [9])]) is None
    assert assemble(3, inline, []) is not None and assemble(0, inline, []) is None
    # A broken size neither allocates nor fails.
    assert assemble(4 * MAX_TOKENS, inline, []) is None and assemble(2**32 - 1, inline, []) is None
    overlong = assemble(9, inline, [(8, [8, 9, 10]), (2**31, [1])])
    assert overlong is not None and overlong.tolist() == list(range(9))


def test_an_image_is_one_stretch() -> None:
    """Its tokens share positions; where text goes on depends on its shape."""
    mask = np.zeros(6, dtype=bool)
    (run,) = image_run(np.array([4, 4, 4, 4, 4, 4]), mask)
    assert (run.start, run.length, run.rows, run.next, run.loose) == (4, 6, 0, 5, 6)


@pytest.mark.parametrize(
    ("tokens", "rows", "encoder", "phase"),
    [
        (1, 1, False, Phase.DECODE), (1, 0, False, Phase.PREFILL), (1, None, False, Phase.DECODE),
        (9, 1, False, Phase.PREFILL), (9, 0, False, Phase.PREFILL), (9, None, False, Phase.PREFILL),
        (4, 4, False, Phase.DECODE), (9, 3, False, Phase.MIXED), (9, 9, True, Phase.ENCODE),
        (0, 0, False, Phase.OTHER),
    ],
)  # fmt: skip
def test_phases_by_shape(tokens: int, rows: int | None, encoder: bool, phase: Phase) -> None:
    assert shape_phase(tokens, rows, encoder) is phase


def test_kinds_make_a_phase() -> None:
    assert phase_of([]) is Phase.OTHER
    assert phase_of([Phase.DECODE, Phase.DECODE]) is Phase.DECODE
    assert phase_of([Phase.DECODE, Phase.PREFILL]) is Phase.MIXED
