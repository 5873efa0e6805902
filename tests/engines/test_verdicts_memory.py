# SPDX-License-Identifier: Apache-2.0
"""Verdicts about memory on a real engine: weights that had to be read again, and a long cache."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from profinferd.agent.model.limits import LIMITS
from profinferd.agent.model.verdict import judge

from ..groups import small_group
from ..tries import in_one_of, timed
from . import facts, truth
from .fetch import Engines
from .models import model
from .pysync import Options
from .test_causes import both_counts, expected_tensors, fault_counts, own_copy, page_out, watched
from .undisturbed import ABOVE

NO_TIME = 2**64 - 1
ATTEMPTS = 6


@pytest.mark.parametrize("name", ["dense2-f16", "moe-q8_0"])
@pytest.mark.parametrize("planted", ["dropped", "group"])
def test_paging_names_the_weights(name: str, planted: str, engines: Engines, tmp_path: Path) -> None:
    """Every page of the mapped model was dropped, or there is memory for half of it. The tensors that
    were waited for longest are told by the file's own offsets; of a mixture, those are experts."""
    path = own_copy(model(name), tmp_path)
    if planted == "group":
        with small_group(path.stat().st_size // 2) as group:
            paging(path, group)
    else:
        paging(path, None)


def paging(path: Path, group: Path | None) -> None:
    # With little memory the kernel has to look for pages to give away: not in real time.
    priority = ABOVE if group is None else 0
    with watched(Options(path, threads=1, repack=False), ops="all", priority=priority) as job:
        find = expected_tensors(job.pid, path)
        records: list[Any] = []
        job.attachment.sinks.append(lambda kinds: records.extend(kinds.get("page_faults", ())))
        page_out(job.pid, path)
        if group is not None:
            (group / "cgroup.procs").write_text(str(job.pid))
        _, before = fault_counts(job.pid)
        job.generate(8 if group is None else 3)
        (_, after), _ = both_counts(job)  # with nothing held back
        majors = after - before
        seen = job.attachment.snapshot()
    if majors == 0:
        pytest.skip("this file system's pages cannot be dropped")
    assert seen.faults is not None and seen.faults.model is not None and seen.threads is not None
    waited: Counter[str] = Counter()
    for record in records:
        tensor = find(int(record["addr"]))
        if tensor is not None and int(record["wait_ns"]) != NO_TIME:
            waited[tensor] += int(record["wait_ns"])
    (found,) = (v for v in judge(seen) if v.rule == "paging")
    stalled = sum(p.stalled.get("fault", 0.0) for p in seen.threads.phases)
    # What calls stood still for is what the kernel kept its one thread waiting for.
    assert 0 < stalled <= 1.02 * waited.total() / 1e9
    assert found.seconds_per_token == pytest.approx(stalled / (seen.tokens.output_rows or 0))
    assert found.evidence[0].startswith(f"{majors:,} major page fault")
    longest = [tensor for tensor, _ in waited.most_common(3)]
    assert [text for text in longest if text in found.evidence[1]] == longest
    if path.name.startswith("moe"):
        assert "_exps.weight" in found.evidence[1]
    lacking = seen.faults.model.resident_bytes or 0
    if group is None:
        assert "--mlock" in found.try_
    else:
        assert lacking < path.stat().st_size and "more memory" in found.try_


def test_a_long_cache_slows_attention(engines: Engines, witness: truth.Witness) -> None:
    """1,000 tokens of a small model: how long each took, and that it was attention, by the witness."""
    in_one_of(ATTEMPTS, lambda: a_long_cache(witness, 8, 1000))


def a_long_cache(witness: truth.Witness, prompt: int, n: int) -> None:
    witness.output.unlink(missing_ok=True)
    options = Options(model("dense24-q4_0"), threads=1, env=witness.env)
    with watched(options, ops="all", priority=ABOVE) as job:
        job.generate(n, prompt)
        seen = job.attachment.snapshot()
    tokens: dict[int, list[float]] = defaultdict(list)
    attention: dict[int, list[float]] = defaultdict(list)
    for step, run in enumerate(witness.runs()[-(n - 1) :]):
        length = facts.kv_padded(prompt + step + 1)
        tokens[length].append(run.seconds)
        attention[length].append(sum(op.seconds for op in run.ops if op.node.op == "FLASH_ATTN_EXT"))
    first, last = min(tokens), max(tokens)
    assert (first, last) == (256, 1024)
    grown = fmean(tokens[last]) - fmean(tokens[first])
    timed(grown > 0.2 * fmean(tokens[first]), f"a token became {grown * 1e3:.3f} ms slower")
    more = fmean(attention[last]) - fmean(attention[first])
    timed(more > 0.8 * grown, f"attention became {more * 1e3:.3f} ms of {grown * 1e3:.3f} ms slower")
    verdicts = {v.rule: v for v in judge(seen)}
    timed("kv_growth_slows_attention" in verdicts, sorted(verdicts))
    found = verdicts["kv_growth_slows_attention"]
    said = re.match(
        r"a token took ([\d.]+) ms with a cache of (\d+) and ([\d.]+) ms with one of (\d+)", found.evidence[0]
    )
    assert said is not None and (int(said[2]), int(said[4])) == (first, last)
    timed(
        float(said[1]) / 1e3 == pytest.approx(fmean(tokens[first]), rel=0.1), (said[1], fmean(tokens[first]))
    )
    timed(float(said[3]) / 1e3 == pytest.approx(fmean(tokens[last]), rel=0.1), (said[3], fmean(tokens[last])))
    lost = sum(sum(some) - len(some) * fmean(tokens[first]) for some in tokens.values())
    lost /= seen.tokens.output_rows or 0
    timed(found.seconds_per_token == pytest.approx(lost, rel=0.15), (found.seconds_per_token, lost))


def test_a_long_cache_that_costs_little(engines: Engines) -> None:
    """Of a model with wide matrices attention is a small part: nothing is said of it."""

    def once() -> None:
        with watched(Options(model("wide2-f16"), threads=1), ops="all", priority=ABOVE) as job:
            job.generate(300)
            seen = job.attachment.snapshot()
        lengths = {g.kv_length for g in seen.graphs if g.phase == "decode" and g.count >= LIMITS.kv_count}
        assert lengths >= {256, 512}
        rules = [v.rule for v in judge(seen)]
        timed("kv_growth_slows_attention" not in rules, rules)

    in_one_of(ATTEMPTS, once)
