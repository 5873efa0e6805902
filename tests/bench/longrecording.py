# SPDX-License-Identifier: Apache-2.0
"""How long a report of a big recording takes: ``python -m tests.bench.longrecording [BYTES]``.

The recording is made by repetition: 300 calls of a made-up decoder with 24 layers are packed
once, with a duration of its own for every kernel, and stored again and again with later times,
until the file has its size (1 GB unless said otherwise). Sums are multiplied alike.
"""

from __future__ import annotations

import dataclasses
import os
import resource
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from profinferd.agent.model.collect import Collector
from profinferd.agent.recording import codec, segments
from profinferd.agent.recording.facts import Facts
from profinferd.agent.recording.rows import sums_of
from profinferd.agent.recording.writer import RecordingWriter
from tests.unit import traces
from tests.unit.graphs import decoder
from tests.unit.streams import Stream, decode, prompt, session

CALLS, LAYERS = 300, 24
OP_NS, NOISE_NS, THINK_NS = 60_000, 5_000, 1_500_000
PER_TRANSACTION = 64


def write(path: Path, size: int) -> tuple[int, int]:
    """Makes the recording; returns (calls, ops)."""
    to, stream = session(), Stream()
    collector = Collector(to)
    first, rest = decoder(40, 1, layers=LAYERS), decoder(1, 1, layers=LAYERS)
    stream.call(prompt(0, 40, graph=first, hash=11), think=THINK_NS)
    for position in range(40, 39 + CALLS):
        stream.call(decode(position, graph=rest, hash=12, op_ns=OP_NS), think=THINK_NS)
    stream.drain(to)
    to.finish(stream.now)
    raw = collector.take()
    noise = np.random.default_rng(1).normal(0, NOISE_NS, len(raw.times)).astype(np.int64)
    raw = dataclasses.replace(raw, times=np.maximum.accumulate(raw.times + noise))
    begin, end = int(raw.calls["begin"].min()), int(raw.calls["end"].max())
    known = Facts.of(traces.small().facts)
    facts = dataclasses.replace(known, begin_ns=begin, backends=tuple(collector.backends))
    snapshot = to.snapshot(stream.now)
    writer = RecordingWriter(str(path))
    writer.flush(
        facts, snapshot, segment=raw, described=collector.take_described(),
        graphs=dict(enumerate(collector.graphs)),
    )  # fmt: skip
    with sqlite3.connect(path) as db:
        times = _repeat(db, path, segments.pack(raw), end - begin + THINK_NS, size)
    writer.flush(dataclasses.replace(facts, end_ns=end + (times - 1) * (end - begin + THINK_NS)), snapshot)
    writer.close()
    return times * len(raw.calls), times * len(raw.times)


def _repeat(db: sqlite3.Connection, path: Path, first: segments.Stored, span: int, size: int) -> int:
    """Stores the segment later and later; returns how often it is there then."""
    names = ", ".join(segments.COLUMNS)
    marks = ", ".join("?" * len(segments.COLUMNS))
    calls = codec.decode(first.calls, traces.small().calls.dtype, first.n_calls)
    runs = codec.decode(first.runs, segments.STORED_RUN, first.n_runs)
    times = 1
    while os.stat(path).st_size < size:
        for _ in range(PER_TRANSACTION):
            times += 1
            for table in (calls, runs):
                table["begin"] += span
                table["end"] += span
            row = dataclasses.replace(
                first, begin=int(calls["begin"].min()), end=int(calls["end"].max()),
                calls=codec.encode(calls), runs=codec.encode(runs),
            )  # fmt: skip
            db.execute(
                f"INSERT INTO segments ({names}) VALUES ({marks})",
                [getattr(row, name) for name in segments.COLUMNS],
            )
        db.commit()
    for (graph,) in db.execute("SELECT graph FROM sums").fetchall():
        total = sums_of(db, graph)
        for name in ("calls", "ns", "untimed"):
            total[name] *= times
        db.execute("UPDATE sums SET data = ? WHERE graph = ?", (codec.encode(total), graph))
    return times


def measure(*arguments: str) -> tuple[float, float, float]:
    """Seconds of one ``profinferd`` command, seconds of processor time in it, and MiB of memory at most
    so far."""
    begun, before = time.monotonic(), _processor_s()
    subprocess.run(
        [sys.executable, "-m", "profinferd.agent", *arguments], check=True, stdout=subprocess.DEVNULL
    )
    most = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    return time.monotonic() - begun, _processor_s() - before, most


def _processor_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    size = int(float(sys.argv[1])) if len(sys.argv) > 1 else 1_000_000_000
    with tempfile.TemporaryDirectory() as folder:
        path, page = Path(folder) / "long.pfi", Path(folder) / "long.html"
        calls, ops = write(path, size)
        print(f"{path.stat().st_size / 1e6:,.0f} MB, {calls:,} calls, {ops:,} kernels")
        for arguments in (["report", str(path)], ["report", "-q", str(path), "--html", str(page)]):
            seconds, processor, most = measure(*arguments)
            words = " ".join(word for word in arguments if not os.path.isabs(word))
            print(
                f"profinferd {words}: {seconds:.1f} s ({processor:.1f} s of processor time), {most:,.0f} MiB"
            )
        print(f"the page has {page.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
