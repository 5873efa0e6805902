# SPDX-License-Identifier: Apache-2.0
"""Threads, who took their cores, barriers and page faults, for the page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...agent.model.eventdata import CpuTime, Events
from ...agent.model.trace import Trace
from ..text import clean
from ..text import seconds as in_words

CAUSES = ("preempted", "yielded", "throttled", "wakeup", "futex", "fault", "io", "sleep", "other", "unknown")
READY = 4
_MAX = 200


def document(trace: Trace) -> dict[str, Any]:
    """The panel; every table is empty where it was not recorded, and a note says so."""
    threads = getattr(trace.snapshot, "threads", None)
    faults = getattr(trace.snapshot, "faults", None)
    return {
        "note": "Threads were not watched in this recording." if threads is None else None,
        "causes": list(CAUSES),
        "ready": READY,
        "work": None if threads is None else threads.work_seconds,
        **_threads(threads),
        **_faults(faults),
        **_cpu(trace.snapshot.cpu_time),
        **_counters(trace.snapshot.hardware),
    }


def _threads(threads: Any) -> dict[str, Any]:
    if threads is None:
        return {"rows": [], "takers": [], "stalled": [], "quota": None, "barriers": []}
    idle = {share.tid: share.idle_share for share in threads.barriers or ()}
    return {
        "rows": [
            {
                "tid": one.tid, "leader": one.leader, "running": one.work_run_seconds,
                "waits": _by_cause(one.seconds), "counts": _by_cause(one.waits),
                "migrations": one.migrations, "idle": idle.get(one.tid), "facts": _about(one),
            }
            for one in threads.threads[:_MAX]
        ],
        "takers": [
            {
                "comm": clean(t.comm, 32), "pid": t.pid, "times": t.preemptions,
                "seconds": t.seconds, "own": t.own,
            }
            for t in threads.takers[:_MAX]
        ],
        "stalled": [
            {
                "phase": p.phase, "calls": p.calls, "seconds": p.seconds,
                "by": _by_cause(p.stalled), "worst": p.worst,
            }
            for p in threads.phases
        ],
        "quota": _quota(threads.quota),
        "barriers": [
            {
                "op": b.op, "dtype": b.dtype, "role": b.role, "phase": b.phase, "ops": b.ops,
                "wall": b.wall_seconds, "idle": b.idle_share, "late": _late(b.late),
            }
            for b in (threads.op_barriers or ())[:_MAX]
        ],
    }  # fmt: skip


def _cpu(cpu: CpuTime | None) -> dict[str, Any]:
    if cpu is None:
        return {"cpu": [], "cpu_note": None}
    note = f"{cpu.samples:,} samples at {cpu.hertz} Hz"
    if cpu.lost:
        note += f", {cpu.lost:,} lost"
    return {"cpu": [[part.part, part.seconds, part.share] for part in cpu.parts], "cpu_note": f"{note}."}


def _counters(events: Events | None) -> dict[str, Any]:
    if events is None:
        return {"counters": [], "derived": []}
    derived = [
        ("instructions a cycle", events.ipc, "1"),
        ("cycles stalled", events.stall_ratio, "ratio"),
        ("read from memory", events.dram_bytes, "B"),
    ]
    return {
        "counters": [[e.event, e.value, e.running_ratio, e.reason] for e in events.events[:_MAX]],
        "derived": [[what, value, unit] for what, value, unit in derived if value is not None],
    }


def _late(by: Mapping[str, float]) -> str:
    order = sorted(by.items(), key=lambda item: -item[1])
    parts = (f"{why} {in_words(seconds)}" for why, seconds in order[:2] if seconds > 0)
    return ", ".join(parts).replace(" us", " µs")


def _by_cause(values: Mapping[str, float]) -> list[float]:
    return [values.get(cause, 0) for cause in CAUSES]


def _about(one: Any) -> str:
    parts = [
        f"policy {one.policy}" if one.policy else "",
        f"nice {one.nice}" if one.nice else "",
        f"CPUs {','.join(map(str, one.cpus[:16]))}" if one.cpus else "",
        "" if one.alive else "has ended",
    ]
    return ", ".join(part for part in parts if part)


def _quota(quota: Any) -> str | None:
    if quota is None or quota.cores is None:
        return None
    said = f"Its control group may use {quota.cores:g} cores"
    if quota.throttled_seconds is not None:
        said += f" and was throttled for {quota.throttled_seconds:.3f} s"
    return said + "."


def _faults(faults: Any) -> dict[str, Any]:
    if faults is None:
        return {"faults": [], "tensors": [], "faults_note": "Page faults were not watched in this recording."}
    parts = []
    if not any(c.count for c in faults.counts):
        parts.append("No page fault happened.")
    if faults.fault_around_bytes:
        parts.append(
            f"One minor fault in a file maps up to {faults.fault_around_bytes:,} bytes: faults are not pages."
        )
    if faults.unrecorded:
        parts.append(f"{faults.unrecorded:,} faults have no address.")
    return {
        "faults": [[c.kind, c.mapping, c.count, c.seconds] for c in faults.counts if c.count][:_MAX],
        "tensors": [
            {
                "name": clean(t.tensor, 80), "layer": -1 if t.layer is None else t.layer,
                "mapping": t.mapping, "majors": t.majors, "minors": t.minors, "seconds": t.seconds,
            }
            for t in faults.tensors[:_MAX]
        ],
        "faults_note": " ".join(parts) or None,
    }  # fmt: skip
