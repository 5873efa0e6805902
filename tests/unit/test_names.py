# SPDX-License-Identifier: Apache-2.0
"""Operator and type names out of binaries of every kind, with numbers that no other build has."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profinferd.agent.target.elf import ElfFile
from profinferd.agent.target.names import Tables, TypeTraits, read_tables
from profinferd.agent.target.pointers import Pointers

from ..victims.build import build

# 32 names make 256 bytes: compilers put the next table directly behind.
OPS = ["NONE", "DUP", "ADD", *[f"OP_{n}" for n in range(3, 30)], "MUL_MAT", "GLU"]
UNARY = ["ABS", "SGN", "NEG", "STEP"]
GLU = ["REGLU", "GEGLU", "SWIGLU", "SWIGLU_OAI"]
TYPES = [
    TypeTraits("f32", 1, 4),
    TypeTraits("f16", 1, 2),
    TypeTraits("q4_0", 32, 18),
    TypeTraits("", 0, 0),
    TypeTraits("", 0, 0),
    TypeTraits("DEPRECATED", 0, 0),
    TypeTraits("DEPRECATED", 0, 0),
    TypeTraits("q4_K", 256, 144),
    TypeTraits("TYPE_X REMOVED, use Y", 0, 0),
    TypeTraits("mxfp4", 32, 17),
]
TODAY = (
    "struct traits { const char *name; long block, interleave; unsigned long size; char q; void *a, *b; };"
)
LATE_2023 = (
    "struct traits { const char *name; int block; unsigned long size; char q; void *a, *b, *c, *d; int e; };"
)
RELR = "-Wl,-z,pack-relative-relocs"
CROSS = "aarch64-linux-gnu-gcc"

KINDS: dict[str, tuple[str, Sequence[str], bool]] = {
    "shared": ("gcc", ["-shared", "-fPIC"], True),
    "shared, relr": ("gcc", ["-shared", "-fPIC", RELR], True),
    "shared, clang": ("clang-14", ["-shared", "-fPIC"], True),
    "shared, clang, tables of offsets": (
        "clang-14",
        ["-shared", "-fPIC", "-mllvm", "-inline-threshold=0"],
        True,
    ),
    "pie with symbols": ("gcc", ["-pie", "-fPIE"], False),
    "fixed address": ("gcc", ["-no-pie", "-fno-pie"], True),
    "static": ("gcc", ["-static", "-no-pie", "-fno-pie"], True),
    "static pie": ("gcc", ["-static-pie", "-fPIE"], True),
    "no separate code": ("gcc", ["-shared", "-fPIC", "-Wl,-z,noseparate-code"], True),
    "arm64": (CROSS, ["-shared", "-fPIC"], True),
    "arm64 fixed": (CROSS, ["-static", "-no-pie", "-fno-pie"], True),
}


def source(ops: list[str], traits: str = TODAY) -> str:
    def table(name: str, names: list[str]) -> str:
        listed = ", ".join(f'"{n}"' for n in names)
        return f"static const char *const {name}[] = {{ {listed} }};\n"

    entries = "".join(
        f'[{n}] = {{ .name = "{t.name}", .block = {t.block_size}, .size = {t.type_size}, .a = main }},\n'
        for n, t in enumerate(TYPES)
        if t.name
    )
    symbols = ["none", "x", "x+y", *[f"op{n}(x)" for n in range(3, len(ops))]]
    return (
        f"int main(void);\n{traits}\n"
        + table("OP_NAME", ops)
        + table("OP_SYMBOL", symbols)
        + table("UNARY_NAME", UNARY)
        + table("GLU_NAME", GLU)
        + f"static const struct traits TRAITS[] = {{ {entries} }};\n"
        + "const char *op_name(int i) { return OP_NAME[i]; }\n"
        + "const char *op_symbol(int i) { return OP_SYMBOL[i]; }\n"
        + "const char *unary_name(int i) { return UNARY_NAME[i]; }\n"
        + "const char *glu(int i) { return GLU_NAME[i]; }\n"
        + "const struct traits *traits(int i) { return &TRAITS[i]; }\n"
        # Longer texts with the same tail: the linker stores "NONE" inside "X_NONE".
        + 'const char *tails(int i) { return i ? "GRAMMAR_NONE" : "CONV_ADD"; }\nconst char *none = "NONE";\n'
        + "int main(void) { return op_name(1)[0] + tails(1)[0] + traits(1)->block + glu(0)[0]\n"
        + "+ unary_name(0)[0] + op_symbol(0)[0]; }\n"
    )


def tables_of(text: str, kind: str) -> Tables | None:
    cc, flags, strip = KINDS[kind]
    if shutil.which(cc) is None:
        pytest.skip(f"{cc} is not installed")
    return read_tables(ElfFile.open(str(build(text, cc=cc, cflags=flags, strip=strip, name="names"))))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("inserted", [False, True])
def test_every_kind_of_binary(kind: str, inserted: bool) -> None:
    """C13: one operator inserted at 10 moves those behind it; the tables say so, stripped or not."""
    ops = [*OPS[:10], "INSERTED", *OPS[10:]] if inserted else OPS
    tables = tables_of(source(ops), kind)
    assert tables is not None
    assert list(tables.ops) == ops
    assert list(tables.types or ()) == TYPES
    assert (list(tables.unary), list(tables.glu)) == (UNARY, GLU)
    assert tables.op_number("MUL_MAT") == ops.index("MUL_MAT")
    assert tables.op(10) == ops[10]


@pytest.mark.parametrize("kind", ["shared", "fixed address"])
def test_older_table_of_types(kind: str) -> None:
    """In 2023 the block size was an int and the size followed it directly."""
    tables = tables_of(source(OPS, LATE_2023), kind)
    assert tables is not None
    assert list(tables.types or ()) == TYPES


def test_unknown_numbers_are_numbers() -> None:
    """C13: never a neighbour's name."""
    tables = Tables(tuple(OPS), tuple(TYPES), tuple(UNARY), tuple(GLU))
    assert (tables.op(32), tables.op(-1), tables.op(1 << 31)) == ("op_32", "op_-1", f"op_{1 << 31}")
    assert (tables.type(7), tables.type(3), tables.type(99)) == ("q4_K", "type_3", "type_99")
    assert (tables.unary_op(1), tables.unary_op(9)) == ("SGN", "unary_9")
    assert (tables.glu_op(2), tables.glu_op(9)) == ("SWIGLU", "glu_9")
    assert tables.type_number("q4_K") == 7
    assert tables.type_number("q9_K") is None
    assert tables.op_number("ROPE") is None
    assert tables.traits(7) == TYPES[7]
    assert tables.traits(5) is tables.traits(99) is tables.traits(-1) is None
    assert Tables(tuple(OPS), None).type(0) == "type_0"


