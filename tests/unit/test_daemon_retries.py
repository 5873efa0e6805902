# SPDX-License-Identifier: Apache-2.0
"""When a process that could not be watched is tried again. The clock is the test's."""

from __future__ import annotations

import pytest

from profinferd.agent.daemon.retries import MAX_FILES, MAX_REMEMBERED, Retries, passes
from profinferd.agent.daemon.target import Files, reason_code
from profinferd.agent.errors import MachineError, ProfinferError, TargetEnded, TargetError
from profinferd.agent.target.factscache import AGAIN_S

KEY = (7, 1234)
DEFECT = ProfinferError("internal error: ZeroDivisionError: division by zero")


def files(*numbers: int) -> Files:
    return frozenset((("08:01", number), 10 * number) for number in numbers)


def test_ever_more_slowly() -> None:
    """Whoever asks at every moment gets an answer at these times and no others."""
    retries, tried, now = Retries(), [], 0.0
    while now < 300:
        if retries.early(KEY, files(1), now) is None:
            tried.append(now)
            retries.failed(KEY, files(1), DEFECT, now)
        now += 0.5
    # 10, 30, 60 and 120 seconds after the one before.
    assert tried == [0.0, 10.0, 40.0, 100.0, 220.0]


def test_the_longest_wait_stays() -> None:
    retries, now = Retries(), 0.0
    for _ in range(20):
        again = retries.failed(KEY, files(1), DEFECT, now)
        waited, now = again - now, again
    assert waited == AGAIN_S[-1]


def test_the_reason_is_kept_meanwhile() -> None:
    retries = Retries()
    retries.failed(KEY, files(1), DEFECT, 0.0)
    assert retries.early(KEY, files(1), 9.9) is DEFECT
    assert retries.early(KEY, files(1), 10.0) is None
    assert retries.early((8, 1234), files(1), 0.0) is None
    assert retries.early((7, 1235), files(1), 0.0) is None, "another process with this pid"


def test_new_files_are_tried_at_once_and_old_ones_are_not() -> None:
    """An engine that is loaded later is another chance; loading and unloading one in turn is not."""
    retries = Retries()
    retries.failed(KEY, files(1), DEFECT, 0.0)
    assert retries.early(KEY, files(1, 2), 0.0) is None
    retries.failed(KEY, files(1, 2), DEFECT, 0.0)
    for some in (files(1), files(2), files(1, 2)):
        assert retries.early(KEY, some, 9.9) is DEFECT
    changed = frozenset({(("08:01", 1), 11)})
    assert retries.early(KEY, changed, 0.0) is None, "the file was overwritten"


def test_ever_new_files_are_no_way_around() -> None:
    retries, attempts = Retries(), 0
    for number in range(1000):
        if retries.early(KEY, files(number), 0.0) is None:
            attempts += 1
            retries.failed(KEY, files(number), DEFECT, 0.0)
    assert attempts == MAX_FILES


def test_said_once() -> None:
    retries = Retries()
    assert retries.news(KEY, "one") and not retries.news(KEY, "one")
    assert retries.news(KEY, "another") and retries.news(KEY, "one")
    retries.succeeded(KEY)
    assert retries.news(KEY, "one"), "it was watched meanwhile"
    retries.succeeded((9, 9))
    retries.forget(KEY)
    assert retries.news(KEY, "one")


def test_bounded() -> None:
    retries = Retries()
    for pid in range(2 * MAX_REMEMBERED):
        retries.failed((pid, 0), files(1), DEFECT, 0.0)
        retries.news((pid, 0), "x")
    assert len(retries) == MAX_REMEMBERED
    assert retries.early((0, 0), files(1), 0.0) is None
    assert retries.early((2 * MAX_REMEMBERED - 1, 0), files(1), 0.0) is DEFECT


@pytest.mark.parametrize(
    ("error", "hope"),
    [
        (DEFECT, True),
        (MachineError("the events ring cannot be made: Cannot allocate memory"), True),
        (TargetError("too many processes are watched at once"), True),
        (TargetError("no symbols: build-id 1234"), False),
        (TargetEnded("it ended"), False),
    ],
)
def test_what_may_pass(error: ProfinferError, hope: bool) -> None:
    assert passes(error) is hope


def test_a_defect_has_a_code_of_its_own_whatever_it_says() -> None:
    assert reason_code(ProfinferError("internal error: KeyError: 'layout'")) == "internal"
