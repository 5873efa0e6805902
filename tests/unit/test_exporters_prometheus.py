# SPDX-License-Identifier: Apache-2.0
"""The exposition: read back with the client library's own parsers and held against the registry."""

from __future__ import annotations

import dataclasses
import math
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence

import pytest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from prometheus_client.samples import Sample

from profinferd.agent.model.calldata import ProgramTotal
from profinferd.agent.model.eventdata import Events, EventTotal
from profinferd.agent.model.peaks import Peak, Peaks
from profinferd.agent.model.snapshot import OTHER_STATUS, GraphCount, Snapshot
from profinferd.exporters import registry
from profinferd.exporters.prometheus import MAX_SAMPLES, PrometheusExporter, Seen, target_label
from profinferd.exporters.registry import LATENCY_BUCKETS, METRICS

from . import snapshots

TARGET = "llama-server:toy-270m-q4_k_m.gguf"


class Scraper:
    """One exporter over snapshots that a test changes."""

    def __init__(self, *seen: Snapshot, state: str = "ok") -> None:
        self.state = state
        self.seen: Sequence[Snapshot] = seen
        self._exporter = PrometheusExporter(lambda: [Seen(s, self.state) for s in self.seen], "9.9")

    def text(self) -> str:
        return self._exporter.scrape()[1].decode()

    def samples(self) -> list[Sample]:
        return [sample for family in parse_text(self.text()) for sample in family.samples]

    def values(self, short: str) -> dict[tuple[str, ...], float]:
        """Values of one metric by its labels in the order of the registry."""
        labels = registry.metric(short).labels
        return {
            tuple(s.labels[label] for label in labels): s.value
            for s in self.samples()
            if s.name == registry.PREFIX + short
        }


def test_values_are_those_of_the_snapshot() -> None:
    """The same numbers as the JSON, under the names of the design."""
    scrape = Scraper(snapshots.busy())
    assert scrape.values("prompt_tokens_total") == {(TARGET,): 6}
    assert scrape.values("generation_tokens_total") == {(TARGET,): 42}
    assert scrape.values("calls_total") == {
        (TARGET, "prefill", "0"): 1, (TARGET, "decode", "0"): 41, (TARGET, "decode", "1"): 2
    }  # fmt: skip
    assert scrape.values("call_seconds_total")[(TARGET, "decode", "0")] == 0.75
    assert scrape.values("graphs_total") == {(TARGET, "decode", "CPU"): 41, (TARGET, "prefill", "CPU"): 1}
    ops = scrape.values("op_seconds_total")
    assert ops[(TARGET, "MUL_MAT", "q4_K", "ffn_up", "decode", "CPU")] == 0.5
    assert math.fsum(ops.values()) == pytest.approx(math.fsum(op.seconds for op in snapshots.busy().ops))
    assert scrape.values("probe_hits_total")[(TARGET, "op")] == 33000
    assert scrape.values("map_update_failures_total") == {(TARGET,): 0}
    assert scrape.values("probe_state") == {(TARGET, "op", "ok"): 1}
    assert scrape.values("build_info") == {("9.9",): 1}
    assert scrape.values("target_state") == {(TARGET, "ok"): 1}
    assert Scraper(snapshots.idle(), state="idle").values("target_state") == {("llama-server", "idle"): 0}


def test_histograms() -> None:
    """Buckets of the design, cumulative, with count and sum; no _created series."""
    scrape = Scraper(snapshots.busy())
    name = "profinfer_inter_token_latency_seconds"
    buckets = {s.labels["le"]: s.value for s in scrape.samples() if s.name == f"{name}_bucket"}
    assert [float(edge) for edge in buckets] == [*LATENCY_BUCKETS, math.inf]
    assert buckets["0.01"] == 0 and buckets["0.02"] == 41 and buckets["+Inf"] == 41
    whole = {s.name: s.value for s in scrape.samples() if s.name in (f"{name}_sum", f"{name}_count")}
    assert whole == {f"{name}_count": 41, f"{name}_sum": pytest.approx(41 * 0.0183)}
    assert "_created" not in scrape.text()


def families(text: str, openmetrics: bool) -> list[Family]:
    parse = parse_openmetrics if openmetrics else parse_text
    return list(parse(text))


