# SPDX-License-Identifier: Apache-2.0
"""What rules look at: a snapshot, and the figures that several rules need. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterable
from decimal import Decimal
from functools import cached_property

from .causes import Thread
from .limits import Limits
from .peaks import Peak
from .snapshot import Graph, Op, Snapshot

PHASES = ("decode", "prefill", "mixed", "verify", "encode")
#: Kinds of weights whose products the engine makes of 8-bit integers.
_FLOATS = frozenset({"f32", "f16", "bf16", "f64", ""})


class Case:
    """One snapshot under judgement. All seconds are of the window's calls."""

    def __init__(self, snapshot: Snapshot, limits: Limits) -> None:
        self.snapshot = snapshot
        self.limits = limits

    # ---- tokens and time -----------------------------------------------------------------

    def seconds_of(self, phase: str) -> float:
        """Time inside successful calls of a phase."""
        return sum(c.seconds for c in self.snapshot.calls if c.phase == phase and c.status == 0) or sum(
            g.seconds for g in self.snapshot.graphs if g.phase == phase and not g.split
        )

    @cached_property
    def call_seconds(self) -> float:
        """Time inside all successful calls."""
        return sum(self.seconds_of(phase) for phase in PHASES)

    @property
    def decode_tokens(self) -> int:
        """Tokens decoded; 0 where not known."""
        return self.snapshot.tokens.decode or 0

    @property
    def decode_seconds_per_token(self) -> float | None:
        """Mean time of a decode token inside calls."""
        seconds = self.seconds_of("decode")
        return seconds / self.decode_tokens if self.decode_tokens and seconds else None

    @cached_property
    def tokens(self) -> int:
        """What a cost is divided by: generated tokens, or where there are none processed ones."""
        tokens = self.snapshot.tokens
        return tokens.output_rows or sum(
            count or 0 for count in (tokens.prefill, tokens.decode, tokens.verify, tokens.encode)
        )

    def per_token(self, seconds: float) -> float | None:
        """``seconds`` of the window by token."""
        return seconds / self.tokens if self.tokens else None

    def share(self, seconds: float) -> float:
        """``seconds`` by the time inside calls; 0 where there was none."""
        return seconds / self.call_seconds if self.call_seconds > 0 else 0.0

    @property
    def enough(self) -> bool:
        """Whether enough was seen to say that nothing is wrong."""
        return self.decode_tokens >= self.limits.least_tokens and self.call_seconds > 0

    # ---- threads and waiting -------------------------------------------------------------

    @cached_property
    def workers(self) -> tuple[Thread, ...]:
        """Threads that computed, the busiest first."""
        if self.snapshot.threads is None:
            return ()
        threads = sorted(self.snapshot.threads.threads, key=lambda t: -_busy(t))
        least = self.limits.worker_share * _busy(threads[0]) if threads else 0.0
        return tuple(t for t in threads if t.alive and _busy(t) > 0 and _busy(t) >= least)

    @cached_property
    def thread_count(self) -> int | None:
        """Threads that compute a graph together; None where not known."""
        if self.workers:
            return len(self.workers)
        counters = self.snapshot.counters
        if counters is None:
            return None
        ops, others = counters.hits.get("op"), counters.hits.get("op_other_thread")
        return None if not ops or others is None else 1 + round(others / ops)

    def stalled(self, *causes: str) -> float:
        """Seconds that calls lost because some thread did not run, for any of these causes.

        Waits are known of more calls than the window counts: of those that failed, and of one that
        reaches into the window of a flight recorder. Their share of each phase is taken over.
        """
        if self.snapshot.threads is None:
            return 0.0
        return sum(
            sum(waits.stalled.get(cause, 0.0) for cause in causes)
            * min(self.seconds_of(waits.phase) / waits.seconds, 1.0)
            for waits in self.snapshot.threads.phases
            if waits.seconds > 0
        )

    @cached_property
    def disturbed(self) -> bool:
        """Whether waiting takes so much that rates say nothing about the machine."""
        waits = self.stalled("preempted", "yielded", "throttled", "wakeup", "fault", "io")
        return self.share(waits) > self.limits.disturbed_share

    # ---- the machine's limits ------------------------------------------------------------

    @cached_property
    def peak(self) -> Peak | None:
        """What the machine can do with as many threads; None where not measured."""
        peaks = self.snapshot.peaks
        return None if peaks is None else peaks.at(self.thread_count)

    def ops(self, phase: str) -> tuple[Op, ...]:
        """Kernels of a phase with a known time."""
        return tuple(op for op in self.snapshot.ops if op.phase == phase and op.seconds > 0)

    def graphs(self, phase: str) -> tuple[Graph, ...]:
        """Whole graphs of a phase that were not in a failed call or a warm-up."""
        return tuple(
            g for g in self.snapshot.graphs if g.phase == phase and not g.split and g.count > g.warmup
        )

    @cached_property
    def memory_share(self) -> float | None:
        """Rate at which decode moves bytes, by the peak of reading; None where not known."""
        return self.memory_floor("decode")

    @cached_property
    def compute_share(self) -> float | None:
        """Share of prefill's time that its arithmetic would take at the peak; None: not known."""
        return self.compute_floor("prefill")

    def memory_floor(self, phase: str) -> float | None:
        """Share of the time of a phase's kernels in which memory at its peak moves their bytes."""
        ops = self.ops(phase)
        rate = None if self.peak is None else self.peak.read_bytes_per_second
        if not ops or not rate or any(op.bytes is None for op in ops if heavy(op)):
            return None
        return sum(op.bytes or 0 for op in ops) / rate / sum(op.seconds for op in ops)

    def compute_floor(self, phase: str) -> float | None:
        """The same for arithmetic; products of 8-bit integers where the weights' type has them."""
        ops, peak = self.ops(phase), self.peak
        if not ops or peak is None or peak.flops_per_second is None:
            return None
        if any(op.flops is None for op in ops if heavy(op)):
            return None
        least = 0.0
        for op in ops:
            integers = op.dtype not in _FLOATS and peak.int8_ops_per_second is not None
            rate = peak.int8_ops_per_second if integers else peak.flops_per_second
            least += (op.flops or 0) / (rate or peak.flops_per_second)
        return least / sum(op.seconds for op in ops)


def heavy(op: Op) -> bool:
    """Whether an op is one of those that do nearly all the work."""
    return op.op in ("MUL_MAT", "MUL_MAT_ID", "FLASH_ATTN_EXT")


def _busy(thread: Thread) -> float:
    return thread.work_run_seconds


# ---- words -----------------------------------------------------------------------------------


def ms(seconds: float | None) -> str:
    """``12.3 ms``."""
    if seconds is None:
        return "-"
    return f"{digits(seconds * 1e3)} ms" if seconds < 1 else f"{digits(seconds)} s"


def digits(number: float, how_many: int = 3) -> str:
    """``12.3``, ``1,000``: so many digits that count, and no exponent."""
    return format(Decimal(f"{number:.{how_many}g}"), ",f")


def percent(share: float) -> str:
    """``34 %``."""
    return f"{share * 100:.0f} %" if share >= 0.1 else f"{digits(share * 100, 2)} %"


def counted(count: int, what: str) -> str:
    """``1 thread``, ``2 threads``."""
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def giga(rate: float, unit: str) -> str:
    """``21.3 GB/s``."""
    return f"{digits(rate / 1e9)} {unit}"


def listed(names: Iterable[str]) -> str:
    """``a, b and c``."""
    names = list(names)
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}" if names else ""
