# SPDX-License-Identifier: Apache-2.0
"""What the orchestration does when attaching fails half-way, without a kernel."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from profinferd.agent.attach import Attached, Attachment
from profinferd.agent.errors import MachineError


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


def attachment(programs: Programs) -> Attachment:
    hook = SimpleNamespace(
        level="op", event="OPP_DISPATCH", ret=False, symbol="f", site=SimpleNamespace(offset=0, moved=0)
    )
    one = Attachment.__new__(Attachment)
    made: Any = one
    made.info = SimpleNamespace(files=[SimpleNamespace(open_path=p, hooks=[hook]) for p in ("a", "b")])
    made.process = SimpleNamespace(pid=1)
    made.attached = Attached("multi", None, True, 0.0, 0)
    made._programs, made._ops = programs, "sampled"
    return one


def test_a_group_is_attached_in_every_file_or_in_none() -> None:
    """Else a burst that could not begin would leave probes behind, and the next one double them."""
    enough, too_few = Programs(2), Programs(1)
    assert attachment(enough)._attach_group("ops") == 2 and enough.attached == ["a", "b"]
    with pytest.raises(MachineError):
        attachment(too_few)._attach_group("ops")
    assert too_few.attached == []
