# SPDX-License-Identifier: Apache-2.0
"""Op records of many executions become a table of ops, in bulk; the same rules as in `opwork`.

The kernels of a graph nearly always run in the same order, so the node words of an execution
are kept once (an *order*) and each execution says which order and at what times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .nodetable import NodeTable
from .records import OP_FUSED, OP_NODE_MASK
from .trace import EXPERT, OP, ROUTE, SUM, Segment, Table

_MAX_NS = 1 << 50  # as in opwork: a broken record
Ints = npt.NDArray[np.int64]
NodesOf = Callable[[int], NodeTable | None]


@dataclass(frozen=True, slots=True)
class RawSegment:
    """Some calls with what was recorded inside them, as it is stored.

    ``runs`` as RUN, but ``n_ops`` counts records of any kind and ``first_op`` is not set.
    ``order``: per run, an index into ``orders`` (-1: no records), each the words "node" of
    struct op_hit. ``times``: ns of every record, run after run.
    """

    calls: Table
    runs: Table
    order: npt.NDArray[np.int32]
    orders: tuple[npt.NDArray[np.uint32], ...]
    times: Ints
    experts: Table


@dataclass(frozen=True, slots=True)
class _Template:
    keep: npt.NDArray[np.bool_]
    node: npt.NDArray[np.int32]
    fused: npt.NDArray[np.bool_]
    whole: npt.NDArray[np.bool_]


def expand(raw: RawSegment, nodes: NodesOf) -> Segment:
    """The segment with its ops. Records that name no node of their graph are left out."""
    runs = raw.runs.copy()
    counts = np.where(raw.order >= 0, runs["n_ops"], 0).astype(np.int64)
    pairs = runs["graph"].astype(np.int64) * (len(raw.orders) + 1) + raw.order
    keys, key_of = np.unique(pairs, return_inverse=True)
    templates: list[_Template] = []
    for first in (int(np.flatnonzero(key_of == k)[0]) for k in range(len(keys))):
        order = int(raw.order[first])
        words = raw.orders[order] if order >= 0 else np.zeros(0, np.uint32)
        templates.append(_template(words, nodes(int(runs["graph"][first]))))
    starts = np.cumsum([0, *(len(t.node) for t in templates)])[:-1]
    run_of, within = _spread(counts)
    at = starts[key_of][run_of] + within if len(templates) else within
    keep = _joined([t.keep for t in templates], np.bool_)[at]
    times = raw.times
    if not bool(keep.all()):
        run_of, at, times = run_of[keep], at[keep], times[keep]
        counts = np.bincount(run_of, minlength=len(runs)).astype(np.int64)
    ops = np.zeros(len(run_of), OP)
    ops["run"] = run_of
    ops["node"] = _joined([t.node for t in templates], np.int32)[at]
    ops["fused"] = _joined([t.fused for t in templates], np.bool_)[at]
    ops["begin"] = times
    ends = np.empty_like(times)
    ends[:-1] = times[1:]
    last = np.cumsum(counts) - 1
    ran = counts > 0
    ends[last[ran]] = runs["end"][ran]
    ops["end"] = ends
    ns = ends - times
    ops["timed"] = (ns >= 0) & (ns <= _MAX_NS)
    ops["timed"] &= _joined([t.whole for t in templates], np.bool_)[at]
    runs["n_ops"] = counts
    runs["first_op"] = np.cumsum(counts) - counts
    return Segment(raw.calls, runs, ops, raw.experts)


def without_ops(raw: RawSegment) -> Segment:
    """The segment's calls and runs alone; ``n_ops`` stays what was recorded."""
    runs = raw.runs.copy()
    runs["first_op"] = np.cumsum(runs["n_ops"], dtype=np.int64) - runs["n_ops"]
    return Segment(raw.calls, runs, np.zeros(0, OP), np.zeros(0, EXPERT))


def sum_ops(segment: Segment) -> Table:
    """The ops of a segment added up (SUM), where their graph is known."""
    ops, runs = segment.ops, segment.runs
    known = runs["graph"][ops["run"]] >= 0
    if not bool(known.all()):
        ops = ops[known]
    if not len(ops):
        return np.zeros(0, SUM)
    pairs = runs["graph"].astype(np.int64) * 256 + runs["phase"]
    names, pair_of = np.unique(pairs, return_inverse=True)
    width = 2 * (int(ops["node"].max()) + 1)
    key = pair_of[ops["run"]].astype(np.int64) * width + 2 * ops["node"].astype(np.int64) + ops["fused"]
    size = len(names) * width
    timed = ops["timed"]
    ns = np.where(timed, ops["end"] - ops["begin"], 0)
    seen = np.bincount(key, minlength=size)
    calls = np.bincount(key[timed], minlength=size)
    total = np.zeros(size, np.int64)
    np.add.at(total, key, ns)
    low, high = np.full(size, np.iinfo(np.int64).max), np.zeros(size, np.int64)
    np.minimum.at(low, key[timed], ns[timed])
    np.maximum.at(high, key[timed], ns[timed])
    rows = np.flatnonzero(seen)
    out = np.zeros(len(rows), SUM)
    pair, rest = rows // width, rows % width
    out["graph"], out["phase"] = names[pair] // 256, names[pair] % 256
    out["node"], out["fused"] = rest // 2, rest % 2
    out["calls"], out["ns"], out["untimed"] = calls[rows], total[rows], (seen - calls)[rows]
    out["min"], out["max"] = np.where(calls[rows] > 0, low[rows], 0), high[rows]
    return out


