# SPDX-License-Identifier: Apache-2.0
"""What the budget's controller is told of one target: made from the graphs and calls that ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .model.budget import Load, PhaseLoad, Prices
from .model.overhead import MeasuredOverhead, Token
from .model.sampled import Ran
from .model.session import Session
from .model.tokens import Phase

RATE_SECONDS = 1.0
"""Token rates are taken over at least this long: a tick sees a token or two."""
MAX_INTERVALS = 16


@dataclass(slots=True)
class _Rate:
    """Decode tokens against the seconds in which they were decoded."""

    tokens: int = 0
    seconds: float = 0.0
    latest: float | None = None

    def add(self, tokens: int, seconds: float) -> float | None:
        self.tokens += tokens
        self.seconds += seconds
        if self.seconds >= RATE_SECONDS:
            self.latest = self.tokens / self.seconds if self.tokens else None
            self.tokens, self.seconds = 0, 0.0
        return self.latest


class ProbeTimes:
    """When op probes were there, in ns of the records' clock."""

    def __init__(self) -> None:
        self._intervals: deque[list[int | None]] = deque(maxlen=MAX_INTERVALS)

    def come(self, now_ns: int) -> None:
        """They are about to be attached."""
        self._intervals.append([now_ns, None])

    def gone(self, now_ns: int) -> None:
        """The last of them is gone."""
        if self._intervals and self._intervals[-1][1] is None:
            self._intervals[-1][1] = now_ns

    def clear_of(self, begin_ns: int, end_ns: int) -> bool:
        """Whether there were none from begin to end."""
        return not any(
            (come or 0) <= end_ns and (gone is None or gone >= begin_ns) for come, gone in self._intervals
        )


class LoadMaker:
    """One target. ``measured`` is fed with its decode tokens."""

    def __init__(self, target: str, prices: Prices, stats: Mapping[str, int], clock_ns: int = 0) -> None:
        self._target, self._prices = target, prices
        self._stats = dict(stats)
        self._rate = _Rate()
        self._decoded = 0
        self._call_ns = 0
        self._decode_ns = 0
        self._clock_ns = clock_ns
        self._ahead_s = 0.0  # of graphs whose end was not told when their time was counted
        self.measured = MeasuredOverhead()
        self.times = ProbeTimes()

    def make(
        self,
        session: Session | None,
        fresh: Sequence[Ran],
        stats: Mapping[str, int],
        *,
        summing: int,
        graphs_seen: bool,
        clock_ns: int = 0,
    ) -> Load:
        """Since the last time. ``fresh``: graphs that ended; ``summing``: that are being summed
        now; ``graphs_seen``: whether graph probes are there, else calls tell how busy it is.
        ``clock_ns``: how long graphs have run on the CPU, by the kernel's own clock."""
        phases: dict[str, tuple[int, float]] = {}
        busy = 0.0
        for ran in fresh:
            busy += ran.run.ns / 1e9
            graphs, hits = phases.get(ran.phase.value, (0, 0.0))
            phases[ran.phase.value] = (graphs + 1, hits + _expected_hits(ran))
            self._token(ran)
        new = {name: value - self._stats.get(name, 0) for name, value in stats.items()}
        self._stats = dict(stats)
        call_s, rate = self._calls(session)
        return Load(
            target=self._target,
            prices=self._prices,
            busy_s=self._busy(busy, clock_ns) if graphs_seen else call_s,
            phases={phase: PhaseLoad(n, hits / n) for phase, (n, hits) in phases.items()},
            call_hits=new.get("hits_call", 0),
            graph_hits=new.get("hits_graph", 0),
            op_hits=new.get("hits_op", 0),
            walked=new.get("walked", 0),
            summed=sum(ran.summed for ran in fresh),
            summing=summing,
            tokens_per_second=rate,
            in_burst=self.measured.in_burst(),
            in_burst_estimate=self.measured.in_burst_estimate(),
        )

    def _busy(self, told_s: float, clock_ns: int) -> float:
        """Hits are counted as they happen, and graphs told when their calls have returned, if their
        records found room: on a machine that is too busy for us to drain them they do not, and what
        probes cost would be held against a fraction of the time. So the kernel's clock counts where it
        is ahead."""
        ran_s, self._clock_ns = (clock_ns - self._clock_ns) / 1e9, clock_ns
        busy = max(ran_s, told_s - self._ahead_s, 0.0)
        self._ahead_s = max(0.0, self._ahead_s + busy - told_s)
        return busy

    def _calls(self, session: Session | None) -> tuple[float, float | None]:
        """Seconds in calls, and the decode speed."""
        if session is None:
            return 0.0, None
        decoded = sum(context.tracker.counts.decode for context in session.contexts.all())
        totals = session.calls.totals
        call_ns = sum(total.ns for total in totals.values())
        decode_ns = sum(
            total.ns for (phase, _), total in totals.items() if phase in (Phase.DECODE, Phase.MIXED)
        )
        # Contexts that are forgotten take their tokens along.
        tokens, self._decoded = max(0, decoded - self._decoded), decoded
        call_s, self._call_ns = (call_ns - self._call_ns) / 1e9, call_ns
        decode_s, self._decode_ns = (decode_ns - self._decode_ns) / 1e9, decode_ns
        return call_s, self._rate.add(tokens, decode_s)

    def _token(self, ran: Ran) -> None:
        """One decode step for the measured overhead."""
        run, plan = ran.run, ran.plan
        if ran.phase is not Phase.DECODE or plan is None or run.end is None:
            return
        token = Token(
            at_s=run.end / 1e9,
            kind=(plan.facts.topology, plan.facts.n_tokens),
            kv_length=plan.facts.kv_length or 0,
            seconds=run.ns / 1e9,
            cost_s=run.hits * self._prices.op_ns * 1e-9,
        )
        if ran.summed and ran.whole:
            self.measured.inside(token)
        elif self.times.clear_of(run.begin, run.end):
            self.measured.outside(token)


def _expected_hits(ran: Ran) -> float:
    """Op hits that this graph costs while armed: measured if it was, else its kernels."""
    if ran.summed and ran.whole and ran.run.hits:
        return float(ran.run.hits)
    return float(ran.plan.before[ran.plan.n]) if ran.plan is not None else 0.0
