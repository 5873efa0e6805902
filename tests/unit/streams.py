# SPDX-License-Identifier: Apache-2.0
"""Record streams for tests: an engine that decodes what it is told, as the probes would report it.

It plays the probes' part only (nesting, sequence numbers, inline integers and chunks, which
graphs are described); what the records mean is left to the code under test.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from profinferd.agent.model.session import Session
from profinferd.agent.model.snapshot import AttachFacts, LayoutFacts, Snapshot, Target, TargetFacts

from .graphs import GLU, NODE_DESC, OPS, TYPES, UNARY, Builder, decoder, record_dtype

EVENT, OP_HIT, INT_CHUNK = (record_dtype(name) for name in ("event", "op_hit", "int_chunk"))
CALL_BEGIN, CALL_END, GRAPH_BEGIN, GRAPH_END, CALL_ABANDONED, GRAPH_ABANDONED = range(1, 7)
DECODE, ENCODE, PROCESS, SCHED, BACKEND, CPU = 1, 2, 3, 8, 9, 10
KNOWN, DESCRIBED, SAME, FAULT, SNAPSHOT, UNPAIRED, CUT, TRACED = (1 << i for i in range(8))
POS, OUT, EXPERTS = 1, 2, 3
FUSED = 1 << 31
START = 1_000_000_000_000
SETUP, OP_NS = 500, 1000

Records = npt.NDArray[np.void]


def facts(**more: Any) -> TargetFacts:
    """A target that has been running for long: its first call is no warm-up."""
    target = Target(
        7, "/opt/engine/server", "llama.cpp", "toy.gguf", (), LayoutFacts("known", "x"),
        AttachFacts("multi", "dispatch", True),
    )  # fmt: skip
    return TargetFacts(target, **{"age_seconds": 3600.0, **more})


def session(**more: Any) -> Session:
    """A session over the operator and type tables of the made-up graphs."""
    return Session(OPS, TYPES, facts(**more), START, unary=UNARY, glu=GLU)


@dataclass
class Step:
    """One graph: positions, tokens with an output row (all that are asked for), its nodes."""

    pos: Sequence[int]
    out: Sequence[int] = ()
    n_kv: int = 256
    graph: Builder | None = None
    hash: int = 0
    op_ns: int = OP_NS
    experts: dict[int, int] = field(default_factory=dict)
    lose: Sequence[int] = ()
    unseen: Sequence[int] = ()
    n_pos: int | None = None
    no_chunks: bool = False


def prompt(start: int, length: int, row: bool = True, **more: Any) -> Step:
    """One stretch of a prompt, with a row for its last token or without."""
    return Step(range(start, start + length), [length - 1] if row else [], **more)


def decode(*positions: int, **more: Any) -> Step:
    """One token for each of several slots."""
    return Step(positions, range(len(positions)), **more)


def verify(start: int, length: int) -> Step:
    """A stretch with a row for every token."""
    return Step(range(start, start + length), range(length))


class Stream:
    """Records of one process in the order of its threads; ``take`` hands them out."""

    def __init__(self, tgid: int = 100) -> None:
        self.tgid = tgid
        self.tid = 0  # of what comes next; 0: the first thread
        self.now = START + 60_000_000_000
        self.seq = 0
        self.sent: set[int] = set()
        self.confirmed: set[int] = set()
        self._graphs: dict[tuple[int, int, int], Builder] = {}
        self._given: list[Builder] = []  # kept: another one could come to be at its address
        self._walked: dict[int, tuple[Records, list[tuple[int, bool]]]] = {}
        self._new()

    def _new(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.ops: list[Records] = []
        self.nodes: list[Records] = []
        self.ints: list[dict[str, Any]] = []

    def take(self) -> tuple[Records, Records, Records, Records]:
        """What was recorded since the last time."""
        taken = (
            _array(EVENT, self.events),
            np.concatenate([np.zeros(0, OP_HIT), *self.ops]),
            np.concatenate([np.zeros(0, NODE_DESC), *self.nodes]),
            _array(INT_CHUNK, self.ints),
        )
        self._new()
        return taken

    def drain(self, to: Session) -> None:
        """One drain of the rings into a session, and its answers back into the kernel's map."""
        to.feed(*self.take(), self.now)
        self.confirmed.update(hash for _, hash in to.take_confirmed())
        self.sent.difference_update(hash for _, hash in to.take_resend())

    def snapshot(self, of: Session, **stats: float) -> Snapshot:
        self.drain(of)
        return of.snapshot(self.now, stats)

    def event(self, kind: int, seq: int, level: int, **more: Any) -> dict[str, Any]:
        event = {"ts": self.now, "tgid": self.tgid, "tid": self.tid or self.tgid, "seq": seq, "kind": kind,
                 "level": level, **more}  # fmt: skip
        self.events.append(event)
        return event

    def next_seq(self) -> int:
        self.seq += 1
        return self.seq

    # -- what an engine does ------------------------------------------------------

    def call(
        self, *steps: Step, ctx: int = 0xC0, status: int = 0, level: int = DECODE, batch: int | None = None,
        around: int = 1000, think: int = 0, levels: Sequence[int] = (SCHED, BACKEND, CPU),
        traced: bool = True,
    ) -> int:  # fmt: skip
        """One call with a graph for each step; returns its duration in ns.

        ``around``: ns before the first and after the last graph; ``think``: ns since the last call.
        """
        self.now += think
        seq, begin = self.next_seq(), self.now
        tokens = sum(len(step.pos) for step in steps) if batch is None else batch
        what = {"status": 0 if batch == 0 else 1} if level == PROCESS else {"batch_tokens": tokens}
        self.event(CALL_BEGIN, seq, level, call=seq, object=ctx, **what)
        self.now += around
        for step in steps:
            self.graph(step, seq, ctx + 1, levels, traced=traced)
        self.now += around
        self.event(CALL_END, seq, level, call=seq, object=ctx, begin_ts=begin, status=status)
        return self.now - begin

    def graph(
        self, step: Step, call: int = 0, sched: int = 0xC1, levels: Sequence[int] = (SCHED, BACKEND, CPU),
        *, traced: bool = True,
    ) -> None:  # fmt: skip
        """One graph through the given levels, the ops inside the innermost."""
        builder, hash = self._builder(step)
        who = {"call": call}
        open_: list[tuple[int, int, int, int]] = []
        for level in levels:
            seq, parent = self.next_seq(), open_[-1][0] if open_ else 0
            flags = KNOWN if hash in self.confirmed else 0
            if not open_:
                flags |= self._describe(builder, hash, seq)
            else:
                flags |= SAME
            if level == CPU and traced:
                flags |= TRACED
            event = self.event(
                GRAPH_BEGIN, seq, level, parent=parent, object=sched + level, hash=hash, flags=flags,
                n_nodes=len(builder.nodes), **who,
            )  # fmt: skip
            if not open_:
                self._ints(event, step)
            open_.append((seq, level, self.now, parent))
        counts = {"hits": 0, "accepted": 0, "lost": 0}
        if levels[-1] == CPU and traced:
            counts = self._run(step, builder, hash, open_[-1][0])
        else:
            self.now += SETUP
        for seq, level, begin, parent in reversed(open_):
            end = counts if level == CPU else {}
            self.event(
                GRAPH_END, seq, level, parent=parent, object=sched + level, begin_ts=begin, **end, **who
            )

    def _builder(self, step: Step) -> tuple[Builder, int]:
        if step.graph is not None:
            if not any(one is step.graph for one in self._given):
                self._given.append(step.graph)
            number = next(n for n, one in enumerate(self._given) if one is step.graph)
            return step.graph, step.hash or (1 << 40) + number
        key = (len(step.pos), len(step.out), step.n_kv)
        if key not in self._graphs:
            self._graphs[key] = decoder(*key, layers=1)
        return self._graphs[key], step.hash or hash(key) & (2**63 - 1)

    def _describe(self, builder: Builder, hash: int, seq: int) -> int:
        if hash in self.sent:
            return 0
        self.sent.add(hash)
        descs = builder.descs()
        descs["seq"] = seq
        self.nodes.append(descs)
        return DESCRIBED

    def _ints(self, event: dict[str, Any], step: Step) -> None:
        pos = list(step.pos) if step.n_pos is None else [*step.pos, *[0] * (step.n_pos - len(step.pos))]
        for name, what, values in (("pos", POS, pos), ("out", OUT, list(step.out))):
            event[f"n_{name}"] = len(values)
            event[name] = [*values[:8], *[0] * (8 - len(values))]
            for offset in range(8, 0 if step.no_chunks else len(values), 64):
                part = values[offset : offset + 64]
                self.ints.append(
                    {"ts": self.now, "seq": event["seq"], "what": what, "count": len(part),
                     "offset": offset, "value": [*part, *[0] * (64 - len(part))]}
                )  # fmt: skip

    def _run(self, step: Step, builder: Builder, hash: int, seq: int) -> dict[str, int]:
        """Kernels as the CPU backend dispatches them: RMS_NORM and MUL are one."""
        self.now += SETUP
        if hash not in self._walked:
            self._walked[hash] = self._dispatch(builder)
        template, _ = self._walked[hash]
        hits = template.copy()
        hits["seq"] = seq
        hits["ts"] = self.now + np.arange(len(hits)) * step.op_ns
        self.now += len(hits) * step.op_ns
        for node, count in step.experts.items():
            self.ints.append({"ts": self.now, "seq": seq, "node": node, "what": EXPERTS, "count": count})
        seen = np.ones(len(hits), dtype=bool)
        seen[list(step.unseen)] = False
        kept = seen.copy()
        kept[list(step.lose)] = False
        self.ops.append(hits[kept])
        return {"hits": int(seen.sum()), "accepted": int(seen.sum()), "lost": int(seen.sum() - kept.sum())}

    @staticmethod
    def _dispatch(builder: Builder) -> tuple[Records, list[tuple[int, bool]]]:
        expected = builder.graph().expected
        ran: list[tuple[int, bool]] = []
        skip = False
        for index, node in enumerate(builder.nodes):
            if skip or not expected[index]:
                skip = False
                continue
            skip = node.op == "RMS_NORM"
            ran.append((index, skip))
        hits = np.zeros(len(ran), OP_HIT)
        hits["node"] = [index | (FUSED if fused else 0) for index, fused in ran]
        return hits, ran

    def kernels(self, step: Step) -> list[tuple[int, bool]]:
        """(node, fused with the next) of every kernel of a step's graph."""
        return self._dispatch(self._builder(step)[0])[1]


def _array(dtype: np.dtype[np.void], rows: Sequence[dict[str, Any]]) -> Records:
    array = np.zeros(len(rows), dtype=dtype)
    for place, row in enumerate(rows):
        for name, value in row.items():
            array[place][name] = value
    return array
