# SPDX-License-Identifier: Apache-2.0
"""OpenTelemetry: the same figures, sent every few seconds to a collector (OTLP over HTTP, protobuf).

The names are those of the registry under ``profinfer.``, and beside them the server metrics of the
GenAI conventions that can be seen from outside: ``gen_ai.server.time_to_first_token`` and
``gen_ai.server.time_per_output_token``. The duration of a request is not among them: where it
begins and ends is known to the server alone.

One thread makes and sends one message at a time, from what is known at that moment. Nothing is kept
for later: while the endpoint is down, messages are left out, and the counters of the next one that
arrives hold everything. Needs the packages of ``profinferd[otlp]``.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricExportResult,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from prometheus_client.metrics_core import Metric as Family

from .registry import METRICS, PREFIX, Kind
from .registry import Metric as Described

PROVIDER = "llama.cpp"
"""``gen_ai.provider.name``; the conventions have no name for engines that run on one's own machine."""
OPERATION = "text_completion"
"""``gen_ai.operation.name``: whether a prompt was a chat is not to be seen from outside."""
GEN_AI = {
    "time_to_first_token_seconds": "gen_ai.server.time_to_first_token",
    "inter_token_latency_seconds": "gen_ai.server.time_per_output_token",
}
_UNITS = {
    "seconds": "s",
    "bytes": "By",
    "bytes/second": "By/s",
    "operations/second": "{operation}/s",
    "": "1",
}
_BY_NAME = {metric.name: metric for metric in METRICS}
_CUMULATIVE = AggregationTemporality.CUMULATIVE

Families = Callable[[], Iterable[Family]]


def otlp_name(metric: Described) -> str:
    """``profinfer_op_seconds_total`` is ``profinfer.op_seconds`` here."""
    return "profinfer." + metric.name.removeprefix(PREFIX).removesuffix("_total")


def otlp_unit(metric: Described) -> str:
    """The unit in the notation that OpenTelemetry uses (UCUM)."""
    return _UNITS.get(metric.unit) or f"{{{metric.unit.removesuffix('s')}}}"


def convert(
    families: Iterable[Family], resource: Resource, version: str, start_ns: int, now_ns: int
) -> MetricsData:
    """Everything as one message. Times in ns since 1970; families that the registry lacks are left out."""
    known = [(_BY_NAME[name], family) for family in families if (name := _name(family)) in _BY_NAME]
    models = _models(family for metric, family in known if metric.name == f"{PREFIX}target_info")
    metrics: list[Metric] = []
    for metric, family in known:
        if metric.kind is Kind.HISTOGRAM:
            points = _histograms(family, start_ns, now_ns)
            metrics.append(_histogram(otlp_name(metric), metric.help, points))
            short = metric.name.removeprefix(PREFIX)
            if short in GEN_AI:
                named = [_gen_ai(point, models) for point in points]
                metrics.append(_histogram(GEN_AI[short], metric.help, named))
        else:
            metrics.append(_numbers(metric, family, start_ns, now_ns))
    scope = ScopeMetrics(
        InstrumentationScope("profinferd", version), [m for m in metrics if m.data.data_points], ""
    )
    return MetricsData([ResourceMetrics(resource, [scope], "")])


def _name(family: Family) -> str:
    return f"{family.name}_total" if family.type == "counter" else str(family.name)


def _numbers(metric: Described, family: Family, start_ns: int, now_ns: int) -> Metric:
    points = [
        NumberDataPoint(dict(sample.labels), start_ns, now_ns, float(sample.value))
        for sample in family.samples
        if sample.name == metric.name
    ]
    data = Sum(points, _CUMULATIVE, True) if metric.kind is Kind.COUNTER else Gauge(points)
    return Metric(otlp_name(metric), metric.help, otlp_unit(metric), data)


def _histogram(name: str, text: str, points: Sequence[HistogramDataPoint]) -> Metric:
    return Metric(name, text, "s", Histogram(points, _CUMULATIVE))


