# SPDX-License-Identifier: Apache-2.0
"""The benchmark's target: decodes with a stock engine and reads the clock after every token.

Run by :mod:`tests.bench.target` with the engines' own interpreter, as
:mod:`tests.engines.pysync_victim` is; its commands come on top of those. No request, no
sampling and no output lie between two tokens: what is measured is the engine.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "engines"))
import pysync_victim  # type: ignore[import-not-found,unused-ignore]

TOKEN = 300  # which token does not matter: the work depends on the position alone


class Decoder(pysync_victim.Engine):  # type: ignore[misc,name-defined,unused-ignore]
    """One context, one sequence; ``position`` tokens are in its cache."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options)
        self.context = self.contexts[0]
        self.size = options["context"]
        self.position = 0

    def _clear(self) -> None:
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context.pointer), True)
        self.position = 0

    def _threads(self, threads: int) -> None:
        self.lib.llama_set_n_threads(self.context.pointer, threads, threads)

    def _step(self, tokens: int) -> int:
        """One call with ``tokens`` tokens of which the last has an output row; its ns."""
        first = self.position
        positions = list(range(first, first + tokens))
        rows = [0] * (tokens - 1) + [1]
        self.context.calls.clear()
        if self.context.call("decode", [TOKEN] * tokens, positions, [0] * tokens, rows) != 0:
            raise SystemExit("the engine refused a batch")
        self.position += tokens
        call = self.context.calls[0]
        return int(call["end"] - call["begin"])

    def _decode(self, tokens: int) -> list[int]:
        """ns of each token, from one return to the next."""
        times = []
        last = time.monotonic_ns()
        for _ in range(tokens):
            self._step(1)
            now = time.monotonic_ns()
            times.append(now - last)
            last = now
        return times

    def window(self, threads: int, prefill: int, decode: int, cycles: int = 1) -> dict[str, Any]:
        """Prompt and tokens from an empty cache, ``cycles`` times: the same work every time."""
        self._threads(threads)
        prompts, tokens = [], []
        for _ in range(cycles):
            self._clear()
            prompts.append(self._step(prefill))
            self._decode(2)  # the first tokens after a prompt find other caches
            tokens += self._decode(decode)
        return {"prefill": prompts, "decode": tokens}

    def go_on(self, threads: int, tokens: int) -> dict[str, Any]:
        """A few tokens more, for nothing."""
        self._threads(threads)
        if self.position + tokens > self.size:
            self._clear()
        self._decode(tokens)
        return {}

    def until_told(self, threads: int) -> dict[str, Any]:
        """Tokens without end: until the next line of input is there."""
        self._threads(threads)
        count = 0
        while not select.select([sys.stdin], [], [], 0)[0]:
            self.go_on(threads, 1)
            count += 1
        return {"tokens": count}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    decoder = Decoder(json.loads(sys.argv[1]))
    print(json.dumps({"ready": True}), file=answers)
    for line in sys.stdin:
        command = json.loads(line)
        action = command.pop("do")
        print(json.dumps(getattr(decoder, action)(**command)), file=answers)


if __name__ == "__main__":
    main()
