# SPDX-License-Identifier: Apache-2.0
"""Figures that need no pairs: how fast rings are drained, how long attaching takes, what a hit
costs by calibration, and which functions bpftrace has to attach to."""

from __future__ import annotations

import ctypes
import hashlib
import json
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from profinferd.agent.kernel.ring import RingDecoder
from tests.engines import profiler
from tests.engines.fetch import CACHE
from tests.engines.profiler import Profiler

from .target import PREFILL, Target
from .watchers import BpfTrace, library_of

_RING = 4 << 20
_RECORD = np.dtype([("ts", "<u8"), ("seq", "<u4"), ("node", "<u4")])
_HEADER = 8


def drained_a_second(seconds: float = 1.0) -> float:
    """Records of 16 bytes a second that are drained and decoded: full rings of 4 MiB, median."""
    stride = _HEADER + _RECORD.itemsize
    count = _RING // stride
    data = np.zeros(_RING, np.uint8)
    data[: count * stride].view(np.uint32)[:: stride // 4] = _RECORD.itemsize
    consumer, producer = ctypes.c_uint64(0), np.zeros(1, np.uint64)
    ring = RingDecoder(consumer, producer, data, _RECORD)
    rates: list[float] = []
    until = time.monotonic() + seconds
    while time.monotonic() < until or len(rates) < 3:
        consumer.value, producer[0] = 0, count * stride
        begun = time.perf_counter()
        got = ring.drain()
        rates.append(len(got) / (time.perf_counter() - begun))
        if len(got) != count:
            raise RuntimeError(f"{len(got)} of {count} records drained")
    return statistics.median(rates)


def attach_seconds(target: Target, times: int, options: tuple[str, ...]) -> tuple[float, float]:
    """Medians while the target decodes on one thread: from beginning to look until all probes
    are in place, and from the start of the program until then."""
    attach, start = [], []
    with Profiler(target.pid, *options):
        pass  # the first on a machine calibrates, and files come from the disk
    with target.busy(1):
        for _ in range(times):
            begun = time.monotonic()
            with Profiler(target.pid, *options) as watching:
                start.append(time.monotonic() - begun)
                attach.append(watching.attach_ms / 1e3)
    return statistics.median(attach), statistics.median(start)


def calibration(folder: Path) -> dict[str, Any] | None:
    """What ``profinferd calibrate`` says, None where it cannot."""
    code, out, _ = profiler.run("calibrate", "--format", "json", "--quiet", "--state", str(folder))
    if code != 0:
        return None
    found = json.loads(out)
    assert isinstance(found, dict)
    return found


def functions_called(target: Target) -> Mapping[str, float]:
    """Of the functions of all operators, those that this model calls, and how often a token (on
    one thread). Counted with bpftrace, once for a library: it takes a minute to let go of them.
    """
    library = library_of(target.pid)
    key = hashlib.sha256(library.read_bytes() + str(target.options.model).encode()).hexdigest()[:16]
    kept = CACHE / f"bench-functions-{key}.json"
    if kept.exists():
        found = json.loads(kept.read_text())
        assert isinstance(found, dict)
        return found
    tracer = BpfTrace(library, count=True)
    try:
        window = target.window(1)
        calls = window.tokens + 2 + 1  # and those after the prompt, and the prompt itself
        counted = {name: count / calls for name, count in tracer.sums().items()}
    finally:
        tracer.stop()
    if not counted:
        raise RuntimeError(f"bpftrace counted nothing in {PREFILL + window.tokens} tokens")
    kept.write_text(json.dumps(counted))
    return counted
