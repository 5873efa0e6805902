# SPDX-License-Identifier: Apache-2.0
"""Bursts on command: the real probes and sums, without waiting for the budget's periods."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Self

from profinferd.agent.bursts import BurstDriver
from profinferd.agent.model.budget import BudgetConfig, Controller, Decision, Level, Load
from profinferd.agent.model.snapshot import Snapshot

from .cases import Engine, Reply, Watch, seconds_of, wait_for

POINTS = 0.02
"""What a share may differ from the truth."""


class Commanded(Controller):
    """Decides what it was told."""

    def __init__(self) -> None:
        super().__init__(BudgetConfig())
        self.armed = self.summing = False
        self.level = Level.OP
        self.loads: list[Load] = []

    def tick(self, now_s: float, loads: Iterable[Load]) -> dict[str, Decision]:
        """One target."""
        (load,) = loads
        self.loads.append(load)
        decision = Decision(
            load.target, self.level, self.armed, self.summing, None, None, "told", "told", (), 0, 0, {},
            0.0, 1.0,
        )  # fmt: skip
        return {load.target: decision}


class Bursts(Watch):
    """A watched stub whose bursts begin and end when the test says so."""

    def __init__(self, stub: Engine, method: str = "auto", ops: str = "sampled") -> None:
        super().__init__(stub, method, ops)
        self.told = Commanded()
        self._take_over()

    def _take_over(self) -> None:
        if self.attachment._driver is not None:
            self.attachment._driver._controller = self.told

    @property
    def driver(self) -> BurstDriver:
        """Of the attachment."""
        driver = self.attachment._driver
        assert driver is not None
        return driver

    def begin(self) -> None:
        """Op probes on, then summing."""
        self._take_over()
        wait_for(lambda: self.tick() and self.driver._leaving is None, "the last burst's probes to go")
        self.told.armed = self.told.summing = True
        self.drain()
        assert self.driver.armed

    def end(self, read: bool = True) -> None:
        """Summing off, probes off; ``read``: until the sums were read."""
        self.told.summing = False
        self.drain()
        self.told.armed = False
        self.drain()
        assert not self.driver.armed
        if read:
            wait_for(lambda: self.tick() and self.driver._state.unread_since is None, "the sums to be read")

    def tick(self) -> bool:
        """One drain, and what follows from it."""
        self.attachment.poll(0.0)
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.attachment.close()


def shares(snapshot: Snapshot, phase: str) -> dict[str, float]:
    """op -> its share of the ops' seconds in this phase."""
    seconds: dict[str, float] = defaultdict(float)
    for op in snapshot.ops:
        if op.phase == phase:
            seconds[op.op] += op.seconds
    return _parts(seconds)


def true_shares(replies: Sequence[Reply]) -> dict[str, float]:
    """The same by the stub's log."""
    return _parts(seconds_of(replies))


def _parts(seconds: dict[str, float]) -> dict[str, float]:
    whole = sum(seconds.values())
    return {op: value / whole for op, value in seconds.items()}


def usual_shares(replies: Sequence[Reply]) -> dict[str, float]:
    """Of graphs of one form, with what each kernel takes in most of them."""
    took: dict[int, list[float]] = defaultdict(list)
    op_of: dict[int, str] = {}
    for reply in replies:
        ends = [begin for *_, begin, _ in reply["kernels"][1:]] + [reply["graph"][1]]
        for (node, _, op, begin, _), end in zip(reply["kernels"], ends, strict=True):
            took[node].append(end - begin)
            op_of[node] = op
    seconds: dict[str, float] = defaultdict(float)
    for node, some in took.items():
        seconds[op_of[node]] += statistics.median(some)
    return _parts(seconds)


def check_shares(snapshot: Snapshot, phase: str, replies: Sequence[Reply], *, sure: float = 0.0) -> None:
    """Op by op within 2 points.

    ``replies`` that were all timed are the truth whatever else the machine does. Where they hold
    graphs that were not, a machine that stood still may have stretched some op of these alone, which
    no estimate can know: then the truth is what is usual (it is the same at any time), and what was
    stretched in the sample is in its standard errors, of which there may be ``sure``.
    """
    seen, true = shares(snapshot, phase), (usual_shares if sure else true_shares)(replies)
    assert set(seen) == set(true)
    whole = sum(op.seconds for op in snapshot.ops if op.phase == phase)
    for op, share in true.items():
        rows = [row for row in snapshot.ops if (row.op, row.phase) == (op, phase)]
        error = sum(row.seconds_stderr or 0.0 for row in rows) / whole
        assert abs(seen[op] - share) < POINTS + sure * error, (phase, op, seen[op], share, error)


class Monotone:
    """Asserts that no counter goes backwards from one snapshot to the next."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, ...], float] = {}

    def look(self, snapshot: Snapshot) -> Snapshot:
        """The snapshot, checked."""
        now: dict[tuple[str, ...], float] = {}
        for op in snapshot.ops:
            key = (op.op, op.dtype, op.role, op.kernel, op.phase)
            for name, value in (("s", op.seconds), ("n", op.calls), ("f", op.flops), ("b", op.bytes)):
                now[*key, name] = float(value or 0)
        assert snapshot.counters is not None
        for graph in snapshot.counters.graphs:
            now[graph.phase, graph.backend, "graphs"] = graph.count
            now[graph.phase, graph.backend, "sampled"] = graph.sampled
            now[graph.phase, graph.backend, "seconds"] = graph.seconds
            assert graph.sampled <= graph.count
        for full, least in self._last.items():
            assert now[full] >= least, full
        self._last = now
        return snapshot
