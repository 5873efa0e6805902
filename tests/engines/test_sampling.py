# SPDX-License-Identifier: Apache-2.0
"""Samples of a real engine's CPU time: against the kernel's account, and against timed operators."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from profinferd.agent.attach import Attachment
from profinferd.agent.model.snapshot import Snapshot
from profinferd.agent.whys import WhyOptions

from . import models, pysync
from .test_sampled import chatting

HERTZ = 997
SAMPLES = 4000
"""Their share of one part has a standard error below one point."""
POINTS = 0.05
ATTEMPTS = 6
LIMIT = 120.0
# Functions of the engine in which only MUL_MAT spends time (its flash attention has dot products
# of its own); innermost frame, for code without frame pointers has no other that is certain.
MATMUL = re.compile(r"gem[mv]_|forward_mul_mat|quantize_mat|tensor_traits|vec_dot_q|tinyBLAS")

needs_bcc = pytest.mark.skipif(
    not Path("/usr/lib/python3/dist-packages/bcc").is_dir(), reason="BCC is not installed here"
)


def watch(victim: pysync.PySync, samples: int) -> Snapshot:
    """All operators timed and CPU time sampled, until there are so many samples."""
    with chatting(victim), Attachment.open(victim.pid, ops="all", why=WhyOptions(HERTZ)) as attachment:
        until = time.monotonic() + LIMIT
        sampler = attachment._whys._sampler
        assert sampler is not None
        while sampler.samples < samples and time.monotonic() < until:
            attachment.poll(0.25)
    return attachment.snapshot()


def shares(seen: Snapshot) -> tuple[float, float]:
    """(by samples, by timed operators) the share of MUL_MAT in all kernels."""
    assert seen.cpu_time is not None
    kernels = [(s.split(";"), n) for s, n in seen.cpu_time.folded if s.split(";")[1] == "(kernels)"]
    matmul = sum(n for frames, n in kernels if MATMUL.search(frames[-1]))
    timed = sum(op.seconds for op in seen.ops if op.op == "MUL_MAT") / sum(op.seconds for op in seen.ops)
    return matmul / sum(n for _, n in kernels), timed


@needs_bcc
def test_shares_are_those_of_timed_operators() -> None:
    found = []
    with pysync.PySync(pysync.Options(models.model("dense24-q4_0"), threads=1)) as victim:
        victim.ask("generate", context=0, prompt=models.words(30), n=4)
        for _ in range(ATTEMPTS):
            seen = watch(victim, SAMPLES)
            cpu = seen.cpu_time
            assert cpu is not None
            assert cpu.seconds is not None
            assert cpu.parts[0].part == "kernels"
            # The kernel's own account of the process, which counts ticks of 10 ms: on a busy machine
            # it charges whole ones for parts (up to a seventh too much was seen), never less than what
            # the samples say.
            assert cpu.sampled_seconds <= 1.05 * cpu.seconds + 0.1
            account = cpu.sampled_seconds / cpu.seconds
            sampled, timed = shares(seen)
            found.append((account, sampled, timed))
            if account > 0.85 and abs(sampled - timed) <= POINTS:
                break
    assert any(account > 0.85 and abs(sampled - timed) <= POINTS for account, sampled, timed in found), found


@needs_bcc
def test_a_stripped_build_has_its_exported_names() -> None:
    options = pysync.Options(models.model("dense24-q4_0"), threads=1, stripped=True)
    with pysync.PySync(options) as victim:
        victim.ask("generate", context=0, prompt=models.words(30), n=4)
        seen = watch(victim, 500)
    assert seen.cpu_time is not None
    names = {name for stack, _ in seen.cpu_time.folded for name in stack.split(";")}
    assert {n for n in names if re.match(r"ggml_(compute_forward|vec|gem[mv]|cpu|quantize)_?", n)}
    # What is not exported is told by its file, and belongs to the kernels all the same.
    assert "[libggml-cpu.so.0]" in names
    assert {p.part: p.share for p in seen.cpu_time.parts}["kernels"] > 0.5
