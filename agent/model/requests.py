# SPDX-License-Identifier: Apache-2.0
"""Requests of one context, followed by positions alone (design D10).

The graph does not say which sequence a token belongs to, so each sequence is known by the
position that would continue it. What follows a row is generation; what follows a token
without a row can only be more of the prompt, because nothing was there to sample from.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field, fields

from .latency import LatencyStore
from .sequences import Sequence, SequenceBook
from .tokens import GraphTokens, Phase, Run, phase_of, shape_phase

_RECENT_ROWS = 64


@dataclass(slots=True)
class TokenCounts:
    """Tokens by what they were for; only ever added to.

    ``rows`` are those of decode and prefill runs; ``first_rows`` the requests whose prompt
    gave its row, so that over requests seen whole: processed = prefill + decode =
    prompt + generated - first_rows. ``ambiguous`` tokens were classified by shape alone.
    ``verify_accepted`` is known one call late: how far the next run starts after the verify.
    """

    prefill: int = 0
    decode: int = 0
    verify: int = 0
    encode: int = 0
    warmup: int = 0
    ambiguous: int = 0
    rows: int = 0
    verify_rows: int = 0
    verify_accepted: int = 0
    encode_rows: int = 0
    rows_unknown: int = 0
    requests: int = 0
    first_rows: int = 0

    def add(self, other: TokenCounts) -> None:
        """Everything that ``other`` counted."""
        for item in fields(self):
            setattr(self, item.name, getattr(self, item.name) + getattr(other, item.name))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one call turned out to be."""

    phase: Phase
    ambiguous: bool
    verified: tuple[Run, ...]


@dataclass(slots=True)
class _Call:
    begin_ns: int
    end_ns: int
    joined: bool
    kinds: list[Phase] = field(default_factory=list)
    verified: list[Run] = field(default_factory=list)
    rows: dict[Sequence, Phase] = field(default_factory=dict)
    ambiguous: bool = False


