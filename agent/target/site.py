# SPDX-License-Identifier: Apache-2.0
"""What the site rules of every architecture answer with: a place to probe, or why not there."""

from __future__ import annotations

from dataclasses import dataclass

MOVED_UNKNOWN = 0xFFFF
"""``Site.moved`` where the stack pointer was realigned or set from a register: stack-passed
arguments cannot be found from there. It fits the 16 bits of the attach cookie."""

MAX_MOVED = 0xFFF0
"""A larger fixed displacement than this does not fit the cookie and counts as unknown."""


@dataclass(frozen=True)
class Site:
    """One instruction to probe.

    ``offset``: of the instruction in the file (``file_offset`` given to the chooser plus its
    distance from the function's start). ``moved``: bytes that the stack pointer lies below its
    value at function entry when the probe fires. ``kind``: 'push', 'jmp', 'call', 'jcc', 'nop',
    'first byte', or 'stepped' where that cannot be. ``emulated``: the kernel emulates it, so that a
    hit costs about 1 us and not 20-30. ``ret_ok``: a return probe here finds the return address where
    the kernel looks for it.
    ``insn``: the instruction's bytes in hexadecimal, to be compared with the file that is attached.
    """

    offset: int
    vaddr: int
    moved: int
    kind: str
    emulated: bool
    ret_ok: bool
    insn: str


@dataclass(frozen=True)
class Refusal:
    """Why the instruction at ``vaddr`` must not be probed; ``reason`` is one clause for people."""

    vaddr: int
    reason: str
