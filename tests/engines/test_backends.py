# SPDX-License-Identifier: Apache-2.0
"""Offloaded layers: a stock llama-server that computes half of a model in a stock RPC server.

The RPC server is a process of its own, so its CPU time is known from /proc: as long as it
computes, the other one waits. Case C08.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

import pytest

from profinferd.agent.attach import Attachment
from profinferd.agent.callprice import price_of_call
from profinferd.agent.kernel.callprograms import CallPrograms
from profinferd.agent.model.calldata import Offload
from profinferd.agent.model.snapshot import Snapshot
from tests.engines.compare import missed
from tests.engines.fetch import CACHE, Engines
from tests.engines.models import model
from tests.engines.processes import end, with_parent
from tests.engines.servers import (
    PORTS,
    START_SECONDS,
    EngineDied,
    Options,
    Server,
    free_port,
    listens,
    usable,
)
from tests.runtime.callvictims import watch
from tests.runtime.cases import wait_for
from tests.runtime.daemons import Daemon
from tests.tries import in_one_of, timed

OFFLOADED, TOKENS = 6, 60
PLACED = "profinfer_placed_ops_total"
ATTEMPTS = 6


@dataclass(frozen=True)
class Pair:
    """Both processes, and how to ask."""

    server: Server
    remote: subprocess.Popen[bytes]


class Offloading(Server):
    """A server that gives layers to the device that ``more`` says."""

    start_seconds = 300.0  # llvmpipe compiles its shaders first

    def __init__(self, options: Options, engines: Engines, *more: str) -> None:
        super().__init__(options, "skulk")
        self._engines, self._more = engines, more

    def command(self) -> tuple[list[str], dict[str, str]]:
        folder = self._engines.skulk_bin
        command = [str(folder / "llama-server"), "-m", str(self.options.model), "--host", "127.0.0.1",
                   "--port", str(self.port), "--offline", "-t", "1", "-tb", "1", "-np", "1", "-c", "512",
                   "-cram", "0", *(() if self.options.warmup else ("--no-warmup",)), *self._more]  # fmt: skip
        return command, {"LD_LIBRARY_PATH": str(folder)}


@contextmanager
def _remote(engines: Engines) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """The process, and its port."""
    log: IO[bytes]
    with tempfile.TemporaryFile() as log:
        for _ in range(PORTS):
            process, port = _start_remote(engines, log)
            try:
                if _serves(process, port):
                    yield process, port
                    return
            finally:
                end(process)
        log.seek(0)
        pytest.skip(f"ggml-rpc-server does not run here ({process.returncode}): {log.read()[-300:]!r}")


def _start_remote(engines: Engines, log: IO[bytes]) -> tuple[subprocess.Popen[bytes], int]:
    port = free_port()
    command = [str(engines.skulk_bin / "ggml-rpc-server"), "-H", "127.0.0.1", "-p", str(port), "-t", "1"]
    process = subprocess.Popen(
        with_parent(command), stdin=subprocess.PIPE, stdout=log, stderr=log,
        env={**os.environ, "LD_LIBRARY_PATH": str(engines.skulk_bin)},
    )  # fmt: skip
    return process, port


def _serves(process: subprocess.Popen[bytes], port: int) -> bool:
    """False: it has ended, as it does where another has taken its port meanwhile."""
    deadline = time.monotonic() + START_SECONDS
    while not listens(process.pid, port):
        if process.poll() is not None:
            return False
        assert time.monotonic() < deadline, "ggml-rpc-server does not begin to listen"
        time.sleep(0.05)
    return True


@pytest.fixture(scope="module")
def pair(engines: Engines) -> Iterator[Pair]:
    options = Options(model("dense12-f16"), threads=1, context=512)
    if reason := usable("skulk", options):
        pytest.skip(f"the only stock build with an RPC server does not run here: {reason}")
    with _remote(engines) as (remote, port):
        try:
            device = ("-ngl", str(OFFLOADED), "--rpc", f"127.0.0.1:{port}", "-dev", "RPC0")
            with Offloading(options, engines, *device) as server:
                yield Pair(server, remote)
        except EngineDied as error:
            pytest.skip(f"llama-server with an RPC device does not run here: {error}")


def cpu_seconds(process: subprocess.Popen[bytes]) -> float:
    """By the clock of the process (CPUCLOCK_SCHED)."""
    return time.clock_gettime((~process.pid << 3) | 2)


def widened(server: Server, watched: Attachment) -> Snapshot:
    """Waits and copies are watched from when two backends have been seen to compute."""
    for _ in range(100):
        server.completion([300, 301, 302], 4)
        watched.poll(0.2)
        if seconds(watched.snapshot(), None, "synchronize"):
            return watched.snapshot()
    pytest.fail("the second backend was never seen")


def seconds(snapshot: Snapshot, backend: str | None, *calls: str) -> float:
    """Of the outermost of these calls to one backend (None: any)."""
    return sum(
        c.seconds or 0.0
        for c in snapshot.engine_calls
        if c.engine == "ggml_backend" and c.state == "outermost" and c.call != "model_call"
        and (not calls or c.call in calls)
        and (backend is None or backend in " ".join(str(v) for v in c.labels.values()))
    )  # fmt: skip


def test_where_an_offloaded_token_spends_its_time(pair: Pair) -> None:
    in_one_of(ATTEMPTS, lambda: where_its_time_goes(pair))


def where_its_time_goes(pair: Pair) -> None:
    with watch(pair.server.pid) as watched:
        first = widened(pair.server, watched)
        before = cpu_seconds(pair.remote)
        answer = pair.server.completion([310, 311, 312, 313], TOKENS, cache_prompt=False)
        remote = cpu_seconds(pair.remote) - before
        watched.poll(0)
        seen = watched.snapshot()
    computed = [c for c in seen.engine_calls if c.call == "compute" and c.state == "outermost"]
    counts: Counter[str] = Counter()
    for c in computed:
        counts[str(c.labels["backend"])] += c.count
    for c in (c for c in first.engine_calls if c.call == "compute" and c.state == "outermost"):
        counts[str(c.labels["backend"])] -= c.count
    graphs = sum(call.count for call in seen.calls) - sum(call.count for call in first.calls)
    cpu, rpc = (next(n for name, n in counts.items() if kind in name) for kind in ("ggml-cpu", "ggml-rpc"))
    assert rpc == graphs >= TOKENS - 1 and cpu >= graphs
    # Handing over is not computing: what the other process computes, this one waits for. It is
    # one thread there and one here, and they take turns.
    waited = seconds(seen, "ggml-rpc") - seconds(first, "ggml-rpc")
    timed(waited >= 0.9 * remote - 0.01 > 0, (waited, remote))
    copied, synced = (seconds(seen, "ggml-rpc", call) for call in ("get_async", "synchronize"))
    timed(copied > 3 * synced, (copied, synced))
    # All parts are the time of a token, and the wait is where it really is.
    assert seen.offload is not None and first.offload is not None
    on_rpc, before_it = parts_of(seen.offload, "RPC0"), parts_of(first.offload, "RPC0")
    copied, stood = (on_rpc[part] - before_it.get(part, 0.0) for part in ("copy", "wait"))
    timed(copied > 3 * stood, (copied, stood))
    # CPU work, waits and copies are the calls' time but for scheduling.
    total = sum(call.seconds for call in seen.calls) - sum(call.seconds for call in first.calls)
    parts = seconds(seen, None) - seconds(first, None)
    timed(0.9 * total <= parts <= 1.02 * total, (parts, total))
    timings = answer["timings"]
    asked = (timings["prompt_ms"] + timings["predicted_ms"]) / 1e3
    timed(parts <= asked * 1.02, (parts, asked))
    assert not {k: n for k, n in seen.lost.by_kind.items() if k.startswith("call_")}


def test_the_parts_add_up_to_the_time_of_a_token(pair: Pair) -> None:
    """Within 5 % of the server's own time: what is in no part is what the server does between its calls
    (sampling, its answer, on a busy machine the wait for a core), and that has a figure of its own."""
    with watch(pair.server.pid) as watched:
        widened(pair.server, watched)
        in_one_of(ATTEMPTS, lambda: parts_add_up(pair, watched))


def parts_add_up(pair: Pair, watched: Attachment) -> None:
    before = watched.snapshot()
    timings = pair.server.completion([310, 311, 312, 313], TOKENS)["timings"]
    watched.poll(0)
    seen = watched.snapshot()
    token = (timings["prompt_ms"] + timings["predicted_ms"]) / 1e3
    calls, between = whole_of(seen, before)
    parts = whole(seen) - whole(before)
    timed(0.95 * token <= calls + between <= 1.02 * token, (calls, between, token))
    # The calls' time is that of the parts in them, and the device's waits between are in the rest.
    timed(0.99 * calls <= parts <= calls + between + 0.01 * token, (calls, parts, between))
    found = seen.offload
    assert found is not None
    assert {p.part for p in found.parts} >= {"compute", "handover", "copy", "scheduling"}
    assert sum(p.in_calls_seconds for p in found.parts) == pytest.approx(found.in_calls_seconds, rel=0.01)
    # Nothing is in two parts: what is left for scheduling is not nothing, and not much.
    left = scheduling(seen, before)
    assert left > 0
    timed(left < 0.25, left)


def scheduling(after: Snapshot, before: Snapshot) -> float:
    """Its share in the time of calls between the two."""
    assert after.offload is not None and before.offload is not None
    parts = [parts_of(one.offload, None).get("scheduling", 0.0) for one in (before, after) if one.offload]
    return (parts[1] - parts[0]) / (after.offload.in_calls_seconds - before.offload.in_calls_seconds)


def whole_of(seen: Snapshot, before: Snapshot) -> tuple[float, float]:
    """Seconds in calls and between those of one request, since ``before``."""
    times = []
    for snapshot in (seen, before):
        gaps = snapshot.latency_seconds.between_calls
        times.append((sum(c.seconds for c in snapshot.calls), gaps.count * (gaps.mean or 0.0)))
    return times[0][0] - times[1][0], times[0][1] - times[1][1]


def whole(snapshot: Snapshot) -> float:
    assert snapshot.offload is not None
    return snapshot.offload.in_calls_seconds + snapshot.offload.between_calls_seconds


def parts_of(found: Offload, backend: str | None) -> dict[str, float]:
    """Seconds by part of one backend."""
    return {p.part: p.in_calls_seconds + p.between_calls_seconds for p in found.parts if p.backend == backend}


def test_what_is_dear_is_watched_in_whole_rounds_or_not_at_all(pair: Pair) -> None:
    """A budget that the calls of backends exceed: they are shed together, and what trials saw are whole
    tokens, each with one part for either backend. The price is that of most calls, not of the dearest."""
    with CallPrograms.load() as loaded:
        price, stepped = price_of_call(loaded)[0], price_of_call(loaded, stepped=True)[0]
    with watch(pair.server.pid, budget=0.0005) as watched:
        # So little money pays for a token or two a trial, and a trial comes with every period of work.
        for _ in range(600):
            pair.server.completion([300, 301, 302], 30)
            watched.poll(0.1)
            seen = watched.snapshot()
            if seen.engine_calls_shed and seen.offload is not None and seen.offload.calls >= 5:
                break
        else:
            pytest.fail(f"never shed, or never watched: {seen.engine_calls_shed}, {seen.offload}")
    (why,) = seen.engine_calls_shed
    assert (why.engine, why.call) == ("ggml_backend", None)
    assert any(note.startswith("calls of ggml_backend: watched in short trials only") for note in seen.notes)
    assert why.cost_ratio / why.calls_per_second < (price * 3 + stepped) / 4 / 1e9
    rounds = next(c.count for c in seen.engine_calls if c.call == "model_call")
    assert 5 <= seen.offload.calls == rounds < sum(call.count for call in seen.calls)
    assert all(c.unwatched_seconds > 0 for c in seen.engine_calls)
    # From its result a token is asked for once; the watched calls of the first second are beside it.
    asked = sum(c.count for c in seen.engine_calls if c.call == "get_async" and c.state == "outermost")
    assert abs(asked - rounds) <= 1, "parts of a token were seen"


def test_which_operators_ran_where_and_in_which_shapes(pair: Pair) -> None:
    """Truth is the model's architecture and the number of layers that were asked to be offloaded."""
    tokens = 20
    with watch(pair.server.pid) as watched:
        first = widened(pair.server, watched)
        pair.server.completion([310, 311, 312, 313, 314], tokens, cache_prompt=False)
        watched.poll(0.5)
        seen = watched.snapshot()
    new = products(seen)
    new.subtract(products(first))
    layers = {"RPC0": OFFLOADED - 1, "CPU": 12 - (OFFLOADED - 1)}
    for backend, count in layers.items():
        for role in ("attn_q", "attn_output", "ffn_up", "ffn_down"):
            # One graph for the prompt and one for each further token.
            assert new[backend, role, 5] + new[backend, role, 1] == count * tokens, (backend, role, new)
    assert all(new["CPU", role, 5] == layers["CPU"] for role in ("attn_q", "ffn_up"))
    # Of the prompt only the last token's row is needed behind the last layer's attention.
    assert (new["RPC0", "attn_q", 5], new["RPC0", "ffn_up", 5]) == (layers["RPC0"], layers["RPC0"] - 1)
    assert (new["RPC0", "output", 1], new["CPU", "output", 1]) == (tokens, 0)
    up = next(p for p in seen.placement or () if p.role == "ffn_up" and p.backend == "RPC0")
    assert (up.op, up.dtype, up.shapes[0].sources[0]) == ("MUL_MAT", "f16", (512, 1536))
    # Data on the device is not in this process, and that is no loss.
    assert not missed(seen.lost.by_kind)
    assert {g.backend for g in seen.graphs} == {"CPU", "RPC0", "mixed"}


