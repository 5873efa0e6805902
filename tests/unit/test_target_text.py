# SPDX-License-Identifier: Apache-2.0
"""Names of other people on one line."""

from __future__ import annotations

import os

from hypothesis import given
from hypothesis import strategies as st

from profinferd.agent.target.text import printable


def test_ordinary_names_stay() -> None:
    for name in ("gemma-3-270m.gguf", "模型 ü.gguf", 'it\'s "quoted".gguf', "a\\b"):
        assert printable(name) == name


def test_what_does_not_print() -> None:
    assert printable("a\nb\tc\x1b[31m\u202ed") == "a\\nb\\tc\\x1b[31m\\u202ed"
    assert printable(os.fsdecode(b"bad\xff\xfe.gguf")) == "bad\\xff\\xfe.gguf"
    assert printable(b"bad\xff.gguf") == "bad\\xff.gguf"


@given(st.binary(max_size=600))
def test_any_name_is_one_printable_line(raw: bytes) -> None:
    for text in (printable(raw), printable(os.fsdecode(raw))):
        assert text.isprintable() and len(text) <= 255
        text.encode("utf-8")
