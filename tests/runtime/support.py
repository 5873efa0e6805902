# SPDX-License-Identifier: Apache-2.0
"""What the tests with real probes share: built test objects, a victim that counts on command."""

from __future__ import annotations

import hashlib
import platform
import subprocess
from pathlib import Path
from types import TracebackType
from typing import IO

from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection

from profinferd.probes import build as probes_build

HERE = Path(__file__).resolve().parent
CACHE = HERE.parents[1] / ".cache" / "bpf"


def bpf_object(name: str) -> Path:
    """The compiled ``tests/runtime/bpf/NAME.bpf.c`` for this machine, built once per content."""
    source = HERE / "bpf" / f"{name}.bpf.c"
    key = hashlib.sha256(source.read_bytes())
    for header in sorted([*probes_build.HERE.glob("*.h"), *probes_build.HERE.glob("include/*.h")]):
        key.update(header.read_bytes())
    target = CACHE / f"{name}.{key.hexdigest()[:12]}.o"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        probes_build.compile_object(source, platform.machine(), target)
    return target


def file_offset(path: Path, symbol: str) -> int:
    """Where the function ``symbol`` begins in the file (read with pyelftools, not with our own code)."""
    with path.open("rb") as file:
        elf = ELFFile(file)
        for table in (".symtab", ".dynsym"):
            section = elf.get_section_by_name(table)
            symbols = section.get_symbol_by_name(symbol) if isinstance(section, SymbolTableSection) else None
            for entry in symbols or []:
                address = int(entry["st_value"])
                for segment in elf.iter_segments("PT_LOAD"):
                    if segment["p_vaddr"] <= address < segment["p_vaddr"] + segment["p_filesz"]:
                        return address - int(segment["p_vaddr"]) + int(segment["p_offset"])
    raise LookupError(f"{symbol} is not in {path}")


class Victim:
    """A running ``calls.c``: calls its two functions as often as it is told."""

    def __init__(self, path: Path) -> None:
        self._process = subprocess.Popen([path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._out.readline() == "ready\n"

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def _out(self) -> IO[str]:
        assert self._process.stdout is not None
        return self._process.stdout

    def call(self, times: int, *, in_thread: bool = False) -> int:
        """Have second() (and so first()) called; returns the sum of its results."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{'t ' if in_thread else ''}{times}\n")
        self._process.stdin.flush()
        return int(self._out.readline())

    def end(self) -> int:
        """End it; returns its exit status."""
        assert self._process.stdin is not None
        if not self._process.stdin.closed:
            self._process.stdin.close()
        self._out.close()
        return self._process.wait(60)

    def __enter__(self) -> Victim:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self.end()


def expected_sum(times: int) -> int:
    """What :meth:`Victim.call` must return: sum of 3 * (i + 1)."""
    return 3 * times * (times + 1) // 2