def test_the_daemon_tells_of_offloading(pair: Pair, tmp_path: Path) -> None:
    """Seven of twelve layers here and five there, with seven products each, and the output there."""
    with Daemon(tmp_path, "llama-server") as daemon:
        for _ in range(60):
            pair.server.completion([330, 331, 332], 8)
            time.sleep(0.2)
            if "profinfer_offload_seconds_total{" in scraped(daemon):
                break
        else:
            pytest.fail(f"offloading was never seen: {daemon.log()}")
        pair.server.completion([330, 331, 332], 8)
        layers = OFFLOADED - 1

        def agrees() -> bool:
            cpu, rpc = (daemon.sample(PLACED, backend=name, op="MUL_MAT") for name in ("CPU", "RPC0"))
            return cpu / (7 * (12 - layers)) == rpc / (7 * layers + 1) > 8

        # Records are read when their time comes, and those of a graph count once it is described.
        wait_for(agrees, "as many graphs here as there")
        text = scraped(daemon)
    parts = set(re.findall(r'offload_seconds_total\{backend="(\w+)",part="(\w+)"', text))
    assert {("CPU", "compute"), ("RPC0", "handover"), ("RPC0", "copy")} <= parts
    assert not re.findall(r"^profinfer_lost_records_total.* [1-9]", text, re.MULTILINE)


