# SPDX-License-Identifier: Apache-2.0
"""How much our process may still take, by made-up control groups and our own descriptors."""

from __future__ import annotations

import os
import resource
from pathlib import Path

from profinferd.agent.daemon.room import MIB, lacking


def made_up(tmp_path: Path, kind: str, groups: dict[str, tuple[str, int, int]], group: str = "/a/b") -> Path:
    """A /proc that says where we are. ``groups``: path -> (limit, used, of that read files)."""
    mount = tmp_path / "mount"
    v2 = kind == "cgroup2"
    names = ("memory.max", "memory.current") if v2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    for path, (limit, used, files) in groups.items():
        folder = mount / path.lstrip("/")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / names[0]).write_text(f"{limit}\n")
        (folder / names[1]).write_text(f"{used}\n")
        word = "inactive_file" if v2 else "total_inactive_file"
        (folder / "memory.stat").write_text(f"cache 5\n{word} {files}\nodd\n")
    proc = tmp_path / "proc"
    (proc / str(os.getpid())).mkdir(parents=True)
    (proc / "self" / "fd").mkdir(parents=True)
    (proc / str(os.getpid()) / "cgroup").write_text(f"{'0:' if v2 else '7:memory'}:{group}\n")
    (proc / "self" / "mounts").write_text(f"x {mount} {kind} rw{'' if v2 else ',memory'} 0 0\n")
    return proc


def test_more_used_than_allowed_is_nothing_left(tmp_path: Path) -> None:
    """A limit that was lowered while it was used."""
    proc = made_up(tmp_path, "cgroup2", {"/a/b": (str(10 * MIB), 12 * MIB, 0)})
    why = lacking(0, MIB, proc=proc)
    assert why == "of this control group's memory 0 MiB are left, and 1 have to be"


def test_descriptors_are_ours(tmp_path: Path) -> None:
    """Against the limit and the table of this very process."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    used = len(os.listdir("/proc/self/fd")) - 1  # the listing itself has one
    assert lacking(limit - used - 16, 0) is None
    why = lacking(limit + 1, 0)
    assert why is not None and why.startswith(f"of {limit} file descriptors ")


def test_a_machine_without_control_groups(tmp_path: Path) -> None:
    (tmp_path / "self" / "fd").mkdir(parents=True)
    assert lacking(1, 1 << 40, proc=tmp_path) is None
