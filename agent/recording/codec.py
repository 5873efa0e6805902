# SPDX-License-Identifier: Apache-2.0
"""Tables of records as compressed bytes, and back; what is read is hostile and bounded.

A structured array is stored column by column. Columns of 64-bit integers (times, addresses) are
stored as differences, and every column's bytes by significance, all first bytes together: noise
stays in few of them and the rest compresses to nothing. Then zstd at its fastest ordinary level
(2 bytes and 3 ns for an op; zlib takes 80 ns and more room).
"""

from __future__ import annotations

import sys
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from ..errors import UsageError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

LEVEL = 1
MAX_RAW = 1 << 28
"""Bytes of one table before compression: more is refused when reading, and never written."""
_MAX_FIELDS = 128
_MAX_SHAPE = 4096
_KINDS = "iufbSUV"

Array = npt.NDArray[Any]


def compress(raw: bytes) -> bytes:
    """The bytes, compressed."""
    return bytes(zstd.compress(raw, LEVEL))


def decompress(data: bytes, size: int) -> bytes:
    """Exactly ``size`` bytes, or UsageError: nothing more is ever unpacked."""
    if not 0 <= size <= MAX_RAW:
        raise damaged(f"a table of {size} bytes")
    unpacker = zstd.ZstdDecompressor()
    try:
        raw = bytes(unpacker.decompress(data, max_length=size + 1))
    except (zstd.ZstdError, EOFError) as error:
        raise damaged(str(error)) from error
    if len(raw) != size:
        raise damaged("a table of another size than it says")
    return raw


def damaged(why: str) -> UsageError:
    """The error for a recording that cannot be what we wrote."""
    return UsageError(f"the recording is damaged ({why})", "use another copy of it")


def describe(dtype: np.dtype[Any]) -> str:
    """A record type as JSON: [[name, type, [shape]], …]; field order and no padding."""
    fields = []
    for name in dtype.names or ():
        base, shape = (dtype[name].subdtype) or (dtype[name], ())
        if base.kind not in _KINDS or base.kind == "V":
            raise ValueError(f"field {name} of type {base} cannot be stored")
        fields.append([name, base.str, list(shape)])
    return msgspec.json.encode(fields).decode()


def understand(text: str) -> np.dtype[Any]:
    """The record type that :func:`describe` described; UsageError for anything else."""
    try:
        fields = msgspec.json.decode(text[: 1 << 16], type=list[tuple[str, str, list[int]]])
        if not 0 < len(fields) <= _MAX_FIELDS:
            raise ValueError("its number of fields")
        packed: list[tuple[Any, ...]] = []
        for name, base, shape in fields:
            kind = np.dtype(base)
            if kind.kind not in _KINDS or kind.kind == "V" or not 0 < kind.itemsize <= _MAX_SHAPE:
                raise ValueError(f"a field of type {base}")
            if len(shape) > 2 or any(not 0 < n <= _MAX_SHAPE for n in shape):
                raise ValueError(f"a field of shape {shape}")
            packed.append((name, kind, tuple(shape)) if shape else (name, kind))
        dtype = np.dtype(packed)
        if dtype.itemsize > _MAX_SHAPE:
            raise ValueError(f"records of {dtype.itemsize} bytes")
        return dtype
    except (msgspec.MsgspecError, ValueError, TypeError, SyntaxError) as error:
        raise damaged(f"a record type: {error}") from error


def encode(table: Array) -> bytes:
    """All rows of a structured array; :func:`decode` needs its dtype and length again."""
    return compress(b"".join(_pack(table[name]) for name in table.dtype.names or ()))


def decode(data: bytes, dtype: np.dtype[Any], rows: int) -> Array:
    """The structured array of ``rows`` rows. UsageError when it is not one."""
    if not 0 <= rows <= MAX_RAW:
        raise damaged(f"a table of {rows} rows")
    raw = decompress(data, rows * _packed_size(dtype))
    table = np.empty(rows, dtype)
    at = 0
    for name in dtype.names or ():
        base, shape = dtype[name].subdtype or (dtype[name], ())
        count = rows * int(np.prod(shape, dtype=np.int64))
        table[name] = _unpack(raw[at : at + count * base.itemsize], base, count).reshape(rows, *shape)
        at += count * base.itemsize
    return table


def encode_column(values: Array) -> bytes:
    """One column of numbers."""
    return compress(_pack(values))


def decode_column(data: bytes, dtype: np.dtype[Any], count: int) -> Array:
    """``count`` numbers. UsageError when they are not there."""
    return _unpack(decompress(data, count * dtype.itemsize), dtype, count)


def _packed_size(dtype: np.dtype[Any]) -> int:
    return sum(dtype[name].itemsize for name in dtype.names or ())


def _pack(column: Array) -> bytes:
    flat = np.ascontiguousarray(column).reshape(-1)
    if flat.dtype.kind in "iu" and flat.dtype.itemsize == 8 and len(flat):
        flat = np.diff(flat.view(np.int64), prepend=np.int64(0))
    if flat.dtype.itemsize == 1 or flat.dtype.kind in "SU":
        return flat.tobytes()
    return flat.view(np.uint8).reshape(len(flat), flat.dtype.itemsize).T.tobytes()


def _unpack(raw: bytes, dtype: np.dtype[Any], count: int) -> Array:
    if dtype.itemsize == 1 or dtype.kind in "SU":
        if dtype.kind == "b":
            bools: Array = np.frombuffer(raw, np.uint8, count) != 0  # any other byte would be no bool
            return bools
        same: Array = np.frombuffer(raw, dtype, count)
        return same
    planes = np.frombuffer(raw, np.uint8, count * dtype.itemsize).reshape(dtype.itemsize, count)
    flat: Array = np.ascontiguousarray(planes.T).reshape(-1).view(dtype)
    if dtype.kind in "iu" and dtype.itemsize == 8:
        whole: Array = np.cumsum(flat.view(np.int64), dtype=np.int64).view(dtype)
        return whole
    return flat