def scraped(daemon: Daemon) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{daemon.port}/metrics", timeout=60) as answer:
        return str(answer.read().decode())


def products(snapshot: Snapshot) -> Counter[tuple[str, str, int]]:
    """Matrix products by backend, role and columns of the second source."""
    found: Counter[tuple[str, str, int]] = Counter()
    for one in snapshot.placement or ():
        assert not one.other_shapes
        for shape in one.shapes if one.op == "MUL_MAT" else ():
            found[one.backend, one.role, (*shape.sources[1], 1)[1]] += shape.count
    return found


def test_the_rpc_server_is_a_target_like_any_other(pair: Pair) -> None:
    with Attachment.open(pair.remote.pid, ops="all") as watched:
        pair.server.completion([320, 321], 12)
        seen = watched.snapshot()
        for _ in range(100):
            watched.poll(0.1)
            before, seen = seen, watched.snapshot()
            if seen.ops and sum(op.calls for op in seen.ops) == sum(op.calls for op in before.ops):
                break
        seen = watched.snapshot()
    # The output counts as a layer: five layers with seven matrices each, and the last one.
    a_token = (OFFLOADED - 1) * 7 + 1
    matmuls = sum(op.calls for op in seen.ops if op.op == "MUL_MAT")
    assert matmuls % a_token == 0 and matmuls >= 12 * a_token


