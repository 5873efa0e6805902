# SPDX-License-Identifier: Apache-2.0
"""A real server as the child of ``profinferd record``: from the first call of its life on (C24, C25).

The server's own figures are the truth: tokens of its answers and of its /metrics.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from profinferd.agent.recording.reader import Recording

from .fetch import ROOT, Engines
from .models import model, words
from .pysync import Options as Victim
from .pysync import PySync
from .servers import Options, Server, free_port, usable
from .test_causes import pin, thief
from .undisturbed import BELOW_THE_THIEF, first_in_line

LIMIT = 300.0
PROMPT, GENERATED = 24, 9
MS = 1_000_000
"""As finely as the server says its times, in ns."""


def _ask(port: int, path: str, body: dict[str, object] | None = None) -> bytes:
    until = time.monotonic() + LIMIT
    while True:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=LIMIT) as answer:
                raw: bytes = answer.read()
                return raw
        except (urllib.error.URLError, ConnectionError):
            assert time.monotonic() < until, "the server does not answer"
            time.sleep(0.1)


def test_a_server_from_its_first_call_on(tmp_path: Path) -> None:
    path, port = tmp_path / "run.pfi", free_port()
    options = Options(model("dense12-f16"), threads=1, warmup=True)
    if reason := usable("xllamacpp", options):
        pytest.skip(f"the wheel's code does not run on this CPU: {reason}")
    server = Server(options, "xllamacpp")
    server.port = port
    command, extra = server.command()
    record = subprocess.Popen(
        [sys.executable, "-m", "profinferd.agent", "record", "-o", str(path), "--", *command],
        cwd=ROOT, env={**os.environ, **extra}, stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        body = {"prompt": words(PROMPT), "n_predict": GENERATED, "cache_prompt": False, "ignore_eos": True}
        answer = json.loads(_ask(port, "/completion", body))
        record.send_signal(signal.SIGINT)
        _, said = record.communicate(timeout=LIMIT)
    finally:
        record.kill()
        record.communicate()
    assert record.returncode == 0, said
    timings = answer["timings"]
    with Recording.open(str(path)) as recording:
        trace = recording.trace
        tokens = trace.snapshot.tokens
        assert tokens.prefill == timings["prompt_n"] == PROMPT
        assert tokens.output_rows == timings["predicted_n"] == GENERATED
        # It warms up while it loads the model: this is seen only by who was there from the start.
        assert trace.calls["warmup"].any()
        assert tokens.warmup
        assert trace.facts.child is not None and trace.facts.child.program.startswith("python")
        decode = trace.calls[trace.calls["tokens"] == 1]
        # The server's time begins before the first of these calls and ends after the last, however busy
        # the machine is; that of the prompt, which is one call, ends before.
        its = decode[-(GENERATED - 1) :]
        assert 0 < int(its["end"][-1] - its["begin"][0]) <= timings["predicted_ms"] * 1e6 + MS
        prompt = trace.calls[trace.calls["end"] <= its["begin"][0]][-1]
        assert 0 < int(prompt["end"] - prompt["begin"]) <= timings["prompt_ms"] * 1e6 + MS
        # Fused kernels are there as such: RMS_NORM with the MUL after it.
        assert trace.ops["fused"].any()
        timed = trace.ops[trace.ops["timed"]]
        own = int((timed["end"] - timed["begin"]).sum())
        assert own == sum(round(op.seconds * 1e9) for op in trace.snapshot.ops)


def test_the_flight_recorder_writes_when_a_thief_comes(engines: Engines, tmp_path: Path) -> None:
    """Its verdict is about the last seconds: quiet ones before do not hide the thief, and what it
    wrote has the thief in it."""
    path, cpu = tmp_path / "thief.pfi", max(os.sched_getaffinity(0))
    with PySync(Victim(model("dense24-q4_0"), threads=1)) as victim:
        victim.ask("generate", context=0, prompt=words(8), n=2)
        first_in_line(victim.pid, BELOW_THE_THIEF)
        pin(victim.pid, cpu)
        options = ("--pid", str(victim.pid), "-o", str(path), "--last", "3", "--trigger", "verdict")
        record = subprocess.Popen(
            [sys.executable, "-m", "profinferd.agent", "record", *options],
            cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        said: list[str] = []
        try:
            assert record.stderr is not None
            while not any("attached" in line for line in said):
                said.append(record.stderr.readline())
                assert said[-1], said
            quiet = time.monotonic() + 12
            while time.monotonic() < quiet:
                victim.ask("generate", context=0, prompt=words(8, 3), n=8)
                time.sleep(0.02)  # others run in the pauses: who waits for a second is let in
            reader = threading.Thread(target=lambda: said.extend(record.stderr or ()))
            reader.start()
            with thief(cpu) as other:
                until = time.monotonic() + LIMIT
                while not any("verdict preempted" in line for line in said):
                    assert time.monotonic() < until, said
                    victim.ask("generate", context=0, prompt=words(8, 3), n=8)
                    time.sleep(0.02)
            record.send_signal(signal.SIGINT)
            assert record.wait(LIMIT) == 0
            reader.join()
        finally:
            record.kill()
            record.wait()
    line = next(line for line in said if "verdict preempted" in line)
    written = Path(line.partition(" s to ")[2].partition(" (")[0])
    with Recording.open(str(written)) as recording:
        trace = recording.trace
        assert any("verdict preempted" in note for note in trace.facts.notes)
        assert 2.5 < trace.snapshot.window_seconds < 6.0
        spans = trace.records("sched_spans", None, None)
        assert other.pid in spans["by_tgid"].tolist()
        assert (trace.snapshot.tokens.decode or 0) > 0
        threads = trace.snapshot.threads
        assert threads is not None
        (taken,) = (taker for taker in threads.takers if taker.pid == other.pid)
        assert 0 < taken.seconds < trace.snapshot.window_seconds
    told = subprocess.run(
        [sys.executable, "-m", "profinferd.agent", "report", str(written)],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert f"(pid {other.pid}) took the core" in told.stdout
