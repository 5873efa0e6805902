# SPDX-License-Identifier: Apache-2.0
"""Choosing the layout from snapshots of a live graph (design D9).

The best candidate is assumed from the first moment, so that nothing is missed while it is
being checked; if another one turns out to fit, what was read by the assumed one is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt

from .errors import TargetError
from .target.layout import Layout, LiveGraph, choose_layout
from .target.names import Tables

ABSENT = 0xFFFF
RAW_CGRAPH, RAW_NODE = 1, 2
MAX_RAW = 512
MAX_SRC = 10
PATIENCE = 8
"""Live graphs that may fit no candidate before we give up: a graph can be torn down or
hold too little (one node) to tell."""


class LayoutSettler:
    """``candidates``: best first; ``tables`` of the target, None when not found."""

    def __init__(self, candidates: Sequence[Layout], tables: Tables | None) -> None:
        if not candidates:
            raise TargetError(
                "no known layout of ggml's structures applies to this build",
                "report its build-id to the project",
            )
        self._candidates = tuple(candidates)
        self._tables = tables
        self._refusals = 0
        #: Why the last live graph fitted no candidate; None while there was none.
        self.reason: str | None = None

    @property
    def assumed(self) -> Layout:
        """The candidate by which graphs are read until one is chosen."""
        return self._candidates[0]

    def look(self, raws: npt.NDArray[Any]) -> Layout | None:
        """The layout that fits the live graphs in ``raws`` (records of ring "raws").

        None: nothing was there to judge by. Raises TargetError when several graphs fit none.
        """
        for live in _graphs(raws):
            try:
                tables = self._tables
                return choose_layout(
                    self._candidates, live,
                    len(tables.ops) if tables else None,
                    len(tables.types) if tables and tables.types else None,
                )  # fmt: skip
            except TargetError as error:
                self.reason = error.what
                self._refusals += 1
                if self._refusals >= PATIENCE:
                    raise
        return None


def _graphs(raws: npt.NDArray[Any]) -> list[LiveGraph]:
    """One LiveGraph per snapshot that has its header and at least one node."""
    headers: dict[int, bytes] = {}
    nodes: dict[int, dict[int, tuple[int, bytes]]] = {}
    for raw in raws:
        size = min(int(raw["size"]), MAX_RAW)
        data = raw["bytes"].tobytes()[:size]
        seq = int(raw["seq"])
        if raw["what"] == RAW_CGRAPH:
            headers[seq] = data
        elif raw["what"] == RAW_NODE and size:
            nodes.setdefault(seq, {})[int(raw["index"])] = (int(raw["addr"]), data)
    return [LiveGraph(headers[seq], some) for seq, some in nodes.items() if seq in headers]


def layout_fields(layout: Layout, tables: Tables | None, *, chosen: bool) -> dict[str, int]:
    """The fields of ``struct layout`` of probes/events.h."""

    def number(found: int | None, absent: int) -> int:
        return absent if found is None else found

    fields = {
        name: number(getattr(layout, name), ABSENT)
        for name in (
            "g_n_nodes", "g_nodes", "g_uid", "t_type", "t_buffer", "t_ne", "t_nb", "t_op", "t_op_params",
            "t_flags", "t_src", "t_view_src", "t_view_offs", "t_data", "t_name", "t_extra",
        )
    }  # fmt: skip
    fields["state"] = 1 if chosen else 2
    fields["t_size"] = min(layout.t_size, MAX_RAW)
    fields["n_src"] = min(layout.n_src, MAX_SRC)
    for op in ("rope", "get_rows", "mul_mat_id"):
        fields[f"op_{op}"] = number(tables.op_number(op.upper()) if tables else None, ABSENT)
    fields["type_i32"] = number(tables.type_number("i32") if tables else None, 0xFFFFFFFF)
    return fields
