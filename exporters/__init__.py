# SPDX-License-Identifier: Apache-2.0
"""Where it goes: one module per format. Exporters see the model and nothing else of ours."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from ..agent.model.snapshot import Snapshot


class Exporter(Protocol):
    """Writes what was seen in one format. Pure: no clock, no file, no terminal."""

    def render(self, snapshot: Snapshot) -> str:
        """All of ``snapshot`` as text that ends in a newline."""
        ...
