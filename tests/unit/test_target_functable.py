# SPDX-License-Identifier: Apache-2.0
"""Tables of functions in memory that somebody else has filled: found where they are, and nowhere else."""

from __future__ import annotations

import struct

import pytest

from profinferd.agent.target import functable
from profinferd.agent.target.calldata import FunctionTable
from profinferd.agent.target.functable import MAX_TABLE, Found, _search
from profinferd.agent.target.process import Mapping

NAMES = [f"f{i}" for i in range(12)]
TABLE = FunctionTable(returned_by="get", first=40, inner_size_at=16, inner_size=24, slots=NAMES)
"""Size, a word, the inner structure (its size, a word, two versions), then functions: as PJRT has it."""
CODE = [
    Mapping(0x9000, 0xA000, "r-xp", 0x5000, "0:0", 1, "lib", False),
    Mapping(0x1000, 0x3000, "r-xp", 0x800, "0:0", 1, "lib", False),
]


def table(*functions: int, size: int | None = None) -> bytes:
    size = 40 + 8 * len(functions) if size is None else size
    return struct.pack(f"<QQQQii{len(functions)}Q", size, 0, 24, 0, 0, 64, *functions)


def search(raw: bytes) -> Found | None:
    return _search(raw, TABLE, CODE)


def test_where_functions_lie_in_the_file() -> None:
    """Of both mappings; a null pointer and one to elsewhere are left out, not guessed."""
    addresses = [0x1000, 0x2FFF, 0x9000, 0x9FFF, *[0x1100] * 7, 0]
    found = search(bytes(8 * 5) + table(*addresses) + bytes(64))
    assert found is not None
    assert found.offsets == {
        "f0": 0x800, "f1": 0x27FF, "f2": 0x5000, "f3": 0x5FFF, **{f"f{i}": 0x900 for i in range(4, 11)}
    }  # fmt: skip
    assert found.description == "version 0.64, 12 functions, 136 bytes"


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        bytes(16),
        table(*[0x1000] * 7),  # too few to be sure
        table(*[0x1000] * 12, size=40 + 8 * 4000),  # it says that it is larger than what is there
        table(*[0x1000] * 12, size=2**64 - 8),
        table(*[0x1000] * 12, size=139),
        table(*[0x1000] * 12, size=40),
        table(*[0x1000] * 9, 0x3000, 0xA000, 2**64 - 1),  # not the library's code
        table(*[0x3000] * 2000),
        table(*[0x1000] * 12)[:-1],
    ],
)
def test_what_is_no_table(raw: bytes) -> None:
    assert search(raw) is None


def test_one_behind_many_that_lie() -> None:
    lies = table(*[0x3000] * 12) * 50 + table(*[0x1000] * 12, size=MAX_TABLE)
    found = search(lies + table(*[0x1000] * 12))
    assert found is not None and len(found.offsets) == 12


def test_memory_that_is_made_to_be_costly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of all words look like the beginning of the largest table: no pointer of these is followed."""
    followed: list[int] = []
    monkeypatch.setattr(functable, "_file_offset", lambda address, code: followed.append(address))
    assert search(struct.pack("<4Q", MAX_TABLE, MAX_TABLE, 24, 24) * (1 << 15)) is None
    assert not followed
