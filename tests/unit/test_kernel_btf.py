# SPDX-License-Identifier: Apache-2.0
"""BTF of a compiled object against what the compiler itself says about the same header."""

from __future__ import annotations

import re
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profinferd.agent.kernel import btf
from profinferd.probes import build as probes_build
from tests.victims.build import build

PROGRAM = """
#include "kernel.h"
#include "events.h"
char LICENSE[] __attribute__((section("license"))) = "Dual BSD/GPL";
enum signs { BELOW = -2, ABOVE = 5 };
typedef const struct node_desc described;
struct inner { __u16 a; char text[6]; };
struct outer {
	__u8 first;
	struct inner in[3];
	enum signs sign;
	void *pointer;
	union { __u32 low; __u64 whole; } both;
	__s64 grid[2][3];
	volatile _Bool yes;
};
struct bits { __u32 one : 1; __u32 rest : 31; };
struct outer outer;
struct bits bits;
described *node;
struct event *event;
struct op_hit *op_hit;
struct raw_chunk *raw_chunk;
enum event_flag event_flag;
enum op_flag op_flag;
enum stat stats_used;
"""


@pytest.fixture(scope="module")
def types(tmp_path_factory: pytest.TempPathFactory) -> btf.Types:
    folder = tmp_path_factory.mktemp("btf")
    source = folder / "types.bpf.c"
    source.write_text(PROGRAM)
    return btf.load_types(probes_build.compile_object(source, "x86_64", folder / "types.o"))


def sizes_from_compiler(fields: dict[str, list[str]]) -> dict[str, list[tuple[str, int, int]]]:
    """(field, offset, size) of structures of events.h as gcc lays them out."""
    lines = [
        f'printf("{name} {field} %zu %zu\\n", '
        f"offsetof(struct {name}, {field}), sizeof(((struct {name} *)0)->{field}));"
        for name, names in fields.items()
        for field in names
    ]
    text = (
        "#include <linux/types.h>\n#include <stdio.h>\n#include <stddef.h>\n#include \"events.h\"\n"
        + "int main(void) {\n" + "\n".join(lines) + "\nreturn 0; }\n"
    )  # fmt: skip
    program = build(text, cflags=[f"-I{probes_build.HERE}"], name="layouts")
    found: dict[str, list[tuple[str, int, int]]] = {}
    for line in subprocess.run([program], capture_output=True, text=True, check=True).stdout.splitlines():
        name, field, offset, size = line.split()
        found.setdefault(name, []).append((field, int(offset), int(size)))
    return found


def test_records_lie_as_the_compiler_lays_them(types: btf.Types) -> None:
    """events.h is written once: every field of every record is where gcc puts it too."""
    fields = {
        name: list(types.dtype(name).names or ()) for name in ("event", "op_hit", "node_desc", "raw_chunk")
    }
    assert len(fields["event"]) > 20
    for name, rows in sizes_from_compiler(fields).items():
        known = types.dtype(name).fields
        assert known is not None
        assert [(field, known[field][1], known[field][0].itemsize) for field in fields[name]] == rows


def test_values_read_through_the_type(types: btf.Types) -> None:
    raw = struct.pack("<QII", 7, 8, 0x80000009)
    hit = np.frombuffer(raw, types.dtype("op_hit"))[0]
    assert (hit["ts"], hit["seq"], hit["node"]) == (7, 8, 0x80000009)


def test_kinds_of_field(types: btf.Types) -> None:
    outer = types.dtype("outer")
    fields = outer.fields
    assert fields is not None
    assert outer.itemsize % 8 == 0
    assert fields["in"][0].shape == (3,)
    assert fields["in"][0].base == types.dtype("inner")
    inner = types.dtype("inner").fields
    assert inner is not None and inner["text"][0] == np.dtype("S6")
    assert fields["pointer"][0] == np.dtype("u8")
    assert fields["grid"][0].shape == (2, 3) or fields["grid"][0].base.shape == (3,)
    assert fields["both"][0].itemsize == 8
    assert fields["yes"][0].itemsize == 1
    assert types.dtype("described") == types.dtype("node_desc"), "a typedef is what it names"


def test_constants_are_those_of_the_header(types: btf.Types) -> None:
    text = (probes_build.HERE / "events.h").read_text()
    flags = {name: 1 << int(bit) for name, bit in re.findall(r"\b(EF_\w+) = 1 << (\d+)", text)}
    assert flags and types.enum("event_flag") == flags
    assert types.enum("op_flag")["OP_FUSED"] == 1 << 31, "bit 31 is a flag, not a sign"
    assert types.enum("stat")["ST_COUNT"] == len(types.enum("stat")) - 1
    assert types.constants()["EF_KNOWN"] == flags["EF_KNOWN"]


def test_what_is_not_there_is_an_error(types: btf.Types) -> None:
    with pytest.raises(btf.BtfError, match="struct nonesuch"):
        types.dtype("nonesuch")
    with pytest.raises(btf.BtfError, match="enum nonesuch"):
        types.enum("nonesuch")
    with pytest.raises(btf.BtfError, match="bit field"):
        types.dtype("bits")


@pytest.mark.parametrize(
    "content", [b"", b"\x7fELF", b"\x7fELF\x02\x01" + bytes(58), b"\x7fELF\x02\x01" + b"\xff" * 90]
)
def test_files_that_are_no_objects(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.o"
    path.write_bytes(content)
    with pytest.raises(btf.BtfError):
        btf.load_types(path)


def test_file_without_btf() -> None:
    with pytest.raises(btf.BtfError, match=r"no section \.BTF"):
        btf.load_types(build("int main(void) { return 0; }"))


def small_btf() -> bytes:
    """int, an array of it, a struct with both, an enum: by hand, as the format says."""
    strings = b"\0int\0box\0n\0row\0kind\0ONE\0TWO\0"
    at = {
        text: strings.index(b"\0" + text.encode() + b"\0") + 1
        for text in ("int", "box", "n", "row", "kind", "ONE", "TWO")
    }
    types = struct.pack("<IIII", at["int"], 1 << 24, 4, 1 << 24 | 32)
    types += struct.pack("<IIIIII", 0, 3 << 24, 0, 1, 1, 5)
    types += struct.pack("<III", at["box"], 4 << 24 | 2, 24)
    types += struct.pack("<IIIIII", at["n"], 1, 0, at["row"], 2, 32)
    types += struct.pack("<III", at["kind"], 6 << 24 | 2, 4)
    types += struct.pack("<IIII", at["ONE"], 1, at["TWO"], 2)
    header = struct.pack("<HBBIIIII", 0xEB9F, 1, 0, 24, 0, len(types), len(types), len(strings))
    return header + types + strings


def test_btf_by_hand() -> None:
    types = btf.Types(small_btf())
    assert types.dtype("box") == np.dtype(
        {"names": ["n", "row"], "formats": ["<i4", ("<i4", (5,))], "offsets": [0, 4], "itemsize": 24}
    )
    assert types.enum("kind") == {"ONE": 1, "TWO": 2}


@settings(max_examples=300)
@given(st.integers(0, len(small_btf()) - 1), st.binary(min_size=1, max_size=6), st.booleans())
def test_damaged_btf_is_an_error_or_another_type(at: int, damage: bytes, cut: bool) -> None:
    """Never another exception, whatever the bytes."""
    raw = small_btf()
    damaged = raw[:at] if cut else raw[:at] + damage + raw[at + len(damage) :]
    try:
        types = btf.Types(damaged)
        for name in types.structs():
            types.dtype(name)
        types.constants()
    except btf.BtfError:
        pass
