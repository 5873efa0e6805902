# SPDX-License-Identifier: Apache-2.0
"""What is said once of a recording, as JSON in table "meta", and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
import numpy as np

from ..model.nodetable import NodeTable
from ..model.peaks import ABSENT, Peaks
from ..model.plancache import Tables
from ..model.snapshot import Target
from ..model.trace import Child, Clock, GraphInfo, Machine, TraceFacts
from .codec import damaged

MAX_JSON = 1 << 24
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Traits:
    """One of the engine's data types."""

    name: str
    block_size: int
    type_size: int


@dataclass(frozen=True, slots=True)
class Names:
    """The engine's own tables."""

    ops: tuple[str, ...] = ()
    types: tuple[Traits | None, ...] | None = None
    unary: tuple[str, ...] = ()
    glu: tuple[str, ...] = ()

    @classmethod
    def of(cls, tables: Tables) -> Names:
        """From the model's."""
        types = None
        if tables.types is not None:
            types = tuple(
                None if t is None else Traits(t.name or "", t.block_size, t.type_size) for t in tables.types
            )
        return cls(tuple(tables.ops), types, tuple(tables.unary), tuple(tables.glu))

    def tables(self) -> Tables:
        """To the model's."""
        return Tables(self.ops, self.types, self.unary, self.glu)


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known at the beginning, and what changes while it is recorded."""

    target: Target
    begin_ns: int
    end_ns: int
    machine: Machine = field(default_factory=Machine)
    clocks: tuple[Clock, ...] = ()
    peaks: Peaks = ABSENT
    names: Names = field(default_factory=Names)
    layout: dict[str, int | str | None] = field(default_factory=dict)
    backends: tuple[str, ...] = ()
    child: Child | None = None
    ops: str = "all"
    created: float = 0.0
    version: str = ""
    finished: bool = False
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, facts: TraceFacts) -> Facts:
        """From the model's."""
        return cls(
            facts.target, facts.begin_ns, facts.end_ns, facts.machine, facts.clocks, facts.peaks,
            Names.of(facts.tables), dict(facts.layout), facts.backends, facts.child, facts.ops,
            facts.created, facts.version, facts.finished, facts.notes,
        )  # fmt: skip

    def trace(self, graphs: tuple[GraphInfo, ...], losses: Mapping[str, int]) -> TraceFacts:
        """To the model's."""
        return TraceFacts(
            self.target, self.begin_ns, self.end_ns, self.machine, self.clocks, self.peaks,
            self.names.tables(), self.layout, self.backends, graphs, losses, self.child, self.ops,
            self.created, self.version, self.finished, self.notes,
        )  # fmt: skip


def to_json(value: Any) -> bytes:
    """A dataclass (nested, of plain values) as JSON. Numbers may be of any size."""
    return json.dumps(msgspec.to_builtins(value, str_keys=True), separators=(",", ":")).encode()


def from_json(raw: bytes, kind: type[T]) -> T:
    """The dataclass, every field checked; UsageError when it is not one."""
    if len(raw) > MAX_JSON:
        raise damaged("a description of impossible length")
    try:
        return msgspec.convert(json.loads(raw), kind, str_keys=True)
    except (ValueError, TypeError, RecursionError) as error:  # msgspec's are ValueErrors too
        raise damaged(f"{kind.__name__}: {' '.join(str(error).split())[:200]}") from error


def nodes_to_json(nodes: NodeTable) -> bytes:
    """The columns of a graph's nodes."""
    return json.dumps(
        {
            name: column if isinstance(column, tuple) else column.tolist()
            for name, column in ((name, getattr(nodes, name)) for name in NodeTable.__dataclass_fields__)
        },
        separators=(",", ":"),
    ).encode()


class _Nodes(msgspec.Struct):
    name: tuple[str, ...]
    op: tuple[str, ...]
    sub_op: tuple[str, ...]
    dtype: tuple[str, ...]
    role: tuple[str, ...]
    kernel: tuple[str, ...]
    layer: list[int]
    expected: list[bool]
    flops: list[int]
    bytes: list[int]
    fused_flops: list[int]
    fused_bytes: list[int]


def nodes_from_json(raw: bytes) -> NodeTable:
    """The columns again, all of one length; UsageError when they are not."""
    try:
        found = msgspec.json.decode(raw, type=_Nodes)
        columns = {name: getattr(found, name) for name in _Nodes.__struct_fields__}
        if len({len(column) for column in columns.values()}) != 1:
            raise damaged("columns of nodes of several lengths")
        for name in ("layer", "flops", "bytes", "fused_flops", "fused_bytes"):
            columns[name] = np.array(columns[name], np.int64)
        columns["expected"] = np.array(columns["expected"], np.bool_)
    except (msgspec.MsgspecError, OverflowError, UnicodeDecodeError) as error:
        raise damaged(f"nodes: {error}") from error
    return NodeTable(**columns)
