# SPDX-License-Identifier: Apache-2.0
"""ELF files: what is found in good ones (against pyelftools and binutils), and that bad ones do no harm."""

from __future__ import annotations

import os
import random
import shutil
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile
from elftools.elf.relocation import RelocationSection
from elftools.elf.sections import SymbolTableSection
from hypothesis import given, settings
from hypothesis import strategies as st

from profinferd.agent.errors import TargetError
from profinferd.agent.target.debugfile import add_debug_file, debug_link
from profinferd.agent.target.elf import ElfError, ElfFile
from profinferd.agent.target.relocations import relr_addresses
from tests.victims.build import build

SOURCE = """
#include <stdio.h>
#define N __attribute__((noinline))
const char *const words[] = { "NONE", "DUP", "ADD", "SUB" };
N int wanted_entry(int a) { printf("%d %s\\n", a, words[a & 3]); return a + 1; }
N int wanted_entry_longer(int a) { printf("longer %d\\n", a); return a + 2; }
N int wanted_third(int a) { printf("third %d\\n", a); return a + 3; }
int wanted_object[4] = { 1, 2, 3, 4 };
int main(int argc, char **argv) {
    (void)argv;
    return wanted_entry(argc) + wanted_entry_longer(argc) + wanted_third(argc) + wanted_object[argc & 3];
}
"""
NAMES = ["wanted_entry", "wanted_entry_longer", "wanted_third", "wanted_object", "not_there"]
BUILD_ID = ("-Wl,--build-id=sha1",)


def run(*command: str | Path) -> str:
    return subprocess.run([str(c) for c in command], check=True, capture_output=True, text=True).stdout


def expected(path: Path) -> dict[str, tuple[int, int]]:
    """Functions by name -> (address, size), read by pyelftools."""
    out: dict[str, tuple[int, int]] = {}
    with open(path, "rb") as file:
        elf = ELFFile(file)
        for section in elf.iter_sections():
            if isinstance(section, SymbolTableSection):
                for symbol in section.iter_symbols():
                    if symbol["st_info"]["type"] == "STT_FUNC" and symbol["st_shndx"] != "SHN_UNDEF":
                        out[symbol.name] = (symbol["st_value"], symbol["st_size"])
    return out


@pytest.fixture(scope="module")
def program() -> Path:
    return build(SOURCE, cflags=BUILD_ID)


@pytest.fixture(scope="module")
def library() -> Path:
    return build(SOURCE, cflags=BUILD_ID, shared=True)


def copy(path: Path, folder: Path, *objcopy: str) -> Path:
    out = folder / path.name
    run("objcopy", *objcopy, path, out)
    return out


def test_functions_of_symtab(program: Path) -> None:
    truth = expected(program)
    with ElfFile.open(str(program)) as elf:
        found = elf.functions(NAMES)
        assert set(found) == {"wanted_entry", "wanted_entry_longer", "wanted_third"}
        for name, symbols in found.items():
            assert [(s.vaddr, s.size) for s in symbols] == [truth[name]]
            assert symbols[0].source == ".symtab" and symbols[0].exact
        every = {s.name: (s.vaddr, s.size) for s in elf.symbols()}
        # crti's _init has size 0 and is in both; undefined names are in neither
        assert {n: v for n, v in every.items() if n.startswith("wanted")} == {
            n: v for n, v in truth.items() if n.startswith("wanted")
        }
        data = elf.data("wanted_object")
        assert data is not None and elf.read(data.vaddr, 16) == struct.pack("<4i", 1, 2, 3, 4)
        assert elf.function("wanted_object") is None, "an object is not a function"


def test_dynsym_left_after_strip(library: Path, tmp_path: Path) -> None:
    """C01: a stripped shared object still has its exported names."""
    truth = expected(library)
    stripped = copy(library, tmp_path, "--strip-all")
    with ElfFile.open(str(stripped)) as elf:
        assert {s.source for found in elf.functions(NAMES).values() for s in found} == {".dynsym"}
        assert {n: s[0].vaddr for n, s in elf.functions(NAMES).items()} == {
            n: truth[n][0] for n in ("wanted_entry", "wanted_entry_longer", "wanted_third")
        }
        assert {s.name for s in elf.matching("wanted_entry")} == {"wanted_entry", "wanted_entry_longer"}


