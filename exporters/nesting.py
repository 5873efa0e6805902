# SPDX-License-Identifier: Apache-2.0
"""Slices of one track must lie within each other or apart (C24)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def lanes(begin: npt.NDArray[np.int64], end: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """A lane for each interval so that those of one lane nest: 0 wherever that is possible.

    Intervals [begin, end] in order of their beginnings, longer ones first where these are
    equal. Nothing is cut: what overlaps an open interval without lying in it goes to the first
    lane where it fits.
    """
    out = np.zeros(len(begin), dtype=np.int64)
    stacks: list[list[int]] = []
    for index, (start, stop) in enumerate(zip(begin.tolist(), end.tolist(), strict=True)):
        for lane, stack in enumerate(stacks):
            while stack and stack[-1] <= start:
                stack.pop()
            if not stack or stop <= stack[-1]:
                stack.append(stop)
                out[index] = lane
                break
        else:
            stacks.append([stop])
            out[index] = len(stacks) - 1
    return out
