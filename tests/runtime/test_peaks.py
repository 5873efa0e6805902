# SPDX-License-Identifier: Apache-2.0
"""Peaks of this machine against a C program that measures the same, in the same minutes."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from profinferd.agent.kernel import peaks

from .cases import ahead

SOURCE = Path(__file__).parents[1] / "victims" / "stream.c"
NEAR = 0.15
ROUNDS = 8
"""Both are the best of what they saw; on a busy machine that takes some rounds."""


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """STREAM's triad, compiled here."""
    if shutil.which("gcc") is None:
        pytest.skip("there is no gcc to compile the other program with")
    program = tmp_path_factory.mktemp("stream") / "stream"
    command = ["gcc", "-O3", "-march=native", "-pthread", str(SOURCE), "-o", str(program)]
    subprocess.run(command, check=True, timeout=300)
    return program


@pytest.fixture
def first() -> Iterator[None]:
    """This thread, and what it starts, comes before whatever else the machine does."""
    policy = os.sched_getscheduler(0)
    ahead(0)
    yield
    os.sched_setscheduler(0, policy, os.sched_param(0))


@pytest.mark.usefixtures("first")
@pytest.mark.parametrize("threads", [1, 2])
def test_the_triad_is_that_of_a_c_program(stream: Path, threads: int) -> None:
    size = peaks.memory_size(peaks.cache_bytes(), None)[0] // 3 // (1 << 16) * (1 << 16)
    ours = theirs = 0.0
    for _ in range(ROUNDS):
        command = [str(stream), str(size), str(threads), "12"]
        done = subprocess.run(command, check=True, timeout=300, capture_output=True, text=True)
        theirs = max(theirs, float(done.stdout))
        (peak,) = peaks.measure_peaks([threads]).by_threads
        assert peak.triad_bytes_per_second is not None
        ours = max(ours, peak.triad_bytes_per_second)
        if abs(ours / theirs - 1) <= NEAR:
            break
    assert ours == pytest.approx(theirs, rel=NEAR)
    # The same memory: reading alone is not slower than by what the triad moves, nor faster
    # than its four accesses (the written line is read first).
    assert peak.read_bytes_per_second is not None
    assert 0.5 * ours < peak.read_bytes_per_second < 4 / 3 * 1.5 * ours
