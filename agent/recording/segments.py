# SPDX-License-Identifier: Apache-2.0
"""A stretch of calls with their op records, as the columns of one row of table "segments".

Times of op records are stored as what lies between them: from the begin of the run to the first
record, and from each to the next, in 32 bits where that is enough (four seconds).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..model.optable import RawSegment
from ..model.trace import CALL, EXPERT, RUN
from . import codec

STORED_RUN = np.dtype([*((name, RUN[name]) for name in RUN.names or ()), ("order", "<i4")])
_WORD, _SHORT, _LONG = np.dtype("<u4"), np.dtype("<u4"), np.dtype("<i8")

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Stored:
    """One row: first and last time, how many of what, and the compressed tables."""

    begin: int
    end: int
    n_calls: int
    n_runs: int
    n_ops: int
    n_experts: int
    n_orders: int
    n_words: int
    width: int
    calls: bytes
    runs: bytes
    experts: bytes
    lengths: bytes
    words: bytes
    times: bytes

    @property
    def size(self) -> int:
        """Bytes of the tables."""
        return sum(
            len(part) for part in (self.calls, self.runs, self.experts, self.lengths, self.words, self.times)
        )


COLUMNS = tuple(Stored.__dataclass_fields__)


def pack(raw: RawSegment) -> Stored:
    """The row for a segment that has at least one call."""
    runs = np.zeros(len(raw.runs), STORED_RUN)
    for name in RUN.names or ():
        runs[name] = raw.runs[name]
    runs["order"] = raw.order
    words = np.concatenate([np.zeros(0, _WORD), *raw.orders])
    between = _differences(raw)
    short = not len(between) or (int(between.min()) >= 0 and int(between.max()) < 1 << 32)
    return Stored(
        begin=int(raw.calls["begin"].min()),
        end=int(raw.calls["end"].max()),
        n_calls=len(raw.calls),
        n_runs=len(runs),
        n_ops=len(between),
        n_experts=len(raw.experts),
        n_orders=len(raw.orders),
        n_words=len(words),
        width=4 if short else 8,
        calls=codec.encode(raw.calls),
        runs=codec.encode(runs),
        experts=codec.encode(raw.experts),
        lengths=codec.encode_column(np.array([len(o) for o in raw.orders], _WORD)),
        words=codec.encode_column(words),
        times=codec.encode_column(between.astype(_SHORT) if short else between),
    )


def unpack(row: Stored, *, ops: bool) -> RawSegment:
    """The segment of a row; without ``ops``, no records of ops and experts. UsageError when damaged.

    Every index in it is checked: what uses them need not.
    """
    calls = codec.decode(row.calls, CALL, row.n_calls)
    stored = codec.decode(row.runs, STORED_RUN, row.n_runs)
    runs = np.zeros(len(stored), RUN)
    for name in RUN.names or ():
        runs[name] = stored[name]
    order = stored["order"].copy()
    _check_runs(runs, len(calls))
    if not ops:
        return RawSegment(calls, runs, order, (), np.zeros(0, np.int64), np.zeros(0, EXPERT))
    experts = codec.decode(row.experts, EXPERT, row.n_experts)
    orders = _orders(row)
    lengths = np.array([*(len(o) for o in orders), 0])
    if ((order < -1) | (order >= len(orders))).any() or (runs["n_ops"] != lengths[order]).any():
        raise codec.damaged("an order of kernels that is not there")
    if ((experts["run"] < 0) | (experts["run"] >= len(runs))).any():
        raise codec.damaged("an expert of no graph")
    if row.width not in (4, 8) or int(runs["n_ops"].sum(dtype=np.int64)) != row.n_ops:
        raise codec.damaged("op records that belong to no graph")
    between = codec.decode_column(row.times, _SHORT if row.width == 4 else _LONG, row.n_ops)
    return RawSegment(calls, runs, order, orders, _times(runs, between.astype(np.int64)), experts)


def _check_runs(runs: npt.NDArray[np.void], n_calls: int) -> None:
    here = np.arange(len(runs))
    bad = (runs["call"] < 0) | (runs["call"] >= n_calls) | (runs["graph"] < -1) | (runs["n_ops"] < 0)
    bad |= (runs["parent"] < -1) | (runs["parent"] >= here) | (runs["phase"] > 5)
    if bad.any():
        raise codec.damaged("a graph that belongs to no call")


def _orders(row: Stored) -> tuple[npt.NDArray[np.uint32], ...]:
    lengths = codec.decode_column(row.lengths, _WORD, row.n_orders).astype(np.int64)
    words = codec.decode_column(row.words, _WORD, row.n_words)
    if int(lengths.sum()) != len(words):
        raise codec.damaged("an order of kernels of another length")
    return tuple(np.split(words, np.cumsum(lengths)[:-1])) if len(lengths) else ()


def _starts(counts: Ints) -> Ints:
    """Where each run with records has its first one."""
    first: Ints = np.cumsum(counts) - counts
    return first[counts > 0]


def _differences(raw: RawSegment) -> Ints:
    counts = raw.runs["n_ops"].astype(np.int64)
    between = np.diff(raw.times, prepend=np.int64(0))
    starts = _starts(counts)
    between[starts] = raw.times[starts] - raw.runs["begin"][counts > 0]
    return between


def _times(runs: npt.NDArray[np.void], between: Ints) -> Ints:
    counts = runs["n_ops"].astype(np.int64)
    if not len(between):
        return between
    total = np.cumsum(between)
    starts = _starts(counts)
    # What was summed up before each run is taken off again, and its begin added.
    offset = runs["begin"][counts > 0] - (total[starts] - between[starts])
    times: Ints = total + np.repeat(offset, counts[counts > 0])
    return times
