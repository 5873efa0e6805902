# SPDX-License-Identifier: Apache-2.0
"""Lets a wheel that was linked against a newer glibc run on Debian 12.

llama-cpp-py-sync is built where the C23 spellings of ``strtol`` and friends exist (glibc 2.38);
it uses nothing else that is new. Where the C library is older, the test runs *copies* of the
libraries in which the demand for that version is marked weak (one flag in ``.gnu.version_r``;
code, symbols and build id stay as shipped), and a library of our own supplies the four names.
"""

from __future__ import annotations

import os
import platform
import struct
import subprocess
from pathlib import Path

from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection

from .fetch import CACHE

VER_FLG_WEAK = 2
_AUX_FLAGS_AT = 4  # of Elf64_Vernaux: hash (4 bytes), then flags (2 bytes)

_SOURCE = """
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
long __isoc23_strtol(const char *s, char **end, int base) { return strtol(s, end, base); }
unsigned long __isoc23_strtoul(const char *s, char **end, int base) { return strtoul(s, end, base); }
unsigned long long __isoc23_strtoull(const char *s, char **end, int base) { return strtoull(s, end, base); }
int __isoc23_sscanf(const char *s, const char *format, ...)
{
    va_list args;
    int n;

    va_start(args, format);
    n = vsscanf(s, format, args);
    va_end(args);
    return n;
}
"""


def libc_version() -> tuple[int, int]:
    """(2, 36) on Debian 12."""
    major, minor, *_ = platform.libc_ver()[1].split(".")
    return int(major), int(minor)


def too_new(library: Path) -> bool:
    """Does this file demand a glibc version that this machine does not have?"""
    return bool(_flag_offsets(library))


def _flag_offsets(library: Path) -> list[int]:
    """File offsets of the 16-bit flags of each demand that this machine cannot meet."""
    have = libc_version()
    found = []
    with open(library, "rb") as file:
        elf = ELFFile(file)
        for section in elf.iter_sections():
            if not isinstance(section, GNUVerNeedSection):
                continue
            at = section["sh_offset"]
            for need, auxiliaries in section.iter_versions():
                aux_at = at + need["vn_aux"]
                for auxiliary in auxiliaries:
                    name = auxiliary.name
                    if name.startswith("GLIBC_2.") and name[8:].isdigit() and (2, int(name[8:])) > have:
                        found.append(aux_at + _AUX_FLAGS_AT)
                    aux_at += auxiliary["vna_next"]
                at += need["vn_next"]
    return found


def relax(library: Path) -> None:
    """Marks the demands that cannot be met as weak, in place (only ever in a copy)."""
    offsets = _flag_offsets(library)
    with open(library, "r+b") as file:
        for offset in offsets:
            file.seek(offset)
            (flags,) = struct.unpack("<H", file.read(2))
            file.seek(offset)
            file.write(struct.pack("<H", flags | VER_FLG_WEAK))


def substitutes() -> Path:
    """The compiled library with the four newer names."""
    target = CACHE / "shim" / "isoc23.so"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        source = target.with_suffix(".c")
        source.write_text(_SOURCE)
        partial = target.with_suffix(f".{os.getpid()}")
        command = ["gcc", "-O2", "-fno-builtin", "-shared", "-fPIC", "-o", str(partial), str(source)]
        subprocess.run(command, check=True)
        partial.replace(target)  # at once: half a library would be there for good
    return target
