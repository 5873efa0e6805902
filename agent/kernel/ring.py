# SPDX-License-Identifier: Apache-2.0
"""BPF ring buffers, drained in bulk into numpy arrays.

A ring holds records of one size. Each has a header of 8 bytes: length, a busy bit while it is
being written, and a discard bit. The kernel would map the data twice in a row, so that a record
is contiguous also where the ring wraps; it is mapped once, for all of it counts as our memory,
and the one record that wraps is put together.

Records appear in order of reservation; draining stops at the first busy one.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import MachineError
from . import bpfsys

_BUSY, _DISCARDED = 1 << 31, 1 << 30
_HEADER = 8
_WINDOW = 1 << 16  # records looked at in one step
_NARROW = 8  # words: up to here a record is copied faster column by column

Records = npt.NDArray[Any]

_lock = threading.Lock()


def fence() -> None:
    """Order the memory accesses before and after.

    Python has no fence. Taking and leaving an uncontended lock is one on both
    architectures (x86-64 would not need it: it does not reorder loads).
    """
    with _lock:
        pass
    with _lock:
        pass


class RingDecoder:
    """The reading side of a ring over memory that it is given.

    ``positions`` are the consumer's and the producer's counter (one u64 each, both in
    bytes since the beginning), ``data`` the ring's bytes.
    """

    def __init__(
        self,
        consumer: ctypes.c_uint64,
        producer: npt.NDArray[np.uint64],
        data: npt.NDArray[np.uint8],
        dtype: np.dtype[Any],
    ) -> None:
        self.dtype = dtype
        self.size = len(data)
        self.discarded = 0  # records given up by the kernel side
        self.odd = 0  # records of another size, which no reader of this ring can read
        self._consumer, self._producer, self._data = consumer, producer, data
        self._stride = (_HEADER + dtype.itemsize + 7) & ~7
        self._word = next(w for w in (8, 4, 2, 1) if dtype.itemsize % w == 0)
        if dtype.itemsize < 1 or self._stride > self.size:
            raise ValueError(f"records of {dtype.itemsize} bytes do not fit in a ring of {self.size}")

    @property
    def reserved(self) -> int:
        """Where the kernel will reserve next: bytes since the beginning."""
        return int(self._producer[0])

    @property
    def drained(self) -> int:
        """How far records were drained, in the same count."""
        return self._consumer.value

    def available(self) -> int:
        """Bytes reserved or written and not yet drained."""
        return int(self._producer[0]) - self._consumer.value

    def drain(self) -> Records:
        """All complete records since the last drain, as an array of their own memory."""
        position = self._consumer.value
        end = int(self._producer[0])  # first the position,
        if end == position:
            return np.empty(0, self.dtype)
        fence()  # then what it covers
        parts: list[Records] = []
        window = _WINDOW
        while position < end:
            count = min((end - position) // self._stride, window)
            used, good, blocked = self._bulk(position, count) if count else (0, None, True)
            position += used * self._stride
            window = min(window * 2, _WINDOW)
            if good is not None:
                parts.append(good)
            if blocked:
                header = self._header(position)
                if header & _BUSY:
                    break
                if count and header & ~_DISCARDED == self.dtype.itemsize:
                    continue  # it was busy a moment ago
                position += self._single(header, position, end)
                window = 64  # odd records come together: do not look far ahead each time
        fence()  # the copies are done before the kernel may write there again
        self._consumer.value = position
        if not parts:
            return np.empty(0, self.dtype)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _bulk(self, position: int, count: int) -> tuple[int, Records | None, bool]:
        """(headers passed, the records among them, whether the next one needs a look of its own)."""
        start = position % self.size
        count = min(count, (self.size - start) // self._stride)
        if not count:
            return self._wrapping(start)
        raw = self._data[start : start + count * self._stride]
        headers = raw.view(np.uint32)[:: self._stride // 4]
        plain = headers == self.dtype.itemsize
        whole = bool(plain.all())
        used = count
        if not whole:
            fits = plain | (headers == self.dtype.itemsize | _DISCARDED)
            used = count if fits.all() else int(fits.argmin())
        fence()  # headers before contents
        if not used:
            return 0, None, True
        table = raw[: used * self._stride].view(f"u{self._word}").reshape(used, -1)
        first = _HEADER // self._word
        body = table[:, first : first + self.dtype.itemsize // self._word]
        if not whole and not (keep := plain[:used]).all():
            self.discarded += used - int(keep.sum())
            body = body[keep]
        return used, self._copy(body), used < count

    def _wrapping(self, start: int) -> tuple[int, Records | None, bool]:
        """As :meth:`_bulk`, of the one record that begins before the end of the ring and goes on at
        its beginning; headers lie on 8 bytes and never wrap."""
        header = self._header(start)
        if header == self.dtype.itemsize | _DISCARDED:
            self.discarded += 1
            return 1, None, False
        if header != self.dtype.itemsize:
            return 0, None, True
        fence()
        before = self.size - start
        raw = np.concatenate((self._data[start:], self._data[: self._stride - before]))
        return 1, raw[_HEADER : _HEADER + self.dtype.itemsize].view(self.dtype), False

    def _copy(self, body: npt.NDArray[Any]) -> Records:
        rows, words = body.shape
        out = np.empty((rows, words), body.dtype)
        if words <= _NARROW:
            for column in range(words):
                out[:, column] = body[:, column]
        else:
            out[:] = body
        return out.reshape(-1).view(self.dtype)

    def _header(self, position: int) -> int:
        start = position % self.size
        return int(self._data[start : start + 4].view(np.uint32)[0])

    def _single(self, header: int, position: int, end: int) -> int:
        """Bytes to skip for a record of another size that is no longer busy."""
        length = (header & ~_DISCARDED) + _HEADER + 7 & ~7
        if position + length > end:
            # The kernel alone writes here: this is a defect, and going on would print nonsense.
            raise MachineError(f"a ring buffer holds a record of {length} bytes beyond its end")
        if header & _DISCARDED:
            self.discarded += 1
        else:
            self.odd += 1
        return length


def drain_until(ring: RingDecoder, position: int, patience_s: float) -> Records:
    """Drain at least up to ``position``, however long a record before it stays busy.

    Gives up after ``patience_s`` seconds: its writer may be waiting for a page.
    """
    parts = [ring.drain()]
    if ring.drained < position:
        until = time.monotonic() + patience_s
        while ring.drained < position and time.monotonic() < until:
            time.sleep(0.0005)
            parts.append(ring.drain())
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


class Ring(RingDecoder):
    """The ring buffer map ``map_fd`` of ``size`` bytes with records of type ``dtype``."""

    def __init__(self, map_fd: int, size: int, dtype: np.dtype[Any]) -> None:
        page = mmap.PAGESIZE
        try:
            self._own = mmap.mmap(map_fd, page, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
            self._kernels = mmap.mmap(map_fd, page + size, mmap.MAP_SHARED, mmap.PROT_READ, offset=page)
        except OSError as error:
            why = bpfsys.strerror(error.errno or 0)
            raise MachineError(f"a ring buffer cannot be mapped: {why}") from error
        super().__init__(
            ctypes.c_uint64.from_buffer(self._own),
            np.frombuffer(self._kernels, np.uint64, 1),
            np.frombuffer(self._kernels, np.uint8, size, page),
            dtype,
        )

    def close(self) -> None:
        """Unmap. What was drained stays valid; the ring is not usable any more."""
        del self._consumer, self._producer, self._data
        self._own.close()
        self._kernels.close()

    def __enter__(self) -> Ring:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
