# SPDX-License-Identifier: Apache-2.0
"""The one registry of metrics: name, type, unit, labels, help, and what gives them.

Exporters, ``docs/metrics.md`` and dashboards are checked against it; no metric name is
spelled anywhere else. ``python -m profinferd.exporters.registry`` prints the page.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from ..agent.model.latency import BUCKETS

PREFIX = "profinfer_"

LATENCY_BUCKETS = BUCKETS
"""Upper bounds in seconds of both latency histograms, +Inf not named. Neighbours start at
10 ms, which hides a small model on a fast machine."""

OTHER = "other"
"""Label value of what did not fit under the limit of a scrape."""


class Kind(enum.StrEnum):
    """Prometheus types in use."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Source(enum.StrEnum):
    """What has to be watched for a metric to exist; it is absent elsewhere."""

    TOKEN = "token level"  # noqa: S105 - tokens of a model
    GRAPH = "graph level"
    OP = "op level"
    SELF = "profinferd itself"
    CALLS = "an engine described by data"
    SAMPLING = "sampled op level and budget"
    KERNEL = "kernel events"
    CALIBRATION = "calibration"
    COUNTERS = "--counters"


EXPORTED = frozenset(Source)
"""Sources that this version has. The other names are reserved: they are spelled here so
that they cannot be given another meaning, and are absent from every scrape."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric family.

    ``name`` is what a scrape shows (counters with ``_total``); ``labels`` are in order and
    always begin with ``target`` where the figure belongs to one.
    """

    name: str
    kind: Kind
    unit: str
    labels: tuple[str, ...]
    source: Source
    help: str

    @property
    def exported(self) -> bool:
        """Whether this version can give it at all."""
        return self.source in EXPORTED


_T = ("target",)
_CALL = ("target", "phase", "status")
_GRAPH = ("target", "phase", "backend")
_ENGINE_CALL = ("target", "engine", "call", "kind", "state", "status")
_PROGRAM = ("target", "program")
_OP = ("target", "op", "dtype", "role", "phase", "backend")


def _counter(name: str, unit: str, labels: tuple[str, ...], source: Source, text: str) -> Metric:
    return Metric(f"{PREFIX}{name}_total", Kind.COUNTER, unit, labels, source, text)


def _gauge(name: str, unit: str, labels: tuple[str, ...], source: Source, text: str) -> Metric:
    return Metric(PREFIX + name, Kind.GAUGE, unit, labels, source, text)


def _histogram(name: str, text: str) -> Metric:
    return Metric(PREFIX + name, Kind.HISTOGRAM, "seconds", _T, Source.TOKEN, text)


