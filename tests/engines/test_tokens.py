# SPDX-License-Identifier: Apache-2.0
"""Tokens, calls and latency against what the server itself says, in the same window."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from ..tries import in_one_of, timed
from . import compare, models, pysync, servers
from .fetch import Engines
from .profiler import Profiler, Report
from .undisturbed import first_in_line

DEEP = "dense24-q4_0"
"""With one thread: two wait for each other at each of its many small operators, which takes minutes where
other processes use their cores, too."""
FLAT = "dense2-q4_k"
ATTEMPTS = 8


@dataclass
class Watched:
    """What both sides said about the same requests."""

    server: servers.Server
    answers: list[dict[str, Any]] = field(default_factory=list)
    report: Report | None = None
    before: dict[str, float] = field(default_factory=dict)
    after: dict[str, float] = field(default_factory=dict)

    def timings(self, name: str) -> int:
        return sum(int(answer["timings"][name]) for answer in self.answers)

    def grown(self, name: str) -> float:
        """By how much a counter of the server's own /metrics grew."""
        return self.after[name] - self.before[name]

    @property
    def seen(self) -> Report:
        assert self.report is not None
        return self.report


@contextmanager
def watched(options: servers.Options) -> Iterator[Watched]:
    """Server, then profiler; the block makes requests; both sides are read after it."""
    with servers.Server(options) as server:
        both = Watched(server)
        if not options.embedding:
            server.completion(models.words(3, 99), 2)
        both.before = server.metrics()
        with Profiler(server.pid) as profiler:
            yield both
            both.report = profiler.finish()
        both.after = server.metrics()


def identities(both: Watched) -> None:
    """The identities of the design, exactly, against ``timings`` and ``/metrics``."""
    seen, requests = both.seen, len(both.answers)
    prompt, generated = both.timings("prompt_n"), both.timings("predicted_n")
    assert seen.output_rows == generated
    assert seen.prefill == prompt
    assert seen.decode == generated - requests
    assert seen.prefill + seen.decode == prompt + generated - requests
    assert both.grown("prompt_tokens_total") == seen.prefill
    assert both.grown("tokens_predicted_total") == seen.output_rows
    assert seen.json["requests"]["started"] == requests
    assert not compare.missed(seen.json["lost"]["by_kind"])
    assert all(call["status"] == 0 for call in seen.json["calls"])


def test_single_requests(engines: Engines) -> None:
    """One after the other on one slot."""
    with watched(servers.Options(models.model(FLAT))) as both:
        for i, (prompt, n) in enumerate(((40, 32), (7, 5), (1, 9), (90, 1))):
            both.answers.append(both.server.completion(models.words(prompt, i), n))
    identities(both)


def test_four_parallel_slots(engines: Engines) -> None:
    """C06: one call's time counts once, however many sequences share it."""
    with watched(servers.Options(models.model(DEEP), threads=1, slots=4)) as both:
        begin = time.monotonic()
        both.answers += both.server.together(
            [{"prompt": models.words(20 + 7 * i, i), "n_predict": 40 + i} for i in range(4)]
        )
        elapsed = time.monotonic() - begin
    identities(both)
    assert sum(call["seconds"] for call in both.seen.json["calls"]) <= elapsed


def test_warm_prefix(engines: Engines) -> None:
    """C14: cached tokens are not processed; one token may be all that is left of a prompt."""
    prompt = models.words(120)
    with watched(servers.Options(models.model(FLAT))) as both:
        for tail in ([], [], [300], [400, 401]):
            both.answers.append(both.server.completion([*prompt, *tail], 6))
    assert both.timings("cache_n") > 200
    identities(both)


def test_long_prompt(engines: Engines) -> None:
    """1,100 tokens: three graphs of one prompt are one request."""
    with watched(servers.Options(models.model(FLAT))) as both:
        both.answers.append(both.server.completion(models.words(1100), 12))
    assert both.timings("prompt_n") == 1100
    identities(both)


