# SPDX-License-Identifier: Apache-2.0
"""CUDA's interfaces over a stand-in driver: launches, bytes, waits, memory, graphs, by known numbers.

Cases C45 (functions taken by address, runtime over driver), C46 (graphs).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from profinferd.agent.model.calldata import CallTotal
from profinferd.agent.model.snapshot import Snapshot
from tests.runtime import cuda_stand_in
from tests.runtime.callvictims import Told, only, recorded, watch


@pytest.fixture
def victim() -> Iterator[Told]:
    with Told([cuda_stand_in.program()]) as told:
        yield told


def launches(snapshot: Snapshot, **labels: object) -> list[CallTotal]:
    return [
        c for c in snapshot.engine_calls
        if c.call == "launch_kernel" and all(c.labels.get(k) == v for k, v in labels.items())
    ]  # fmt: skip


@pytest.mark.parametrize("method", ["auto", "multi"])
def test_the_driver(victim: Told, method: str) -> None:
    with watch(victim.pid, method=method) as watched:
        victim.tell("names")
        waited = float(victim.tell("driver 40"))
        seen = watched.snapshot()
    assert seen.target.engine == "cuda"
    grid = {"grid_x": 32, "grid_y": 16, "grid_z": 2, "block_x": 128, "block_y": 4, "block_z": 1}
    assert only(seen, "launch_kernel", kernel="matmul_f16", **grid).count == 40
    small = {"grid_x": 7, "grid_y": 1, "grid_z": 1, "block_x": 64, "block_y": 2, "block_z": 1}
    assert only(seen, "launch_kernel", kernel="softmax", **small).count == 40
    assert only(seen, "launch_kernel", kernel="softmax", status=1).count == 1
    assert only(seen, "copy_host_to_device").sums == {"bytes": 4000}
    assert only(seen, "copy_device_to_host").sums == {"bytes": 96}
    assert only(seen, "fill_32_bits").sums == {"elements": 512}
    wait = only(seen, "wait_for_stream")
    assert wait.count == 1 and wait.seconds is not None and 0.020 <= wait.seconds <= waited
    assert seen.lost.total == 0


def test_the_runtime_over_the_driver_counts_once(victim: Told) -> None:
    with watch(victim.pid) as watched:
        victim.tell("runtime 30")
        seen = watched.snapshot()
    shape = {"grid_x": 5, "grid_y": 6, "grid_z": 7, "block_x": 8, "block_y": 9, "block_z": 10}
    outer = [c for c in launches(seen, **shape) if c.state == "outermost"]
    assert [c.count for c in outer] == [30]
    # Which function it is, the runtime says by an address of the program, the driver by its name.
    assert str(outer[0].labels["kernel"]).startswith("cuda_program+0x")
    assert only(seen, "launch_kernel", state="inner", kernel="of_the_runtime", **shape).count == 30
    assert [(c.count, c.status) for c in launches(seen, grid_x=0) if c.state == "outermost"] == [(1, 9)]
    assert sum(c.count for c in launches(seen) if c.state == "outermost") == 31
    assert only(seen, "copy", direction="host_to_device").sums == {"bytes": 1024}
    assert only(seen, "copy_host_to_device", state="inner").sums == {"bytes": 1024}
    wait, inner = only(seen, "wait_for_device"), only(seen, "wait_for_device", state="inner")
    assert wait.seconds is not None and inner.seconds is not None and 0.010 <= inner.seconds <= wait.seconds
    assert seen.lost.total == 0


def test_memory_that_is_not_given_back(victim: Told) -> None:
    with watch(victim.pid) as watched:
        victim.tell("memory")
        seen = watched.snapshot()
    taken = [c for c in seen.engine_calls if c.call == "allocate" and c.state == "outermost"]
    freed = [c for c in seen.engine_calls if c.call == "free" and c.state == "outermost"]
    assert sum(c.sums["bytes"] for c in taken if c.status == 0) == 1000 + 2000 + 3000 + 500
    assert [(c.count, c.status) for c in taken if c.status] == [(1, 2)]
    assert sum(c.sums["freed_bytes"] for c in freed) == 1000 + 500
    (held,) = seen.engine_memory
    assert (held.engine, held.allocated_bytes, held.freed_bytes) == ("cuda", 6500, 1500)


def test_graphs_hold_what_was_captured(victim: Told) -> None:
    """C46: 50 launches between begin and end, then 100 launches of the graph, and one of a graph
    that was captured before anybody looked."""
    victim.tell("names")
    with watch(victim.pid) as watched:
        victim.tell("graph 100")
        seen = watched.snapshot()
    assert sum(c.count for c in launches(seen) if c.state == "recorded") == 50
    assert sum(c.count for c in launches(seen) if c.state == "outermost") == 1
    graphs = {c.count: c for c in seen.engine_calls if c.call == "launch_graph"}
    assert graphs[100].sums == {"kernels": 100 * 50}
    assert graphs[1].sums == {}  # how many is not known, and not 0


def test_functions_that_were_taken_by_address(victim: Told) -> None:
    """C45: the address has no name in any table; it is probed from about a second later on."""
    victim.tell("names")
    with watch(victim.pid) as watched:
        victim.tell("ask")
        assert [c.labels["function"] for c in watched.snapshot().engine_calls] == ["cuLaunchKernel"]
        for _ in range(100):
            watched.poll(0.1)
            victim.tell("pointer 1")
            if launches(watched.snapshot(), grid_x=3, block_x=33):
                break
        else:
            pytest.fail("the address was never probed")
        before = launches(watched.snapshot(), grid_x=3, block_x=33)[0].count
        victim.tell("pointer 25")
        after = launches(watched.snapshot(), grid_x=3, block_x=33)
    assert [c.count for c in after] == [before + 25]


def test_the_most_frequent_call_is_let_go_alone(victim: Told) -> None:
    """C18: what floods is watched in short trials; copies and waits of the same process always."""
    victim.tell("names")
    with watch(victim.pid, budget=0.01) as watched:
        for _ in range(100):
            victim.tell("paced 20000")
            watched.poll(0.1)
            if watched.snapshot().engine_calls_shed:
                break
        else:
            pytest.fail("the flood was never let go")
        flood = sum(c.count for c in launches(watched.snapshot(), grid_x=11))
        waits = sum(c.count for c in watched.snapshot().engine_calls if c.call == "wait_for_stream")
        victim.tell("flood 1000")
        victim.tell("driver 1")
        seen = watched.snapshot()
    assert sum(c.count for c in launches(seen, grid_x=11)) == flood
    assert only(seen, "wait_for_stream").count == waits + 1
    assert [one.call for one in seen.engine_calls_shed] == ["launch_kernel"]
    assert len([note for note in seen.notes if "short trials only" in note]) == 1


def test_a_flood_loses_nothing_in_the_sums(victim: Told) -> None:
    victim.tell("names")
    with watch(victim.pid) as watched:
        victim.tell("flood 200000")
        seen = watched.snapshot()
    (flood,) = launches(seen, grid_x=11)
    assert flood.count == 200_000
    assert seen.lost.total == 0


def test_copies_of_blocks_and_memory_in_rows(victim: Told) -> None:
    """Bytes are width times height times depth, where all of that is said."""
    with watch(victim.pid) as watched:
        victim.tell("blocks")
        seen = watched.snapshot()
    assert only(seen, "copy_of_blocks", to="device").sums == {"bytes": 700}
    assert only(seen, "copy_of_blocks", to="array").sums == {"bytes": 6000}
    assert only(seen, "copy_of_blocks", direction="device_to_host").sums == {"bytes": 48}
    assert only(seen, "copy_of_blocks", to=0, state="inner").sums == {"bytes": 48}
    # With an array the width is in elements, whose size the call does not say: absent, and apart.
    both = [c for c in seen.engine_calls if c.labels.get("direction") == "device_to_device"]
    assert sorted((c.count, dict(c.sums).get("bytes")) for c in both if not c.sums) == [(1, None)]
    assert [c.sums for c in both if c.sums] == [{"bytes": 64}]
    assert only(seen, "fill_16_bits").sums == {"elements": 100}
    # Six rows of 100 bytes take 512 each; freed, they are what was taken.
    assert only(seen, "allocate").sums == {"bytes": 6 * 512}
    (held,) = seen.engine_memory
    assert (held.allocated_bytes, held.freed_bytes) == (3072, 3072)


def test_names_of_kernels_that_the_runtime_launches(victim: Told) -> None:
    """As it was registered while watched; else as the program's symbols say, a second later."""
    with watch(victim.pid) as watched:
        victim.tell("register")
        victim.tell("runtime 3")
        seen = watched.snapshot()
        assert [c.labels["kernel"] for c in launches(seen, grid_x=77) if c.state == "outermost"] == [
            "_Z9real_namePf"
        ]
        for _ in range(100):
            watched.poll(0.1)
            (launch,) = [
                c for c in launches(watched.snapshot(), grid_x=5, grid_y=6) if c.state == "outermost"
            ]
            if not str(launch.labels["kernel"]).startswith("cuda_program+"):
                break
        else:
            pytest.fail("the program's symbol was never found")
        assert launch.labels["kernel"] == "kernel_stub" and launch.count == 3