def test_no_names_left(program: Path, tmp_path: Path) -> None:
    """C01: nothing is found after a full strip, and that is no error."""
    with ElfFile.open(str(copy(program, tmp_path, "--strip-all"))) as elf:
        assert elf.functions(NAMES) == {} and elf.build_id()


def test_dynsym_without_section_headers(library: Path, tmp_path: Path) -> None:
    """C01: section headers gone too: the dynamic section still leads to the names."""
    data = bytearray(copy(library, tmp_path, "--strip-all").read_bytes())
    data[0x28:0x30] = bytes(8)  # e_shoff
    data[0x3C:0x40] = bytes(4)  # e_shnum, e_shstrndx
    elf = ElfFile(bytes(data))
    assert elf.sections() == []
    found = elf.function("wanted_third")
    assert found is not None and found.vaddr == expected(library)["wanted_third"][0]
    assert elf.build_id() and elf.needed() == ["libc.so.6"]
    assert {s.name for s in elf.matching("wanted_")} >= {"wanted_entry", "wanted_third"}


def test_sysv_hash_only() -> None:
    """A library without the GNU hash table is searched by its strings."""
    path = build(SOURCE, cflags=("-Wl,--hash-style=sysv", "-s"), shared=True)
    with ElfFile.open(str(path)) as elf:
        assert set(elf.functions(NAMES)) == {"wanted_entry", "wanted_entry_longer", "wanted_third"}


def test_mini_debug_info(program: Path, tmp_path: Path) -> None:
    """C71: names only in .gnu_debugdata."""
    names = tmp_path / "names"
    run("objcopy", "--strip-debug", program, names)
    run("xz", "-k", names)
    stripped = copy(program, tmp_path, "--strip-all", f"--add-section=.gnu_debugdata={names}.xz")
    truth = expected(program)
    with ElfFile.open(str(stripped)) as elf:
        symbol = elf.function("wanted_entry")
        assert symbol is not None and (symbol.vaddr, symbol.size) == truth["wanted_entry"]
        assert symbol.source == ".gnu_debugdata"
        assert elf.vaddr_to_offset(symbol.vaddr) is not None


def test_bad_mini_debug_info_hides_nothing(library: Path, tmp_path: Path) -> None:
    """C71: rubbish, and a bomb that would unpack to 2 GB, cost nothing but their own names."""
    import lzma

    bomb = lzma.compress(bytes(1 << 20) * 200, preset=0)
    for contents in (b"not xz", bomb):
        junk = tmp_path / "junk"
        junk.write_bytes(contents)
        path = copy(library, tmp_path, "--strip-all", f"--add-section=.gnu_debugdata={junk}")
        with ElfFile.open(str(path)) as elf:
            assert elf.function("wanted_entry") is not None


def test_debug_link_must_belong(program: Path, tmp_path: Path) -> None:
    """C71: a debug file is used when its build id is ours and never otherwise."""
    debug = tmp_path / "victim.debug"
    run("objcopy", "--only-keep-debug", program, debug)
    stripped = copy(program, tmp_path, "--strip-all", f"--add-gnu-debuglink={debug}")
    with ElfFile.open(str(stripped)) as elf:
        assert debug_link(elf) is not None
        found = add_debug_file(elf, str(stripped))
        assert found is not None
        symbol = elf.function("wanted_entry")
        assert symbol is not None and symbol.vaddr == expected(program)["wanted_entry"][0]
        assert symbol.source == "debug file"
        found.close()
    other = build(SOURCE.replace("third %d", "other %d"), cflags=BUILD_ID)
    run("objcopy", "--only-keep-debug", other, debug)
    with ElfFile.open(str(stripped)) as elf:
        assert add_debug_file(elf, str(stripped)) is None


