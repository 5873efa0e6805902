# SPDX-License-Identifier: Apache-2.0
"""The nodes of one execution of a graph, laid out once: what differs between executions are holes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from ..agent.model.dataflow import Dataflow, Kernel, dataflow
from ..agent.model.nodetable import NodeTable
from ..agent.model.tensors import Graph
from ..agent.model.trace import Table, Trace
from . import Choice
from . import chakra_nodes as chakra
from .chakra_splits import Transfer
from .wire import Message, Template

Ints = npt.NDArray[np.int64]
_CPU = "CPU"
_TOKENS = "token_embd"


Wanted = Literal["written", "used", "token", "received"]


@dataclass(frozen=True, slots=True)
class External:
    """Nodes of earlier executions: the last write of a cache (``written``), everything that a new
    write of it has to wait for (``used``), the token sampled from the last output (``token``), or
    what another backend sent (``received``). ``key``: the cache, or the number of the transfer."""

    kind: Wanted
    key: int | str


@dataclass(frozen=True, slots=True)
class Filled:
    """A template and what goes into its varint holes: ``values`` + the number of the first node
    where ``local``; ``external``, ``times`` and ``faults`` are places of holes."""

    template: Template
    values: Ints
    local: npt.NDArray[np.bool_]
    external: Ints
    times: Ints
    faults: Ints


@dataclass(slots=True)
class _Node:
    """One node to be: ``deps`` are places of earlier nodes, ``wants`` indices of externals."""

    name: str
    kind: int
    attributes: dict[str, chakra.Value | chakra.Hole]
    deps: list[int] = field(default_factory=list)
    wants: list[int] = field(default_factory=list)
    seen: bool = False
    paged: int | None = None
    inputs: tuple[chakra.Tensor, ...] = ()
    outputs: tuple[chakra.Tensor, ...] = ()


class Layout:
    """Nodes 0 .. ``count`` - 1 of an execution; ``last``: its final kernel. ``leaves``: caches with
    the node that wrote them last and those that a later write must wait for. ``received``: transfers
    and the node that has them. ``paged``: nodes of the graph for which pages were read, in order."""

    def __init__(
        self,
        nodes: list[_Node],
        externals: list[External],
        leaves: list[tuple[int | str, int | None, tuple[int, ...]]],
        received: list[tuple[int, int]],
        last: int | None,
        times: bool,
    ) -> None:
        self._nodes, self._times = nodes, times
        self.externals, self.leaves, self.received = externals, leaves, received
        self.count, self.last = len(nodes), last
        self.paged = [n.paged for n in nodes if n.paged is not None]
        self._sized: dict[tuple[int, ...], Filled] = {}

    def sized(self, counts: tuple[int, ...]) -> Filled:
        """The template for so many nodes behind each external."""
        found = self._sized.get(counts)
        if found is None:
            if len(self._sized) >= 16:
                self._sized.clear()
            found = self._sized[counts] = self._build(counts)
        return found

    def _build(self, counts: tuple[int, ...]) -> Filled:
        message = Message()
        values: list[int] = []
        local: list[bool] = []
        filled: list[tuple[int, int]] = []  # (external, hole)
        times: list[list[int]] = []
        faults: list[int] = []

        def hole(value: int, is_local: bool = False) -> int:
            values.append(value)
            local.append(is_local)
            return len(values) - 1

        for place, node in enumerate(self._nodes):
            timed = self._times and node.seen
            outside = sum(counts[w] for w in node.wants)
            message.append(
                chakra.node(
                    node.name, node.kind, len(node.deps) + outside, node.attributes,
                    times=timed, inputs=node.inputs, outputs=node.outputs,
                )
            )  # fmt: skip
            hole(place, True)
            for dep in node.deps:
                hole(dep, True)
            for wanted in node.wants:
                filled += [(wanted, hole(0)) for _ in range(counts[wanted])]
            if timed:
                times.append([hole(0) for _ in range(4)])
            if node.paged is not None:
                faults += [hole(0) for _ in range(3)]
        # In the order of the externals, as the writer resolves them; one wanted twice is resolved
        # once, so each external belongs to one node (see _Builder.want).
        external = [at for _, at in sorted(filled)]
        return Filled(
            Template(message),
            np.array(values, dtype=np.int64),
            np.array(local, dtype=np.bool_),
            np.array(external, dtype=np.int64),
            np.array(times, dtype=np.int64).reshape(-1, 4),
            np.array(faults, dtype=np.int64),
        )


class _Builder:
    def __init__(self, graph: Graph, table: NodeTable, choice: Choice, backend: str) -> None:
        self.graph, self.table, self.choice, self.backend = graph, table, choice, backend
        self.nodes: list[_Node] = []
        self.externals: list[External] = []

    def add(self, node: _Node) -> int:
        node.deps = sorted(set(node.deps))
        self.nodes.append(node)
        return len(self.nodes) - 1

    def want(
        self, node: _Node, kind: Literal["written", "used", "token", "received"], key: int | str
    ) -> None:
        """One external per wish, even where two nodes want the same."""
        self.externals.append(External(kind, key))
        node.wants.append(len(self.externals) - 1)

    def cache_key(self, leaf: int) -> int | str:
        """The same cache in all graphs: by where it lies, or by its name."""
        tensor = self.graph.leaves[leaf]
        return tensor.data or tensor.name

    def size(self, value: int | None) -> int | None:
        """A cost, or, anonymised, the power of two above it."""
        if value is None or value < 0:
            return None
        return 1 << (value - 1).bit_length() if self.choice.anonymise and value > 0 else value

    def tensor(self, shape: tuple[int, ...], type_: str) -> chakra.Tensor:
        return chakra.Tensor(tuple(self.size(max(n, 0)) or 0 for n in shape), type_)


def lay_out(
    trace: Trace, choice: Choice, graph: Graph, table: NodeTable, ops: Table, faulting: tuple[int, ...],
    moved: tuple[Transfer, ...], partial: bool, backend: str,
) -> Layout:  # fmt: skip
    """The nodes of one execution: its kernels in their order, what they load, what they exchange."""
    how = zip(ops["fused"].tolist(), ops["timed"].tolist(), strict=True)
    seen = dict(zip(ops["node"].tolist(), how, strict=True))
    order = _order(graph, seen)
    flow = dataflow(graph, order)
    b = _Builder(graph, table, choice, backend)
    comp: list[int] = []  # kernel -> place of its node
    received: list[tuple[int, int]] = []
    arrivals = _arrivals(b, moved, received)
    final: int | None = None
    for number, kernel in enumerate(flow.kernels):
        head = kernel.nodes[0]
        node = _comp(b, kernel, seen.get(head), partial, trace)
        node.deps += [comp[need] for need in kernel.needs]
        node.deps += [arrivals[leaf] for leaf in _leaves(graph, kernel) if leaf in arrivals]
        for leaf in kernel.caches:
            node.deps.append(_kv_load(b, flow, kernel, leaf, comp))
        for n in kernel.nodes:
            if n in faulting:
                node.deps.append(_paged_load(b, n))
        for leaf, carry in flow.carries.items():
            if (number, True) in carry.first:
                b.want(node, "used", b.cache_key(leaf))
        if (
            table.role[head] == _TOKENS
            and table.op[head] == "GET_ROWS"
            and graph.nodes[head].weight is not None
        ):
            b.want(node, "token", 0)
        comp.append(b.add(node))
        final = comp[-1]
        _send(b, moved, kernel, comp[-1], received)
    leaves = [
        (b.cache_key(leaf), None if c.writer is None else comp[c.writer], tuple(comp[k] for k in c.last))
        for leaf, c in flow.carries.items()
    ]
    return Layout(b.nodes, b.externals, leaves, received, final, choice.times)


def _order(graph: Graph, seen: dict[int, tuple[bool, bool]]) -> list[tuple[int, bool]]:
    """Kernels that were seen, and those that should have run besides, in the engine's order."""
    order, skip = [], -1
    for node in range(len(graph.nodes)):
        if node in seen:
            order.append((node, seen[node][0]))
            skip = node + 1 if seen[node][0] else -1
        elif graph.expected[node] and node != skip:
            order.append((node, False))
    return order


