# SPDX-License-Identifier: Apache-2.0
"""Measuring what this machine can do at most, and keeping it.

A peak is the best of some repeats, as with STREAM: what else runs can only make one slower.
Memory is measured on more of it than any cache holds; threads are not pinned, as an engine's are not.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from ..errors import MachineError
from ..model.peaks import Peak, Peaks
from . import bpfsys, peak_code
from .calibration import keep, kept_bytes, machine_name

SCHEMA = 2
REPEATS = 40
MEMORY_REPEATS = 20
RUN_SECONDS = 0.005
"""How long one repeat of arithmetic takes: short, so that on a busy machine some repeat has all
its threads on a CPU at once."""
BUSY_SHARE = 0.5
"""Of the CPUs: a load from which on it is said that others are busy."""
CACHES, FEWEST_CACHES = 4, 2
"""How many times the caches the memory is that is read, and the least with which it is memory that
is measured."""
UNKNOWN_CACHE = 32 << 20
MIN_BYTES = 24 << 20
MAX_BYTES = 3 << 30
_PATIENCE = 60.0
_CHILD = Path(__file__).with_name("peak_child.py")
_NAME = "peaks.json"

Progress = Callable[[str], None]


class _Child:
    """A process of ours that runs the code. Close it."""

    def __init__(self, image: bytes, memory_bytes: int) -> None:
        self._fd = os.memfd_create("profinferd-peaks", os.MFD_CLOEXEC)
        try:
            os.write(self._fd, image)
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_CHILD), str(self._fd), str(len(image)), str(memory_bytes)],
                pass_fds=[self._fd], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL, bufsize=0,
            )  # fmt: skip
        except OSError as error:
            os.close(self._fd)
            raise MachineError(
                f"cannot make a process to measure peaks in: {bpfsys.strerror(error.errno or 0)}", ""
            ) from error

    def best(self, **task: Any) -> float:
        """Seconds of the fastest repeat. Raises MachineError."""
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise ValueError("the process was closed")
        with contextlib.suppress(BrokenPipeError):
            stdin.write(json.dumps(task).encode() + b"\n")
        answer = b""
        until = time.monotonic() + _PATIENCE
        while not answer.endswith(b"\n"):
            left = until - time.monotonic()
            ready, _, _ = select.select([stdout], [], [], max(0.0, left))
            some = stdout.read(1 << 16) if ready else None
            if not some:
                why = "took too long" if some is None else f"ended with {self._process.wait(_PATIENCE)}"
                raise MachineError(f"the process that measures {task['kind']} {why}", "")
            answer += some
        return float(min(json.loads(answer)))

    def close(self) -> None:
        """End the process."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        self._process.kill()
        self._process.wait()
        os.close(self._fd)

    def __enter__(self) -> _Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def measure_peaks(
    threads: Sequence[int] | None = None,
    *,
    room: int | None = None,
    progress: Progress = lambda line: None,
) -> Peaks:
    """Peaks for each number of ``threads`` (1, 2, 4, … and all CPUs we may use). Takes some seconds.

    ``room``: bytes of memory that may be taken, None: no limit (see :func:`memory_room`). Where they
    are too few for what the caches hold, memory is left out, with the reason.
    Raises MachineError where there is no code for this processor, or it cannot be run.
    """
    try:
        choice = peak_code.choose(cpu_features())
    except KeyError as error:
        raise MachineError(f"peaks cannot be measured on {error.args[0]}", "") from None
    counts = sorted(set(threads)) if threads is not None else thread_counts(len(os.sched_getaffinity(0)))
    size, reason = memory_size(cache_bytes(), room)
    if reason is not None:
        progress(reason)
    image, where = peak_code.image(choice)
    found = []
    if os.getloadavg()[0] > BUSY_SHARE * len(os.sched_getaffinity(0)):
        progress("other programs are busy here: the peaks will be too low if they stay so")
    with _Child(image, size) as child:
        for count in counts:
            progress(f"measuring memory and arithmetic with {count} thread{'s' if count > 1 else ''}")
            rates: dict[str, float | None] = {"read": None, "triad": None}
            for kind, arrays in (("read", 1), ("triad", 3)) if size else ():
                part = size // arrays // count // (4 * peak_code.BLOCK) * 4 * peak_code.BLOCK
                task = {"kind": kind, "at": where[kind], "threads": count, "rounds": 1}
                rates[kind] = arrays * part * count / child.best(**task, repeats=MEMORY_REPEATS)
            for kind, ops in (("fma", choice.fma_ops), ("int8", choice.int8_ops)):
                if ops is None:
                    rates[kind] = None
                    continue
                task = {"kind": kind, "at": where[kind], "threads": count}
                short = child.best(**task, rounds=20_000, repeats=3)
                rounds = max(20_000, round(20_000 * RUN_SECONDS / max(short, 1e-6)))
                rates[kind] = ops * rounds * count / child.best(**task, rounds=rounds, repeats=REPEATS)
            found.append(Peak(count, rates["read"], rates["triad"], rates["fma"], rates["int8"]))
    return Peaks(
        tuple(found), machine_name(), time.time(), choice.name, reason=reason, cache_bytes=cache_bytes()
    )


