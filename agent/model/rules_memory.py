# SPDX-License-Identifier: Apache-2.0
"""Rules about pages that were not there."""

from __future__ import annotations

from .case import Case, counted, listed, ms, percent
from .causes import TensorFaults
from .verdictdata import Verdict


def _paged(one: TensorFaults) -> str:
    waited = "" if one.seconds is None else f", {ms(one.seconds)}"
    return f"{one.tensor} ({one.majors} major{waited})"


def paging(case: Case) -> Verdict | None:
    """Weights or cache that had to be read from disk while the model computed."""
    faults = case.snapshot.faults
    if faults is None:
        return None
    majors = faults.of("major")
    known = [c.seconds for c in faults.counts if c.kind == "major" and c.seconds is not None]
    # What calls stood still for; else what threads stood still for, which may overlap.
    cost = case.stalled("fault") or sum(known)
    if not majors or case.share(cost) < case.limits.least_share:
        return None
    # By waiting, first of all: a minor fault waits, too, for a page that is being read ahead.
    tensors = [t for t in faults.tensors if t.majors or t.seconds][:3]
    evidence = [
        f"{counted(majors, 'major page fault')}, {ms(cost)} of waiting,"
        f" {percent(case.share(cost))} of the time in calls"
    ]
    if tensors:
        evidence.append(f"most for {listed(_paged(t) for t in tensors)}")
    model = faults.model
    lacking = None
    if model is not None and model.bytes and model.resident_bytes is not None:
        lacking = model.bytes - model.resident_bytes
        evidence.append(
            f"{model.resident_bytes / 1e6:,.0f} of {model.bytes / 1e6:,.0f} MB of {model.file} are in memory"
        )
    in_model = faults.of("major", "model") >= majors / 2
    return Verdict(
        "paging",
        "high" if case.stalled("fault") > 0 and (tensors or in_model) else "medium",
        case.per_token(cost),
        tuple(evidence),
        "more memory for it (or a smaller model): its file does not stay in memory"
        if lacking
        else "read it into memory before it answers (a warm-up, or --mlock)",
    )
