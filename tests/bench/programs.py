# SPDX-License-Identifier: Apache-2.0
"""What our BPF programs take, by the kernel's own clock around each of their runs.

Slowdown below a percent drowns in the noise of a shared machine; this does not. It is a lower
bound: traps, tracepoints and colder caches come on top.
"""

from __future__ import annotations

import ctypes
import os
import re
import struct
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from profinferd.agent.kernel import bpfsys
from tests.engines.profiler import Profiler

from .target import Target

_SWITCH = Path("/proc/sys/kernel/bpf_stats_enabled")
_ID = re.compile(r"^prog_id:\s*(\d+)$", re.MULTILINE)
_NS = re.compile(r"^run_time_ns:\s*(\d+)$", re.MULTILINE)
_RUNS = re.compile(r"^run_cnt:\s*(\d+)$", re.MULTILINE)
_GET_FD_BY_ID = 13  # enum bpf_cmd
_NAME_AT, _NAME_BYTES = 64, 16  # in struct bpf_prog_info


@dataclass(frozen=True, slots=True)
class Ran:
    """One program: its runs a decoded token, ns a run, and its part of the wall clock."""

    name: str
    runs_a_token: float
    ns: float
    share: float


@contextmanager
def _counted() -> Iterator[None]:
    """The kernel looks at the clock around every BPF program meanwhile."""
    before = _SWITCH.read_text()
    _SWITCH.write_text("1")
    try:
        yield
    finally:
        _SWITCH.write_text(before)


def _number(pattern: re.Pattern[str], text: str) -> int | None:
    found = pattern.search(text)
    return int(found[1]) if found else None


def _name(number: int) -> str:
    attr = ctypes.create_string_buffer(struct.pack("=III", number, 0, 0), 12)
    fd = bpfsys.bpf(_GET_FD_BY_ID, attr)
    try:
        info = ctypes.create_string_buffer(_NAME_AT + _NAME_BYTES)
        ask = ctypes.create_string_buffer(struct.pack("=IIQ", fd, len(info), ctypes.addressof(info)), 16)
        bpfsys.bpf(bpfsys.OBJ_INFO, ask)
        return info.raw[_NAME_AT:].split(b"\0")[0].decode(errors="replace")
    finally:
        os.close(fd)


def run_times(pid: int) -> Mapping[str, tuple[int, int]]:
    """(runs, ns) so far of each program that a process holds open, by its name (15 characters)."""
    found: dict[int, tuple[int, int]] = {}
    for entry in Path(f"/proc/{pid}/fdinfo").iterdir():
        try:
            text = entry.read_text()
        except FileNotFoundError:
            continue  # closed meanwhile
        number, ns, runs = (_number(pattern, text) for pattern in (_ID, _NS, _RUNS))
        if number is not None and ns is not None and runs is not None:
            found[number] = (runs, ns)  # a link names its program too, without its times
    sums: dict[str, tuple[int, int]] = {}
    for number, (runs, ns) in found.items():
        before = sums.get(_name(number), (0, 0))
        sums[_name(number)] = (before[0] + runs, before[1] + ns)
    return sums


def time_by_program(target: Target, threads: int, options: tuple[str, ...], seconds: float) -> list[Ran]:
    """What each program takes while the target decodes for so long; dearest first."""
    with _counted(), Profiler(target.pid, *options) as profiler:
        target.rehearse(threads)
        tokens = target.tokens(threads)
        before, begun, done = run_times(profiler.pid), time.monotonic(), 0
        while time.monotonic() - begun < seconds:
            target.ask("go_on", threads=threads, tokens=tokens)
            done += tokens
        wall = time.monotonic() - begun
        after = run_times(profiler.pid)
    rows = []
    for name, (runs, ns) in after.items():
        old = before.get(name, (0, 0))
        if runs > old[0]:
            more, took = runs - old[0], ns - old[1]
            rows.append(Ran(name, more / done, took / more, took / 1e9 / wall))
    return sorted(rows, key=lambda row: -row.share)
