# SPDX-License-Identifier: Apache-2.0
"""The search for engines goes on, whatever goes wrong with one look."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest

from profinferd.agent.daemon import scout as scout_module
from profinferd.agent.daemon.scout import Scout
from profinferd.agent.target.process import executable_ids

SECONDS = 60.0


class Fails:
    """Stands for a function: raises ``error`` the first ``times``, then does what that does."""

    def __init__(self, real: Callable[..., Any], error: Exception, times: int) -> None:
        self.real, self.error, self.left = real, error, times
        self.worked = threading.Event()

    def __call__(self, *given: Any, **more: Any) -> Any:
        if self.left:
            self.left -= 1
            raise self.error
        self.worked.set()
        return self.real(*given, **more)


def threads_of(scout: Scout) -> list[bool]:
    return [thread.is_alive() for thread in scout._threads]


@pytest.mark.parametrize(
    "error", [OSError(errno.EMFILE, "Too many open files"), ZeroDivisionError("a defect")]
)
def test_a_look_that_fails_is_not_the_last(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """No descriptor for a moment, or a defect: the process is looked at again, and the next one too."""
    look = Fails(executable_ids, error, 1)
    monkeypatch.setattr(scout_module, "executable_ids", look)
    monkeypatch.setattr(Scout, "_candidates", lambda self, every: [])
    scout = Scout(lambda: None, 1e9)
    scout.start(0.0)
    try:
        pid = os.getppid()
        scout.look_at(pid)
        for _ in range(int(SECONDS / 0.05)):
            if not look.left and not scout._queue:
                break
            threading.Event().wait(0.05)
        assert threads_of(scout) == [True, True]
        if isinstance(error, OSError):
            while pid not in scout._again:
                threading.Event().wait(0.01)
            scout.poll(1e6, frozenset())  # much later
        else:
            while not (said := scout.defects()):
                threading.Event().wait(0.01)
            assert said == ["internal error: ZeroDivisionError: a defect"] and not scout.defects()
            scout.look_at(pid)
        assert look.worked.wait(SECONDS)
        assert threads_of(scout) == [True, True]
    finally:
        scout.close()


def test_a_scan_without_a_descriptor_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scout_module, "AGAIN_S", 0.01)
    candidates = Fails(lambda self, every: [], OSError(errno.EMFILE, "Too many open files"), 3)
    monkeypatch.setattr(Scout, "_candidates", lambda self, every: candidates(self, every))
    scout = Scout(lambda: None, 1e9)
    scout.start(0.0)
    try:
        assert candidates.worked.wait(SECONDS)
        assert threads_of(scout) == [True, True]
    finally:
        scout.close()


def test_a_process_that_brings_a_defect_to_light_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is found, with the reason why it is not watched."""
    monkeypatch.setattr(scout_module, "inspect_target", Fails(int, ZeroDivisionError("a defect"), 1))
    scout = Scout(lambda: None, 1e9)
    scout._next_scan = scout._next_all = 1e9
    scout._one(os.getpid())
    (found,), _ = scout.poll(0.0, frozenset())
    assert found.info is None and found.error is not None
    assert found.error.what == "internal error: ZeroDivisionError: a defect"
    scout.close()
