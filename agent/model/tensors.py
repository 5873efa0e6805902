# SPDX-License-Identifier: Apache-2.0
"""What one graph consists of: plain frozen records, no arithmetic.

Tensors refer to each other by index, never by object, so a cyclic or broken graph of a
hostile target can be held, compared, hashed and printed like any other.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

FLAG_INPUT = 1
FLAG_OUTPUT = 2
FLAG_COMPUTE = 16

#: Operators that never run a kernel: ``ggml_graph_compute`` skips them.
EMPTY_OPS = frozenset({"NONE", "RESHAPE", "VIEW", "PERMUTE", "TRANSPOSE"})

#: op and type of a tensor that could not be read.
UNKNOWN = "unknown"


class TypeTraits(Protocol):
    """What the engine's own type table says (``agent.target.names`` fills it)."""

    @property
    def name(self) -> str: ...

    @property
    def block_size(self) -> int: ...

    @property
    def type_size(self) -> int: ...


class LeafKind(enum.Enum):
    """What a tensor that no node computes is there for."""

    WEIGHT = "weight"
    INPUT = "input"
    CACHE = "cache"


class NodeState(enum.IntEnum):
    """What became of a node in one execution (case C25)."""

    UNKNOWN = 0
    """Its descriptor could not be read, and it was not seen to run."""
    EXECUTED = 1
    """Its own kernel was seen; a fused kernel counts at its first node."""
    FUSED = 2
    """Second half of a fused kernel: it ran, its time is in the node before it."""
    SKIPPED = 3
    """The engine does not run it: a view, empty, or without the COMPUTE flag."""
    UNCOVERED = 4
    """It should have run and no kernel was seen: its time is in a neighbour's."""


@dataclass(frozen=True, slots=True)
class Source:
    """One source of a node.

    At most one of ``node`` (index into ``Graph.nodes``) and ``leaf`` (index into
    ``Graph.leaves``) is set; neither for a tensor that another split computed or whose
    descriptor is missing. ``base_node`` / ``base_leaf`` is where the chain of views that
    starts at this source ends; the source itself when it is no view.
    """

    slot: int
    addr: int
    node: int | None
    leaf: int | None
    base_node: int | None
    base_leaf: int | None


