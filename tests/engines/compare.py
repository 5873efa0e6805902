# SPDX-License-Identifier: Apache-2.0
"""The profiler's report beside the witness: lines that say where they differ."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from . import facts, truth
from .profiler import Report

RELATIVE = 0.03
#: A preemption between the two clock reads of one kernel moves its time to the neighbour.
#: For a role with microseconds in all, that may be more than 3 %; it is never much of the run.
OF_THE_WHOLE = 0.005
#: The last kernel of a graph ends with the graph's return. The witness reads its clock when the
#: return probe has run, we inside it: so much of our own work is in the witness's figure.
RETURN_PROBE_SECONDS = 2e-6


@dataclass
class Row:
    """Calls and seconds of one (op, role), as each of the two saw it."""

    calls: int = 0
    true_calls: int = 0
    seconds: float = 0.0
    true_seconds: float = 0.0
    last: int = 0  # of the calls, how many were the last of their graph


def rows(report: Report, runs: Sequence[truth.GraphRun]) -> dict[tuple[str, str], Row]:
    """Both views by (op, role). Roles that no weight and no cache names are taken together as
    "": the witness does not know what the profiler calls them."""
    table: dict[tuple[str, str], Row] = defaultdict(Row)
    for key, true in truth.per_op(runs).items():
        table[key].true_calls = true.calls
        table[key].true_seconds = true.seconds
    for run in runs:
        if run.ops:
            table[run.ops[-1].node.op, run.ops[-1].role].last += 1
    known = set(table)
    for (op, role), (total, seconds) in report.by_role().items():
        row = table[(op, role) if (op, role) in known else (op, "")]
        row.calls += total.calls
        row.seconds += seconds
    return dict(table)


def exact(report: Report, runs: Sequence[truth.GraphRun]) -> list[str]:
    """What is not equal and has to be: calls, nothing uncovered, nothing lost."""
    found = [
        f"{op} {role or '(no weight)'}: {row.calls} calls, truly {row.true_calls}"
        for (op, role), row in sorted(rows(report, runs).items())
        if row.calls != row.true_calls
    ]
    if report.uncovered:
        found.append(f"{report.uncovered} kernels uncovered")
    if lost := missed(report.json["lost"]["by_kind"]):
        found.append(f"lost: {lost}")
    return found


def missed(by_kind: Mapping[str, int]) -> dict[str, int]:
    """What was lost of what the engine did. Records of waits are apart: threads that wait for each other
    on cores that others have make tens of thousands of them a second, and their sums are kept elsewhere."""
    return {kind: n for kind, n in by_kind.items() if n and kind != "sched_spans"}


def timing(report: Report, runs: Sequence[truth.GraphRun]) -> dict[tuple[str, str], str]:
    """Seconds that differ by more than 3 %, by (op, role)."""
    whole = sum(run.seconds for run in runs)
    found = {}
    for (op, role), row in sorted(rows(report, runs).items()):
        apart = row.seconds - row.true_seconds
        if apart < 0:
            apart = max(0.0, -apart - row.last * RETURN_PROBE_SECONDS)
        if apart > RELATIVE * row.true_seconds and apart > OF_THE_WHOLE * whole:
            found[op, role] = (
                f"{op} {role or '(no weight)'}: "
                f"{row.seconds * 1e3:.3f} ms, truly {row.true_seconds * 1e3:.3f} ms"
            )
    return found


Measured = tuple[Report, list[truth.GraphRun]]


def differences(measure: Callable[[], Measured], attempts: int = 8) -> list[str]:
    """What differs. Counts must be equal at the first attempt. Seconds may be blurred by other
    work on the machine, at random: only what is wrong every time is wrong."""
    wrong: dict[tuple[str, str], str] | None = None
    for _ in range(attempts):
        report, runs = measure()
        if found := exact(report, runs):
            return found
        now = timing(report, runs)
        wrong = now if wrong is None else {key: text for key, text in now.items() if key in wrong}
        if not wrong:
            return []
    return list((wrong or {}).values())


def costs(report: Report, expected: Mapping[tuple[str, str], facts.Total]) -> list[str]:
    """What is not equal to the sums on paper: calls, FLOPs and bytes, all exactly.

    Ops without a weight are compared as the sum over whatever roles they were given.
    """
    seen: dict[tuple[str, str], facts.Total] = defaultdict(facts.Total)
    for (op, role), (total, _) in report.by_role().items():
        one = seen[(op, role) if (op, role) in expected else (op, "")]
        one.calls += total.calls
        one.flops += total.flops
        one.bytes += total.bytes
    return [
        f"{op} {role or '(no weight)'}: {seen.get((op, role))}, on paper {expected.get((op, role))}"
        for op, role in sorted(set(seen) | set(expected))
        if seen.get((op, role)) != expected.get((op, role))
    ]


Shape = tuple[str, str, str, tuple[int, ...]]
Signature = tuple[Shape, tuple[Shape, ...]]


def signatures(description: truth.Description) -> list[Signature]:
    """(op, name, type, shape) of every node with those of its sources, in order."""
    return [
        (_shape(node), tuple(_shape(source) for source in description.sources(node)))
        for node in description.nodes
    ]


def _shape(tensor: truth.Tensor) -> Shape:
    return tensor.op, tensor.name, tensor.type, tensor.ne