def _leaves(graph: Graph, kernel: Kernel) -> list[int]:
    return [s.base_leaf for n in kernel.nodes for s in graph.nodes[n].sources if s.base_leaf is not None]


def _comp(b: _Builder, kernel: Kernel, how: tuple[bool, bool] | None, partial: bool, trace: Trace) -> _Node:
    head, pair = kernel.nodes[0], len(kernel.nodes) > 1
    node, result = b.graph.nodes[head], b.graph.nodes[kernel.nodes[-1]]
    t, hidden = b.table, b.choice.anonymise
    flops, moved = (t.fused_flops, t.fused_bytes) if pair else (t.flops, t.bytes)
    op = "+".join(t.op[n] for n in kernel.nodes)
    name = op if hidden else f"{op} {result.name or t.role[head]}"
    timed = how is not None and b.choice.times
    unseen = "not recorded" if trace.facts.ops != "all" else "lost" if partial else "not seen"
    if b.backend != _CPU:
        unseen = "not timed"  # it computes after the call that we see
    attributes: dict[str, chakra.Value | chakra.Hole] = {
        "is_cpu_op": b.backend == _CPU,
        "num_ops": b.size(int(flops[head])),
        "tensor_size": b.size(int(moved[head])),
        "profinfer.op": op,
        "profinfer.state": "executed" if how is not None else unseen,
        "profinfer.nodes": list(kernel.nodes),
        "profinfer.fused": True if pair else None,
        "profinfer.in_place": True if kernel.in_place else None,
        "profinfer.type": t.dtype[head],
        "profinfer.layer": int(t.layer[head]) if t.layer[head] >= 0 else None,
        "profinfer.role": None if hidden else t.role[head],
        "profinfer.kernel": t.kernel_of(head, pair),
        "profinfer.backend": None if b.backend == _CPU else b.backend,
        "profinfer.time_shared": True if timed and how is not None and not how[1] else None,
    }
    if timed:
        attributes |= {"profinfer.start_ns": chakra.HOLE, "profinfer.duration_ns": chakra.HOLE}
    sources = [b.graph.tensor(s) for s in node.sources]
    return _Node(
        name, chakra.COMP, attributes, seen=how is not None,
        inputs=tuple(b.tensor(s.ne, s.type) for s in sources if s is not None),
        outputs=(b.tensor(result.ne, result.type),),
    )  # fmt: skip