def test_all_layers_on_another_backend(engines: Engines) -> None:
    """-ngl 99: only the token's embedding is read here. Truth is the model's architecture, the number of
    tokens that were asked for, and the CPU time of the process that computes."""
    options = Options(model("dense12-f16"), threads=1, context=512)
    if reason := usable("skulk", options):
        pytest.skip(f"the only stock build with an RPC server does not run here: {reason}")
    tokens = 20
    with _remote(engines) as (remote, port):
        device = ("-ngl", "99", "--rpc", f"127.0.0.1:{port}", "-dev", "RPC0")
        with Offloading(options, engines, *device) as server, watch(server.pid) as watched:
            widened(server, watched)
            in_one_of(ATTEMPTS, lambda: all_elsewhere(server, remote, watched, tokens))


def all_elsewhere(server: Server, remote: subprocess.Popen[bytes], watched: Attachment, tokens: int) -> None:
    first = watched.snapshot()
    spent = cpu_seconds(remote)
    server.completion([310, 311, 312, 313, 314], tokens, cache_prompt=False)
    spent = cpu_seconds(remote) - spent
    watched.poll(0.5)
    seen = watched.snapshot()
    new = products(seen)
    new.subtract(products(first))
    for role in ("attn_q", "attn_output", "ffn_up", "ffn_down"):
        assert new["RPC0", role, 5] + new["RPC0", role, 1] == 12 * tokens, (role, new)
        assert new["CPU", role, 5] == new["CPU", role, 1] == 0
    assert (new["RPC0", "attn_q", 5], new["RPC0", "ffn_up", 5]) == (12, 11)
    assert (new["RPC0", "output", 1], new["CPU", "output", 1]) == (tokens, 0)
    # One part of each graph is handed over; all that is computed is waited for.
    calls = sum(c.count for c in seen.calls) - sum(c.count for c in first.calls)
    handed = handovers(seen, "ggml-rpc") - handovers(first, "ggml-rpc")
    assert calls == handed == tokens
    waited = seconds(seen, "ggml-rpc") - seconds(first, "ggml-rpc")
    timed(waited >= 0.9 * spent - 0.01 > 0, (waited, spent))
    assert seen.offload is not None and first.offload is not None
    assert seen.offload.calls - first.offload.calls == calls
    here, before = parts_of(seen.offload, "CPU"), parts_of(first.offload, "CPU")
    timed(here.get("compute", 0.0) - before.get("compute", 0.0) < 0.2 * waited, (here, waited))
    assert not missed(seen.lost.by_kind)


