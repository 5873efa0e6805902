# SPDX-License-Identifier: Apache-2.0
"""Limits of a process's control group, version 1 or 2: its CPU quota and how often it was throttled,
and the memory that is left to it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


@dataclass(frozen=True, slots=True)
class GroupTimes:
    """``cores``: the least that this group or one above it allows, None: no limit. Throttling
    since the group exists, None where it is not counted."""

    cores: float | None
    throttled_seconds: float | None
    throttled_periods: int | None
    periods: int | None


def group_times(pid: int, proc: Path = Path("/proc")) -> GroupTimes | None:
    """Of the process ``pid``; None where its control group is not to be found."""
    place = _folder(pid, "cpu", proc)
    if place is None:
        return None
    root, folder = place
    cores: float | None = None
    tight = folder
    for group in (folder, *folder.parents):
        here = _cores(group)
        if here is not None and (cores is None or here < cores):
            cores, tight = here, group
        if group == root:
            break
    stat = _stat(tight)
    nanoseconds = stat.get("throttled_time", stat.get("throttled_usec", -1) * 1000)
    return GroupTimes(
        cores,
        nanoseconds / 1e9 if nanoseconds >= 0 else None,
        stat.get("nr_throttled"),
        stat.get("nr_periods"),
    )


def memory_left(proc: Path = Path("/proc")) -> int | None:
    """Bytes that our own control group and those above it still allow; None: no limit.

    Files that are merely cached count as free: the kernel drops them first.
    """
    place = _folder(os.getpid(), "memory", proc, ours=True)
    if place is None:
        return None
    root, folder = place
    left: list[int] = []
    for group in (folder, *folder.parents):
        stat = _stat(group, "memory.stat")
        # Version 2, then 1, whose "no limit" is more than any machine has.
        for most, used, cached in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit, usage = _read(group / most).strip(), _read(group / used).strip()
            if limit.isdigit() and usage.isdigit() and int(limit) < 1 << 60:
                left.append(int(limit) - max(0, int(usage) - stat.get(cached, 0)))
        if group == root:
            break
    return max(0, min(left)) if left else None


def _folder(pid: int, controller: str, proc: Path, *, ours: bool = False) -> tuple[Path, Path] | None:
    """(where the controller is mounted, the folder of the process's group).

    ``ours``: the group is our own: in a container that sees no path of its own, what is mounted is it.
    """
    try:
        lines = (proc / str(pid) / "cgroup").read_text(errors="replace").splitlines()
        mounts = (proc / "self" / "mounts").read_text(errors="replace").splitlines()
    except OSError:
        return None
    found: dict[str, str] = {}
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        for one in controllers.split(","):
            found[one] = path  # "" is version 2
    for kind, name in (("cgroup", controller), ("cgroup2", "")):
        path = found.get(name, "..")
        if ".." in PurePosixPath(path).parts:
            continue
        for mount in mounts:
            fields = mount.split()
            if len(fields) > 3 and fields[2] == kind and (not name or name in fields[3].split(",")):
                root = Path(fields[1])
                folder = root / path.lstrip("/")
                if folder.is_dir():
                    return root, folder
                if ours and root.is_dir():
                    return root, root
    return None


def _cores(group: Path) -> float | None:
    words = _read(group / "cpu.max").split()  # version 2: "max 100000", "50000 100000"
    if len(words) == 2 and words[0].isdigit() and words[1].isdigit() and int(words[1]):
        return int(words[0]) / int(words[1])
    quota = _read(group / "cpu.cfs_quota_us").strip()  # version 1: -1 is no limit
    period = _read(group / "cpu.cfs_period_us").strip()
    if quota.isdigit() and period.isdigit() and int(period):
        return int(quota) / int(period)
    return None


def _stat(group: Path, name: str = "cpu.stat") -> dict[str, int]:
    out = {}
    for line in _read(group / name).splitlines():
        key, _, value = line.partition(" ")
        if value.isdigit():
            out[key] = int(value)
    return out


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
