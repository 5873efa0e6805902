# SPDX-License-Identifier: Apache-2.0
"""Builds of the stub engine compared, real probes and all: one operator slower, one fused (case C25)."""

from __future__ import annotations

from profinferd.agent.model.diff import compare
from profinferd.agent.model.diffdata import Diff
from profinferd.agent.model.trace import Trace

from ..tries import in_one_of, timed
from . import cases
from .tracing import Tracing

SLOW = ('-DSLOW="ffn_up-"', "-DSLOW_US=400")
TIMES = 120
ATTEMPTS = 4
"""Other work on the machine may come and go in one of two recordings."""


def record(*flags: str, fuse: int = 1) -> Trace:
    """A recording of a build: a prompt, and tokens one by one. Kernels sleep, so load changes little."""
    with cases.Engine(cases.engine(*flags)) as stub, Tracing(stub.pid) as tracing:
        cases.ahead(stub.pid)
        stub.send(f"run pos=0-4 out=4 us=60 fuse={fuse}")
        stub.reply(tracing.drain)
        stub.send(f"run pos=5 out=0 times={TIMES} us=60 fuse={fuse}")
        stub.reply(tracing.drain)
        return tracing.trace()


def changed(diff: Diff) -> list[tuple[str, str, str]]:
    """(change, operator, role) of what differs while decoding."""
    (decode,) = [p for p in diff.phases if p.phase == "decode"]
    assert decode.pairs == TIMES and decode.tested > 10
    return [(row.change, row.op, row.role) for row in decode.significant]


def test_one_build_twice_and_one_with_a_slower_operator() -> None:
    in_one_of(ATTEMPTS, twice_and_slower)


def twice_and_slower() -> None:
    plain = record()
    found = changed(compare(plain, record()))
    timed(found == [], f"the same twice: {found}")
    slower = compare(plain, record(*SLOW))
    found = changed(slower)
    timed(found == [("same", "MUL_MAT", "ffn_up")], f"one slower: {found}")
    (decode,) = [p for p in slower.phases if p.phase == "decode"]
    (row,) = decode.significant
    assert row.time is not None and row.a is not None and row.b is not None
    timed(row.time.value > 2, f"one slower: {row}")
    # 400 us more in each of the two layers, by the stub's own sleep.
    timed(row.b.usual_seconds - row.a.usual_seconds > 2 * 400e-6, f"one slower: {row}")
    assert any("ffn_up" in line for line in slower.exceeded(0.05))


def test_a_build_without_fusion() -> None:
    in_one_of(ATTEMPTS, without_fusion)


def without_fusion() -> None:
    found = changed(compare(record(fuse=0), record()))
    assert sorted(row for row in found if row[0] != "same") == [
        ("fused", "RMS_NORM+MUL", "attn_norm"),
        ("fused", "RMS_NORM+MUL", "ffn_norm"),
        ("fused", "RMS_NORM+MUL", "output_norm"),
    ]
    timed(len(found) == 3, f"another one: {found}")
