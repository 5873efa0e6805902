# SPDX-License-Identifier: Apache-2.0
"""What is put into the page: the trace's own numbers, bounded, and never markup."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import html.parser
import json
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from profinferd.agent.model.trace import PHASES, Trace
from profinferd.exporters import html as page
from profinferd.exporters.html import buildpage, calls, pagefile, timelines

from . import traces
from .graphs import decoder
from .streams import OP_NS, SETUP, Step, decode, prompt
from .test_model_profile import moe

ROOT = Path(__file__).resolve().parents[2]
HOSTILE = (
    '</script><script>document.title="owned"</script><!--<img src=x onerror=alert(1)>&amp;\u2028\u2029"\''
)


def document_of(trace: Trace) -> dict[str, Any]:
    """As the page gets it, after JSON."""
    found: dict[str, Any] = json.loads(pagefile.script_safe(page.document(trace, "run.pfi", "test")))
    return found


def unpacked(document: dict[str, Any]) -> list[dict[str, Any]]:
    """All timelines of a document, read by another implementation than the page's."""
    found: list[dict[str, Any]] = []
    for part in document["timelines"]["parts"]:
        found += json.loads(zlib.decompress(base64.b64decode(part), -15))
    return found


def test_calls_are_the_traces() -> None:
    trace = traces.small()
    table = document_of(trace)["tokens"]
    assert table["ns"] == (trace.calls["end"] - trace.calls["begin"]).tolist()
    assert table["begin"] == (trace.calls["begin"] - trace.facts.begin_ns).tolist()
    assert [PHASES[p] for p in table["phase"]] == ["prefill", "decode", "decode", "decode"]
    assert table["tokens"] == [5, 1, 1, 1] and table["rows"] == [1, 1, 1, 1]
    assert table["kv"] == [256] * 4 and table["note"] is None


def test_timelines_hold_every_op() -> None:
    """Their times are those of the ops table, also where a record was lost (negative: nobody's)."""
    trace = traces.small(layers=2, lose=[5])
    document = document_of(trace)
    found = unpacked(document)
    assert len(found) == document["timelines"]["count"] == 4
    for number, one in enumerate(found):
        runs = np.flatnonzero((trace.runs["call"] == number) & (trace.runs["n_ops"] > 0))
        (graph,) = one["graphs"]
        (run,) = runs
        ops = trace.ops[trace.ops["run"] == run]
        assert [abs(ns) for ns in graph["ops"]] == (ops["end"] - ops["begin"]).tolist()
        assert [ns < 0 for ns in graph["ops"]] == (~ops["timed"]).tolist()
        order = document["timelines"]["orders"][graph["order"]]
        assert [entry % timelines.FUSED for entry in order] == ops["node"].tolist()
        assert [entry >= timelines.FUSED for entry in order] == ops["fused"].tolist()
        assert graph["setup"] == SETUP
        assert one["ns"] == document["tokens"]["ns"][one["call"]]
    assert sum(ns < 0 for one in found for ns in one["graphs"][0]["ops"]) == 1


def test_profile_and_graphs_agree_with_the_snapshot() -> None:
    trace = traces.small(layers=2)
    document = document_of(trace)
    rows = document["profile"]["rows"]
    assert sum(rows["ns"]) == round(sum(op.seconds for op in trace.snapshot.ops) * 1e9)
    assert sum(rows["calls"]) == sum(op.calls for op in trace.snapshot.ops)
    layers = {layer for layer in rows["layer"] if layer >= 0}
    assert layers == {0, 1}
    decoded = next(g for g in document["graphs"] if PHASES[g["phase"]] == "decode")
    assert decoded["count"] == 3
    assert {ns for ns in decoded["nodes"]["ns"] if ns is not None} == {OP_NS}
    graph = trace.graph(1)
    assert graph is not None
    assert decoded["nodes"]["name"] == [node.name for node in graph.nodes]
    assert sorted(map(tuple, decoded["edges"])) == sorted(set(graph.edges()))


