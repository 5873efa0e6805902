# SPDX-License-Identifier: Apache-2.0
"""Snapshots made up for the tests of exporters and commands; no figure in them was measured."""

from __future__ import annotations

import dataclasses

from profinferd.agent.model import snapshot as model
from profinferd.agent.model.latency import LatencyStore

HOSTILE = 'ev[red]il\x1b[2J\n"\\\u202ename\udcff.gguf'
"""A model file name with markup, an escape sequence, a newline, quotes, bidi and bad UTF-8."""


def waits(count: int = 0, seconds: float = 0.0) -> LatencyStore:
    """``count`` waits that all took ``seconds``."""
    store = LatencyStore()
    for _ in range(count):
        store.record(round(seconds * 1e9))
    return store


def op(
    name: str = "MUL_MAT",
    dtype: str = "q4_K",
    role: str = "ffn_up",
    phase: str = "decode",
    calls: int = 738,
    seconds: float = 0.5,
    **more: object,
) -> model.Op:
    """One row of ops."""
    figures: dict[str, object] = {
        "kernel": "repack",
        "backend": "CPU",
        "seconds_stderr": None,
        "flops": 2_000_000_000,
        "bytes": 1_000_000_000,
        **more,
    }
    return model.Op(
        op=name,
        dtype=dtype,
        role=role,
        phase=phase,
        calls=calls,
        seconds=seconds,
        **figures,  # type: ignore[arg-type]
    )


def graph(phase: str = "decode", count: int = 41, tokens: int = 1, **more: object) -> model.Graph:
    """One row of graphs."""
    figures: dict[str, object] = {
        "backend": "CPU",
        "nodes": 730,
        "executed": 402,
        "uncovered": 0,
        "rows": 1,
        "kv_length": 256,
        "sampled": count,
        "seconds": 0.7,
        "setup_seconds": 0.01,
        **more,
    }
    return model.Graph(
        id=f"{phase}{tokens}",
        topology="t0",
        phase=phase,
        tokens=tokens,
        count=count,
        **figures,  # type: ignore[arg-type]
    )


def busy() -> model.Snapshot:
    """A target that answers: 6 prompt tokens in one call, 41 decode calls, a failed one."""
    return model.Snapshot(
        target=model.Target(
            pid=4242,
            exe="/opt/engine/bin/llama-server",
            engine="llama.cpp",
            model="toy-270m-q4_k_m.gguf",
            libraries=(model.Library("/opt/engine/bin/libggml-cpu.so", "ab12", "cpu"),),
            layout=model.LayoutFacts("known", "2026-03"),
            attach=model.AttachFacts("multi", "dispatch", True),
        ),
        window_seconds=5.01,
        tokens=model.Tokens(prefill=6, decode=41, output_rows=42),
        calls=(
            model.Call("prefill", 0, 1, 0.06),
            model.Call("decode", 0, 41, 0.75),
            model.Call("decode", 1, 2, 0.001),
        ),
        latency_seconds=model.Latencies(waits(1, 0.061).summary(), waits(41, 0.0183).summary()),
        histograms=model.Histograms(waits(1, 0.061).histogram(), waits(41, 0.0183).histogram()),
        graphs=(graph(), graph("prefill", 1, 6, seconds=0.055)),
        ops=(
            op(),
            op(role="ffn_down", seconds=0.1),
            op("RMS_NORM", "f32", "attn_norm", calls=1500, seconds=0.05),
            op("FLASH_ATTN_EXT", "", "", seconds=0.03, flops=None, bytes=None),
            op(phase="prefill", calls=18, seconds=0.05),
        ),
        overhead=model.Overhead(None, None, None, None, 33000, None),
        lost=model.Lost(0, {}),
        counters=model.Counters(
            prompt_tokens=6,
            generation_tokens=42,
            verify_tokens=0,
            graphs=(
                model.GraphCount("decode", "CPU", 41, 41, 0.7),
                model.GraphCount("prefill", "CPU", 1, 1, 0.055),
            ),
            hits={"token": 88, "graph": 84, "op": 33000},
        ),
        notes=("overhead is not measured yet",),
    )


def sampled(level: str = "op", reason: str = "as configured") -> model.Snapshot:
    """The same with its ops sampled within a budget of 1 %."""
    one = busy()
    return dataclasses.replace(
        one,
        ops=tuple(dataclasses.replace(o, seconds_stderr=0.01) for o in one.ops),
        graphs=tuple(dataclasses.replace(g, sampled=g.count // 2) for g in one.graphs),
        overhead=model.Overhead(0.01, 0.0031, 0.0028, (-0.001, 0.0066), 9000, 470.0),
        budget=model.Budget(
            level=level,
            reason=reason,
            activity="waiting for the next period",
            spent_seconds={"call": 0.0002, "graph": 0.0004, "op": 0.001, "cycle": 0.0006},
            busy_seconds=0.71,
            bursts=3,
            bursts_cut=1,
            transitions=(model.Transition(2.0, "op", "graph", "qos: 3.9 tokens/s, 4 wanted"),),
            changes={"graph": 2, "op": 1},
        ),
    )


def idle() -> model.Snapshot:
    """Attached, and nothing seen: no layout chosen, no calls, no ops."""
    one = busy()
    return dataclasses.replace(
        one,
        target=dataclasses.replace(
            one.target,
            model=None,
            layout=model.LayoutFacts(None, None),
            attach=model.AttachFacts("multi", None, False),
        ),
        tokens=model.Tokens(0, 0, 0),
        calls=(),
        graphs=(),
        ops=(),
        notes=(),
        latency_seconds=model.Latencies(waits().summary(), waits().summary()),
        histograms=model.Histograms(waits().histogram(), waits().histogram()),
        counters=model.Counters(0, 0, 0, (), {"token": 0, "graph": 0, "op": 0}),
    )


def hostile() -> model.Snapshot:
    """A target that chose its names against us."""
    one = busy()
    return dataclasses.replace(
        one,
        target=dataclasses.replace(one.target, model=HOSTILE, exe=f"/tmp/{HOSTILE}", engine="[bold]x"),
        ops=tuple(dataclasses.replace(o, role=HOSTILE, op="[/red]MUL\x07", backend=HOSTILE) for o in one.ops),
        graphs=tuple(dataclasses.replace(g, backend=HOSTILE) for g in one.graphs),
        lost=model.Lost(3, {HOSTILE: 3}),
        notes=(HOSTILE,),
    )
