# SPDX-License-Identifier: Apache-2.0
"""Builds the truth shim (``shim.c``) and reads what it wrote.

This is the other witness: nothing here imports the profiler. Roles are worked out from the
weight names alone, by the words of the design, so that a mistake in ``agent/model/roles.py``
cannot repeat itself here.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .fetch import CACHE

SOURCE = Path(__file__).with_name("shim.c")
MAGIC = 0x4D494853
NO_INDEX = 0xFFFFFFFF

_HEAD = np.dtype([("magic", "<u4"), ("kind", "<u4"), ("bytes", "<u8")])
_TENSOR = np.dtype(
    [
        ("addr", "<u8"),
        ("data", "<u8"),
        ("view_src", "<u8"),
        ("view_offs", "<u8"),
        ("extra", "<u8"),
        ("ne", "<i8", 4),
        ("nb", "<u8", 4),
        ("src", "<u8", 10),
        ("op_params", "<i4", 16),
        ("flags", "<u4"),
        ("index", "<u4"),
        ("op", "S32"),
        ("type", "S16"),
        ("name", "S64"),
    ]
)
_OP = np.dtype([("ts", "<u8"), ("node", "<u8"), ("fused", "<u8"), ("experts", "<u8")])
_GRAPH = np.dtype(
    [
        ("begin", "<u8"),
        ("end", "<u8"),
        ("cgraph", "<u8"),
        ("uid", "<u8"),
        ("seq", "<u4"),
        ("desc", "<u4"),
        ("n_nodes", "<u4"),
        ("n_ops", "<u4"),
        ("tid", "<i4"),
        ("status", "<i4"),
    ]
)


def build_shim() -> Path:
    """The compiled shim, made once per content of its source."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise RuntimeError("no C compiler: install gcc")
    name = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    target = CACHE / "shim" / f"shim-{name}.so"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(f".{os.getpid()}")
        flags = ["-O2", "-g", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
        subprocess.run([compiler, *flags, "-o", str(partial), str(SOURCE), "-ldl", "-lpthread"], check=True)
        partial.replace(target)
    return target


@dataclass(frozen=True, slots=True)
class Tensor:
    """One ``ggml_tensor`` as the engine held it when its graph returned."""

    addr: int
    name: str
    op: str
    type: str
    ne: tuple[int, int, int, int]
    nb: tuple[int, int, int, int]
    flags: int
    src: tuple[int, ...]
    view_src: int
    data: int
    extra: int
    index: int | None

    @property
    def is_leaf(self) -> bool:
        return self.op == "NONE"


@dataclass(frozen=True)
class Description:
    """The nodes of a graph in order, and every tensor that they reach by ``src``."""

    nodes: tuple[Tensor, ...]
    tensors: dict[int, Tensor]

    def sources(self, node: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.tensors[a] for a in node.src if a)


@dataclass(frozen=True, slots=True)
class OpRun:
    """One executed kernel: its node, the second node when two ran as one, critical-path seconds."""

    node: Tensor
    fused: Tensor | None
    seconds: float
    role: str
    dtype: str
    experts: int


@dataclass(frozen=True)
class GraphRun:
    """One call of ``ggml_graph_compute``. Times in ns of CLOCK_MONOTONIC."""

    seq: int
    begin: int
    end: int
    setup_seconds: float
    tid: int
    status: int
    uid: int
    description: Description
    ops: tuple[OpRun, ...]

    @property
    def seconds(self) -> float:
        return (self.end - self.begin) / 1e9


@dataclass
class Sum:
    calls: int = 0
    seconds: float = 0.0
    experts: list[int] = field(default_factory=list)


def _text(raw: bytes) -> str:
    return raw.split(b"\0", 1)[0].decode("utf-8", "backslashreplace")


def _four(values: npt.NDArray[np.integer[Any]]) -> tuple[int, int, int, int]:
    a, b, c, d = (int(v) for v in values)
    return a, b, c, d


def _tensors(raw: npt.NDArray[np.void]) -> list[Tensor]:
    return [
        Tensor(
            addr=int(r["addr"]),
            name=_text(bytes(r["name"])),
            op=_text(bytes(r["op"])),
            type=_text(bytes(r["type"])),
            ne=_four(r["ne"]),
            nb=_four(r["nb"]),
            flags=int(r["flags"]),
            src=tuple(int(v) for v in r["src"] if v),
            view_src=int(r["view_src"]),
            data=int(r["data"]),
            extra=int(r["extra"]),
            index=None if r["index"] == NO_INDEX else int(r["index"]),
        )
        for r in raw
    ]


def _describe(payload: memoryview) -> Description:
    count = int(np.frombuffer(payload[4:8], "<u4")[0])
    raw = np.frombuffer(payload[8:], _TENSOR, count)
    n_nodes = int((raw["index"] != NO_INDEX).sum())
    nodes = _tensors(raw[:n_nodes])
    known = {t.addr: t for t in nodes}
    _, first = np.unique(raw["addr"], return_index=True)
    for tensor in _tensors(raw[np.sort(first)]):
        known.setdefault(tensor.addr, tensor)
    return Description(tuple(nodes), known)


_LAYER = re.compile(r"^((?:enc|dec|v)\.)?(?:blk|blocks|layers?)\.\d+\.")
_CACHE = re.compile(r"^cache_([kv])_l\d+")


def weight_role(name: str) -> str:
    """``blk.3.attn_q.weight`` is ``attn_q``; ``enc.blk.0.ffn_up.weight`` is ``enc.ffn_up``."""
    name = re.sub(r"^[A-Za-z0-9]+#(.*)#\d+$", r"\1", name)
    name = _LAYER.sub(lambda m: m.group(1) or "", name)
    return re.sub(r"\.(weight|bias|scale)$", "", name)


def weight_of(description: Description, node: Tensor) -> Tensor | None:
    """The leaf with a weight's name that this node reads, looking through views of it."""
    for source in description.sources(node):
        seen = source
        while not seen.is_leaf and seen.op in ("VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE") and seen.src:
            seen = description.tensors.get(seen.src[0], source)
            if seen is source:
                break
        if seen.is_leaf and re.search(r"\.(weight|bias|scale)(#\d+)?$", seen.name):
            return seen
    return None


def _role(description: Description, node: Tensor, fused: Tensor | None) -> tuple[str, str]:
    """(role, type of the weight): both "" where the op reads no weight and no cache.

    A tied LM head multiplies by the token embedding: its role is ``output`` all the same.
    """
    for candidate in (node, fused):
        if candidate is None:
            continue
        weight = weight_of(description, candidate)
        if weight is not None:
            role = weight_role(weight.name)
            if role == "token_embd" and node.op == "MUL_MAT":
                role = "output"
            return role, weight.type
    if node.op == "SET_ROWS":
        for tensor in (node, *description.sources(node)):
            found = _CACHE.match(tensor.name)
            if found:
                return f"kv_{found.group(1)}", node.type
    return "", ""


def _records(path: Path) -> Iterator[tuple[int, memoryview]]:
    data = memoryview(path.read_bytes())
    at = 0
    while at + _HEAD.itemsize <= len(data):
        head = np.frombuffer(data[at : at + _HEAD.itemsize], _HEAD)[0]
        if int(head["magic"]) != MAGIC:
            raise ValueError(f"{path.name}: not a shim record at byte {at}")
        end = at + _HEAD.itemsize + int(head["bytes"])
        if end > len(data):
            return  # the process was killed while writing
        yield int(head["kind"]), data[at + _HEAD.itemsize : end]
        at = end


def read(path: Path) -> list[GraphRun]:
    """Every graph execution in the order in which they ended."""
    descriptions: dict[int, Description] = {}
    roles: dict[tuple[int, int, int], tuple[str, str]] = {}
    runs: list[GraphRun] = []
    for kind, payload in _records(path):
        if kind == 1:
            descriptions[int(np.frombuffer(payload[:4], "<u4")[0])] = _describe(payload)
            continue
        graph = np.frombuffer(payload[: _GRAPH.itemsize], _GRAPH)[0]
        raw = np.frombuffer(payload[_GRAPH.itemsize :], _OP)
        desc = int(graph["desc"])
        description = descriptions[desc]
        edges = np.append(raw["ts"], graph["end"]).astype(np.int64)
        ops = []
        for hit, nanoseconds in zip(raw, np.diff(edges), strict=True):
            key = (desc, int(hit["node"]), int(hit["fused"]))
            node = description.tensors[key[1]]
            fused = description.tensors[key[2]] if key[2] else None
            if key not in roles:
                roles[key] = _role(description, node, fused)
            role, dtype = roles[key]
            ops.append(OpRun(node, fused, float(nanoseconds) / 1e9, role, dtype, int(hit["experts"])))
        setup = int(edges[0]) - int(graph["begin"])
        runs.append(
            GraphRun(
                seq=int(graph["seq"]),
                begin=int(graph["begin"]),
                end=int(graph["end"]),
                setup_seconds=setup / 1e9,
                tid=int(graph["tid"]),
                status=int(graph["status"]),
                uid=int(graph["uid"]),
                description=description,
                ops=tuple(ops),
            )
        )
    return runs


def per_op(runs: Iterable[GraphRun]) -> dict[tuple[str, str], Sum]:
    """Calls and seconds by (op, role); a fused pair counts under its first node's op."""
    sums: dict[tuple[str, str], Sum] = defaultdict(Sum)
    for run in runs:
        for op in run.ops:
            one = sums[op.node.op, op.role]
            one.calls += 1
            one.seconds += op.seconds
            if op.node.op == "MUL_MAT_ID":
                one.experts.append(op.experts.bit_count())
    return dict(sums)


def within(runs: Iterable[GraphRun], begin: int, end: int) -> list[GraphRun]:
    """The graph executions that lie wholly in [begin, end] (ns of CLOCK_MONOTONIC)."""
    return [run for run in runs if begin <= run.begin and run.end <= end]


@dataclass(frozen=True)
class Witness:
    """A shim and the file that it writes to."""

    library: Path
    output: Path

    @property
    def env(self) -> dict[str, str]:
        """To be added to the environment of the target."""
        return {"LD_PRELOAD": str(self.library), "PFSHIM_OUT": str(self.output)}

    def runs(self) -> list[GraphRun]:
        """What has been written so far; the target may still run."""
        return read(self.output) if self.output.exists() else []
