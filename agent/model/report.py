# SPDX-License-Identifier: Apache-2.0
"""From a session's sums to a snapshot: names, seconds, and what is absent and why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from .contexts import DRAFT, Context
from .latency import Histogram, LatencyStore, merged
from .records import HIT_STATS, LOST_STATS, stat_name
from .requests import TokenCounts
from .sampled import SampledOps
from .snapshot import (
    Call,
    ContextTokens,
    Counters,
    Graph,
    GraphCount,
    Histograms,
    Latencies,
    Lost,
    Op,
    Overhead,
    Requests,
    Snapshot,
    Tokens,
)
from .tokens import Phase
from .totals import CPU, GraphTotal

if TYPE_CHECKING:
    from .session import Session


class Reporter:
    """Makes snapshots; remembers what counters have shown, so that none goes back.

    A context may turn out to be a draft after its first tokens were counted as the target's:
    the exact figures then drop, and a counter waits until they have caught up.
    """

    def __init__(self) -> None:
        self._prompt = 0
        self._generated = 0
        self._verified = 0
        self._first: Histogram | None = None
        self._inter: Histogram | None = None
        self._lost: dict[str, int] = {}

    def snapshot(self, session: Session, now_ns: int, stats: Mapping[str, float]) -> Snapshot:
        """All figures of a session at ``now_ns``."""
        named = {stat_name(name): value for name, value in stats.items()}
        counted = [c for c in session.contexts.all() if c.role != DRAFT]
        counts = _sum_counts(session, counted)
        retired = session.contexts.retired
        first = merged([retired.first_token, *(c.tracker.first_token for c in counted)])
        inter = merged([retired.inter_token, *(c.tracker.inter_token for c in counted)])
        between = merged([retired.between_calls, *(c.tracker.between_calls for c in counted)])
        known = session.steps > 0 or session.target.has_calls or session.target.has_graphs
        lost = self._losses(session, named)
        return Snapshot(
            target=session.target.target,
            window_seconds=max(now_ns - session.start_ns, 0) / 1e9,
            tokens=_tokens(counts) if known else Tokens(None, None, None),
            calls=_calls(session),
            latency_seconds=Latencies(first.summary(), inter.summary(), between.summary()),
            graphs=_graphs(session),
            ops=_ops(session),
            overhead=_overhead(named),
            lost=Lost(sum(lost.values()), lost),
            notes=_notes(session, counts, inter, named, known),
            requests=Requests(counts.requests, counts.first_rows) if known else Requests(None, None),
            contexts=tuple(_context(c) for c in session.contexts.all()),
            unreturned=session.calls.unreturned,
            histograms=self._histograms(first, inter),
            counters=self._counters(session, counts, named),
            placement=session.work.placements.all(),
        )

    def _losses(self, session: Session, named: Mapping[str, float]) -> dict[str, int]:
        kinds = dict(session.losses.kinds)
        for stat, kind in LOST_STATS.items():
            if stat in named:
                # The probes count what the session may also have noticed: once, not twice.
                # A kind that is counted and is 0 says so: a counter has to start somewhere.
                kinds[kind] = max(int(named[stat]), kinds.get(kind, 0))
        for kind, value in kinds.items():
            self._lost[kind] = max(self._lost.get(kind, 0), value)
        return dict(sorted(self._lost.items()))

    def _histograms(self, first: LatencyStore, inter: LatencyStore) -> Histograms:
        self._first = _never_less(first.histogram(), self._first)
        self._inter = _never_less(inter.histogram(), self._inter)
        return Histograms(self._first, self._inter)

    def _counters(self, session: Session, counts: TokenCounts, named: Mapping[str, float]) -> Counters:
        self._prompt = max(self._prompt, counts.prefill + counts.encode)
        self._generated = max(self._generated, counts.rows)
        self._verified = max(self._verified, counts.verify)
        totals = session.work.graphs
        return Counters(
            prompt_tokens=self._prompt,
            generation_tokens=self._generated,
            verify_tokens=self._verified,
            graphs=tuple(
                GraphCount(phase.value, backend, item.count, totals.sampled[phase, backend], item.ns / 1e9)
                for (phase, backend), item in sorted(totals.whole.items())
            ),
            hits={level: int(named[stat]) for stat, level in HIT_STATS.items() if stat in named},
        )


def _never_less(now: Histogram, before: Histogram | None) -> Histogram:
    if before is None:
        return now
    counts = tuple(max(a, b) for a, b in zip(now.counts, before.counts, strict=True))
    return Histogram(counts, max(now.sum, before.sum), max(now.count, before.count))


def _sum_counts(session: Session, counted: list[Context]) -> TokenCounts:
    whole = TokenCounts()
    whole.add(session.contexts.retired.counts)
    for context in counted:
        whole.add(context.tracker.counts)
    return whole


def _tokens(counts: TokenCounts) -> Tokens:
    return Tokens(
        prefill=counts.prefill,
        decode=counts.decode,
        output_rows=counts.rows,
        verify=counts.verify,
        verify_rows=counts.verify_rows,
        verify_accepted=counts.verify_accepted,
        encode=counts.encode,
        encode_rows=counts.encode_rows,
        warmup=counts.warmup,
        ambiguous=counts.ambiguous,
    )


def _context(context: Context) -> ContextTokens:
    counts = context.tracker.counts
    return ContextTokens(
        context.number,
        context.role,
        context.tracker.calls,
        _tokens(counts),
        Requests(counts.requests, counts.first_rows),
    )


def _calls(session: Session) -> tuple[Call, ...]:
    return tuple(
        Call(phase.value, status, total.count, total.ns / 1e9)
        for (phase, status), total in sorted(session.calls.totals.items())
    )


def _graphs(session: Session) -> tuple[Graph, ...]:
    totals = session.work.graphs.totals
    keys = sorted(totals, key=lambda k: -totals[k].ns)
    return tuple(_graph(*key, totals[key], session.work.sampled) for key in keys if totals[key].count)


def _graph(
    hash: int | None, phase: Phase, backend: str, total: GraphTotal, sampled: SampledOps | None
) -> Graph:
    setup = total.setup_ns / 1e9 if total.setups else None
    if sampled is not None:
        share = sampled.setup_share(total.topology, phase.value)
        setup = None if share is None else share * total.ns / 1e9
    skipped = None
    if total.nodes is not None and total.executed is not None:
        skipped = total.nodes - total.executed - (total.fused or 0) - (total.uncovered or 0)
    return Graph(
        id=f"{hash:016x}" if hash else None,
        topology=total.topology,
        phase=phase.value,
        backend=backend,
        nodes=total.nodes,
        executed=total.executed,
        uncovered=total.uncovered,
        tokens=total.tokens,
        rows=total.rows,
        kv_length=total.kv_length,
        count=total.count,
        sampled=total.sampled,
        seconds=total.ns / 1e9,
        setup_seconds=setup,
        fused=total.fused,
        skipped=max(skipped, 0) if skipped is not None else None,
        # Sums cannot tell between which kernels something was missing.
        untimed_seconds=total.untimed_ns / 1e9 if total.sampled and sampled is None else None,
        whole_seconds=total.whole_ns / 1e9 if total.whole_ns else None,
        split=total.split,
        timing="enqueue" if total.enqueued else "wall",
        failed=total.failed,
        warmup=total.warmup,
    )


def _ops(session: Session) -> tuple[Op, ...]:
    if session.work.sampled is not None:
        return _sampled_ops(session.work.sampled)
    totals = session.work.ops.totals
    keys = sorted(totals, key=lambda k: -totals[k].ns)
    return tuple(
        Op(
            op=key.op,
            dtype=key.dtype,
            role=key.role,
            kernel=key.kernel,
            backend=backend,
            phase=phase.value,
            calls=item.calls,
            seconds=item.ns / 1e9,
            seconds_stderr=None,
            flops=item.flops if item.flops_known else None,
            bytes=item.bytes if item.bytes_known else None,
            untimed=item.untimed,
        )
        for (key, backend, phase), item in ((k, totals[k]) for k in keys)
    )


def _sampled_ops(sampled: SampledOps) -> tuple[Op, ...]:
    found = sampled.ops()
    keys = sorted(found, key=lambda k: -found[k].seconds)
    return tuple(
        Op(
            op=key.op,
            dtype=key.dtype,
            role=key.role,
            kernel=key.kernel,
            backend=CPU,
            phase=phase,
            calls=int(item.calls),
            seconds=item.seconds,
            seconds_stderr=item.stderr,
            flops=item.flops,
            bytes=item.bytes,
        )
        for (key, phase), item in ((k, found[k]) for k in keys)
    )


def _overhead(named: Mapping[str, float]) -> Overhead:
    hits = [int(named[stat]) for stat in HIT_STATS if stat in named]
    return Overhead(hits=sum(hits) if hits else None, ns_per_hit=named.get("ns_per_hit"))


RATIOS_NULL = "overhead: the cost is estimated and measured where ops are sampled only, the ratios are null"
"""A note for sessions that are not sampled."""


def _sampling_notes(sampled: SampledOps | None) -> list[tuple[object, str]]:
    if sampled is None:
        return []
    phases = sampled.phases()
    seen = sum(total.graphs_sampled for total in phases.values())
    never = sorted(phase for phase, total in phases.items() if total.graphs and not total.ops)
    waiting = sum(total.pending_seconds for total in phases.values())
    return [
        (seen, f"ops: estimated, kernels were timed in {seen} graphs, the time of others is shared alike"),
        (never, f"ops: none for {', '.join(never)}, no burst (of timing kernels) has met such a graph yet"),
        (waiting >= 0.001, f"ops: {waiting:.3f} s of graphs are in no op yet, no burst has come after them"),
    ]


def _notes(
    session: Session,
    counts: TokenCounts,
    inter: LatencyStore,
    named: Mapping[str, float],
    known: bool,
) -> tuple[str, ...]:
    work, facts = session.work, session.target
    contexts = session.contexts.all()
    uncovered = sum(total.uncovered or 0 for total in work.graphs.totals.values())
    untimed = sum(total.untimed for total in work.ops.totals.values())
    held = sum(context.held is not None for context in contexts)
    unknown = [t for t in work.ops.totals.values() if not (t.flops_known and t.bytes_known)]
    drafts = [str(context.number) for context in contexts if context.role == DRAFT]
    told = (
        (not known, "tokens: not available, this program calls no llama function with a probe"),
        (not facts.has_ops, "ops: not available, op probes are off or have no place"),
        (
            facts.has_ops and facts.target.attach.complete is False,
            "ops: incomplete, this build has no function that every kernel passes",
        ),
        (
            facts.has_calls and named.get("hits_call") == 0 and named.get("hits_graph", 0) > 0,
            "calls: none of the probed functions was entered although graphs ran, this program"
            " makes its calls another way",
        ),
        (
            facts.has_ops and uncovered and named.get("hits_op") == 0,
            "ops: none of the probed functions was entered although graphs ran, this build runs"
            " its kernels another way",
        ),
        (
            counts.ambiguous,
            f"tokens: {counts.ambiguous} were classified by shape alone, their positions are"
            " not known; no request can be followed through them",
        ),
        (
            counts.rows_unknown,
            f"tokens: output rows of {counts.rows_unknown} tokens are not known and not counted",
        ),
        (
            counts.verify,
            "tokens: rows that verify a speculation are not generated tokens and are counted"
            " apart; inter_token has one interval per call, whatever it accepted",
        ),
        (
            drafts,
            f"tokens: context {', '.join(drafts)} drafts for another one and is not in the sums",
        ),
        (counts.warmup, f"tokens: {counts.warmup} of the engine's warm-up are not in the sums"),
        (
            held,
            "tokens: the first call may be the engine's warm-up, it is counted when the next one tells",
        ),
        (known and not inter.count, "latency: inter_token is null, no request had two rows"),
        (
            work.enqueued,
            "graphs: timing enqueue means that the backend computes after the call returns;"
            " its seconds are not in ops",
        ),
        (
            uncovered,
            "ops: some kernels were not seen (graphs.uncovered); the time around them is"
            " untimed, not given to a neighbour",
        ),
        (untimed, f"ops: {untimed} kernels ran whose own time is not known (ops.untimed)"),
        (work.pending, f"ops: {work.pending} executions wait for the nodes of their graph"),
        (
            unknown,
            "ops: flops or bytes are null where a kernel's formula or one of its sources is not known",
        ),
        *_sampling_notes(work.sampled),
        (
            work.ops.totals,
            "ops: every recorded execution is counted and none estimated, seconds_stderr is null",
        ),
        (
            session.stacks.unpaired,
            f"calls: {session.stacks.unpaired} ends belong to calls that began before we attached",
        ),
        (
            session.stacks.abandoned,
            f"calls: {session.stacks.abandoned} calls or graphs never returned",
        ),
        (work.sampled is None, RATIOS_NULL),
        (
            "ns_per_hit" not in named,
            "overhead: ns_per_hit is null, the cost of a hit was not measured",
        ),
    )
    return tuple(text for condition, text in told if condition)
