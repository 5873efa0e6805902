# SPDX-License-Identifier: Apache-2.0
"""Separate debug files: where a distribution puts the names that it stripped.

Looked for by build id and by ``.gnu_debuglink``, as seen by the target (its root
directory) and by us. A file is accepted only if it has the same build id, or, where the
stripped file has none, the checksum that the link names.
"""

from __future__ import annotations

import os
import zlib

from .elf import ElfError, ElfFile
from .symbols import tables_of

DEBUG_ROOT = "/usr/lib/debug"
MAX_DEBUG_FILE = 2 << 30


def debug_link(elf: ElfFile) -> tuple[str, int] | None:
    """(file name, CRC-32) of ``.gnu_debuglink``; None when absent or not a plain name."""
    section = elf.section(".gnu_debuglink")
    if section is None or section.size > 4096:
        return None
    raw = elf.pread(section.offset, section.size)
    name, _, _ = raw.partition(b"\0")
    at = (len(name) + 4) & ~3
    if not name or b"/" in name or name in (b".", b"..") or at + 4 > len(raw):
        return None
    return os.fsdecode(name), int.from_bytes(raw[at : at + 4], "little")


def candidates(elf: ElfFile, path: str, root: str) -> list[str]:
    """Paths at which the debug file of ``elf`` may lie, best first.

    ``path`` is where the target sees the file, ``root`` what the target's root directory
    is for us (``/proc/PID/root``, or empty for our own).
    """
    out: list[str] = []
    identity = elf.build_id()
    if identity:
        out.append(f"{DEBUG_ROOT}/.build-id/{identity[:2]}/{identity[2:]}.debug")
    link = debug_link(elf)
    if link is not None and path.startswith("/"):
        folder = os.path.dirname(path)
        out += [f"{folder}/{link[0]}", f"{folder}/.debug/{link[0]}", f"{DEBUG_ROOT}{folder}/{link[0]}"]
    out = [p for p in out if p != path]
    roots = [root, ""] if root else [""]
    return [r + p for r in roots for p in out]


def open_debug_file(elf: ElfFile, path: str, root: str = "") -> ElfFile | None:
    """The first debug file that really belongs to ``elf``, or None. The caller closes it."""
    identity = elf.build_id()
    link = debug_link(elf)
    if not identity and link is None:
        return None
    for candidate in candidates(elf, path, root):
        try:
            found = ElfFile.open(candidate)
        except ElfError:
            continue  # absent or not an ELF file: not ours
        try:
            if found.machine() == elf.machine() and (
                found.build_id() == identity if identity else link is not None and _crc(found) == link[1]
            ):
                return found
        except ElfError:
            pass  # it became unreadable: treated like one that does not belong
        found.close()
    return None


def add_debug_file(elf: ElfFile, path: str, root: str = "") -> ElfFile | None:
    """Let ``elf`` find names in its debug file too. Keep the result open as long as ``elf``."""
    found = open_debug_file(elf, path, root)
    if found is not None:
        tables = [t for t in tables_of(found) if t.source == ".symtab"]
        for table in tables:
            table.source = "debug file"
        elf.add_tables(tables)
    return found


def _crc(elf: ElfFile) -> int:
    if elf.size > MAX_DEBUG_FILE:
        return -1
    crc = 0
    for _, piece in elf.blocks(0, elf.size):
        crc = zlib.crc32(piece, crc)
    return crc
