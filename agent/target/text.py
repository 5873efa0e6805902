# SPDX-License-Identifier: Apache-2.0
"""Names that other people chose, made safe to print on one line."""

from __future__ import annotations

import os

_ESCAPES = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def printable(name: str | bytes, limit: int = 255) -> str:
    """``name`` with everything that does not print written as an escape.

    Control characters, line breaks, direction overrides and bytes that are not UTF-8
    become ``\\n`` or ``\\xNN`` forms; quotes stay (whoever writes JSON or a label value
    escapes them). Longer names than ``limit`` characters are cut in the middle.
    """
    raw = os.fsencode(name) if isinstance(name, str) else name
    text = raw.decode("utf-8", "backslashreplace")
    if not text.isprintable():
        text = "".join(c if c.isprintable() else _escape(c) for c in text)
    if len(text) > limit:
        keep = (limit - 1) // 2
        text = f"{text[:keep]}…{text[-keep:]}"
    return text


def _escape(char: str) -> str:
    code = ord(char)
    if char in _ESCAPES:
        return _ESCAPES[char]
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
