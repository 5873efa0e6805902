# SPDX-License-Identifier: Apache-2.0
"""What is attached when that fails half-way, and what is held until a layout is chosen; without a kernel."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from profinferd.agent.errors import MachineError
from profinferd.agent.held import MAX_HELD_EVENTS, HeldRecords
from profinferd.agent.hooks import Attached, Hooks
from profinferd.agent.kernel.programs import Drained
from profinferd.agent.model.records import Kind
from profinferd.agent.target.facts import FileInfo


class Programs:
    """Attaches to as many files as it is told, then the machine has had enough."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.attached: list[str] = []
        self.types = SimpleNamespace(constants=lambda: {"OPP_DISPATCH": 16})

    def attach(self, group: str, path: str, pid: int, probes: list[Any]) -> None:
        if len(self.attached) >= self.most:
            raise MachineError("no more descriptors")
        self.attached.append(path)

    def detach(self, group: str) -> None:
        self.attached.clear()


def hooks(programs: Programs) -> Hooks:
    some: Any = programs
    process: Any = SimpleNamespace(pid=1)
    return Hooks(process, some, Attached("multi", None, True, 0.0, 0), "sampled")


def files() -> list[FileInfo]:
    hook = SimpleNamespace(
        level="op", event="OPP_DISPATCH", ret=False, symbol="f", site=SimpleNamespace(offset=0, moved=0)
    )
    made: Any = [SimpleNamespace(open_path=path, hooks=[hook]) for path in ("a", "b")]
    return list(made)


def test_a_group_is_attached_in_every_file_or_in_none() -> None:
    """Else a burst that could not begin would leave probes behind, and the next one double them."""
    enough, too_few = Programs(2), Programs(1)
    assert hooks(enough).attach_group("ops", files()) == 2 and enough.attached == ["a", "b"]
    with pytest.raises(MachineError):
        hooks(too_few).attach_group("ops", files())
    assert too_few.attached == []


def drained(calls: int, graphs: int) -> Drained:
    events = np.zeros(calls + graphs, np.dtype([("kind", "<u2")]))
    events["kind"] = [Kind.CALL_BEGIN] * calls + [Kind.GRAPH_BEGIN] * graphs
    none = np.zeros(0)
    return Drained(events, none, none, none, none)


def test_held_records_are_bounded_and_what_fell_out_is_counted() -> None:
    held = HeldRecords()
    for _ in range(5):
        held.hold(drained(0, MAX_HELD_EVENTS // 2))
    assert held.dropped == 3 * (MAX_HELD_EVENTS // 2)
    held.hold(drained(0, 3 * MAX_HELD_EVENTS))  # the newest stays, however large
    assert [len(one.events) for one in held] == [3 * MAX_HELD_EVENTS]


def test_after_a_wrong_layout_only_calls_are_held() -> None:
    held = HeldRecords()
    held.hold(drained(2, 5))
    held.keep_calls_only()
    assert [len(one.events) for one in held.take()] == [2] and not list(held)
    for _ in range(3):  # what was taken or dropped takes no room any more
        held.hold(drained(MAX_HELD_EVENTS // 8, MAX_HELD_EVENTS // 2))
        held.keep_calls_only()
    assert held.dropped == 0 and len(list(held)) == 3
