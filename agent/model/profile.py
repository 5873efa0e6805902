# SPDX-License-Identifier: Apache-2.0
"""Kernels of a trace by operator, type, role and layer, against what the machine could do."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from . import costs, roofline
from .nodetable import NodeTable
from .peaks import Peak, Peaks
from .trace import PHASES, Table, Trace

_MAX_GRAPHS = 4096
OTHER = "other"


@dataclass(frozen=True, slots=True)
class Row:
    """Kernels of one kind in one layer (None: outside any) and phase.

    ``seconds`` of the ``calls`` whose own time is known; ``untimed`` ran besides.
    ``seconds_stderr`` only where times are estimated from bursts. ``flops`` and ``bytes`` of
    the timed calls, nominal, None where a formula is not known; ``wasted_seconds``: time beyond
    what the machine's peaks allow, None where peaks, operations or bytes are not known.
    """

    op: str
    dtype: str
    role: str
    layer: int | None
    kernel: str
    backend: str
    phase: str
    calls: int
    untimed: int
    seconds: float
    seconds_stderr: float | None
    flops: int | None
    bytes: int | None
    wasted_seconds: float | None = None


@dataclass(slots=True)
class _Sum:
    calls: int = 0
    untimed: int = 0
    ns: int = 0
    flops: int | None = 0
    bytes: int | None = 0


_Key = tuple[str, str, str, int, str, str, str]


def rows(trace: Trace) -> list[Row]:
    """The kernels of a trace, most time first, with what they waste of the machine.

    From the trace's own sums where every kernel was recorded. Where op probes were sampled, the
    figures are the snapshot's estimates, which know no layers.
    """
    peak = peak_of(trace)
    found = _of_sums(trace) if trace.facts.ops == "all" and len(trace.sums) else _of_snapshot(trace)
    return sorted(
        (_with_waste(row, peak) for row in found), key=lambda r: (-r.seconds, r.op, r.role, r.layer or -1)
    )


def peaks_of(trace: Trace) -> Peaks:
    """The machine's peaks as the recording has them."""
    judged = trace.snapshot.peaks
    return judged if judged is not None and judged.by_threads else trace.facts.peaks


def peak_of(trace: Trace) -> Peak | None:
    """The peak for as many threads as computed; for all of them where that is not known."""
    return peaks_of(trace).at(threads_of(trace))


def threads_of(trace: Trace) -> int | None:
    """How many threads computed, where they were watched."""
    threads = getattr(trace.snapshot, "threads", None)
    if threads is None or not threads.threads:
        return None
    return len([t for t in threads.threads if t.work_run_seconds > 0]) or None


def _with_waste(row: Row, peak: Peak | None) -> Row:
    under = roofline.roof(peak, row.op, row.dtype)
    wasted = roofline.reach(row.seconds, row.flops, row.bytes, under).wasted_seconds
    return Row(
        row.op, row.dtype, row.role, row.layer, row.kernel, row.backend, row.phase, row.calls,
        row.untimed, row.seconds, row.seconds_stderr, row.flops, row.bytes, wasted,
    )  # fmt: skip


def _of_snapshot(trace: Trace) -> Iterable[Row]:
    for op in trace.snapshot.ops:
        yield Row(
            op.op, op.dtype, op.role, None, op.kernel, op.backend, op.phase, op.calls, op.untimed,
            op.seconds, op.seconds_stderr, op.flops, op.bytes,
        )  # fmt: skip