def test_debug_link_by_checksum(tmp_path: Path) -> None:
    """C71: without a build id, the checksum of the link decides."""
    program = build(SOURCE, cflags=("-Wl,--build-id=none",))
    debug = tmp_path / "victim.debug"
    run("objcopy", "--only-keep-debug", program, debug)
    stripped = copy(program, tmp_path, "--strip-all", f"--add-gnu-debuglink={debug}")
    with ElfFile.open(str(stripped)) as elf:
        assert elf.build_id() == ""
        found = add_debug_file(elf, str(stripped))
        assert found is not None and elf.function("wanted_third") is not None
        found.close()
    debug.write_bytes(debug.read_bytes() + b"\0")
    with ElfFile.open(str(stripped)) as elf:
        assert add_debug_file(elf, str(stripped)) is None


def test_debug_link_is_a_name_not_a_path(program: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.write_bytes(b"../../etc/passwd\0\0\0\0" + bytes(4))
    path = copy(program, tmp_path, f"--add-section=.gnu_debuglink={link}")
    with ElfFile.open(str(path)) as elf:
        assert debug_link(elf) is None


def test_compiler_clones() -> None:
    """C42: a clone is found only when asked for, marked, and .cold / .part never."""
    source = """
    __attribute__((cold,noinline)) void bad(int);
    void bad(int a) { __builtin_trap(); (void)a; }
    __attribute__((noinline)) static int helper(int a, int b, int *p)
    { if (*p > 9) bad(a); return *p * b + 3; }
    int main(int argc, char **argv) { int x = argc; (void)argv; return helper(1, 7, &x) + helper(2, 7, &x); }
    """
    path = build(source)
    names = run("nm", path)
    assert "helper." in names and " helper\n" not in names, "this compiler made no clone to look for"
    with ElfFile.open(str(path)) as elf:
        assert elf.functions(["helper"]) == {}
        found = elf.functions(["helper"], clones=True)["helper"]
        assert len(found) == 1 and not found[0].exact
        assert found[0].name.startswith("helper.") and "cold" not in found[0].name
        line = next(row for row in names.splitlines() if row.endswith(f" {found[0].name}"))
        assert int(line.split()[0], 16) == found[0].vaddr
        assert all(".cold" not in s.name for s in elf.matching("helper"))


def test_same_name_twice(tmp_path: Path) -> None:
    """C03: two static functions of one name are two functions; a global one hides local ones."""
    parts = []
    for number in (1, 2):
        source = tmp_path / f"p{number}.c"
        source.write_text(
            f"__attribute__((noinline,used)) static int twin(int a) {{ return a * {number} + {number}; }}\n"
            f"int use{number}(int a) {{ return twin(a); }}\n"
        )
        parts.append(str(source))
    out = tmp_path / "twins.so"
    run("gcc", "-O1", "-shared", "-fPIC", "-o", out, *parts)
    with ElfFile.open(str(out)) as elf:
        assert len({s.vaddr for s in elf.functions(["twin"])["twin"]}) == 2


def test_addresses_both_ways(library: Path) -> None:
    with ElfFile.open(str(library)) as elf, open(library, "rb") as file:
        for segment in ELFFile(file).iter_segments("PT_LOAD"):
            for delta in (0, segment["p_filesz"] - 1):
                vaddr, offset = segment["p_vaddr"] + delta, segment["p_offset"] + delta
                assert elf.vaddr_to_offset(vaddr) == offset
            assert elf.vaddr_to_offset(segment["p_vaddr"] + segment["p_memsz"] + (1 << 30)) is None
        symbol = elf.function("wanted_entry")
        assert symbol is not None
        assert elf.offset_to_vaddr(elf.vaddr_to_offset(symbol.vaddr) or 0) == symbol.vaddr
        assert len(elf.read(symbol.vaddr, symbol.size)) == symbol.size
        assert elf.read(1 << 60, 8) == b"" and elf.read_string(1 << 60) is None


@pytest.mark.parametrize("flags", [(), ("-Wl,-z,pack-relative-relocs",)], ids=["RELA", "RELR"])
def test_relative_relocations(flags: tuple[str, ...]) -> None:
    """The pointers of the table of words, in both encodings, read the words back."""
    try:
        path = build(SOURCE, cflags=flags, shared=True)
    except RuntimeError:
        pytest.skip("this linker cannot write RELR")
    with ElfFile.open(str(path)) as elf:
        pairs = dict(elf.relative_relocations())
        table = elf.data("words")
        assert table is not None
        assert [elf.read_string(pairs[table.vaddr + 8 * i]) for i in range(4)] == [
            b"NONE",
            b"DUP",
            b"ADD",
            b"SUB",
        ]
        if not flags:
            with open(path, "rb") as file:
                section = ELFFile(file).get_section_by_name(".rela.dyn")
                assert isinstance(section, RelocationSection)
                truth = {
                    r["r_offset"]: r["r_addend"] for r in section.iter_relocations() if r["r_info_type"] == 8
                }
            assert pairs == truth


def test_relr_words() -> None:
    """The example of the ABI draft's encoding: an address, then bitmaps of 63 words each."""
    words = [0x1000, (0b101 << 1) | 1, (1 << 63) | 1, 0x9000]
    found = list(relr_addresses(struct.pack("<4Q", *words)))
    assert found == [0x1000, 0x1008, 0x1018, 0x1008 + 63 * 8 + 62 * 8, 0x9000]


def test_build_id_and_machine(program: Path) -> None:
    text = run("readelf", "-n", program)
    with ElfFile.open(str(program)) as elf:
        assert f"Build ID: {elf.build_id()}" in text
        assert elf.machine() == "x86_64" and not elf.is_go()


def test_arm64_library() -> None:
    if not shutil.which("aarch64-linux-gnu-gcc"):
        pytest.skip("no arm64 cross compiler here")
    path = build(SOURCE, shared=True, cc="aarch64-linux-gnu-gcc", cflags=("-nostdlib",))
    with ElfFile.open(str(path)) as elf:
        assert elf.machine() == "aarch64" and elf.function("wanted_entry") is not None
        table = elf.data("words")
        assert table is not None and elf.read_string(dict(elf.relative_relocations())[table.vaddr]) == b"NONE"


def test_versioned_symbols(tmp_path: Path) -> None:
    """A default version is written behind the name in .symtab (``name@@V1``)."""
    script = tmp_path / "v.map"
    script.write_text("V1 { global: wanted_*; local: *; };\n")
    path = build(SOURCE, shared=True, cflags=(f"-Wl,--version-script={script}",))
    with ElfFile.open(str(path)) as elf:
        assert set(elf.functions(NAMES)) == {"wanted_entry", "wanted_entry_longer", "wanted_third"}
        assert {s.name for s in elf.matching("wanted_")} == {
            "wanted_entry",
            "wanted_entry_longer",
            "wanted_third",
        }


# -- bad files ------------------------------------------------------------------------


def everything(data: bytes) -> None:
    """Use every part of the reader; only ElfError may come out."""
    try:
        elf = ElfFile(data, "hostile")
        elf.functions(NAMES, clones=True)
        elf.matching("wanted_")
        elf.data("wanted_object")
        for number, _ in enumerate(elf.symbols()):
            if number > 2000:
                break
        for number, _ in enumerate(elf.relative_relocations()):
            if number > 2000:
                break
        elf.build_id(), elf.needed(), elf.soname(), elf.is_go(), debug_link(elf)
        for segment in elf.segments:
            elf.offset_to_vaddr(segment.offset)
            elf.read(segment.vaddr, 64)
    except ElfError as error:
        assert "\n" not in str(error) and len(str(error)) < 500


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=4096))
def test_any_bytes(data: bytes) -> None:
    everything(data)
    everything(b"\x7fELF\x02\x01\x01" + data)


