# SPDX-License-Identifier: Apache-2.0
"""Page faults and waits of the executions that are compared, by unit."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from .diffunits import Executions, Sides, Units
from .trace import Trace

Floats = npt.NDArray[np.float64]
_NO_NODE = 0xFFFFFFFF


@dataclass(slots=True)
class Counted:
    """``faults``: seq -> [(node, 1)], ``waits``: seq -> [(node, ns)]; whether they were recorded."""

    has_faults: bool = False
    has_waits: bool = False
    faults: dict[int, list[tuple[int, float]]] = field(default_factory=lambda: defaultdict(list))
    waits: dict[int, list[tuple[int, float]]] = field(default_factory=lambda: defaultdict(list))

    def by_unit(self, side: Sides, its: Executions, chosen: range, found: Units) -> tuple[Floats, Floats]:
        """(faults, ns waited) as [execution, unit]."""
        out = np.zeros((2, len(chosen), len(found.members)))
        for row, i in enumerate(chosen):
            order = side.orders[its.orders[i]]
            for which, events in enumerate((self.faults, self.waits)):
                for node, amount in events.get(its.seqs[i], ()):
                    place = order.place.get(node)
                    if place is not None:
                        out[which, row, found.of[order.kernels[place][0]]] += amount
        return out[0], out[1]


def counted(trace: Trace) -> Counted:
    """Page faults and off-core spans that name the execution and node that they fell into."""
    out = Counted()
    for kind in trace.kinds:
        rows = trace.records(kind)
        fields = set(rows.dtype.names or ())
        if not {"seq", "node"} <= fields:
            continue
        named = rows[(rows["seq"] != 0) & (rows["node"] != _NO_NODE)]
        if "addr" in fields and "kind" in fields:
            out.has_faults = True
            _add(out.faults, named, np.ones(len(named)))
        elif {"begin", "end", "cause"} <= fields:
            out.has_waits = True
            _add(out.waits, named, (named["end"] - named["begin"]).astype(np.float64))
    return out


def _add(to: dict[int, list[tuple[int, float]]], rows: npt.NDArray[np.void], amounts: Floats) -> None:
    for seq, node, amount in zip(rows["seq"].tolist(), rows["node"].tolist(), amounts.tolist(), strict=True):
        to[seq].append((node, amount))
