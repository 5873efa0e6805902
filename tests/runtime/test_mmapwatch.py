# SPDX-License-Identifier: Apache-2.0
"""Code that processes map, announced by the kernel on each CPU, also on one that was offline (C57)."""

from __future__ import annotations

import fcntl
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from profinferd.agent.kernel.mmapwatch import MmapWatch

_DISABLE = 0x2400 | 1  # PERF_EVENT_IOC_DISABLE: an event stops as it does when its CPU goes offline


@pytest.fixture
def watch() -> Iterator[MmapWatch]:
    opened = MmapWatch()
    try:
        yield opened
    finally:
        opened.close()


def announced(watch: MmapWatch, cpu: int) -> bool:
    """Whether a program that starts on this CPU is."""
    while True:
        watch.read()
        lost = watch.lost
        with subprocess.Popen(["sleep", "0"], preexec_fn=lambda: os.sched_setaffinity(0, {cpu})) as program:
            program.wait()
            seen = program.pid in {mapped.pid for mapped in watch.read()}
        if watch.lost == lost:  # else others started more meanwhile than there is room for
            return seen


def test_events_that_stopped_are_opened_anew(watch: MmapWatch) -> None:
    cpu = max(os.sched_getaffinity(0))
    assert announced(watch, cpu)
    assert not watch.renew()
    time.sleep(0.002)
    assert not watch.renew(), "they are all alive"
    fcntl.ioctl(watch._rings[cpu].fd, _DISABLE)
    assert not announced(watch, cpu)
    watch.renew()  # finds out how long it has been enabled
    assert watch.renew() and announced(watch, cpu)
    time.sleep(0.002)
    assert not watch.renew()


def test_processors_that_come_and_go(tmp_path: Path) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    online = tmp_path / "online"
    online.write_text(f"{cpus[0]}\n")
    watch = MmapWatch(online)
    try:
        assert set(watch._rings) == {cpus[0]}
        online.write_text(",".join(map(str, cpus)))
        assert watch.renew() == (len(cpus) > 1) and set(watch._rings) == set(cpus)
        assert announced(watch, cpus[-1])
        online.write_text(f"{cpus[-1]}\n")
        watch.renew()
        assert set(watch._rings) == {cpus[-1]} and len(watch.descriptors()) == 1
    finally:
        watch.close()