@dataclass(frozen=True, slots=True)
class Tensor:
    """One ``ggml_tensor`` as the probe read it.

    ``name`` is UTF-8 with everything unprintable replaced: safe to print and to export.
    ``ne`` is in elements, ``nb`` in bytes, both innermost first; ``type`` is the engine's
    name of the type. ``fault`` means that the tensor could not be read: all but ``addr``
    is unknown then.
    """

    addr: int
    name: str
    op: str
    type: str
    block_size: int | None
    type_size: int | None
    ne: tuple[int, int, int, int]
    nb: tuple[int, int, int, int]
    flags: int
    op_params: tuple[int, ...]
    view_src: int
    view_offs: int
    data: int
    buffer: int
    extra: int
    fault: bool

    @property
    def elements(self) -> int:
        """How many elements; 0 for an empty tensor and for impossible shapes."""
        count = 1
        for n in self.ne:
            count *= max(n, 0)
        return count

    @property
    def rows(self) -> int:
        """How many rows of ``ne[0]`` elements; 0 for impossible shapes."""
        return max(self.ne[1], 0) * max(self.ne[2], 0) * max(self.ne[3], 0)

    @property
    def row_bytes(self) -> int | None:
        """Bytes of one row by the type's traits; None when the type is not known."""
        if not self.block_size or not self.type_size:
            return None
        return -(-max(self.ne[0], 0) // self.block_size) * self.type_size

    @property
    def nbytes(self) -> int | None:
        """Bytes of all elements, padding between rows left out."""
        row = self.row_bytes
        return None if row is None else row * self.rows


@dataclass(frozen=True, slots=True)
class Leaf(Tensor):
    """A source that no node computes. ``role`` by D11; ``layer`` None if it has none."""

    kind: LeafKind
    role: str
    layer: int | None


@dataclass(frozen=True, slots=True)
class Node(Tensor):
    """One node. ``dtype`` is the weight's type where the node has a weight, else its own.

    ``sub_op`` is the function of UNARY and GLU ("SILU", "GEGLU"), else None. ``kernel`` is
    "repack" when the weight's data was rearranged for a special kernel, else "native".
    ``weight`` is the index of the weight leaf, None without one.
    """

    index: int
    sub_op: str | None
    sources: tuple[Source, ...]
    dtype: str
    role: str
    layer: int | None
    kernel: str
    weight: int | None


@dataclass(frozen=True, slots=True)
class Incomplete:
    """Descriptors were lost: ask for the graph again. ``missing`` holds the first few."""

    n_nodes: int
    n_missing: int
    missing: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """One graph, or one split of it, with the figures that calls and tokens need.

    hash         the probe's fingerprint (op, type, shape of nodes and sources)
    topology     hex: the same over ops, types and edges, without dimensions
    n_nodes      nodes in the engine's graph; more than ``len(nodes)`` only if ``cut``
    expected     bool[len(nodes)]: must run a kernel (before fusion is known)
    empty, fault bool[len(nodes)]: no elements; could not be read
    n_tokens     tokens or embeddings put in, all sequences together; None: not told
    rows         output rows (ne[1] of the last node of an output graph); None without
    pooled       sequences in a pooled embedding output; None for others
    kv_length    padded KV length that attention runs over; None without attention
    has_rope     rotates by positions that lie in this process
    is_k_shift   only moves cached keys to other positions: phase "other"
    has_output   multiplies with the LM head, so it makes logits
    takes_embeddings  the input is embeddings, not token ids
    writes_kv    stores keys, values or states (encoders do not)
    all_experts  every token uses every expert: the engine's warm-up of a MoE
    unresolved   sources without descriptor (computed in another split, or lost)
    faults       nodes that could not be read
    """

    hash: int
    topology: str
    n_nodes: int
    cut: bool
    nodes: tuple[Node, ...]
    leaves: tuple[Leaf, ...]
    expected: npt.NDArray[np.bool_]
    empty: npt.NDArray[np.bool_]
    fault: npt.NDArray[np.bool_]
    has_compute_flag: bool
    n_tokens: int | None
    rows: int | None
    pooled: int | None
    kv_length: int | None
    has_rope: bool
    has_attention: bool
    is_k_shift: bool
    has_output: bool
    takes_embeddings: bool
    unresolved: int
    faults: int
    writes_kv: bool = False
    all_experts: bool = False

    def tensor(self, source: Source) -> Tensor | None:
        """The source itself: a node, a leaf, or None."""
        return self._pick(source.node, source.leaf)

    def base(self, source: Source) -> Tensor | None:
        """The tensor whose memory the source is a view of (itself if it is no view)."""
        return self._pick(source.base_node, source.base_leaf)

    def operand(self, node: Node, slot: int) -> Tensor | None:
        """The tensor in one source slot of a node; None if empty or not resolved."""
        for source in node.sources:
            if source.slot == slot:
                return self.tensor(source)
        return None

    def _pick(self, node: int | None, leaf: int | None) -> Tensor | None:
        if node is not None:
            return self.nodes[node]
        return self.leaves[leaf] if leaf is not None else None

    def edges(self) -> Iterable[tuple[int, int]]:
        """(producer, consumer) node indices, one per source that is a node."""
        for node in self.nodes:
            for source in node.sources:
                if source.node is not None:
                    yield source.node, node.index


@dataclass(frozen=True, slots=True)
class Accounting:
    """What became of each node in one execution: ``state[i]`` is a :class:`NodeState`.

    ``unexpected`` counts kernels seen for nodes that should not have run.
    """

    state: npt.NDArray[np.uint8]
    executed: int
    fused: int
    skipped: int
    uncovered: int
    unexpected: int


@dataclass(frozen=True, slots=True)
class Cost:
    """FLOPs and bytes of one kernel; None where no formula is known (never 0 for that)."""

    flops: int | None
    bytes: int | None


#: node index -> distinct experts used, for MUL_MAT_ID.
Experts = Mapping[int, int]
