# SPDX-License-Identifier: Apache-2.0
"""A real XLA plugin behind the PJRT C API, stripped: programs, runs, bytes, errors, completion.

Truth is the client's own clock around the plugin's functions, and what it was told to do.
Cases C47, C48.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from profinferd.agent.model.calldata import ProgramTotal
from profinferd.agent.model.snapshot import Snapshot
from tests.engines import pjrt
from tests.engines.compare import missed
from tests.runtime.callvictims import Told, only, watch
from tests.tries import in_one_of, timed

ATTEMPTS = 6


@pytest.fixture(scope="module")
def stock() -> pjrt.Pjrt:
    try:
        return pjrt.fetch()
    except RuntimeError as error:
        pytest.skip(f"no PJRT plugin to test with: {error}")


def started(stock: pjrt.Pjrt) -> Told:
    victim = stock.site.parent.parent / "tests" / "engines" / "pjrt_victim.py"
    return Told([stock.python, victim, stock.site, stock.plugin], env={"OMP_NUM_THREADS": "1"})


@pytest.fixture
def client(stock: pjrt.Pjrt) -> Iterator[Told]:
    with started(stock) as told:
        yield told


def took(ours: float | None, theirs: float) -> None:
    """What we say is what the client's own clock says; on a busy machine, in one of several attempts."""
    timed(ours == pytest.approx(theirs, rel=0.05, abs=0.03), (ours, theirs))


def tell(client: Told, line: str) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(client.tell(line))
    return answer


def program(snapshot: Snapshot, name: str | None) -> ProgramTotal:
    found = [p for p in snapshot.programs if p.name == name]
    assert len(found) == 1, snapshot.programs
    return found[0]


def test_programs_of_a_stripped_plugin(stock: pjrt.Pjrt) -> None:
    """Attached after the plugin was loaded: its functions are found in the table in memory."""

    def once() -> None:
        with started(stock) as client:
            programs_of(client)

    in_one_of(ATTEMPTS, once)


def programs_of(client: Told) -> None:
    about = tell(client, "load")
    with watch(client.pid) as watched:
        compiled = tell(client, "compile chain 384")
        tell(client, "block transformer")
        ran, block = tell(client, "run chain 5"), tell(client, "run transformer 7")
        code = tell(client, "bad")["code"]
        seen = watched.snapshot()
    version = ".".join(str(n) for n in about["version"])
    assert any(f"version {version}, {about['slots']} functions" in note for note in seen.notes), seen.notes
    assert seen.target.engine == "pjrt"
    chain = program(seen, "chain")
    assert (chain.compiles, chain.executions, chain.completions, chain.errors) == (1, 5, 5, 0)
    took(chain.compile_seconds, compiled["PJRT_Client_Compile"])
    took(chain.dispatch_seconds, ran["PJRT_LoadedExecutable_Execute"])
    took(chain.completion_seconds, ran["done"])
    # Two inputs, each taken once however often it is used; one result to the host.
    assert (chain.bytes_in, chain.bytes_out) == (2 * 384 * 384 * 4, 384 * 384 * 4)
    transformer = program(seen, "transformer")
    assert (transformer.compiles, transformer.executions, transformer.completions) == (1, 7, 7)
    assert (transformer.bytes_in, transformer.bytes_out) == ((32 + 64) * 64 * 4, 32 * 64 * 4)
    took(transformer.completion_seconds, block["done"])
    bad = program(seen, "bad")
    assert (bad.errors, bad.executions, bad.compile_seconds, bad.completions) == (1, 0, None, None)
    assert only(seen, "error_code", code={2: "unknown", 3: "invalid_argument"}[code]).count == 1
    assert only(seen, "buffer_from_host").sums["bytes"] == 2 * 384 * 384 * 4 + (32 + 64) * 64 * 4
    assert not missed(seen.lost.by_kind)


def test_threads_that_run_at_once(client: Told) -> None:
    tell(client, "load")
    tell(client, "compile shared 128")
    with watch(client.pid) as watched:
        ran = tell(client, "threads shared 10")
        seen = watched.snapshot()
    # It was compiled before we looked: nobody has said its name since.
    (one,) = seen.programs
    assert (one.compiles, one.compile_seconds, one.executions, one.completions) == (0, None, 30, 30)
    # The clients' own clocks also count how long each waits for its turn with the interpreter.
    assert one.completion_seconds is not None and 0 < one.completion_seconds < ran["done"]
    assert (one.bytes_in, one.bytes_out) == (3 * 2 * 128 * 128 * 4, 3 * 128 * 128 * 4)
    assert not missed(seen.lost.by_kind)


def test_a_buffer_that_no_program_made_is_no_programs(client: Told) -> None:
    """Each of them is a new one: as programs they would be as many entries as calls."""
    tell(client, "load")
    with watch(client.pid) as watched:
        tell(client, "echo 20")
        seen = watched.snapshot()
    back = [c for c in seen.engine_calls if c.call == "buffer_to_host" and c.sums.get("bytes_out")]
    assert [(c.count, c.sums["bytes_out"], c.labels.get("program")) for c in back] == [(20, 20 * 256, None)]
    assert seen.programs == ()
