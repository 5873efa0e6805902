# SPDX-License-Identifier: Apache-2.0
"""Records of causes.h for tests: types from the header, values from the test."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from profinferd.agent.kernel.header import load_header
from profinferd.probes.build import HERE

TYPES = load_header(HERE / "causes.h")
Records = npt.NDArray[Any]


def records(struct: str, *rows: dict[str, Any], **every: Any) -> Records:
    """One record per row; ``every``: fields that all of them have. What is not named is 0."""
    made = np.zeros(len(rows), TYPES.dtype(struct))
    for place, row in enumerate(rows):
        for name, value in {**every, **row}.items():
            made[place][name] = value
    return made
