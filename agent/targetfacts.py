# SPDX-License-Identifier: Apache-2.0
"""What was found out about a target, in the words of the model."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from .model.snapshot import AttachFacts, LayoutFacts, Library, Target, TargetFacts
from .target.facts import TargetInfo
from .target.layout import Layout
from .target.process import Process

if TYPE_CHECKING:
    from .hooks import Attached


def facts_for_model(info: TargetInfo, layout: Layout | None, attached: Attached) -> TargetFacts:
    """The target as the session and the exporters see it; ``layout`` None: not known yet."""
    target = Target(
        pid=info.process.pid,
        exe=info.process.exe,
        engine=info.engine,
        model=info.models[0] if info.models else None,
        libraries=tuple(Library(f.path, f.build_id or None, f.role) for f in info.files),
        layout=LayoutFacts(layout.source, layout.name) if layout else LayoutFacts(None, None),
        attach=AttachFacts(attached.method, attached.op_source, attached.complete),
    )
    return TargetFacts(
        target=target,
        has_calls="call" in info.levels,
        has_graphs="graph" in info.levels,
        has_ops=attached.op_source is not None,
        age_seconds=age_seconds(info.process),
        busy=attached.busy,
    )


def age_seconds(process: Process) -> float:
    """How long ago the process started (its start time is in clock ticks after boot)."""
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - process.start_time / os.sysconf("SC_CLK_TCK"))