class ContextTracker:
    """All sequences of one context, fed with its successful calls in order of return."""

    def __init__(self) -> None:
        self.counts = TokenCounts()
        self.first_token = LatencyStore()
        self.inter_token = LatencyStore()
        self.between_calls = LatencyStore()
        self.calls = 0
        #: Nothing but warm-up was seen yet.
        self.fresh = True
        #: (return ns, position) of the newest rows of runs of one: evidence for drafts.
        self.recent_rows: deque[tuple[int, int]] = deque(maxlen=_RECENT_ROWS)
        self.last_end_ns = 0
        self.sequences = SequenceBook()
        self._shifted = False

    # -- warm-up ---------------------------------------------------------------

    def may_be_warmup(self, graphs: list[GraphTokens]) -> bool:
        """Whether a call looks like the engine's own first one: BOS and EOS, or one of them.

        Only the next call tells it from a real prompt of two tokens: see ``continues``.
        """
        work = [g for g in graphs if not g.k_shift]
        if not self.fresh or len(work) != 1:
            return False
        runs = work[0].runs
        return (
            runs is not None
            and len(runs) == 1
            and runs[0].start == 0
            and runs[0].length <= 2
            and (runs[0].last_row or work[0].encoder)
        )

    @staticmethod
    def continues(held: list[GraphTokens], graphs: list[GraphTokens]) -> bool:
        """Whether a call goes on where a possible warm-up ended: then it was a prompt."""
        ends = {run.next for g in held for run in g.runs or ()}
        return any(run.start in ends for g in graphs for run in g.runs or ())

    def warmup(self, graphs: list[GraphTokens]) -> None:
        """Count a call as warm-up; it belongs to no request."""
        self.counts.warmup += sum(g.tokens for g in graphs)

    # -- calls -----------------------------------------------------------------

    def call(self, graphs: list[GraphTokens], begin_ns: int, end_ns: int, *, joined: bool = False) -> Outcome:
        """Account one successful call.

        ``joined``: this call began so soon after we attached that a lone token at an
        unknown position is a generation under way, not a request.
        """
        self.calls += 1
        call = _Call(begin_ns, max(end_ns, begin_ns), joined and self.fresh)
        for graph in graphs:
            self._graph(graph, call)
        self._finish(call)
        if any(not g.k_shift for g in graphs):
            self.fresh = False
        self.last_end_ns = call.end_ns
        return Outcome(phase_of(call.kinds), call.ambiguous, tuple(call.verified))

    def shape_only(self, graphs: list[GraphTokens]) -> Phase:
        """The phase of a call that failed: a guess that moves no sequence."""
        return phase_of(self._shape_kind(g) for g in graphs if not g.k_shift and g.tokens > 0)

    @staticmethod
    def _shape_kind(graph: GraphTokens) -> Phase:
        if graph.runs is None:
            return shape_phase(graph.tokens, graph.rows, graph.encoder)
        return phase_of(
            shape_phase(run.length, run.rows, graph.encoder or run.every_row) for run in graph.runs
        )

    def _graph(self, graph: GraphTokens, call: _Call) -> None:
        if graph.k_shift:
            self._shifted = True
        elif graph.runs is None:
            self._by_shape(graph, call)
        elif graph.encoder:
            self.counts.encode += graph.tokens
            self.counts.encode_rows += graph.rows or 0
            call.kinds.append(Phase.ENCODE)
        else:
            taken: set[Sequence] = set()
            for run in self._separate(graph.runs):
                self._run(run, call, taken)

    def _by_shape(self, graph: GraphTokens, call: _Call) -> None:
        phase = shape_phase(graph.tokens, graph.rows, graph.encoder)
        if phase is Phase.OTHER:
            return
        call.kinds.append(phase)
        call.ambiguous = call.ambiguous or not graph.encoder
        counts = self.counts
        if phase is Phase.ENCODE:
            counts.encode += graph.tokens
            counts.encode_rows += graph.rows or 0
            return
        counts.ambiguous += graph.tokens
        if graph.rows is None:
            counts.rows_unknown += graph.tokens
        rows = graph.rows or 0
        counts.rows += rows
        if phase is Phase.MIXED:
            # Every row but the prompt's own belongs to a slot that generates.
            counts.decode += rows - 1
            counts.prefill += graph.tokens - rows + 1
        elif phase is Phase.DECODE:
            counts.decode += graph.tokens
        else:
            counts.prefill += graph.tokens
        for sequence in self.sequences:
            sequence.slack += graph.tokens

    # -- runs ------------------------------------------------------------------

    def _separate(self, runs: tuple[Run, ...]) -> Iterable[Run]:
        """Cut stretches that only look like one: slots that generate at 8 and at 9.

        Every slot that took part in the last call takes part in this one; if none of the
        stretches begins where it would go on, it goes on inside one of them.
        """
        if not any(run.every_row for run in runs):
            return runs
        begins = Counter(run.start for run in runs)
        waiting = Counter(
            s.next
            for s in self.sequences
            # Where a sequence goes on after a verification is not known before it does.
            if s.produced and s.floor is None and s.used == self.calls - 1
        )
        waiting -= begins
        if not waiting:
            return runs
        separate: list[Run] = []
        for run in runs:
            if not run.every_row:
                separate.append(run)
                continue
            start = run.start
            for position in range(run.start + 1, run.start + run.length):
                if waiting.get(position, 0) > 0:
                    waiting[position] -= 1
                    separate.append(_every_row(start, position))
                    start = position
            separate.append(_every_row(start, run.start + run.length))
        return separate

    def _run(self, run: Run, call: _Call, taken: set[Sequence]) -> None:
        sequence = self.sequences.match(run, taken, shifted=self._shifted)
        if run.single:
            kind = self._single(run, sequence, call)
        elif run.every_row:
            kind = Phase.ENCODE
            if sequence is not None and sequence.produced:
                kind = Phase.VERIFY
        else:
            kind = Phase.PREFILL
            if sequence is not None and sequence.produced:
                # A stretch of prompt after generation is the next turn in the same slot.
                self.sequences.forget(sequence)
                sequence = None
        if sequence is None:
            sequence = self._start(kind, run, call)
        if sequence.floor is not None:
            self.counts.verify_accepted += max(run.start - sequence.floor, 0)
        self._advance(sequence, run, kind)
        taken.add(sequence)
        call.kinds.append(kind)
        self._count(run, kind)
        if kind is Phase.VERIFY:
            call.verified.append(run)
        if run.single:
            self.recent_rows.append((call.end_ns, run.start))
        if run.rows:
            call.rows[sequence] = kind

    def _single(self, run: Run, sequence: Sequence | None, call: _Call) -> Phase:
        if sequence is not None:
            return Phase.DECODE if sequence.produced else Phase.PREFILL
        return Phase.DECODE if call.joined and run.start > 0 else Phase.PREFILL

    def _count(self, run: Run, kind: Phase) -> None:
        counts = self.counts
        if kind is Phase.VERIFY:
            counts.verify += run.length
            counts.verify_rows += run.rows
        elif kind is Phase.ENCODE:
            counts.encode += run.length
            counts.encode_rows += run.rows
        elif kind is Phase.DECODE:
            counts.decode += run.length
            counts.rows += run.rows
        else:
            counts.prefill += run.length
            counts.rows += run.rows

    def _start(self, kind: Phase, run: Run, call: _Call) -> Sequence:
        seen_whole = kind is not Phase.DECODE and not (call.joined and run.start > 0)
        sequence = Sequence(run.start, self.calls, call.begin_ns if seen_whole else None)
        if kind is Phase.PREFILL:
            self.counts.requests += 1
            sequence.counted = True
        self.sequences.add(sequence)
        return sequence

    def _advance(self, sequence: Sequence, run: Run, kind: Phase) -> None:
        self.sequences.move(sequence, run.next)
        sequence.slack = run.loose
        sequence.used = self.calls
        sequence.produced = run.last_row
        sequence.floor = run.start if kind is Phase.VERIFY else None

    def _finish(self, call: _Call) -> None:
        before = [s.last_row_ns for s in call.rows if s.last_row_ns is not None]
        if before:
            # However many sequences waited: the program was out of its calls since the last of them.
            self.between_calls.record(call.begin_ns - max(before))
        for sequence, kind in call.rows.items():
            if sequence.last_row_ns is not None:
                self.inter_token.record(call.end_ns - sequence.last_row_ns)
            elif kind is Phase.PREFILL:
                if sequence.started_ns is not None:
                    self.first_token.record(call.end_ns - sequence.started_ns)
                if sequence.counted:
                    self.counts.first_rows += 1
            sequence.last_row_ns = call.end_ns
        if call.rows:
            self._shifted = False


def _every_row(start: int, end: int) -> Run:
    return Run(start, end - start, end - start, True, end)
