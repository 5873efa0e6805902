# SPDX-License-Identifier: Apache-2.0
"""A loaded map, by its descriptor."""

from __future__ import annotations

from dataclasses import dataclass

from . import bpfsys


@dataclass(frozen=True)
class Map:
    """A loaded map. Its descriptor belongs to the object and ends with it."""

    name: str
    fd: int
    type: int
    key_size: int
    value_size: int
    max_entries: int
    flags: int

    def lookup(self, key: bytes) -> bytes | None:
        """The value of ``key``, or None (not for per-CPU maps)."""
        return bpfsys.map_lookup(self.fd, key, self.value_size)

    def update(self, key: bytes, value: bytes) -> None:
        """Set ``key`` to ``value``; OSError(E2BIG): the map is full."""
        if len(key) != self.key_size or len(value) != self.value_size:
            raise ValueError(f"map {self.name} takes {self.key_size} and {self.value_size} bytes")
        bpfsys.map_update(self.fd, key, value)

    def delete(self, key: bytes) -> bool:
        """Delete ``key``; False when it was not there."""
        return bpfsys.map_delete(self.fd, key)

    def keys(self) -> list[bytes]:
        """The keys there are now, each once."""
        return list(dict.fromkeys(bpfsys.map_keys(self.fd, self.key_size, 2 * self.max_entries + 16)))


def map_of(name: str, fd: int) -> Map:
    """The map with descriptor ``fd``, which somebody else has made; ``name`` is what we call it."""
    return Map(name, fd, *bpfsys.map_info(fd))
