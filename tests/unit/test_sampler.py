# SPDX-License-Identifier: Apache-2.0
"""Records of samples as the kernel writes them, whole, broken and hostile; names of events."""

from __future__ import annotations

import struct

import pytest

from profinferd.agent.kernel import sampler as module
from profinferd.agent.kernel.perfsys import Reading, parse_event
from profinferd.agent.kernel.sampler import Sampler
from profinferd.agent.target.symbolize import Mappings, symbolize

KERNEL, USER = (1 << 64) - 128, (1 << 64) - 512


def sample(*chain: int) -> bytes:
    """PERF_RECORD_SAMPLE with instruction pointer, thread and call chain."""
    body = struct.pack(f"=QIIQ{len(chain)}Q", 0x1000, 7, 8, len(chain), *chain)
    return struct.pack("=IHH", 9, 0, 8 + len(body)) + body


def lost(count: int) -> bytes:
    """PERF_RECORD_LOST."""
    return struct.pack("=IHHQQ", 2, 0, 24, 1, count)


def took(*records: bytes) -> Sampler:
    """A sampler that was given these, and watches nothing."""
    one = Sampler(0)
    one._take(b"".join(records))
    return one


def test_stacks_are_told_apart_by_space() -> None:
    one = took(
        sample(KERNEL, 0xFFFF0001, USER, 0x10, 0x20),
        sample(USER, 0x10, 0x20),
        sample(USER, 0x10, 0x20),
        lost(5),
        sample(),
    )
    assert dict(one.stacks) == {(True, (0x10, 0x20)): 1, (False, (0x10, 0x20)): 2, (False, (0x1000,)): 1}
    assert (one.samples, one.lost) == (4, 5)


def test_broken_records_end_it_and_are_counted() -> None:
    one = took(sample(USER, 1), struct.pack("=IHH", 9, 0, 4))
    assert (one.samples, one.lost) == (1, 1)
    # A chain that says to be longer than its record.
    short = bytearray(sample(USER, 1))
    struct.pack_into("=Q", short, 24, 1 << 60)
    assert took(bytes(short)).stacks == {(False, (1,)): 1}


def test_stacks_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deep ones are cut; rare ones beyond the number keep their innermost function, then nothing."""
    monkeypatch.setattr(module, "MAX_STACKS", 2)
    records = [sample(USER, n, 99) for n in range(6)] + [sample(USER, 0, 99)]
    one = took(*records)
    assert one.samples == 7 == sum(one.stacks.values())
    assert dict(one.stacks) == {
        (False, (0, 99)): 2, (False, (1, 99)): 1, (False, (2,)): 1, (False, (3,)): 1, (False, ()): 2,
    }  # fmt: skip
    deep = took(sample(USER, *range(1, 200)))
    assert len(next(iter(deep.stacks))[1]) == module.MAX_DEPTH


def test_a_process_that_is_gone_has_no_samples() -> None:
    one = Sampler(2_000_000_000)
    one.look()
    one.close()
    assert (one.samples, one.threads, one.refused) == (0, 0, None)


def test_without_bcc_files_are_told_and_the_reason() -> None:
    mappings = Mappings()
    mappings._found = [(0x1000, 0x2000, "libx.so")]
    mappings._starts = [0x1000]
    frames, note = symbolize(1, [0x1500, 0x2500, 0x10], mappings, bcc="/nowhere")
    assert {a: f.file for a, f in frames.items()} == {0x1500: "libx.so", 0x2500: None, 0x10: None}
    assert "python3-bpfcc" in str(note)


@pytest.mark.parametrize(
    ("text", "name", "type_", "config"),
    [
        ("cycles", "cycles", 0, 0), ("page-faults", "page-faults", 1, 2), ("r8100", "r8100", 4, 0x8100),
        ("l3d_cache_refill=r2a", "l3d_cache_refill", 4, 0x2A),
    ],
)  # fmt: skip
def test_names_of_events(text: str, name: str, type_: int, config: int) -> None:
    event = parse_event(text)
    assert (event.name, event.type, event.config) == (name, type_, config)


@pytest.mark.parametrize(
    "text", ["", "nothing", "r", "rxyz", "r12345678901234567", "a b=r1", "x" * 50 + "=r1"]
)
def test_what_is_no_event(text: str) -> None:
    with pytest.raises(ValueError):
        parse_event(text)


def test_a_reading() -> None:
    assert Reading.from_bytes(struct.pack("=QQQ", 5, 100, 50)) == Reading(5, 100, 50)
    with pytest.raises(ValueError):
        Reading.from_bytes(b"\0" * 23)
