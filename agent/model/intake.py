# SPDX-License-Identifier: Apache-2.0
"""What a graph says about tokens: its event, the integer chunks, and its structure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .calls import Call, GraphRun
from .plans import GraphFacts
from .records import CHUNK_INTS, INLINE_INTS, Chunk, Flag, Records, group_by_seq
from .tokens import MAX_TOKENS, GraphTokens, Run, assemble, image_run, row_mask, split_runs

_MAX_HELD = 8192
_MROPE_PARTS = 4


class ChunkStore:
    """Integer chunks by graph execution, until it ends; the oldest fall out."""

    def __init__(self) -> None:
        self._by_seq: OrderedDict[int, list[Records]] = OrderedDict()
        self._held = 0

    def take(self, ints: Records) -> None:
        """New chunks."""
        if not len(ints):
            return
        for seq, part in group_by_seq(ints):
            self._by_seq.setdefault(seq, []).append(part.copy())
            self._held += len(part)
        while self._held > _MAX_HELD and self._by_seq:
            self.drop(next(iter(self._by_seq)))

    def drop(self, seq: int) -> None:
        """Forget one execution."""
        self._held -= sum(len(part) for part in self._by_seq.pop(seq, ()))

    def values(self, seq: int, what: Chunk) -> list[tuple[int, Sequence[int]]]:
        """(offset, values) of one tensor."""
        found: list[tuple[int, Sequence[int]]] = []
        for part in self._by_seq.get(seq, ()):
            for row in part[part["what"] == what]:
                count = min(int(row["count"]), CHUNK_INTS)
                found.append((int(row["offset"]), row["value"][:count].tolist()))
        return found

    def experts(self, seq: int) -> dict[int, int]:
        """node -> distinct experts that MUL_MAT_ID there used."""
        found: dict[int, int] = {}
        for part in self._by_seq.get(seq, ()):
            for row in part[part["what"] == Chunk.EXPERTS]:
                found[int(row["node"])] = int(row["count"])
        return found


def read_tokens(root: GraphRun, graph: GraphFacts | None, chunks: ChunkStore, call: Call) -> GraphTokens:
    """Tokens, rows and runs of one outermost graph; None in it for what nothing tells."""
    if graph is not None and graph.is_k_shift:
        return GraphTokens(0, 0, (), k_shift=True)
    tokens = _count_tokens(root, graph, call)
    encoder = call.encode or (
        graph is not None
        and (
            graph.pooled is not None or (not graph.has_output and not graph.writes_kv and graph.has_attention)
        )
    )
    rows, every = _count_rows(root, graph, tokens, encoder)
    if tokens <= 0 or tokens > MAX_TOKENS:
        return GraphTokens(0, 0, None)
    if root.n_pos == 0:
        rotary = graph is not None and graph.has_rope
        return GraphTokens(tokens, rows, None, rotary, encoder)
    if tokens == root.n_pos == 1 and root.pos:
        # Nearly all of a generation: without arrays, which take longer than the rest of the token.
        row = _lone_row(root, rows, every)
        if row is not None:
            start = root.pos[0]
            return GraphTokens(tokens, rows, (Run(start, 1, int(row), row, start + 1),), False, encoder)
    pos = assemble(root.n_pos, root.pos[:INLINE_INTS], chunks.values(root.seq, Chunk.POS))
    mask = _mask(root, tokens, rows, every, chunks)
    if pos is None or mask is None or len(pos) not in (tokens, tokens * _MROPE_PARTS):
        return GraphTokens(tokens, rows, None, True, encoder)
    pos = pos[:tokens]
    image = graph is not None and graph.takes_embeddings and root.n_pos != tokens
    runs = image_run(pos, mask) if image else split_runs(pos, mask)
    return GraphTokens(tokens, rows, runs, False, encoder)


def _count_tokens(root: GraphRun, graph: GraphFacts | None, call: Call) -> int:
    if graph is not None and graph.n_tokens is not None:
        return graph.n_tokens
    if root.n_pos % _MROPE_PARTS == 0 and 0 < call.batch_tokens < root.n_pos:
        return root.n_pos // _MROPE_PARTS
    return root.n_pos


def _count_rows(
    root: GraphRun, graph: GraphFacts | None, tokens: int, encoder: bool
) -> tuple[int | None, bool]:
    """(output rows, whether every token has one although no row ids say so)."""
    if encoder:
        pooled = graph.pooled if graph is not None else None
        return (pooled if pooled is not None else root.n_out or tokens), False
    if root.n_out:
        return root.n_out, False
    if graph is None or graph.rows is None:
        # No row ids: a chunk of a prompt, or the engine's own record was not readable.
        return (None, False) if root.flags & Flag.FAULT else (0, False)
    return graph.rows, graph.rows == tokens


def _lone_row(root: GraphRun, rows: int | None, every: bool) -> bool | None:
    """As :func:`_mask`, of the only token; None where that has to look."""
    if every:
        return True
    if root.n_out:
        return True if root.n_out == 1 and root.out and root.out[0] == 0 else None
    return bool(rows) if rows in (0, 1) else None


def _mask(
    root: GraphRun, tokens: int, rows: int | None, every: bool, chunks: ChunkStore
) -> npt.NDArray[np.bool_] | None:
    if rows is None:
        return None
    if every:
        return np.ones(tokens, dtype=np.bool_)
    if root.n_out:
        out = assemble(root.n_out, root.out[:INLINE_INTS], chunks.values(root.seq, Chunk.OUT))
        return None if out is None else row_mask(tokens, out)
    mask = np.zeros(tokens, dtype=np.bool_)
    if rows == 1:
        # Older engines take a view of the last row instead of row ids.
        mask[-1] = True
    elif rows:
        return None
    return mask
