# SPDX-License-Identifier: Apache-2.0
"""The sequences of one context, each known by the position that would continue it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from .tokens import Run

#: Sequences remembered per context. More slots than that in one context is unheard of.
MAX_SEQUENCES = 256


@dataclass(slots=True, eq=False)
class Sequence:
    """``next`` continues it; ``produced``: its last token had a row.

    ``used`` is the number of the last call that it took part in. ``floor``: a verification
    may be rolled back to here. ``slack``: calls whose positions were lost may have moved it
    on by so much. ``started_ns`` is None for a request whose begin was not seen;
    ``last_row_ns`` is the return that gave its newest row; ``counted``: it is a request.
    """

    next: int
    used: int
    started_ns: int | None
    produced: bool = False
    counted: bool = False
    floor: int | None = None
    slack: int = 0
    last_row_ns: int | None = None


class SequenceBook:
    """Sequences by the position that continues them; the least used are forgotten."""

    def __init__(self) -> None:
        self._all: list[Sequence] = []
        self._by_next: dict[int, list[Sequence]] = {}

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._all)

    def add(self, sequence: Sequence) -> None:
        """A new one; makes room for it."""
        self._all.append(sequence)
        self._list(sequence)
        if len(self._all) > MAX_SEQUENCES:
            self.forget(min(self._all, key=lambda s: s.used))

    def move(self, sequence: Sequence, next: int) -> None:
        """It goes on at ``next`` from now on."""
        self._unlist(sequence)
        sequence.next = next
        self._list(sequence)

    def forget(self, sequence: Sequence) -> None:
        """It is over."""
        self._unlist(sequence)
        self._all.remove(sequence)

    def match(self, run: Run, taken: Collection[Sequence], *, shifted: bool) -> Sequence | None:
        """The sequence that this run continues, or None; never one that is ``taken``.

        At equal positions, a lone row goes to a sequence that generates and a stretch of
        prompt to one whose prompt is unfinished; then to the one used last. ``shifted``:
        cached keys were moved down, and with them the positions that go on.
        """
        generating = run.single or run.every_row

        def rank(s: Sequence) -> tuple[bool, int]:
            return s.produced is generating, s.used

        exact = [s for s in self._by_next.get(run.start, ()) if s not in taken]
        if exact:
            return max(exact, key=rank)
        free = [s for s in self._all if s not in taken]
        back = [s for s in free if s.floor is not None and s.floor <= run.start < s.next]
        if back:
            return max(back, key=rank)
        near = [s for s in free if s.slack and s.next < run.start <= s.next + s.slack]
        if near:
            return min(near, key=lambda s: (run.start - s.next, -s.used))
        if shifted and run.single:
            moved = [s for s in free if s.produced and s.next > run.start]
            return max(moved, key=lambda s: s.used, default=None)
        return None

    def _list(self, sequence: Sequence) -> None:
        self._by_next.setdefault(sequence.next, []).append(sequence)

    def _unlist(self, sequence: Sequence) -> None:
        same = self._by_next[sequence.next]
        same.remove(sequence)
        if not same:
            del self._by_next[sequence.next]
