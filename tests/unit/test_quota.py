# SPDX-License-Identifier: Apache-2.0
"""CPU quotas of control groups, from made-up files of both versions."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from profinferd.agent.target.quota import group_times, memory_left


def system(folder: Path, cgroup: str, mounts: str, files: dict[str, str]) -> Path:
    (folder / "proc" / "5").mkdir(parents=True)
    (folder / "proc" / "self").mkdir()
    (folder / "proc" / "5" / "cgroup").write_text(cgroup)
    (folder / "proc" / "self" / "mounts").write_text(mounts.replace("ROOT", str(folder)))
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder / "proc"


def test_version_1(tmp_path: Path) -> None:
    proc = system(
        tmp_path,
        "7:memory:/box\n3:cpu,cpuacct:/box/inner\n0::/\n",
        "cgroup2 ROOT/unified cgroup2 rw 0 0\ncgroup ROOT/cpu cgroup rw,cpu,cpuacct 0 0\n",
        {
            "cpu/box/inner/cpu.cfs_quota_us": "50000\n",
            "cpu/box/inner/cpu.cfs_period_us": "100000\n",
            "cpu/box/inner/cpu.stat": "nr_periods 40\nnr_throttled 30\nthrottled_time 1500000000\n",
            "cpu/box/cpu.cfs_quota_us": "-1\n",
            "cpu/box/cpu.cfs_period_us": "100000\n",
        },
    )
    times = group_times(5, proc)
    assert times is not None
    assert (times.cores, times.throttled_seconds, times.throttled_periods, times.periods) == (
        0.5,
        1.5,
        30,
        40,
    )


def test_version_2_and_a_tighter_parent(tmp_path: Path) -> None:
    """The parent allows less: it is the one that throttles."""
    proc = system(
        tmp_path,
        "0::/pod/app\n",
        "cgroup2 ROOT/fs cgroup2 rw 0 0\n",
        {
            "fs/pod/cpu.max": "20000 100000\n",
            "fs/pod/cpu.stat": "usage_usec 1\nnr_periods 9\nnr_throttled 8\nthrottled_usec 700000\n",
            "fs/pod/app/cpu.max": "max 100000\n",
            "fs/pod/app/cpu.stat": "nr_periods 0\nnr_throttled 0\nthrottled_usec 0\n",
        },
    )
    times = group_times(5, proc)
    assert times is not None
    assert (times.cores, times.throttled_seconds, times.throttled_periods) == (0.2, 0.7, 8)


def test_no_quota(tmp_path: Path) -> None:
    proc = system(
        tmp_path, "0::/app\n", "cgroup2 ROOT/fs cgroup2 rw 0 0\n", {"fs/app/cpu.max": "max 100000\n"}
    )
    times = group_times(5, proc)
    assert times is not None and times.cores is None and times.throttled_seconds is None


@pytest.mark.parametrize("cgroup", ["", "0::/../../etc\n", "0::/missing\n", "nonsense\n", "3:cpu\n"])
def test_no_group(tmp_path: Path, cgroup: str) -> None:
    proc = system(tmp_path, cgroup, "cgroup2 ROOT/fs cgroup2 rw 0 0\n", {"etc/x": ""})
    assert group_times(5, proc) is None
    assert group_times(6, proc) is None


# ---- memory -----------------------------------------------------------------------------

V2 = "cgroup2 ROOT/fs cgroup2 rw 0 0\n"
V1 = "cgroup ROOT/memory cgroup rw,memory 0 0\ncgroup ROOT/cpu cgroup rw,cpu 0 0\n"
MIB = 1 << 20


def ours(folder: Path, cgroup: str, mounts: str, files: dict[str, str]) -> Path:
    """The same for this very process."""
    proc = system(folder, cgroup, mounts, files)
    (proc / "5").rename(proc / str(os.getpid()))
    return proc


def test_memory_that_a_service_may_still_take(tmp_path: Path) -> None:
    """Version 2: cached files count as free; a limit above that is tighter is the one that holds."""
    files = {
        "fs/system.slice/memory.max": "max\n",
        "fs/system.slice/memory.current": f"{900 * MIB}\n",
        "fs/system.slice/p.service/memory.max": f"{512 * MIB}\n",
        "fs/system.slice/p.service/memory.current": f"{200 * MIB}\n",
        "fs/system.slice/p.service/memory.stat": f"anon {90 * MIB}\ninactive_file {80 * MIB}\n",
    }
    cgroup = "0::/system.slice/p.service\n"
    assert memory_left(ours(tmp_path / "a", cgroup, V2, files)) == 392 * MIB
    files["fs/system.slice/memory.max"] = f"{1000 * MIB}\n"
    assert memory_left(ours(tmp_path / "b", cgroup, V2, files)) == 100 * MIB
    files["fs/system.slice/memory.max"] = f"{800 * MIB}\n"
    assert memory_left(ours(tmp_path / "c", cgroup, V2, files)) == 0


def test_memory_on_version_1(tmp_path: Path) -> None:
    files = {
        "memory/box/memory.limit_in_bytes": f"{256 * MIB}\n",
        "memory/box/memory.usage_in_bytes": f"{100 * MIB}\n",
        "memory/box/memory.stat": f"inactive_file 5\ntotal_inactive_file {20 * MIB}\n",
        "memory/memory.limit_in_bytes": "9223372036854771712\n",
        "memory/memory.usage_in_bytes": f"{4000 * MIB}\n",
    }
    assert memory_left(ours(tmp_path, "7:memory:/box\n3:cpu:/\n", V1, files)) == 176 * MIB


def test_memory_of_a_container_that_sees_its_own_group_alone(tmp_path: Path) -> None:
    """Version 1 names the machine's path, which is not there; what is mounted is the container's."""
    files = {
        "memory/memory.limit_in_bytes": f"{256 * MIB}\n",
        "memory/memory.usage_in_bytes": f"{56 * MIB}\n",
    }
    assert memory_left(ours(tmp_path / "1", "7:memory:/docker/0123\n", V1, files)) == 200 * MIB
    files = {"fs/memory.max": f"{256 * MIB}\n", "fs/memory.current": f"{56 * MIB}\n"}
    assert memory_left(ours(tmp_path / "2", "0::/\n", V2, files)) == 200 * MIB


@pytest.mark.parametrize("files", [{}, {"fs/box/memory.max": "max\n", "fs/box/memory.current": "5\n"}])
def test_no_limit_of_memory(tmp_path: Path, files: dict[str, str]) -> None:
    assert memory_left(ours(tmp_path, "0::/box\n", V2, {"fs/box/x": "", **files})) is None
