# SPDX-License-Identifier: Apache-2.0
"""``make run``: a stock llama.cpp server with a real model is watched while it answers.

The server runs before the profiler knows of it. Nothing is left running, whatever happens.
"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

from .fetch import ROOT, Engines, fetch
from .profiler import COMMAND
from .servers import EngineDied, Options, Server, free_port

WATCH_SECONDS = 8.0
PROMPTS = (
    "The first computers filled whole rooms and were programmed with cables and switches. Today",
    "A good loaf of bread needs flour, water, salt and above all time. The dough is mixed and",
    "On a clear night in the mountains you can see thousands of stars with the naked eye, and",
    "The history of the bicycle begins in the early nineteenth century, when a wooden machine",
)
# Of the metrics, these are shown: what went in and out, how fast, and what it was spent on.
ALWAYS = re.compile(
    r"profinfer_(prompt_tokens_total|generation_tokens_total|calls_total\{.*phase=\"decode\""
    r"|inter_token_latency_seconds_(sum|count)|probe_hits_total)"
)
BIGGEST = re.compile(r"profinfer_op_seconds_total\{.*phase=\"decode\"")
BIGGEST_SHOWN = 5


def say(text: str = "") -> None:
    print(text, file=sys.stderr, flush=True)


@contextmanager
def _prompts(server: Server) -> Iterator[None]:
    """Asks for one completion after the other, in the background."""
    over = threading.Event()

    def work() -> None:
        for prompt in itertools.cycle(PROMPTS):
            if over.is_set():
                return
            try:
                server.completion(prompt, 48, cache_prompt=False)
            except (EngineDied, OSError):
                return

    thread = threading.Thread(target=work, name="prompts", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(10)


class Scrape(threading.Thread):
    """Reads /metrics once, in the middle of the watching, as Prometheus would."""

    def __init__(self, port: int, after_seconds: float) -> None:
        super().__init__(name="scrape", daemon=True)
        self.url = f"http://127.0.0.1:{port}/metrics"
        self.text = ""
        self.reason = "it was not reached"
        self._after = after_seconds
        self._until = time.monotonic() + WATCH_SECONDS + 5

    def run(self) -> None:
        time.sleep(self._after)
        while time.monotonic() < self._until:
            try:
                with urllib.request.urlopen(self.url, timeout=2) as answer:
                    text = answer.read().decode()
            except (urllib.error.URLError, ConnectionError, TimeoutError) as error:
                self.reason = str(error)
                time.sleep(0.3)
                continue
            self.text = text
            if "profinfer_op_seconds_total{" in text:
                return
            time.sleep(0.3)

    def lines(self) -> list[str]:
        """A few samples of the exposition."""
        samples = self.text.splitlines()
        ops = [line for line in samples if BIGGEST.match(line)]
        ops.sort(key=lambda line: -float(line.rpartition(" ")[2]))
        return [line for line in samples if ALWAYS.match(line)] + ops[:BIGGEST_SHOWN]


def _watch(server: Server) -> int:
    port = free_port()
    command = [*COMMAND, "attach", "--pid", str(server.pid), "--duration", f"{WATCH_SECONDS:g}"]
    command += ["--listen", f"127.0.0.1:{port}"]
    say(f"\n$ profinferd {' '.join(command[len(COMMAND) :])}")
    scrape = Scrape(port, WATCH_SECONDS * 0.6)
    scrape.start()
    with _prompts(server):
        done = subprocess.run(command, cwd=ROOT, timeout=WATCH_SECONDS + 60, check=False)
    scrape.join(1)
    if done.returncode != 0:
        return done.returncode
    lines = scrape.lines()
    if not lines:
        say(f"\nno metrics were scraped: {scrape.reason}")
        return 1
    say(f"\nWhat Prometheus saw meanwhile at {scrape.url} (a few of {len(scrape.text.splitlines())} lines):")
    sys.stderr.flush()
    for line in lines:
        print(line)
    sys.stdout.flush()
    return 0


def _next(engines: Engines) -> None:
    say("\nWhat to run next, on any llama.cpp, llama-server or program with llama.cpp inside:")
    say("  profinferd attach --pid N                      live table, summary at Ctrl-C")
    say("  profinferd attach --pid N -d 10 --format json  the same numbers for programs")
    say("  profinferd attach --pid N --listen 9847        the same numbers for Prometheus")
    say("  make test                                      every check, real eBPF included")
    say(f"(here profinferd is {os.path.relpath(os.path.dirname(sys.executable))}/profinferd)")


def main() -> int:
    if os.geteuid() != 0:
        say("attaching probes needs root: run `sudo make run`")
        return 4
    engines = fetch()
    say("model: Gemma 3 270M, provided under and subject to the Gemma Terms of Use")
    say(f"       ({os.path.relpath(engines.licence_file)})")
    options = Options(engines.gemma, threads=max(1, min(2, os.cpu_count() or 1)), context=2048)
    try:
        with Server(options) as server:
            say(f"started a stock server ({server.engine}), process {server.pid}; it answers prompts")
            server.completion(PROMPTS[0], 8)
            status = _watch(server)
    except EngineDied as error:
        say(str(error))
        return 1
    if status == 0:
        _next(engines)
    return status


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
