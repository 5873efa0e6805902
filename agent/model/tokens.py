# SPDX-License-Identifier: Apache-2.0
"""Positions of one graph become runs; runs and their rows become a phase (design D10).

A *run* is a stretch of consecutive positions: one sequence's share of the graph. Row ``r``
of the output belongs to token ``out[r]``.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

#: More tokens than this in one graph is not a batch but a broken record.
MAX_TOKENS = 1 << 20


class Phase(enum.StrEnum):
    """What a call (and every graph and op inside it) was for."""

    PREFILL = "prefill"
    DECODE = "decode"
    VERIFY = "verify"
    ENCODE = "encode"
    MIXED = "mixed"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens at positions ``start`` .. ``start + length - 1``; ``rows`` of them have output.

    ``last_row``: the last token has one. ``next`` is the position that would continue the
    run; ``loose`` is how far the true one may lie beyond it (tokens of an image share
    positions, and where text goes on after them depends on its shape).
    """

    start: int
    length: int
    rows: int
    last_row: bool
    next: int
    loose: int = 0

    @property
    def single(self) -> bool:
        """One token that an output row was asked for."""
        return self.length == 1 and self.rows == 1

    @property
    def every_row(self) -> bool:
        """A long run with a row for each token: verification or embeddings."""
        return self.length > 1 and self.rows == self.length


@dataclass(frozen=True, slots=True)
class GraphTokens:
    """What one graph says about tokens.

    tokens      all sequences together; 0 for a K-shift
    rows        output rows; None where the graph does not tell
    runs        None: positions are not known (no ROPE, or their records were lost)
    lost        positions exist, but not all of them arrived
    encoder     ends in embeddings, not in logits
    k_shift     only moves cached keys
    """

    tokens: int
    rows: int | None
    runs: tuple[Run, ...] | None
    lost: bool = False
    encoder: bool = False
    k_shift: bool = False


def assemble(
    total: int, inline: Sequence[int], chunks: Iterable[tuple[int, Sequence[int]]]
) -> npt.NDArray[np.int64] | None:
    """All ``total`` elements from the event's own and its chunks, or None if some lack.

    ``chunks`` are (offset, values), in any order; what lies outside is ignored.
    """
    if total <= 0 or total > MAX_TOKENS * 4:
        return None
    if total <= len(inline):
        return np.asarray(inline[:total], dtype=np.int64)
    parts = [(0, inline), *chunks]
    # Do not allocate for a claimed size that the records cannot fill.
    if sum(len(values) for _, values in parts) < total:
        return None
    whole = np.zeros(total, dtype=np.int64)
    have = np.zeros(total, dtype=np.bool_)
    for offset, values in parts:
        if 0 <= offset < total:
            part = values[: total - offset]
            whole[offset : offset + len(part)] = part
            have[offset : offset + len(part)] = True
    return whole if bool(have.all()) else None


def row_mask(tokens: int, out: npt.NDArray[np.int64] | None) -> npt.NDArray[np.bool_] | None:
    """Which tokens have an output row; None if a row names no token."""
    mask = np.zeros(tokens, dtype=np.bool_)
    if out is not None and len(out):
        if int(out.min()) < 0 or int(out.max()) >= tokens:
            return None
        mask[out] = True
    return mask


def split_runs(pos: npt.NDArray[np.int64], mask: npt.NDArray[np.bool_]) -> tuple[Run, ...]:
    """Runs of consecutive positions.

    A row inside a stretch that was not asked for whole ends one sequence's share: a
    generating slot at position 8 may happen to stand before a prompt that starts at 9.
    """
    total = len(pos)
    if total == 1:
        row = int(mask[0])
        start = int(pos[0])
        return (Run(start, 1, row, bool(row), start + 1),)
    breaks = np.flatnonzero(np.diff(pos) != 1) + 1
    edges = [0, *breaks.tolist(), total]
    runs: list[Run] = []
    for low, high in itertools.pairwise(edges):
        rows = np.flatnonzero(mask[low:high])
        inside = (rows + low + 1).tolist() if len(rows) < high - low else []
        cuts = [low, *inside, high]
        for first, last in itertools.pairwise(cuts):
            if first < last:
                runs.append(_run(pos, mask, first, last))
    return tuple(runs)


def _run(pos: npt.NDArray[np.int64], mask: npt.NDArray[np.bool_], first: int, last: int) -> Run:
    start = int(pos[first])
    rows = int(np.count_nonzero(mask[first:last]))
    return Run(start, last - first, rows, bool(mask[last - 1]), start + last - first)


def image_run(pos: npt.NDArray[np.int64], mask: npt.NDArray[np.bool_]) -> tuple[Run, ...]:
    """Embeddings of an image: many tokens may share a position, and it is one stretch."""
    total = len(pos)
    rows = int(np.count_nonzero(mask))
    return (Run(int(pos[0]), total, rows, bool(mask[-1]), int(pos.max()) + 1, total),)


def phase_of(kinds: Iterable[Phase]) -> Phase:
    """The phase of a call from the kinds of its runs: one kind, or mixed; none is other."""
    distinct = set(kinds)
    if not distinct:
        return Phase.OTHER
    return distinct.pop() if len(distinct) == 1 else Phase.MIXED


def shape_phase(tokens: int, rows: int | None, encoder: bool) -> Phase:
    """The phase when positions are unknown: a guess that callers must flag as ambiguous.

    n rows of n tokens may be several generating slots or a verification; slots are far
    more usual in engines without rotary positions.
    """
    if tokens <= 0:
        return Phase.OTHER
    if encoder:
        return Phase.ENCODE
    if tokens == 1:
        return Phase.PREFILL if rows == 0 else Phase.DECODE
    if rows is None or rows <= 1:
        return Phase.PREFILL
    return Phase.DECODE if rows >= tokens else Phase.MIXED
