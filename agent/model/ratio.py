# SPDX-License-Identifier: Apache-2.0
"""Op seconds of one kind of graph, estimated from bursts (design D12).

A ratio estimator. In burst b a kind of graph (one topology in one phase) runs X_b seconds
with its ops summed, of which Y_b in some op; its share there is r_b = Y_b / X_b. Since the
last burst the kind ran T_b seconds, always observed, of which U_b = T_b - X_b were not
summed. Burst b adds once, and for good,

    Y_b + (r_(b-1) + r_b) / 2 * U_b             (the first burst: Y_1 + r_1 * U_1)

Why a share of graph seconds rather than a mean per graph: the time of one graph moves with
KV length, prompt length, clock speed and neighbours, the share of an op in it far less, and
the seconds of every graph are known whether its ops were summed or not.
Why what was measured is added as measured: no error is made where nothing is inferred, and
with every graph summed the result is the truth.
Why both neighbours of a gap: shares that drift (attention grows with the KV length) would
with r_b alone always be taken from the end of the gap, an error of one sign that adds up;
between two bursts a linear drift cancels. For shares that do not drift it is the mean of
two unbiased figures.
Nothing is rescaled later and every term is >= 0, so the totals are counters.

Standard error. Totals are sums of c_b * r_b with known weights c_b (what was inferred from
burst b) plus what was measured. The variance of a share comes from successive differences,
d_b = r_b - r_(b-1), which a slow drift hardly enters: pooled once as if bursts were equally
good, s2 = sum d^2 / 2(m-1), and once as if variance fell with their length,
t2 = sum d^2 / (1/X_b + 1/X_(b-1)) / (m-1). The larger of s2 * sum c^2 and t2 * (sum c^2 / X
+ sum U) is taken: bursts cut short are worse than their number says, and what was not summed
has chance of its own (the finite-population term). It is itself an estimate, with about
2 (m - 1) / 3 degrees of freedom. One burst has no variation to
go by; a share lies between 0 and 1, so its variance is at most r (1 - r), and that is used.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

HISTOGRAM_BUCKETS = 16

Floats = npt.NDArray[np.float64]

_ROW = np.dtype(
    [
        ("seconds", "f8"),
        ("calls", "f8"),
        ("fused", "f8"),
        # since the last burst that was used
        ("pool_seconds", "f8"),
        ("pool_calls", "f8"),
        ("pool_fused", "f8"),
        # in the last burst that was used
        ("share", "f8"),
        ("calls_per_graph", "f8"),
        ("fused_per_graph", "f8"),
        # sums of d^2, of d^2 / (1/X + 1/X')
        ("squares", "f8"),
        ("weighted_squares", "f8"),
        # of the calls that were summed, never extrapolated
        ("shortest", "f8"),
        ("longest", "f8"),
        ("buckets", "f8", (HISTOGRAM_BUCKETS,)),
    ]
)


@dataclass(frozen=True, slots=True)
class OpTotal:
    """One op group: ``key`` is the caller's.

    ``seconds``, ``calls``, ``fused`` (of the calls, those that also ran the next node):
    estimates over all attributed graphs, monotone; calls are exact where every graph of the
    kind runs the same kernels. ``stderr``: of ``seconds``, 0 where all of it was measured.
    ``shortest_ns``, ``longest_ns`` (NaN before the first call) and ``buckets`` (log2, as
    struct node_sum) describe the summed calls only; a slot that served several phases in
    one burst lends each its part of the buckets and all of the extremes.
    """

    key: Hashable
    seconds: float
    stderr: float
    calls: float
    fused: float
    shortest_ns: float
    longest_ns: float
    buckets: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class KindTotal:
    """One kind of graph; ``topology`` "" stands for several.

    ``seconds`` = ``attributed_seconds`` + ``pending_seconds``; the latter wait for a burst
    that meets the kind, or never find one: then ``ops`` is empty, which is absent, not zero.
    ``attributed_seconds`` = ``setup_seconds`` + sum of op seconds.
    """

    topology: str
    phase: str
    graphs: int
    graphs_sampled: int
    bursts: int
    seconds: float
    attributed_seconds: float
    pending_seconds: float
    setup_seconds: float
    setup_stderr: float
    ops: tuple[OpTotal, ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """What one slot's sums say of one phase: per key, arrays of the same length.

    ``times`` in seconds and ``calls``, ``fused`` belong to ``graphs`` executions of together
    ``graph_seconds``. ``shortest``, ``longest`` in ns, inf and 0 where nothing was called.
    """

    keys: Sequence[Hashable]
    times: Floats
    calls: Floats
    fused: Floats
    shortest: Floats
    longest: Floats
    buckets: Floats
    graphs: int
    graph_seconds: float


def _rows(n: int) -> npt.NDArray[np.void]:
    rows = np.zeros(n, _ROW)
    rows["shortest"] = np.inf
    return rows


class Kind:
    """Counters of one (topology, phase). Row 0 is the setup: graph time before the first op."""

    def __init__(self, topology: str, phase: str) -> None:
        self.topology = topology
        self.phase = phase
        self.graphs = 0
        self.graphs_sampled = 0
        self.bursts = 0
        self.seconds = 0.0
        self.attributed = 0.0
        self._pending_seconds = 0.0
        self._pending_graphs = 0
        self._pool_seconds = 0.0
        self._pool_graphs = 0
        self._index: dict[Hashable, int] = {}
        self._rows = _rows(1)
        self._last_length = 0.0  # X of the last burst that was used
        self._open_weight = 0.0  # c of that burst; it still grows
        self._weights = 0.0  # sum of c^2, of c^2 / X over the bursts before it
        self._weights_by_length = 0.0
        self._inferred = 0.0  # sum of U

    def ran(self, seconds: float) -> None:
        """One execution ended, summed or not."""
        self.graphs += 1
        self.seconds += seconds
        self._pending_graphs += 1
        self._pending_seconds += seconds

    def sampled(self, sample: Sample) -> None:
        """Sums of executions that :meth:`ran` has been told of since the last burst.

        Dropped when they are more than that: the kind was folded away in between, and
        their seconds are counted there.
        """
        if self._pool_seconds + sample.graph_seconds > self._pending_seconds * (1 + 1e-9):
            return
        at = np.fromiter((self._column(key) for key in sample.keys), np.intp, len(sample.keys))
        rows = self._rows
        np.add.at(rows["pool_seconds"], at, sample.times)
        np.add.at(rows["pool_calls"], at, sample.calls)
        np.add.at(rows["pool_fused"], at, sample.fused)
        np.add.at(rows["buckets"], at, sample.buckets)
        np.minimum.at(rows["shortest"], at, sample.shortest)
        np.maximum.at(rows["longest"], at, sample.longest)
        rows["pool_seconds"][0] += max(0.0, sample.graph_seconds - float(sample.times.sum()))
        self._pool_seconds += sample.graph_seconds
        self._pool_graphs += sample.graphs
        self.graphs_sampled += sample.graphs

    def _column(self, key: Hashable) -> int:
        column = self._index.get(key)
        if column is None:
            column = len(self._index) + 1
            self._index[key] = column
            if column >= len(self._rows):
                self._rows = np.concatenate([self._rows, _rows(len(self._rows))])
        return column

    def attribute(self, min_graphs: int, min_share: float) -> bool:
        """Use what was summed since the last time, if it is enough to stand for the rest.

        A handful of graphs must not speak for a long gap: they wait for the next burst
        until there are ``min_graphs`` or ``min_share`` of the pending seconds.
        """
        if not self._pool_graphs or self._pool_seconds <= 0:
            return False
        if self._pool_graphs < min_graphs and self._pool_seconds < min_share * self._pending_seconds:
            return False
        rows, length = self._rows, self._pool_seconds
        gap = max(0.0, self._pending_seconds - length)
        gap_graphs = max(0, self._pending_graphs - self._pool_graphs)
        share = rows["pool_seconds"] / length
        calls = rows["pool_calls"] / self._pool_graphs
        fused = rows["pool_fused"] / self._pool_graphs
        before = 0.5 if self.bursts else 0.0
        after = 1.0 - before
        rows["seconds"] += rows["pool_seconds"] + gap * (before * rows["share"] + after * share)
        rows["calls"] += rows["pool_calls"] + gap_graphs * (before * rows["calls_per_graph"] + after * calls)
        rows["fused"] += rows["pool_fused"] + gap_graphs * (before * rows["fused_per_graph"] + after * fused)
        if self.bursts:
            squares = (share - rows["share"]) ** 2
            rows["squares"] += squares
            rows["weighted_squares"] += squares / (1 / length + 1 / self._last_length)
            self._open_weight += before * gap
            self._weights += self._open_weight**2
            self._weights_by_length += self._open_weight**2 / self._last_length
        self._open_weight = after * gap
        self._inferred += gap
        self._last_length = length
        rows["share"], rows["calls_per_graph"], rows["fused_per_graph"] = share, calls, fused
        self.attributed += length + gap
        self.bursts += 1
        for field in ("pool_seconds", "pool_calls", "pool_fused"):
            rows[field] = 0.0
        self._pool_seconds, self._pool_graphs = 0.0, 0
        self._pending_seconds, self._pending_graphs = 0.0, 0
        return True

    def finish(self) -> None:
        """No burst will come: what has been seen of this kind speaks for the rest."""
        if not self.attribute(1, 0.0) and self.bursts:
            rows = self._rows
            rows["seconds"] += self._pending_seconds * rows["share"]
            rows["calls"] += self._pending_graphs * rows["calls_per_graph"]
            rows["fused"] += self._pending_graphs * rows["fused_per_graph"]
            self._open_weight += self._pending_seconds
            self._inferred += self._pending_seconds
            self.attributed += self._pending_seconds
            self._pending_seconds, self._pending_graphs = 0.0, 0

    def _errors(self) -> Floats:
        n = len(self._index) + 1
        errors: Floats
        if not self.bursts:
            return np.zeros(n)
        weights = self._weights + self._open_weight**2
        if self.bursts == 1:
            share = self._rows["share"][:n]
            errors = np.sqrt(np.maximum(0.0, share * (1 - share)) * weights)
            return errors
        by_length = self._weights_by_length + self._open_weight**2 / self._last_length + self._inferred
        equal = self._rows["squares"][:n] / (2 * (self.bursts - 1)) * weights
        weighted = self._rows["weighted_squares"][:n] / (self.bursts - 1) * by_length
        variance: Floats = np.maximum(equal, weighted)
        errors = np.sqrt(variance)
        return errors

    def total(self) -> KindTotal:
        """The counters now; ops in the order they were first seen, none before the first burst."""
        rows, errors = self._rows, self._errors()
        ops: list[OpTotal] = []
        for key, i in self._index.items() if self.bursts else ():
            ops.append(
                OpTotal(
                    key=key,
                    seconds=float(rows["seconds"][i]),
                    stderr=float(errors[i]),
                    calls=float(rows["calls"][i]),
                    fused=float(rows["fused"][i]),
                    shortest_ns=float(rows["shortest"][i]) if np.isfinite(rows["shortest"][i]) else math.nan,
                    longest_ns=float(rows["longest"][i]) if np.isfinite(rows["shortest"][i]) else math.nan,
                    buckets=tuple(rows["buckets"][i].tolist()),
                )
            )
        return KindTotal(
            topology=self.topology,
            phase=self.phase,
            graphs=self.graphs,
            graphs_sampled=self.graphs_sampled,
            bursts=self.bursts,
            seconds=self.seconds,
            attributed_seconds=self.attributed,
            pending_seconds=self._pending_seconds,
            setup_seconds=float(rows["seconds"][0]),
            setup_stderr=float(errors[0]),
            ops=tuple(ops),
        )


def _joined(a: OpTotal, b: OpTotal) -> OpTotal:
    return OpTotal(
        key=a.key,
        seconds=a.seconds + b.seconds,
        stderr=math.hypot(a.stderr, b.stderr),
        calls=a.calls + b.calls,
        fused=a.fused + b.fused,
        shortest_ns=float(np.fmin(a.shortest_ns, b.shortest_ns)),
        longest_ns=float(np.fmax(a.longest_ns, b.longest_ns)),
        buckets=tuple(x + y for x, y in zip(a.buckets, b.buckets, strict=True)),
    )


def join(a: KindTotal, b: KindTotal) -> KindTotal:
    """The sum of two kinds of one phase; their errors are independent."""
    ops = {op.key: op for op in a.ops}
    for op in b.ops:
        ops[op.key] = _joined(ops[op.key], op) if op.key in ops else op
    return KindTotal(
        topology=a.topology if a.topology == b.topology else "",
        phase=a.phase,
        graphs=a.graphs + b.graphs,
        graphs_sampled=a.graphs_sampled + b.graphs_sampled,
        bursts=a.bursts + b.bursts,
        seconds=a.seconds + b.seconds,
        attributed_seconds=a.attributed_seconds + b.attributed_seconds,
        pending_seconds=a.pending_seconds + b.pending_seconds,
        setup_seconds=a.setup_seconds + b.setup_seconds,
        setup_stderr=math.hypot(a.setup_stderr, b.setup_stderr),
        ops=tuple(ops.values()),
    )