METRICS: tuple[Metric, ...] = (
    _counter("prompt_tokens", "tokens", _T, Source.TOKEN,
             "Prompt tokens processed in successful calls; tokens reused from a cache are not among them."),
    _counter("generation_tokens", "tokens", _T, Source.TOKEN,
             "Output rows of decode and prefill runs in successful calls: one for each token generated. Not "
             "known, and so not counted, while the graph level is shed (probe_state); calls_total goes on."),
    _histogram("time_to_first_token_seconds",
               "From the first prefill call of a request to the return that gave its first output row."),
    _histogram("inter_token_latency_seconds",
               "From one return that gave an output row to the next of the same request."),
    _counter("calls", "calls", _CALL, Source.TOKEN,
             "Calls of the engine's decode and encode entry points, by what they returned."),
    _counter("call_seconds", "seconds", _CALL, Source.TOKEN,
             "Time inside these calls, once per call however many sequences share it."),
    _counter("graphs", "graphs", _GRAPH, Source.GRAPH, "Graph executions."),
    _counter("graphs_sampled", "graphs", _GRAPH, Source.GRAPH,
             "Graph executions whose ops were timed; those of the others are estimated from them."),
    _counter("graph_seconds", "seconds", _GRAPH, Source.GRAPH,
             "Time inside graph executions, the setup before the first op included."),
    _counter("op_seconds", "seconds", _OP, Source.OP,
             "Critical-path time of an op on thread 0, its barrier included."),
    _counter("op_calls", "calls", _OP, Source.OP, "Kernels executed; a fused pair is one."),
    _counter("op_flops", "operations", _OP, Source.OP,
             "Floating point operations by shape and type (nominal, not counted by hardware)."),
    _counter("op_bytes", "bytes", _OP, Source.OP,
             "Bytes of tensor rows touched, by shape and type (nominal, not counted by hardware)."),
    _counter("engine_calls", "calls", _ENGINE_CALL, Source.CALLS,
             "Calls of functions that the catalogue describes (PJRT, CUDA, a device's backend). state: "
             "outermost, inner (part of another's time), recorded (run later, as a graph), overflow."),
    _counter("engine_call_seconds", "seconds", _ENGINE_CALL, Source.CALLS,
             "Time of the calling thread inside them; of a compute call, until the work is handed over."),
    _counter("engine_completions", "calls", _ENGINE_CALL, Source.CALLS,
             "Calls that were seen to be done, by an event or a wait."),
    _counter("engine_completion_seconds", "seconds", _ENGINE_CALL, Source.CALLS,
             "From the call to then, of those calls."),
    _counter("engine_call_unwatched_seconds", "seconds", ("target", "engine", "call"), Source.CALLS,
             "Time in which calls of this name were not watched because they came too often for the budget; "
             "what came then is in no other figure."),
    _counter("offload_seconds", "seconds", ("target", "part", "backend", "where"), Source.CALLS,
             "Time with several backends by part (compute on the CPU, handover, wait, copy), inside calls "
             "and between them."),
    _counter("placed_ops", "kernels", ("target", "op", "dtype", "backend", "phase"), Source.CALLS,
             "Operators that were given to each backend, once something was offloaded."),
    _counter("program_compiles", "compiles", _PROGRAM, Source.CALLS, "Times that a program was compiled."),
    _counter("program_compile_seconds", "seconds", _PROGRAM, Source.CALLS, "Time that this took."),
    _counter("program_executions", "executions", _PROGRAM, Source.CALLS, "Times that it was run."),
    _counter("program_dispatch_seconds", "seconds", _PROGRAM, Source.CALLS,
             "Time of the calling thread in these runs: until the work is handed over."),
    _counter("program_completions", "executions", _PROGRAM, Source.CALLS,
             "Runs that were seen to be done."),
    _counter("program_completion_seconds", "seconds", _PROGRAM, Source.CALLS,
             "From the run's call to then, of those runs."),
    _counter("program_errors", "errors", _PROGRAM, Source.CALLS, "Calls about it that failed."),
    _counter("program_bytes", "bytes", ("target", "program", "direction"), Source.CALLS,
             "Host buffers that it took first (in), and its results that were copied to the host (out)."),
    _counter("probe_hits", "hits", ("target", "level"), Source.SELF, "Probe hits in the target."),
    _counter("lost_records", "records", ("target", "kind"), Source.SELF,
             "Records that found no room on their way; figures that come from them are too low."),
    _counter("dropped_series", "series", (), Source.SELF,
             f'Series folded into "{OTHER}" because a scrape has at most 2,500 samples.'),
    _counter("map_update_failures", "failures", _T, Source.SELF,
             "Times that a thread's state found no room in the kernel."),
    _counter("recursion_misses", "misses", _T, Source.SELF,
             "Program runs that the kernel skipped because one was running on that CPU."),
    _gauge("target_info", "", ("target", "program", "model", "engine", "layout"), Source.SELF,
           "Always 1; the labels say what the target is."),
    _gauge("target_state", "", ("target", "reason"), Source.SELF,
           "1 while the target is profiled, 0 when it is not; the reason says why."),
    _gauge("probe_state", "", ("target", "level", "reason"), Source.SELF,
           "1 while the probes of this level see everything they should, 0 when they do not."),
    _gauge("daemon_targets", "processes", ("state",), Source.SELF,
           "Processes with an engine that the daemon knows, by what it does about them."),
    _gauge("daemon_open_files", "descriptors", (), Source.SELF, "Descriptors that the daemon has open."),
    _gauge("daemon_threads", "threads", (), Source.SELF, "Threads of the daemon."),
    _gauge("daemon_resident_bytes", "bytes", (), Source.SELF, "Resident memory of the daemon."),
    _counter("daemon_cpu_seconds", "seconds", (), Source.SELF,
             "CPU time of the daemon, its short-lived children included."),
    _counter("daemon_foreign_events", "events", (), Source.SELF,
             "Events of processes that are not watched, seen at probes that belong to a file."),
    _counter("daemon_announcements_lost", "records", (), Source.SELF,
             "Announcements of new code that the kernel could not keep; all processes were looked at."),
    _counter("daemon_recursion_misses", "misses", ("program",), Source.SELF,
             "Runs of a program of the daemon that the kernel skipped: they are in no other figure."),
    _gauge("daemon_map_entries", "entries", ("map",), Source.SELF,
           "Entries in the maps that the kernel side shares with the daemon, where they are counted."),
    _gauge("build_info", "", ("version",), Source.SELF, "Always 1; the version of profinferd."),
    _gauge("budget_state", "", ("target", "reason"), Source.SAMPLING,
           "1 while the whole wanted level of detail fits the budget, 0 while levels are shed: for the "
           "budget, or for the least token rate (qos); recovered: some of them are back."),
    _counter("budget_transitions", "changes", ("target", "level"), Source.SAMPLING,
             "Times that this level of probes became the highest in use."),
    _counter("bursts", "bursts", ("target", "outcome"), Source.SAMPLING,
             "Times that op probes were armed: as long as planned, or cut short."),
    _counter("overhead_seconds", "seconds", ("target", "how"), Source.SAMPLING,
             "What profiling cost the target, estimated from calibrated prices: hits of call, graph and op "
             "probes, cycles of arming and disarming, calls of engines described by data (engine_call), "
             "and watching waits and page faults."),
    _gauge("overhead_measured_seconds", "seconds", ("target", "bound"), Source.SAMPLING,
           "What op probes cost it until now as its own tokens show: mean, and low and high end of a 95 % "
           "interval. Compare with how op and cycle of overhead_seconds_total."),
    _counter("cause_unwatched_seconds", "seconds", ("target", "what"), Source.KERNEL,
             "Time in which waits or page faults of the target were not watched because that cost too much "
             "of the budget; what came then is in no other figure."),
    _counter("page_faults", "faults", ("target", "kind", "mapping"), Source.KERNEL,
             "Page faults of the target's threads, by what the page belongs to. A fault is not a page: the "
             "kernel maps neighbours along."),
    _counter("sched_wait_seconds", "seconds", ("target", "cause"), Source.KERNEL,
             "Time that compute threads of the target were ready or blocked and did not run while a graph "
             "ran, all threads together."),
    _counter("preemptions", "preemptions", _T, Source.KERNEL,
             "Times that a compute thread of the target lost its CPU although it could run, in a graph."),
    _counter("hardware_events", "events", ("target", "event"), Source.COUNTERS,
             "Performance events of the target's threads, scaled where they took turns."),
    _gauge("model_resident_bytes", "bytes", _T, Source.KERNEL,
           "Bytes of the model file that are in memory."),
    _gauge("machine_memory_bandwidth_bytes_per_second", "bytes/second", (), Source.CALIBRATION,
           "Memory bandwidth that this machine reached when it was measured: reading, all CPUs."),
    _gauge("machine_flops_per_second", "operations/second", (), Source.CALIBRATION,
           "Floating point rate that this machine reached when it was measured: float32, all CPUs."),
)  # fmt: skip

