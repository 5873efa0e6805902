# SPDX-License-Identifier: Apache-2.0
"""How near kernels come to what the machine can do: roofs, limits, and time that is wasted.

A roof has a slope (bytes per second, memory) and a flat part (operations per second). A kernel
whose nominal operations and bytes are known cannot be faster than the slower of the two, unless
its data stays in caches: then its ratio is above 1 and nothing is wasted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from .peaks import Peak, Peaks

Bound: TypeAlias = Literal["memory", "compute"]

_FLOAT_TYPES = frozenset({"f32", "f16", "bf16", "f64"})
"""Products with these weights are made of float multiply-adds; with all others, of 8-bit ones."""
_PRODUCTS = frozenset({"MUL_MAT", "MUL_MAT_ID"})


@dataclass(frozen=True, slots=True)
class Roof:
    """What one kind of kernel could reach; None where it was not measured."""

    bytes_per_second: float | None
    ops_per_second: float | None


@dataclass(frozen=True, slots=True)
class Reach:
    """Where kernels are under their roof.

    ``intensity``: operations per byte. ``ideal_seconds``: what the roof allows at best, by
    ``bound``. ``ratio`` = ideal / measured, above 1 where caches help. ``wasted_seconds``:
    measured time beyond the ideal, that is under-use weighted by time.
    """

    intensity: float | None
    ops_per_second: float | None
    bytes_per_second: float | None
    bound: Bound | None
    ideal_seconds: float | None
    ratio: float | None
    wasted_seconds: float | None


def roof(peak: Peak | None, op: str = "", dtype: str = "f32") -> Roof:
    """The roof of a kind of kernel. Products of quantised weights run on 8-bit multiply-adds
    where the machine's were measured, everything else on float ones. The slope is reading:
    kernels of a decoder read far more than they write."""
    if peak is None:
        return Roof(None, None)
    quantised = op in _PRODUCTS and dtype.lower() not in _FLOAT_TYPES
    ops = peak.int8_ops_per_second if quantised else None
    return Roof(_positive(peak.read_bytes_per_second), _positive(ops) or _positive(peak.flops_per_second))


def reach(seconds: float, flops: float | None, moved: float | None, of: Roof) -> Reach:
    """Where kernels that took ``seconds`` for ``flops`` and ``moved`` bytes are under a roof.

    Absent operations or bytes leave what follows from them absent. Known figures of which one
    is zero are bound by the other.
    """
    timed = seconds > 0
    ops_rate = flops / seconds if timed and flops is not None else None
    byte_rate = moved / seconds if timed and moved is not None else None
    intensity = flops / moved if flops is not None and moved else None
    by_memory = moved / of.bytes_per_second if moved is not None and of.bytes_per_second else None
    by_compute = flops / of.ops_per_second if flops is not None and of.ops_per_second else None
    if by_compute is None and flops == 0:
        by_compute = 0.0
    if by_memory is None or by_compute is None:
        return Reach(intensity, ops_rate, byte_rate, None, None, None, None)
    ideal = max(by_memory, by_compute)
    bound: Bound = "memory" if by_memory >= by_compute else "compute"
    return Reach(
        intensity, ops_rate, byte_rate, bound, ideal,
        ideal / seconds if timed else None,
        max(0.0, seconds - ideal),
    )  # fmt: skip


def absent_because(peaks: Peaks | None) -> str | None:
    """Why there is no roof; None when there is one."""
    if peaks is None:
        return "the machine's peaks are not in this recording: run profinferd calibrate before recording"
    if not peaks.by_threads:
        return peaks.reason or "the machine's peaks are not measured: run profinferd calibrate"
    if all(peak.read_bytes_per_second is None for peak in peaks.by_threads):
        return peaks.reason
    return None


def _positive(value: float | None) -> float | None:
    return value if value is not None and value > 0 else None
