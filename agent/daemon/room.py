# SPDX-License-Identifier: Apache-2.0
"""How much this process may still take: file descriptors, and memory of its control group.

What is not needed for tokens and operators is left out where it would not leave enough for them.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path

from ..target.quota import memory_left

MIB = 1 << 20


def lacking(descriptors: int, memory: int, *, proc: Path = Path("/proc")) -> str | None:
    """Why there is no room for so many descriptors and bytes; None where there is."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    try:
        used = len(os.listdir(proc / "self" / "fd"))
    except OSError:
        used = limit  # not even for this look is one left
    if limit != resource.RLIM_INFINITY and limit - used < descriptors:
        return f"of {limit} file descriptors {max(0, limit - used)} are free, and {descriptors} have to be"
    free = memory_left(proc)
    if free is not None and free < memory:
        left, wanted = free / MIB, memory / MIB
        return f"of this control group's memory {left:.0f} MiB are left, and {wanted:.0f} have to be"
    return None