_BY_NAME = {metric.name: metric for metric in METRICS}


def metric(short: str) -> Metric:
    """The metric called ``profinfer_<short>``. Raises KeyError for a name not in the registry."""
    return _BY_NAME[PREFIX + short]


def markdown() -> str:
    """The text of ``docs/metrics.md``."""
    buckets = " ".join(f"{bound:g}" for bound in LATENCY_BUCKETS)
    lines = [
        "<!-- Written by `python -m profinferd.exporters.registry`; edit exporters/registry.py instead. -->",
        "# Metrics",
        "",
        "What `--listen` serves on `/metrics`. Base units; counters only grow. The label `target` is the",
        "program and the model's file name, so it stays the same across restarts; no label ever holds a",
        "process id, thread, tensor or address.",
        "",
        f"Both histograms have these upper bounds in seconds: {buckets}.",
        "",
        "A figure that this machine, kernel or engine build cannot give is absent, never 0. A scrape has at",
        f'most 2,500 samples: label values beyond that are summed under "{OTHER}", and',
        "`profinfer_dropped_series_total` says how many series went there. Rates and ratios are left to",
        "PromQL, for example `rate(profinfer_generation_tokens_total[1m])` or, as bytes per second,",
        "`rate(profinfer_op_bytes_total[1m]) / rate(profinfer_op_seconds_total[1m])`.",
        "",
        *_table(m for m in METRICS if m.exported),
        "",
        "## Reserved names",
        "",
        "Not exported by this version; the names are fixed so that nothing else takes them.",
        "",
        *_table(m for m in METRICS if not m.exported),
        "",
    ]
    return "\n".join(lines)


def _table(metrics: Iterable[Metric]) -> list[str]:
    rows = ["| name | type | unit | labels | needs | meaning |", "|---|---|---|---|---|---|"]
    for m in metrics:
        labels = " ".join(f"`{label}`" for label in m.labels)
        rows.append(f"| `{m.name}` | {m.kind} | {m.unit} | {labels} | {m.source} | {m.help} |")
    return rows


if __name__ == "__main__":
    print(markdown(), end="")
