# SPDX-License-Identifier: Apache-2.0
"""Kernel headers for BCC in a place of our own: nothing below /lib/modules is touched."""

from __future__ import annotations

import os
from pathlib import Path

SOURCES = Path("/usr/src")


def merged_tree(folder: Path) -> Path | None:
    """A tree of links to Debian's headers, its common and its architecture's part in one.

    That of another kernel version does: what is read of them, registers and integer types, has
    not changed. None when no headers are installed.
    """
    for common in sorted(SOURCES.glob("linux-headers-*-common"), reverse=True):
        stem = common.name.removesuffix("-common")
        for special in sorted(SOURCES.glob(f"{stem}-*")):
            if special != common and (special / "include" / "generated").is_dir():
                tree = folder / "headers"
                for part in (common, special):
                    _link(part / "include", tree / "include")
                    for arch in (part / "arch").iterdir():
                        _link(arch / "include", tree / "arch" / arch.name / "include")
                return tree
    return None


def _link(source: Path, to: Path) -> None:
    """Folders as folders, files as links."""
    for here, _, files in os.walk(source):
        there = to / os.path.relpath(here, source)
        there.mkdir(parents=True, exist_ok=True)
        for name in files:
            if not (there / name).exists():
                (there / name).unlink(missing_ok=True)  # a link to what is gone
                (there / name).symlink_to(Path(here) / name)