def handovers(snapshot: Snapshot, backend: str) -> int:
    """How often a part of a graph was given to a backend."""
    return sum(
        c.count for c in snapshot.engine_calls
        if c.call == "compute" and c.state == "outermost" and backend in str(c.labels["backend"])
    )  # fmt: skip


def test_a_backend_whose_work_is_done_after_the_call(engines: Engines) -> None:
    """Vulkan on the CPU (llvmpipe): llama_decode returns early, the token is waited for later.

    Truth is the server's own time per token.
    """
    options = Options(model("dense2-f16"), threads=1, warmup=False)
    if reason := usable("skulk", options):
        pytest.skip(f"the only stock build with Vulkan does not run here: {reason}")
    cache = {"GGML_VK_VISIBLE_DEVICES": "0", "MESA_SHADER_CACHE_DIR": str(CACHE / "mesa")}
    listed = subprocess.run(
        [str(engines.skulk_bin / "llama-server"), "--list-devices"],
        capture_output=True, text=True, timeout=300,
        env={**os.environ, **cache, "LD_LIBRARY_PATH": str(engines.skulk_bin)},
    )  # fmt: skip
    if "llvmpipe" not in listed.stdout + listed.stderr:
        pytest.skip("no llvmpipe here (Debian: mesa-vulkan-drivers)")
    with Offloading(replace(options, env=cache), engines, "-ngl", "2", "-dev", "Vulkan0") as server:
        try:
            server.completion([300, 301], 3)
        except (TimeoutError, urllib.error.URLError):
            pytest.skip("llvmpipe did not compile its shaders for a first prompt within five minutes")
        with watch(server.pid) as watched:
            widened(server, watched)
            in_one_of(ATTEMPTS, lambda: done_after_the_call(server, watched))


def done_after_the_call(server: Server, watched: Attachment) -> None:
    first = watched.snapshot()
    timings = server.completion([310, 311, 312], 60)["timings"]
    watched.poll(0)
    seen = watched.snapshot()
    total = (timings["prompt_ms"] + timings["predicted_ms"]) / 1e3
    calls, between = whole_of(seen, first)
    timed(0.95 * total <= calls + between <= 1.02 * total, (calls, between, total))
    assert seen.offload is not None
    on_device = parts_of(seen.offload, "Vulkan0")["wait"]
    timed(on_device > 0.5 * whole(seen), (on_device, whole(seen)))
    in_calls = sum(call.seconds for call in seen.calls) - sum(call.seconds for call in first.calls)
    waited = seconds(seen, "ggml-vulkan", "synchronize") - seconds(first, "ggml-vulkan", "synchronize")
    handed = seconds(seen, "ggml-vulkan", "compute") - seconds(first, "ggml-vulkan", "compute")
    parts = seconds(seen, None) - seconds(first, None)
    # On a busy machine handing over takes long, too: it competes with what it hands over to.
    timed(waited > 0.5 * total and waited > 1.5 * handed, (waited, total, handed))
    # The wait is outside the calls of llama.cpp, or nothing was handed over.
    timed(waited > in_calls, (waited, in_calls))
    timed(0.85 * total <= parts <= 1.02 * total, (parts, total))
