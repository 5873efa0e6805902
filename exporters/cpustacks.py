# SPDX-License-Identifier: Apache-2.0
"""Samples of CPU time that were recorded: folded native stacks, and the flame graph of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from os.path import basename

from ..agent.errors import UsageError
from ..agent.model.eventdata import CpuTime
from ..agent.model.trace import Trace
from . import Choice
from .flamegraph import flame_graph, folded


class StacksExporter:
    """Implements :class:`profinferd.exporters.TraceExporter`."""

    def files(self, trace: Trace, choice: Choice) -> Iterator[tuple[str, Iterable[bytes]]]:
        """One file: a stack and its samples a line. UsageError where there are none, or none of these."""
        yield "", [folded(_samples(trace, choice)).encode()]


class FlameExporter:
    """Implements :class:`profinferd.exporters.TraceExporter`."""

    def files(self, trace: Trace, choice: Choice) -> Iterator[tuple[str, Iterable[bytes]]]:
        """One SVG. UsageError as above."""
        target = trace.facts.target
        title = f"{basename(target.exe)}, {target.model or 'no model'}"
        yield "", [flame_graph(_samples(trace, choice), title).encode()]


def _samples(trace: Trace, choice: Choice) -> CpuTime:
    cpu = trace.snapshot.cpu_time
    if cpu is None:
        raise UsageError("this recording has no samples of CPU time", "record with --stacks")
    if choice.window is not None:
        raise UsageError("samples of CPU time are of the whole recording", "leave --from and --to out")
    if choice.anonymise:
        raise UsageError("stacks are names of the program's functions", "leave --anonymise out")
    if not choice.times:
        raise UsageError("a flame graph is drawn from times", "leave --no-times out")
    return cpu
