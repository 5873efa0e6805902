# SPDX-License-Identifier: Apache-2.0
"""OTLP against a real HTTP receiver that decodes the protobuf; and against endpoints that fail."""

from __future__ import annotations

import contextlib
import gzip
import resource
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from prometheus_client.metrics_core import Metric as Family

from profinferd.agent.model.latency import BUCKETS
from profinferd.exporters import otlp
from profinferd.exporters.otlp import OPERATION, PROVIDER, OtlpExporter, otlp_name, otlp_unit
from profinferd.exporters.prometheus import Seen, SnapshotCollector
from profinferd.exporters.registry import METRICS, Kind
from tests.unit import snapshots

LIMIT = 60.0


class Receiver:
    """Keeps what it was sent, decoded; ``status`` is what it answers."""

    def __init__(self) -> None:
        self.requests: list[ExportMetricsServiceRequest] = []
        self.status = 200
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                assert self.path == "/v1/metrics"
                assert self.headers["content-type"] == "application/x-protobuf"
                receiver.requests.append(ExportMetricsServiceRequest.FromString(body))
                self.send_response(receiver.status)
                answer = ExportMetricsServiceResponse().SerializeToString()
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, format: str, *arguments: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/v1/metrics"

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def wait(self, number: int) -> None:
        until = time.monotonic() + LIMIT
        while len(self.requests) < number:
            assert time.monotonic() < until, "nothing came"
            time.sleep(0.01)

    def metrics(self, at: int = -1) -> dict[str, Any]:
        (of_resource,) = self.requests[at].resource_metrics
        (of_scope,) = of_resource.scope_metrics
        return {metric.name: metric for metric in of_scope.metrics}


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with contextlib.closing(Receiver()) as one:
        yield one


def attributes(point: Any) -> dict[str, str]:
    return {pair.key: pair.value.string_value for pair in point.attributes}


def exporter(url: str, *seen: Seen, **more: Any) -> OtlpExporter:
    collector = SnapshotCollector(lambda: seen or (Seen(snapshots.sampled(), "ok"),), "1.2.3")
    more.setdefault("timeout", LIMIT)
    return OtlpExporter(url, lambda: list(collector.collect()), "1.2.3", **more)


def test_the_genai_metrics_have_what_the_conventions_ask_for(receiver: Receiver) -> None:
    assert exporter(receiver.url).send()
    snapshot = snapshots.sampled()
    assert snapshot.histograms is not None
    for name, histogram in (
        ("gen_ai.server.time_to_first_token", snapshot.histograms.time_to_first_token),
        ("gen_ai.server.time_per_output_token", snapshot.histograms.inter_token),
    ):
        metric = receiver.metrics()[name]
        (point,) = metric.histogram.data_points
        found = attributes(point)
        assert metric.unit == "s"
        assert metric.histogram.aggregation_temporality == 2, "cumulative"
        assert found["gen_ai.operation.name"] == OPERATION
        assert found["gen_ai.provider.name"] == PROVIDER
        assert found["gen_ai.request.model"] == snapshot.target.model
        assert tuple(point.explicit_bounds) == BUCKETS
        assert sum(point.bucket_counts) == point.count == histogram.count
        assert point.sum == pytest.approx(histogram.sum)
        below = 0
        for count, expected in zip(point.bucket_counts, histogram.counts, strict=False):
            below += count
            assert below == expected


def test_everything_else_is_under_our_own_name(receiver: Receiver) -> None:
    assert exporter(receiver.url).send()
    names = {otlp_name(m): m for m in METRICS}
    for name, metric in receiver.metrics().items():
        if name.startswith("gen_ai."):
            continue
        described = names[name]
        assert metric.unit == otlp_unit(described)
        kind = {Kind.COUNTER: "sum", Kind.GAUGE: "gauge", Kind.HISTOGRAM: "histogram"}[described.kind]
        assert metric.WhichOneof("data") == kind
        if kind == "sum":
            assert metric.sum.is_monotonic
            assert metric.sum.aggregation_temporality == 2


def test_values_are_those_of_the_snapshot(receiver: Receiver) -> None:
    assert exporter(receiver.url).send()
    snapshot = snapshots.sampled()
    assert snapshot.counters is not None
    (tokens,) = receiver.metrics()["profinfer.generation_tokens"].sum.data_points
    assert tokens.as_double == snapshot.counters.generation_tokens
    spent: dict[tuple[str, str, str, str, str], float] = {}
    for op in snapshot.ops:
        key = (op.op, op.dtype, op.role, op.phase, op.backend)
        spent[key] = spent.get(key, 0.0) + op.seconds
    points = receiver.metrics()["profinfer.op_seconds"].sum.data_points
    assert len(points) == len(spent)
    for point in points:
        found = attributes(point)
        key = (found["op"], found["dtype"], found["role"], found["phase"], found["backend"])
        assert point.as_double == pytest.approx(spent[key])


