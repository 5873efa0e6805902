# SPDX-License-Identifier: Apache-2.0
"""The machine's facts, and the target's memory as /proc says it."""

from __future__ import annotations

import contextlib
import os
import platform
import time

import numpy as np

from ..model.trace import Machine, Table

MEMORY = np.dtype(
    [
        ("ts", "<i8"),
        ("rss_anon", "<i8"),
        ("rss_file", "<i8"),
        ("rss_shmem", "<i8"),
        ("swap", "<i8"),
        ("minor_faults", "<i8"),
        ("major_faults", "<i8"),
        ("threads", "<i4"),
    ]
)
"""Kind "memory": bytes of the target that are resident (or swapped out), and its faults so far."""

_STATUS = {"RssAnon": "rss_anon", "RssFile": "rss_file", "RssShmem": "rss_shmem", "VmSwap": "swap"}
_TEXT = 200


def this_machine(pid: int | None) -> Machine:
    """What a reader of the recording may want to know of here; ``pid``: the target."""
    uname = platform.uname()
    cpus = None
    with contextlib.suppress(OSError):
        cpus = len(os.sched_getaffinity(pid or 0))
    return Machine(
        uname.node[:_TEXT], uname.release[:_TEXT], uname.machine[:_TEXT], _cpu_name(), cpus, _memory(),
        os.sysconf("SC_PAGE_SIZE"),
    )  # fmt: skip


def memory_of(pid: int) -> Table:
    """One row of MEMORY; none when the process is gone, or has let go of its memory to end."""
    has_memory = False
    row = np.zeros(1, MEMORY)
    row["ts"] = time.monotonic_ns()
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
            for line in file:
                name, _, rest = line.partition(":")
                if name in _STATUS:
                    has_memory = True
                    row[_STATUS[name]] = int(rest.split()[0]) << 10
                elif name == "Threads":
                    row["threads"] = int(rest)
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        row["minor_faults"], row["major_faults"] = int(fields[7]), int(fields[9])
    except (OSError, IndexError, ValueError):
        return row[:0]
    return row if has_memory else row[:0]


def _cpu_name() -> str | None:
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name.strip() in ("model name", "Model", "Hardware"):
                return value.strip()[:_TEXT]
    return None


def _memory() -> int | None:
    with contextlib.suppress(OSError, ValueError), open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            if line.startswith("MemTotal:"):
                return int(line.split()[1]) << 10
    return None
