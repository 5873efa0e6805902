# SPDX-License-Identifier: Apache-2.0
"""In which order rows are measured: every round in another one, dear rows less often."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from .rows import Row

THREADS = (1, 2)


def rounds(rows: Sequence[Row], seed: int) -> Iterator[list[tuple[int, list[Row]]]]:
    """Without end: for each number of threads, in random order, the rows in random order.

    A row that is due in every n-th round has its first turn in one of the first n, drawn by
    chance, so that dear rows do not all come in the same round.
    """
    rng = random.Random(seed)
    first = {row.key: rng.randrange(row.every) for row in rows}
    number = 0
    while True:
        due = [row for row in rows if number % row.every == first[row.key]]
        yield [(threads, rng.sample(due, len(due))) for threads in rng.sample(THREADS, len(THREADS))]
        number += 1
