# SPDX-License-Identifier: Apache-2.0
"""One graph drawn: DOT, SVG, GraphML, and flame graph stacks (case C25)."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from typing import Any

import networkx
import numpy as np
import pytest

from profinferd.agent.errors import MachineError, UsageError
from profinferd.agent.model.trace import Trace
from profinferd.exporters import Choice
from profinferd.exporters.formats import FORMATS

from . import longtraces, traces
from .graphs import Builder, decoder
from .streams import OP_NS, decode

WHOLE = Choice()


def export(name: str, trace: Trace, choice: Choice = WHOLE) -> str:
    ((path, pieces),) = FORMATS[name].load().files(trace, choice)
    assert path == ""
    return b"".join(pieces).decode()


def as_networkx(trace: Trace, choice: Choice = WHOLE) -> Any:
    return networkx.read_graphml(io.BytesIO(export("graphml", trace, choice).encode()))


def test_graphml_has_every_node_edge_and_state() -> None:
    trace = traces.small()
    graph = as_networkx(trace, Choice(graph=1))
    whole = trace.graph(1)
    assert whole is not None
    nodes = {n: d for n, d in graph.nodes(data=True) if d["kind"] == "node"}
    assert [nodes[f"n{i}"]["op"].split()[0] for i in range(len(nodes))] == [n.op for n in whole.nodes]
    data = {(int(a[1:]), int(b[1:])) for a, b, d in graph.edges(data=True) if d["flow"] == "data"}
    assert data == set(whole.edges())
    memory = {(nodes[a]["op"], nodes[b]["op"]) for a, b, d in graph.edges(data=True) if d["flow"] == "memory"}
    assert memory == {("SET_ROWS", "FLASH_ATTN_EXT")}
    states = [nodes[f"n{i}"]["state"] for i in range(len(nodes))]
    assert (states.count("executed"), states.count("fused")) == (22, 3)
    assert all(nodes[f"n{i}"]["op"] == "MUL" for i, s in enumerate(states) if s == "fused")
    assert {nodes[f"n{i}"]["op"] for i, s in enumerate(states) if s == "view"} == {
        "VIEW",
        "RESHAPE",
        "PERMUTE",
    }
    # Three tokens were decoded; a fused or a viewed node has no time of its own, and not 0.
    assert {d["calls"] for d in nodes.values() if d["state"] == "executed"} == {3}
    assert all(d["seconds"] == pytest.approx(OP_NS / 1e9) for d in nodes.values() if d["state"] == "executed")
    assert not any("seconds" in d for d in nodes.values() if d["state"] != "executed")
    assert networkx.is_directed_acyclic_graph(graph)
    weights = [d for d in graph.nodes.values() if d["kind"] == "weight"]
    assert {d["name"] for d in weights} >= {"token_embd.weight", "blk.0.attn_q.weight", "output.weight"}
    assert [nodes[f"n{i}"]["in_place"] for i, n in enumerate(whole.nodes) if n.op == "SET_ROWS"] == [
        True,
        True,
    ]


def test_the_busiest_graph_is_drawn_and_another_on_request() -> None:
    trace = traces.small()
    for choice, tokens in ((WHOLE, 1), (Choice(graph=0), 5)):
        shapes = {
            d["shape"] for _, d in as_networkx(trace, choice).nodes(data=True) if d.get("name") == "embd"
        }
        assert shapes == {f"256x{tokens}x1x1"}
    with pytest.raises(UsageError, match="no graph 7"):
        export("dot", trace, Choice(graph=7))


def test_dot_is_read_by_graphviz_and_says_what_it_shows() -> None:
    if shutil.which("dot") is None:
        pytest.skip("Graphviz is not installed")
    trace = traces.small(unseen=[5])
    text = export("dot", trace)
    done = subprocess.run(["dot", "-Tjson0"], input=text, capture_output=True, text=True, check=True)
    objects = json.loads(done.stdout)["objects"]
    labels = {o["name"]: o["label"] for o in objects if re.fullmatch(r"n\d+", o["name"])}
    assert sum("fused" in label for label in labels.values()) == 3
    assert sum("in place" in label for label in labels.values()) == 2
    assert {o["label"] for o in objects if o["name"].startswith("cluster")} == {"layer 0"}
    svg = ET.fromstring(export("svg", trace))
    texts = {t.text for t in svg.iter("{http://www.w3.org/2000/svg}text")}
    assert "FLASH_ATTN_EXT attn" in texts and "layer 0" in texts


def test_names_of_the_target_are_no_syntax() -> None:
    b = Builder()
    evil = 'x"] ; evil [label="<script>&\\'
    a = b.mul_mat(b.leaf("blk.0.w.weight", "f32", 8, 8), b.leaf("i", "f32", 8, 1, flags=1), evil)
    b.same("ADD", a, a, name="ok;2")
    s = longtraces.segment(np.full((1, 2), 100, np.int64), [(0, False), (1, False)])
    trace = longtraces.trace([s], [b.graph()])
    if shutil.which("dot") is not None:
        done = subprocess.run(["dot", "-Tjson0"], input=export("dot", trace), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        names = {o["name"] for o in json.loads(done.stdout)["objects"]}
        assert names == {"n0", "n1", "l0", "l1", "cluster_0"}
    assert as_networkx(trace).nodes["n0"]["name"] == evil
    for line in export("folded", trace).splitlines():
        assert line.count(";") == 4


def test_a_missing_graphviz_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(MachineError, match="apt-get install graphviz"):
        export("svg", traces.small())


def test_folded_stacks_add_up() -> None:
    trace = traces.small(layers=2)
    lines = [line.rsplit(" ", 1) for line in export("folded", trace).splitlines()]
    assert sum(int(ns) for _, ns in lines) == int(trace.sums["ns"].sum()) == 4 * 39 * OP_NS
    found = dict(lines)
    assert found["server;decode;layer 1;ffn_up;MUL_MAT q4_K"] == str(3 * OP_NS)
    assert found["server;prefill;layer 0;attn_norm;RMS_NORM+MUL f32"] == str(OP_NS)
    second = trace.calls[1]
    window = int(second["begin"]), int(second["end"])
    part = export("folded", trace, Choice(window=window)).splitlines()
    assert sum(int(line.rsplit(" ", 1)[1]) for line in part) == 39 * OP_NS
    with pytest.raises(UsageError, match="--no-times"):
        export("folded", trace, Choice(times=False))


def test_anonymised_drawings_name_nothing() -> None:
    trace = traces.small()
    for name in ("dot", "graphml", "folded"):
        text = export(name, trace, Choice(anonymise=True))
        for secret in ("blk.", "Qcur", "attn_q", "server", "cache_k", "ffn_up"):
            assert secret not in text, (name, secret)


def test_layers_lie_below_each_other() -> None:
    """Weights outside of their layer's box would let Graphviz put all layers side by side."""
    if shutil.which("dot") is None:
        pytest.skip("no Graphviz here (Debian: graphviz)")
    trace = traces.of_steps([[decode(5, graph=decoder(1, 1, 256, layers=4), hash=12)]])
    drawn = export("svg", trace)
    boxes = {}
    for layer, points in re.findall(
        r"<title>cluster_(\d+)</title>\s*<polygon[^>]*points=\"([^\"]+)\"", drawn
    ):
        heights = [float(point.split(",")[1]) for point in points.split()]
        boxes[int(layer)] = (min(heights), max(heights))
    assert sorted(boxes) == [0, 1, 2, 3]
    for layer in (0, 1, 2):
        # The last layer begins with what it needs of fewer rows, a little higher.
        height = boxes[layer][1] - boxes[layer][0]
        assert boxes[layer + 1][0] - boxes[layer][1] > -0.1 * height, boxes
