# SPDX-License-Identifier: Apache-2.0
"""How fast recordings are written and read: ``python -m tests.bench.bigrecording [--size 1G]``.

The big recording is made by repetition: one call of a decoder of 24 layers, with kernel times
drawn from a fixed distribution around what each kernel took in a real run of gemma-3-270M's
shape, is repeated with new times (so that they compress no better than real ones) until the file
has the size. It goes through the same writer as a real recording, one segment per flush. Then a
fresh process opens it and reads what a report of it needs: facts, snapshot, all calls, the sums of
all ops with what their nodes are, gaps; and, for comparison, one token's window and all ops.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

from profinferd.agent.model.collect import Collector
from profinferd.agent.model.optable import RawSegment
from profinferd.agent.model.snapshot import Snapshot
from profinferd.agent.recording.facts import Facts
from profinferd.agent.recording.reader import Recording
from profinferd.agent.recording.writer import RecordingWriter
from tests.unit import traces
from tests.unit.graphs import decoder
from tests.unit.streams import START, Stream, decode, session

LAYERS = 24
SEGMENT_OPS = 1 << 18
BETWEEN_NS = 2_000_000


def _template() -> tuple[Collector, RawSegment, Facts, Snapshot]:
    """One call as the recorder has it."""
    to, stream = session(), Stream()
    collector = Collector(to)
    stream.call(decode(7, graph=decoder(layers=LAYERS), hash=12), think=traces.THINK)
    stream.drain(to)
    to.finish(stream.now)
    about = dataclasses.replace(Facts.of(traces.small().facts), begin_ns=START, backends=("CPU",))
    return collector, collector.take(), about, to.snapshot(stream.now, {})


def _repeat(
    one: RawSegment, times: int, start: int, mean: npt.NDArray[np.float64], rng: np.random.Generator
) -> RawSegment:
    """``times`` such calls, one after another, with times of their own."""
    width, parts = len(one.times), len(one.runs)
    ns = (mean * np.exp(rng.normal(0, 0.06, (times, width)))).astype(np.int64)
    length = ns.sum(axis=1)
    begin = start + np.concatenate([[0], np.cumsum(length + BETWEEN_NS)[:-1]])
    calls, runs = np.tile(one.calls, times), np.tile(one.runs, times)
    calls["begin"], calls["end"] = begin, begin + length + 2000
    calls["seq"] = np.arange(times)
    runs["begin"], runs["end"] = np.repeat(begin + 1000, parts), np.repeat(begin + 1000 + length, parts)
    runs["call"] = np.repeat(np.arange(times), parts)
    inner = runs["parent"] >= 0
    runs["parent"][inner] = (np.repeat(np.arange(times) * parts, parts) + runs["parent"])[inner]
    order = np.tile(one.order, times)
    at = (begin + 1500)[:, None] + np.cumsum(ns, axis=1) - ns
    return RawSegment(calls, runs, order, one.orders, at.ravel(), one.experts)


def write(path: str, size: int) -> None:
    """A recording of about ``size`` bytes."""
    collector, one, about, snapshot = _template()
    rng = np.random.default_rng(1)
    mean = np.exp(rng.normal(10.3, 1.4, len(one.times)))
    times = max(SEGMENT_OPS // len(one.times), 1)
    writer = RecordingWriter(path)
    start, described, graphs = START, collector.take_described(), dict(enumerate(collector.graphs))
    begun, ops = time.process_time(), 0
    while writer.flushed_bytes < size:
        segment = _repeat(one, times, start, mean, rng)
        start = int(segment.calls["end"][-1]) + BETWEEN_NS
        about = dataclasses.replace(about, end_ns=start, finished=True)
        writer.flush(about, snapshot, segment=segment, described=described, graphs=graphs)
        described, graphs, ops = [], {}, ops + len(segment.times)
    writer.close()
    spent = time.process_time() - begun
    print(
        f"written  {writer.flushed_bytes / 1e9:.2f} GB, {ops / 1e6:.0f} million ops of"
        f" {(start - START) / 6e10:.0f} minutes ({writer.flushed_bytes / ops:.2f} bytes an op),"
        f" {spent / ops * 1e9:.0f} ns of CPU an op,"
        " making them up included",
        flush=True,
    )


def read(path: str) -> dict[str, float]:
    """What a report needs; seconds of each step, and MiB of memory at most."""
    found: dict[str, float] = {}
    begun, spent = time.perf_counter(), time.process_time()

    def step(name: str) -> None:
        nonlocal begun, spent
        now, cpu = time.perf_counter(), time.process_time()
        found[name], found[f"{name}, CPU"] = now - begun, cpu - spent
        begun, spent = now, cpu

    with Recording.open(path) as recording:
        trace = recording.trace
        step("open")
        found["calls"] = len(trace.calls)
        step("all calls and graph runs")
        for row in trace.sums:
            nodes = trace.nodes(int(row["graph"]))
            assert nodes is not None
            nodes.op[int(row["node"])]
        step("sums of all ops")
        found["report MiB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        call = trace.calls[len(trace.calls) // 2]
        trace.window(int(call["begin"]), int(call["end"]))
        step("window of one token")
        found["ops"] = sum(len(part.ops) for part in trace.parts())
        step("all ops, part by part")
    found["all MiB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=float, default=1.0, help="in GB")
    parser.add_argument("--read", help="only read this file, and print JSON")
    options = parser.parse_args()
    if options.read:
        print(json.dumps(read(options.read)))
        return
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR", "/var/tmp")) as folder:
        path = str(Path(folder) / "big.pfi")
        write(path, int(options.size * 1e9))
        child = [sys.executable, "-m", "tests.bench.bigrecording", "--read", path]
        found = json.loads(subprocess.run(child, capture_output=True, text=True, check=True).stdout)
    for name, value in found.items():
        unit = "" if name in ("calls", "ops") else " MiB" if name.endswith("MiB") else " s"
        print(f"{name:<26} {value:,.2f}{unit}")
    report = found["open"] + found["all calls and graph runs"] + found["sums of all ops"]
    print(f"ready for a report in {report:.2f} s with {found['report MiB']:.0f} MiB")


if __name__ == "__main__":
    main()
