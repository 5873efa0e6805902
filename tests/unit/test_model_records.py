# SPDX-License-Identifier: Apache-2.0
"""The model's numbers are those of events.h; nothing may drift apart."""

from __future__ import annotations

import enum
import re

import pytest

from profinferd.agent.model import records

from .graphs import HEADER


def header_enum(name: str) -> dict[str, int]:
    """Names and values of one C enumeration, comments removed."""
    text = re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.DOTALL)
    body = re.search(rf"enum {name} {{(.*?)}};", text, re.DOTALL)
    assert body, name
    values: dict[str, int] = {}
    following = 0
    for item in filter(None, (part.strip() for part in body.group(1).split(","))):
        label, _, expression = (part.strip() for part in item.partition("="))
        if expression:
            number = re.fullmatch(r"(\w+?)u?(?: << (\d+))?", expression)
            assert number, item
            following = int(number.group(1), 0) << int(number.group(2) or 0)
        values[label] = following
        following += 1
    return values


@pytest.mark.parametrize(
    ("c_name", "prefix", "ours"),
    [
        ("event_kind", "EV_", records.Kind),
        ("event_level", "LV_", records.Level),
        ("event_flag", "EF_", records.Flag),
        ("chunk_what", "CH_", records.Chunk),
    ],
)
def test_enumerations(c_name: str, prefix: str, ours: type[enum.Enum]) -> None:
    theirs = {name.removeprefix(prefix): value for name, value in header_enum(c_name).items()}
    assert theirs == {member.name: int(member.value) for member in ours}


def test_op_word() -> None:
    flags = header_enum("op_flag")
    assert flags["OP_FUSED"] == records.OP_FUSED and flags["OP_NODE_MASK"] == records.OP_NODE_MASK


def test_sizes() -> None:
    text = HEADER.read_text()
    for name in ("INLINE_INTS", "CHUNK_INTS"):
        found = re.search(rf"#define {name} (\d+)", text)
        assert found and int(found.group(1)) == getattr(records, name)


def test_every_failure_counter_is_reported() -> None:
    """C66, C11: a counter of a failure that no one reads would be a silent loss."""
    stats = {records.stat_name(name) for name in header_enum("stat")} - {"count"}
    kernels_own = {"recursion_misses"}
    assert set(records.LOST_STATS) - kernels_own | set(records.HIT_STATS) <= stats
    unreported = stats - set(records.LOST_STATS) - set(records.HIT_STATS)
    # Not failures: hits rightly left out, raw bytes that only help to choose the layout, graphs that
    # were not summed (as most are not), and work.
    assert unreported == {"op_nested", "lost_raws", "slot_busy", "walked"}
