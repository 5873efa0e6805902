# SPDX-License-Identifier: Apache-2.0
"""Where operators ran, as exporters get it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shape:
    """Lengths of an operator's sources, in their order, and of its result, the fastest first;
    ones at the end are left out. ``count``: how often it ran in this shape."""

    sources: tuple[tuple[int, ...], ...]
    result: tuple[int, ...]
    count: int


@dataclass(frozen=True, slots=True)
class Placement:
    """One operator on one backend in one phase: how often it was given to it.

    ``shapes``: the most frequent first; ``other_shapes`` of the ``count`` were in others.
    """

    backend: str
    phase: str
    op: str
    dtype: str
    role: str
    count: int
    shapes: tuple[Shape, ...]
    other_shapes: int
