# SPDX-License-Identifier: Apache-2.0
"""Kinds of cores from a made-up sysfs: no big.LITTLE machine was at hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from profinferd.agent.cores import MAX_KINDS, core_kinds, cpu_list, kind_numbers, online_cpus


def machine(folder: Path, *cores: tuple[int | None, int | None, str]) -> Path:
    """``cores``: capacity, top frequency in kHz, SMT siblings."""
    for cpu, (capacity, khz, siblings) in enumerate(cores):
        place = folder / f"cpu{cpu}"
        (place / "cpufreq").mkdir(parents=True)
        (place / "topology").mkdir()
        if capacity is not None:
            (place / "cpu_capacity").write_text(f"{capacity}\n")
        if khz is not None:
            (place / "cpufreq" / "cpuinfo_max_freq").write_text(f"{khz}\n")
        (place / "topology" / "thread_siblings_list").write_text(siblings + "\n")
    (folder / "cpufreq").mkdir()
    (folder / "online").write_text("0-1,3\n")
    return folder


def test_four_little_and_four_big(tmp_path: Path) -> None:
    little, big = (446, 1_800_000, "0"), (1024, 2_400_000, "4")
    kinds = core_kinds(machine(tmp_path, *[little] * 4, *[big] * 4))
    assert [(k.name, k.cpus, k.capacity, k.max_mhz, k.smt) for k in kinds] == [
        ("fast", (4, 5, 6, 7), 1024, 2400.0, 1),
        ("slow", (0, 1, 2, 3), 446, 1800.0, 1),
    ]
    assert kind_numbers(kinds, 10) == [1, 1, 1, 1, 0, 0, 0, 0, 0, 0]
    assert online_cpus(tmp_path) == (0, 1, 3)


def test_cores_that_are_alike(tmp_path: Path) -> None:
    """And one that is offline (C57), of which nothing is said: no kind of its own."""
    kinds = core_kinds(
        machine(tmp_path, (None, 3_000_000, "0-1"), (None, 3_000_000, "0-1"), (None, None, "2"))
    )
    assert [(k.name, k.cpus, k.smt) for k in kinds] == [("all", (0, 1, 2), 2)]


def test_threads_of_a_core_and_clusters(tmp_path: Path) -> None:
    """Two cores of two threads, and two clusters of two small cores each."""
    big = [(1024, 3_000_000, siblings) for siblings in ("0,2", "1,3", "0,2", "1,3")]
    small = [(512, 2_000_000, str(cpu)) for cpu in range(4, 8)]
    folder = machine(tmp_path, *big, *small)
    for cpu in range(8):
        text = ("0-3", "4-5", "6-7")[max(0, cpu // 2 - 1)]
        (folder / f"cpu{cpu}/topology/cluster_cpus_list").write_text(text + "\n")
    fast, slow = core_kinds(folder)
    assert (fast.smt, fast.siblings, fast.clusters) == (2, ((0, 2), (1, 3)), ((0, 1, 2, 3),))
    assert (slow.smt, slow.siblings, slow.clusters) == (1, (), ((4, 5), (6, 7)))


def test_nothing_is_said(tmp_path: Path) -> None:
    (kind,) = core_kinds(machine(tmp_path, (None, None, "0"), (None, None, "1")))
    assert (kind.name, kind.cpus, kind.capacity, kind.max_mhz) == ("all", (0, 1), None, None)


def test_many_kinds(tmp_path: Path) -> None:
    """More than there is room for: the slowest share one."""
    kinds = core_kinds(machine(tmp_path, *[(1000 - n, None, str(n)) for n in range(20)]))
    assert len(kinds) == MAX_KINDS
    assert sorted(cpu for k in kinds for cpu in k.cpus) == list(range(20))
    assert kinds[0].cpus == (0,) and len(kinds[-1].cpus) == 13


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("0", (0,)), ("0-2,5", (0, 1, 2, 5)), ("", ()), ("x-y", ()), ("3-", (3,)), ("1-,nan,4", (1, 4))],
)
def test_lists(text: str, cpus: tuple[int, ...]) -> None:
    assert cpu_list(text) == cpus
