# SPDX-License-Identifier: Apache-2.0
"""The process that is profiled, and windows of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from tests.engines.fetch import fetch
from tests.engines.pysync import Options, PySync

from .stats import Capped, capped_mean

SCRIPT = Path(__file__).with_name("decoder.py")
PREFILL = 96
"""Tokens of the prompt."""
FEWEST_TOKENS, MOST_TOKENS = 16, 156
"""Engines round the KV length up to a multiple of 256: it is the same in all of a window."""


@dataclass(frozen=True, slots=True)
class Window:
    """What one window says: ns per decoded token (see ``capped_mean``) and per prompt token."""

    decode: Capped
    prefill: float
    tokens: int


class Target(PySync):
    """Decodes what it is told to. A context manager.

    ``seconds``: how long the decoding in a window shall take; its number of tokens follows
    from the speed at that many threads, measured once. ``model``: a GGUF file; None: the usual one.
    """

    def __init__(
        self, seconds: float, env: Mapping[str, str] | None = None, model: Path | None = None
    ) -> None:
        options = Options(model or fetch().gemma, context=1024, sequences=1, stripped=True, env=env or {})
        super().__init__(options, script=SCRIPT)
        self.seconds = seconds
        self._tokens: dict[int, int] = {}

    def __enter__(self) -> Self:
        super().__enter__()
        # Repacked weights are touched, threads are started, buffers have their size.
        self.ask("window", threads=2, prefill=PREFILL, decode=8)
        return self

    def tokens(self, threads: int) -> int:
        """Tokens decoded in a window at this number of threads."""
        if threads not in self._tokens:
            times = self.ask("window", threads=threads, prefill=PREFILL, decode=24)["decode"]
            wanted = math.ceil(self.seconds * 1e9 / capped_mean(times).mean)
            self._tokens[threads] = min(max(wanted, FEWEST_TOKENS), MOST_TOKENS)
        return self._tokens[threads]

    def window(self, threads: int, at_least: float = 0.0) -> Window:
        """One window; several times the same work where it shall decode for ``at_least`` s."""
        tokens = self.tokens(threads)
        cycles = max(1, math.ceil(at_least / self.seconds))
        got = self.ask("window", threads=threads, prefill=PREFILL, decode=tokens, cycles=cycles)
        return as_window(got)

    def settle(self, threads: int, tokens: int = 4) -> None:
        """Tokens that count for nothing: after a change, caches and page tables are cold."""
        self.ask("go_on", threads=threads, tokens=tokens)

    def rehearse(self, threads: int) -> None:
        """Every shape of a window once: what is new is looked at in full the first time."""
        self.ask("window", threads=threads, prefill=PREFILL, decode=4)

    @contextmanager
    def busy(self, threads: int) -> Iterator[None]:
        """Decodes in the background meanwhile."""
        self.start("until_told", threads=threads)
        try:
            yield
        finally:
            self.start("go_on", threads=threads, tokens=1)
            self.finish()
            self.finish()


def as_window(answer: Mapping[str, Any]) -> Window:
    """The figures of a window from what the process noted."""
    prompts = [float(ns) / PREFILL for ns in answer["prefill"]]
    decode = capped_mean([float(ns) for ns in answer["decode"]])
    return Window(decode, sum(prompts) / len(prompts), len(answer["decode"]))
