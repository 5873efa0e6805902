# SPDX-License-Identifier: Apache-2.0
"""What is in memory, for the page."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ...agent.model import memory
from ...agent.model.tensors import Graph
from ...agent.model.trace import Trace

_MAX_GRAPHS = 24


def some_graphs(trace: Trace) -> Iterator[Graph]:
    """Graphs that together name every tensor: of each structure the smallest and the biggest."""
    by_topology: dict[str | None, list[int]] = {}
    for index, info in enumerate(trace.facts.graphs):
        if info.known:
            by_topology.setdefault(info.topology, []).append(index)
    wanted: list[int] = []
    for indices in by_topology.values():
        size = [
            ((trace.facts.graphs[i].tokens or 0), (trace.facts.graphs[i].kv_length or 0), i) for i in indices
        ]
        wanted += {min(size)[2], max(size)[2]}
    for index in wanted[:_MAX_GRAPHS]:
        graph = trace.graph(index)
        if graph is not None:
            yield graph


def of_trace(trace: Trace) -> memory.Memory:
    """The memory of a trace's graphs."""
    return memory.of_graphs(some_graphs(trace))


@dataclass(frozen=True, slots=True)
class Resident:
    """The process's memory at the end of the trace, in bytes, as /proc has it, and major faults
    from the first look to the last."""

    anonymous: int
    file: int
    swapped: int
    major_faults: int


def resident(trace: Trace) -> Resident | None:
    """None where it was not recorded."""
    if not trace.kinds.get("memory"):
        return None
    rows = trace.records("memory")
    needed = {"rss_anon", "rss_file", "swap", "major_faults"}
    if not len(rows) or not needed <= set(rows.dtype.names or ()):
        return None
    first, last = rows[0], rows[-1]
    faults = max(0, int(last["major_faults"]) - int(first["major_faults"]))
    return Resident(int(last["rss_anon"]), int(last["rss_file"]), int(last["swap"]), faults)


def document(trace: Trace) -> dict[str, Any]:
    """The memory panel."""
    found = of_trace(trace)
    cache = found.cache
    faults = getattr(trace.snapshot, "faults", None)
    model = None if faults is None else faults.model
    repacked = found.repacked_bytes if found.weights else None
    parts = [
        _part("weights", "Weights", found.weight_bytes, "as the graphs use them"),
        _part("kv", "KV cache", None if cache is None else cache.bytes, _cache_note(cache)),
        _part("scratch", "Scratch", found.scratch, "intermediate results of the biggest graph"),
        _part("repacked", "Rearranged weights", repacked, "in anonymous memory, for special kernels"),
    ]
    process = resident(trace)
    if process is not None:
        parts.append(_part("anonymous", "Process, anonymous", process.anonymous, "in memory at the end"))
        faults = f"{process.major_faults:,} major faults while recording"
        parts.append(_part("file", "Process, of files", process.file, f"in memory at the end; {faults}"))
        if process.swapped:
            parts.append(_part("swap", "Process, swapped out", process.swapped, "at the end"))
    if model is not None:
        parts.append(_part("mapped", "Mapped file", model.mapped_bytes, "of the model's file"))
        parts.append(
            _part("resident", "In memory", model.resident_bytes, "of the model's file, in the page cache")
        )
    return {
        "weights": [
            [-1 if w.layer is None else w.layer, w.role, w.dtype, w.bytes, int(w.repacked), w.tensors]
            for w in found.weights
        ],
        "weights_unknown": found.unsized,
        "weights_note": None if found.weights else "No graph with weights was described.",
        "parts": parts,
        "kv": None
        if cache is None
        else {
            "layers": cache.layers, "k_type": cache.k_type, "v_type": cache.v_type,
            "bytes": cache.bytes, "positions": cache.positions,
        },
        "mapping": None
        if model is None
        else {"mapped": model.mapped_bytes, "resident": model.resident_bytes, "note": _loading(model)},
    }  # fmt: skip


def _part(name: str, label: str, size: int | None, note: str) -> dict[str, Any]:
    return {
        "id": name,
        "label": label,
        "bytes": size,
        "note": note if size is not None else "absent: not in this recording",
    }


def _cache_note(cache: memory.Cache | None) -> str:
    if cache is None:
        return ""
    parts = [f"{cache.layers} layers"]
    if cache.k_type:
        parts.append(cache.k_type if cache.k_type == cache.v_type else f"K {cache.k_type}, V {cache.v_type}")
    if cache.positions and cache.used_positions is not None:
        parts.append(f"{cache.used_positions:,} of {cache.positions:,} positions used")
    return ", ".join(parts)


def _loading(model: Any) -> str:
    how = {
        "mmap": "The file is mapped: pages are read when first used, and can be dropped.",
        "mlock": "The file is mapped and locked in memory.",
        "copied": "The file is mapped, but weights were copied into anonymous memory.",
        "read": "The file was read into anonymous memory and is not mapped.",
    }.get(model.loading or "", "How the file is loaded is not known.")
    return (
        how
        if model.locked_bytes is None or not model.locked_bytes
        else f"{how} {model.locked_bytes:,} bytes are locked."
    )
