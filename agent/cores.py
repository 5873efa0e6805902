# SPDX-License-Identifier: Apache-2.0
"""Which cores are alike: capacity, top frequency, SMT siblings and clusters, from sysfs."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from pathlib import Path

from .model.causes import CoreKind

CPU = Path("/sys/devices/system/cpu")
_NAMES = {1: ("all",), 2: ("fast", "slow"), 3: ("fast", "middle", "slow")}
MAX_KINDS = 8


def core_kinds(folder: Path = CPU) -> tuple[CoreKind, ...]:
    """Kinds of cores, the fastest first; at most :data:`MAX_KINDS`, the last holding the rest.

    Cores of which sysfs says nothing (they are offline, say) count as of the first kind: a
    kind is only claimed where the kernel tells a difference.
    """
    groups: dict[tuple[int, float], list[int]] = {}
    silent: list[int] = []
    facts: dict[int, tuple[int | None, float | None, int | None]] = {}
    for cpu in sorted(int(p.name[3:]) for p in folder.glob("cpu[0-9]*") if p.name[3:].isdigit()):
        place = folder / f"cpu{cpu}"
        capacity = _number(place / "cpu_capacity")
        khz = _number(place / "cpufreq" / "cpuinfo_max_freq")
        siblings = _text(place / "topology" / "thread_siblings_list")
        facts[cpu] = (capacity, khz / 1000 if khz else None, len(cpu_list(siblings)) if siblings else None)
        if capacity is None and not khz:
            silent.append(cpu)
        else:
            groups.setdefault((capacity or 0, khz or 0), []).append(cpu)
    order = sorted(groups, reverse=True)
    lists = [groups[key] for key in order]
    if len(lists) > MAX_KINDS:
        lists = [*lists[: MAX_KINDS - 1], sorted(cpu for rest in lists[MAX_KINDS - 1 :] for cpu in rest)]
    if silent:
        lists = [sorted([*lists[0], *silent]), *lists[1:]] if lists else [silent]
    names = _NAMES.get(len(lists)) or tuple(f"kind{i}" for i in range(len(lists)))
    kinds = []
    for name, cpus in zip(names, lists, strict=True):
        capacity, mhz, smt = next((facts[cpu] for cpu in cpus if cpu not in silent), facts[cpus[0]])
        together, clusters = (
            _groups(folder, cpus, file) for file in ("thread_siblings_list", "cluster_cpus_list")
        )
        kinds.append(CoreKind(name, tuple(cpus), capacity, mhz, smt, together, clusters))
    return tuple(kinds)


def _groups(folder: Path, cpus: Sequence[int], file: str) -> tuple[tuple[int, ...], ...]:
    """Those of ``cpus`` that belong together by a file of their topology; none of one CPU alone."""
    found = {cpu_list(_text(folder / f"cpu{cpu}" / "topology" / file) or "") for cpu in cpus}
    return tuple(sorted(group for group in found if len(group) > 1))


def online_cpus(folder: Path = CPU) -> tuple[int, ...]:
    """CPUs that are online now (case C57: they come and go)."""
    return cpu_list(_text(folder / "online") or "0")


def kind_numbers(kinds: tuple[CoreKind, ...], count: int) -> list[int]:
    """Kind of each of ``count`` CPUs, as an index of ``kinds``; 0 for one that is in none."""
    numbers = [0] * count
    for number, kind in enumerate(kinds):
        for cpu in kind.cpus:
            if cpu < count:
                numbers[cpu] = number
    return numbers


def cpu_list(text: str) -> tuple[int, ...]:
    """The CPUs of a list as the kernel prints it ("0-3,8"); none for what is no list."""
    found: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.isdigit() and (not last or last.isdigit()):
            found += range(int(first), min(int(last or first), int(first) + 65535) + 1)
    return tuple(found)


def _text(path: Path) -> str | None:
    # Not read_text: the list of CPUs that are online is looked at every second, for as long as we watch.
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.read(fd, mmap.PAGESIZE).decode("ascii").strip()
        finally:
            os.close(fd)
    except (OSError, UnicodeDecodeError):
        return None  # this kernel does not say


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text is not None and text.isdigit() else None