@pytest.mark.parametrize("kind", ["busy", "sampled", "idle", "hostile"])
@pytest.mark.parametrize("openmetrics", [False, True])
def test_every_sample_is_in_the_registry(kind: str, openmetrics: bool) -> None:
    """Name, type, help and labels, in both formats, also with names chosen against us."""
    snapshot = getattr(snapshots, kind)()
    exporter = PrometheusExporter(lambda: [Seen(snapshot, "ok")], "9.9")
    content_type, body = exporter.scrape("application/openmetrics-text; version=1.0.0" if openmetrics else "")
    assert content_type.startswith("application/openmetrics-text" if openmetrics else "text/plain")
    known = {m.name: m for m in METRICS if m.exported}
    seen: set[tuple[str, tuple[tuple[str, str], ...]]] = set()
    for family in families(body.decode(), openmetrics):
        name = family.name + "_total" if family.type == "counter" else family.name
        about = known[name]
        assert (family.type, family.documentation) == (about.kind, about.help)
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(about.labels)
            assert math.isfinite(sample.value)
            assert sample.value >= 0 or sample.labels.get("bound") == "low"
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in seen
            seen.add(key)


def test_absent_is_not_zero() -> None:
    """C14: no NaN, no infinity, and no 0 in the place of what is not known."""
    broken = dataclasses.replace(
        snapshots.busy(),
        ops=(
            snapshots.op(seconds=math.nan, flops=None, bytes=None),
            snapshots.op(role="ffn_down", seconds=math.inf, flops=None, bytes=-1),
        ),
    )
    scrape = Scraper(broken)
    assert scrape.values("op_seconds_total") == {}
    assert scrape.values("op_flops_total") == {} and scrape.values("op_bytes_total") == {}
    assert "NaN" not in scrape.text() and "} +Inf" not in scrape.text()
    idle = Scraper(snapshots.idle())
    assert idle.values("op_seconds_total") == {} and idle.values("prompt_tokens_total") == {
        ("llama-server",): 0
    }


def test_what_the_kernel_skipped() -> None:
    """C21, C66: a full map and the recursion guard have counters of their own."""
    one = snapshots.busy()
    assert Scraper(one).values("recursion_misses_total") == {}
    lost = dataclasses.replace(one.lost, total=5, by_kind={"map_full": 2, "recursion_misses": 3})
    scrape = Scraper(dataclasses.replace(one, lost=lost))
    assert scrape.values("map_update_failures_total") == {(TARGET,): 2}
    assert scrape.values("recursion_misses_total") == {(TARGET,): 3}


def test_state_of_the_probes_says_why() -> None:
    """0 with a reason, never a bare 0."""
    one = snapshots.busy()
    holed = dataclasses.replace(one, graphs=(snapshots.graph(uncovered=2),))
    assert Scraper(holed).values("probe_state") == {(TARGET, "op", "uncovered"): 0}
    attach = dataclasses.replace(one.target.attach, complete=False)
    wild = dataclasses.replace(one, target=dataclasses.replace(one.target, attach=attach))
    assert Scraper(wild).values("probe_state") == {(TARGET, "op", "incomplete"): 0}
    assert Scraper(snapshots.idle()).values("probe_state") == {("llama-server", "op", "absent"): 0}


def test_budget_and_overhead() -> None:
    """C18: what profiling costs, by what, and whether all that was wanted is afforded."""
    scrape = Scraper(snapshots.sampled())
    assert scrape.values("budget_state") == {(TARGET, "ok"): 1}
    assert scrape.values("overhead_seconds_total") == {
        (TARGET, "call"): 0.0002, (TARGET, "graph"): 0.0004, (TARGET, "op"): 0.001, (TARGET, "cycle"): 0.0006
    }  # fmt: skip
    measured = scrape.values("overhead_measured_seconds")
    # 0.71 s with a slowdown of 0.28 % would have been 0.708 s without; noise may go below zero.
    assert measured[TARGET, "mean"] == pytest.approx(0.71 - 0.71 / 1.0028)
    assert measured[TARGET, "low"] == pytest.approx(0.71 - 0.71 / 0.999)
    assert measured[TARGET, "high"] == pytest.approx(0.71 - 0.71 / 1.0066)
    assert scrape.values("bursts_total") == {(TARGET, "complete"): 2, (TARGET, "cut"): 1}
    assert scrape.values("budget_transitions_total") == {(TARGET, "graph"): 2, (TARGET, "op"): 1}
    assert scrape.values("graphs_sampled_total") == {
        (TARGET, "decode", "CPU"): 41,
        (TARGET, "prefill", "CPU"): 1,
    }
    every = Scraper(snapshots.busy())
    for absent in ("budget_state", "overhead_seconds_total", "overhead_measured_seconds", "bursts_total"):
        assert every.values(absent) == {}


