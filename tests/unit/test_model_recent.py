# SPDX-License-Identifier: Apache-2.0
"""The last seconds of a target: what they say, by hand-worked figures."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profinferd.agent.model import causes as cz
from profinferd.agent.model import snapshot as model
from profinferd.agent.model.clockdata import Clocks, CoreClock
from profinferd.agent.model.recent import Recent, since
from profinferd.agent.model.verdict import judge

from . import snapshots
from .test_model_verdict import plain, rules, stall, thread, threads


def after(tokens: int, seconds: float, waited: float = 0.0, thief: int = 0) -> model.Snapshot:
    """``tokens`` were decoded in ``seconds``, of which calls stood still for ``waited``."""
    found = plain(
        tokens=model.Tokens(0, tokens, tokens),
        calls=(model.Call("decode", 0, tokens, seconds),),
        window_seconds=seconds,
    )
    takers = (cz.Taker("thief", 7, thief, waited),) if thief else ()
    phase = dataclasses.replace(stall(preempted=waited), calls=tokens, tokens=tokens, seconds=seconds)
    some = threads(thread(run=seconds - waited), takers=takers, phases=(phase,) if waited else ())
    return dataclasses.replace(found, threads=some)


def test_a_minute_of_a_day() -> None:
    """A thief took a fifth of the last 30 s of ten hours: in all of them it is nothing."""
    before = after(720_000, 36_000.0, waited=30.0, thief=900)
    now = after(720_500, 36_030.0, waited=36.0, thief=1000)
    assert rules(now) == ["nothing_wrong"]
    recent = since(now, before)
    assert recent.window_seconds == 30.0
    assert recent.tokens.decode == 500
    assert recent.calls == (model.Call("decode", 0, 500, 30.0),)
    assert recent.threads is not None
    assert recent.threads.takers == (cz.Taker("thief", 7, 100, 6.0),)
    (verdict,) = judge(recent)
    assert verdict.rule == "preempted"
    assert verdict.seconds_per_token == pytest.approx(6.0 / 500)


def test_what_is_over_is_over() -> None:
    """And the other way round: whoever left does not stay accused."""
    before = after(500, 30.0, waited=6.0, thief=100)
    now = after(2000, 90.0, waited=6.0, thief=100)
    assert rules(now) == ["preempted"]
    assert rules(since(now, before)) == ["nothing_wrong"]
    (gone,) = (since(now, before).threads or threads()).phases
    assert gone.stalled == {}


def test_nothing_lies_between_a_snapshot_and_itself() -> None:
    for whole in (snapshots.busy(), snapshots.idle(), snapshots.sampled()):
        none = since(whole, whole)
        assert none.window_seconds == 0.0
        assert not any(call.count or call.seconds for call in none.calls)
        assert not any(op.calls or op.seconds or op.flops or op.bytes for op in none.ops)
        assert not any(graph.count or graph.seconds for graph in none.graphs)
        assert judge(none) == ()
    hostile = snapshots.hostile()
    assert since(hostile, hostile).target == hostile.target


def test_absent_stays_absent() -> None:
    """D12: what the earlier one did not have counts from the beginning, what the later one lacks is
    not made up."""
    now, before = snapshots.busy(), snapshots.busy()
    before = dataclasses.replace(before, ops=(), graphs=(), threads=None)
    assert since(now, before).ops == now.ops
    assert since(dataclasses.replace(now, threads=None, faults=None, clocks=None), before).threads is None


def test_what_was_forgotten_and_began_anew_is_not_negative() -> None:
    """Bounded tables forget rows: a smaller figure is a new row's."""
    now, before = after(3, 0.1), after(500, 30.0)
    assert since(now, before).tokens.decode == 3
    assert since(now, before).calls[0].seconds == 0.1


def test_clocks_are_those_of_the_last_looks() -> None:
    core = CoreClock(0, 100, 3000.0, 3000.0)
    now = dataclasses.replace(
        plain(), clocks=Clocks((dataclasses.replace(core, samples=110, mean_mhz=2800.0),))
    )
    before = dataclasses.replace(plain(), clocks=Clocks((core,)))
    (recent,) = (since(now, before).clocks or Clocks(())).cores
    # 110 looks at 2,800 are 308,000; the first 100 were 300,000.
    assert recent.samples == 10
    assert recent.mean_mhz == pytest.approx(800.0)


def test_faults_by_tensor() -> None:
    def faults(majors: int, seconds: float) -> cz.Faults:
        counts = (cz.FaultCount("major", "model", majors, seconds), cz.FaultCount("minor", "kv", 5))
        tensors = (cz.TensorFaults("blk.0.ffn_up.weight", 0, "model", majors, 2, seconds, "gguf"),)
        return cz.Faults(counts, tensors, None, 1)

    now, before = (dataclasses.replace(plain(), faults=faults(n, n / 10)) for n in (12, 10))
    recent = since(now, before).faults
    assert recent is not None
    assert (recent.of("major"), recent.of("minor"), recent.unrecorded) == (2, 0, 0)
    assert [(t.tensor, t.majors, t.minors) for t in recent.tensors] == [("blk.0.ffn_up.weight", 2, 0)]


@settings(deadline=None)
@given(st.lists(st.floats(0.1, 20), min_size=1, max_size=60))
def test_the_window_is_as_long_as_asked(steps: list[float]) -> None:
    """However looks come: all there is at first, then the asked time and no more than half of it and a
    step besides; and few snapshots are kept."""
    recent, now, per_second = Recent(30.0), 0.0, 50
    for step in steps:
        now += step
        found = recent.look(now, after(int(now * per_second), now))
        length = found.window_seconds
        assert length == now or 30.0 - 1e-6 <= length <= 45.0 + 2 * max(steps)
        assert found.tokens.decode == pytest.approx(length * per_second, abs=2)
        assert len(recent._bases) <= 4