def _of_sums(trace: Trace) -> Iterable[Row]:
    sums = trace.sums
    backends = backends_of(trace)
    routed = _routed(trace)
    found: dict[_Key, _Sum] = {}
    for graph, own in by_graph(sums):
        nodes = trace.nodes(graph)
        if nodes is None:
            continue
        for phase, node, fused, calls, ns, untimed in zip(
            *(own[name].tolist() for name in ("phase", "node", "fused", "calls", "ns", "untimed")),
            strict=True,
        ):
            if node >= len(nodes):
                continue
            layer = int(nodes.layer[node])
            key = (
                nodes.op[node], nodes.dtype[node], nodes.role[node], layer,
                nodes.kernel_of(node, fused), backends.get(graph, OTHER), PHASES[phase],
            )  # fmt: skip
            total = found.setdefault(key, _Sum())
            total.calls += calls
            total.untimed += untimed
            total.ns += ns
            _price(total, nodes, node, fused, calls, routed.get((graph, phase, node)))
    for key, total in found.items():
        yield Row(
            key[0], key[1], key[2], None if key[3] < 0 else key[3], key[4], key[5], key[6], total.calls,
            total.untimed, total.ns / 1e9, None, total.flops, total.bytes,
        )  # fmt: skip


def by_graph(sums: Table) -> Iterator[tuple[int, Table]]:
    """(graph, its rows) of a SUM table, by graph."""
    if not len(sums):
        return
    ordered = sums[np.argsort(sums["graph"], kind="stable")]
    graphs = ordered["graph"]
    bounds = [0, *(np.flatnonzero(graphs[1:] != graphs[:-1]) + 1).tolist(), len(ordered)]
    for first, last in itertools.pairwise(bounds):
        yield int(graphs[first]), ordered[first:last]


def _price(
    total: _Sum, nodes: NodeTable, node: int, fused: bool, calls: int, routed: tuple[int, int] | None
) -> None:
    flops = int((nodes.fused_flops if fused else nodes.flops)[node])
    moved = int((nodes.fused_bytes if fused else nodes.bytes)[node])
    total.flops = (
        None if total.flops is None or (flops < 0 and calls) else total.flops + max(flops, 0) * calls
    )
    if total.bytes is None:
        return
    if routed is not None:
        # Observed routes say exactly what was read; the others go by shapes.
        total.bytes += routed[1]
        calls = max(calls - routed[0], 0)
    total.bytes = None if moved < 0 and calls else total.bytes + max(moved, 0) * calls


def _routed(trace: Trace) -> dict[tuple[int, int, int], tuple[int, int]]:
    """(graph, phase, node) -> how many executions have observed experts, and their bytes."""
    if not any("MUL_MAT_ID" in nodes.op for nodes in _tables(trace)):
        return {}
    found: dict[tuple[int, int, int], tuple[int, int]] = {}
    prices: dict[tuple[int, int, int], int | None] = {}
    for row in trace.routes[trace.routes["timed"]]:
        graph, phase, node, distinct = (int(row[n]) for n in ("graph", "phase", "node", "distinct"))
        price = prices.get((graph, node, distinct), -1)
        if price == -1:
            built = trace.graph(graph)
            inside = built is not None and node < len(built.nodes) and built.nodes[node].op == "MUL_MAT_ID"
            price = costs.bytes_moved(built, node, experts=distinct) if built is not None and inside else None
            prices[graph, node, distinct] = price
        if price is not None:
            count, moved = found.get((graph, phase, node), (0, 0))
            many = int(row["count"])
            found[graph, phase, node] = (count + many, moved + price * many)
    return found


def _tables(trace: Trace) -> Iterable[NodeTable]:
    for graph in np.unique(trace.sums["graph"]).tolist()[:_MAX_GRAPHS]:
        nodes = trace.nodes(graph)
        if nodes is not None:
            yield nodes


def backends_of(trace: Trace) -> dict[int, str]:
    """graph -> the backend that it mostly ran on."""
    runs = trace.runs[trace.runs["n_ops"] > 0]
    counts: dict[int, Counter[int]] = {}
    pairs, many = np.unique(
        runs["graph"].astype(np.int64) * 65536 + runs["backend"].astype(np.int64), return_counts=True
    )
    for pair, count in zip(pairs.tolist(), many.tolist(), strict=True):
        graph, backend = divmod(pair, 65536)
        counts.setdefault(graph, Counter())[backend] += count
    names = trace.facts.backends
    return {
        graph: names[of.most_common(1)[0][0]] if of.most_common(1)[0][0] < len(names) else OTHER
        for graph, of in counts.items()
    }
