# SPDX-License-Identifier: Apache-2.0
"""The target comes first: profiled or not, it answers with the same bytes, at its own speed."""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from profinferd.agent.attach import Attachment
from profinferd.agent.kernel import bpfsys
from profinferd.agent.kernel.programs import METHODS, GgmlPrograms, Probe
from profinferd.agent.settle import LayoutSettler, layout_fields
from profinferd.agent.target.facts import FileInfo
from profinferd.agent.target.inspect import inspect_target
from profinferd.agent.target.process import open_process
from tests.runtime.traced import code_of, links_of

from . import models, pysync, servers
from .fetch import Engines
from .profiler import Profiler

PROMPT = models.words(24)
TOKENS = 60
PATIENCE = 300.0
"""Seconds until the kernel has taken away what a killed process held (perf uprobes take longest), and
until a target that got no core has computed something."""
OP_LEVEL, ALL_LEVELS = ("op",), ("op", "graph", "call")


class Decoding(threading.Thread):
    """Has the same answer generated again and again, and keeps every one that is different."""

    def __init__(self, once: Callable[[], Any]) -> None:
        super().__init__(name="decoding")
        self.once = once
        self.right = once()
        self.wrong: list[Any] = []
        self.answers = 0
        self.over = threading.Event()
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            while not self.over.is_set():
                tokens = self.once()
                self.answers += 1
                if tokens != self.right:
                    self.wrong.append(tokens)
        except (RuntimeError, OSError) as error:  # the target died
            self.error = error

    def __enter__(self) -> Decoding:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.join(PATIENCE)
        assert not self.is_alive(), "the target does not answer"
        assert self.error is None, self.error
        assert self.answers > 0
        assert not self.wrong, "the target's output changed"


def once(victim: pysync.PySync, **more: Any) -> Callable[[], Any]:
    """One generation of the victim: its tokens."""
    body = {"context": 0, "prompt": PROMPT, "n": TOKENS, **more}
    return lambda: victim.ask("generate", **body)["tokens"]


def once_served(server: servers.Server) -> Callable[[], Any]:
    """One request to a server: text and tokens. Nothing is reused of the one before."""

    def ask() -> Any:
        answer = server.completion(PROMPT, TOKENS, cache_prompt=False)
        return answer["content"], answer["tokens"]

    return ask


def left_of(links: set[int]) -> set[int]:
    """Those that stay: who lists all links of the machine holds each for a moment."""
    until = time.monotonic() + PATIENCE
    while (left := links & {link.id for link in bpfsys.links()}) and time.monotonic() < until:
        time.sleep(0.005)
    return left


@dataclass
class Cycler:
    """All probes that the product would attach to a process, attached and detached at will."""

    pid: int
    programs: GgmlPrograms
    files: Sequence[FileInfo]
    attached: list[float] = field(default_factory=list)
    detached: list[float] = field(default_factory=list)

    def attach(self, levels: Sequence[str]) -> None:
        numbers = self.programs.types.constants()
        for file in self.files:
            hooks = [hook for hook in file.hooks if hook.event != "LV_BACKEND" and hook.level in levels]
            if hooks:
                probes = [Probe(numbers[h.event], h.site.offset, h.site.moved, h.ret) for h in hooks]
                self.programs.attach(levels[-1], file.open_path, self.pid, probes)

    def cycle(self, times: int, levels: Sequence[str] = ALL_LEVELS) -> None:
        for _ in range(times):
            begin = time.perf_counter()
            self.attach(levels)
            self.attached.append(time.perf_counter() - begin)
            time.sleep(0.003)
            begin = time.perf_counter()
            self.programs.detach(levels[-1])
            self.detached.append(time.perf_counter() - begin)
            self.programs.drain()

    def until_hit(self, which: str, levels: Sequence[str] = ALL_LEVELS, more_than: int = 0) -> None:
        """Further cycles until the probes have fired so often: the target may have had no core."""
        until = time.monotonic() + PATIENCE
        while self.programs.stats()[which] <= more_than:
            assert time.monotonic() < until, f"the probes never fired: nothing was tested ({which})"
            self.cycle(1, levels)

    def breakpoints(self) -> int:
        """Bytes of the target's code that are not those of its files."""
        compared, different = zip(*(code_of(self.pid, file) for file in self.files), strict=True)
        assert all(compared)
        return sum(different)

    def __str__(self) -> str:
        a, d = (statistics.median(x) * 1e3 for x in (self.attached, self.detached))
        return f"{self.programs.method}: {len(self.attached)} cycles, attach {a:.1f} ms, detach {d:.1f} ms"