def route_experts(segment: Segment) -> Table:
    """Which kernels of a segment used how many experts (ROUTE), where their graph is known."""
    experts, runs, ops = segment.experts, segment.runs, segment.ops
    experts = experts[runs["graph"][experts["run"]] >= 0]
    if not len(experts):
        return np.zeros(0, ROUTE)
    timed = ops[ops["timed"]]
    ran = (timed["run"].astype(np.int64) << 32) | timed["node"]
    rows = np.zeros(len(experts), ROUTE)
    rows["graph"], rows["phase"] = runs["graph"][experts["run"]], runs["phase"][experts["run"]]
    rows["node"], rows["distinct"] = experts["node"], experts["distinct"]
    rows["timed"] = np.isin((experts["run"].astype(np.int64) << 32) | experts["node"], ran)
    rows["count"] = 1
    return merge_routes([rows])


def merge_routes(tables: Sequence[Table]) -> Table:
    """Several ROUTE tables as one."""
    rows = np.concatenate([np.zeros(0, ROUTE), *tables])
    where_in = (rows["graph"].astype(np.int64) << 32) | rows["node"]
    what = (rows["distinct"].astype(np.int64) << 9) | (rows["phase"].astype(np.int64) << 1) | rows["timed"]
    key = np.stack([where_in, what], axis=1)
    _, first, where = np.unique(key, axis=0, return_index=True, return_inverse=True)
    out = rows[first]
    out["count"] = np.bincount(where.reshape(-1), weights=rows["count"], minlength=len(first))
    return out


def merge_sums(tables: Sequence[Table]) -> Table:
    """Several SUM tables as one."""
    rows = np.concatenate([np.zeros(0, SUM), *tables])
    key = (rows["graph"].astype(np.int64) << 34) | (rows["phase"].astype(np.int64) << 26)
    key |= (rows["node"].astype(np.int64) << 1) | rows["fused"]
    names, first, where = np.unique(key, return_index=True, return_inverse=True)
    out = rows[first]
    for name in ("calls", "ns", "untimed", "max"):
        out[name] = 0
    for name in ("calls", "ns", "untimed"):
        np.add.at(out[name], where, rows[name])
    np.maximum.at(out["max"], where, rows["max"])
    timed = rows["calls"] > 0
    low = np.full(len(names), np.iinfo(np.int64).max)
    np.minimum.at(low, where[timed], rows["min"][timed])
    out["min"] = np.where(out["calls"] > 0, low, 0)
    return out


def _template(words: npt.NDArray[np.uint32], nodes: NodeTable | None) -> _Template:
    index = (words & OP_NODE_MASK).astype(np.int32)
    fused = (words & np.uint32(OP_FUSED)) != 0
    keep = np.ones(len(index), np.bool_)
    if nodes is None:
        # Nothing tells which kernels lie between two records: no time can be proven.
        return _Template(keep, index, fused, np.zeros(len(index), np.bool_))
    n = len(nodes)
    keep = index < n
    if len(index) > 1:
        highest = np.maximum.accumulate(np.where(keep, index, -1))
        keep[1:] &= index[1:] > highest[:-1]
    good = index[keep]
    good_fused = fused[keep] & (good + 1 < n)
    before = nodes.before()
    stop = np.minimum(good + 1 + good_fused, n)
    gap = before[np.append(good[1:], n)[: len(good)]] - before[stop]
    whole = np.zeros(len(index), np.bool_)
    whole[keep] = gap <= 0
    fused[keep] = good_fused
    return _Template(keep, index, fused, whole)


def _spread(counts: Ints) -> tuple[Ints, Ints]:
    """For each of sum(counts) entries: whose it is, and its place among those."""
    owner = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    first = np.cumsum(counts) - counts
    return owner, np.arange(len(owner), dtype=np.int64) - np.repeat(first, counts)


def _joined(parts: Sequence[npt.NDArray[Any]], kind: type[np.generic]) -> npt.NDArray[Any]:
    return np.concatenate([np.zeros(0, kind), *parts])
