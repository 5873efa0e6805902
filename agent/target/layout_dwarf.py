# SPDX-License-Identifier: Apache-2.0
"""The layout of ggml's structures from debug information, where a build has it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from .dwarf import AT_BYTE_SIZE, DwarfError, Unit, unit_of, units_named
from .layout_types import Layout

if TYPE_CHECKING:
    from .elf import ElfFile

# Functions of the file that defines both structures; each has existed for years.
_WITNESSES = ("ggml_nelements", "ggml_new_tensor", "ggml_build_forward_expand", "ggml_graph_print")
_SOURCE = "ggml.c"
_MAX_OFFSET = 4096


def from_dwarf(elf: ElfFile) -> Layout | None:
    """The layout that the file's debug information describes; None when it has none or not of ggml."""
    if elf.section(".debug_info") is None:
        return None
    for unit in _units(elf):
        try:
            layout = _described(unit)
        except DwarfError:
            continue  # another unit may be one that can be read
        if layout is not None:
            return layout
    return None


def _units(elf: ElfFile) -> Iterator[Unit]:
    for _, symbols in sorted(elf.functions(_WITNESSES).items()):
        try:
            unit = unit_of(elf, symbols[0].vaddr) if symbols else None
        except DwarfError:
            break
        if unit is not None:
            yield unit
    if elf.section(".debug_aranges") is None:
        yield from units_named(elf, _SOURCE)


def _described(unit: Unit) -> Layout | None:
    structures = unit.structures({"ggml_tensor", "ggml_cgraph"})
    if len(structures) < 2:
        return None
    tensor = unit.members(structures["ggml_tensor"])
    graph = unit.members(structures["ggml_cgraph"])
    size = structures["ggml_tensor"].number(AT_BYTE_SIZE)
    if size is None:
        return None

    def offset(name: str) -> int | None:
        return tensor[name][0] if name in tensor else None

    try:
        n_src, name_size = unit.length(tensor["src"][1]), unit.length(tensor["name"][1])
        layout = Layout(
            name="debug information",
            source="dwarf",
            g_n_nodes=graph["n_nodes"][0],
            g_nodes=graph["nodes"][0],
            g_uid=graph["uid"][0] if "uid" in graph else None,
            t_type=tensor["type"][0],
            t_buffer=offset("buffer"),
            t_ne=tensor["ne"][0],
            t_nb=tensor["nb"][0],
            t_op=tensor["op"][0],
            t_op_params=tensor["op_params"][0],
            t_flags=offset("flags"),
            t_src=tensor["src"][0],
            n_src=n_src or 0,
            t_view_src=tensor["view_src"][0],
            t_view_offs=tensor["view_offs"][0],
            t_data=tensor["data"][0],
            t_name=tensor["name"][0],
            name_size=name_size or 0,
            t_extra=tensor["extra"][0],
            t_size=size,
        )
    except KeyError:  # a structure of this name, but not the one we know
        return None
    numbers = [value for value in layout.offsets().values() if value is not None]
    sane = max(numbers) <= _MAX_OFFSET and 0 < layout.n_src <= 64 and layout.name_size >= 8
    return layout if sane else None
