# SPDX-License-Identifier: Apache-2.0
"""Key figures of a graph: tokens, output rows, KV length, and what kind of graph it is.

All from structure, since names of inputs drift between builds ("inp_pos" is "leaf_6" in
one of them): tokens are what indexes the token embedding, rows are what the LM head makes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .tensors import EMPTY_OPS, FLAG_OUTPUT, Leaf, LeafKind, Node, Source, Tensor

_COPIES = frozenset({"CPY", "CONT", "DUP"})
_MAX_CHAIN = 16


@dataclass(frozen=True, slots=True)
class Figures:
    """See :class:`profinferd.agent.model.tensors.Graph`, which has the same fields."""

    n_tokens: int | None
    rows: int | None
    pooled: int | None
    kv_length: int | None
    has_rope: bool
    has_attention: bool
    is_k_shift: bool
    has_output: bool
    takes_embeddings: bool
    writes_kv: bool
    all_experts: bool


def figures(nodes: Sequence[Node], leaves: Sequence[Leaf], expected: npt.NDArray[np.bool_]) -> Figures:
    """The figures of one graph or split; what a split does not show is None or False."""
    view = _View(nodes, leaves, expected)
    k_shift = view.only_moves_cache()
    tokens, embeddings = view.tokens()
    if tokens is None and not k_shift:
        tokens = view.rope_tokens()
    head = view.head()
    pooled = view.pooled(head)
    lengths = view.kv_lengths()
    return Figures(
        n_tokens=tokens,
        rows=_count(head.ne[1]) if head is not None and pooled is None else None,
        pooled=pooled,
        kv_length=max(lengths) if lengths else None,
        has_rope=any(node.op == "ROPE" and not view.elsewhere(node, 1) for node in nodes),
        has_attention=bool(lengths),
        is_k_shift=k_shift,
        has_output=head is not None,
        takes_embeddings=embeddings,
        writes_kv=not k_shift and view.writes_cache(),
        all_experts=view.all_experts(),
    )


def _count(n: int) -> int:
    return max(n, 0)


class _View:
    """One graph while it is being read; each method is one pass over its nodes."""

    def __init__(
        self, nodes: Sequence[Node], leaves: Sequence[Leaf], expected: npt.NDArray[np.bool_]
    ) -> None:
        self.nodes = nodes
        self.leaves = leaves
        self.expected = expected

    def source(self, node: Node, slot: int) -> Source | None:
        return next((s for s in node.sources if s.slot == slot), None)

    def tensor(self, node: Node, slot: int) -> Tensor | None:
        source = self.source(node, slot)
        if source is None:
            return None
        if source.node is not None:
            return self.nodes[source.node]
        return self.leaves[source.leaf] if source.leaf is not None else None

    def elsewhere(self, node: Node, slot: int) -> bool:
        """Whether a source is the scheduler's copy for another backend than the CPU, by its name
        "<backend>#<tensor>#<n>": its data is on a device, and nobody expects to read it."""
        tensor = self.tensor(node, slot)
        name = tensor.name if tensor is not None else ""
        return "#" in name[1:] and not name.startswith("CPU#")

    def base_kind(self, source: Source | None) -> LeafKind | None:
        if source is None or source.base_leaf is None:
            return None
        return self.leaves[source.base_leaf].kind

    def tokens(self) -> tuple[int | None, bool]:
        """(tokens put in, whether they come as embeddings).

        Newer engines build every kind of input (ids, embeddings, a mixture) and compute
        one: the gathers of the token embedding that are not used lack the COMPUTE flag,
        but one of them has the number of tokens.
        """
        gathers = [
            node
            for node in self.nodes
            if node.op == "GET_ROWS"
            and node.weight is not None
            and self.base_kind(self.source(node, 1)) is LeafKind.INPUT
        ]
        # Positions index a table too in some models, after the token embedding.
        named = [node for node in gathers if node.role == "token_embd"] or gathers[:1]
        ids = [self.tensor(node, 1) for node in named]
        counts = [_count(tensor.ne[0]) for tensor in ids if tensor is not None]
        if counts:
            used = any(self.expected[node.index] for node in named)
            return max(counts), max(counts) > 0 and not used
        for node in self.nodes:
            if node.op in ("SOFT_MAX", "FLASH_ATTN_EXT", "ROPE"):
                continue
            for source in node.sources:
                leaf = self.leaves[source.leaf] if source.leaf is not None else None
                if leaf is None or leaf.kind is not LeafKind.INPUT or leaf.type != "f32":
                    continue
                if leaf.ne[0] > 1 and leaf.ne[:2] == node.ne[:2]:
                    return _count(leaf.ne[1]), True
        return None, False

    def rope_tokens(self) -> int | None:
        """Tokens of a split that has no input of its own: a rotated [dim, head, token]."""
        return next((_count(n.ne[2]) for n in self.nodes if n.op == "ROPE"), None)

    def head(self) -> Node | None:
        """The LM head: the last matrix product with the output weight."""
        for node in reversed(self.nodes):
            if node.op != "MUL_MAT" or node.weight is None:
                continue
            if node.role == "output" or node.name.startswith("result_output"):
                return node
        return None

    def pooled(self, head: Node | None) -> int | None:
        """Sequences, if the graph ends in a pooled embedding.

        Pooling is a product with, or a gather by, an input of the engine, and an output;
        a gather that something continues is only the choice of output rows.
        """
        last = next((n for n in reversed(self.nodes) if n.op not in EMPTY_OPS), None)
        if last is None or last is head:
            return None
        if "embd_pooled" in last.name:
            return _count(last.ne[1])
        by_input = self.base_kind(self.source(last, 1)) is LeafKind.INPUT
        pools = last.op in ("MUL_MAT", "GET_ROWS") and last.weight is None and by_input
        return _count(last.ne[1]) if pools and last.flags & FLAG_OUTPUT else None

    def kv_lengths(self) -> list[int]:
        """n_kv of every attention: rows of K, or the width of masked scores."""
        found: list[int] = []
        for node in self.nodes:
            if node.op == "FLASH_ATTN_EXT":
                k = self.tensor(node, 1)
                if k is not None:
                    found.append(_count(k.ne[1]))
            elif node.op == "SOFT_MAX":
                # The gate of a MoE is a soft-max too, but has no mask.
                scores = self.tensor(node, 0)
                if scores is not None and self.source(node, 1) is not None:
                    found.append(_count(scores.ne[0]))
        return found

    def from_cache(self, node: Node) -> bool:
        """Whether its first source is the cache itself, perhaps converted or rotated."""
        for _ in range(_MAX_CHAIN):
            slot = 1 if node.op == "MUL_MAT" else 0
            source = self.source(node, slot)
            if self.base_kind(source) is LeafKind.CACHE:
                return True
            if source is None or source.base_node is None:
                return False
            node = self.nodes[source.base_node]
            if node.op not in _COPIES and node.op != "MUL_MAT":
                return False
        return False

    def only_moves_cache(self) -> bool:
        """K-shift (cached keys are rotated to new positions) or defragmentation."""
        work = [n for n in self.nodes if n.op not in EMPTY_OPS]
        if not work:
            return False
        for node in work:
            if node.op == "MUL_MAT" and node.weight is not None:
                return False
            if node.op not in _COPIES and node.op not in ("ROPE", "MUL_MAT"):
                return False
            if node.op == "ROPE" and not self.from_cache(node):
                return False
        return any(self.from_cache(n) for n in work)

    def writes_cache(self) -> bool:
        """Whether new keys or states are stored: encoders store none."""
        for node in self.nodes:
            slot = {"SET_ROWS": 2, "CPY": 1}.get(node.op)
            if slot is not None and self.base_kind(self.source(node, slot)) is LeafKind.CACHE:
                return True
        return False

    def all_experts(self) -> bool:
        """Every expert is used by every token: only the engine's warm-up does that."""
        for node in self.nodes:
            if node.op == "MUL_MAT_ID":
                experts, ids = self.tensor(node, 0), self.tensor(node, 2)
                if experts is not None and ids is not None:
                    return 1 < experts.ne[2] <= ids.ne[0]
        return False
