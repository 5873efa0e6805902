# SPDX-License-Identifier: Apache-2.0
"""Verdicts on a real engine whose cause was planted: weights larger than caches, a long prompt."""

from __future__ import annotations

import dataclasses
import statistics
from pathlib import Path
from typing import Any

import pytest

from profinferd.agent.attach import Attachment
from profinferd.agent.causes import CauseOptions
from profinferd.agent.kernel.peaks import cache_bytes, measure_peaks
from profinferd.agent.model.snapshot import Snapshot
from profinferd.agent.model.verdict import judge
from profinferd.agent.model.verdictdata import Verdict

from ..tries import in_one_of, timed
from . import models, pysync
from .test_causes import ready_seconds
from .undisturbed import as_others, first_in_line

ATTEMPTS = 8
"""Others use the memory, too: each attempt measures rate and peak anew."""
PLAIN = 3
"""So many attempts in which it read as fast as can be and waited for nobody, by the engine's and the
kernel's clocks, and nothing was said of it, are a defect."""
DECODED = 30
PROMPT = 300
LAYER_BYTES = 120_000_000


def watched(
    victim: pysync.PySync, prompt: int, tokens: int, answers: list[dict[str, Any]] | None = None
) -> Snapshot:
    """One answer, every operator timed, beside peaks of the same minute. What the engine itself says
    of it is added to ``answers``."""
    with Attachment.open(victim.pid, ops="all", causes=CauseOptions()) as attachment:
        answer = victim.ask("generate", context=0, prompt=models.words(prompt), n=tokens)
        attachment.poll(0.5)
    if answers is not None:
        answers.append(answer)
    return dataclasses.replace(attachment.snapshot(), peaks=measure_peaks([1]))


def larger_than_caches() -> Path:
    """A model of wide layers, 120 MB each and so many that no cache of this machine holds them."""
    wide, cache = models.SPECS["wide2-f16"], cache_bytes() or 0
    for layers in (2, 4, 8):
        name = f"wide{layers}-f16"
        models.SPECS.setdefault(name, dataclasses.replace(wide, name=name, layers=layers))
        if layers * LAYER_BYTES > 2.5 * cache:  # a part of what is not much larger stays in them
            return models.model(name)
    pytest.skip(f"this machine's caches hold {cache >> 20} MiB, and with them any model that is made here")


def test_wide_weights_are_bound_by_memory_and_long_prompts_by_arithmetic() -> None:
    """A token reads the whole file; a prompt of 300 uses each byte of it 300 times."""
    model = larger_than_caches()
    found: dict[str, Verdict] = {}
    # What a token has to read is the file, but for its embedding rows: 1024 of 2048 f16.
    size = model.stat().st_size - 1024 * 2048 * 2
    answers: list[dict[str, Any]] = []
    shares: list[float] = []
    plain = 0
    with pysync.PySync(pysync.Options(model, threads=1, context=1024)) as victim:
        victim.ask("generate", context=0, prompt=models.words(4), n=2)
        for attempt in range(ATTEMPTS):
            # It may be interrupted by others, or for being in front of them all for seconds.
            (first_in_line if attempt % 2 else as_others)(victim.pid)
            before = ready_seconds(victim.pid)
            seen = watched(victim, PROMPT, DECODED, answers)
            waited = ready_seconds(victim.pid) - before
            now = {v.rule: v for v in judge(seen)}
            assert "nothing_wrong" not in now or len(now) == 1
            found |= now
            assert seen.peaks is not None
            took = [c["end"] - c["begin"] for c in answers[-1]["calls"] if c["tokens"] == 1]
            shares.append(
                size / statistics.fmean(took) * 1e9 / (seen.peaks.by_threads[0].read_bytes_per_second or 0)
            )
            plain += 0.65 < shares[-1] < 1.15 and waited < 0.02 * sum(took) / 1e9
            bound = "memory_bandwidth_bound_decode" in found or (attempt >= 2 and max(shares) < 0.65)
            if bound and "compute_bound_prefill" in found:
                break
    assert "compute_bound_prefill" in found
    if plain < PLAIN and "memory_bandwidth_bound_decode" not in found:
        # By the engine's own clock: its arithmetic takes as long as the reading, or others use the memory.
        pytest.skip(f"a thread of this engine reads at {max(shares):.0%} of what one can read here at most")
    memory = found["memory_bandwidth_bound_decode"]
    assert memory.seconds_per_token is not None
    read = next(
        float(e.split()[3].replace(",", "")) for e in memory.evidence if e.startswith("each token reads")
    )
    assert 0.97 * size < read * 1e6 < 1.03 * size
    assert 0 < memory.seconds_per_token < 1


def test_a_model_that_caches_hold_is_not_bound_by_memory() -> None:
    size = models.model("dense2-q8_0").stat().st_size
    with pysync.PySync(pysync.Options(models.model("dense2-q8_0"), threads=1)) as victim:
        victim.ask("generate", context=0, prompt=models.words(4), n=2)

        def once() -> None:
            first_in_line(victim.pid)
            seen = watched(victim, 4, DECODED)
            cache = seen.peaks.cache_bytes if seen.peaks is not None else None
            rules = [v.rule for v in judge(seen)]
            assert rules
            if cache is not None and size < cache:
                timed("memory_bandwidth_bound_decode" not in rules, rules)

        in_one_of(ATTEMPTS, once)