def test_mixed_batches(engines: Engines) -> None:
    """A prompt arrives while another slot generates: one graph holds both."""
    in_one_of(ATTEMPTS, mixed_batches)


def mixed_batches() -> None:
    with watched(servers.Options(models.model(DEEP), threads=1, slots=2)) as both:
        begun = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(_streamed, both.server, models.words(10), 300, begun)
            assert begun.wait(servers.REQUEST_SECONDS)
            for i in range(3):
                both.answers.append(both.server.completion(models.words(60, i + 1), 8))
            both.answers.append(first.result())
    identities(both)
    # While we had no core the first one may have come to its end.
    timed(both.seen.calls(phase="mixed") >= 1, both.seen.json["calls"])


def _streamed(
    server: servers.Server, prompt: Sequence[int], n: int, begun: threading.Event
) -> dict[str, Any]:
    """As :meth:`servers.Server.completion`; ``begun`` is set when its first token is there."""
    body = {"prompt": list(prompt), "n_predict": n, "temperature": 0, "ignore_eos": True, "stream": True}
    request = urllib.request.Request(
        f"{server.url}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=servers.REQUEST_SECONDS) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                begun.set()
                event: dict[str, Any] = json.loads(line[len(b"data: ") :])
                if event.get("stop"):
                    return event
    raise AssertionError("the answer has no end")


def test_failed_calls(engines: Engines) -> None:
    """C07: no room in the cache (1) and an invalid batch (-1) move no token."""
    prompt = models.words(200)
    with pysync.PySync(pysync.Options(models.model(FLAT), context=256)) as victim:
        victim.ask("generate", context=0, prompt=models.words(3), n=2)
        victim.ask("clear", context=0)
        with Profiler(victim.pid) as profiler:
            statuses = [
                _call(victim, prompt, 0, row=False),
                _call(victim, models.words(100), 200, row=True),
                _call(victim, models.words(80), 200, row=True),
                _call(victim, models.words(5), 0, row=False),
                _call(victim, models.words(1), 200, row=True),
            ]
            report = profiler.finish()
    assert statuses == [0, 1, 1, -1, 0]
    assert report.calls(status=1) == 2
    assert report.calls(status=-1) == 1
    assert report.calls(status=0) == 2
    assert (report.prefill + report.decode, report.output_rows) == (201, 1)


def _call(victim: pysync.PySync, tokens: Sequence[int], start: int, *, row: bool) -> int:
    n = len(tokens)
    answer = victim.ask(
        "call",
        context=0,
        tokens=list(tokens),
        pos=list(range(start, start + n)),
        seq=[0] * n,
        out=[0] * (n - 1) + [int(row)],
    )
    return int(answer["calls"][0]["status"])


@pytest.mark.parametrize("name", ["bert-f16", "nomic-f16"])
def test_embedding_model(name: str, engines: Engines) -> None:
    """C50: an embedding server shows prompt tokens and no generation, not "idle"."""
    options = servers.Options(models.model(name), embedding=True, context=512)
    with watched(options) as both:
        for i, n in enumerate((20, 33, 2)):
            both.server.embed(models.words(n, i))
    seen = both.seen
    assert seen.json["tokens"]["encode"] == 55
    assert both.grown("prompt_tokens_total") == 55
    assert (seen.prefill, seen.decode, seen.output_rows) == (0, 0, 0)
    assert seen.calls(phase="encode", status=0) == seen.calls()


def test_encoder_decoder(engines: Engines) -> None:
    """C50: llama_encode once, then llama_decode; the source is encoded, not prefilled."""
    with pysync.PySync(pysync.Options(models.model("t5-f16"), sequences=1)) as victim:
        victim.ask("translate", context=0, source=models.words(5), n=2)
        with Profiler(victim.pid) as profiler:
            victim.ask("translate", context=0, source=models.words(12), n=6)
            report = profiler.finish()
    assert report.json["tokens"]["encode"] == 12
    assert report.calls(phase="encode", status=0) == 1
    assert report.prefill + report.decode == 6  # the start token and five that were generated
    assert report.output_rows == 6


@pytest.mark.parametrize("api", ["decode", "process"])
def test_both_entry_points(api: str, engines: Engines) -> None:
    """llama_decode with its batch on the stack, llama_process with an opaque one."""
    with pysync.PySync(pysync.Options(models.model(FLAT), api=api)) as victim:
        victim.ask("generate", context=0, prompt=models.words(3), n=2)
        first_in_line(victim.pid)
        for _ in range(ATTEMPTS):  # what the machine does between the two clocks counts in one alone
            with Profiler(victim.pid) as profiler:
                answer = victim.ask("generate", context=0, prompt=models.words(25), n=10)
                report = profiler.finish()
            assert (report.prefill, report.decode, report.output_rows) == (25, 9, 10)
            assert report.calls(status=0) == len(answer["calls"])
            took = sum(call["end"] - call["begin"] for call in answer["calls"]) / 1e9
            seen = sum(call["seconds"] for call in report.json["calls"])
            assert seen <= took
            if seen > 0.97 * took:
                break
    assert seen == pytest.approx(took, rel=0.03)


def test_speculative_decoding(engines: Engines) -> None:
    """C15: a draft model in the same process; verified rows are not generated tokens."""
    options = servers.Options(models.model("target-q8_0"), draft=models.model("draft-q8_0"))
    with watched(options) as both:
        both.answers.append(both.server.completion(models.words(30), 80))
    seen, timings = both.seen, both.answers[0]["timings"]
    assert timings["draft_n_accepted"] > 10
    tokens = seen.json["tokens"]
    assert seen.calls(phase="verify", status=0) == both.grown("spec_decode_num_drafts_total")
    # Each verification submits the newest token and its guesses, and asks a row for each.
    steps = both.grown("spec_decode_num_drafts_total")
    assert tokens["verify"] == timings["draft_n"] + steps
    assert tokens["verify_rows"] == tokens["verify"]
    roles = [context["role"] for context in seen.json["contexts"]]
    assert sorted(str(role) for role in roles) == ["draft", "target"]
    # The target's tokens: prompt by prefill, the rest one by one or by verification.
    generated = timings["predicted_n"]
    by_verify = steps + timings["draft_n_accepted"]
    assert seen.prefill == timings["prompt_n"]
    assert seen.output_rows + by_verify == pytest.approx(generated, abs=options.draft_max)


def test_latency_against_the_server(engines: Engines) -> None:
    """Means within 1 % (between tokens) and 5 % (first token) of the server's own figures."""
    options = servers.Options(engines.gemma)
    found = []
    for _ in range(ATTEMPTS):  # what the machine does between the two clocks counts in one alone
        with watched(options) as both:
            both.answers.append(both.server.completion(models.words(160), 60))
        timings, latency = both.answers[0]["timings"], both.seen.json["latency_seconds"]
        between, first = latency["inter_token"], latency["time_to_first_token"]
        assert (between["count"], first["count"]) == (59, 1)
        found.append(
            (
                between["mean"] * 1e3 / timings["predicted_per_token_ms"],
                first["mean"] * 1e3 / timings["prompt_ms"],
            )
        )
        if abs(found[-1][0] - 1) <= 0.01 and abs(found[-1][1] - 1) <= 0.05:
            break
    else:
        pytest.fail(f"ours by the server's own: {found}")


def test_time_to_first_token_of_interleaved_slots(engines: Engines) -> None:
    """C06: four prompts at once; each request has one first token."""
    with watched(servers.Options(models.model(DEEP), threads=1, slots=4)) as both:
        both.answers += both.server.together(
            [{"prompt": models.words(200 + 10 * i, i), "n_predict": 10} for i in range(4)]
        )
    identities(both)
    first = both.seen.json["latency_seconds"]["time_to_first_token"]
    assert first["count"] <= 4
    if first["count"]:
        longest = max(answer["timings"]["prompt_ms"] for answer in both.answers) / 1e3
        assert first["mean"] <= longest * 1.2
