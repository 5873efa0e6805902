# SPDX-License-Identifier: Apache-2.0
"""Reading array maps as numpy arrays."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import struct
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import MachineError
from . import bpfsys
from .maps import Map


class MappedArray:
    """An array map with BPF_F_MMAPABLE, read and cleared by mapping the part in question.

    The kernel puts in all pages of a mapping at once, so a mapping of the whole array would
    be in our memory for good. Programs write while it is read: each aligned word is whole,
    words together are not a snapshot.
    """

    def __init__(self, array: Map, dtype: np.dtype[Any]) -> None:
        if dtype.itemsize != array.value_size:
            raise ValueError(f"map {array.name} has values of {array.value_size} bytes, not {dtype.itemsize}")
        self._array, self._dtype = array, dtype
        self._stride = (array.value_size + 7) & ~7
        with self._window(0, 1):
            pass  # a map that cannot be mapped is refused now

    @contextlib.contextmanager
    def _window(self, first: int, count: int) -> Iterator[npt.NDArray[Any]]:
        begin = first * self._stride
        offset = begin // mmap.PAGESIZE * mmap.PAGESIZE
        length = begin - offset + count * self._stride
        try:
            memory = mmap.mmap(
                self._array.fd, length, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE, offset=offset
            )
        except OSError as error:
            raise MachineError(
                f"map {self._array.name} cannot be mapped: {bpfsys.strerror(error.errno or 0)}"
            ) from error
        try:
            raw = np.frombuffer(memory, np.uint8)[begin - offset :]
            live = np.ndarray(count, self._dtype, raw, strides=(self._stride,))
            yield live
        finally:
            del raw, live
            memory.close()

    def read(self, first: int = 0, count: int | None = None) -> npt.NDArray[Any]:
        """A copy of ``count`` values (None: all that follow) from key ``first`` on, as they are now."""
        entries = self._array.max_entries
        count = entries - first if count is None else count
        if not 0 <= first <= first + count <= entries:
            raise ValueError(f"map {self._array.name} has {entries} entries")
        if not count:
            return np.empty(0, self._dtype)
        with self._window(first, count) as live:
            copy = live.copy()
            del live
        return copy

    def clear(self, first: int, count: int) -> None:
        """Set ``count`` values from key ``first`` on to zero; no program may be writing to them."""
        if count:
            with self._window(first, count) as live:
                live[:] = np.zeros((), self._dtype)
                del live

    def close(self) -> None:
        """Nothing is held; for the sake of ``with``."""

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