@contextmanager
def cycler(pid: int, method: str) -> Iterator[Cycler]:
    """Programs are loaded and told to watch ``pid``; nothing is attached yet."""
    with GgmlPrograms.load(method) as programs, inspect_target(open_process(pid)) as info:
        numbers = programs.types.constants()
        assumed = LayoutSettler(info.layouts, info.tables).assumed
        programs.set_layout(0, layout_fields(assumed, info.tables, chosen=True))
        programs.set_target(pid, layout=0, mode=numbers["OPS_TRACE"])
        yield Cycler(pid, programs, [file for file in info.files if file.hooks])


def test_same_bytes_through_attach_and_detach(engines: Engines) -> None:
    """At temperature 0, arming and disarming while it decodes changes not one byte.

    Three targets at a time, for what a cycle takes is waiting in the kernel: a stock server, a
    stripped and an unstripped build.
    """
    quick = models.model("dense2-q4_k")
    with ExitStack() as stack:
        server = stack.enter_context(servers.Server(servers.Options(quick, threads=1)))
        stripped, whole = (
            stack.enter_context(pysync.PySync(pysync.Options(quick, threads=1, stripped=s)))
            for s in (True, False)
        )
        jobs = [
            ("session", 500, 0, server.pid, once_served(server)),
            ("multi", 150, 0, stripped.pid, once(stripped)),
            # 50 in all: closing a perf uprobe takes 0.1 s and more, one after the other.
            ("perf", 12, 38, whole.pid, once(whole)),
        ]

        def work(method: str, cycles: int, of_ops: int, pid: int, ask: Callable[[], Any]) -> None:
            with cycler(pid, method) as probes, Decoding(ask):
                assert probes.breakpoints() == 0
                probes.attach(ALL_LEVELS)
                assert probes.breakpoints() >= 4, "the comparison sees none where there are some"
                probes.programs.detach("call")
                probes.cycle(cycles)
                print(probes)
                if of_ops:
                    probes.attach(("graph", "call"))
                    probes.cycle(of_ops, OP_LEVEL)
                    probes.programs.detach("call")
                probes.until_hit("hits_op", more_than=cycles)
                probes.until_hit("hits_call")
                probes.until_hit("hits_graph")
                assert probes.breakpoints() == 0

        with ThreadPoolExecutor(len(jobs)) as pool:
            for done in [pool.submit(work, *job) for job in jobs]:
                done.result()


@pytest.mark.parametrize("method", ["session", "multi"])
def test_same_bytes_through_cycles_of_the_op_level(method: str, engines: Engines) -> None:
    """As sampling does it: call and graph probes stay, those of the op level come and go."""
    with (
        pysync.PySync(pysync.Options(models.model("dense2-q4_k"), threads=1)) as victim,
        cycler(victim.pid, method) as probes,
        Decoding(once(victim)),
    ):
        probes.attach(("graph", "call"))
        probes.cycle(40, OP_LEVEL)
        probes.until_hit("hits_op", OP_LEVEL)
        probes.programs.detach("call")
        assert probes.breakpoints() == 0
        print(probes)


