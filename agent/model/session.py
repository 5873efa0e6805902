# SPDX-License-Identifier: Apache-2.0
"""Everything seen of one target, from records to sums. Pure: no clock, no kernel.

The caller drains the ring of events first and the others after it, and hands all of them to
:meth:`Session.feed`: when an end event is seen, everything that belongs to it is there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from .calls import Call, CallStacks, GraphRun
from .contexts import Context, Contexts
from .graph import Graph, TypeTraits
from .graphwork import GraphWork, Mark
from .intake import ChunkStore, read_tokens
from .losses import Losses
from .opwork import Execution, HitBuffer
from .plancache import PlanCache, Tables
from .records import Flag, Level, Records
from .report import Reporter
from .snapshot import Snapshot, TargetFacts
from .tokens import MAX_TOKENS, GraphTokens, Phase
from .totals import CallTotals, NodeSums

#: An undecided first call this old was the engine's warm-up: a prompt would have gone on.
_HOLD_NS = 5_000_000_000
_MAX_TIME = 1 << 62
#: A process older than this when we attached has its warm-up behind it.
_YOUNG_SECONDS = 60.0
#: A generation under way has its next call within about one call of our attaching. By so
#: much longer it may take: when it was seen to be under way, and when nothing is known.
_JOIN_BUSY_NS = 500_000_000
_JOIN_NS = 20_000_000


@dataclass(slots=True, eq=False)
class Settled:
    """A call that ended, with everything that was recorded of it; ``context``: its number."""

    call: Call
    tokens: list[GraphTokens]
    work: dict[int, Execution]
    context: int = -1


class Session:
    """Sums over one target.

    ``ops``, ``types``, ``unary``, ``glu``: names from the engine's own tables. ``start_ns``:
    when the probes were armed, on the records' clock. Of graphs, the sums per node of the last
    ``max_plans`` are kept, and the nodes themselves of ``max_graphs``; totals of all.
    """

    def __init__(
        self,
        ops: Sequence[str],
        types: Sequence[TypeTraits | None] | None,
        target: TargetFacts,
        start_ns: int,
        *,
        unary: Sequence[str] = (),
        glu: Sequence[str] = (),
        max_graphs: int = 8,
        max_plans: int = 128,
    ) -> None:
        self.target = target
        self.start_ns = start_ns
        self.losses = Losses()
        self.plans = PlanCache(Tables(ops, types, unary, glu), plans=max_plans, graphs=max_graphs)
        self.work = GraphWork(self.plans, self.losses, target.backends)
        self.calls = CallTotals()
        self.contexts = Contexts()
        self.stacks = CallStacks()
        #: Calls that were seen, and graphs of a scheduler outside calls.
        self.steps = 0
        #: Told of every call once its phase is known, in the order of the sums.
        self.listeners: list[Callable[[Settled, Phase, Mark], None]] = []
        self._chunks = ChunkStore()
        self._hits = HitBuffer()
        self._now = start_ns
        self._reporter = Reporter()
        self._slack_ns = _JOIN_BUSY_NS if target.busy else _JOIN_NS
        self._young = target.age_seconds is None or target.age_seconds < _YOUNG_SECONDS

    def join_in(self) -> None:
        """What will be fed begins in the midst of a life that was watched before: its first call
        goes on with what came before it, and is no warm-up."""
        self._young, self._slack_ns = False, _JOIN_BUSY_NS
        self.target = dataclasses.replace(self.target, busy=True)

    def feed(self, events: Records, ops: Records, nodes: Records, ints: Records, now_ns: int) -> None:
        """One drain of the rings. Broken records are counted, never an error."""
        self._now = max(self._now, now_ns)
        self._chunks.take(ints)
        self.plans.take(nodes)
        self._hits.take(ops)
        for call in self.stacks.feed(events):
            self._close(call)
        self._tidy()

    def sweep(self, dead_tids: Collection[int], now_ns: int = 0) -> None:
        """Threads that are gone: what they left open never returned (case C21)."""
        self._now = max(self._now, now_ns)
        for call in self.stacks.sweep(set(dead_tids), self._now):
            self._close(call)
        self._tidy()

    def finish(self, now_ns: int) -> None:
        """Nothing more will come: decide what was left undecided."""
        self._now = max(self._now, now_ns)
        self._tidy()
        for context in self.contexts.all():
            self._decide(context)
        self.work.finish()

    def take_confirmed(self) -> list[tuple[int, int]]:
        """(tgid, hash) of graphs whose descriptors are all here: the kernel need not resend."""
        taken, self.plans.confirmed = self.plans.confirmed, []
        return taken

    def take_resend(self) -> list[tuple[int, int]]:
        """(tgid, hash) of graphs to be described again."""
        taken, self.plans.resend = self.plans.resend, []
        return taken

    def snapshot(self, now_ns: int, stats: Mapping[str, float] | None = None) -> Snapshot:
        """All figures up to now. ``stats``: the probes' counters by their names in events.h
        (``ST_LOST_OPS`` or ``lost_ops``), and ``ns_per_hit`` where it was measured."""
        self._now = max(self._now, now_ns)
        self._tidy()
        for context in self.contexts.all():
            held = context.held
            if isinstance(held, Settled) and self._now - held.call.end > _HOLD_NS:
                self._decide(context)
        self.work.fold()
        return self._reporter.snapshot(self, now_ns, stats or {})

    def unreported(self, since_ns: int) -> bool:
        """Whether summed graphs that ended after ``since_ns`` are still to be accounted: their
        phase is only known when their call has returned (and the next one has begun)."""
        held = [c.held for c in self.contexts.all() if isinstance(c.held, Settled)]
        runs = (run for one in held for root in one.call.graphs for run in (root, *root.inner))
        return self.stacks.summed(since_ns) or any(
            run.slot is not None and (run.end or 0) > since_ns for run in runs
        )

    def graphs(self) -> list[tuple[int, Graph]]:
        """(tgid, graph) of the graphs that are remembered, for exporters that draw them."""
        return [(tgid, plan.graph) for tgid, plan in self.plans.plans() if plan.graph is not None]

    def node_sums(self, tgid: int, hash: int) -> dict[Phase, NodeSums]:
        """Kernels and ns per slot of one remembered graph: node i, or n + i if fused."""
        plan = self.plans.get(tgid, hash)
        return {} if plan is None else self.work.ops.nodes(plan, tgid)

    # -- calls -----------------------------------------------------------------

    def _close(self, call: Call) -> None:
        for root in call.graphs:
            for run in (root, *root.inner):
                self.work.describe(run)
        closed = self._gather(call)
        whole = self._is_step(closed)
        context, gone = self.contexts.of(call)
        closed.context = context.number
        for old in gone:
            self._decide(old)
            self.contexts.retire(old)
        if call.status != 0 or not whole:
            phase = context.tracker.shape_only(closed.tokens)
            self._settle(closed, phase, Mark(failed=call.status != 0))
            return
        self.steps += 1
        self._decide(context, closed.tokens)
        if self._young and context.tracker.may_be_warmup(closed.tokens):
            context.held = closed
            return
        self._account(context, closed)

    def _is_step(self, closed: Settled) -> bool:
        """Whether this is a step of a model: a call, or its whole graph outside any call.

        A bare split, or an image encoder, says nothing about tokens.
        """
        call = closed.call
        if call.seq:
            return True
        root = call.graphs[0]
        plan = self.plans.get(root.tgid, root.hash)
        if root.level == Level.SCHED:
            return plan is None or not plan.facts.takes_embeddings
        return plan is not None and plan.facts.has_output and not plan.facts.unresolved

    def _decide(self, context: Context, following: list[GraphTokens] | None = None) -> None:
        """Settle the call that may have been a warm-up, now that what follows is known."""
        held, context.held = context.held, None
        if not isinstance(held, Settled):
            return
        if following is not None and context.tracker.continues(held.tokens, following):
            self._account(context, held)
        else:
            context.tracker.warmup(held.tokens)
            self._settle(held, Phase.OTHER, Mark(warmup=True))

    def _account(self, context: Context, closed: Settled) -> None:
        call = closed.call
        begin = call.end if call.begin is None else call.begin
        soon = begin - self.start_ns <= call.ns + call.ns // 2 + self._slack_ns
        joined = soon and self.target.busy is not False
        since = context.tracker.last_end_ns
        outcome = context.tracker.call(closed.tokens, begin, call.end, joined=joined)
        if outcome.verified:
            self.contexts.verified(context, since, begin, outcome.verified)
        self._settle(closed, outcome.phase, Mark())

    def _settle(self, closed: Settled, phase: Phase, mark: Mark) -> None:
        call = closed.call
        if call.seq:
            self.calls.add(phase, call.status, call.ns)
        for root, tokens in zip(call.graphs, closed.tokens, strict=False):
            its = Phase.OTHER if tokens.k_shift else phase
            self.work.add(root, closed.work, its, mark, self._now)
        for listener in self.listeners:
            listener(closed, phase, mark)

    def _gather(self, call: Call) -> Settled:
        tokens: list[GraphTokens] = []
        work: dict[int, Execution] = {}
        for root in call.graphs:
            plan = self.plans.get(root.tgid, root.hash)
            tokens.append(read_tokens(root, plan.facts if plan else None, self._chunks, call))
            self.losses.add("positions", tokens[-1].lost)
            for run in (root, *root.inner):
                if run.level == Level.CPU:
                    work[run.seq] = self._execution(run)
                self._chunks.drop(run.seq)
        if 0 < call.batch_tokens <= MAX_TOKENS and not any(t.tokens or t.k_shift for t in tokens):
            # Only the call itself says how many tokens it was.
            tokens.append(GraphTokens(call.batch_tokens, None, None, encoder=call.encode))
        return Settled(call, tokens, work)

    def _execution(self, run: GraphRun) -> Execution:
        partial = bool(run.lost or run.op_faults or run.end_flags & Flag.DISARMED)
        self.losses.add("ops", run.lost)
        self.losses.add("fault_op", run.op_faults)
        return Execution(
            run.tgid, run.hash, min(run.begin, _MAX_TIME), min(run.end or 0, _MAX_TIME),
            self._hits.pop(run.seq), partial, self._chunks.experts(run.seq),
        )  # fmt: skip

    def _tidy(self) -> None:
        for run in self.stacks.dropped:
            self._hits.pop(run.seq)
            self._chunks.drop(run.seq)
            self.losses.add("abandoned")
        self.stacks.dropped.clear()
        self._hits.settle()
        self.losses.add("unended_ops", self._hits.dropped)
        self._hits.dropped = 0
        self.work.tidy(self._now)