def test_states_of_nodes() -> None:
    """Case C25: fused, in place, views and what was not seen are told apart, by hand for one layer."""
    document = document_of(traces.small(unseen=[0]))
    prefill, decoded = (
        next(g for g in document["graphs"] if PHASES[g["phase"]] == phase) for phase in ("prefill", "decode")
    )
    nodes = prefill["nodes"]
    by_name = dict(zip(nodes["name"], range(len(nodes["name"])), strict=True))
    assert nodes["state"][by_name["attn_norm-0"]] == "f"  # the MUL of RMS_NORM + MUL
    assert nodes["state"][by_name["attn_norm-0"] - 1] == "e"
    assert nodes["memory"][by_name["Qcur-0 (reshaped)"]] == "v"
    assert nodes["state"][by_name["Qcur-0 (reshaped)"]] == "s"
    stored = [i for i, op in enumerate(nodes["op"]) if op == "SET_ROWS"]
    assert [nodes["memory"][i] for i in stored] == ["i", "i"]
    assert nodes["state"].count("f") == 3 and nodes["state"].count("e") == 22
    # Seen in two of three executions: it ran.
    assert "u" not in decoded["nodes"]["state"]


def test_hostile_names_stay_text() -> None:
    """Tensor, model, program and backend names of a target that wants to run code in the page."""
    b = decoder(1)
    for number, node in enumerate(b.nodes):
        node.name = HOSTILE[:60] + str(number)
    trace = traces.of_steps([[Step([0], [0], graph=b, hash=5)], [decode(1, graph=b, hash=5)]])
    target = dataclasses.replace(trace.snapshot.target, model=HOSTILE, exe=f"/opt/{HOSTILE}")
    trace.snapshot = dataclasses.replace(trace.snapshot, target=target, notes=(HOSTILE,))
    text = page.render(trace, HOSTILE, "test")
    seen = Scripts()
    seen.feed(text)
    assert [kind for kind, _ in seen.scripts] == ["application/json", "application/json", ""]
    assert "img" not in seen.tags
    data = json.loads(seen.scripts[1][1])
    assert "<img src=x" in data["about"]["title"] and HOSTILE in data["about"]["notes"]
    assert any(name.startswith("</script><script>") for name in data["graphs"][0]["nodes"]["name"])
    # The policy of the page names the one script that may run.
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    assert policy is not None
    digest = base64.b64encode(hashlib.sha256(seen.scripts[2][1].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy[1]
    assert "default-src 'none'" in policy[1] and "unsafe" not in policy[1]


class Scripts(html.parser.HTMLParser):
    """Script elements as a browser would find them, and all tags."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.scripts: list[tuple[str, str]] = []
        self.tags: set[str] = set()
        self._inside = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag == "script":
            self._inside = True
            self.scripts.append((dict(attrs).get("type") or "", ""))

    def handle_endtag(self, tag: str) -> None:
        if tag == "script":
            self._inside = False

    def handle_data(self, data: str) -> None:
        if self._inside:
            kind, text = self.scripts[-1]
            self.scripts[-1] = (kind, text + data)


def test_numbers_that_are_no_json_are_absent() -> None:
    assert pagefile.script_safe([float("nan"), float("inf"), 1.5]) == "[null,null,1.5]"
    assert pagefile.script_safe("\udcff<") == '"?\\u003c"'


def test_the_page_fetches_nothing() -> None:
    text = pagefile.template()
    without_licences = re.sub(
        r'<script type="application/json" id="licences">.*?</script>', "", text, flags=re.S
    )
    names = set(re.findall(r"https?://[^\s\"'`)<>]+", without_licences))
    assert names <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink",
                     "http://www.w3.org/1998/Math/MathML", "http://www.w3.org/XML/1998/namespace",
                     "http://www.w3.org/1999/xhtml", "http://www.w3.org/2000/xmlns/"}  # fmt: skip
    assert not re.search(r"<(link|img|iframe|object)[^>]+(href|src)=[\"'](?!data:)", without_licences)


def test_licences_of_what_was_bundled_are_kept() -> None:
    """In the page, and in LICENSES as they were built."""
    found = re.search(r'id="licences">(.*?)</script>', pagefile.template(), re.S)
    assert found is not None
    parts = json.loads(found[1])
    assert {"preact", "uplot", "@dagrejs/dagre"} <= {part["name"] for part in parts}
    kept = (ROOT / "LICENSES" / "report-page.txt").read_text()
    for part in parts:
        assert f"{part['name']} {part['version']} ({part['license']})" in kept
        assert part["text"] in kept, part["name"]
        assert part["license"] in ("MIT", "ISC")


def test_no_page_is_an_error_of_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.resources.files", lambda package: tmp_path)
    with pytest.raises(page.NoPage, match="was not built"):
        pagefile.template()
    (tmp_path / "page.html").write_text("half a page")
    with pytest.raises(page.NoPage, match="damaged"):
        pagefile.template()


def test_the_built_page_is_of_these_sources() -> None:
    assert buildpage.up_to_date()


def test_many_calls_are_thinned_and_the_slowest_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "MAX_CALLS", 12)
    steps = [[decode(i, op_ns=9000 if i == 17 else OP_NS)] for i in range(40)]
    trace = traces.of_steps(steps)
    table = document_of(trace)["tokens"]
    assert 4 <= len(table["ns"]) <= 12 and "of 40 calls" in table["note"]
    assert max(table["ns"]) == int((trace.calls["end"] - trace.calls["begin"]).max())
    assert table["begin"] == sorted(table["begin"])


def test_timelines_keep_to_their_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timelines, "MAX_PACKED", 2500)
    monkeypatch.setattr(timelines, "PER_PART", 2)
    trace = traces.of_steps([[decode(i, op_ns=9000 if i == 33 else OP_NS)] for i in range(60)])
    document = document_of(trace)
    kept = [i for i, number in enumerate(document["tokens"]["timeline"]) if number >= 0]
    assert 0 < len(kept) < 60 and 33 in kept
    assert sum(map(len, document["timelines"]["parts"])) < 4000
    assert f"of {len(kept)} of 60 calls" in document["timelines"]["note"]
    for row in kept:
        one = unpacked(document)[document["tokens"]["timeline"][row]]
        assert one["ns"] == document["tokens"]["ns"][row]


def test_the_slowest_token_is_kept_however_much_its_threads_did(monkeypatch: pytest.MonkeyPatch) -> None:
    """What threads did takes more room than kernels; the last of all is the slowest one here."""
    monkeypatch.setattr(timelines, "MAX_PACKED", 20_000)
    monkeypatch.setattr(timelines, "PER_PART", 4)
    steps = [[decode(i, op_ns=9000 if i == 59 else OP_NS)] for i in range(60)]
    waits = []
    for number, call in enumerate(traces.of_steps(steps).calls):
        begin, end = int(call["begin"]), int(call["end"])
        edges = np.linspace(begin, end, 400).astype(np.int64).tolist()
        for at, to in zip(edges[::2], edges[1::2], strict=True):
            middle = at + (to - at) * (1 + number % 7) // 9
            waits.append((at, at, middle, to, int(call["tid"]), b"other", 4))
    trace = traces.of_steps(steps, records={"sched_spans": np.array(waits, SPAN)})
    document = document_of(trace)
    kept = [i for i, number in enumerate(document["tokens"]["timeline"]) if number >= 0]
    assert 1 < len(kept) < 60 and 59 in kept
    assert sum(map(len, document["timelines"]["parts"])) < 30_000
    own = unpacked(document)[document["tokens"]["timeline"][59]]
    assert own["call"] == 59 and len(own["lanes"][0]["slices"]) > 100


def test_long_traces_are_read_in_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timelines, "MAX_WHOLE", 100)
    monkeypatch.setattr(timelines, "MAX_SPARSE", 7)
    trace = traces.of_steps([[decode(i)] for i in range(60)])
    document = document_of(trace)
    found = unpacked(document)
    assert len(found) == 7
    for one in found:
        assert one["ns"] == document["tokens"]["ns"][one["call"]]
        assert one["begin"] == document["tokens"]["begin"][one["call"]]
        assert len(one["graphs"][0]["ops"]) == 22


def test_an_empty_trace_says_what_is_absent() -> None:
    document = document_of(traces.of_steps([]))
    assert document["tokens"]["note"] and document["profile"]["note"] and document["graphs_note"]
    assert document["graphs"] == [] and document["experts"] is None and document["verdicts"] == []
    assert all(part["bytes"] is None for part in document["memory"]["parts"])


def test_losses_and_gaps_are_there() -> None:
    """Case C11: a report that misses records never looks complete."""
    begin = traces.small().facts.begin_ns
    trace = traces.small(lose=[2], gaps=[(begin + 1000, begin + 5000, 3, "lost_ops")])
    losses = document_of(trace)["about"]["losses"]
    assert losses["gaps"] == [[1000, 5000, "lost_ops", 3]]
    assert losses["total"] == trace.snapshot.lost.total > 0


SPAN = np.dtype([("ts", "<u8"), ("begin", "<u8"), ("woken", "<u8"), ("end", "<u8"), ("tid", "<u4"),
                 ("by_comm", "S16"), ("cause", "<u2")])  # fmt: skip
FAULT = np.dtype(
    [("ts", "<u8"), ("addr", "<u8"), ("wait_ns", "<u8"), ("tid", "<u4"), ("node", "<u4"), ("kind", "<u2")]
)
BARRIER = np.dtype([("ts", "<u8"), ("begin", "<u8"), ("arrived", "<u8"), ("end", "<u8"), ("tid", "<u4")])


def test_lanes_show_states_and_faults_of_their_call() -> None:
    """The second call of a run: preempted by stress, then blocked until woken, and a page fault."""
    quiet = traces.small()
    call = quiet.calls[1]
    at, end, tid = int(call["begin"]), int(call["end"]), int(call["tid"])
    spans = np.array(
        [
            (at + 4000, at + 1000, at + 1000, at + 4000, tid, b"stress", 0),
            (at + 9000, at + 5000, at + 8000, at + 9000, tid, b"", 4),
            (at + 2000, at - 500, at + 1500, at + 2000, 555, b"", 4),  # began before the call
            (end + 9000, end + 1000, end + 8000, end + 9000, tid, b"", 4),  # after it
        ],
        SPAN,
    )
    graph = quiet.graph(1)
    assert graph is not None
    weight = next(leaf for leaf in graph.leaves if leaf.name == "blk.0.ffn_down.weight")
    rows = [(at + 6000, weight.data + 5, 700, tid, 3, 1), (end + 5, weight.data, 1, tid, 3, 0)]
    faults = np.array(rows, FAULT)
    barriers = np.array([(at + 12_000, at + 10_000, at + 11_000, at + 12_000, 555)], BARRIER)
    trace = traces.small(records={"sched_spans": spans, "page_faults": faults, "barriers": barriers})
    document = document_of(trace)
    one = unpacked(document)[1]
    whole = end - at
    names = dict(enumerate(document["timelines"]["threads"]))
    assert [names[lane["thread"]] for lane in one["lanes"]] == [[tid, "calling thread"], [555, "worker 555"]]
    assert one["lanes"][0]["slices"] == [
        [0, 1000, 0, ""], [1000, 3000, 3, "stress"], [4000, 1000, 0, ""], [5000, 3000, 2, "futex"],
        [8000, 1000, 1, "wakeup"], [9000, whole - 9000, 0, ""],
    ]  # fmt: skip
    assert one["lanes"][1]["slices"] == [
        [0, 1500, 2, "futex"], [1500, 500, 1, "wakeup"], [2000, 9000, 0, ""], [11_000, 1000, 6, ""],
        [12_000, whole - 12_000, 0, ""],
    ]  # fmt: skip
    assert one["faults"] == [[6000, one["lanes"][0]["thread"], 1, 700, 3, weight.name]]
    assert all(not other["faults"] for n, other in enumerate(unpacked(document)) if n != 1)


def test_a_barrier_is_over_when_the_last_thread_has_come() -> None:
    """By hand: both threads compute one tensor; the second comes at 7 us, and the first, which would go on
    then, has no core for 2 us. How it waited, by futex, is said less than for what."""
    call = traces.small().calls[1]
    at, end, tid = int(call["begin"]), int(call["end"]), int(call["tid"])
    spans = np.array(
        [
            (at + 3000, at + 3000, at + 6500, at + 7000, tid, b"", 4),
            (at + 7000, at + 7000, at + 7000, at + 9000, tid, b"stress", 0),
            (at + 4000, at + 4000, at + 4000, at + 5000, 555, b"stress", 0),
        ],
        SPAN,
    )
    arrivals = [
        (at + 1000, at + 1000, at + 2000, at + 9000, tid, 0xA0),
        (at + 1000, at + 1000, at + 7000, at + 7100, 555, 0xA0),
        (at + 9000, at + 9000, at + 9500, at + 12_000, tid, 0xB0),
        (at + 8000, at + 8000, at + 12_000, at + 12_000, 555, 0xB0),
    ]
    dtype = np.dtype([("ts", "<u8"), ("begin", "<u8"), ("arrived", "<u8"), ("end", "<u8"), ("tid", "<u4"),
                      ("tensor", "<u8")])  # fmt: skip
    trace = traces.small(records={"sched_spans": spans, "barriers": np.array(arrivals, dtype)})
    mine, other = unpacked(document_of(trace))[1]["lanes"]
    assert mine["slices"] == [
        [0, 2000, 0, ""], [2000, 4500, 6, ""], [6500, 500, 1, "wakeup"], [7000, 2000, 3, "stress"],
        [9000, 500, 0, ""], [9500, 2500, 6, ""], [12_000, end - at - 12_000, 0, ""],
    ]  # fmt: skip
    assert other["slices"] == [
        [0, 4000, 0, ""], [4000, 1000, 3, "stress"], [5000, end - at - 5000, 0, ""],
    ]  # fmt: skip


def test_broken_records_give_no_broken_lanes() -> None:
    """Slices overlap, end before they begin, or name causes that do not exist."""
    call = traces.small().calls[1]
    at, tid = int(call["begin"]), int(call["tid"])
    spans = np.array(
        [
            (0, at + 5000, 0, at + 1000, tid, b"", 0),
            (0, at + 1000, at + 900_000, at + 4000, tid, b"\xff\x1b[2J", 77),
            (0, at + 2000, at + 3000, at + 6000, tid, b"", 1),
        ],
        SPAN,
    )
    spans["ts"] = at
    one = unpacked(document_of(traces.small(records={"sched_spans": spans})))[1]
    at = 0
    for begin, length, state, who in one["lanes"][0]["slices"]:
        assert begin == at and length > 0 and 0 <= state <= 6 and who.isprintable()
        at += length
    assert at == one["ns"]


def test_experts_by_layer() -> None:
    """8 experts: two products of a prompt used 5 and 8 of them, a token's two are not observed."""
    steps = [
        prompt(0, 5, graph=moe(5), hash=31, experts={0: 5}),
        prompt(5, 5, graph=moe(5), hash=31, experts={0: 8}),
        decode(10, graph=moe(1), hash=32),
    ]
    found = document_of(traces.of_steps([[step] for step in steps]))["experts"]
    rows = {row["phase"]: row for row in found["rows"]}
    prefill, decoded = rows["prefill"], rows["decode"]
    assert (prefill["layer"], prefill["role"], prefill["available"]) == (0, "ffn_up_exps", 8)
    assert (prefill["mean"], prefill["max"], prefill["runs"]) == (6.5, 8, 2)
    assert (decoded["mean"], decoded["max"], decoded["runs"]) == (None, None, 1)
    assert document_of(traces.small())["experts"] is None


def test_the_process_memory_is_that_of_the_last_look() -> None:
    memory = np.dtype([(n, "<i8") for n in ("ts", "rss_anon", "rss_file", "swap", "major_faults")])
    rows = np.array([(1, 10, 20, 0, 100), (2, 30 << 20, 40 << 20, 5, 107)], memory)
    parts = {
        part["id"]: part for part in document_of(traces.small(records={"memory": rows}))["memory"]["parts"]
    }
    assert parts["anonymous"]["bytes"] == 30 << 20 and parts["file"]["bytes"] == 40 << 20
    assert parts["swap"]["bytes"] == 5 and "7 major faults" in parts["file"]["note"]
    assert "anonymous" not in {part["id"] for part in document_of(traces.small())["memory"]["parts"]}
