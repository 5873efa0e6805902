# SPDX-License-Identifier: Apache-2.0
"""The layout of ggml's structures in a target: who might be right, and who is.

Candidates come from the file (its accessor functions, its debug information) and from public history;
one is chosen because a live graph checks out under it. If none does, nothing is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import TargetError
from .layout_check import check_layout
from .layout_known import KNOWN
from .layout_types import Layout, LiveGraph

if TYPE_CHECKING:
    from .elf import ElfFile

__all__ = ["KNOWN", "Layout", "LiveGraph", "candidates", "check_layout", "choose_layout"]

_REMEDY = "tell the project which engine and version this is; nothing was read that could be wrong"


def candidates(elf: ElfFile) -> list[Layout]:
    """Layouts that this file may have, the likeliest first; never empty for a file without any evidence.

    Known layouts that agree with the file's accessor functions; else what its debug
    information says; else a known layout corrected by the accessors. Without accessors: all known ones.
    """
    from .layout_accessors import corrected, facts_of, matching  # the disassembler, only in the child

    facts = facts_of(elf)
    found = matching(facts)
    if found:
        return found
    from .layout_dwarf import from_dwarf

    described = from_dwarf(elf)
    if described is not None:
        return [described]
    return corrected(facts)


def choose_layout(
    candidates: Sequence[Layout], live: LiveGraph, op_count: int | None, type_count: int | None
) -> Layout:
    """The first of ``candidates`` that ``live`` fits.

    Raises TargetError, with the reason for the likeliest one, when none fits.
    """
    reasons = []
    for layout in candidates:
        reason = check_layout(layout, live, op_count, type_count)
        if reason is None:
            return layout
        reasons.append((layout, reason))
    if not reasons:
        raise TargetError("no layout of ggml's structures is known for this build", _REMEDY)
    first, why = reasons[0]
    others = f" ({len(reasons) - 1} others do not either)" if len(reasons) > 1 else ""
    raise TargetError(f"the graph in memory does not fit the layout of {first.name}: {why}{others}", _REMEDY)
