# SPDX-License-Identifier: Apache-2.0
"""What this machine can do at most, as ``profinferd calibrate`` measured it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Peak:
    """The best rates that ``threads`` threads together have reached.

    ``read_bytes_per_second``: memory read and nothing written, as weights are;
    ``triad_bytes_per_second``: STREAM's triad by STREAM's count (two arrays read, one written);
    ``flops_per_second``: multiply-adds of float32, two operations each;
    ``int8_ops_per_second``: the same of 8-bit integers summed into 32 bits, where the processor
    has such instructions. None: not measured.
    """

    threads: int
    read_bytes_per_second: float | None
    triad_bytes_per_second: float | None
    flops_per_second: float | None
    int8_ops_per_second: float | None = None


@dataclass(frozen=True, slots=True)
class Peaks:
    """Peaks by number of threads, fewest first; empty, with a ``reason``, when absent. A reason beside
    peaks says why memory's are not among them.

    ``machine``: processor and number of CPUs they hold for; ``made_at``: seconds since 1970;
    ``instructions``: which ones were used, for example ``avx2``; ``cache_bytes``: the last-level
    caches together.
    """

    by_threads: tuple[Peak, ...]
    machine: str | None = None
    made_at: float | None = None
    instructions: str | None = None
    reason: str | None = None
    cache_bytes: int | None = None

    def at(self, threads: int | None) -> Peak | None:
        """The peak for ``threads`` threads: of the most measured that are not more, or the fewest.

        None (number unknown): that of all. None is returned when there are none.
        """
        if not self.by_threads:
            return None
        if threads is None:
            return self.by_threads[-1]
        fits = [peak for peak in self.by_threads if peak.threads <= threads]
        return fits[-1] if fits else self.by_threads[0]


ABSENT = Peaks((), reason="the machine's peaks are not measured: run profinferd calibrate")
