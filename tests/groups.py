# SPDX-License-Identifier: Apache-2.0
"""Control groups of a test's own, versions 1 and 2: with a CPU quota, with little memory."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path("/sys/fs/cgroup")
PERIOD_US = 100_000


@contextlib.contextmanager
def _group(choices: Mapping[Path, Mapping[str, str]], why: str) -> Iterator[Path]:
    """A group below the first parent that takes its settings; skips where there is none."""
    for parent, settings in choices.items():
        folder = parent / f"profinfer-test-{os.getpid()}"
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            for name, text in settings.items():
                (folder / name).write_text(text)
        except OSError:
            folder.rmdir()
            continue
        try:
            yield folder
        finally:
            until = time.monotonic() + 30
            while folder.exists() and time.monotonic() < until:
                try:
                    folder.rmdir()  # once the last process in it is gone
                except OSError:
                    time.sleep(0.02)
        return
    pytest.skip(why)


def quota_group(cores: float) -> contextlib.AbstractContextManager[Path]:
    """May use so many cores, and gets them before whatever else runs here."""
    quota = int(cores * PERIOD_US)
    one = {"cpu.cfs_period_us": f"{PERIOD_US}", "cpu.cfs_quota_us": f"{quota}", "cpu.shares": "262144"}
    two = {"cpu.max": f"{quota} {PERIOD_US}", "cpu.weight": "10000"}
    return _group({ROOT / "cpu": one, ROOT: two}, "no control group with a CPU quota can be made here")


def small_group(limit: int) -> contextlib.AbstractContextManager[Path]:
    """May have so many bytes of memory."""
    one, two = {"memory.limit_in_bytes": f"{limit}"}, {"memory.max": f"{limit}"}
    return _group({ROOT / "memory": one, ROOT: two}, "no control group with a memory limit can be made here")


def throttled_seconds(group: Path) -> float:
    """How long its CPUs were stopped, in sum, as the kernel counts it."""
    counts = dict(line.split() for line in (group / "cpu.stat").read_text().splitlines())
    nanoseconds = counts.get("throttled_time")
    return int(nanoseconds) / 1e9 if nanoseconds is not None else int(counts["throttled_usec"]) / 1e6
