# SPDX-License-Identifier: Apache-2.0
"""A real CUDA program on a real device, watched: what was seen against what the device counted.

Run by ``tests/gpu/check.sh``. The kernel adds one to every element, so the device itself says
how often it ran. ``--program`` and ``--runtime`` only say where both are, made and fetched; the
variables ``GPU_PROGRAM`` and ``GPU_RUNTIME`` name others.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from profinferd.agent.errors import ProfinferError
from profinferd.exporters.table import TableExporter
from tests.engines import cudart
from tests.runtime.callvictims import Told, watch
from tests.victims.build import build


def expect(what: str, seen: object, wanted: object) -> bool:
    """Says whether both are the same."""
    same = seen == wanted
    print(f"ok   {what}: {seen}" if same else f"FAIL {what}: {seen}, not {wanted}")
    return same


def program_path() -> Path:
    """The program, compiled."""
    if made := os.environ.get("GPU_PROGRAM"):
        return Path(made)
    source = (Path(__file__).parent / "program.c").read_text()
    return build(source, cflags=("-ldl",), name="gpu_program")


def runtime_path() -> Path:
    """NVIDIA's library."""
    given = os.environ.get("GPU_RUNTIME")
    return Path(given) if given else cudart.fetch()


def check(runtime: Path, env: Mapping[str, str] | None = None) -> bool:
    """Whether all is as it should be; ``runtime``: NVIDIA's library."""
    program = program_path()
    with Told([program, runtime], env=env) as victim, watch(victim.pid) as watched:
        victim.tell("prepare")
        ran = int(victim.tell("launch 1000"))
        victim.tell("runtime 50")
        graphs = int(victim.tell("graph 30")) - ran
        seen = watched.snapshot()
    print(TableExporter(110).render(seen))
    calls = seen.engine_calls

    def count(call: str, state: str = "outermost") -> int:
        return sum(c.count for c in calls if c.call == call and c.state == state and c.status == 0)

    def total(call: str, name: str, state: str = "outermost") -> int:
        return sum(c.sums.get(name, 0) for c in calls if c.call == call and c.state == state)

    names = {c.labels.get("kernel") for c in calls if c.call == "launch_kernel" and c.state == "outermost"}
    good = [
        expect("launches against the device's own count", count("launch_kernel"), ran),
        expect("name of the kernel", names, {"add_one"}),
        expect("launches recorded into the graph", count("launch_kernel", "recorded"), 20),
        expect("kernels in graphs against the device's own count", total("launch_graph", "kernels"), graphs),
        expect("allocations", count("allocate"), 50 + 1),
        expect("bytes allocated", total("allocate", "bytes"), (50 << 20) + 65536 * 4),
        expect("runtime: bytes copied", total("copy", "bytes"), 50 * 65536 * 4),
        expect("driver: bytes copied", total("copy_host_to_device", "bytes"), 65536 * 4),
        expect("waits", count("wait_for_stream") >= 2 and count("wait_for_device") >= 1, True),
        expect("lost", seen.lost.total, 0),
    ]
    return all(good)


def main() -> int:
    """0: all as it should be."""
    for option, path in (("--program", program_path), ("--runtime", runtime_path)):
        if option in sys.argv[1:]:
            print(path())
            return 0
    try:
        return 0 if check(runtime_path()) else 1
    except ProfinferError as error:
        print(f"FAIL this machine does not let us watch: {error.what} ({error.remedy})")
        return 1


if __name__ == "__main__":
    sys.exit(main())
