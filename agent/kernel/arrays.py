# SPDX-License-Identifier: Apache-2.0
"""Reading array maps as numpy arrays."""

from __future__ import annotations

import ctypes
import errno
import mmap
import struct
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import MachineError
from . import bpfsys
from .maps import Map


class MappedArray:
    """An array map with BPF_F_MMAPABLE, read and cleared without a system call.

    Programs write while it is read: each aligned word is whole, words together are not a
    snapshot.
    """

    def __init__(self, array: Map, dtype: np.dtype[Any]) -> None:
        if dtype.itemsize != array.value_size:
            raise ValueError(f"map {array.name} has values of {array.value_size} bytes, not {dtype.itemsize}")
        stride = (array.value_size + 7) & ~7
        length = -(-stride * array.max_entries // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            self._memory = mmap.mmap(array.fd, length, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        except OSError as error:
            raise MachineError(
                f"map {array.name} cannot be mapped: {bpfsys.strerror(error.errno or 0)}"
            ) from error
        raw = np.frombuffer(self._memory, np.uint8, stride * array.max_entries)
        self._live: npt.NDArray[Any] = np.ndarray(array.max_entries, dtype, raw, strides=(stride,))

    def read(self, first: int = 0, count: int | None = None) -> npt.NDArray[Any]:
        """A copy of ``count`` values from key ``first`` on, as they are now."""
        return self._live[first : None if count is None else first + count].copy()

    def clear(self, first: int, count: int) -> None:
        """Set ``count`` values from key ``first`` on to zero; no program may be writing to them."""
        self._live[first : first + count] = np.zeros((), self._live.dtype)

    def close(self) -> None:
        """Unmap."""
        del self._live
        self._memory.close()

    def __enter__(self) -> MappedArray:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_array(array: Map, dtype: np.dtype[Any] | str = "u8") -> npt.NDArray[Any]:
    """The values of any plain array map (not per-CPU), index is the key.

    One system call where the kernel has batch look-ups (5.6 and later), else one per value.
    """
    kind = np.dtype(dtype)
    if kind.itemsize != array.value_size:
        raise ValueError(f"map {array.name} has values of {array.value_size} bytes, not {kind.itemsize}")
    n = array.max_entries
    keys = ctypes.create_string_buffer(4 * n)
    values = ctypes.create_string_buffer(array.value_size * n)
    try:
        count = bpfsys.map_lookup_batch(array.fd, keys, values, n)
    except OSError as error:
        if error.errno not in (errno.EINVAL, bpfsys.ENOTSUPP):
            raise
        raw = b"".join(
            bpfsys.map_lookup(array.fd, struct.pack("=I", i), array.value_size) or b"" for i in range(n)
        )
        return np.frombuffer(raw, kind).copy()
    if count != n:
        raise MachineError(f"map {array.name} gave {count} of {n} values")
    return np.frombuffer(values.raw, kind).copy()