@pytest.mark.parametrize(("method", "times"), [("session", 3), ("multi", 2), ("perf", 1)])
def test_attached_again_and_again(method: str, times: int, engines: Engines) -> None:
    """The whole of it: looking, loading, attaching, watching, closing. No link is left."""
    options = pysync.Options(models.model("dense2-q4_k"), threads=1)
    with pysync.PySync(options) as victim, Decoding(once(victim)):
        for _ in range(times):
            with Attachment.open(victim.pid, method=method) as attachment:
                attachment.poll(0.2)
                until = time.monotonic() + PATIENCE
                while not attachment.snapshot().tokens.decode and time.monotonic() < until:
                    attachment.poll(0.05)
                mine = links_of(os.getpid())
                assert len(mine) >= 2
            assert attachment.seen_anything
            assert (attachment.snapshot().tokens.decode or 0) > 0
            assert not left_of(mine)


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_threads(threads: int, engines: Engines) -> None:
    """With a pool of threads, of which only the first is followed."""
    options = pysync.Options(models.model("dense2-q4_k"), threads=threads)
    n = TOKENS if threads == 1 else 12  # they wait for each other where cores are few
    with pysync.PySync(options) as victim, cycler(victim.pid, METHODS[0]) as probes:
        with Decoding(once(victim, n=n)):
            probes.cycle(15)
        assert probes.breakpoints() == 0


def test_several_contexts(engines: Engines) -> None:
    """Three contexts decode at the same time, each in a thread that lives for one generation."""
    options = pysync.Options(models.model("dense2-q4_k"), threads=1, contexts=3)
    jobs = [{"context": i, "prompt": models.words(10 + i, i), "n": TOKENS} for i in range(3)]
    with pysync.PySync(options) as victim:
        alone = [victim.ask("generate", **job)["tokens"] for job in jobs]

        def together() -> list[Any]:
            return [answer["tokens"] for answer in victim.ask("together", jobs=jobs)["answers"]]

        with cycler(victim.pid, METHODS[0]) as probes, Decoding(together) as decoding:
            assert decoding.right == alone
            probes.cycle(25)
            probes.until_hit("hits_call")
        with Profiler(victim.pid) as profiler:
            assert together() == alone
            report = profiler.finish()
    assert report.prefill == sum(10 + i for i in range(3))
    assert report.decode == 3 * (TOKENS - 1)
    assert report.uncovered == 0


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


@pytest.mark.parametrize("method", ["auto", "multi", "perf"])
def test_killed_profiler_leaves_nothing(method: str, engines: Engines) -> None:
    """``kill -9`` in mid-trace: links go, every breakpoint with them, and the tokens are the same.

    Code without a breakpoint and no link left is what "as fast as before" means; seconds of this
    machine would tell of its other work instead.
    """
    with pysync.PySync(pysync.Options(models.model("dense24-q4_0"), threads=1)) as victim:
        job: dict[str, Any] = {"context": 0, "prompt": PROMPT, "n": TOKENS, "times": 3}
        before = victim.ask("generate", **job)
        with Profiler(victim.pid, "--attach-method", method) as profiler:
            victim.start("generate", **job)
            time.sleep(0.05)
            # What is watched in trials comes and goes.
            links = links_of(profiler.pid) & {link.id for link in bpfsys.links()}
            assert len(links) >= 3
            killed = time.monotonic()
            profiler.kill()
            assert not left_of(links)
            gone = time.monotonic() - killed
            during = victim.finish()
        with inspect_target(victim.pid) as info:
            while (left := sum(code_of(victim.pid, f)[1] for f in info.files if f.hooks)) and (
                time.monotonic() < killed + PATIENCE
            ):
                time.sleep(0.05)
            assert left == 0, "breakpoints stayed"
        after = victim.ask("generate", **job)
    print(f"{method}: links gone {gone * 1e3:.0f} ms after kill -9")
    assert before["tokens"] == during["tokens"] == after["tokens"]
    assert during["same"] and after["same"]