def _kv_load(b: _Builder, flow: Dataflow, kernel: Kernel, leaf: int, comp: list[int]) -> int:
    """What attention reads of a cache. Its time is part of the kernel's: it has none of its own."""
    storage = ("leaf", leaf)
    read = [
        t.nbytes
        for n in kernel.nodes
        for s in b.graph.nodes[n].sources
        if s.base_leaf == leaf and (t := b.graph.tensor(s)) is not None
    ]
    known = [size for size in read if size is not None]
    role = b.graph.leaves[leaf].role
    name = "KV read" if b.choice.anonymise else f"read {role} {b.graph.leaves[leaf].name}"
    node = _Node(
        name, chakra.MEM_LOAD,
        {
            "is_cpu_op": b.backend == _CPU,
            "tensor_size": b.size(max(known)) if known else None,
            "profinfer.load": "kv",
            "profinfer.role": None if b.choice.anonymise else role,
            "profinfer.time": "in the kernel that reads it",
        },
    )  # fmt: skip
    writers = [k for k in kernel.inputs if storage in flow.kernels[k].writes]
    node.deps = [comp[k] for k in writers]
    if not writers:
        b.want(node, "written", b.cache_key(leaf))
    return b.add(node)


def _paged_load(b: _Builder, n: int) -> int:
    """Pages of the model that had to be read from the disk while the kernel of node ``n`` ran."""
    weight = b.graph.nodes[n].weight
    size = None if weight is None else b.graph.leaves[weight].nbytes
    name = "paging" if b.choice.anonymise else f"paging {b.table.role[n]}"
    node = _Node(
        name, chakra.MEM_LOAD,
        {
            "is_cpu_op": b.backend == _CPU,
            "profinfer.load": "paging",
            "profinfer.weight_bytes": b.size(size),
            "profinfer.major_faults": chakra.HOLE,
            "tensor_size": chakra.HOLE,
            "profinfer.wait_ns": chakra.HOLE,
        },
        paged=n,
    )  # fmt: skip
    return b.add(node)


def _arrivals(b: _Builder, moved: tuple[Transfer, ...], received: list[tuple[int, int]]) -> dict[int, int]:
    """leaf -> node that received it from another backend."""
    found = {}
    for t in moved:
        if t.leaf is None:
            continue
        node = _Node("receive" if b.choice.anonymise else f"receive {t.name}", chakra.COMM_RECV, _comm(b, t))
        b.want(node, "received", t.number)
        found[t.leaf] = b.add(node)
        received.append((t.number, found[t.leaf]))
    return found


def _send(
    b: _Builder, moved: tuple[Transfer, ...], kernel: Kernel, place: int, received: list[tuple[int, int]]
) -> None:
    """What a kernel makes and another backend needs."""
    for t in moved:
        if t.node is not None and t.node in kernel.nodes:
            name = "send" if b.choice.anonymise else f"send {t.name}"
            sent = b.add(_Node(name, chakra.COMM_SEND, _comm(b, t), deps=[place]))
            received.append((t.number, sent))


def _comm(b: _Builder, t: Transfer) -> dict[str, chakra.Value | chakra.Hole]:
    return {
        "is_cpu_op": b.backend == _CPU,
        "comm_size": b.size(t.size),
        "comm_src": t.source,
        "comm_dst": t.target,
        "comm_tag": t.number,
    }
