# SPDX-License-Identifier: Apache-2.0
"""Op records of one execution become times per kernel (design D4), in bulk.

An op lasts from its entry to the next one's. Where a kernel that must have run between the
two was not seen (its record was lost, or its code has no probe) that gap is nobody's:
it is set apart, never given to the neighbour.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .plans import Order, Plan
from .records import OP_FUSED, OP_NODE_MASK, Records, group_by_seq

#: Op records kept for executions that have not ended yet.
MAX_HELD = 1 << 19
_MAX_SEQS = 8192
_MAX_NS = 1 << 50  # 13 days: a broken record, which must not overflow the sums
_NONE = np.zeros(0, dtype=np.int64)


@dataclass(slots=True, eq=False)
class Execution:
    """One CPU split that ran. ``end`` None: it was abandoned. ``partial``: some of its ops
    were not recorded for a known reason, so what is missing is lost, not uncovered."""

    tgid: int
    hash: int
    begin: int
    end: int | None
    hits: Records | None
    partial: bool
    experts: dict[int, int]


@dataclass(frozen=True, slots=True)
class Measured:
    """Kernels of one execution.

    ``slots`` (see :class:`Plan`) of those with a provable time and that time in ``ns``;
    ``untimed`` slots of the others. ``setup_ns`` None: the first kernel was not seen.
    ``missing`` kernels should have run and were not seen; ``bad`` records named no node.
    """

    slots: npt.NDArray[np.int64]
    ns: npt.NDArray[np.int64]
    untimed: npt.NDArray[np.int64]
    setup_ns: int | None
    untimed_ns: int
    executed: int
    fused: int
    missing: int
    bad: int


class HitBuffer:
    """Op records by the execution they belong to, until it ends."""

    def __init__(self) -> None:
        self._by_seq: OrderedDict[int, list[Records]] = OrderedDict()
        self._fresh: list[int] = []
        self.held = 0
        #: Records thrown away because their execution never ended.
        self.dropped = 0

    def take(self, ops: Records) -> None:
        """New records, in arrival order."""
        if not len(ops):
            return
        for seq, part in group_by_seq(ops):
            self._by_seq.setdefault(seq, []).append(part)
            self._fresh.append(seq)
            self.held += len(part)

    def pop(self, seq: int) -> Records | None:
        """All records of one execution; None without any."""
        parts = self._by_seq.pop(seq, None)
        if parts is None:
            return None
        self.held -= sum(len(part) for part in parts)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def settle(self) -> None:
        """After a feed: own what is left (a slice keeps its whole array), drop the oldest."""
        for seq in self._fresh:
            parts = self._by_seq.get(seq)
            if parts is not None:
                self._by_seq[seq] = [parts[0].copy() if len(parts) == 1 else np.concatenate(parts)]
        self._fresh.clear()
        while self._by_seq and (self.held > MAX_HELD or len(self._by_seq) > _MAX_SEQS):
            _, parts = self._by_seq.popitem(last=False)
            count = sum(len(part) for part in parts)
            self.held -= count
            self.dropped += count


def _as_before(order: Order, ts: npt.NDArray[np.int64], begin: int, end: int) -> Measured | None:
    """Times of kernels that came in a known order; None when one of them cannot be true."""
    ns = np.empty_like(ts)
    np.subtract(ts[1:], ts[:-1], out=ns[:-1])
    np.subtract(end, ts[-1:], out=ns[-1:])  # wraps around for a broken record, as it must not raise
    if int(ns.min()) < 0 or int(ns.max()) > _MAX_NS:
        return None
    setup = int(ts[0]) - begin
    return Measured(
        order.slots, ns, _NONE, setup if order.head == 0 and 0 <= setup <= _MAX_NS else None, 0,
        len(ts), order.fused, order.head, 0,
    )  # fmt: skip


def measure(plan: Plan, execution: Execution) -> Measured:
    """Times of the kernels of one execution of ``plan``'s graph."""
    empty = _NONE
    hits = execution.hits
    total = int(plan.before[plan.n])
    if hits is None or not len(hits):
        return Measured(empty, empty, empty, None, 0, 0, 0, total, 0)
    nodes = hits["node"].tobytes()
    ts = hits["ts"].astype(np.int64)
    if plan.order is not None and plan.order.nodes == nodes and execution.end is not None:
        seen = _as_before(plan.order, ts, execution.begin, execution.end)
        if seen is not None:
            return seen
    word = hits["node"].astype(np.int64)
    index = word & OP_NODE_MASK
    fused = (word & OP_FUSED) != 0
    good = index < plan.n
    if len(index) > 1:
        # The probe accepts only ascending nodes; anything else is a broken record.
        highest = np.maximum.accumulate(np.where(good, index, -1))
        good[1:] &= index[1:] > highest[:-1]
    bad = 0
    if not bool(good.all()):
        bad = int(np.count_nonzero(~good))
        index, fused, ts = index[good], fused[good], ts[good]
        if not len(index):
            return Measured(empty, empty, empty, None, 0, 0, 0, total, bad)
    fused &= index + 1 < plan.n
    stop = np.minimum(index + 1 + fused, plan.n)
    following = np.append(index[1:], plan.n)
    ends = np.append(ts[1:], ts[-1] if execution.end is None else execution.end)
    gap = np.maximum(plan.before[following] - plan.before[stop], 0)
    ns = ends - ts
    proven = (gap == 0) & (ns >= 0) & (ns <= _MAX_NS)
    if execution.end is None or (execution.partial and gap[-1]):
        proven[-1] = False
    slots = index + plan.n * fused
    head = int(plan.before[index[0]])
    if not bad and not gap.any():
        plan.order = Order(nodes, slots, int(np.count_nonzero(fused)), head)
    setup = int(ts[0]) - execution.begin
    setup_ns = setup if head == 0 and 0 <= setup <= _MAX_NS else None
    n_fused = int(np.count_nonzero(fused))
    missing = head + int(gap.sum())
    if bool(proven.all()):
        return Measured(slots, ns, empty, setup_ns, 0, len(index), n_fused, missing, bad)
    rest = np.clip(ns[~proven], 0, _MAX_NS)
    return Measured(
        slots[proven], ns[proven], slots[~proven], setup_ns, int(rest.sum()),
        len(index), n_fused, missing, bad,
    )  # fmt: skip
