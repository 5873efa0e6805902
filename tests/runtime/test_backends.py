# SPDX-License-Identifier: Apache-2.0
"""A backend that returns before it is done: handing over is short, the wait is long (case C08)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from profinferd.agent.model.snapshot import Snapshot
from tests.runtime.callvictims import Told, watch
from tests.runtime.cases import Engine, ahead, copied, engine
from tests.runtime.daemons import Daemon
from tests.victims.build import build

ROUNDS = 8


def figures(snapshot: Snapshot) -> dict[tuple[str, int], tuple[int, float]]:
    """Count and seconds by call and nodes."""
    return {
        (c.call, c.sums.get("nodes", 0) // max(c.count, 1)): (c.count, c.seconds or 0.0)
        for c in snapshot.engine_calls
    }


def program() -> Path:
    """What computes with two backends."""
    library = build("backends.c", shared=True)
    flags = ("-DPROGRAM", f"-L{library.parent}", "-lbackends", f"-Wl,-rpath,{library.parent}")
    return build("backends.c", cflags=flags, name="backend_program")


def test_enqueue_and_wait_are_told_apart() -> None:
    with Told([program()]) as victim, watch(victim.pid) as watched:
        # Until two backends have been seen to compute, nothing else is probed.
        victim.tell("1")
        assert {call for call, _ in figures(watched.snapshot())} == {"compute"}
        for _ in range(100):
            watched.poll(0.1)
            victim.tell("1")
            if any(call == "synchronize" for call, _ in figures(watched.snapshot())):
                break
        else:
            pytest.fail("the waits were never probed")
        ahead(victim.pid)
        before = figures(watched.snapshot())
        taken = float(victim.tell(str(ROUNDS)))
        after = figures(watched.snapshot())
    new = {key: (after[key][0] - n, after[key][1] - s) for key, (n, s) in before.items()}
    assert {key: n for key, (n, _) in new.items()} == {
        ("compute", 30): ROUNDS, ("compute", 70): ROUNDS, ("synchronize", 0): ROUNDS, ("get", 0): ROUNDS,
    }  # fmt: skip
    computed, handed, waited = (new[key][1] for key in (("compute", 30), ("compute", 70), ("synchronize", 0)))
    assert computed >= ROUNDS * 0.010 and waited >= ROUNDS * 0.045
    assert handed < waited / 10
    # All of them together are the time by the program's own clock.
    assert sum(seconds for _, seconds in new.values()) == pytest.approx(taken, rel=0.05, abs=0.05)


def test_the_daemon_loads_programs_for_them_when_there_is_something_to_see(tmp_path: Path) -> None:
    """Not for an engine that has backends and computes on the CPU: the kernel verifies them for 0.2 s."""
    name = f"pfi-backends-{os.getpid()}"
    alone = copied(engine(), tmp_path, f"{name}-cpu")
    two = copied(program(), tmp_path, f"{name}-two")
    with Daemon(tmp_path / "daemon", f"{name}*") as daemon:
        daemon.scanned()
        with Engine(alone) as stub:
            daemon.wait_for(stub.pid)
            stub.order("run pos=0-3 out=3 us=20")
            stub.order("run pos=4 out=0 us=20")
            daemon.wait_for_tokens(stub.pid, 4, 1)
            loaded = daemon.programs()
            with Told([two]) as victim:
                daemon.wait_for(victim.pid)

                def seen(target: dict[str, Any]) -> bool:
                    victim.tell("1")
                    return bool((target["report"] or {}).get("engine_calls"))

                found = daemon.wait_for(victim.pid, seen)
                assert "compute" in {one["call"] for one in found["report"]["engine_calls"]}
                more = daemon.programs() - loaded
            assert loaded and more, "loaded only now"