@pytest.mark.parametrize(
    ("level", "reason", "shown", "shed"),
    [
        ("graph", "qos: 3.9 tokens/s, 4 wanted", "qos", {"op"}),
        ("token", "budget: token and graph probes alone cost 1.31%", "budget", {"op", "graph"}),
        ("token", "recovered: budget and token rate allow it again", "recovered", {"op", "graph"}),
        ("nothing", "budget: token probes alone cost 1.02%", "budget", {"op", "graph", "token"}),
    ],
)
def test_what_was_shed_and_why(level: str, reason: str, shown: str, shed: set[str]) -> None:
    """C20: the reason is a word, its figures are no label."""
    scrape = Scraper(snapshots.sampled(level, reason))
    assert scrape.values("budget_state") == {(TARGET, shown): 0}
    states = scrape.values("probe_state")
    assert {name for (_, name, _), value in states.items() if not value} == shed
    assert all((why == "shed") is (name in shed) for _, name, why in states)


def test_statuses_beyond_those_told_apart() -> None:
    """The model's stand-in for them is not shown as a number that a call returned."""
    one = snapshots.busy()
    calls = (dataclasses.replace(one.calls[0], status=OTHER_STATUS),)
    assert list(Scraper(dataclasses.replace(one, calls=calls)).values("calls_total")) == [
        (TARGET, "prefill", "other")
    ]


def test_label_is_stable_and_never_a_pid() -> None:
    """C20: a restart of the same program with the same model continues the same series."""
    one = snapshots.busy()
    again = dataclasses.replace(one, target=dataclasses.replace(one.target, pid=4343))
    assert target_label(one) == target_label(again) == TARGET
    assert "4242" not in Scraper(one).text()
    # Both at once are one sum, not a duplicate series.
    assert Scraper(one, again).values("prompt_tokens_total") == {(TARGET,): 12}


def many(count: int, scale: float = 1.0) -> Snapshot:
    """``count`` different ops; also as many graphs, calls and kinds of loss."""
    counters = snapshots.busy().counters
    assert counters is not None
    return dataclasses.replace(
        snapshots.busy(),
        ops=tuple(snapshots.op(role=f"role{i}", seconds=scale * (1 + i / count)) for i in range(count)),
        counters=dataclasses.replace(
            counters, graphs=tuple(GraphCount("decode", f"backend{i}", 41, 41, 0.7) for i in range(count))
        ),
        calls=tuple(dataclasses.replace(snapshots.busy().calls[0], status=i) for i in range(count)),
        lost=dataclasses.replace(snapshots.busy().lost, by_kind={f"kind{i}": 1 for i in range(count)}),
    )


def test_a_scrape_is_bounded_and_loses_nothing() -> None:
    """C20: at most 2,500 samples; the rest is in "other", counted, and sums stay whole."""
    snapshot = many(5000)
    scrape = Scraper(snapshot)
    assert len(scrape.samples()) <= MAX_SAMPLES
    ops = scrape.values("op_seconds_total")
    assert ops[(TARGET, "other", "other", "other", "decode", "other")] > 0
    assert math.fsum(ops.values()) == pytest.approx(math.fsum(op.seconds for op in snapshot.ops))
    assert math.fsum(scrape.values("graphs_total").values()) == 41 * 5000
    assert math.fsum(scrape.values("lost_records_total").values()) == 5000
    assert scrape.values("dropped_series_total")[()] > 4 * 4000
    assert (TARGET, "MUL_MAT", "q4_K", "role4999", "decode", "CPU") in ops  # the largest are shown


