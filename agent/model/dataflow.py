# SPDX-License-Identifier: Apache-2.0
"""Which kernel of a graph needs which: through views, in place, and through the caches (C75).

Edges of ``src`` alone are not enough. Attention reads the cache, not the node that wrote the
row; an operator that works in place overwrites what others read before. So memory is followed:
every tensor lies in one *storage* (its own, or that of what it is a view of), each write makes a
new version of it, and a kernel needs

* what it reads: the producer, and the last write to the storage (read after write);
* before it writes: the last write, and every read of it since (write after write and after read).

All needs point to kernels that come earlier in the engine's order, so nothing can be cyclic,
whatever the target claims.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .tensors import EMPTY_OPS, Graph, LeafKind, Node, Source

Storage = tuple[str, int]
"""("node", index), ("leaf", index) or ("far", address of a tensor that is not in the graph)."""

_MAX_CHAIN = 64


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel that ran: ``nodes`` (two when fused), and the kernels that it needs.

    Numbers are places in :attr:`Dataflow.kernels`. ``producers`` made what it reads through
    ``src``; ``inputs`` are these and the last writers of the memory that it reads; ``needs`` are
    these and whatever must be done before it may write. All ascending. ``caches``: leaves
    of kind cache that it reads; ``writes``: the storage that it writes. ``in_place``: that is not
    memory of its own.
    """

    nodes: tuple[int, ...]
    producers: tuple[int, ...]
    inputs: tuple[int, ...]
    needs: tuple[int, ...]
    caches: tuple[int, ...]
    writes: tuple[Storage, ...]
    in_place: bool


@dataclass(frozen=True, slots=True)
class Carry:
    """How a storage that outlives the graph (a cache, a state) is used in one execution.

    ``first``: kernels that touch it before the graph has written it, so that they need what the
    previous execution left: ``write`` says which of them write. ``last``: kernels that the next
    execution has to wait for before it writes; ``writer``: the last write, for its readers.
    """

    first: tuple[tuple[int, bool], ...]
    last: tuple[int, ...]
    writer: int | None


@dataclass(frozen=True, slots=True, eq=False)
class Dataflow:
    """The kernels of one execution order, and the leaves through which executions depend."""

    kernels: tuple[Kernel, ...]
    carries: dict[int, Carry]  # by leaf index
    kernel_of: dict[int, int]  # node -> place of the kernel that ran it

    def edges(self) -> list[tuple[int, int]]:
        """(where data comes from, where it goes) as places, each pair once."""
        return [(p, i) for i, kernel in enumerate(self.kernels) for p in kernel.inputs]


@dataclass(slots=True)
class _State:
    writer: int | None = None
    readers: list[int] = field(default_factory=list)
    first: list[tuple[int, bool]] = field(default_factory=list)


def dataflow(graph: Graph, order: Sequence[tuple[int, bool]]) -> Dataflow:
    """What each of the kernels that ran needs. ``order``: (node, fused with the next), ascending."""
    groups = [
        (node, node + 1) if fused and node + 1 < len(graph.nodes) else (node,)
        for node, fused in order
        if 0 <= node < len(graph.nodes)
    ]
    kernel_of = {node: place for place, group in enumerate(groups) for node in group}
    memory = _Memory(graph)
    states: dict[Storage, _State] = {}
    kernels: list[Kernel] = []
    for place, group in enumerate(groups):
        sources = [s for node in group for s in graph.nodes[node].sources if s.node not in group]
        producers = _earlier({memory.producer(s, kernel_of) for s in sources}, place)
        writes = tuple(dict.fromkeys(memory.of_node(node) for node in group))
        reads = {memory.of_source(s) for s in sources} - set(writes)
        inputs: set[int] = set(producers)
        for storage in reads:
            state = states.setdefault(storage, _State())
            if state.writer is None:
                state.first.append((place, False))
            else:
                inputs.add(state.writer)
            if memory.rewritten(storage):
                state.readers.append(place)
        needs = set(inputs)
        for storage in writes:
            state = states.setdefault(storage, _State())
            needs |= set(state.readers)
            if state.writer is None:
                state.first.append((place, True))
            else:
                needs.add(state.writer)
            state.writer, state.readers = place, []
        in_place = any(w not in [("node", node) for node in group] for w in writes)
        kernels.append(
            Kernel(
                group, producers, _earlier(inputs, place), _earlier(needs, place),
                _caches(graph, reads), writes, in_place,
            )
        )  # fmt: skip
    return Dataflow(tuple(kernels), _carries(graph, states), kernel_of)


