# SPDX-License-Identifier: Apache-2.0
"""Attempts at figures of time: what they forgive, and what not."""

from __future__ import annotations

import pytest

from tests.tries import Blurred, in_one_of, timed


def test_one_good_attempt_will_do() -> None:
    took = iter([9.0, 9.0, 1.0])
    in_one_of(3, lambda: timed(next(took) < 2, "slow"))
    assert not list(took)


def test_what_is_wrong_every_time_is_wrong() -> None:
    took = iter([7, 8, 9])
    with pytest.raises(Blurred, match="in each of 3 attempts: took 7; took 8; took 9"):
        in_one_of(3, lambda: timed(False, f"took {next(took)}"))


def test_a_count_has_to_be_right_each_time() -> None:
    counts = iter([1, 2])

    def once() -> None:
        assert next(counts) == 2

    with pytest.raises(AssertionError) as raised:
        in_one_of(3, once)
    assert type(raised.value) is AssertionError
    assert next(counts) == 2, "it was not tried again"
