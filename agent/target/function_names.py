# SPDX-License-Identifier: Apache-2.0
"""Names of the functions at places in a file, as its symbol tables have them. Used by the child."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

from .elf import ElfFile

_MAX_NAME = 4096


def names_in(elf: ElfFile, places: Iterable[int]) -> dict[int, str]:
    """By offset in the file: the function that begins there; C++ names as people write them,
    without what the function takes."""
    wanted = {vaddr: place for place in places if (vaddr := elf.offset_to_vaddr(place)) is not None}
    found: dict[int, str] = {}
    for symbol in elf.symbols():
        place = wanted.get(symbol.vaddr)
        if place is not None and place not in found:
            found[place] = symbol.name
    return {place: demangled(name) for place, name in found.items()}


def demangled(name: str) -> str:
    """By the C++ library of this machine, where there is one."""
    if not name.startswith("_Z") or len(name) > _MAX_NAME:
        return name
    try:
        library = ctypes.CDLL("libstdc++.so.6")
        demangle, free = library.__cxa_demangle, ctypes.CDLL(None).free
    except (OSError, AttributeError):
        return name
    demangle.restype = ctypes.c_void_p
    status = ctypes.c_int()
    text = demangle(name.encode(), None, None, ctypes.byref(status))
    if not text or status.value:
        return name
    whole = ctypes.string_at(text).decode("utf-8", "replace")
    free(ctypes.c_void_p(text))
    return without_arguments(whole)


def without_arguments(text: str) -> str:
    """``void ns::add<int>(int*)`` -> ``ns::add<int>``."""
    depth = 0
    for at in range(len(text) - 1, -1, -1):
        depth += {")": 1, ">": 1, "(": -1, "<": -1}.get(text[at], 0)
        if text[at] == "(" and depth == 0:
            text = text[:at]
            break
    return text.removeprefix("void ")
