# SPDX-License-Identifier: Apache-2.0
"""Decoding of ring buffers, with a ring in ordinary memory that behaves as the kernel's."""

from __future__ import annotations

import ctypes
import struct
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profinferd import probes
from profinferd.agent.errors import MachineError
from profinferd.agent.kernel.header import load_header
from profinferd.agent.kernel.programs import unbatched
from profinferd.agent.kernel.ring import RingDecoder, drain_until, fence

BUSY, DISCARDED = 1 << 31, 1 << 30
OP_HIT = np.dtype([("ts", "<u8"), ("seq", "<u4"), ("node", "<u4")])
WIDE = np.dtype([("ts", "<u8"), ("text", "S96")])
ODD_SIZE = np.dtype([("a", "<u4"), ("b", "<u2"), ("c", "u1")])  # 7 bytes: padded to 8


class FakeRing:
    """What the kernel does: reserve (busy), fill, submit or discard."""

    def __init__(self, size: int, dtype: np.dtype[Any]) -> None:
        self.size = size
        self.data = np.zeros(size, np.uint8)
        self.consumer = ctypes.c_uint64(0)
        self.producer = np.zeros(1, np.uint64)
        self.decoder = RingDecoder(self.consumer, self.producer, self.data, dtype)

    def _poke(self, position: int, raw: bytes) -> None:
        for i, byte in enumerate(raw):
            self.data[(position + i) % self.size] = byte

    def reserve(self, length: int) -> int | None:
        """Position of a busy record of ``length`` bytes; None: no room (a lost record)."""
        position = int(self.producer[0])
        stride = length + 8 + 7 & ~7
        if position + stride - self.consumer.value > self.size - 1:
            return None
        self._poke(position, struct.pack("<II", length | BUSY, position // 4096))
        self.producer[0] = position + stride
        return position

    def finish(self, position: int, content: bytes, *, discard: bool = False) -> None:
        self._poke(position + 8, content)
        self._poke(position, struct.pack("<I", len(content) | (DISCARDED if discard else 0)))

    def put(self, content: bytes, *, discard: bool = False) -> bool:
        position = self.reserve(len(content))
        if position is not None:
            self.finish(position, content, discard=discard)
        return position is not None


def hit(n: int) -> bytes:
    return struct.pack("<QII", n, n + 1, n + 2)


def test_empty() -> None:
    ring = FakeRing(4096, OP_HIT)
    assert len(ring.decoder.drain()) == 0
    assert ring.decoder.drain().dtype == OP_HIT


def test_records_come_in_order_and_once() -> None:
    ring = FakeRing(4096, OP_HIT)
    for n in range(100):
        assert ring.put(hit(n))
    assert ring.decoder.available() == 2400
    got = ring.decoder.drain()
    assert got["ts"].tolist() == list(range(100))
    assert got["node"].tolist() == list(range(2, 102))
    assert len(ring.decoder.drain()) == 0


def test_what_was_drained_is_a_copy() -> None:
    ring = FakeRing(4096, OP_HIT)
    ring.put(hit(1))
    got = ring.decoder.drain()
    ring.data[:] = 0xFF
    assert got["ts"].tolist() == [1]


def test_stops_at_a_busy_record_and_goes_on_later() -> None:
    ring = FakeRing(4096, OP_HIT)
    ring.put(hit(1))
    slow = ring.reserve(16)
    ring.put(hit(3))
    assert ring.decoder.drain()["ts"].tolist() == [1]
    assert ring.decoder.drain()["ts"].tolist() == []
    assert slow is not None
    ring.finish(slow, hit(2))
    assert ring.decoder.drain()["ts"].tolist() == [2, 3]


@pytest.mark.parametrize("discard", [False, True])
def test_busy_record_that_is_finished_while_we_look(discard: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look at many headers and the look at the one that was busy."""
    ring = FakeRing(4096, OP_HIT)
    ring.put(hit(1))
    slow = ring.reserve(16)
    ring.put(hit(3))
    bulk = ring.decoder._bulk

    def slow_bulk(position: int, count: int) -> Any:
        found = bulk(position, count)
        if slow is not None:
            ring.finish(slow, hit(2), discard=discard)
        return found

    monkeypatch.setattr(ring.decoder, "_bulk", slow_bulk)
    assert ring.decoder.drain()["ts"].tolist() == ([1, 3] if discard else [1, 2, 3])
    assert ring.decoder.odd == 0


def test_busy_record_that_is_discarded_later() -> None:
    ring = FakeRing(4096, OP_HIT)
    slow = ring.reserve(16)
    ring.put(hit(2))
    assert len(ring.decoder.drain()) == 0
    assert slow is not None
    ring.finish(slow, hit(1), discard=True)
    assert ring.decoder.drain()["ts"].tolist() == [2]
    assert ring.decoder.discarded == 1


@pytest.mark.parametrize("dtype", [OP_HIT, WIDE, ODD_SIZE])
def test_wraps(dtype: np.dtype[Any]) -> None:
    """Records across the end of the ring are whole; no stride divides the size."""
    ring = FakeRing(4096, dtype)
    seen, sent = 0, 0
    for _ in range(200):
        while ring.put(np.array([sent % 251], "u1").tobytes() * dtype.itemsize):
            sent += 1
        for record in ring.decoder.drain():
            assert record.tobytes() == bytes([seen % 251]) * dtype.itemsize
            seen += 1
    assert seen == sent > 3000


def test_full_ring() -> None:
    """C11: a full ring gives what it holds; the rest was refused at reserve."""
    ring = FakeRing(4096, OP_HIT)
    stored = sum(ring.put(hit(n)) for n in range(1000))
    assert stored == (4096 - 1) // 24
    assert len(ring.decoder.drain()) == stored
    assert ring.put(hit(0))


def test_records_of_another_size_are_counted_and_skipped() -> None:
    ring = FakeRing(4096, OP_HIT)
    ring.put(hit(1))
    ring.put(b"short")
    ring.put(b"")
    ring.put(bytes(200))
    ring.put(bytes(33), discard=True)
    ring.put(hit(2))
    ring.put(b"last")
    assert ring.decoder.drain()["ts"].tolist() == [1, 2]
    assert (ring.decoder.odd, ring.decoder.discarded) == (4, 1)
    assert ring.decoder.available() == 0


def test_busy_record_of_another_size_stops_too() -> None:
    ring = FakeRing(4096, OP_HIT)
    ring.reserve(40)
    ring.put(hit(1))
    assert len(ring.decoder.drain()) == 0


def test_nonsense_is_an_error_not_a_loop() -> None:
    ring = FakeRing(4096, OP_HIT)
    ring.put(hit(1))
    ring._poke(0, struct.pack("<I", 0x3FFFFFFF))
    with pytest.raises(MachineError, match="beyond its end"):
        ring.decoder.drain()


def test_a_record_that_cannot_fit() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        FakeRing(64, WIDE)


step = st.one_of(
    st.tuples(st.just("put"), st.sampled_from([16, 16, 16, 4, 40, 0])),
    st.tuples(st.just("discard"), st.sampled_from([16, 16, 24])),
    st.tuples(st.just("reserve"), st.just(16)),
    st.tuples(st.just("finish"), st.booleans()),
    st.tuples(st.just("drain"), st.just(0)),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(step, max_size=120))
def test_any_history(steps: list[tuple[str, int]]) -> None:
    """Whatever happens, what comes out is what was submitted, in order of reservation."""
    ring = FakeRing(512, OP_HIT)
    waiting: list[tuple[int, bytes]] = []
    order: list[list[object]] = []  # [content, state] by order of reservation
    got: list[bytes] = []
    for number, (what, argument) in enumerate(steps):
        content = hit(number)[:argument].ljust(argument, b"\0") if what in ("put", "discard") else hit(number)
        if what in ("put", "discard"):
            if ring.put(content, discard=what == "discard"):
                order.append([content, "bad" if what == "discard" or argument != 16 else "good"])
        elif what == "reserve":
            position = ring.reserve(16)
            if position is not None:
                waiting.append((position, content))
                order.append([content, "busy"])
        elif what == "finish" and waiting:
            position, content = waiting.pop()
            ring.finish(position, content, discard=bool(argument))
            next(row for row in order if row[0] == content)[1] = "bad" if argument else "good"
        elif what == "drain":
            got += [record.tobytes() for record in ring.decoder.drain()]
    for position, content in waiting:
        ring.finish(position, content)
        next(row for row in order if row[0] == content)[1] = "good"
    got += [record.tobytes() for record in ring.decoder.drain()]
    assert got == [content for content, state in order if state == "good"]
    assert ring.decoder.available() == 0


def test_speed() -> None:
    """At least 5 million records of 16 bytes a second of CPU time (here it is far above)."""
    size = 4 << 20
    count = size // 24
    one = np.zeros(size, np.uint8)
    one[: count * 24].reshape(count, 24)[:, 0] = 16
    consumer, producer = ctypes.c_uint64(0), np.array([count * 24], np.uint64)
    decoder = RingDecoder(consumer, producer, one, OP_HIT)
    best = float("inf")
    for _ in range(5):
        consumer.value = 0
        start = time.thread_time()
        assert len(decoder.drain()) == count
        best = min(best, time.thread_time() - start)
    rate = count / best
    print(f"{rate / 1e6:.0f} million records of 16 bytes a second")
    assert rate >= 5e6


def test_fence_is_cheap() -> None:
    taken = []
    for _ in range(5):
        start = time.thread_time()
        for _ in range(1000):
            fence()
        taken.append(time.thread_time() - start)
    assert min(taken) < 0.05  # where a hypervisor took the core meanwhile, that is counted as ours


def test_drain_until_waits_for_a_record_that_is_only_reserved() -> None:
    """A record behind a busy one is not left behind once the busy one is finished (C11)."""
    ring = FakeRing(4096, OP_HIT)
    busy = ring.reserve(OP_HIT.itemsize)
    assert busy is not None and ring.put(hit(2))
    end = ring.decoder.reserved
    assert len(ring.decoder.drain()) == 0
    timer = threading.Timer(0.02, ring.finish, [busy, hit(1)])
    timer.start()
    try:
        got = drain_until(ring.decoder, end, 60.0)
    finally:
        timer.join()
    assert got["ts"].tolist() == [1, 2] and ring.decoder.drained == end


def test_drain_until_gives_up() -> None:
    """A writer that never finishes does not hold the reader."""
    ring = FakeRing(4096, OP_HIT)
    ring.reserve(OP_HIT.itemsize)
    assert len(drain_until(ring.decoder, ring.decoder.reserved, 0.01)) == 0


def test_hits_come_out_of_their_batches_in_order() -> None:
    """Only those that a record says it has, whatever it says; single hits pass as they are."""
    types = load_header(Path(probes.__file__).with_name("events.h"))
    batches = np.zeros(4, types.dtype("op_batch"))
    width = batches["hit"].shape[1]
    batches["hit"]["node"] = np.arange(4 * width).reshape(4, width)
    batches["count"] = [3, 0, width, 4_000_000_000]  # the last: no such record is sent
    nodes = unbatched(batches)["node"].tolist()
    assert nodes == [0, 1, 2, *range(2 * width, 4 * width)]
    single = np.zeros(5, types.dtype("op_hit"))
    assert unbatched(single) is single
    assert len(unbatched(batches[:0])) == 0
