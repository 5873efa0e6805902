# SPDX-License-Identifier: Apache-2.0
"""The threads of a process, from ``/proc/PID/task``."""

from __future__ import annotations

import os
from collections.abc import Iterable


def threads_of(pid: int) -> set[int]:
    """Those that are listed now; none when it is gone.

    Not always all of them: the kernel goes from thread to thread, and where the one that it stands on
    ends just then, the list ends there.
    """
    try:
        return {int(name) for name in os.listdir(f"/proc/{pid}/task")}
    except (FileNotFoundError, ProcessLookupError):
        return set()


def gone(pid: int, tids: Iterable[int], listed: Iterable[int]) -> list[int]:
    """Of ``tids``, those that have ended: that they are not in a list is not enough, see above."""
    there = set(listed)
    return [tid for tid in tids if tid not in there and not os.path.exists(f"/proc/{pid}/task/{tid}")]