def _histograms(family: Family, start_ns: int, now_ns: int) -> list[HistogramDataPoint]:
    """One point per label set; buckets there count everything below, here what is between."""
    buckets: dict[tuple[tuple[str, str], ...], list[tuple[float, float]]] = {}
    sums: dict[tuple[tuple[str, str], ...], float] = {}
    for sample in family.samples:
        labels = tuple(sorted((k, v) for k, v in sample.labels.items() if k != "le"))
        if sample.name.endswith("_bucket"):
            buckets.setdefault(labels, []).append((float(sample.labels["le"]), sample.value))
        elif sample.name.endswith("_sum"):
            sums[labels] = sample.value
    points = []
    for labels, pairs in buckets.items():
        pairs.sort()
        below = [round(count) for _, count in pairs]
        counts = [b - a for a, b in zip([0, *below], below, strict=False)]
        bounds = [bound for bound, _ in pairs[:-1]]  # the last one is infinity
        points.append(
            HistogramDataPoint(
                dict(labels), start_ns, now_ns, below[-1], sums.get(labels, 0.0), counts, bounds,
                float("nan"), float("nan"),
            )
        )  # fmt: skip
    return points


def _models(infos: Iterable[Family]) -> dict[str, str]:
    """The model of each target, where it is known."""
    return {
        sample.labels["target"]: sample.labels["model"]
        for family in infos
        for sample in family.samples
        if sample.labels.get("model")
    }


def _gen_ai(point: HistogramDataPoint, models: Mapping[str, str]) -> HistogramDataPoint:
    """The same point with the attributes that the conventions ask for."""
    target = str((point.attributes or {}).get("target", ""))
    attributes = {
        "gen_ai.operation.name": OPERATION,
        "gen_ai.provider.name": PROVIDER,
        "profinfer.target": target,
    }
    if target in models:
        attributes["gen_ai.request.model"] = attributes["gen_ai.response.model"] = models[target]
    return HistogramDataPoint(
        attributes, point.start_time_unix_nano, point.time_unix_nano, point.count, point.sum,
        point.bucket_counts, point.explicit_bounds, point.min, point.max,
    )  # fmt: skip


class OtlpExporter:
    """Sends every ``every`` seconds until it is closed. ``say`` hears of an outage and of its end, once.

    ``endpoint``: the whole address, usually ``http://HOST:4318/v1/metrics``. ``families`` is called
    on the exporter's own thread, and must be safe to call there.
    """

    def __init__(
        self,
        endpoint: str,
        families: Families,
        version: str,
        *,
        every: float = 15.0,
        timeout: float = 5.0,
        headers: Mapping[str, str] | None = None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.sent = self.failed = 0
        self._families, self._version, self._every, self._say = families, version, every, say
        self._endpoint = endpoint
        self._timeout = timeout
        self._start_ns = time.time_ns()
        self._resource = Resource(
            {"service.name": "profinferd", "service.version": version, "host.name": socket.gethostname()}
        )
        self._exporter = OTLPMetricExporter(endpoint, timeout=timeout, headers=dict(headers or {}))
        self._over = threading.Event()
        self._down = False
        self._thread = threading.Thread(target=self._run, name="otlp", daemon=True)

    def start(self) -> None:
        """Begin; the first message goes after one interval."""
        self._thread.start()

    def _run(self) -> None:
        while not self._over.wait(self._every):
            self.send()

    def send(self) -> bool:
        """Make and send one message now; whether it was taken."""
        try:
            data = convert(
                self._families(),
                self._resource,
                self._version,
                self._start_ns,
                max(time.time_ns(), self._start_ns),
            )
            taken = self._exporter.export(data) is MetricExportResult.SUCCESS
        except Exception as error:  # noqa: BLE001 - of the library, or ours: it must not end the thread
            self._say(f"sending to {self._endpoint} failed: {type(error).__name__}")
            taken = False
        self.sent += taken
        self.failed += not taken
        if taken is self._down:
            self._down = not taken
            word = "does not take" if self._down else "takes"
            self._say(f"the OTLP endpoint {self._endpoint} {word} metrics{'' if self._down else ' again'}")
        return taken

    def close(self) -> None:
        """Stop; waits for a message under way no longer than its timeout. May be called twice."""
        self._over.set()
        # Takes away the patience of a retry that is under way.
        self._exporter.shutdown()
        if self._thread.is_alive():
            self._thread.join(self._timeout + 1)
