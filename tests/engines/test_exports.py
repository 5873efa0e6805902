# SPDX-License-Identifier: Apache-2.0
"""Traces of a real engine: the graph against the witness's, exports, comparisons (C24, C25, C75)."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from profinferd.agent.model.diff import compare
from profinferd.agent.model.diffdata import Diff
from profinferd.agent.model.trace import Trace
from tests.runtime.tracing import Tracing
from tests.tries import in_one_of, timed
from tests.unit import test_exporters_chakra, test_exporters_perfetto

from . import models, pysync, truth
from .fetch import CACHE, Engines

SOURCE = Path(__file__).with_name("slow.c")
ATTEMPTS = 6
"""Other work on the machine may come and go in one of two recordings."""
_NO_KERNEL = ("NONE", "VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE")


@pytest.fixture(scope="session")
def slow() -> Path:
    """The compiled library that makes one operator slower."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    assert compiler is not None
    name = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    target = CACHE / "shim" / f"slow-{name}.so"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        flags = ["-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
        partial = target.with_suffix(f".{os.getpid()}")
        subprocess.run([compiler, *flags, "-o", str(partial), str(SOURCE), "-ldl"], check=True)
        partial.replace(target)
    return target


def record(model: str, tokens: int, **env: str) -> Trace:
    """A trace of so many decoded tokens, in a process of its own."""
    with pysync.PySync(pysync.Options(models.model(model), threads=1, env=env)) as victim:

        def generate(n: int) -> None:
            victim.ask("generate", context=0, prompt=models.words(30), n=n)

        generate(4)
        with Tracing(victim.pid) as tracing:
            tracing.during(lambda: generate(tokens))
            return tracing.trace()


def true_edges(run: truth.GraphRun) -> set[tuple[int, int]]:
    """(producer, consumer) as places among the executed kernels, by the witness's own addresses: from
    every source back through views (first source) to a kernel that ran."""
    place = {}
    for number, op in enumerate(run.ops):
        for node in (op.node, op.fused):
            if node is not None:
                place[node.addr] = number
    found = set()
    for number, op in enumerate(run.ops):
        own = {n.addr for n in (op.node, op.fused) if n is not None}
        for node in (op.node, op.fused):
            for source in run.description.sources(node) if node is not None else ():
                seen = source
                while seen.addr not in place and seen.op in _NO_KERNEL and seen.src and seen.src[0]:
                    seen = run.description.tensors[seen.src[0]]
                if seen.addr in place and seen.addr not in own:
                    found.add((place[seen.addr], number))
    return found


@pytest.mark.parametrize("model", ["dense2-q4_0", "moe-q8_0"])
def test_the_graph_is_the_engines_own(model: str, engines: Engines, witness: truth.Witness) -> None:
    """Nodes, sources, what ran and what was fused, and the edges of Perfetto and Chakra."""
    trace = record(model, 6, **witness.env)
    runs = truth.within(witness.runs(), trace.facts.begin_ns, trace.facts.end_ns)
    ours = [run for run in trace.runs if run["level"] == 10]
    assert len(runs) == len(ours) >= 6
    _, nodes, _ = test_exporters_chakra.export(trace)
    comps = test_exporters_chakra.comp(nodes)
    parsed = test_exporters_perfetto.export(trace)
    order = sorted(range(len(parsed.slices)), key=lambda i: parsed.slices[i].begin)
    order = [i for i in order if parsed.slices[i].category == "op"]
    numbers = {i: n for n, i in enumerate(order)}
    flows = {(numbers[a], numbers[b]) for a, b in parsed.flows()}
    first = 0
    for run, true in zip(ours, runs, strict=True):
        graph = trace.graph(int(run["graph"]))
        assert graph is not None
        described = true.description.nodes
        assert [(n.op, n.name, n.ne, n.type) for n in graph.nodes] == [
            (n.op, n.name, n.ne, n.type) for n in described
        ]
        index = {n.addr: i for i, n in enumerate(described)}
        true_sources = {(index[a], i) for i, n in enumerate(described) for a in n.src if a in index}
        assert set(graph.edges()) == true_sources
        ops = trace.ops[int(run["first_op"]) : int(run["first_op"]) + int(run["n_ops"])]
        ran = [(index[op.node.addr], op.fused is not None) for op in true.ops]
        assert [(int(o["node"]), bool(o["fused"])) for o in ops] == ran
        edges = true_edges(true)
        count = len(ran)
        inside = {(a - first, b - first) for a, b in flows if first <= b < first + count}
        assert edges <= inside
        # What flows besides goes through memory: from a write into the cache to its reader.
        for a, b in inside - edges:
            assert graph.nodes[ran[a][0]].op in ("SET_ROWS", "CPY"), (ran[a], ran[b])
        its = comps[first : first + count]
        place = {n.id: i for i, n in enumerate(its)}
        waits = {(place[d], place[n.id]) for n in its for d in n.data_deps if d in place}
        assert edges <= waits
        first += count
    assert first == len(comps) == len(order)


def changed(diff: Diff) -> list[tuple[str, str, str]]:
    """(change, operator, role) of what differs while decoding."""
    (decode,) = [p for p in diff.phases if p.phase == "decode"]
    assert decode.pairs > 100 and decode.tested > 10
    return [(row.change, row.op, row.role) for row in decode.significant]


def test_one_operator_of_a_real_engine_slower(engines: Engines, slow: Path) -> None:
    """The same engine twice, and once with 300 us more in every ffn_down."""
    in_one_of(ATTEMPTS, lambda: one_operator_slower(slow))


def one_operator_slower(slow: Path) -> None:
    plain = record("dense2-q8_0", 200)
    found = changed(compare(plain, record("dense2-q8_0", 200)))
    timed(found == [], f"the same twice: {found}")
    env = {"LD_PRELOAD": str(slow), "PFSLOW_NAME": "ffn_out-", "PFSLOW_NS": "300000"}
    diff = compare(plain, record("dense2-q8_0", 200, **env))
    found = changed(diff)
    timed(found == [("same", "MUL_MAT", "ffn_down")], f"one slower: {found}")
    (decode,) = [p for p in diff.phases if p.phase == "decode"]
    (row,) = decode.significant
    assert row.a is not None and row.b is not None
    # Two layers, 300 us each, by the library's own clock; a busy machine can only add to it.
    assert row.b.usual_seconds - row.a.usual_seconds > 0.8 * 2 * 300e-6


def test_a_real_engine_without_fusion(engines: Engines) -> None:
    """C25: GGML_CPU_DISABLE_FUSION=1 is the engine's own switch."""
    diff = compare(record("dense2-q8_0", 150, GGML_CPU_DISABLE_FUSION="1"), record("dense2-q8_0", 150))
    fused = [row for row in changed(diff) if row[0] != "same"]
    assert sorted(fused) == [
        ("fused", "RMS_NORM+MUL", "attn_norm"),
        ("fused", "RMS_NORM+MUL", "ffn_norm"),
        ("fused", "RMS_NORM+MUL", "output_norm"),
    ]
