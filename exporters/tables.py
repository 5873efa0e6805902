# SPDX-License-Identifier: Apache-2.0
"""A trace as tables: the same rows for Parquet, CSV and JSON (described in ``docs/export.md``).

Tables come in batches, so that a long trace is never in memory as a whole. Numbers of calls, runs
and ops count through the whole export; -1 of the model becomes null.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..agent.model.trace import PHASES, Segment, Table, Trace
from . import Choice

Values = npt.NDArray[Any]
_LEVELS = {8: "graph", 9: "split", 10: "cpu"}


@dataclass(frozen=True, slots=True, eq=False)
class Column:
    """Values of one column. With ``words`` they are indices into these, -1 for null; else ``null``
    says where there is no value (None: everywhere is one)."""

    values: Values
    null: npt.NDArray[np.bool_] | None = None
    words: tuple[str, ...] | None = None

    def __len__(self) -> int:
        return len(self.values)

    def to_list(self) -> list[Any]:
        """As Python values, None for null and for what is no finite number."""
        found: list[Any] = self.values.tolist()
        if self.values.dtype.kind == "f":
            found = [value if math.isfinite(value) else None for value in found]
        if self.words is not None:
            return [self.words[i] if i >= 0 else None for i in found]
        if self.null is None:
            return found
        return [None if absent else value for value, absent in zip(found, self.null.tolist(), strict=True)]


Batch = dict[str, Column]


def known(values: Values) -> Column:
    """Whole numbers in which negative ones mean null."""
    wide = values.astype(np.int64)
    return Column(wide, wide < 0)


def plain(text: str) -> str:
    """``text`` as every reader takes it: lone surrogates become U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def words(texts: Sequence[str | None]) -> Column:
    """Texts, each kept once."""
    places: dict[str, int] = {}
    codes = [-1 if text is None else places.setdefault(plain(text), len(places)) for text in texts]
    return Column(np.array(codes, dtype=np.int32), words=tuple(places))


def tables(trace: Trace, choice: Choice) -> Iterator[tuple[str, Iterator[Batch]]]:
    """(table, its rows): all batches of a table have the same columns; each table to be read before
    the next one."""
    graphs = range(len(trace.facts.graphs))
    yield "recording", iter([_recording(trace, choice)])
    yield "graphs", iter([_graphs(trace)])
    yield "nodes", (batch for index in graphs if (batch := _nodes(trace, choice, index)) is not None)
    yield "edges", (_edges(trace, index) for index in graphs)
    if choice.window is None:
        calls, runs = trace.calls, trace.runs
    else:
        chosen = trace.window(*choice.window)
        calls, runs = chosen.calls, chosen.runs
    yield "calls", iter([_calls(calls)])
    yield "runs", iter([_runs(trace, runs)])
    yield "ops", _ops(trace, choice)
    yield "lost", iter([_lost(trace, choice)])
    begin, end = choice.window or (None, None)
    for kind in sorted(trace.kinds):
        batch = _records(trace.records(kind, begin, end), choice)
        if batch:
            yield kind, iter([batch])


def _one(value: object) -> Column:
    if value is None or isinstance(value, str):
        return words([value])
    return Column(np.array([value]))


def _recording(trace: Trace, choice: Choice) -> Batch:
    facts, snapshot, hidden = trace.facts, trace.snapshot, choice.anonymise
    offset = facts.clocks[0].realtime - facts.clocks[0].monotonic if facts.clocks else None
    tokens = snapshot.tokens
    said: dict[str, object] = {
        "created": facts.created, "version": facts.version, "ops_recorded": facts.ops,
        "finished": facts.finished, "begin_ns": facts.begin_ns, "end_ns": facts.end_ns,
        "begin_realtime_ns": None if offset is None or hidden else facts.begin_ns + offset,
        "program": None if hidden else facts.target.exe, "model": None if hidden else facts.target.model,
        "machine_kernel": None if hidden else facts.machine.kernel or None,
        "arch": facts.machine.arch or None, "cpu": None if hidden else facts.machine.cpu,
        "lost_records": sum(facts.losses.values()),
    }  # fmt: skip
    batch = {name: _one(value) for name, value in said.items()}
    counts = {
        "cpus": facts.machine.cpus, "memory": facts.machine.memory,
        "prefill_tokens": tokens.prefill, "decode_tokens": tokens.decode, "output_rows": tokens.output_rows,
    }  # fmt: skip
    for name, count in counts.items():
        batch[name] = known(np.array([-1 if count is None else count]))
    if offset is None or hidden:
        batch["begin_realtime_ns"] = known(np.array([-1]))
    return batch


def _graphs(trace: Trace) -> Batch:
    graphs = trace.facts.graphs
    return {
        "graph": Column(np.arange(len(graphs))),
        "hash": words([f"{g.hash & (1 << 64) - 1:016x}" for g in graphs]),
        "topology": words([g.topology for g in graphs]),
        "nodes": Column(np.array([g.n_nodes for g in graphs], dtype=np.int64)),
        "tokens": known(np.array([-1 if g.tokens is None else g.tokens for g in graphs])),
        "rows": known(np.array([-1 if g.rows is None else g.rows for g in graphs])),
        "kv_length": known(np.array([-1 if g.kv_length is None else g.kv_length for g in graphs])),
    }


def _nodes(trace: Trace, choice: Choice, index: int) -> Batch | None:
    table = trace.nodes(index)
    if table is None:
        return None
    n = len(table)
    return {
        "graph": Column(np.full(n, index)),
        "node": Column(np.arange(n)),
        "name": words([None] * n if choice.anonymise else [name or None for name in table.name]),
        "op": words(table.op),
        "sub_op": words([sub or None for sub in table.sub_op]),
        "dtype": words(table.dtype),
        "role": words([None] * n if choice.anonymise else list(table.role)),
        "layer": known(table.layer),
        "kernel": words(table.kernel),
        "runs_a_kernel": Column(table.expected),
        "flops": known(table.flops),
        "bytes": known(table.bytes),
    }