def test_no_counter_ever_falls() -> None:
    """Which ops are the largest changes between scrapes; what is shown does not."""
    scrape, rng = Scraper(), random.Random(7)
    spent = [0.0] * 900
    before: dict[tuple[str, ...], float] = {}
    for size in (10, 700, 900, 900, 900):
        for i in range(size):
            spent[i] += rng.random() * rng.choice((0.01, 5.0))
        ops = tuple(snapshots.op(role=f"role{i}", seconds=spent[i]) for i in range(size))
        scrape.seen = [dataclasses.replace(snapshots.busy(), ops=ops)]
        now = scrape.values("op_seconds_total")
        assert set(before) <= set(now)
        assert all(now[key] >= value - 1e-9 for key, value in before.items())
        dropped = scrape.values("dropped_series_total")
        assert dropped[()] >= before.get(("dropped",), 0)
        before = now


def test_programs_beyond_those_told_apart_are_counted() -> None:
    """48 find a place; of each of the others seven figures and two of bytes are in "other"."""
    programs = tuple(ProgramTotal(f"p{i}", 1, 0.5, 10, 0.1, 10, 0.2, 100, 50, 0) for i in range(60))
    scrape = Scraper(dataclasses.replace(snapshots.busy(), programs=programs))
    runs = scrape.values("program_executions_total")
    assert sum(runs.values()) == 600 and len(runs) == 49 and runs[(TARGET, "other")] == 120
    assert scrape.values("dropped_series_total")[()] == 12 * 7 + (120 - 48)


def test_what_was_folded_once_stays_so() -> None:
    """Another target comes, and with it room for more label sets: "other" keeps what it has."""
    scrape = Scraper(many(60))
    before = scrape.values("calls_total")
    assert [key for key in before if key[2] == "other"]
    second = snapshots.busy()
    about = dataclasses.replace(second.target, exe="/usr/bin/second")
    scrape.seen = [many(60), dataclasses.replace(second, target=about)]
    for _ in range(2):
        now = scrape.values("calls_total")
        assert all(now[key] >= value for key, value in before.items())
        assert any(key[0].startswith("second") for key in now)


def test_names_that_fall_together_are_summed() -> None:
    """Two roles that differ in unprintable characters only would be one series twice."""
    ops = (snapshots.op(role="a\x01b", seconds=1.0), snapshots.op(role="a\x02b", seconds=2.0))
    scrape = Scraper(dataclasses.replace(snapshots.busy(), ops=ops))
    assert list(scrape.values("op_seconds_total").values()) == [3.0]


def test_cost_of_a_scrape() -> None:
    """The work per sample does not grow with their number (the benchmark has the time)."""
    scrape = Scraper(many(5000))
    samples = len(scrape.samples())
    assert samples <= MAX_SAMPLES
    few, many_of = Scraper(many(20)), Scraper(many(250))
    steps = []
    for one in (few, many_of):
        count = len(one.samples())
        steps.append(python_calls(one.text) / count)
    assert steps[1] <= 1.5 * steps[0]


def python_calls(work: Callable[[], object]) -> int:
    """How many Python functions ``work`` calls: the same on any machine, however busy."""
    made = 0

    def profile(frame: object, event: str, argument: object) -> None:
        nonlocal made
        made += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    return made


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_agrees() -> None:
    """Prometheus' own linter has nothing to say."""
    done = subprocess.run(
        ["promtool", "check", "metrics"],
        input=Scraper(snapshots.busy()).text(),
        text=True,
        capture_output=True,
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_performance_events_and_peaks_are_absent_or_figures() -> None:
    """C09: an event that the machine does not have is no sample; the machine's peaks come once."""
    plain = Scraper(snapshots.busy())
    names = ("machine_memory_bandwidth_bytes_per_second", "machine_flops_per_second")
    assert not any(plain.values(name) for name in ("hardware_events_total", *names))
    totals = (EventTotal("cycles", None, None, "no unit"), EventTotal("page-faults", 12, 0.5))
    counted = dataclasses.replace(
        snapshots.busy(),
        hardware=Events(totals, (), {}, 1),
        peaks=Peaks((Peak(1, 1e10, 9e9, 5e10), Peak(2, 2e10, 9e9, None))),
    )
    scrape = Scraper(counted, counted)
    assert scrape.values("hardware_events_total") == {(TARGET, "page-faults"): 24}
    assert scrape.values(names[0]) == {(): 2e10}
    assert scrape.values(names[1]) == {}
