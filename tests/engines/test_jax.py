# SPDX-License-Identifier: Apache-2.0
"""jax as the client of a plugin, and on its own: what is seen of either.

Truth is what the client was told to do and its own clock around it. Cases C47, C48.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from profinferd.agent.errors import TargetError
from profinferd.agent.model.calldata import ProgramTotal
from profinferd.agent.model.snapshot import Snapshot
from tests.engines import jaxclient, pjrt
from tests.engines.compare import missed
from tests.engines.jax_victim import STEPS
from tests.runtime.callvictims import Told, watch
from tests.tries import in_one_of, timed

ATTEMPTS = 6
VICTIM = Path(jaxclient.__file__).with_name("jax_victim.py")


@pytest.fixture
def start() -> Iterator[Callable[[bool], Told]]:
    try:
        site, stock = jaxclient.fetch(), pjrt.fetch()
    except RuntimeError as error:
        pytest.skip(f"no jax or no plugin to test with: {error}")
    begun: list[Told] = []

    def one(with_plugin: bool) -> Told:
        more = [stock.plugin] if with_plugin else []
        begun.append(Told([stock.python, VICTIM, site, *more]))
        return begun[-1]

    yield one
    for told in begun:
        told.__exit__(None, None, None)


def by_size(snapshot: Snapshot) -> dict[int | None, ProgramTotal]:
    """jax hands programs over as bytecode, in which no name is found; their sizes differ."""
    return {p.size: p for p in snapshot.programs if p.executions > 1}


def test_jax_with_a_plugin(start: Callable[[bool], Told]) -> None:
    """It never awaits: it asks whether a result is ready, and else wants to be called back."""
    in_one_of(ATTEMPTS, lambda: with_a_plugin(start))


def with_a_plugin(start: Callable[[bool], Told]) -> None:
    client = start(True)
    with watch(client.pid) as watched:
        client.tell("compile")
        for _ in range(60):
            client.tell("serve 1")
            watched.poll(0.2)
            if any(c.call == "ready_callback" for c in watched.snapshot().engine_calls):
                break
        else:
            pytest.fail("the callbacks were never probed")
        before = by_size(watched.snapshot())
        told: dict[str, Any] = json.loads(client.tell("serve 12"))
        seen = watched.snapshot()
        spread = json.loads(client.tell("spread"))
        copied = [c for c in watched.snapshot().engine_calls if c.call.startswith("copy_to_")]
    after = {p.phase_guess: p for p in by_size(seen).values()}
    # Which is which is guessed from how long they take, in sum, too: whoever stops one for long hides the
    # other behind it.
    timed(set(after) == {"prefill", "decode"}, seen.programs)
    assert any("a guess" in note for note in seen.notes)
    for phase, name, count in (("prefill", "slow", 12), ("decode", "quick", 12 * STEPS)):
        one, old = after[phase], before[after[phase].size]
        assert one.compiles == 1 and one.cold == 1 and one.errors == 0
        runs = one.executions - old.executions
        done = (one.completions or 0) - (old.completions or 0)
        assert (runs, done) == (count, count), (phase, seen.programs)
        seconds = (one.completion_seconds or 0.0) - (old.completion_seconds or 0.0)
        # The client's own clock also has what jax does before it hands over and after it was told.
        assert 0 < seconds <= told[name] * 1.02
    assert [c.count for c in copied] == [1] and spread["devices"] > 1
    assert not missed(seen.lost.by_kind)


def test_jax_on_its_own_cpu_backend(start: Callable[[bool], Told]) -> None:
    """It has no plugin and no table of functions: said, not shown as an idle engine."""
    client = start(False)
    client.tell("compile")
    with pytest.raises(TargetError, match="no inference engine"):
        watch(client.pid)
