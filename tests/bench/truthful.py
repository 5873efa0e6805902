# SPDX-License-Identifier: Apache-2.0
"""What a row says about operators, beside the witness of :mod:`tests.engines.truth`."""

from __future__ import annotations

import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from tests.engines import truth

from .rows import Row
from .target import Target
from .watchers import WatchFailed, watching


def rightly(said: Mapping[str, float], true: Mapping[str, float]) -> float:
    """Share of the time that is said to be the operator's whose it is (1: all shares right).

    Both are taken as shares of their own sum, as a person reads a profile.
    """
    whole, true_whole = sum(said.values()), sum(true.values())
    if whole <= 0 or true_whole <= 0:
        return 0.0
    return sum(min(said.get(op, 0.0) / whole, ns / true_whole) for op, ns in true.items())


def as_operators(by_function: Mapping[str, float], operators: Iterable[str]) -> dict[str, float]:
    """Functions by the operator whose name theirs begins with, the longest that does."""
    known = sorted(operators, key=len, reverse=True)
    found: dict[str, float] = defaultdict(float)
    for name, value in by_function.items():
        upper = name.upper()
        found[next((op for op in known if upper == op or upper.startswith(op + "_")), upper)] += value
    return dict(found)


def shares_right(
    rows: Sequence[Row],
    functions: Sequence[str],
    seconds: float,
    progress: Callable[[str], None],
    model: Path | None = None,
) -> dict[str, float]:
    """By row: :func:`rightly`, with the witness in the same process at the same time."""
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        witness = truth.Witness(truth.build_shim(), Path(folder) / "truth.bin")
        with Target(seconds, env=witness.env, model=model) as target:
            target.tokens(1)
            for row in rows:
                try:
                    with watching(row, target.pid, functions) as watcher:
                        begin = time.monotonic_ns()
                        target.window(1, row.at_least)
                        end = time.monotonic_ns()
                        said = watcher.finish().by_op
                except WatchFailed as error:
                    progress(f"{row.key}: {error}")
                    continue
                true: dict[str, float] = defaultdict(float)
                for (op, _), total in truth.per_op(truth.within(witness.runs(), begin, end)).items():
                    true[op] += total.seconds
                if row.kind in ("bpftrace", "published"):
                    said = as_operators(said, true)
                found[row.key] = rightly(said, true)
    return found
