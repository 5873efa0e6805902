# SPDX-License-Identifier: Apache-2.0
"""Which processes the daemon remembers, without a kernel: those that it does not watch, and shortages."""

from __future__ import annotations

import dataclasses
import errno
import io
from collections import Counter

import pytest

from profinferd.agent.daemon import manager as manager_module
from profinferd.agent.daemon import rules
from profinferd.agent.daemon.config import Config, Rule, Targets
from profinferd.agent.daemon.log import Log
from profinferd.agent.daemon.manager import MAX_OTHERS, OTHERS_EACH, Manager
from profinferd.agent.daemon.scout import Found
from profinferd.agent.daemon.target import WATCHED, Target
from profinferd.agent.errors import TargetEnded, TargetError
from profinferd.agent.model.calldata import CallTotal
from profinferd.agent.model.snapshot import Snapshot
from profinferd.agent.target.cgroup import Membership
from profinferd.agent.target.process import Process

from . import snapshots


def found(pid: int) -> Found:
    process = Process(pid, 1, f"/usr/bin/engine{pid}", 64, (pid,))
    return Found(process, None, TargetError("no symbols"), Membership(), 0, 0.0, 0.0)


@pytest.fixture
def manager() -> Manager:
    """One that wants nobody."""
    config = Config(targets=Targets(exclude=[Rule(program="*")]))
    return Manager(config, Log(stream=io.StringIO()), lambda: None)


def test_hundreds_that_nobody_wants_are_remembered(manager: Manager) -> None:
    """None of 600 is forgotten, and so none is looked at in turn for ever; without end they are not."""
    for pid in range(1, 601):
        manager._admit_safely(found(pid), 0.0)
    assert len(manager._targets) == 600
    for pid in range(601, 2001):
        manager._admit_safely(found(pid), 0.0)
    assert len(manager._targets) == MAX_OTHERS
    assert {t.state for t in manager._targets.values()} == {"excluded"}


def test_each_is_asked_now_and_then_whether_it_runs(
    manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: Counter[int] = Counter()

    def alive(process: Process) -> bool:
        asked[process.pid] += 1
        return process.pid != 7

    monkeypatch.setattr(manager_module, "alive", alive)
    for pid in range(1, 101):
        manager._admit_safely(found(pid), 0.0)
    for _ in range(OTHERS_EACH):
        manager._reap()
    assert asked == dict.fromkeys(range(1, 101), 1)
    assert 7 not in manager._targets and len(manager._targets) == 99


def test_who_ends_while_it_is_attached_to_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short-lived processes are everyday: no warning, no count, and no entry once it is seen to be gone."""
    out = io.StringIO()
    manager = Manager(Config(), Log(stream=out), lambda: None)

    def gone(*given: object) -> None:
        raise TargetEnded("process 5 ended while it was looked at")

    monkeypatch.setattr(manager, "_attach", gone)
    manager._admit_safely(dataclasses.replace(found(5), error=None), 0.0)
    assert manager._targets[5].code == "ended" and manager.failed == 0 and out.getvalue() == ""
    monkeypatch.setattr(manager_module, "alive", lambda process: False)
    for _ in range(OTHERS_EACH):
        manager._reap()
    assert not manager._targets and out.getvalue() == ""


def test_who_has_calls_of_a_described_engine_is_not_idle(manager: Manager) -> None:
    """Hits are of levels that PJRT and CUDA do not have."""
    quiet = snapshots.busy()
    assert quiet.counters is not None
    quiet = dataclasses.replace(quiet, counters=dataclasses.replace(quiet.counters, hits={"token": 0}))
    call = CallTotal("pjrt", "execute", "compute", {}, "outermost", 0, 0, 0.0, 0.0, 0, 0, None, {})
    for count, state in ((0, "idle"), (3, "ok")):
        snapshot = dataclasses.replace(quiet, engine_calls=(dataclasses.replace(call, count=count),))
        assert state_of(manager, snapshot) == state
    assert state_of(manager, quiet) == "idle" and state_of(manager, snapshots.busy()) == "ok"


def state_of(manager: Manager, snapshot: Snapshot) -> str:
    target = Target(found(1).process, "a", Membership(), None, WATCHED)
    target.snapshot = snapshot
    return manager._seen(target).state


def test_a_shortage_in_the_middle_loses_nobody(manager: Manager, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that met it is looked at again; those after it are known at once."""
    real = rules.wanted

    def wanted(candidate: object, targets: Targets) -> bool:
        if getattr(candidate, "program", "").endswith("engine2"):
            raise OSError(errno.EMFILE, "Too many open files")
        return real(candidate, targets)  # type: ignore[arg-type]

    monkeypatch.setattr(manager_module, "wanted", wanted)
    monkeypatch.setattr(manager._scout, "poll", lambda now, watching: ([found(1), found(2), found(3)], []))
    monkeypatch.setattr(manager, "_reap", lambda: None)
    manager.tick(10.0)
    assert sorted(manager._targets) == [1, 3] and list(manager._scout._again) == [2]
