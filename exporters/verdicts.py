# SPDX-License-Identifier: Apache-2.0
"""Verdicts for people: lines of plain text, wrapped to a width."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from ..agent.model.verdictdata import Verdict
from .text import clean, seconds

TITLES = {
    "memory_bandwidth_bound_decode": "decode waits for memory",
    "compute_bound_prefill": "prefill is all arithmetic",
    "paging": "its memory is read from disk",
    "preempted": "others take its cores",
    "cpu_quota": "its CPU quota is used up",
    "low_priority": "it gives way to others",
    "more_threads_than_cores": "more threads than CPUs",
    "too_many_threads": "threads wait for each other",
    "one_thread_carries_op": "one thread carries an operator",
    "slow_core": "slow cores hold up fast ones",
    "kv_growth_slows_attention": "attention slows with the context",
    "thermal_throttling": "heat slows the cores",
    "low_frequency": "cores run below their frequency",
    "nothing_wrong": "nothing wrong found",
}
"""A few words for each rule; a rule without any is shown by its name."""
_STYLES = {"high": "bold", "medium": "", "low": "dim"}


def verdict_lines(verdicts: Sequence[Verdict]) -> Iterator[RenderableType]:
    """A heading, and of each verdict what, how much, how sure, on what grounds, and what to try."""
    yield Text("why", "dim")
    for verdict in verdicts:
        head = Text()
        head.append(TITLES.get(verdict.rule, clean(verdict.rule, 60)), _STYLES.get(verdict.confidence, ""))
        if verdict.seconds_per_token is not None:
            head.append(f"  up to {seconds(verdict.seconds_per_token)} a token", "yellow")
        head.append(f"  ({verdict.rule}, confidence {verdict.confidence})", "dim")
        body = [Text(clean(text, 400)) for text in verdict.evidence]
        body.append(Text.assemble(("try: ", "dim"), clean(verdict.try_, 400)))
        yield Padding(Group(head, Padding(Group(*body), (0, 0, 0, 2))), (0, 0, 0, 2))
