# SPDX-License-Identifier: Apache-2.0
"""What makes the flight recorder write."""

from __future__ import annotations

import inspect

import pytest

from profinferd.agent.errors import UsageError
from profinferd.agent.model import verdict
from profinferd.agent.model.verdictdata import Verdict
from profinferd.agent.recording.triggers import NOTHING_WRONG, Triggers, verdict_of


def _verdict(rule: str, confidence: str) -> Verdict:
    return Verdict(rule, confidence, 0.01, ("because",), "something")  # type: ignore[arg-type]


def test_a_sure_verdict_and_no_other() -> None:
    assert verdict_of(()) is None
    assert verdict_of((_verdict("preempted", "medium"), _verdict("paging", "low"))) is None
    assert verdict_of((_verdict("preempted", "medium"), _verdict("paging", "high"))) == "paging"


def test_nothing_wrong_is_no_reason_to_write() -> None:
    """However sure that is; and it is called so by who says it."""
    assert verdict_of((_verdict(NOTHING_WRONG, "high"),)) is None
    # The name is the one that the rules use.
    assert f'"{NOTHING_WRONG}"' in inspect.getsource(verdict)


def test_words_of_the_command_line() -> None:
    assert Triggers.parse(("signal",)) == Triggers()
    assert Triggers.parse(("p99>50ms", "verdict")) == Triggers(0.05, True)
    assert Triggers.parse(("p99 > 1.5s",)) == Triggers(1.5, False)
    for word in ("p99", "p99>x", "p99>..ms", "p98>5ms", "verdicts", ""):
        with pytest.raises(UsageError, match="--trigger"):
            Triggers.parse((word,))
