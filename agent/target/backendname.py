# SPDX-License-Identifier: Apache-2.0
"""What the engine calls a backend ("RPC0", "Vulkan0"), read from where it keeps the name.

A backend of ggml begins with its identifier and its functions; its device and its own data
follow, a device likewise (ggml/src/ggml-backend-impl.h). How many functions there are changed
with versions, so that each pointer is taken for what it leads to: code or data. The name is a
C++ string in the data, which has a form that is checked: characters, length, and room for them.
Nothing is called, and nothing is believed that is no plain name.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator, Sequence

from ..errors import MachineError, TargetEnded
from .memory import AbsentMemory, read_memory
from .process import Mapping, read_maps

_WORDS = 32
_DATA = 192
"""Bytes of a backend's data in which its name is looked for."""
_NAME = re.compile(rb"[A-Za-z][A-Za-z_]{0,23}[0-9]{1,4}")
_LIBRARY = re.compile(r"ggml-([a-z0-9]+)")
_LOCAL, _STRING = 16, 32


def backend_name(pid: int, address: int) -> str | None:
    """The device's name, else that of the library that its functions are in; None: neither."""
    try:
        maps = read_maps(pid)
        code = [m for m in maps if "x" in m.perms]
        words = _words(pid, address, maps)
        functions = [w for w in words[1:] if _within(w, code)]
        for place in _data_after(words[1:], code):
            inner = _words(pid, place, maps)
            # A device has functions, too, and its own data behind them; a backend's data has none.
            its = list(_data_after(inner, code))[1:2] if _within(inner[0] if inner else 0, code) else [place]
            for data in its:
                name = _string_in(pid, data, maps)
                if name is not None:
                    return name
    except (AbsentMemory, TargetEnded, MachineError):
        return None
    library = next((m.path for m in code if functions and m.start <= functions[0] < m.end), "")
    found = _LIBRARY.search(os.path.basename(library))
    return {"cpu": "CPU"}.get(found[1], found[1]) if found else None


def _words(pid: int, address: int, maps: Sequence[Mapping]) -> tuple[int, ...]:
    size = _room(address, 8 * _WORDS, maps) // 8 * 8
    return struct.unpack(f"<{size // 8}Q", read_memory(pid, address, size))


def _room(address: int, wanted: int, maps: Sequence[Mapping]) -> int:
    """How many of the wanted bytes are there."""
    end = next((m.end for m in maps if "r" in m.perms and m.start <= address < m.end), address)
    return min(wanted, end - address)


def _within(word: int, some: Sequence[Mapping]) -> bool:
    return any(m.start <= word < m.end for m in some)


def _data_after(words: Sequence[int], code: Sequence[Mapping]) -> Iterator[int]:
    """The two pointers behind the functions; functions that are missing are zero."""
    last = max((i for i, w in enumerate(words) if _within(w, code)), default=None)
    if last is None:
        return
    first = next((i for i, w in enumerate(words) if w and not _within(w, code)), len(words))
    yield from words[first : first + 2]


def _string_in(pid: int, address: int, maps: Sequence[Mapping]) -> str | None:
    raw = read_memory(pid, address, _room(address, _DATA, maps))
    for at in range(0, len(raw) - _STRING + 1, 8):
        start, length, capacity = struct.unpack_from("<QQQ", raw, at)
        if not 0 < length <= 28:
            continue
        if start == address + at + _LOCAL:
            text = raw[at + _LOCAL : at + _LOCAL + length] if length < _LOCAL else b""
        elif length <= capacity < 1 << 20 and _room(start, length, maps) == length:
            text = read_memory(pid, start, length)
        else:
            continue
        if _NAME.fullmatch(text):
            return text.decode()
    return None