FIELD = st.sampled_from(
    [0, 1, 7, 0xFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 1 << 40, (1 << 63) - 1, (1 << 64) - 1]
)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_mutated_library(library: Path, data: st.DataObject) -> None:
    """Headers and tables of a real library with numbers replaced by wild ones."""
    raw = bytearray(library.read_bytes())
    shoff = struct.unpack_from("<Q", raw, 0x28)[0]
    places = [*range(0x10, 64, 2), *range(64, 64 + 56 * 12, 4), *range(shoff, len(raw) - 8, 4)]
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.sampled_from(places))
        width = data.draw(st.sampled_from([2, 4, 8]))
        value = data.draw(FIELD) & ((1 << (8 * width)) - 1)
        raw[at : at + width] = value.to_bytes(width, "little")
    everything(bytes(raw))


def test_random_flips_and_cuts(library: Path) -> None:
    raw = library.read_bytes()
    rng = random.Random(7)
    start = time.process_time()
    for _ in range(150):
        data = bytearray(raw)
        for _ in range(rng.choice([1, 8, 64, 512])):
            data[rng.randrange(len(data))] = rng.randrange(256)
        everything(bytes(data[: rng.choice([len(data), rng.randrange(len(data))])]))
    assert time.process_time() - start < 60


def test_hostile_sizes_cost_no_memory(tmp_path: Path) -> None:
    """A sparse file whose tables claim to be as large as the disk is searched within bounds."""
    path = tmp_path / "sparse"
    with open(path, "wb") as file:
        head = bytearray(64)
        head[:7] = b"\x7fELF\x02\x01\x01"
        struct.pack_into("<HHIQQQIHHHHHH", head, 16, 3, 62, 1, 0, 0, 64, 0, 64, 0, 0, 64, 3, 0)
        file.write(head)
        for kind, link in ((0, 0), (2, 2), (3, 0)):
            file.write(struct.pack("<IIQQQQIIQQ", 0, kind, 0, 0, 4096, 1 << 40, link, 0, 1, 24))
        file.truncate(1 << 41)
    code = (
        "import resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_AS, (300 << 20, 300 << 20))\n"
        "resource.setrlimit(resource.RLIMIT_CPU, (60, 60))\n"
        "from profinferd.agent.target.elf import ElfFile\n"
        "with ElfFile.open(sys.argv[1]) as elf: print(elf.functions(['wanted_entry'], clones=True))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == "{}", done.stderr


@pytest.mark.parametrize(
    ("contents", "why"),
    [
        (b"", "not an ELF file"),
        (b"#!/bin/sh\n", "not an ELF file"),
        (b"\x7fELF\x02\x01", "cut off"),
        (b"\x7fELF\x01\x01\x01" + bytes(64), "32-bit"),
        (b"\x7fELF\x02\x02\x01" + bytes(64), "big-endian"),
        (b"\x7fELF\x02\x01\x01" + bytes(11) + b"\xf3\0" + bytes(50), "machine 243"),
    ],
)
def test_one_clear_line(contents: bytes, why: str) -> None:
    with pytest.raises(ElfError, match=why):
        ElfFile(contents, "lib\nx.so")


def test_not_a_regular_file(tmp_path: Path) -> None:
    """A fifo where a library is expected is refused, not waited for."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, tmp_path / "absent", Path("/dev/zero"), Path("/proc/self/\0")):
        with pytest.raises(TargetError):
            ElfFile.open(str(path))


def test_hash_chain_without_an_end(library: Path) -> None:
    """A GNU hash chain whose last mark is removed ends all the same."""
    raw = bytearray(library.read_bytes())
    with open(library, "rb") as file:
        section = ELFFile(file).get_section_by_name(".gnu.hash")
        assert section is not None
        start, size = section["sh_offset"], section["sh_size"]
    buckets, _, words, _ = struct.unpack_from("<IIII", raw, start)
    for at in range(start + 16 + words * 8 + buckets * 4, start + size, 4):
        raw[at] &= 0xFE
    everything(bytes(raw))
