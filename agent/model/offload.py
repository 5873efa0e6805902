# SPDX-License-Identifier: Apache-2.0
"""Where the time of an engine's calls goes when other backends take part of the work. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from .calldata import CallTotal, Offload, OffloadPart

CPU = "CPU"
SCHEDULING = "scheduling"
_AROUND = "model_call"
_LIBRARY = re.compile(r"ggml-([a-z0-9]+)")
_NUMBERED = re.compile(r"backend \d+")
_HOST = frozenset({"base", "cpu"})
"""Libraries that hold the CPU's buffers and kernels."""


def offload(calls: Sequence[CallTotal], before: Iterable[CallTotal] = ()) -> Offload | None:
    """The parts of the time since ``before``, when waits and copies began to be watched.

    None: no call of the engine was seen since.
    """
    earlier = {_key(one): one for one in before}
    devices = _devices(calls)
    count, in_calls = 0, 0.0
    sums: dict[tuple[str, str | None], list[float]] = {}
    for one in calls:
        if one.state != "outermost" or one.seconds is None:
            continue
        old = earlier.get(_key(one))
        seconds = one.seconds - (old.seconds or 0.0 if old else 0.0)
        times = one.count - (old.count if old else 0)
        if one.call == _AROUND:
            count, in_calls = count + times, in_calls + seconds
            continue
        part = sums.setdefault(_part(one, devices), [0.0, 0.0, 0.0])
        part[0 if one.labels.get("during") == "model call" else 1] += seconds
        part[2] += times
    if not count:
        return None
    parts = [OffloadPart(part, backend, a, b, int(n)) for (part, backend), (a, b, n) in sums.items() if n]
    rest = in_calls - sum(one.in_calls_seconds for one in parts)
    parts.append(OffloadPart(SCHEDULING, None, max(rest, 0.0), 0.0, count))
    parts.sort(key=lambda p: -(p.in_calls_seconds + p.between_calls_seconds))
    between = sum(one.between_calls_seconds for one in parts)
    return Offload(count, in_calls, between, tuple(parts))


def _key(one: CallTotal) -> tuple[object, ...]:
    labels = tuple(sorted((k, v) for k, v in one.labels.items() if k != "instance"))
    return (one.call, one.state, one.status, labels, one.labels.get("instance"))


def _devices(calls: Iterable[CallTotal]) -> dict[str, str]:
    """The device of each library that has one only: what a call says that knows both."""
    found: dict[str, set[str]] = {}
    for one in calls:
        if "backend" in one.labels and "instance" in one.labels:
            found.setdefault(_library(str(one.labels["backend"])), set()).add(str(one.labels["instance"]))
    return {library: min(names) for library, names in found.items() if len(names) == 1}


def _part(one: CallTotal, devices: Mapping[str, str]) -> tuple[str, str | None]:
    places = [one.labels.get(name) for name in ("backend", "to", "from")]
    names = [_library(str(place)) for place in places if place is not None]
    away = next((name for name in names if name not in _HOST), None)
    backend: str | None = CPU if names else None
    if away is not None:
        instance = str(one.labels.get("instance") or devices.get(away, ""))
        backend = away if not instance or _NUMBERED.fullmatch(instance) else instance
    if one.kind == "compute":
        return ("compute" if backend == CPU else "handover"), backend
    return one.kind, backend


def _library(file: str) -> str:
    found = _LIBRARY.search(file)
    return found[1] if found else file
