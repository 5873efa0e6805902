# SPDX-License-Identifier: Apache-2.0
"""The JSON object of ``attach --format json`` (described in ``docs/json.md``).

One item of a list per line: still one object to a parser, and ``grep`` and ``diff`` work
on it too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence

from ..agent.model.snapshot import Snapshot


class JsonExporter:
    """Implements :class:`profinferd.exporters.Exporter`."""

    def render(self, snapshot: Snapshot) -> str:
        """The object, ASCII only, ending in a newline. What is NaN or infinite becomes null."""
        return dumps(snapshot.to_json())


def dumps(document: Mapping[str, object]) -> str:
    """``document`` with each key, and each item of a list, on a line of its own."""
    parts = []
    for key, value in document.items():
        if isinstance(value, Sequence) and not isinstance(value, str) and value:
            items = ",\n  ".join(one(item) for item in value)
            parts.append(f" {one(key)}: [\n  {items}\n ]")
        else:
            parts.append(f" {one(key)}: {one(value)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def one(value: object) -> str:
    """One value in strict JSON, on one line."""
    return json.dumps(_plain(value), ensure_ascii=True, allow_nan=False)


def _plain(value: object) -> object:
    """``value`` with nothing that strict JSON parsers refuse: NaN, infinities, lone surrogates."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(_plain(str(key))): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_plain(item) for item in value]
    return value