def test_the_resource_says_who_sends(receiver: Receiver) -> None:
    assert exporter(receiver.url).send()
    found = attributes(receiver.requests[0].resource_metrics[0].resource)
    assert found["service.name"] == "profinferd"
    assert found["service.version"] == "1.2.3"
    assert found["host.name"] == socket.gethostname()


def test_times_go_forward(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the exporter's beginning on; a clock that is set back makes no message older than that."""
    clock = iter([5000, 7000, 9000, 1000])
    monkeypatch.setattr(otlp, "time", SimpleNamespace(time_ns=lambda: next(clock)))
    one = exporter(receiver.url)
    times = []
    for at in range(3):
        assert one.send()
        (point,) = receiver.metrics(at)["profinfer.generation_tokens"].sum.data_points
        times.append((point.start_time_unix_nano, point.time_unix_nano))
    assert times == [(5000, 7000), (5000, 9000), (5000, 5000)]


def test_it_goes_on_by_itself(receiver: Receiver) -> None:
    one = exporter(receiver.url, every=0.05)
    one.start()
    receiver.wait(3)
    one.close()
    assert not any(t.name == "otlp" for t in threading.enumerate())
    assert one.sent >= 3


def test_headers_are_sent(receiver: Receiver) -> None:
    assert exporter(receiver.url, headers={"authorization": "Bearer x"}).send()


# ---- endpoints that fail --------------------------------------------------------------


@contextlib.contextmanager
def closed_port() -> Iterator[int]:
    """Bound and not listening: nobody else takes it, and whoever connects is refused."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        yield int(sock.getsockname()[1])


def test_an_outage_is_said_once_and_nothing_is_kept(receiver: Receiver) -> None:
    """Counters are cumulative: the first message after it holds everything."""
    said: list[str] = []
    one = exporter(receiver.url, timeout=LIMIT, say=said.append)
    receiver.status = 400
    assert not one.send()
    assert not one.send()
    assert len(said) == 1
    assert "does not take" in said[0]
    receiver.status = 200
    count = len(receiver.requests)
    assert one.send()
    assert len(receiver.requests) == count + 1, "what failed is not sent again"
    assert (len(said), one.failed, one.sent) == (2, 2, 1)


def test_a_dead_endpoint_blocks_nobody_and_grows_nothing() -> None:
    with closed_port() as port:
        one = exporter(f"http://127.0.0.1:{port}/v1/metrics", every=0.001, timeout=0.05)
        one.start()
        until = time.monotonic() + 4 * LIMIT

        def fails(times: int) -> None:
            while one.failed < times:
                assert time.monotonic() < until
                time.sleep(0.01)

        fails(20)
        threads, before = threading.active_count(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        fails(320)
        assert threading.active_count() <= threads
        # 300 messages of some 50 kB, if they were kept, would be 15 MB.
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 9000
        begun = time.monotonic()
        one.close()
        assert time.monotonic() - begun < LIMIT


def test_an_endpoint_that_never_answers() -> None:
    """It takes the connection and keeps it: the message is given up, close() does not wait for ever."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen(16)
        one = exporter(f"http://127.0.0.1:{sock.getsockname()[1]}/v1/metrics", every=0.01, timeout=0.3)
        one.start()
        until = time.monotonic() + LIMIT
        while not one.failed:
            assert time.monotonic() < until
            time.sleep(0.01)
        begun = time.monotonic()
        one.close()
        assert time.monotonic() - begun < LIMIT


def test_a_target_without_snapshot_has_its_state(receiver: Receiver) -> None:
    """Absent is not zero: no tokens of a process that cannot be profiled."""
    assert exporter(receiver.url, Seen(snapshots.idle(), "no symbols")).send()
    (point,) = receiver.metrics()["profinfer.target_state"].gauge.data_points
    assert attributes(point)["reason"] == "no symbols"
    assert point.as_double == 0


def test_figures_that_cannot_be_made_do_not_end_it(receiver: Receiver) -> None:
    """It is said once, and the next message is as if nothing had been."""
    said: list[str] = []
    collector = SnapshotCollector(lambda: (Seen(snapshots.sampled(), "ok"),), "1.2.3")
    good = False

    def families() -> list[Family]:
        if not good:
            raise ZeroDivisionError
        return list(collector.collect())

    with contextlib.closing(
        OtlpExporter(receiver.url, families, "1.2.3", timeout=LIMIT, say=said.append)
    ) as one:
        assert not one.send() and not receiver.requests
        assert any("ZeroDivisionError" in line for line in said)
        good = True
        assert one.send() and receiver.requests
