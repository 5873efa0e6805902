# SPDX-License-Identifier: Apache-2.0
"""Prometheus: a collector that reads snapshots when it is scraped.

Names, labels and buckets come from :mod:`profinferd.exporters.registry`. A scrape has at
most :data:`MAX_SAMPLES` samples. Which label values are shown is decided once: what got a
place keeps it, what came later is summed under "other" for good, so no counter ever falls.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.openmetrics import exposition as openmetrics_text
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from ..agent.model.latency import Histogram
from ..agent.model.snapshot import OTHER_STATUS, Budget, Overhead, Snapshot
from . import registry
from .registry import LATENCY_BUCKETS, OTHER, metric
from .text import clean, finite

MAX_SAMPLES = 2500
MAX_SMALL = 48
"""Label sets of a family that has few by nature (calls, graphs, lost, hits), with "other"."""
MAP_FULL, RECURSION = "map_full", "recursion_misses"
"""Kinds of loss that have counters of their own: ``map_update_failures_total`` and
``recursion_misses_total``."""
LEVELS = ("nothing", "token", "graph", "op")
TOP_LEVEL = LEVELS[-1]
SHED = "shed"
_RESERVE = 64
"""Samples kept free for "other" rows of ops, one per phase and family."""

Labels = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Seen:
    """One target at the time of a scrape; ``state`` is "ok", or the reason why not."""

    snapshot: Snapshot
    state: str


Provider = Callable[[], Sequence[Seen]]


def target_label(snapshot: Snapshot) -> str:
    """Program and model file name: the same after a restart, and never a process id."""
    program = clean(os.path.basename(snapshot.target.exe or ""), 60) or "process"
    model = clean(os.path.basename(snapshot.target.model or ""), 80)
    return f"{program}:{model}" if model else program


class _Rows:
    """The samples of one label scheme: values per label set, summed where names fall together.

    ``shown`` is the memory of the collector: label sets that were admitted, in order.
    """

    def __init__(self, shown: dict[Labels, None], limit: int, fold: Callable[[Labels], Labels]) -> None:
        self._shown = shown
        self._limit = limit
        self._fold = fold
        self.values: dict[Labels, list[float | None]] = {}
        self.dropped: set[Labels] = set()

    def add(self, labels: Labels, values: Sequence[float | None]) -> None:
        """Adds one value per family of the scheme; None, NaN, infinite and negative are absent."""
        if labels not in self._shown:
            if len(self._shown) < self._limit:
                self._shown[labels] = None
            else:
                self.dropped.add(labels)
                labels = self._fold(labels)
        clear = [_usable(value) for value in values]
        before = self.values.get(labels)
        if before is not None:
            clear = [
                b if a is None else a if b is None else a + b for a, b in zip(before, clear, strict=True)
            ]
        self.values[labels] = clear


def _usable(value: float | None) -> float | None:
    value = finite(value)
    return None if value is None or value < 0 else float(value)


class SnapshotCollector(Collector):
    """``provider()`` -> families, at every scrape. Not safe for two scrapes at once."""

    def __init__(self, provider: Provider, version: str) -> None:
        self._provider = provider
        self._version = version
        self._shown: dict[str, dict[Labels, None]] = {}
        self._dropped = 0

    def collect(self) -> Iterator[Family]:
        """All families that have a sample, and ``dropped_series_total`` and ``build_info`` always."""
        seen = self._provider()
        families = list(self._small(seen))
        used = sum(len(family.samples) for family in families) + _RESERVE
        names = ("op_seconds", "op_calls", "op_flops", "op_bytes")
        ops = self._rows("op", (MAX_SAMPLES - used) // len(names), _fold_op)
        # The largest first: when not all find a place, the first scrape decides for good.
        rows = [(target_label(s.snapshot), op) for s in seen for op in s.snapshot.ops]
        rows.sort(key=lambda row: -(row[1].seconds or 0.0))
        for target, op in rows:
            labels = (target, _label(op.op), _label(op.dtype), _label(op.role), op.phase, _label(op.backend))
            ops.add(labels, (op.seconds, op.calls, op.flops, op.bytes))
        families += _families([f"{name}_total" for name in names], ops)
        dropped = len(ops.dropped) * len(names) + self._small_dropped
        self._dropped = max(self._dropped, dropped)
        families.append(_single("dropped_series_total", (), self._dropped))
        families.append(_single("build_info", (self._version,), 1))
        yield from (family for family in families if family.samples)

    def _small(self, seen: Sequence[Seen]) -> Iterator[Family]:
        self._small_dropped = 0
        tokens = self._rows("tokens", MAX_SMALL, _fold_target)
        calls = self._rows("calls", MAX_SMALL, _fold_call)
        graphs = self._rows("graphs", MAX_SMALL, _fold_graph)
        lost = self._rows("lost", MAX_SMALL, _fold_last)
        failures = self._rows("failures", MAX_SMALL, _fold_target)
        hits = self._rows("hits", MAX_SMALL, _fold_last)
        probes = self._rows("probes", MAX_SMALL, _fold_last)
        overhead = self._rows("overhead", MAX_SMALL, _fold_last)
        bursts = self._rows("bursts", MAX_SMALL, _fold_last)
        changes = self._rows("changes", MAX_SMALL, _fold_last)
        budget = self._rows("budget", MAX_SMALL, _fold_last)
        measured = self._rows("measured", MAX_SMALL, _fold_last)
        info = self._rows("info", MAX_SMALL, _fold_target)
        state = self._rows("state", MAX_SMALL, _fold_last)
        first = _Histogram("time_to_first_token_seconds")
        between = _Histogram("inter_token_latency_seconds")
        for one in seen:
            snapshot, target = one.snapshot, target_label(one.snapshot)
            counters = snapshot.counters
            if counters is not None:
                tokens.add((target,), (counters.prompt_tokens, counters.generation_tokens))
                for whole in counters.graphs:
                    labels = (target, whole.phase, _label(whole.backend))
                    graphs.add(labels, (whole.count, whole.sampled, whole.seconds))
                for level, count in counters.hits.items():
                    hits.add((target, level), (count,))
            for call in snapshot.calls:
                status = OTHER if call.status == OTHER_STATUS else str(call.status)
                calls.add((target, call.phase, status), (call.count, call.seconds))
            for kind, count in snapshot.lost.by_kind.items():
                lost.add((target, _label(kind)), (count,))
            # Not every kernel counts what its recursion guard skipped: then that is absent.
            kinds = snapshot.lost.by_kind
            failures.add((target,), (kinds.get(MAP_FULL, 0), kinds.get(RECURSION)))
            layout = snapshot.target.layout
            about = (snapshot.target.model, snapshot.target.engine, layout.name if layout else None)
            program = clean(os.path.basename(snapshot.target.exe or ""), 60)
            info.values[(target, program, *(_label(text) for text in about))] = [1.0]
            state.values[(target, one.state)] = [1.0 if one.state == "ok" else 0.0]
            for level, reason, value in _probe_states(snapshot):
                probes.values[(target, level, reason)] = [value]
            if (kept := snapshot.budget) is not None:
                budget.values[(target, _budget_reason(kept))] = [1.0 if kept.level == TOP_LEVEL else 0.0]
                for how, seconds in kept.spent_seconds.items():
                    overhead.add((target, how), (seconds,))
                bursts.add((target, "complete"), (kept.bursts - kept.bursts_cut,))
                bursts.add((target, "cut"), (kept.bursts_cut,))
                for level, count in kept.changes.items():
                    changes.add((target, level), (count,))
                for bound, seconds in _measured(snapshot.overhead, kept):
                    # Noise is as often below zero as above: a gauge, and not one that is clipped.
                    measured.values[(target, bound)] = [seconds]
            if snapshot.histograms is not None:
                first.add(target, snapshot.histograms.time_to_first_token)
                between.add(target, snapshot.histograms.inter_token)
        yield from _families(["prompt_tokens_total", "generation_tokens_total"], tokens)
        yield from (first.finish(), between.finish())
        yield from _families(["calls_total", "call_seconds_total"], calls)
        yield from _families(["graphs_total", "graphs_sampled_total", "graph_seconds_total"], graphs)
        yield from _families(["lost_records_total"], lost)
        yield from _families(["map_update_failures_total", "recursion_misses_total"], failures)
        yield from _families(["probe_hits_total"], hits)
        yield from _families(["probe_state"], probes)
        yield from _families(["budget_state"], budget)
        yield from _families(["budget_transitions_total"], changes)
        yield from _families(["bursts_total"], bursts)
        yield from _families(["overhead_seconds_total"], overhead)
        yield from _families(["overhead_measured_seconds"], measured)
        yield from _families(["target_info"], info)
        yield from _families(["target_state"], state)
        single = sum(len(rows.dropped) for rows in (lost, hits, overhead, bursts, changes))
        self._small_dropped = 2 * len(calls.dropped) + 3 * len(graphs.dropped) + single

    def _rows(self, scheme: str, limit: int, fold: Callable[[Labels], Labels]) -> _Rows:
        return _Rows(self._shown.setdefault(scheme, {}), max(0, limit), fold)


class _Histogram:
    """One latency family; targets with the same label are summed."""

    def __init__(self, short: str) -> None:
        self.family = _family(short)
        self._name = metric(short).name
        self._sums: dict[str, tuple[list[int], float]] = {}

    def add(self, target: str, histogram: Histogram) -> None:
        """Adds the cumulative counts of one target."""
        counts, seconds = list(histogram.counts), histogram.sum
        if target in self._sums:
            before, sum_before = self._sums[target]
            counts = [a + b for a, b in zip(before, counts, strict=True)]
            seconds += sum_before
        self._sums[target] = (counts, seconds)

    def finish(self) -> Family:
        """The family with its samples."""
        for target, (counts, seconds) in self._sums.items():
            labels = {"target": target}
            for bound, count in zip((*LATENCY_BUCKETS, math.inf), counts, strict=True):
                edge = {**labels, "le": floatToGoString(bound)}  # type: ignore[no-untyped-call]
                self.family.add_sample(self._name + "_bucket", edge, count)
            self.family.add_sample(self._name + "_count", labels, counts[-1])
            self.family.add_sample(self._name + "_sum", labels, seconds)
        return self.family


def _probe_states(snapshot: Snapshot) -> Iterator[tuple[str, str, float]]:
    """(level, reason, value) of ``probe_state``."""
    kept = snapshot.budget
    for level, lowest in (("token", LEVELS[1:]), ("graph", LEVELS[2:])):
        if kept is not None:
            on = kept.level in lowest
            yield level, "ok" if on else SHED, 1.0 if on else 0.0
    if kept is not None and kept.level != TOP_LEVEL:
        yield "op", SHED, 0.0
    else:
        yield ("op", *_op_probes(snapshot))


def _budget_reason(kept: Budget) -> str:
    """The reason without its figures: a label has few values."""
    return "ok" if kept.level == TOP_LEVEL else _label(kept.reason.partition(":")[0])


def _measured(overhead: Overhead, kept: Budget) -> Iterator[tuple[str, float]]:
    """(bound, seconds) of ``overhead_measured_seconds``; nothing before it was measured."""
    if overhead.measured_ratio is not None and overhead.measured_ci95 is not None:
        low, high = overhead.measured_ci95
        for bound, ratio in (("low", low), ("mean", overhead.measured_ratio), ("high", high)):
            # Of the busy seconds, the slowdown's part.
            seconds = finite(kept.busy_seconds * ratio / (1 + ratio)) if ratio > -1 else None
            if seconds is not None:
                yield bound, seconds


def _op_probes(snapshot: Snapshot) -> tuple[str, float]:
    """(reason, value) of ``probe_state`` at op level, while it is not shed."""
    attach = snapshot.target.attach
    if attach.op_source is None:
        return "absent", 0.0
    if attach.complete is False:
        return "incomplete", 0.0
    if any(graph.uncovered for graph in snapshot.graphs):
        return "uncovered", 0.0
    return "ok", 1.0


def _label(value: str | None) -> str:
    return clean(value, 100) if value else ""


def _fold_op(labels: Labels) -> Labels:
    return (labels[0], OTHER, OTHER, OTHER, labels[4], OTHER)


def _fold_call(labels: Labels) -> Labels:
    return (labels[0], labels[1], OTHER)


_fold_graph = _fold_call


def _fold_last(labels: Labels) -> Labels:
    return (labels[0], OTHER)


def _fold_target(labels: Labels) -> Labels:
    return (OTHER, *labels[1:])


def _family(short: str) -> Family:
    about = metric(short)
    name = about.name.removesuffix("_total") if about.kind is registry.Kind.COUNTER else about.name
    return Family(name, about.help, about.kind.value)


def _families(shorts: Sequence[str], rows: _Rows) -> Iterator[Family]:
    for column, short in enumerate(shorts):
        family, about = _family(short), metric(short)
        for labels, values in rows.values.items():
            value = values[column]
            if value is not None:
                family.add_sample(about.name, dict(zip(about.labels, labels, strict=True)), value)
        yield family


def _single(short: str, labels: Iterable[str], value: float) -> Family:
    family, about = _family(short), metric(short)
    family.add_sample(about.name, dict(zip(about.labels, labels, strict=True)), value)
    return family


class PrometheusExporter:
    """Text for scrapes. Not safe for two scrapes at once."""

    def __init__(self, provider: Provider, version: str) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(SnapshotCollector(provider, version))

    def scrape(self, accept: str = "") -> tuple[str, bytes]:
        """(content type, body): OpenMetrics when the Accept header names it, else plain text.

        The client library also negotiates versions and escaping from that header; our
        names need neither, and a stranger's header is better not parsed further.
        """
        if "application/openmetrics-text" in accept:
            body: bytes = openmetrics_text.generate_latest(self._registry)  # type: ignore[no-untyped-call]
            return openmetrics_text.CONTENT_TYPE_LATEST, body
        return CONTENT_TYPE_PLAIN_0_0_4, generate_latest(self._registry)
