# SPDX-License-Identifier: Apache-2.0
"""Prometheus: a collector that reads snapshots when it is scraped.

Names, labels and buckets come from :mod:`profinferd.exporters.registry`. A scrape has at
most :data:`MAX_SAMPLES` samples. Which label values are shown is decided once: what got a
place keeps it, what came later is summed under "other" for good, so no counter ever falls.
"""

from __future__ import annotations

import math
import os
from collections import OrderedDict
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
from . import callmetrics, causemetrics, registry
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
MAX_OVER = 4096
"""Label sets of a scheme, and targets, of which it is known that they are summed under "other"."""
MAX_TARGETS = 10
"""Targets that are told apart; the figures of more are summed under "other"."""
SMALL_EACH = 100
"""Samples that a target has beside those of its operators, about."""
_HISTOGRAMS = 2 * (len(LATENCY_BUCKETS) + 3)
_GAUGES = 12
_SMALL = (MAX_TARGETS + 1) * (SMALL_EACH - _HISTOGRAMS - _GAUGES)
"""Samples of counters with few label sets, of all targets together."""
_RESERVE = 160
"""Samples kept free for "other" rows, of ops and of the rest, and for the daemon itself."""
MAX_OPS = (MAX_SAMPLES - _RESERVE - (MAX_TARGETS + 1) * SMALL_EACH) // 4
"""Label sets of operators, each with four samples."""

Labels = tuple[str, ...]
_Key = tuple[str, tuple[tuple[str, str], ...]]
"""Name of a sample and its labels."""


@dataclass(frozen=True, slots=True)
class Seen:
    """One process at the time of a scrape; ``state`` is "ok", or the reason why not.

    ``snapshot`` None: nothing is known of it but that. ``label``: its target's name, where it is
    more than program and model; several processes may share it. ``number`` tells processes apart.
    """

    snapshot: Snapshot | None
    state: str
    label: str | None = None
    number: int = 0

    @property
    def target(self) -> str:
        """Its label."""
        return self.label or (target_label(self.snapshot) if self.snapshot is not None else "process")


Provider = Callable[[], Sequence[Seen]]
Own = Callable[[], Iterable[tuple[str, Labels, float]]]
"""Figures of the daemon itself: (short name, label values, value)."""


def target_label(snapshot: Snapshot) -> str:
    """Program and model file name: the same after a restart, and never a process id."""
    program = clean(os.path.basename(snapshot.target.exe or ""), 60) or "process"
    model = clean(os.path.basename(snapshot.target.model or ""), 80)
    return f"{program}:{model}" if model else program


class _Room:
    """Samples that are still to be given out."""

    def __init__(self, samples: int) -> None:
        self._left = samples

    def take(self, samples: int) -> bool:
        """Whether there was room for so many more."""
        if samples > self._left:
            return False
        self._left -= samples
        return True

    def give_back(self, samples: int) -> None:
        """Series that have ended."""
        self._left += samples


