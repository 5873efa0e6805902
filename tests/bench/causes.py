# SPDX-License-Identifier: Apache-2.0
"""What the programs of the scheduler and of page faults cost: by the kernel's own clock.

A slowdown of a few tenths of a percent is less than the noise between two windows. The kernel
counts how long each program ran, so that is summed and compared with the time meanwhile.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from profinferd.agent.attach import Attachment
from profinferd.agent.kernel import bpfsys
from profinferd.agent.kernel.causes import Part

from .target import Target

_ENABLE_STATS = 32  # enum bpf_cmd
_RUN_TIME = 0  # enum bpf_stats_type


@dataclass(frozen=True, slots=True)
class Cost:
    """``share`` of one core that the programs ran, whoever's switches and faults they ran for;
    ``spans`` recorded and ``switches`` looked at in a second."""

    share: float
    spans: float
    switches: float


def cost(target: Target, seconds: float = 5.0) -> Cost | None:
    """While the target decodes on one thread; None where the kernel does not count."""
    try:
        counting = bpfsys.bpf(_ENABLE_STATS, bpfsys._attr("I4x", _RUN_TIME))
    except OSError:
        return None
    try:
        with Attachment.open(target.pid, ops="off") as attachment, target.busy(1):
            causes = attachment._causes
            parts: list[Part] = [part for part in (causes.sched, causes.faults) if part is not None]
            attachment.poll(0.5)
            before, begun = _spent(parts), time.monotonic()
            attachment.poll(seconds)
            after, ended = _spent(parts), time.monotonic()
        ns, switches, spans = (b - a for a, b in zip(before, after, strict=True))
        return Cost(ns / 1e9 / (ended - begun), spans / (ended - begun), switches / (ended - begun))
    finally:
        os.close(counting)


def _spent(parts: list[Part]) -> tuple[int, int, int]:
    """(ns of all programs, switches looked at, spans recorded)."""
    infos = {
        f"{part.object_name}.{name}": program.info()
        for part in parts
        for name, program in part._object.programs.items()
    }
    spans = sum(part.stats().get("spans", 0) for part in parts)
    switches = infos["sched.on_switch"].run_count if "sched.on_switch" in infos else 0
    return sum(info.run_time_ns for info in infos.values()), switches, spans
