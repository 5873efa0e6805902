# SPDX-License-Identifier: Apache-2.0
"""Why tokens take the time they take: rules over one snapshot, most costly finding first.

A rule looks at a :class:`~.case.Case` and returns a verdict or nothing. It says what it rests on
with figures, how sure it is, and what a token would save at most. What was not looked at is
never taken for a good sign: ``nothing_wrong`` lists it.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import TypeAlias

from .case import Case, ms, percent
from .causes import PhaseWaits
from .limits import LIMITS, Limits
from .rules_machine import compute_bound, frequency, kv_growth, memory_bound
from .rules_memory import paging
from .rules_threads import (
    cpu_quota,
    low_priority,
    more_threads_than_cores,
    one_thread,
    preempted,
    slow_core,
    too_many_threads,
)
from .snapshot import Snapshot
from .verdictdata import Verdict

Rule: TypeAlias = Callable[[Case], Verdict | None]

RULES: tuple[Rule, ...] = (
    paging,
    preempted,
    cpu_quota,
    low_priority,
    more_threads_than_cores,
    too_many_threads,
    one_thread,
    slow_core,
    frequency,
    kv_growth,
    memory_bound,
    compute_bound,
)


def judge(snapshot: Snapshot, limits: Limits = LIMITS) -> tuple[Verdict, ...]:
    """Verdicts on a snapshot, most costly first, those without a cost last.

    Empty while too little was seen to say anything.
    """
    snapshot, share = _as_watched(snapshot, limits)
    case = Case(snapshot, limits)
    found = [verdict for rule in RULES if (verdict := rule(case)) is not None]
    if share is not None:
        found = [_of_a_part(verdict, share) if verdict.rule in _OF_WAITS else verdict for verdict in found]
    found.sort(key=lambda v: -(v.seconds_per_token if v.seconds_per_token is not None else -1.0))
    if found:
        return tuple(found)
    return (_nothing_wrong(case),) if case.enough else ()


_OF_WAITS = frozenset({"preempted", "cpu_quota", "low_priority", "more_threads_than_cores"})


def _as_watched(snapshot: Snapshot, limits: Limits) -> tuple[Snapshot, float | None]:
    """What is judged where waits or page faults were watched for a part of the time only, to stay within
    the budget: what is missing is no sign that there was nothing.

    Page faults come in floods, and say nothing then. Waits count by the calls that were watched from
    begin to end, if there were enough: their cost is taken for that of all, and the second value is their
    share of the time in calls (None: all were watched, or too few).
    """
    most = limits.unwatched_share * snapshot.window_seconds
    threads, faults = snapshot.threads, snapshot.faults
    if faults is not None and faults.unwatched_seconds > most:
        snapshot = dataclasses.replace(snapshot, faults=None)
    if threads is None or threads.unwatched_seconds <= most:
        return snapshot, None
    whole: defaultdict[str, float] = defaultdict(float)
    for call in snapshot.calls:
        whole[call.phase] += call.seconds
    phases = tuple(
        _for_all(one, whole[one.phase])
        for one in threads.phases
        if one.calls >= limits.watched_calls and one.seconds > 0
    )
    if not phases:
        return dataclasses.replace(snapshot, threads=None), None
    seen = sum(one.seconds for one in threads.phases)
    snapshot = dataclasses.replace(snapshot, threads=dataclasses.replace(threads, phases=phases))
    return snapshot, min(1.0, seen / max(sum(whole.values()), seen))


def _for_all(one: PhaseWaits, seconds: float) -> PhaseWaits:
    """A phase as if all its calls, which took so long together, had been like those that were watched."""
    factor = max(1.0, seconds / one.seconds)
    stalled, own = ({cause: s * factor for cause, s in some.items()} for some in (one.stalled, one.own))
    return dataclasses.replace(one, seconds=one.seconds * factor, stalled=stalled, own=own)


def _of_a_part(verdict: Verdict, share: float) -> Verdict:
    how = f"from {percent(share)} of the time in calls, in which waits were watched (--budget)"
    sure = "medium" if verdict.confidence == "high" else verdict.confidence
    return dataclasses.replace(verdict, confidence=sure, evidence=(*verdict.evidence, how))


def _nothing_wrong(case: Case) -> Verdict:
    unseen = tuple(_unseen(case))
    evidence = [
        f"{case.decode_tokens} tokens were decoded at {ms(case.decode_seconds_per_token)} each,"
        " and no rule found a cause that could be removed"
    ]
    if case.memory_share is not None:
        evidence.append(f"decode reads at {percent(case.memory_share)} of what this machine's memory can")
    if case.compute_share is not None:
        evidence.append(f"prefill computes at {percent(case.compute_share)} of what this machine can")
    evidence += [f"not looked at: {text}" for text in unseen]
    return Verdict(
        "nothing_wrong",
        "low" if len(unseen) > 1 else "medium" if unseen else "high",
        None,
        tuple(evidence),
        "a smaller model or a smaller type of weights, if it is still too slow",
    )


def _unseen(case: Case) -> Iterator[str]:
    snapshot = case.snapshot
    if snapshot.threads is None:
        yield "what the scheduler did with its threads"
    elif snapshot.threads.barriers is None:
        yield "how long its threads wait for each other"
    if snapshot.faults is None:
        yield "page faults"
    if case.peak is None:
        yield "how near to the machine's limits it comes, profinferd calibrate has not measured them"
    if not snapshot.ops:
        yield "its operators"
