# SPDX-License-Identifier: Apache-2.0
"""The model's files as they are mapped into a process."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass

from .gguf import MAGIC
from .process import FileId, Mapping, find_open_path
from .text import printable

MAX_MODELS = 64


@dataclass(frozen=True, slots=True)
class ModelFile:
    """One GGUF file that is mapped, opened by us (``fd``, to be closed); ``name`` is printable."""

    name: str
    file_id: FileId
    fd: int
    size: int


def open_models(pid: int, maps: Sequence[Mapping], known: Sequence[ModelFile] = ()) -> list[ModelFile]:
    """GGUF files among the mappings that are not ``known`` yet. A file that cannot be opened is not
    taken for a model."""
    seen = {one.file_id for one in known} | {m.file_id for m in maps if "x" in m.perms}
    found: list[ModelFile] = []
    for mapping in maps:
        if not mapping.inode or mapping.file_id in seen or len(found) + len(known) >= MAX_MODELS:
            continue
        seen.add(mapping.file_id)
        path = find_open_path(pid, mapping)
        if not path:
            continue
        try:
            if not stat.S_ISREG(os.stat(path).st_mode):
                continue
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        except OSError:
            continue  # gone, or not for us
        try:
            status = os.fstat(fd)
            if status.st_ino == mapping.inode and os.pread(fd, 4, 0) == MAGIC:
                name = printable(os.path.basename(mapping.path))
                found.append(ModelFile(name, mapping.file_id, fd, status.st_size))
                fd = -1
        except OSError:
            continue
        finally:
            if fd >= 0:
                os.close(fd)
    return found


def locked_bytes(pid: int) -> int | None:
    """Memory that the process has locked (mlock); None when it does not say."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            for line in file.read(1 << 16).splitlines():
                if line.startswith(b"VmLck:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        return None
    return None
