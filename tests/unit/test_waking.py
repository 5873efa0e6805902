# SPDX-License-Identifier: Apache-2.0
"""Sleep that ends early: rung from a thread, by a signal, or by a descriptor; and not otherwise."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
import time

from profinferd.agent.target.process import end_descriptor, open_process
from profinferd.agent.waking import Wakeup

LONG = 60.0
"""Nobody waits for so long: a test that came to it would have been rung in vain."""


def test_it_sleeps_as_long_as_it_was_told() -> None:
    with Wakeup() as wakeup:
        begun = time.monotonic()
        assert wakeup.sleep(0.05) == set()
        assert time.monotonic() - begun >= 0.05
        assert wakeup.sleep(-1.0) == set()


def test_rung_from_another_thread() -> None:
    with Wakeup() as wakeup:
        ringer = threading.Timer(0.05, wakeup.ring)
        begun = time.monotonic()
        ringer.start()
        assert wakeup.sleep(math.inf) == set()
        assert 0.04 <= time.monotonic() - begun < LONG
        ringer.join()


def test_rung_before_it_sleeps_and_only_once() -> None:
    """However often it was rung: one sleep ends, the next one is whole."""
    with Wakeup() as wakeup:
        for _ in range(100_000):
            wakeup.ring()
        begun = time.monotonic()
        wakeup.sleep(LONG)
        while wakeup.sleep(0.02) or time.monotonic() - begun < 0.02:
            pass  # a pipe holds more than one reading takes
        assert time.monotonic() - begun < LONG


def test_a_signal_ends_it() -> None:
    heard = []
    before = signal.signal(signal.SIGUSR2, lambda number, frame: heard.append(number))
    try:
        with Wakeup() as wakeup:
            wakeup.ring_on_signals()
            sender = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR2))
            sender.start()
            begun = time.monotonic()
            wakeup.sleep(LONG)
            assert heard == [signal.SIGUSR2] and time.monotonic() - begun < LONG
            sender.join()
        assert signal.set_wakeup_fd(-1) == -1, "closed: Python writes to nobody's descriptor"
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_the_end_of_a_process_ends_it() -> None:
    with (
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child,
        Wakeup() as wakeup,
    ):
        ended = end_descriptor(open_process(child.pid))
        assert ended is not None
        assert wakeup.sleep(0.01, (ended,)) == set()
        child.kill()
        begun = time.monotonic()
        assert wakeup.sleep(LONG, (ended,)) == {ended}
        assert time.monotonic() - begun < LONG
        os.close(ended)


def test_no_descriptor_of_what_has_ended() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        process = open_process(child.pid)
        child.kill()
        child.wait()
        assert end_descriptor(process) is None


def test_ringing_after_the_end_does_no_harm() -> None:
    wakeup = Wakeup()
    wakeup.close()
    wakeup.close()
    wakeup.ring()


def test_no_descriptors_left_is_an_error() -> None:
    """It is told, not swallowed."""
    code = """
import resource
from profinferd.agent.waking import Wakeup
resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
try:
    Wakeup()
except OSError:
    print("told")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "told\n", done.stderr
