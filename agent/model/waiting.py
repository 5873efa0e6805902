# SPDX-License-Identifier: Apache-2.0
"""Which call paid for a wait: spans of compute threads and page faults, joined by time.

Spans and faults arrive in their own rings, after the events of the same drain; a call is told
here when its phase is known, which is a call or so later. What no call claims falls out.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from .calls import Call, GraphRun
from .causes import Cause, OpWaits, PhaseWaits, Taker
from .plancache import PlanCache
from .plans import OpKey, Plan
from .records import Level, Records, columns
from .tokens import Phase

#: Spans and faults kept for calls that have not been told yet.
MAX_HELD = 1 << 14
MAX_TAKERS = 256
MAX_OPS = 512
MAX_LEADERS = 256
MAX_GAPS = 64
SHOWN_TAKERS = 16
_IN_CALL = 1  # SP_CALL
_NO_NODE = 0xFFFFFFFF
#: Sleeping at a barrier or on purpose: others are waited for, and nobody waits for this.
_OWN_ONLY = frozenset({Cause.FUTEX, Cause.SLEEP})
_CAUSES = tuple(Cause)


class Span(NamedTuple):
    """``struct sched_span``, what is needed of it."""

    begin: int
    woken: int
    end: int
    tid: int
    cause: Cause
    in_call: bool
    seq: int
    node: int

    def parts(self) -> tuple[tuple[int, int, Cause], ...]:
        """(from, to, cause): blocked, then waiting for a core."""
        if self.cause.ready:
            return ((self.begin, self.end, self.cause),)
        return ((self.begin, self.woken, self.cause), (self.woken, self.end, Cause.WAKEUP))


class _Fault(NamedTuple):
    ts: int
    tid: int
    major: bool
    seq: int
    node: int


@dataclass(slots=True)
class _Phase:
    calls: int = 0
    tokens: int = 0
    ns: int = 0
    worst: int = 0
    majors: int = 0
    minors: int = 0
    stalled: Counter[Cause] = field(default_factory=Counter)
    own: Counter[Cause] = field(default_factory=Counter)


@dataclass(slots=True)
class _Taken:
    preemptions: int = 0
    ns: int = 0
    own: bool = False


def stalls(spans: Iterable[Span], windows: Sequence[tuple[int, int]]) -> Counter[Cause]:
    """ns in ``windows`` (sorted, apart) in which some thread did not run, each counted once:
    for the cause of what began first."""
    parts = sorted(
        (low, high, cause)
        for span in spans
        for begin, end, cause in span.parts()
        if cause not in _OWN_ONLY
        for first, last in windows
        if (low := max(begin, first)) < (high := min(end, last))
    )
    found: Counter[Cause] = Counter()
    reached = 0
    for low, high, cause in parts:
        if high > reached:
            found[cause] += high - max(low, reached)
            reached = high
    return found


class CallWaits:
    """Waits of one process, by phase, op, and by who took the core."""

    def __init__(self, tgid: int, plans: PlanCache) -> None:
        self.tgid = tgid
        self.leaders: OrderedDict[int, None] = OrderedDict()
        #: Spans of this process that came in.
        self.records = 0
        self._plans = plans
        #: When nothing was watched: [begin, end], the last one perhaps still open.
        self._gaps: deque[list[int | None]] = deque(maxlen=MAX_GAPS)
        self._spans: list[Span] = []
        self._faults: list[_Fault] = []
        self._phases: dict[Phase, _Phase] = {}
        self._ops: OrderedDict[tuple[str, str, str], Counter[Cause]] = OrderedDict()
        self._op_majors: Counter[tuple[str, str, str]] = Counter()
        self._takers: dict[tuple[int, str], _Taken] = {}

    def take_spans(self, spans: Records) -> None:
        """New records of ring "spans"; those of other processes are passed over."""
        spans = spans[spans["tgid"] == self.tgid]
        self.records += len(spans)
        fields = ("begin", "woken", "end", "tid", "cause", "flags", "seq", "node", "by_tgid", "by_comm")
        for begin, woken, end, tid, cause, flags, seq, node, by, comm in zip(
            *columns(spans, fields), strict=True
        ):
            if cause > Cause.UNKNOWN or not begin <= woken <= end:
                continue  # a broken record
            why = _CAUSES[cause]
            self._spans.append(Span(begin, woken, end, tid, why, bool(flags & _IN_CALL), seq, node))
            if why is Cause.PREEMPTED:
                self._taken(by, comm, end - begin)
        self._bound_takers()
        self._spans.sort()  # by their begin; they come in the order of their end, nearly the same
        if len(self._spans) > MAX_HELD:
            del self._spans[: len(self._spans) - MAX_HELD]

    def take_faults(self, faults: Records) -> None:
        """New records of ring "faults"."""
        faults = faults[faults["tgid"] == self.tgid]
        for ts, tid, kind, seq, node in zip(
            *columns(faults, ("ts", "tid", "kind", "seq", "node")), strict=True
        ):
            self._faults.append(_Fault(ts, tid, kind == 1, seq, node))
        self._faults.sort()
        if len(self._faults) > MAX_HELD:
            del self._faults[: len(self._faults) - MAX_HELD]

    def away(self, begin_ns: int) -> None:
        """Waits are not watched from now on."""
        self._gaps.append([begin_ns, None])

    def back(self, end_ns: int) -> None:
        """Watched again."""
        if self._gaps and self._gaps[-1][1] is None:
            self._gaps[-1][1] = end_ns

    def _was_watched(self, begin_ns: int, end_ns: int) -> bool:
        return not any((begin or 0) < end_ns and (end is None or end > begin_ns) for begin, end in self._gaps)

    def call(self, call: Call, phase: Phase, tokens: int) -> None:
        """A call that returned, with its phase. One that was not watched from its begin to its end
        counts nowhere: it did not wait for nothing."""
        if call.tgid != self.tgid or call.begin is None:
            return
        self.leaders[call.tid] = None
        while len(self.leaders) > MAX_LEADERS:
            self.leaders.popitem(last=False)
        if not self._was_watched(call.begin, call.end):
            return
        entry = self._phases.setdefault(phase, _Phase())
        entry.calls += 1
        entry.tokens += tokens
        entry.ns += call.ns
        # A drain brings hundreds of spans and dozens of calls: only what began before this one's end
        # is looked at, and what ended before its begin is let go of. Another thread's call may overlap
        # with this one; what lies well before it is over.
        before = bisect_left(self._spans, (call.begin,))
        kept = [span for span in self._spans[:before] if span.end >= call.begin]
        self._spans[:before] = kept
        del self._faults[: bisect_left(self._faults, (call.begin,))]
        begun = self._spans[: bisect_left(self._spans, (call.end,))]
        mine = [span for span in begun if span.end > call.begin]
        faults = self._faults[: bisect_left(self._faults, (call.end + 1,))]
        if mine:
            self._charge(entry, call, mine)
        for fault in faults:
            entry.majors += fault.major
            entry.minors += not fault.major
        if mine or faults:
            self._by_op(call, mine, faults)

    def _charge(self, entry: _Phase, call: Call, spans: Sequence[Span]) -> None:
        begin = call.begin or 0
        cpu = sorted((run.begin, run.end or run.begin) for run in _cpu_runs(call))
        windows: list[tuple[int, int]] = []
        for low, high in cpu:
            if windows and low <= windows[-1][1]:
                windows[-1] = (windows[-1][0], max(high, windows[-1][1]))
            else:
                windows.append((low, high))
        found = stalls(spans, windows)
        entry.stalled.update(found)
        entry.worst = max(entry.worst, found.total())
        for span in spans:
            if span.tid == call.tid:
                for low, high, cause in span.parts():
                    entry.own[cause] += max(min(high, call.end) - max(low, begin), 0)

    def _by_op(self, call: Call, spans: Sequence[Span], faults: Sequence[_Fault]) -> None:
        runs = {run.seq: run for run in _cpu_runs(call)}
        for span in spans:
            key = self._key(runs.get(span.seq), span.node) if span.tid == call.tid else None
            if key is not None:
                counts = self._ops.setdefault(key, Counter())
                for low, high, cause in span.parts():
                    counts[cause] += high - low
        for fault in faults:
            if fault.major and fault.tid == call.tid and fault.seq in runs:
                key = self._key(runs[fault.seq], fault.node)
                if key is not None:
                    self._ops.setdefault(key, Counter())
                    self._op_majors[key] += 1
        while len(self._ops) > MAX_OPS:
            gone, _ = self._ops.popitem(last=False)
            del self._op_majors[gone]

    def _key(self, run: GraphRun | None, node: int) -> tuple[str, str, str] | None:
        plan = None if run is None else self._plans.get(run.tgid, run.hash)
        key = None if plan is None else op_key(plan, node)
        return None if key is None else (key.op, key.dtype, key.role)

    def _taken(self, by: int, comm: bytes, ns: int) -> None:
        key = (by, _printable(comm))
        taken = self._takers.get(key)
        if taken is None:
            taken = self._takers[key] = _Taken(own=by == self.tgid)
        taken.preemptions += 1
        taken.ns += ns

    def _bound_takers(self) -> None:
        """Of too many (a build starts hundreds of processes a second) those that took least go, and
        half at a time: looking for the least at every new one would cost more than all the rest."""
        if len(self._takers) > MAX_TAKERS:
            longest = sorted(self._takers, key=lambda one: -self._takers[one].ns)
            for key in longest[MAX_TAKERS // 2 :]:
                del self._takers[key]

    def takers(self) -> tuple[Taker, ...]:
        """Who took the core, the longest waits first."""
        found = [
            Taker(name, pid, taken.preemptions, taken.ns / 1e9, taken.own)
            for (pid, name), taken in self._takers.items()
        ]
        return tuple(sorted(found, key=lambda one: -one.seconds)[:SHOWN_TAKERS])

    def phases(self) -> tuple[PhaseWaits, ...]:
        """By phase."""
        return tuple(
            PhaseWaits(
                phase.value, one.calls, one.tokens, one.ns / 1e9, _seconds(one.stalled),
                _seconds(one.own), one.worst / 1e9, one.majors, one.minors,
            )
            for phase, one in sorted(self._phases.items())
        )  # fmt: skip

    def ops(self) -> tuple[OpWaits, ...]:
        """By kind of op."""
        return tuple(
            OpWaits(*key, _seconds(counts), self._op_majors[key]) for key, counts in self._ops.items()
        )


@lru_cache(maxsize=1024)
def _printable(comm: bytes) -> str:
    """A comm is whatever the process calls itself."""
    return "".join(c if c.isprintable() else "?" for c in comm.decode("utf-8", "replace"))


def op_key(plan: Plan, node: int) -> OpKey | None:
    """What node ``node`` of a graph counts as; None for an impossible index."""
    return plan.keys[int(plan.group[node])] if 0 <= node < plan.n else None


def _cpu_runs(call: Call) -> list[GraphRun]:
    return [run for root in call.graphs for run in (root, *root.inner) if run.level == Level.CPU]


def _seconds(counts: Counter[Cause]) -> dict[str, float]:
    return {cause.label: counts[cause] / 1e9 for cause in Cause if counts[cause]}
