# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's real runtime library on a machine without a device: the error codes are its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines import cudart
from tests.runtime.callvictims import Told, watch
from tests.victims.build import build

CALLS = ("allocate", "launch_kernel", "copy", "wait_for_device", "free")


def test_error_codes_of_the_real_runtime() -> None:
    try:
        library = cudart.fetch()
    except RuntimeError as error:
        pytest.skip(f"no CUDA runtime to test with: {error}")
    if list(Path("/dev").glob("nvidia[0-9]*")):
        pytest.skip("there is a device: the calls succeed (tests/gpu has its test)")
    program = build("cudart_calls.c", cflags=("-ldl",))
    with Told([program, library]) as victim, watch(victim.pid) as watched:
        statuses = [int(word) for word in victim.tell("25").split()]
        seen = watched.snapshot()
    assert all(statuses), "a call succeeded without a device"
    assert seen.target.engine == "cuda"
    for call, status in zip(CALLS, statuses, strict=True):
        found = [c for c in seen.engine_calls if c.call == call and c.state == "outermost"]
        assert [(c.count, c.status) for c in found] == [(25, status)], call
    (launch,) = [c for c in seen.engine_calls if c.call == "launch_kernel"]
    shape = ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z")
    assert [launch.labels[name] for name in shape] == [4, 3, 2, 64, 2, 1]
    assert str(launch.labels["kernel"]).startswith("cudart_calls+0x")
    assert seen.lost.total == 0