class _Rows:
    """The samples of one label scheme: values per label set, summed where names fall together.

    ``shown`` is the memory of the collector: label sets that were admitted, with the samples that
    they take; ``over``: those that found no place. These have none later either: what they gave to
    "other" cannot be taken away from it, for a counter never falls.
    """

    def __init__(
        self,
        shown: dict[Labels, int],
        over: dict[Labels, None],
        limit: int,
        fold: Callable[[Labels], Labels],
        room: _Room | None,
    ) -> None:
        self._shown, self._over = shown, over
        self._limit = limit
        self._fold = fold
        self._room = room
        self.values: dict[Labels, list[float | None]] = {}
        self.dropped: set[Labels] = set()

    def add(self, labels: Labels, values: Sequence[float | None], real: str | None = None) -> None:
        """Adds one value per family of the scheme; None, NaN, infinite and negative are absent.

        ``real``: the target, where the labels say "other".
        """
        if real is not None and real != labels[0]:
            self.dropped.add((real, *labels[1:]))
        if labels not in self._shown:
            room = labels not in self._over and len(self._shown) < self._limit
            if room and (self._room is None or self._room.take(len(values))):
                self._shown[labels] = len(values) if self._room is not None else 0
            else:
                self.dropped.add(labels)
                if len(self._over) < MAX_OVER:
                    self._over[labels] = None
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
    """``provider()`` -> families, at every scrape. Not safe for two scrapes at once.

    What a process had when it ended stays in its target's sums (:meth:`retire`), until the target
    is forgotten as a whole (:meth:`forget`).
    """

    def __init__(self, provider: Provider, version: str, own: Own = tuple) -> None:
        self._provider, self._version, self._own = provider, version, own
        self._shown: dict[str, dict[Labels, int]] = {}
        self._over: dict[str, dict[Labels, None]] = {}
        self._named: dict[str, None] = {}
        self._unnamed: OrderedDict[str, None] = OrderedDict()  # targets that are in "other"
        self._room = _Room(_SMALL)
        self._ended: dict[str, dict[_Key, float]] = {}
        self._dropped = 0

    def collect(self) -> Iterator[Family]:
        """All families that have a sample, and ``dropped_series_total`` and ``build_info`` always."""
        # Whoever has figures is named before those that merely say why they have none.
        families, dropped = self._families(sorted(self._provider(), key=lambda one: one.snapshot is None))
        for family in families:
            self._with_ended(family)
        there = {family.name for family in families}
        for short in self._ended:
            family = _family(short)
            if family.name not in there:
                self._with_ended(family)
                families.append(family)
        self._dropped = max(self._dropped, dropped)
        families.append(_single("dropped_series_total", (), self._dropped))
        families.append(_single("build_info", (self._version,), 1))
        families += _own_families(self._own())
        yield from (family for family in families if family.samples)

    def _families(self, seen: Sequence[Seen]) -> tuple[list[Family], int]:
        families = list(self._small(seen))
        names = ("op_seconds", "op_calls", "op_flops", "op_bytes")
        ops = self._rows("op", MAX_OPS, _fold_op)
        # The largest first: when not all find a place, the first scrape decides for good.
        rows = [(s.target, op) for s in seen if s.snapshot is not None for op in s.snapshot.ops]
        rows.sort(key=lambda row: -(row[1].seconds or 0.0))
        for name, op in rows:
            labels = (_label(op.op), _label(op.dtype), _label(op.role), op.phase, _label(op.backend))
            ops.add((self._place(name), *labels), (op.seconds, op.calls, op.flops, op.bytes), name)
        families += _families([f"{name}_total" for name in names], ops)
        return families, len(ops.dropped) * len(names) + self._small_dropped

    def _place(self, target: str) -> str:
        """The label that a target is shown under: its own, or "other". One that is called so is summed
        there, too: the name has a meaning already."""
        if target not in self._named and target != OTHER:
            if len(self._named) >= MAX_TARGETS or target in self._unnamed:
                self._unnamed[target] = None
                self._unnamed.move_to_end(target)
                while len(self._unnamed) > MAX_OVER:
                    self._unnamed.popitem(last=False)
                return OTHER
            self._named[target] = None
        return target

    def retire(self, one: Seen) -> None:
        """The last figures of a process that ended: from now on they are part of its target's."""
        if one.snapshot is None:
            return
        families, dropped = self._families([one])
        self._dropped = max(self._dropped, dropped)
        for family in families:
            if family.type == "gauge":
                continue
            sums = self._ended.setdefault(_short(family), {})
            for sample in family.samples:
                key = (sample.name, tuple(sample.labels.items()))
                sums[key] = sums.get(key, 0.0) + sample.value

    def forget(self, target: str) -> None:
        """A target is gone for long: its series end, and others may take their places."""
        if target == OTHER:
            return  # what is summed there is not one target's
        self._named.pop(target, None)
        self._unnamed.pop(target, None)
        for shown in self._shown.values():
            for labels in [one for one in shown if one[0] == target]:
                self._room.give_back(shown.pop(labels))
        for over in self._over.values():
            for labels in [one for one in over if one[0] == target]:
                del over[labels]
        for sums in self._ended.values():
            for key in [one for one in sums if ("target", target) in one[1]]:
                del sums[key]

    def _with_ended(self, family: Family) -> None:
        sums = self._ended.get(_short(family))
        if not sums:
            return
        left = dict(sums)
        samples = []
        for sample in family.samples:
            more = left.pop((sample.name, tuple(sample.labels.items())), 0.0)
            samples.append(sample._replace(value=sample.value + more) if more else sample)
        family.samples = samples
        for (name, labels), value in left.items():
            family.add_sample(name, dict(labels), value)

    def _small(self, seen: Sequence[Seen]) -> Iterator[Family]:
        self._small_dropped = 0
        each = MAX_SMALL * min(MAX_TARGETS, max(1, len(self._named)))
        tokens = self._rows("tokens", each, _fold_target)
        calls = self._rows("calls", each, _fold_call)
        graphs = self._rows("graphs", each, _fold_graph)
        lost = self._rows("lost", each, _fold_last)
        failures = self._rows("failures", each, _fold_target)
        hits = self._rows("hits", each, _fold_last)
        probes = self._rows("probes", each, _fold_last)
        overhead = self._rows("overhead", each, _fold_last)
        bursts = self._rows("bursts", each, _fold_last)
        changes = self._rows("changes", each, _fold_last)
        budget = self._rows("budget", each, _fold_last)
        measured = self._rows("measured", each, _fold_last)
        events = self._rows("events", each, _fold_last)
        info = self._rows("info", each, _fold_target)
        state = self._rows("state", each, _fold_last)
        first = _Histogram("time_to_first_token_seconds")
        between = _Histogram("inter_token_latency_seconds")
        for one in seen:
            real = one.target
            target = self._place(real)
            state.values[(target, one.state)] = [1.0 if one.state == "ok" else 0.0]
            snapshot = one.snapshot
            if snapshot is None:
                continue
            counters = snapshot.counters
            if counters is not None:
                tokens.add((target,), (counters.prompt_tokens, counters.generation_tokens), real)
                for whole in counters.graphs:
                    labels = (target, whole.phase, _label(whole.backend))
                    graphs.add(labels, (whole.count, whole.sampled, whole.seconds), real)
                for level, count in counters.hits.items():
                    hits.add((target, level), (count,), real)
            for call in snapshot.calls:
                status = OTHER if call.status == OTHER_STATUS else str(call.status)
                calls.add((target, call.phase, status), (call.count, call.seconds), real)
            for kind, count in snapshot.lost.by_kind.items():
                lost.add((target, _label(kind)), (count,), real)
            # Not every kernel counts what its recursion guard skipped: then that is absent.
            kinds = snapshot.lost.by_kind
            failures.add((target,), (kinds.get(MAP_FULL, 0), kinds.get(RECURSION)), real)
            layout = snapshot.target.layout
            about = (snapshot.target.model, snapshot.target.engine, layout.name if layout else None)
            program = clean(os.path.basename(snapshot.target.exe or ""), 60)
            if target != OTHER:
                info.values[(target, program, *(_label(text) for text in about))] = [1.0]
            for level, reason, value in _probe_states(snapshot):
                probes.values[(target, level, reason)] = [value]
            if (kept := snapshot.budget) is not None:
                within = 1.0 if kept.level == TOP_LEVEL else 0.0
                budget.values[(target, _budget_reason(kept))] = [within]
                for how, seconds in kept.spent_seconds.items():
                    overhead.add((target, how), (seconds,), real)
                bursts.add((target, "complete"), (kept.bursts - kept.bursts_cut,), real)
                bursts.add((target, "cut"), (kept.bursts_cut,), real)
                for level, count in kept.changes.items():
                    changes.add((target, level), (count,), real)
                for bound, seconds in _measured(snapshot.overhead, kept):
                    # Noise is as often below zero as above: a gauge, and not one that is clipped.
                    before = measured.values.get((target, bound), [0.0])[0] or 0.0
                    measured.values[(target, bound)] = [before + seconds]
            for event in snapshot.hardware.events if snapshot.hardware is not None else ():
                if event.value is not None:
                    events.add((target, _label(event.event)), (event.value,), real)
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
        yield from self._calls(seen)
        yield from _machine(seen)
        yield from _families(["hardware_events_total"], events)
        yield from self._causes(seen)
        yield from _families(["target_info"], info)
        yield from _families(["target_state"], state)
        single = sum(len(rows.dropped) for rows in (lost, hits, overhead, bursts, changes, events))
        double = sum(len(rows.dropped) for rows in (calls, tokens, failures))
        folded = {one.target for one in seen if one.target not in self._named}
        self._small_dropped += 2 * double + 3 * len(graphs.dropped) + single + _HISTOGRAMS * len(folded)

    def _calls(self, seen: Sequence[Seen]) -> Iterator[Family]:
        """Calls of engines described by data, and compiled programs."""
        for names, give in (
            (callmetrics.CALLS, callmetrics.call_rows),
            (callmetrics.UNWATCHED, callmetrics.unwatched_rows),
            (callmetrics.PROGRAMS, callmetrics.program_rows),
            (callmetrics.BYTES, callmetrics.byte_rows),
            (callmetrics.OFFLOAD, callmetrics.offload_rows),
            (callmetrics.PLACED, callmetrics.placed_rows),
        ):
            rows = self._rows(names[0], MAX_SMALL, _fold_middle)
            for one in seen:
                if one.snapshot is not None:
                    for labels, values in give(one.snapshot, self._place(one.target)):
                        rows.add(labels, values, one.target)
            self._small_dropped += len(rows.dropped) * len(names)
            yield from _families(names, rows)

    def _causes(self, seen: Sequence[Seen]) -> Iterator[Family]:
        """What the scheduler and page faults did to targets."""
        each = MAX_SMALL * min(MAX_TARGETS, max(1, len(self._named)))
        for names, give, fold in (
            (causemetrics.WAITS, causemetrics.wait_rows, _fold_last),
            (causemetrics.PREEMPTIONS, causemetrics.preemption_rows, _fold_target),
            (causemetrics.FAULTS, causemetrics.fault_rows, _fold_call),
            (causemetrics.UNWATCHED, causemetrics.unwatched_rows, _fold_last),
            (causemetrics.RESIDENT, causemetrics.resident_rows, _fold_target),
        ):
            rows = self._rows(names[0], each, fold)
            for one in seen:
                if one.snapshot is not None:
                    for labels, values in give(one.snapshot, self._place(one.target)):
                        rows.add(labels, values, one.target)
            self._small_dropped += len(rows.dropped)
            yield from _families(names, rows)

    def _rows(self, scheme: str, limit: int, fold: Callable[[Labels], Labels]) -> _Rows:
        room = None if scheme == "op" else self._room
        shown, over = self._shown.setdefault(scheme, {}), self._over.setdefault(scheme, {})
        return _Rows(shown, over, max(0, limit), fold, room)


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


