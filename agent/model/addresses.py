# SPDX-License-Identifier: Apache-2.0
"""What an address of the target belongs to: the mapping, and the tensor.

Tensors are known from two sides: by the data pointers of graphs that were read (weights wherever
they lie, caches, intermediate results), and by their place in the model's file, for its mapping.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .tensors import Graph, LeafKind

MAX_TENSORS = 1 << 16
MAX_SPANS = 1 << 16
#: No tensor and no buffer is larger: what says so is broken, and would hide all others.
_MOST_BYTES = 1 << 44
_TOP = (1 << 64) - 1
_LAYER = re.compile(r"(?:^|[._])(?:blk\.|l)(\d{1,4})(?:\.|$|[^\d])")

MODEL, WEIGHTS, KV, COMPUTE = "model", "weights", "kv", "compute"
FILE, ANON, STACK, UNKNOWN = "file", "anon", "stack", "unknown"
GRAPH, GGUF = "graph", "gguf"


class Area(NamedTuple):
    """One mapping of the target. ``kind``: model, file, anon, stack. ``offset``: of its start in the
    file; ``file``: which of the model's files, where it is one."""

    start: int
    end: int
    kind: str
    offset: int = 0
    file: int = 0


class Piece(NamedTuple):
    """Bytes [start, end) of a file or of memory hold ``name``."""

    start: int
    end: int
    name: str
    layer: int | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """What an address belongs to; ``tensor`` None where it is none, or not known."""

    mapping: str
    tensor: str | None = None
    layer: int | None = None
    source: str | None = None


@dataclass(frozen=True, slots=True)
class _Ranges:
    """Sorted ranges that do not overlap; ``payload`` of each."""

    starts: npt.NDArray[np.uint64]
    ends: npt.NDArray[np.uint64]
    payload: Sequence[tuple[str, Piece]]

    @classmethod
    def of(cls, pieces: Iterable[tuple[str, Piece]]) -> _Ranges:
        kept: list[tuple[str, Piece]] = []
        for what, piece in sorted(pieces, key=lambda one: (one[1].start, one[1].end)):
            possible = 0 <= piece.start < piece.end <= min(piece.start + _MOST_BYTES, _TOP)
            if possible and (not kept or piece.start >= kept[-1][1].end):
                kept.append((what, piece))  # of two that overlap, the first
        return cls(
            np.array([p.start for _, p in kept], np.uint64),
            np.array([p.end for _, p in kept], np.uint64),
            kept,
        )

    def find(self, address: int) -> tuple[str, Piece] | None:
        i = int(np.searchsorted(self.starts, np.uint64(address), "right")) - 1
        return self.payload[i] if i >= 0 and address < int(self.ends[i]) else None


_NONE = _Ranges.of(())
_EVER = 1 << 62