def test_the_name_of_a_kernel_that_was_loaded_before(victim: Told) -> None:
    with watch(victim.pid) as watched:
        victim.tell("asks_name")
        seen = watched.snapshot()
    assert [c.labels["kernel"] for c in launches(seen, grid_x=78)] == ["loaded_before"]


def test_a_graph_that_is_updated_in_place(victim: Told) -> None:
    """It holds what the last capture held, whatever it was made of before anybody looked."""
    victim.tell("names")
    with watch(victim.pid) as watched:
        victim.tell("update 12")
        victim.tell("update 7")
        seen = watched.snapshot()
    graphs = [c for c in seen.engine_calls if c.call == "launch_graph"]
    assert sum(c.count for c in graphs) == 2 and sum(c.sums["kernels"] for c in graphs) == 19


def test_a_program_that_only_uses_cuda_is_recorded_from_soon_after_its_start(tmp_path: Path) -> None:
    """What engines compute with is watched by itself when none of them has come for two seconds."""
    path = tmp_path / "started.pfi"

    def talk(tell: Callable[[str], str]) -> None:
        tell("names")
        tell("driver 40")

    seen = recorded(cuda_stand_in.program(), path, talk, once_attached=True)
    assert only(seen, "launch_kernel", kernel="matmul_f16").count == 40
