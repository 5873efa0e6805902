# SPDX-License-Identifier: Apache-2.0
"""Folded stacks for flame graphs: ``program;phase;layer;role;op ns``, one line per distinct stack.

Read by flamegraph.pl, inferno and speedscope. The numbers are nanoseconds on the critical path.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from os.path import basename

import numpy as np

from ..agent.errors import UsageError
from ..agent.model.optable import sum_ops
from ..agent.model.trace import PHASES, Trace
from . import Choice
from .text import clean


class FoldedExporter:
    """Implements :class:`profinferd.exporters.TraceExporter`."""

    def files(self, trace: Trace, choice: Choice) -> Iterator[tuple[str, Iterable[bytes]]]:
        """One file. UsageError without times: they are the widths."""
        if not choice.times:
            raise UsageError("a flame graph is drawn from times", "leave --no-times out")
        lines = (f"{';'.join(stack)} {ns}\n" for stack, ns in sorted(_stacks(trace, choice).items()) if ns)
        yield "", [line.encode() for line in lines]


def _stacks(trace: Trace, choice: Choice) -> Counter[tuple[str, ...]]:
    program = "target" if choice.anonymise else basename(trace.facts.target.exe) or "target"
    found: Counter[tuple[str, ...]] = Counter()
    sums = [trace.sums] if choice.window is None else [sum_ops(s) for s in choice.segments(trace)]
    for row in np.concatenate(sums):
        table = trace.nodes(int(row["graph"]))
        node = int(row["node"])
        if table is None or node >= len(table):
            continue
        layer = int(table.layer[node])
        op = f"{table.op[node]} {table.dtype[node]}"
        if row["fused"] and node + 1 < len(table):
            op = f"{table.op[node]}+{table.op[node + 1]} {table.dtype[node]}"
        parts = [program, PHASES[int(row["phase"])], "no layer" if layer < 0 else f"layer {layer}"]
        parts += [op] if choice.anonymise else [table.role[node], op]
        found[tuple(clean(part, 80).replace(";", ",") for part in parts)] += int(row["ns"])
    return found