class AddressBook:
    """Mappings and tensors of one process; whoever looks into it keeps it up to date."""

    def __init__(self) -> None:
        self._areas: list[Area] = []
        self._starts = np.zeros(0, np.uint64)
        self._files: dict[int, _Ranges] = {}
        self._tensors: dict[tuple[str, int], tuple[str, Piece]] = {}
        self._buffers: dict[int, tuple[int, int]] = {}
        self._ranges = _NONE
        self._compute = _NONE
        self._stale = False
        #: When the mappings were read: of what came later, an unknown address may be in a new one.
        self.read_ns = _EVER
        #: Bytes of weights that lie outside the model's mappings, and inside, by the graphs.
        self.outside = 0
        self.inside = 0

    @property
    def has_tensors(self) -> bool:
        """Whether a graph was read."""
        return bool(self._tensors or self._buffers)

    def set_areas(self, areas: Iterable[Area], at_ns: int = _EVER) -> None:
        """The mappings as they were at that time."""
        self.read_ns = at_ns
        self._areas = sorted(areas)[:MAX_SPANS]
        self._starts = np.array([a.start for a in self._areas], np.uint64)

    def set_file(self, file: int, pieces: Iterable[Piece]) -> None:
        """Tensors of a file of the model, by their offsets."""
        self._files[file] = _Ranges.of((GGUF, piece) for piece in pieces)

    def add_graph(self, graph: Graph) -> None:
        """Tensors of a graph that was read."""
        for leaf in graph.leaves:
            size = leaf.nbytes
            if not leaf.data or not size or leaf.fault or leaf.view_src:
                continue
            if leaf.kind is LeafKind.INPUT:
                self._grow(leaf.buffer, leaf.data, leaf.data + size)
                continue
            what = KV if leaf.kind is LeafKind.CACHE else WEIGHTS
            piece = Piece(leaf.data, leaf.data + size, leaf.name, leaf.layer)
            if len(self._tensors) < MAX_TENSORS:
                self._tensors[leaf.name, leaf.data] = (what, piece)
        for node in graph.nodes:
            size = node.nbytes
            if node.data and size and not node.fault and not node.view_src:
                self._grow(node.buffer, node.data, node.data + size)
        self._stale = True

    def _grow(self, buffer: int, start: int, end: int) -> None:
        if buffer not in self._buffers and len(self._buffers) >= 256:
            return
        low, high = self._buffers.get(buffer, (start, end))
        self._buffers[buffer] = (min(low, start), max(high, end))

    def _refresh(self) -> None:
        self._stale = False
        self._ranges = _Ranges.of(self._tensors.values())
        self._compute = _Ranges.of((COMPUTE, Piece(low, high, "")) for low, high in self._buffers.values())
        self.outside = self.inside = 0
        for what, piece in self._ranges.payload:
            if what == WEIGHTS:
                area = self.area(piece.start)
                if area is not None and area.kind == MODEL:
                    self.inside += piece.end - piece.start
                else:
                    self.outside += piece.end - piece.start

    def refresh(self) -> None:
        """Bring :attr:`inside` and :attr:`outside` up to date."""
        if self._stale:
            self._refresh()

    def area(self, address: int) -> Area | None:
        """The mapping that holds the address."""
        i = int(np.searchsorted(self._starts, np.uint64(address), "right")) - 1
        found = self._areas[i] if i >= 0 else None
        return found if found is not None and address < found.end else None

    def mapped(self, kind: str) -> int:
        """Bytes in mappings of a kind."""
        return sum(area.end - area.start for area in self._areas if area.kind == kind)

    def knows(self, addresses: npt.NDArray[np.uint64]) -> bool:
        """Whether each of the addresses is in a known mapping."""
        if not len(self._areas):
            return not len(addresses)
        i = np.searchsorted(self._starts, addresses, "right").astype(np.int64) - 1
        ends = np.array([a.end for a in self._areas], np.uint64)
        return bool(((i >= 0) & (addresses < ends[np.maximum(i, 0)])).all())

    def find(self, address: int) -> Place:
        """Mapping and tensor of an address."""
        self.refresh()
        area = self.area(address)
        hit = self._ranges.find(address)
        if area is not None and area.kind == MODEL:
            if hit is not None:
                return Place(MODEL, hit[1].name, hit[1].layer, GRAPH)
            by_file = self._files.get(area.file, _NONE).find(area.offset + address - area.start)
            if by_file is None:
                return Place(MODEL)
            piece = by_file[1]
            return Place(MODEL, piece.name, piece.layer, GGUF)
        if hit is not None:
            return Place(hit[0], hit[1].name, hit[1].layer, GRAPH)
        if self._compute.find(address) is not None:
            return Place(COMPUTE)
        return Place(UNKNOWN if area is None else area.kind)


def layer_of(name: str) -> int | None:
    """Layer of a weight by its name ("blk.3.attn_q.weight"); None where it has none."""
    found = _LAYER.search(name)
    return int(found[1]) if found else None
