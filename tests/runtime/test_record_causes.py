# SPDX-License-Identifier: Apache-2.0
"""A recording has what the scheduler did to the target, and its timeline shows it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from profinferd.agent.errors import UsageError
from profinferd.agent.recording.reader import Recording
from profinferd.exporters.html.lanes import BLOCKED, Lanes
from tests.unit import test_exporters_perfetto

from . import cases

LIMIT = 300.0


def test_sleeping_kernels_are_blocked_threads(tmp_path: Path) -> None:
    """The stub's kernels sleep: each of them is a span, and a state on the thread's track."""
    path = tmp_path / "run.pfi"
    with cases.Engine(cases.engine()) as stub:
        command = [
            sys.executable,
            "-m",
            "profinferd.agent",
            "record",
            "--pid",
            str(stub.pid),
            "-o",
            str(path),
        ]
        recorder = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ)
        assert recorder.stderr is not None
        for line in recorder.stderr:
            if line.startswith("attached"):
                break
        reply = stub.order("run pos=0 out=0 times=20 us=500")
        stub.order("run pos=20 out=0 us=500")
        recorder.send_signal(2)
        _, said = recorder.communicate(timeout=LIMIT)
        assert recorder.returncode == 0, said
    with Recording.open(str(path)) as recording:
        trace = recording.trace
        if "sched_spans" not in trace.kinds and any("sched" in note for note in trace.snapshot.notes):
            pytest.skip("the scheduler's programs do not load on this kernel")
        spans = trace.records("sched_spans")
        slept = spans[spans["cause"] == 7]  # WC_SLEEP
        kernels = len(reply["kernels"])
        assert len(slept) >= 20 * kernels
        lengths = slept["woken"].astype(int) - slept["begin"].astype(int)
        assert sorted(lengths)[len(lengths) // 2] >= 450_000
        states = test_exporters_perfetto.export(trace).of("state")
        assert sum(s.name == "blocked: sleep" for s in states) >= 20 * kernels
        # The report's page shows the same spans in the lane of the thread.
        call = max(trace.calls, key=lambda one: int(one["end"]) - int(one["begin"]))
        lanes, _ = Lanes(trace).of(int(call["begin"]), int(call["end"]))
        asleep = [state for lane in lanes for _, _, state, why in lane["slices"] if why == "sleep"]
        assert len(asleep) >= kernels // 20 and set(asleep) == {BLOCKED}


def _calls(path: Path) -> int:
    """How many are in the file so far."""
    try:
        with Recording.open(str(path)) as recording:
            return recording.trace.counts.calls
    except UsageError:
        return 0  # nothing was flushed yet


def test_all_is_kept_while_the_recorder_gets_no_core(tmp_path: Path) -> None:
    """On a busy machine a recorder that gives way may not run for seconds: nothing is lost meanwhile."""
    path = tmp_path / "run.pfi"
    with cases.Engine(cases.engine()) as stub:
        recorder = subprocess.Popen(
            [sys.executable, "-m", "profinferd.agent", "record", "--pid", str(stub.pid), "-o", str(path)],
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert recorder.stderr is not None
            for line in recorder.stderr:
                if line.startswith("attached"):
                    break
            stub.order("run pos=0 out=0 us=100")
            cases.wait_for(lambda: _calls(path) == 1, "a flush, when its graph is known")
            recorder.send_signal(signal.SIGSTOP)
            slept, at = 0, 1
            while slept < 8_000:  # the ring of other commands has room for 6,600
                slept += 40 * len(stub.order(f"run pos={at} out=0 times=40 us=250")["kernels"])
                at += 40
            stub.order(f"run pos={at} out=0 times=2500 layers=1 us=0")  # and the one for calls for 2,000
            at += 2500
            recorder.send_signal(signal.SIGCONT)
            time.sleep(1.0)
            recorder.send_signal(signal.SIGINT)
            _, said = recorder.communicate(timeout=LIMIT)
        finally:
            recorder.kill()
            recorder.wait()
        assert recorder.returncode == 0, said
    with Recording.open(str(path)) as recording:
        trace = recording.trace
        if "sched_spans" not in trace.kinds and any("sched" in note for note in trace.snapshot.notes):
            pytest.skip("the scheduler's programs do not load on this kernel")
        assert trace.snapshot.lost.total == 0, trace.snapshot.lost.by_kind
        assert len(trace.calls) == at
        # A sleep that ended a little early is in the sums alone.
        assert 0.9 * slept < int((trace.records("sched_spans")["cause"] == 7).sum()) <= slept + 100
