# SPDX-License-Identifier: Apache-2.0
"""Targets that end while they are watched, and others who watch the same target."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from profinferd.agent.attach import Attachment

from . import models, pysync
from .fetch import Engines, fetch
from .processes import with_parent
from .profiler import Profiler

PROMPT = models.words(20)
TOKENS = 40
JOB = {"context": 0, "prompt": PROMPT, "n": TOKENS}


def quick() -> pysync.PySync:
    return pysync.PySync(pysync.Options(models.model("dense2-q4_k"), threads=1))


@pytest.mark.parametrize("way", ["killed", "killed in a call", "exits"])
def test_the_target_ends(way: str, engines: Engines) -> None:
    """What was seen is kept, and the profiler ends by itself."""
    with quick() as victim, Profiler(victim.pid) as profiler:
        victim.ask("generate", **JOB)
        if way == "killed in a call":
            victim.start("generate", **{**JOB, "times": 100})
            time.sleep(0.1)
        if way == "exits":
            victim.start("quit")
        else:
            os.kill(victim.pid, signal.SIGKILL)
        report = profiler.wait()
    assert report.exit_code == 0
    assert report.prefill >= len(PROMPT)
    assert report.decode >= TOKENS - 1
    if way != "killed in a call":
        assert (report.prefill, report.decode) == (len(PROMPT), TOKENS - 1)
    assert any("ended" in note for note in report.json["notes"])


def test_it_watches_before_it_says_so(engines: Engines) -> None:
    """Who reads that it is attached may press Ctrl-C at once, and gets what was seen."""
    said: list[str] = []
    with quick() as victim:
        Attachment.open(victim.pid, progress=said.append, watching=lambda: said.append("it watches")).close()
    assert said[-2] == "it watches" and said[-1].startswith(f"attached to process {victim.pid}"), said


@pytest.mark.parametrize("methods", [("auto", "auto"), ("auto", "perf"), ("multi", "multi")])
def test_two_profilers(methods: tuple[str, str], engines: Engines) -> None:
    """Both see everything, the target says the same, and one's end is not the other's."""
    with quick() as victim:
        alone = victim.ask("generate", **JOB)["tokens"]
        with Profiler(victim.pid, "--attach-method", methods[0]) as first:
            with Profiler(victim.pid, "--attach-method", methods[1]) as second:
                assert victim.ask("generate", **JOB)["tokens"] == alone
                one = second.finish()
            assert victim.ask("generate", **JOB)["tokens"] == alone
            two = first.finish()
        assert victim.ask("generate", **JOB)["tokens"] == alone
    assert (one.prefill, one.decode, one.output_rows) == (len(PROMPT), TOKENS - 1, TOKENS)
    assert (two.prefill, two.decode, two.output_rows) == tuple(
        2 * n for n in (one.prefill, one.decode, one.output_rows)
    )
    assert one.uncovered == two.uncovered == 0
    ones = {(op.op, op.role, op.phase): op.calls for op in one.ops}
    assert {(op.op, op.role, op.phase): op.calls for op in two.ops} == {k: 2 * n for k, n in ones.items()}


@contextmanager
def bpftrace(library: Path, function: str, pid: int) -> Iterator[subprocess.Popen[str]]:
    """Counts entries and returns of a function, as people do who know no better tool."""
    # Its -p alone does not keep it from counting other processes that have the file mapped.
    where, mine = f"{library}:{function}", f"/pid == {pid}/"
    script = f"uprobe:{where} {mine} {{ @in++ }} uretprobe:{where} {mine} {{ @out++ }}"
    tracer = subprocess.Popen(
        with_parent(["bpftrace", "-p", str(pid), "-e", 'BEGIN { printf("ready\\n"); } ' + script]),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert tracer.stdout is not None
    try:
        for line in tracer.stdout:
            if line == "ready\n":
                break
        else:
            raise AssertionError("bpftrace did not start")
        yield tracer
    finally:
        tracer.kill()
        tracer.wait()
        tracer.stdout.close()


def ended(tracer: subprocess.Popen[str]) -> str:
    """What it says at its end. It sees a Ctrl-C only where that finds it waiting, and else goes on."""
    for _ in range(60):
        tracer.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return tracer.communicate(timeout=2)[0]
    raise AssertionError("bpftrace did not end")


@pytest.mark.skipif(shutil.which("bpftrace") is None, reason="bpftrace is not installed")
def test_bpftrace_on_the_same_function(engines: Engines) -> None:
    """Entry and return at the first byte by one, a few bytes further by the other: both count all."""
    with quick() as victim:
        alone = victim.ask("generate", **JOB)["tokens"]
        library = pysync.libraries(fetch(), False) / "libllama.so.0"
        with bpftrace(library.resolve(), "llama_decode", victim.pid) as tracer:
            with Profiler(victim.pid) as profiler:
                assert victim.ask("generate", **JOB)["tokens"] == alone
                report = profiler.finish()
            assert victim.ask("generate", **JOB)["tokens"] == alone
            said = ended(tracer)
        assert victim.ask("generate", **JOB)["tokens"] == alone
    assert report.calls(status=0) == TOKENS
    assert f"@in: {2 * TOKENS}" in said
    assert f"@out: {2 * TOKENS}" in said
