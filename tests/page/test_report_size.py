# SPDX-License-Identifier: Apache-2.0
"""The HTML report of a minute with every kernel recorded."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from profinferd.agent.model.trace import Segment, Source
from profinferd.exporters import html
from tests.unit import traces
from tests.unit.graphs import decoder
from tests.unit.streams import decode

from .browser import DESKTOP, Browser


def test_a_minute_of_everything_stays_small_and_opens_quickly(tab: Browser, tmp_path: Path) -> None:
    """3,000 tokens of a made-up model with 18 layers, every duration another: 933,000 kernels; < 5 MB."""
    rng = np.random.default_rng(1)
    graph = decoder(1, 1, 256, layers=18)
    trace = traces.of_steps([[decode(n, graph=graph, hash=12)] for n in range(3000)])
    trace._source = Noisy(trace._source, rng)
    assert int(trace.runs["n_ops"].sum()) > 900_000
    text = html.render(trace, "run.pfi", "test")
    assert len(text.encode()) < 5_000_000
    document = json.loads(re.search(r'id="recording">(.*?)</script>', text, re.S)[1])  # type: ignore[index]
    assert document["timelines"]["count"] > 1000 and len(document["tokens"]["ns"]) == 3000
    path = tmp_path / "minute.html"
    path.write_text(text, encoding="utf-8")
    tab.size(DESKTOP)
    tab.open(path)
    assert tab.js("document.getElementById('app').dataset.ready") == "true"
    assert tab.errors() == []


class Noisy:
    """A source whose kernels take times that do not compress."""

    def __init__(self, source: Source, rng: np.random.Generator) -> None:
        self._of, self._rng = source, rng

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name)

    def segments(self, begin_ns: int | None, end_ns: int | None, *, ops: bool) -> Iterator[Segment]:
        for segment in self._of.segments(begin_ns, end_ns, ops=ops):
            begin = segment.ops["begin"]
            segment.ops["end"] = begin + self._rng.integers(20_000, 400_000, len(begin))
            yield segment
