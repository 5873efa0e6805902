# SPDX-License-Identifier: Apache-2.0
"""Compiles the BPF programs, for every architecture on any host, and finds the objects.

Used by ``make``, by ``setup.py`` (which loads this file before anything is installed, so it
imports nothing of ours) and at run time for :func:`find_object`.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
ARCHITECTURES = {"x86_64": "x86", "aarch64": "arm64"}  # machine: as libbpf's headers call it


class BuildError(Exception):
    """A program that does not compile, or no compiler; one line except for what clang said."""


def sources(folder: Path = HERE) -> list[Path]:
    """The BPF programs of ``folder``."""
    return sorted(folder.glob("*.bpf.c"))


def object_path(source: Path, machine: str, folder: Path) -> Path:
    """Where the object of ``source`` for ``machine`` lies: ``ggml.x86_64.bpf.o``."""
    return folder / f"{source.name.removesuffix('.bpf.c')}.{machine}.bpf.o"


def compile_object(source: Path, machine: str, target: Path, *, defines: Sequence[str] = ()) -> Path:
    """Compile one program. The object appears complete or not at all.

    It holds no path of this machine and no DWARF, only BTF (where llvm-strip is there).
    """
    clang = shutil.which("clang")
    if clang is None:
        raise BuildError(f"clang is needed to compile {source.name}: apt install clang, or use a wheel")
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made = Path(scratch) / target.name
        command = [
            clang, "-target", "bpf", "-mcpu=v3", "-O2", "-g", "-fdebug-compilation-dir=.",
            "-Wall", "-Werror",
            f"-D__TARGET_ARCH_{ARCHITECTURES[machine]}", *(f"-D{define}" for define in defines),
            f"-I{os.path.relpath(HERE, source.parent)}",
            f"-I{os.path.relpath(HERE / 'include', source.parent)}",
            "-c", source.name, "-o", str(made),
        ]  # fmt: skip
        done = subprocess.run(command, cwd=source.parent, capture_output=True, text=True)
        if done.returncode:
            raise BuildError(f"{source.name} does not compile for {machine}:\n{done.stderr.strip()}")
        strip = shutil.which("llvm-strip")
        if strip is not None:
            subprocess.run([strip, "-g", str(made)], check=True)
        os.replace(made, target)
    return target


def compile_all(out_dir: Path | None = None, source_dir: Path = HERE) -> list[Path]:
    """Compile every program for every architecture; returns all objects.

    Objects newer than every source and header are kept. Without clang they must all be
    there and up to date (a source distribution holds them).
    """
    folder = out_dir or source_dir
    folder.mkdir(parents=True, exist_ok=True)
    inputs = [*source_dir.glob("*.bpf.c"), *source_dir.glob("*.h"), *source_dir.glob("include/*.h")]
    newest = max((path.stat().st_mtime_ns for path in inputs), default=0)
    built = []
    for source in sources(source_dir):
        for machine in ARCHITECTURES:
            target = object_path(source, machine, folder)
            if not target.exists() or target.stat().st_mtime_ns < newest:
                compile_object(source, machine, target)
            built.append(target)
    return built


def find_object(name: str, machine: str | None = None) -> Path:
    """The installed object of program ``name`` (``ggml``), by default for this machine.

    Raises FileNotFoundError with what to do when it was not built.
    """
    path = HERE / f"{name}.{machine or platform.machine()}.bpf.o"
    if not path.exists():
        raise FileNotFoundError(f"{path} is not there: run `make setup`, or reinstall profinferd")
    return path


def main() -> int:
    """``python build.py``: compile all beside the sources."""
    try:
        for path in compile_all():
            print(path.name)
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
