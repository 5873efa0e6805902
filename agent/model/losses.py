# SPDX-License-Identifier: Apache-2.0
"""What was not recorded or could not be used, counted by kind."""

from __future__ import annotations


class Losses:
    """Counts by kind; they only grow."""

    def __init__(self) -> None:
        self.kinds: dict[str, int] = {}

    def add(self, kind: str, count: int = 1) -> None:
        """Count ``count`` more of a kind; none leaves no trace."""
        if count > 0:
            self.kinds[kind] = self.kinds.get(kind, 0) + count
