# SPDX-License-Identifier: Apache-2.0
"""The target comes first: profiled or not, it answers with the same bytes, at its own speed."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from profinferd.agent.kernel.programs import GgmlPrograms, Probe
from profinferd.agent.settle import LayoutSettler, layout_fields
from profinferd.agent.target.inspect import inspect_target
from profinferd.agent.target.process import open_process

from . import models, pysync
from .fetch import Engines
from .profiler import Profiler

PROMPT = models.words(24)
TOKENS = 60


class Decoding(threading.Thread):
    """Generates the same answer again and again, and keeps every one that is different."""

    def __init__(self, victim: pysync.PySync) -> None:
        super().__init__(name="decoding")
        self.victim = victim
        self.right = self._once()["tokens"]
        self.wrong: list[Any] = []
        self.answers = 0
        self.over = threading.Event()

    def _once(self) -> dict[str, Any]:
        return self.victim.ask("generate", context=0, prompt=PROMPT, n=TOKENS)

    def run(self) -> None:
        while not self.over.is_set():
            tokens = self._once()["tokens"]
            self.answers += 1
            if tokens != self.right:
                self.wrong.append(tokens)

    def __enter__(self) -> Decoding:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.join(30)


@contextmanager
def _probes(pid: int, method: str) -> Iterator[tuple[GgmlPrograms, list[tuple[str, list[Probe]]]]]:
    """Loaded programs that watch ``pid``, and all probes that the product would attach."""
    with GgmlPrograms.load(method) as programs, inspect_target(open_process(pid)) as info:
        numbers = programs.types.constants()
        assumed = LayoutSettler(info.layouts, info.tables).assumed
        programs.set_layout(0, layout_fields(assumed, info.tables, chosen=True))
        programs.set_target(pid, layout=0, mode=numbers["OPS_TRACE"])
        files = [
            (
                file.open_path,
                [
                    Probe(numbers[hook.event], hook.site.offset, hook.site.moved, hook.ret)
                    for hook in file.hooks
                    if hook.event != "LV_BACKEND"
                ],
            )
            for file in info.files
        ]
        yield programs, [(path, probes) for path, probes in files if probes]


@pytest.mark.parametrize(
    ("method", "cycles", "stripped"),
    [("session", 500, False), ("session", 60, True), ("multi", 100, False), ("perf", 50, False)],
)
def test_same_bytes_through_attach_and_detach(
    method: str, cycles: int, stripped: bool, engines: Engines
) -> None:
    """At temperature 0, arming and disarming while it decodes changes not one token."""
    options = pysync.Options(models.model("dense2-q4_k"), threads=1, stripped=stripped)
    with pysync.PySync(options) as victim, _probes(victim.pid, method) as (programs, files):
        with Decoding(victim) as decoding:
            for _ in range(cycles):
                for path, probes in files:
                    programs.attach("all", path, victim.pid, probes)
                time.sleep(0.003)
                programs.detach("all")
                programs.drain()
        assert decoding.answers > 0
        assert not decoding.wrong
        hits = programs.stats()
        assert hits["hits_op"] > cycles, "the probes never fired: nothing was tested"


def test_same_bytes_while_watched(engines: Engines) -> None:
    """With every op of every token recorded, for as long as it takes."""
    with pysync.PySync(pysync.Options(models.model("moe-q8_0"))) as victim:
        with Decoding(victim) as decoding, Profiler(victim.pid) as profiler:
            time.sleep(2)
            report = profiler.finish()
        assert decoding.answers > 2
        assert not decoding.wrong
        assert report.decode > TOKENS


def test_few_hits_per_kernel(engines: Engines) -> None:
    """At most 1.2 hits per executed kernel and thread with every op watched."""
    with pysync.PySync(pysync.Options(models.model("dense24-q4_0"), threads=1)) as victim:
        victim.ask("generate", context=0, prompt=PROMPT, n=4)
        with Profiler(victim.pid) as profiler:
            victim.ask("generate", context=0, prompt=PROMPT, n=TOKENS)
            report = profiler.finish()
    kernels = sum(op.calls for op in report.ops)
    hits = report.json["overhead"]["hits"]
    print(f"{hits} hits for {kernels} kernels, {report.json['overhead']['ns_per_hit']} ns per hit")
    assert kernels > 400 * TOKENS
    assert hits <= 1.2 * kernels


def test_killed_profiler_leaves_nothing(engines: Engines) -> None:
    """``kill -9`` in mid-trace: the next tokens come as fast as before, and are the same."""
    with pysync.PySync(pysync.Options(models.model("dense24-q4_0"), threads=1)) as victim:
        before = victim.ask("generate", context=0, prompt=PROMPT, n=TOKENS, times=3)
        with Profiler(victim.pid) as profiler:
            victim.start("generate", context=0, prompt=PROMPT, n=TOKENS, times=3)
            time.sleep(0.05)
            profiler.kill()
            during = victim.finish()
        after = victim.ask("generate", context=0, prompt=PROMPT, n=TOKENS, times=3)
    assert before["tokens"] == during["tokens"] == after["tokens"]
    assert during["same"] and after["same"]
    # A probed kernel costs microseconds, 410 of them a token: a link that stayed would show.
    assert _typical(after) < _typical(before) * 1.25


def _typical(answer: dict[str, Any]) -> float:
    """The fastest decile of decode calls in ns: other work on the machine only adds."""
    took = [call["end"] - call["begin"] for call in answer["calls"] if call["tokens"] == 1]
    return float(statistics.quantiles(took, n=10)[0])
