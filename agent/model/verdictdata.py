# SPDX-License-Identifier: Apache-2.0
"""A verdict: what makes tokens slow, how sure that is, what it costs, and what to try."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Confidence: TypeAlias = Literal["high", "medium", "low"]
"""high: measured, and nothing else explains it. medium: measured, and something else may share
in it. low: by nominal figures, or by signs alone."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """One finding about one window.

    ``rule``: its stable name (snake_case); ``seconds_per_token``: what a token would save at
    most if the cause were gone, None where that cannot be said; ``evidence``: sentences, each
    with its figures; ``try_``: what to try, one sentence (``try`` in JSON).
    """

    rule: str
    confidence: Confidence
    seconds_per_token: float | None
    evidence: tuple[str, ...]
    try_: str