def test_a_program_without_the_tables() -> None:
    assert read_tables(ElfFile.open(str(build("int main(void) { return 0; }")))) is None
    few = source(OPS[:5])
    assert read_tables(ElfFile.open(str(build(few, cflags=["-shared", "-fPIC"])))) is None


def test_no_table_of_types() -> None:
    text = source(OPS).replace('"f32"', '"fp32"')
    tables = tables_of(text, "shared")
    assert tables is not None
    assert tables.types is None
    assert tables.op(1) == "DUP"


@given(st.lists(st.tuples(st.integers(0, 2048), st.binary(min_size=1, max_size=16)), max_size=12))
def test_damaged_files(patches: list[tuple[int, bytes]]) -> None:
    """Hostile tables: an answer or none, never an exception other than the reader's own, and bounded."""
    path = build(source(OPS), cflags=["-shared", "-fPIC"], strip=True, name="names")
    whole = bytearray(path.read_bytes())
    elf = ElfFile.open(str(path))
    word = next(iter(elf.relative_relocations()))[0]
    base = elf.vaddr_to_offset(word) or 0
    for at, patch in patches:
        whole[base + at : base + at + len(patch)] = patch
    began = time.process_time()
    tables = read_tables(ElfFile(bytes(whole)))
    assert time.process_time() - began < 10
    assert tables is None or len(tables.ops) >= 20


class Image:
    """A file at a fixed address whose only segment is ``data`` at 0x1000."""

    def __init__(self, data: bytes, relocations: dict[int, int] | None = None) -> None:
        self.data = data
        self.relocations = relocations or {}
        self.segments = [self]
        self.type, self.flags, self.offset, self.vaddr, self.filesz = 1, 4, 0, 0x1000, len(data)

    def read(self, vaddr: int, count: int) -> bytes:
        at = vaddr - self.vaddr
        return self.data[at : at + count] if 0 <= at < len(self.data) else b""

    def blocks(self, offset: int, count: int, overlap: int = 0):  # type: ignore[no-untyped-def]
        yield offset, self.data[offset : offset + count]

    def relative_relocations(self):  # type: ignore[no-untyped-def]
        yield from self.relocations.items()


@given(
    st.binary(max_size=64),
    st.dictionaries(st.integers(0, 1 << 64), st.integers(-(1 << 63), 1 << 64), max_size=5),
)
def test_wild_relocations(data: bytes, relocations: dict[int, int]) -> None:
    pointers = Pointers(Image(data, relocations))
    places = pointers.places({b"NONE", b""})
    for target in relocations.values():
        pointers.holders({target})
        pointers.text_at(target)
    assert set(places) == {b"NONE", b""}
