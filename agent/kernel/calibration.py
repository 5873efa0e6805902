# SPDX-License-Identifier: Apache-2.0
"""What probes cost on this machine: the figures, as JSON, and in a file that is kept.

They hold for one machine, one kernel, one way of attaching and one build of the programs;
kept figures of any other are as good as none.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import platform
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ...probes.build import find_object
from ..digest import blake2b
from ..errors import MachineError
from .bpfsys import strerror

SCHEMA = 2
"""1: hits by the clock on the wall, which a busy machine stretches."""
CAUSES = ("wait", "wait_record", "other_switch", "fault")
"""Kinds of hits that no probe makes; a kernel that does not time programs for us has none."""
_MAX_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Figure:
    """The median of ``samples`` measurements in ns, and an interval that holds it with 95 %.

    ns are never negative: what noise makes so is 0.
    """

    ns: float
    low: float
    high: float
    samples: int


@dataclass(frozen=True, slots=True)
class HitCost:
    """What one hit takes the target.

    ``kind``: ``op`` (thread 0, the node is found and recorded), ``other_thread`` (an op hit
    on any other thread), ``call`` and ``graph`` (entry *and* return of one), ``walk`` (one
    node of a graph that is not recognised by its uid); ``wait`` (a thread leaves its core, wakes
    another, is woken and comes back), ``wait_record`` (what a record of it costs besides),
    ``other_switch`` (of a process that is not watched), ``fault``.
    ``site``: ``emulated`` or ``stepped``, what the kernel does with the probed instruction; empty
    where none is probed (waits and faults).
    ``mode``: ``trace`` (a record each) or ``sum`` (added up); of ``op`` only, else empty.
    """

    kind: str
    site: str
    mode: str
    cost: Figure


@dataclass(frozen=True, slots=True)
class Calibration:
    """The figures of one machine, kernel and way of attaching.

    A cycle is arming two op probes and disarming them: ``wait`` is how long that takes who
    does it, ``stall`` how long the target stands still meanwhile. Both None when ``quick``.
    """

    method: str
    """session, multi or perf."""
    kernel: str
    """Release."""
    machine: str
    """Processor model and how many there are."""
    programs: str
    """Digest of the programs' object files."""
    made_at: float
    """Seconds since 1970."""
    seconds: float
    """How long it took."""
    quick: bool
    ns_per_hit: tuple[HitCost, ...]
    ns_per_cycle_wait: Figure | None
    ns_per_cycle_stall: Figure | None
    schema: int = SCHEMA

    def hit(self, kind: str, *, mode: str = "", site: str = "emulated") -> Figure | None:
        """The figure of one kind of hit, None when it was not measured.

        ``mode`` is of kind ``op`` only (empty: trace).
        """
        wanted = (kind, "" if kind in CAUSES else site, (mode or "trace") if kind == "op" else "")
        return next((h.cost for h in self.ns_per_hit if (h.kind, h.site, h.mode) == wanted), None)

    def to_json(self) -> str:
        """One JSON object, for people and for :meth:`from_json`."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2).decode() + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> Calibration:
        """Raises ValueError when it is not the JSON of sane figures."""
        try:
            found = msgspec.json.decode(text, type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(f"not a calibration: {error}") from error
        if found.schema != SCHEMA:
            raise ValueError(f"a calibration of schema {found.schema}")
        figures = [h.cost for h in found.ns_per_hit]
        figures += [f for f in (found.ns_per_cycle_wait, found.ns_per_cycle_stall) if f is not None]
        for figure in figures:
            if not (0 <= figure.low <= figure.ns <= figure.high < math.inf and figure.samples > 0):
                raise ValueError("a calibration with figures that cannot be")
        return found


def median_figure(values: Sequence[float]) -> Figure:
    """Median with the interval of order statistics (distribution-free; all of it below 6 values)."""
    ordered = sorted(max(0.0, v) for v in values)
    n = len(ordered)
    cut = max(0, math.floor((n - 1.96 * math.sqrt(n)) / 2))
    return Figure(_middle(ordered), ordered[cut], ordered[n - 1 - cut], n)


def _middle(ordered: Sequence[float]) -> float:
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


# ---- what figures hold for --------------------------------------------------------------


def machine_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """``AMD EPYC, 2 CPUs``; arm64 kernels give numbers instead of a name."""
    fields: dict[str, str] = {}
    with contextlib.suppress(OSError), cpuinfo.open(errors="replace") as file:
        for line in file.read(_MAX_BYTES).split("\n\n")[0].splitlines():
            key, _, value = line.partition(":")
            fields[key.strip()] = "".join(c for c in value.strip() if c.isprintable())[:100]
    parts = [fields[k] for k in ("CPU implementer", "CPU variant", "CPU part") if k in fields]
    model = fields.get("model name") or " ".join([platform.machine(), *parts])
    count = os.cpu_count() or 1
    return f"{model}, {count} CPU{'s' if count > 1 else ''}"


@functools.cache
def programs_digest(method: str) -> str:
    """Digest of the objects that are loaded with ``method``. FileNotFoundError when one was not built."""
    names = ("ggml_session" if method == "session" else "ggml", "sched", "faults")
    content = b"".join(find_object(name, platform.machine()).read_bytes() for name in names)
    return blake2b(content, digest_size=8).hexdigest()


# ---- kept in a state folder ---------------------------------------------------------------


def _path(folder: Path, method: str) -> Path:
    return folder / f"calibration-{method}.json"


def load(folder: Path, method: str, *, quick: bool = False) -> Calibration | None:
    """The kept figures if they hold here, else None: measure anew.

    Not taken: a damaged file, one that another user owns or may write, a link, and the
    figures of another machine, kernel or build. ``quick`` is content with quick figures.
    """
    raw = kept_bytes(_path(folder, method))
    if raw is None:
        return None
    try:
        found = Calibration.from_json(raw)
    except ValueError:
        return None
    here = (method, platform.release(), machine_name(), programs_digest(method))
    if (found.method, found.kernel, found.machine, found.programs) != here or (found.quick and not quick):
        return None
    return found


def store(folder: Path, calibration: Calibration) -> None:
    """Keep it: mode 0600, all of it or what was there before. Raises MachineError."""
    keep(_path(folder, calibration.method), calibration.to_json().encode())


def kept_bytes(path: Path) -> bytes | None:
    """What was kept there; None where there is nothing, or nothing that only we can have written."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        state = os.fstat(fd)
        if not stat.S_ISREG(state.st_mode) or state.st_uid != os.geteuid() or state.st_mode & 0o022:
            return None
        return os.read(fd, _MAX_BYTES)
    except OSError:
        return None
    finally:
        os.close(fd)


def keep(path: Path, content: bytes) -> None:
    """Write a file of mode 0600: all of it, or what was there before stays. Raises MachineError."""
    folder = path.parent
    temporary = path.with_name(f".{path.name}.{os.urandom(6).hex()}")
    try:
        folder.mkdir(mode=0o750, parents=True, exist_ok=True)
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            with open(fd, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(fd)
            os.rename(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        why = strerror(error.errno or 0)
        raise MachineError(
            f"the calibration cannot be kept in {folder}: {why}", "choose another folder with --state"
        ) from error
