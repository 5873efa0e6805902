# SPDX-License-Identifier: Apache-2.0
"""Contexts of the engine: each has its own sequences, and some are drafts (case C15)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from .calls import Call
from .latency import LatencyStore
from .records import Level
from .requests import ContextTracker, TokenCounts
from .tokens import Run

MAX_CONTEXTS = 64
_Key = tuple[str, int, int]

_AGREED = 3
"""Two contexts of different threads that happen to be at the same positions may agree once."""

TARGET = "target"
DRAFT = "draft"


@dataclass(slots=True, eq=False)
class Context:
    """One context; ``role`` None until speculation tells. ``held``: see the session. ``agreed``: how
    often what it made was just what a target on another thread verified."""

    number: int
    tgid: int
    tid: int
    role: str | None = None
    tracker: ContextTracker = field(default_factory=ContextTracker)
    held: object | None = None
    agreed: int = 0


@dataclass(slots=True)
class Retired:
    """Sums of contexts that were forgotten."""

    counts: TokenCounts = field(default_factory=TokenCounts)
    first_token: LatencyStore = field(default_factory=LatencyStore)
    inter_token: LatencyStore = field(default_factory=LatencyStore)
    between_calls: LatencyStore = field(default_factory=LatencyStore)
    contexts: int = 0


class Contexts:
    """All contexts, by llama_context where calls are seen, else by scheduler or thread."""

    def __init__(self) -> None:
        self._contexts: OrderedDict[_Key, Context] = OrderedDict()
        self._of_sched: OrderedDict[tuple[int, int], _Key] = OrderedDict()
        self._numbered = 0
        self.retired = Retired()

    def all(self) -> list[Context]:
        """Those that are remembered, in the order of their last use."""
        return list(self._contexts.values())

    def of(self, call: Call) -> tuple[Context, list[Context]]:
        """The context of a call, and contexts that had to be forgotten for it."""
        scheds = [(call.tgid, g.object) for g in call.graphs if g.level == Level.SCHED]
        key = self._key(call, scheds)
        gone: list[Context] = []
        if call.seq and call.object:
            for sched in scheds:
                gone += self._learn(sched, key)
        context = self._contexts.get(key)
        if context is None:
            self._numbered += 1
            context = self._contexts[key] = Context(self._numbered, call.tgid, call.tid)
        context.tid = call.tid
        self._contexts.move_to_end(key)
        while len(self._contexts) > MAX_CONTEXTS:
            gone.append(self._contexts.popitem(last=False)[1])
        return context, gone

    def retire(self, context: Context) -> None:
        """Keep the sums of a forgotten context; a draft's are nobody's tokens."""
        self.retired.contexts += 1
        if context.role != DRAFT:
            self.retired.counts.add(context.tracker.counts)
            self.retired.first_token.add(context.tracker.first_token)
            self.retired.inter_token.add(context.tracker.inter_token)
            self.retired.between_calls.add(context.tracker.between_calls)

    def verified(self, target: Context, since_ns: int, begin_ns: int, runs: Iterable[Run]) -> None:
        """A verification makes its context a target; the thread's other context that made
        these very positions since the target's last call is its draft.

        A server may leave drafting to another thread. There, several contexts may be at work at the
        same time: a draft made all the positions that were guessed and nothing else, more than once.
        """
        target.role = TARGET
        runs = list(runs)
        spans = [(run.start - 1, run.start + run.length) for run in runs]
        guessed = {pos for run in runs for pos in range(run.start, run.start + run.length - 1)}
        for other in self._contexts.values():
            if other is target or other.role or other.tgid != target.tgid:
                continue
            made = {pos for end, pos in other.tracker.recent_rows if since_ns <= end <= begin_ns}
            if other.tid == target.tid:
                if any(low <= pos < high for pos in made for low, high in spans):
                    other.role = DRAFT
            elif made and made == guessed:
                other.agreed += 1
                if other.agreed >= _AGREED:
                    other.role = DRAFT

    def _key(self, call: Call, scheds: list[tuple[int, int]]) -> _Key:
        if call.seq and call.object:
            return "context", call.tgid, call.object
        for sched in scheds:
            known = self._of_sched.get(sched)
            if known is not None:
                return known
        if scheds:
            return "sched", *scheds[0]
        return "thread", call.tgid, call.tid

    def _learn(self, sched: tuple[int, int], key: _Key) -> list[Context]:
        """A scheduler belongs to this context: so does what it did before we knew.

        Returns the context that it had until now, if there is one already to take its place.
        """
        self._of_sched[sched] = key
        self._of_sched.move_to_end(sched)
        while len(self._of_sched) > 4 * MAX_CONTEXTS:
            self._of_sched.popitem(last=False)
        earlier = self._contexts.pop(("sched", *sched), None)
        if earlier is None:
            return []
        if key in self._contexts:
            return [earlier]
        self._contexts[key] = earlier
        return []