def _edges(trace: Trace, index: int) -> Batch:
    graph = trace.graph(index)
    edges = sorted(set(graph.edges())) if graph is not None else []
    pairs = np.array(edges, dtype=np.int64).reshape(-1, 2)
    return {
        "graph": Column(np.full(len(pairs), index)),
        "source": Column(pairs[:, 0]),
        "node": Column(pairs[:, 1]),
    }


def _calls(t: Table) -> Batch:
    return {
        "call": Column(np.arange(len(t))),
        "begin_ns": Column(t["begin"]),
        "duration_ns": Column(t["end"] - t["begin"]),
        "tid": Column(t["tid"]),
        "context": known(t["context"]),
        "phase": Column(t["phase"].astype(np.int32), words=PHASES),
        "status": Column(t["status"], ~t["returned"]),
        "tokens": known(t["tokens"]),
        "rows": known(t["rows"]),
        "position": known(t["position"]),
        "returned": Column(t["returned"]),
        "begun": Column(t["begun"]),
        "warmup": Column(t["warmup"]),
    }


def _runs(trace: Trace, t: Table) -> Batch:
    level = [_LEVELS.get(number, "other") for number in range(256)]
    return {
        "run": Column(np.arange(len(t))),
        "call": known(t["call"]),
        "parent": known(t["parent"]),
        "graph": known(t["graph"]),
        "level": words([level[number] for number in t["level"].tolist()]),
        "backend": Column(t["backend"].astype(np.int32), words=trace.facts.backends),
        "phase": Column(t["phase"].astype(np.int32), words=PHASES),
        "begin_ns": Column(t["begin"]),
        "duration_ns": Column(t["end"] - t["begin"]),
        "tokens": known(t["tokens"]),
        "rows": known(t["rows"]),
        "ops": Column(t["n_ops"]),
        "lost": known(t["lost"]),
        "traced": Column(t["traced"]),
        "partial": Column(t["partial"]),
        "failed": Column(t["failed"]),
        "warmup": Column(t["warmup"]),
    }


def _ops(trace: Trace, choice: Choice) -> Iterator[Batch]:
    counts = [0, 0, 0]
    for s in choice.segments(trace):
        # Graph by graph, for names are of a graph.
        graph_of = s.runs["graph"][s.ops["run"]]
        for index in np.unique(graph_of).tolist():
            yield _ops_of(trace, choice, s, index, np.flatnonzero(graph_of == index), counts)
        counts = [n + len(t) for n, t in zip(counts, (s.calls, s.runs, s.ops), strict=True)]


def _ops_of(trace: Trace, choice: Choice, s: Segment, index: int, places: Values, counts: list[int]) -> Batch:
    table, ops = trace.nodes(index), s.ops[places]
    node, fused, runs = ops["node"], ops["fused"], s.runs[ops["run"]]
    batch = {
        "op_number": Column(places + counts[2]),
        "run": Column(ops["run"] + counts[1]),
        "call": known(np.where(runs["call"] >= 0, runs["call"] + counts[0], -1)),
        "graph": known(runs["graph"]),
        "node": Column(node),
        "fused": Column(fused),
        "timed": Column(ops["timed"]),
        "begin_ns": Column(ops["begin"]),
        "duration_ns": Column(ops["end"] - ops["begin"]),
        "phase": Column(runs["phase"].astype(np.int32), words=PHASES),
    }
    if table is not None:
        for name, texts in (("op", table.op), ("dtype", table.dtype), ("role", table.role)):
            coded = words(texts)
            batch[name] = Column(coded.values[node], words=coded.words)
        if choice.anonymise:
            batch["role"] = Column(np.full(len(ops), -1, np.int32), words=())
        batch["layer"] = known(table.layer[node])
        batch["flops"] = known(np.where(fused, table.fused_flops[node], table.flops[node]))
        batch["bytes"] = known(np.where(fused, table.fused_bytes[node], table.bytes[node]))
    else:
        none = Column(np.full(len(ops), -1, np.int32), words=())
        absent = known(np.full(len(ops), -1))
        batch |= {"op": none, "dtype": none, "role": none}
        batch |= {"layer": absent, "flops": absent, "bytes": absent}
    return batch


def _lost(trace: Trace, choice: Choice) -> Batch:
    gaps = trace.gaps
    if choice.window is not None:
        gaps = gaps[(gaps["begin"] < choice.window[1]) & (gaps["end"] >= choice.window[0])]
    return {
        "begin_ns": Column(gaps["begin"]),
        "end_ns": Column(gaps["end"]),
        "kind": words(gaps["kind"].tolist()),
        "records": Column(gaps["count"]),
    }


def _records(rows: Values, choice: Choice) -> Batch:
    """Any kind of records as they are: one column per plain field."""
    batch: Batch = {}
    for name in rows.dtype.names or ():
        values = rows[name]
        if values.ndim > 1:
            continue
        if values.dtype.kind in "SU":
            texts = [_text(value) for value in values.tolist()]
            batch[name] = words([None] * len(texts) if choice.anonymise else texts)
        elif values.dtype.kind in "iufb":
            batch[name] = Column(values)
    return batch


def _text(raw: bytes | str) -> str:
    text = raw.split(b"\0", 1)[0].decode("utf-8", "replace") if isinstance(raw, bytes) else raw
    return text if text.isprintable() else "".join(c if c.isprintable() else "\ufffd" for c in text)
