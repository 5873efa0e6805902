# SPDX-License-Identifier: Apache-2.0
"""Chakra execution traces, read with mlc-chakra's own classes and tools (cases C25, C75)."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chakra.schema.protobuf.et_def_pb2 import GlobalMetadata, Node, NodeType
from chakra.src.third_party.utils.protolib import decodeMessage

from profinferd.agent.model.trace import RUN, Segment, Trace
from profinferd.exporters import Choice
from profinferd.exporters.chakra import ChakraExporter

from . import longtraces, traces
from .graphs import Builder, decoder
from .streams import OP_NS
from .test_exporters_perfetto import EDGES, FAULT

WHOLE = Choice()
#: The arm of the oneof that mlc-chakra's C++ feeder reads, by attribute; others read as 0.
ARMS = {
    "is_cpu_op": "bool_val", "num_ops": "int64_val", "tensor_size": "uint64_val", "comm_size": "int64_val",
    "comm_src": "int32_val", "comm_dst": "int32_val", "comm_tag": "int32_val",
}  # fmt: skip


def export(trace: Trace, choice: Choice = WHOLE) -> tuple[dict[str, Any], list[Any], bytes]:
    """(attributes of the whole, nodes, the file); every rule that a simulator relies on is checked."""
    ((path, pieces),) = ChakraExporter().files(trace, choice)
    assert path == ""
    data = b"".join(pieces)
    stream, about, nodes = io.BytesIO(data), GlobalMetadata(), []
    decodeMessage(stream, about)
    node = Node()
    while decodeMessage(stream, node):
        copy = Node()
        copy.CopyFrom(node)
        nodes.append(copy)
    assert stream.tell() == len(data)
    known: set[int] = set()
    for node in nodes:
        assert node.id not in known, "numbers are unique"
        assert set(node.data_deps) <= known, "what it waits for exists and comes earlier: no cycle"
        assert len(set(node.data_deps)) == len(node.data_deps) and not node.ctrl_deps
        known.add(node.id)
        for a in node.attr:
            assert ARMS.get(a.name, a.WhichOneof("value")) == a.WhichOneof("value"), a.name
    return {a.name: value(a) for a in about.attr}, nodes, data


def value(attribute: Any) -> Any:
    arm = attribute.WhichOneof("value")
    found = getattr(attribute, arm)
    return list(found.values) if arm.endswith("_list") else found


def attributes(node: Any) -> dict[str, Any]:
    return {a.name: value(a) for a in node.attr}


def comp(nodes: list[Any]) -> list[Any]:
    return [n for n in nodes if n.type == NodeType.COMP_NODE]


def test_one_node_per_kernel_with_its_times_and_costs() -> None:
    trace = traces.small()
    about, nodes, _ = export(trace)
    kernels = comp(nodes)
    assert len(kernels) == len(trace.ops) == 88
    begin = [attributes(n)["profinfer.start_ns"] + about["profinfer.begin_ns"] for n in kernels]
    assert begin == trace.ops["begin"].tolist()
    assert {attributes(n)["profinfer.duration_ns"] for n in kernels} == {OP_NS}
    assert all(n.start_time_micros == attributes(n)["profinfer.start_ns"] // 1000 for n in kernels)
    assert {n.duration_micros for n in kernels} == {OP_NS // 1000}
    # 2 * 256 * 512 for one token, and the weight (144 bytes per 256), its input and its output.
    (up,) = [n for n in kernels[22:44] if n.name == "MUL_MAT ffn_up-0"]
    said = attributes(up)
    assert said["num_ops"] == 2 * 256 * 512 and said["is_cpu_op"] is True
    assert said["tensor_size"] == 512 * 144 + 256 * 4 + 512 * 4
    assert (up.inputs.shapes, up.outputs.shapes) == ("[[256, 512, 1, 1], [256, 1, 1, 1]]", "[[512, 1, 1, 1]]")
    assert up.inputs.types == "['q4_K', 'f32']"


def test_dependencies_are_those_of_the_graph() -> None:
    """Edges by hand (see test_exporters_perfetto); caches are read by MEM_LOAD nodes of their own."""
    _, nodes, _ = export(traces.small())
    of = {n.id: n for n in nodes}
    kernels = comp(nodes)
    place = {n.id: i for i, n in enumerate(kernels)}
    edges = {(place[d], place[n.id]) for n in kernels for d in n.data_deps if d in place}
    inside = {(a, b) for a, b in edges if a // 22 == b // 22}
    assert inside == {(22 * run + a, 22 * run + b) for run in range(4) for a, b in EDGES}
    # From one execution to the next: the token (last to first), and the rows of the cache, which may
    # not be overwritten before attention has read them (9) and come after the last ones (7, 8).
    token = {(22 * r - 1, 22 * r) for r in (1, 2, 3)}
    cache = {(22 * r - 22 + a, 22 * r + b) for r in (1, 2, 3) for a, b in ((9, 7), (7, 7), (9, 8), (8, 8))}
    assert edges - inside == token | cache
    loads = [n for n in nodes if n.type == NodeType.MEM_LOAD_NODE]
    assert len(loads) == 8
    assert {n.name for n in loads} == {"read kv_k cache_k_l0", "read kv_v cache_v_l0"}
    # 256 cells, 2 heads of 64, two bytes each; written by the SET_ROWS of the same execution.
    assert {attributes(n)["tensor_size"] for n in loads} == {256 * 2 * 64 * 2}
    assert all([of[d].name.split()[0] for d in n.data_deps] == ["SET_ROWS"] for n in loads)
    readers = [n for n in kernels if any(of[d].type == NodeType.MEM_LOAD_NODE for d in n.data_deps)]
    assert [n.name for n in readers] == ["FLASH_ATTN_EXT __fattn__-0"] * 4


def test_fused_unseen_and_lost_kernels_are_told_apart() -> None:
    """C25: one kernel for two nodes; no time, and not 0, for what was not seen."""
    _, nodes, _ = export(traces.small(unseen=[5]))
    fused = [attributes(n) for n in comp(nodes) if n.name == "RMS_NORM+MUL attn_norm-0"]
    assert [a["profinfer.nodes"] for a in fused] == [[1, 2]] * 4 and all(a["profinfer.fused"] for a in fused)
    states = [attributes(n)["profinfer.state"] for n in comp(nodes)]
    assert len(states) == 88 and states.count("executed") == 87
    (gone,) = [n for n in comp(nodes) if attributes(n)["profinfer.state"] != "executed"]
    assert attributes(gone)["profinfer.state"] == "not seen"
    assert gone.duration_micros == 0
    assert "profinfer.duration_ns" not in attributes(gone)
    shared = [n for n in comp(nodes) if attributes(n).get("profinfer.time_shared")]
    assert [attributes(n)["profinfer.duration_ns"] for n in shared] == [2 * OP_NS]
    _, nodes, _ = export(traces.small(lose=[5]))
    assert [s for n in comp(nodes) if (s := attributes(n)["profinfer.state"]) != "executed"] == ["lost"]


def test_in_place_results_are_versions() -> None:
    """C75: two nodes in the memory of one; readers of the first version come before the second."""
    b = Builder()
    a = b.mul_mat(b.leaf("blk.0.w.weight", "f32", 8, 8), b.leaf("x", "f32", 8, 1, flags=1), "a")
    b.same("ADD", a, a, name="reads a")
    b.op("SCALE", "f32", a.ne, a, view_src=a, name="a in place")
    b.same("ADD", a, a, name="reads the new a")
    order = [(0, False), (1, False), (2, False), (3, False)]
    s = longtraces.segment(np.full((2, 4), 100, np.int64), order)
    _, nodes, _ = export(longtraces.trace([s], [b.graph()]))
    assert [list(n.data_deps) for n in nodes] == [[], [1], [1, 2], [1, 3], [], [5], [5, 6], [5, 7]]
    assert [bool(attributes(n).get("profinfer.in_place")) for n in nodes[:4]] == [False, False, True, False]


def test_paged_weights_are_loads_that_their_kernel_waits_for() -> None:
    trace = traces.small()
    run = trace.runs[5]  # the first decode's graph on the CPU
    node = int(trace.ops["node"][int(run["first_op"]) + 2])
    rows = np.zeros(3, [*FAULT, ("seq", "<u4")])
    rows["ts"], rows["seq"], rows["node"] = run["begin"], run["seq"], node
    rows["kind"], rows["wait_ns"] = [1, 1, 0], [500, 700, 9]
    _, nodes, _ = export(traces.small(records={"faults": rows}))
    (load,) = [n for n in nodes if attributes(n).get("profinfer.load") == "paging"]
    said = attributes(load)
    assert (said["profinfer.major_faults"], said["tensor_size"], said["profinfer.wait_ns"]) == (2, 8192, 1200)
    (reader,) = [n for n in nodes if load.id in n.data_deps]
    assert attributes(reader)["profinfer.nodes"] == [node] and reader.name == "MUL_MAT Qcur-0"


def two_backends() -> Trace:
    """A graph in two parts: the CPU makes x, the other backend multiplies a copy of it."""
    first, second = Builder(), Builder()
    first.mul_mat(first.leaf("blk.0.w.weight", "f32", 8, 8), first.leaf("inp", "f32", 8, 1, flags=1), "x-0")
    copy = second.leaf("Vulkan0#x-0#0", "f32", 8, 1)
    second.mul_mat(second.leaf("blk.1.w.weight", "f32", 8, 8), copy, "y-1")
    s = longtraces.segment(np.full((1, 1), 100, np.int64), [(0, False)])
    more = np.zeros(1, RUN)
    more[0] = s.runs[1]
    more["begin"] = s.runs["end"][2]
    more["end"], more["graph"], more["backend"], more["n_ops"] = more["begin"] + 50, 1, 1, 0
    s.runs["end"][0] += 100
    whole = Segment(s.calls, np.concatenate([s.runs, more]), s.ops, s.experts)
    return longtraces.trace([whole], [first.graph(), second.graph()], backends=("CPU", "Vulkan0"))


def test_what_passes_between_backends_is_sent_and_received() -> None:
    _, nodes, _ = export(two_backends())
    kinds = [NodeType.Name(n.type) for n in nodes]
    assert kinds == ["COMP_NODE", "COMM_SEND_NODE", "COMM_RECV_NODE", "COMP_NODE"]
    assert [list(n.data_deps) for n in nodes] == [[], [1], [2], [3]]
    for n in nodes[1:3]:
        said = attributes(n)
        assert (said["comm_size"], said["comm_src"], said["comm_dst"], said["comm_tag"]) == (32, 0, 1, 0)
    assert [attributes(n)["is_cpu_op"] for n in nodes] == [True, True, False, False]
    assert attributes(nodes[3])["profinfer.state"] == "not timed"
    assert attributes(nodes[3])["profinfer.backend"] == "Vulkan0"


def test_anonymised_traces_name_nothing_and_keep_the_structure() -> None:
    trace = traces.small()
    _, plain, _ = export(trace)
    about, nodes, data = export(trace, Choice(anonymise=True))
    for secret in (b"blk", b"attn_q", b"Qcur", b"toy.gguf", b"server", b"board", b"ffn", b"cache_k"):
        assert secret not in data
    assert about["profinfer.anonymised"] is True
    assert [(n.id, list(n.data_deps)) for n in nodes] == [(n.id, list(n.data_deps)) for n in plain]
    sizes = {attributes(n).get("tensor_size", 1) for n in nodes}
    assert all(size & (size - 1) == 0 for size in sizes), "sizes are powers of two"


def test_without_times_there_is_only_structure() -> None:
    _, nodes, _ = export(traces.small(), Choice(times=False))
    for n in nodes:
        assert n.start_time_micros == n.duration_micros == 0
        assert not {"profinfer.start_ns", "profinfer.duration_ns"} & set(attributes(n))
    assert len(comp(nodes)) == 88


@pytest.mark.parametrize("layers", [1, 3])
def test_the_jsonizer_and_the_visualizer_of_mlc_chakra_read_it(tmp_path: Path, layers: int) -> None:
    trace = traces.small(layers=layers)
    _, nodes, data = export(trace)
    (tmp_path / "t.et").write_bytes(data)
    for tool, output in (("jsonizer", "t.json"), ("visualizer", "t.graphml")):
        command = [sys.executable, "-m", f"chakra.src.{tool}.{tool}", "--input_filename", "t.et"]
        subprocess.run([*command, "--output_filename", output], cwd=tmp_path, check=True, timeout=600)
    text = (tmp_path / "t.json").read_text()
    documents, at, decoder_ = [], 0, json.JSONDecoder()
    while at < len(text):
        one, at = decoder_.raw_decode(text, at)
        documents.append(one)
    assert [int(d["id"]) for d in documents[1:]] == [n.id for n in nodes]
    graph = ET.parse(tmp_path / "t.graphml").getroot()
    space = "{http://graphml.graphdrawing.org/xmlns}"
    assert len(graph.findall(f".//{space}node")) == len(nodes)
    assert len(graph.findall(f".//{space}edge")) == sum(len(n.data_deps) for n in nodes)


def test_a_context_that_grows_changes_graphs_and_keeps_its_cache() -> None:
    """256 more cells of the cache are another graph; its rows still come after the old ones."""
    graphs = [decoder(1, 1, n_kv, layers=1).graph() for n_kv in (256, 512)]
    # The same cache: descriptors of one process have one address for it.
    order = longtraces.kernels(graphs[0])
    first = longtraces.segment(np.full((1, len(order)), 100, np.int64), order)
    start = int(first.calls["end"][-1]) + 1000
    second = longtraces.segment(np.full((1, len(order)), 100, np.int64), order, start=start, graph=1, seq=9)
    _, nodes, _ = export(longtraces.trace([first, second], graphs))
    kernels = comp(nodes)
    assert len(kernels) == 44
    names = {n.id: n.name for n in kernels[:22]}
    for write in (n for n in kernels[22:] if n.name.startswith("SET_ROWS")):
        assert {names[d].split()[0] for d in write.data_deps if d in names} == {"SET_ROWS", "FLASH_ATTN_EXT"}
