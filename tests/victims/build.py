# SPDX-License-Identifier: Apache-2.0
"""Compiles the tiny C programs that the tests probe.

A victim is built once per content: the path contains a hash of the source, the headers
beside it, the flags and the compiler, so that a changed source never meets an old program
and two test runs never write to one file.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
CACHE = (HERE.parents[1] / ".cache").resolve() / "victims"
"""As the kernel names it in /proc/PID/maps, also where the folder is a link to another place."""


@functools.cache
def _compiler(command: str) -> str:
    """What the compiler says about itself; part of the cache key."""
    return subprocess.run([command, "--version"], capture_output=True, text=True, check=True).stdout


def _source(source: str) -> tuple[str, str]:
    """(text, stem) of a source given as a file name of this folder or as C text."""
    if "\n" in source or "{" in source:
        return source, "victim"
    path = HERE / source
    return path.read_text(), path.name.split(".")[0]


def build(
    source: str,
    *,
    cflags: Sequence[str] = (),
    name: str | None = None,
    strip: bool = False,
    shared: bool = False,
    cc: str = "gcc",
) -> Path:
    """Compile ``source`` and return the path of the program or shared object.

    ``source`` is the name of a file in this folder (``calls.c``, ``deep.S``) or C text.
    The flags are ``-O2 -pthread`` followed by ``cflags`` (libraries too: they come after
    the source). ``name`` is the file name of the result, by default the stem of the source
    (``victim`` for text), as ``lib<stem>.so`` when ``shared``. ``strip`` removes every
    symbol table that the loader does not need. ``cc`` is the compiler, for instance
    ``aarch64-linux-gnu-gcc``.

    The result must be treated as read-only: it is shared between tests. Copy it to change it.
    """
    text, stem = _source(source)
    suffix = Path(source).suffix if "\n" not in source and "{" not in source else ".c"
    flags = ["-O2", "-pthread", *(["-shared", "-fPIC"] if shared else []), f"-I{HERE}"]
    key = hashlib.sha256()
    for part in (text, *flags, *cflags, str(strip), _compiler(cc)):
        key.update(part.encode() + b"\0")
    for header in sorted(HERE.glob("*.h")):
        key.update(header.name.encode() + b"\0" + header.read_bytes())
    file_name = name or (f"lib{stem}.so" if shared else stem)
    folder = CACHE / key.hexdigest()[:16]
    result = folder / file_name
    if result.exists():
        return result
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        source_path = Path(scratch) / f"{stem}{suffix}"
        source_path.write_text(text)
        made = Path(scratch) / "made"
        command = [cc, *flags, "-o", str(made), str(source_path), *cflags]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
        if strip:
            prefix = cc.removesuffix("gcc") if cc.endswith("-gcc") else ""
            subprocess.run([f"{prefix}strip", "--strip-all", str(made)], check=True)
        # The link appears at once and complete, also when two tests build the same victim.
        os.replace(made, result)
    return result


def copy_of(path: Path, folder: Path, name: str | None = None) -> Path:
    """A private copy of a built victim, for tests that change or delete the file."""
    target = folder / (name or path.name)
    shutil.copy2(path, target)
    return target