def thread_counts(cpus: int) -> list[int]:
    """1, 2, 4, … and ``cpus`` itself."""
    counts = [1 << n for n in range(max(cpus, 1).bit_length()) if 1 << n <= cpus]
    return sorted({*counts, max(cpus, 1)})


def memory_size(cache: int | None, room: int | None) -> tuple[int, str | None]:
    """(bytes to read, None), or (0, why memory cannot be measured).

    Four times the caches; half of that where there is no room. Less would tell how fast the caches
    are, and be taken for memory.
    """
    cache = cache or UNKNOWN_CACHE
    wanted = min(max(CACHES * cache, MIN_BYTES), MAX_BYTES)
    size = wanted if room is None else min(wanted, room)
    if size < FEWEST_CACHES * cache:
        return 0, (
            f"memory bandwidth cannot be measured: {size >> 20} MiB may be used here, the caches hold "
            f"{cache >> 20} MiB and twice that is needed; run profinferd calibrate without a limit on memory"
        )
    return size // (1 << 16) * (1 << 16), None


def memory_room(available: int | None, group: int | None) -> int | None:
    """Bytes that may be taken, where ``available`` are free on the machine, of which a quarter is
    ours, and ``group`` are left to our control group, which is ours alone. None: no limit."""
    limits = [n for n in (available and available // 4, group and group * 3 // 4) if n is not None]
    return min(limits, default=None)


def cpu_features(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Features of the first processor listed ("flags" on x86, "Features" on arm64)."""
    with contextlib.suppress(OSError), cpuinfo.open(errors="replace") as file:
        for line in file.read(1 << 16).splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("flags", "Features"):
                return frozenset(value.split())
    return frozenset()


def cache_bytes(root: Path = Path("/sys/devices/system/cpu")) -> int | None:
    """Bytes of all last-level caches together; None where the system does not say."""
    sizes: dict[str, int] = {}
    for cpu in root.glob("cpu[0-9]*"):
        last: tuple[int, str, int] | None = None
        for index in cpu.glob("cache/index[0-9]*"):
            try:
                level = int((index / "level").read_text())
                shared = (index / "shared_cpu_list").read_text().strip()
                text = (index / "size").read_text().strip()
                units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
                unit = units.get(text[-1:], 1)
                size = int(text[:-1] if unit > 1 else text) * unit
            except (OSError, ValueError):
                continue
            if last is None or level > last[0]:
                last = (level, shared, size)
        if last is not None:
            sizes[last[1]] = last[2]
    return sum(sizes.values()) or None


def available_bytes(meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """MemAvailable; None where the system does not say."""
    with contextlib.suppress(OSError, ValueError):
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return None


# ---- kept in a state folder ------------------------------------------------------------------


class _Kept(msgspec.Struct):
    schema: int
    peaks: Peaks


def load_peaks(folder: Path) -> Peaks:
    """The kept peaks if they hold for this machine; else none, with the reason."""
    raw = kept_bytes(folder / _NAME)
    if raw is None:
        return Peaks((), reason="the machine's peaks are not measured: run profinferd calibrate")
    try:
        kept = msgspec.json.decode(raw, type=_Kept)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Peaks((), reason="the kept peaks cannot be read: run profinferd calibrate again")
    peaks = kept.peaks
    rates = [
        rate
        for p in peaks.by_threads
        for rate in (
            p.read_bytes_per_second, p.triad_bytes_per_second, p.flops_per_second, p.int8_ops_per_second,
        )
        if rate is not None
    ]  # fmt: skip
    counts = [p.threads for p in peaks.by_threads]
    sane = all(0 < rate < math.inf for rate in rates) and counts == sorted(set(counts)) and min(counts) > 0
    if kept.schema != SCHEMA or not counts or not sane:
        return Peaks((), reason="the kept peaks cannot be: run profinferd calibrate again")
    if peaks.machine != machine_name():
        return Peaks((), reason="the kept peaks are another machine's: run profinferd calibrate")
    return peaks


def store_peaks(folder: Path, peaks: Peaks) -> None:
    """Keep them, readable by us alone. Raises MachineError."""
    keep(folder / _NAME, msgspec.json.encode(_Kept(SCHEMA, peaks)))
