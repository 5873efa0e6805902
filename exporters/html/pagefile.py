# SPDX-License-Identifier: Apache-2.0
"""The built page, and putting data into it so that no text of a target can become markup."""

from __future__ import annotations

import json
import math
from importlib import resources
from typing import Any

MARK = "<!--recording-->"


class NoPage(Exception):
    """This installation holds no built page."""


def template() -> str:
    """The page without a recording. Raises :class:`NoPage`."""
    file = resources.files(__package__) / "page.html"
    try:
        text = file.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NoPage("the page of the HTML report was not built") from error
    if text.count(MARK) != 1:
        raise NoPage("the built page of the HTML report is damaged")
    return text


def script_safe(data: Any) -> str:
    """Compact JSON that ends no script element, begins no comment and breaks no line in one.

    Infinite and undefined numbers are no JSON: they become null, that is absent.
    """
    text = json.dumps(_finite(data), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for char in "<>&\u2028\u2029":
        text = text.replace(char, f"\\u{ord(char):04x}")
    # Lone surrogates (undecodable bytes of a name) cannot be written as UTF-8.
    return text.encode("utf-8", "replace").decode("utf-8")


def fill(document: Any) -> str:
    """The page with ``document`` in it."""
    data = script_safe(document)
    return template().replace(MARK, f'<script type="application/json" id="recording">{data}</script>')


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
