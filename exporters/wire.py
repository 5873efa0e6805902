# SPDX-License-Identifier: Apache-2.0
"""Protocol-buffer messages by the million: written once as a template, filled with numpy.

A recorded minute holds a million kernels, and the protobuf library takes 6 us for each
packet. Almost all of a packet is the same in every execution of one graph: only times and
numbers differ. So a message is laid out once, with *holes* of fixed width for what differs,
and one array operation fills the holes of a whole execution.

A hole of a varint is nine bytes wide whatever its value: the encoding allows leading zeros
(Perfetto's own writer uses them for lengths), and nine bytes carry 63 bits.
"""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt

_VARINT, _FIXED64, _BYTES = 0, 1, 2
HOLE = 9
"""Bytes of a varint hole."""

Ints = npt.NDArray[np.int64]


def varint(value: int) -> bytes:
    """``value`` in its shortest form; negative numbers as 64 bits, as int64 fields want them."""
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


class Message:
    """One message being laid out, field by field; holes are numbered as they come.

    Varint holes and fixed64 holes are numbered apart. A message put into another brings its
    holes along.
    """

    __slots__ = ("_data", "fixed", "varints")

    def __init__(self) -> None:
        self._data = bytearray()
        self.varints: list[int] = []
        self.fixed: list[int] = []

    def __len__(self) -> int:
        return len(self._data)

    def encoded(self) -> bytes:
        """The message as it is; holes that were not filled read 0."""
        return bytes(self._data)

    def uint(self, field: int, value: int) -> Message:
        """A varint field: unsigned, signed 64-bit, bool or enumeration."""
        self._data += varint(field << 3 | _VARINT) + varint(value)
        return self

    def uint_hole(self, field: int) -> Message:
        """A varint field whose value comes later."""
        self._data += varint(field << 3 | _VARINT)
        self.hole()
        return self

    def fixed64_hole(self, field: int) -> Message:
        """A fixed64 field whose value comes later."""
        self._data += varint(field << 3 | _FIXED64)
        self.fixed.append(len(self._data))
        self._data += bytes(8)
        return self

    def double(self, field: int, value: float) -> Message:
        """A double field."""
        self._data += varint(field << 3 | _FIXED64) + struct.pack("<d", value)
        return self

    def blob(self, field: int, value: bytes) -> Message:
        """A bytes field."""
        self._data += varint(field << 3 | _BYTES) + varint(len(value)) + value
        return self

    def text(self, field: int, value: str) -> Message:
        """A string field; what is no valid UTF-8 (lone surrogates) becomes "?"."""
        return self.blob(field, value.encode("utf-8", "replace"))

    def message(self, field: int, inner: Message) -> Message:
        """A message field."""
        self._data += varint(field << 3 | _BYTES) + varint(len(inner))
        self.append(inner)
        return self

    def packed_holes(self, field: int, count: int) -> Message:
        """A packed repeated varint field of ``count`` values that come later; nothing for 0."""
        if count:
            self._data += varint(field << 3 | _BYTES) + varint(count * HOLE)
            for _ in range(count):
                self.hole()
        return self

    def delimited(self, inner: Message) -> Message:
        """A message with its length in front and no field: how streams of messages are kept."""
        self._data += varint(len(inner))
        self.append(inner)
        return self

    def append(self, inner: Message) -> Message:
        """The bytes of ``inner``, holes included."""
        start = len(self._data)
        self._data += inner._data
        self.varints += [start + at for at in inner.varints]
        self.fixed += [start + at for at in inner.fixed]
        return self

    def hole(self) -> None:
        """A bare varint whose value comes later."""
        self.varints.append(len(self._data))
        self._data += b"\x80" * (HOLE - 1) + b"\0"


class Template:
    """A finished layout, to be filled many times."""

    __slots__ = ("_base", "_fixed", "_varints")

    def __init__(self, message: Message) -> None:
        self._base = np.frombuffer(message.encoded(), dtype=np.uint8)
        at = np.array(message.varints, dtype=np.int64).reshape(-1, 1)
        self._varints = at + np.arange(HOLE, dtype=np.int64)
        at = np.array(message.fixed, dtype=np.int64).reshape(-1, 1)
        self._fixed = at + np.arange(8, dtype=np.int64)

    @property
    def holes(self) -> tuple[int, int]:
        """How many (varint, fixed64) holes there are."""
        return len(self._varints), len(self._fixed)

    def fill(self, varints: Ints, fixed: npt.NDArray[np.uint64] | None = None) -> bytes:
        """The bytes with these values, in the order of the holes. Values are 0 to 2**63 - 1;
        negative ones become 0."""
        return self.rows(varints[None, :], None if fixed is None else fixed[None, :])

    def rows(self, varints: Ints, fixed: npt.NDArray[np.uint64] | None = None) -> bytes:
        """The bytes once for each row of values: int64[n, varint holes], uint64[n, fixed64 holes]."""
        n = len(varints)
        out = np.broadcast_to(self._base, (n, len(self._base))).copy()
        if varints.size:
            # A record of a hostile file may hold anything; what is negative has no place in 63 bits.
            parts = ((np.maximum(varints, 0)[..., None] >> _SHIFTS) & 0x7F).astype(np.uint8)
            parts[..., :-1] |= 0x80
            out[:, self._varints] = parts
        if fixed is not None and fixed.size:
            out[:, self._fixed] = np.ascontiguousarray(fixed, dtype="<u8").view(np.uint8).reshape(n, -1, 8)
        return out.tobytes()


_SHIFTS = np.arange(0, 7 * HOLE, 7, dtype=np.int64)
