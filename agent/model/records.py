# SPDX-License-Identifier: Apache-2.0
"""The numbers of ``probes/events.h`` that the model has to understand.

The layout of the records is not repeated here: the model gets numpy record arrays whose
fields carry the names of the C structures. A test holds these enumerations against the
header, so that neither can drift alone.
"""

from __future__ import annotations

import enum
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

#: A structured array whose dtype has the fields of one structure of events.h.
Records: TypeAlias = npt.NDArray[np.void]


class Kind(enum.IntEnum):
    """``enum event_kind``."""

    CALL_BEGIN = 1
    CALL_END = 2
    GRAPH_BEGIN = 3
    GRAPH_END = 4
    CALL_ABANDONED = 5
    GRAPH_ABANDONED = 6


class Level(enum.IntEnum):
    """``enum event_level``."""

    DECODE = 1
    ENCODE = 2
    PROCESS = 3
    SCHED = 8
    BACKEND = 9
    CPU = 10


class Flag(enum.IntEnum):
    """``enum event_flag``: bits. (An IntFlag would make each test of a bit thirty times dearer.)"""

    KNOWN = 1 << 0
    DESCRIBED = 1 << 1
    SAME = 1 << 2
    FAULT = 1 << 3
    SNAPSHOT = 1 << 4
    UNPAIRED = 1 << 5
    CUT = 1 << 6
    TRACED = 1 << 7
    SUMMED = 1 << 8
    DISARMED = 1 << 9


class Chunk(enum.IntEnum):
    """``enum chunk_what``."""

    POS = 1
    OUT = 2
    EXPERTS = 3


OP_FUSED = 1 << 31
OP_NODE_MASK = 0x00FFFFFF
INLINE_INTS = 8
CHUNK_INTS = 64

#: Counters of ``enum stat`` that mean something was not recorded -> kind in ``lost``; and what
#: the kernel itself counts, which is no part of the enumeration (case C66). Raw bytes are not
#: among them: they only serve to choose the layout, and no figure lacks them afterwards. Nor are
#: executions that were not summed because another thread ran the same graph (slot_busy): they
#: count as graphs that no burst met.
LOST_STATS = {
    "lost_events": "events",
    "lost_ops": "ops",
    "lost_nodes": "nodes",
    "lost_ints": "ints",
    "fault_call": "fault_call",
    "fault_graph": "fault_graph",
    "fault_node": "fault_node",
    "fault_op": "fault_op",
    "fault_ints": "fault_ints",
    "map_full": "map_full",
    "skipped_return": "skipped_return",
    "recursion_misses": "recursion_misses",
}
#: Counters of ``enum stat`` that are probe hits -> level as in ``probe_hits_total``.
HIT_STATS = {
    "hits_call": "token",
    "hits_graph": "graph",
    "hits_op": "op",
    "hits_other_thread": "op_other_thread",
}


def stat_name(name: str) -> str:
    """``ST_LOST_OPS``, as the header spells it, or ``lost_ops``: both mean the latter."""
    return name.lower().removeprefix("st_")


def columns(records: Records, fields: tuple[str, ...]) -> list[list[Any]]:
    """Each field as a list of Python numbers (lists for array fields), in record order.

    Plain ints do not wrap around in later arithmetic, which u64 scalars of numpy would.
    """
    return [records[field].tolist() for field in fields]


def group_by_seq(records: Records) -> list[tuple[int, Records]]:
    """(seq, records of it in arrival order): slices of ``records`` where it is in order."""
    seq = records["seq"]
    if len(records) > 1 and bool((seq[1:] < seq[:-1]).any()):
        records = records[np.argsort(seq, kind="stable")]
        seq = records["seq"]
    cuts = np.flatnonzero(seq[1:] != seq[:-1]) + 1
    edges = [0, *cuts.tolist(), len(records)]
    return [(int(seq[low]), records[low:high]) for low, high in pairwise(edges) if low < high]
