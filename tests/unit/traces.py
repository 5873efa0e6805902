# SPDX-License-Identifier: Apache-2.0
"""Small traces with known values, for tests of everything that reads traces.

:func:`small` is a prompt of five tokens at position 0 and three tokens after it, in one context,
on a decoder of one layer (two with ``layers=2``). Every op takes ``streams.OP_NS`` ns, the last
one of each graph too; every graph is entered ``streams.SETUP`` ns before its first op; a call
begins 1000 ns before its graph and ends 1000 ns after it, and 2 ms lie between two calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy.typing as npt

from profinferd.agent.model.collect import Collector, trace_of
from profinferd.agent.model.peaks import Peak, Peaks
from profinferd.agent.model.plancache import Tables
from profinferd.agent.model.trace import Child, Clock, Machine, Trace, TraceFacts

from .graphs import GLU, OPS, TYPES, UNARY, decoder
from .streams import START, Step, Stream, decode, prompt, session

THINK = 2_000_000
MACHINE = Machine("board", "6.18.0", "x86_64", "Test CPU", 2, 8 << 30)
PEAKS = Peaks((Peak(1, 6e9, None, 25e9), Peak(2, 10e9, None, 50e9)), "Test CPU, 2 CPUs")
CLOCK = Clock(START, START + 5, 1_700_000_000_000_000_000)


def small(
    layers: int = 1,
    *,
    lose: Sequence[int] = (),
    unseen: Sequence[int] = (),
    gaps: Sequence[tuple[int, int, int, str]] = (),
    records: Mapping[str, npt.NDArray[Any]] | None = None,
    peaks: Peaks = PEAKS,
    stats: Mapping[str, float] | None = None,
) -> Trace:
    """The trace described above. ``lose``, ``unseen``: kernels of the last token whose records
    were lost, or that have no probe (places in the order in which kernels run)."""
    steps = [prompt(0, 5), decode(5), decode(6), decode(7, lose=lose, unseen=unseen)]
    if layers != 1:
        shapes = [(5, 1, 256), (1, 1, 256)]
        first, rest = (decoder(*shape, layers=layers) for shape in shapes)
        for step, graph, hash in zip(steps, [first, rest, rest, rest], [11, 12, 12, 12], strict=True):
            step.graph, step.hash = graph, hash
    return of_steps([[step] for step in steps], gaps=gaps, records=records, peaks=peaks, stats=stats)


def of_steps(
    calls: Sequence[Sequence[Step]],
    *,
    gaps: Sequence[tuple[int, int, int, str]] = (),
    records: Mapping[str, npt.NDArray[Any]] | None = None,
    peaks: Peaks = PEAKS,
    child: Child | None = None,
    stats: Mapping[str, float] | None = None,
) -> Trace:
    """A trace of calls with these graphs in each."""
    to, stream = session(), Stream()
    collector = Collector(to)
    for steps in calls:
        stream.call(*steps, think=THINK)
    stream.drain(to)
    to.finish(stream.now)
    about = TraceFacts(
        to.target.target, START, stream.now, MACHINE, (CLOCK,), peaks, Tables(OPS, TYPES, UNARY, GLU),
        child=child, created=1_700_000_000.0, version="test",
    )  # fmt: skip
    return trace_of(collector, about, to, stream.now, stats=stats, gaps=gaps, records=records)
