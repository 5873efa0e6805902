# SPDX-License-Identifier: Apache-2.0
"""Where time goes with several backends: the parts by hand, and that they add up."""

from __future__ import annotations

import dataclasses

import pytest

from profinferd.agent.model.calldata import CallTotal
from profinferd.agent.model.offload import offload
from profinferd.agent.model.placementdata import Placement
from profinferd.exporters.html.placement import document
from profinferd.exporters.table import TableExporter

from . import snapshots
from .test_exporters_prometheus import Scraper

CPU, RPC, GPU = "libggml-cpu.so.0", "libggml-rpc.so.0", "libggml-cuda.so"


def call(
    name: str, kind: str, seconds: float, count: int = 10, *, inside: bool = True,
    state: str = "outermost", **labels: str | int,
) -> CallTotal:  # fmt: skip
    about = {"during": "model call" if inside else "between calls", **labels} if name != "model_call" else {}
    return CallTotal(
        "ggml_backend", name, kind, about, state, 0, count, seconds, seconds, 0, None, None, {}
    )  # fmt: skip


def some() -> list[CallTotal]:
    """Ten calls of 0.1 s: 0.4 s on the CPU, 0.05 s to hand over, 0.3 s in a copy, 0.2 s of wait later."""
    return [
        call("model_call", "other", 1.0),
        call("compute", "compute", 0.4, backend=CPU, instance="CPU"),
        call("compute", "compute", 0.05, backend=RPC, instance="RPC0"),
        call("get_async", "copy", 0.3, backend=RPC, instance="RPC0"),
        call("set", "copy", 0.01, 20, backend=RPC),
        dataclasses.replace(
            call("copy", "copy", 0.04), labels={"during": "model call", "from": CPU, "to": RPC}
        ),
        call("get", "copy", 0.02, state="inner", backend=RPC),
        call("synchronize", "wait", 0.2, inside=False, backend=RPC, instance="RPC0"),
    ]


def test_parts_by_hand() -> None:
    found = offload(some())
    assert found is not None
    assert (found.calls, found.in_calls_seconds, found.between_calls_seconds) == (10, 1.0, 0.2)
    inside = {(p.part, p.backend): p.in_calls_seconds for p in found.parts}
    assert inside == pytest.approx({
        ("compute", "CPU"): 0.4, ("handover", "RPC0"): 0.05, ("wait", "RPC0"): 0.0, ("copy", "RPC0"): 0.35,
        ("scheduling", None): 0.2,
    })  # fmt: skip
    assert {p.backend: p.between_calls_seconds for p in found.parts if p.part == "wait"} == {"RPC0": 0.2}
    assert {p.part: p.count for p in found.parts} == {
        "compute": 10, "handover": 10, "wait": 10, "copy": 40, "scheduling": 10,
    }  # fmt: skip
    assert sum(p.in_calls_seconds + p.between_calls_seconds for p in found.parts) == pytest.approx(1.2)
    assert found.parts[0].part == "compute"


def test_what_was_before_the_waits_were_watched_is_left_out() -> None:
    before = [
        call("compute", "compute", 0.1, 4, backend=CPU, instance="CPU"),
        call("compute", "compute", 0.05, backend=RPC, instance="RPC0"),
    ]
    found = offload(some(), before)
    assert found is not None
    (cpu,) = [p for p in found.parts if p.part == "compute"]
    assert cpu.in_calls_seconds == pytest.approx(0.3) and cpu.count == 6
    assert "handover" not in {p.part for p in found.parts}, "none since"
    assert offload(before, before) is None and offload([]) is None


def test_two_devices_of_a_library() -> None:
    """What only says its library is given to neither."""
    calls = [
        call("model_call", "other", 1.0),
        call("compute", "compute", 0.1, backend=GPU, instance="CUDA0"),
        call("compute", "compute", 0.2, backend=GPU, instance="CUDA1"),
        call("get", "copy", 0.3, backend=GPU),
        call("event_synchronize", "wait", 0.1),
    ]
    found = offload(calls)
    assert found is not None
    assert {(p.part, p.backend) for p in found.parts} == {
        ("handover", "CUDA0"), ("handover", "CUDA1"), ("copy", "cuda"), ("wait", None), ("scheduling", None),
    }  # fmt: skip


def test_for_people() -> None:
    shown = TableExporter(100).render(dataclasses.replace(snapshots.busy(), offload=offload(some())))
    lines = [line.split() for line in shown.splitlines()]
    start = lines.index(["share", "part", "backend", "in", "calls", "between", "a", "call"])
    assert lines[start + 1] == ["33.3%", "compute", "CPU", "400", "ms", "40.0", "ms"]
    (wait,) = [line for line in lines if "wait" in line and "RPC0" in line]
    assert wait[0] == "16.7%" and wait[-4:] == ["200", "ms", "20.0", "ms"]


def test_for_the_page() -> None:
    found = document(None, offload(some()))
    assert found is not None and found["rows"] == []
    assert {(p["part"], p["backend"], p["in_calls"], p["between"], p["calls"]) for p in found["parts"]} == {
        ("compute", "CPU", 400_000_000, 0, 10), ("copy", "RPC0", 350_000_000, 0, 10),
        ("scheduling", "", 200_000_000, 0, 10), ("wait", "RPC0", 0, 200_000_000, 10),
        ("handover", "RPC0", 50_000_000, 0, 10),
    }  # fmt: skip
    assert sum(p["share"] for p in found["parts"]) == pytest.approx(1.0)


def test_for_prometheus() -> None:
    """Parts that only grow; what is left for scheduling does not, and is no counter."""
    placed = (
        Placement("RPC0", "decode", "MUL_MAT", "f16", "ffn_up", 12, (), 12),
        Placement("RPC0", "decode", "MUL_MAT", "f16", "ffn_gate", 30, (), 30),
        Placement("CPU", "decode", "GET_ROWS", "f16", "token_embd", 3, (), 3),
    )
    seen = dataclasses.replace(snapshots.busy(), offload=offload(some()), placement=placed)
    scraped = Scraper(seen)
    parts = {key[1:]: value for key, value in scraped.values("offload_seconds_total").items()}
    assert parts["compute", "CPU", "call"] == 0.4 and parts["wait", "RPC0", "between"] == 0.2
    assert parts["copy", "RPC0", "call"] == pytest.approx(0.35)
    assert not any(key[0] == "scheduling" for key in parts)
    ops = {key[1:]: value for key, value in scraped.values("placed_ops_total").items()}
    assert ops == {("MUL_MAT", "f16", "RPC0", "decode"): 42, ("GET_ROWS", "f16", "CPU", "decode"): 3}