def _earlier(places: set[int | None] | set[int], place: int) -> tuple[int, ...]:
    return tuple(sorted(p for p in places if p is not None and p < place))


def _caches(graph: Graph, reads: set[Storage]) -> tuple[int, ...]:
    leaves = sorted(number for kind, number in reads if kind == "leaf")
    return tuple(n for n in leaves if graph.leaves[n].kind is LeafKind.CACHE)


def _carries(graph: Graph, states: dict[Storage, _State]) -> dict[int, Carry]:
    found = {}
    for (kind, number), state in states.items():
        if kind != "leaf" or graph.leaves[number].kind is not LeafKind.CACHE:
            continue
        last = tuple(state.readers) or ((state.writer,) if state.writer is not None else ())
        found[number] = Carry(tuple(dict.fromkeys(state.first)), last, state.writer)
    return found


class _Memory:
    """Where each tensor of a graph lies."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._at: dict[int, Storage] = {}
        for index, leaf in enumerate(graph.leaves):
            self._at.setdefault(leaf.addr, ("leaf", index))
        for index, node in enumerate(graph.nodes):
            self._at.setdefault(node.addr, ("node", index))
        self._nodes: list[Storage] = []
        for index, node in enumerate(graph.nodes):
            self._nodes.append(self._place(index, node))
        written: dict[Storage, int] = {}
        for node, storage in zip(graph.nodes, self._nodes, strict=True):
            if node.op not in EMPTY_OPS:
                written[storage] = written.get(storage, 0) + 1
        self._rewritten = {s for s, times in written.items() if times > 1 or s[0] != "node"}

    def rewritten(self, storage: Storage) -> bool:
        """Whether anything but the tensor's own node writes there."""
        return storage in self._rewritten

    def of_node(self, node: int) -> Storage:
        """The storage that a node's result lies in."""
        return self._nodes[node]

    def of_source(self, source: Source) -> Storage:
        """The storage that a source lies in."""
        if source.node is not None:
            # A graph of a hostile target may refer to what comes later.
            return self._nodes[source.node] if source.node < len(self._nodes) else ("far", source.addr)
        if source.leaf is not None:
            return self._root(self._graph.leaves[source.leaf].view_src, ("leaf", source.leaf))
        return ("far", source.addr)

    def producer(self, source: Source, kernel_of: dict[int, int]) -> int | None:
        """The kernel that made a source: through views, whatever memory it lies in."""
        seen: Source | None = source
        for _ in range(_MAX_CHAIN):
            if seen is None or seen.node is None:
                return None
            if seen.node in kernel_of:
                return kernel_of[seen.node]
            node = self._graph.nodes[seen.node]
            if node.op not in EMPTY_OPS:
                return None  # it should have run and was not seen
            seen = node.sources[0] if node.sources else None
        return None

    def _place(self, index: int, node: Node) -> Storage:
        if node.op in EMPTY_OPS:
            if node.sources and (node.sources[0].node is None or node.sources[0].node < index):
                return self.of_source(node.sources[0])
            return self._root(node.view_src, ("node", index))
        if node.view_src:
            return self._root(node.view_src, ("far", node.view_src))
        # The allocator puts a result where a source was that nobody needs afterwards.
        for source in node.sources:
            before = self._graph.tensor(source)
            if (
                before is not None
                and node.data
                and node.buffer
                and (before.data, before.buffer) == (node.data, node.buffer)
                and source.node is not None
                and source.node < index
            ):
                return self._nodes[source.node]
        return ("node", index)

    def _root(self, addr: int, otherwise: Storage) -> Storage:
        """Follows ``view_src`` to where it ends."""
        storage = otherwise
        for _ in range(_MAX_CHAIN):
            found = self._at.get(addr) if addr else None
            if found is None:
                return storage
            kind, number = found
            if kind == "node" and number < len(self._nodes):
                return self._nodes[number]
            storage = found
            addr = (self._graph.nodes if kind == "node" else self._graph.leaves)[number].view_src
        return storage