def _fold_middle(labels: Labels) -> Labels:
    """All but the target and the last label."""
    return (labels[0], *[OTHER] * (len(labels) - 1))


def _fold_target(labels: Labels) -> Labels:
    return (OTHER, *labels[1:])


def _family(short: str) -> Family:
    about = metric(short)
    name = about.name.removesuffix("_total") if about.kind is registry.Kind.COUNTER else about.name
    return Family(name, about.help, about.kind.value)


def _short(family: Family) -> str:
    """The name in the registry without its prefix."""
    short = family.name.removeprefix(registry.PREFIX)
    return f"{short}_total" if family.type == "counter" else short


def _own_families(figures: Iterable[tuple[str, Labels, float]]) -> list[Family]:
    found: dict[str, Family] = {}
    for short, labels, value in figures:
        family, about = found.setdefault(short, _family(short)), metric(short)
        family.add_sample(about.name, dict(zip(about.labels, labels, strict=True)), value)
    return list(found.values())


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

    def __init__(self, provider: Provider, version: str, own: Own = tuple) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._collector = SnapshotCollector(provider, version, own)
        self._registry.register(self._collector)

    def retire(self, one: Seen) -> None:
        """The last figures of a process that ended stay in its target's sums."""
        self._collector.retire(one)

    def forget(self, target: str) -> None:
        """The series of a target end."""
        self._collector.forget(target)

    def families(self) -> list[Family]:
        """What a scrape holds, before it is text."""
        return list(self._collector.collect())

    def scrape(self, accept: str = "") -> tuple[str, bytes]:
        """(content type, body): OpenMetrics when the Accept header names it, else plain text.

        The client library also negotiates versions and escaping from that header; our
        names need neither, and a stranger's header is better not parsed further.
        """
        if "application/openmetrics-text" in accept:
            body: bytes = openmetrics_text.generate_latest(self._registry)  # type: ignore[no-untyped-call]
            return openmetrics_text.CONTENT_TYPE_LATEST, body
        return CONTENT_TYPE_PLAIN_0_0_4, generate_latest(self._registry)


def _machine(seen: Sequence[Seen]) -> Iterator[Family]:
    """What the machine can do at most, once, whoever is watched; absent where it was not measured."""
    known = (s.snapshot.peaks for s in seen if s.snapshot is not None)
    peak = next((p for peaks in known if peaks is not None and (p := peaks.at(None))), None)
    for name, rate in (
        ("machine_memory_bandwidth_bytes_per_second", peak and peak.read_bytes_per_second),
        ("machine_flops_per_second", peak and peak.flops_per_second),
    ):
        if rate:
            yield _single(name, (), rate)
