# SPDX-License-Identifier: Apache-2.0
"""Where the tensors of a GGUF file lie in it. The file is the target's: everything is bounded.

Only what places tensors is read: metadata are skipped by their types. The format is described
in ggml's docs/gguf.md (versions 2 and 3, little endian).
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass

from .text import printable

MAGIC = b"GGUF"
MAX_HEADER = 64 << 20
MAX_TENSORS = 1 << 16
MAX_PAIRS = 1 << 16
MAX_ELEMENTS = 1 << 22
_ALIGNMENT = 32
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY = 8, 9
_BLOCK = 1 << 20


class GgufError(ValueError):
    """The file is not a GGUF file, or not one that is understood."""


@dataclass(frozen=True, slots=True)
class FileTensor:
    """Bytes [offset, end) of the file hold tensor ``name`` (its padding included)."""

    name: str
    offset: int
    end: int


class _Reader:
    """Forward reading with a limit; OSError of the file is the caller's."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._data = b""
        self._base = 0
        self.at = 0

    def take(self, count: int) -> bytes:
        if count < 0 or self.at + count > MAX_HEADER:
            raise GgufError("its header is larger than any known one")
        start = self.at - self._base
        if start < 0 or start + count > len(self._data):
            self._data = os.pread(self._fd, max(count, _BLOCK), self.at)
            self._base, start = self.at, 0
            if len(self._data) < count:
                raise GgufError("it ends in its header")
        self.at += count
        return self._data[start : start + count]

    def skip(self, count: int) -> None:
        if count < 0 or self.at + count > MAX_HEADER:
            raise GgufError("its header is larger than any known one")
        self.at += count

    def u32(self) -> int:
        return int(struct.unpack("<I", self.take(4))[0])

    def u64(self) -> int:
        return int(struct.unpack("<Q", self.take(8))[0])

    def string(self) -> bytes:
        return self.take(self.u64())

    def skip_value(self, kind: int, depth: int = 0) -> None:
        if kind == _STRING:
            self.skip(self.u64())
        elif kind == _ARRAY and depth < 2:
            inner, count = self.u32(), self.u64()
            if count > MAX_ELEMENTS:
                raise GgufError("an array in it is too long")
            if inner in _SIZES:
                self.skip(count * _SIZES[inner])
            else:
                for _ in range(count):
                    self.skip_value(inner, depth + 1)
        elif kind in _SIZES:
            self.skip(_SIZES[kind])
        else:
            raise GgufError(f"a value in it has the unknown type {kind}")


def read_tensors(fd: int) -> list[FileTensor]:
    """Tensors of the open file in order of their place. Raises GgufError or OSError."""
    reader = _Reader(fd)
    if reader.take(4) != MAGIC:
        raise GgufError("it is not a GGUF file")
    version = reader.u32()
    if version not in (2, 3):
        raise GgufError(f"it has version {version}")
    tensors, pairs = reader.u64(), reader.u64()
    if tensors > MAX_TENSORS or pairs > MAX_PAIRS:
        raise GgufError("it names more tensors than any known model")
    alignment = _ALIGNMENT
    for _ in range(pairs):
        key, kind = reader.string(), reader.u32()
        if key == b"general.alignment" and kind == 4:
            alignment = reader.u32()
        else:
            reader.skip_value(kind)
    if not 0 < alignment <= 1 << 20:
        raise GgufError("its alignment is impossible")
    places: list[tuple[int, str]] = []
    for _ in range(tensors):
        name = printable(reader.string()[:256].decode("utf-8", "replace"))
        dimensions = reader.u32()
        if dimensions > 8:
            raise GgufError("a tensor in it has too many dimensions")
        reader.skip(8 * dimensions + 4)
        places.append((reader.u64(), name))
    begin = -(-reader.at // alignment) * alignment
    size = os.fstat(fd).st_size
    places.sort()
    ends = [offset for offset, _ in places[1:]] + [max(size - begin, 0)]
    return [
        FileTensor(name, begin + offset, begin + end)
        for (offset, name), end in zip(places, ends, strict=True)
        if offset < end
    ]
