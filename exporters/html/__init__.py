# SPDX-License-Identifier: Apache-2.0
"""One HTML page of a trace: self-contained, opens offline, fetches nothing.

The page itself is built from ``exporters/html/page`` (TypeScript, bundled at build time); this
package makes the data that is put into it.
"""

from __future__ import annotations

from ...agent.model.trace import Trace
from .document import document
from .pagefile import NoPage, fill, template

__all__ = ["NoPage", "document", "fill", "render", "template"]


def render(trace: Trace, name: str, made_by: str) -> str:
    """The page of a trace. ``name``: the recording's file name; ``made_by``: program and version.

    Raises :class:`NoPage` where this installation holds no built page.
    """
    return fill(document(trace, name, made_by))
