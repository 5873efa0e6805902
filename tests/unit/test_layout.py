# SPDX-License-Identifier: Apache-2.0
"""Which layout of ggml's structures a binary and a live graph have: recognised, or refused with a reason."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from profinferd.agent.errors import TargetError
from profinferd.agent.target.elf import ElfFile
from profinferd.agent.target.layout import KNOWN, Layout, LiveGraph, candidates, check_layout, choose_layout
from profinferd.agent.target.layout_accessors import facts_of
from profinferd.agent.target.layout_dwarf import from_dwarf

from ..victims.build import build

OPS, TYPES = 14, 4
OLD = ["-DBACKEND", "-DGRAD", "-DCOUNTERS"]
VERSIONS: dict[str, list[str]] = {
    "ggml 2026-04": ["-DUID"],
    "ggml 2024-11": [],
    "ggml 2024-06": ["-DBACKEND", "-DGRAD", "-DNO_PADDING"],
    "ggml 2024-02": OLD,
    "ggml 2023-12-22": [*OLD, "-DNO_FLAGS"],
    "ggml 2023-12-13": [*OLD, "-DNO_FLAGS", "-DN_DIMS"],
    "ggml 2023-11": [*OLD, "-DNO_FLAGS", "-DN_DIMS", "-DN_SRC=6"],
}
NAMES = [(), ("-DNAME_SIZE=128",)]
CASES = [(version, [*flags, *names]) for version, flags in VERSIONS.items() for names in NAMES]


def program(flags: list[str], *more: str) -> Path:
    return build("layout.c", cflags=["-rdynamic", *flags, *more])


def truth(path: Path) -> tuple[dict[str, int], LiveGraph]:
    """What the compiler says, and the memory of the graph that the program built."""
    offsets: dict[str, int] = {}
    graph = b""
    nodes: dict[int, tuple[int, bytes]] = {}
    for line in subprocess.run([path], capture_output=True, text=True, check=True).stdout.splitlines():
        word, *rest = line.split()
        if word == "graph":
            graph = bytes.fromhex(rest[0])
        elif word == "node":
            nodes[int(rest[0])] = (int(rest[1]), bytes.fromhex(rest[2]))
        else:
            offsets[word] = int(rest[0])
    return offsets, LiveGraph(graph, nodes)


def told(layout: Layout) -> dict[str, int]:
    return {name: value for name, value in layout.offsets().items() if value is not None}


def alike(layout: Layout) -> tuple[object, ...]:
    """What two layouts differ in besides the fields that came and went without moving another."""
    return tuple(value for name, value in layout.offsets().items() if name not in ("g_uid", "t_flags"))


@pytest.mark.parametrize(("version", "flags"), CASES)
def test_every_known_version(version: str, flags: list[str]) -> None:
    """C12: of all known layouts only the one that the program has (and its equals) fits its graph."""
    offsets, live = truth(program(flags))
    [layout] = [k for k in KNOWN if k.name.partition(",")[0] == version and told(k) == offsets]
    fitting = [k for k in KNOWN if check_layout(k, live, OPS, TYPES) is None]
    assert layout in fitting
    assert {alike(k) for k in fitting} == {alike(layout)}


@pytest.mark.parametrize(("version", "flags"), CASES)
def test_file_and_graph_together(version: str, flags: list[str]) -> None:
    """C12: stripped, the accessors leave one version; the choice reads exactly what the compiler says."""
    path = build("layout.c", cflags=["-rdynamic", *flags], strip=True)
    offsets, live = truth(path)
    found = candidates(ElfFile.open(str(path)))
    layout = choose_layout(found, live, OPS, TYPES)
    assert layout.source == "accessors"
    assert told(layout) | {"t_flags": 0} == offsets | {"t_flags": 0}
    assert layout.name.partition(",")[0] in {version, "ggml 2024-02" if version == "ggml 2023-12-22" else ""}


@pytest.mark.parametrize(
    "flags",
    [
        ["-DUID"],
        OLD,
        ["-DNAME_SIZE=128"],
        ["-DEXTRA_POINTER", "-DNAME_SIZE=96"],
        ["-O1"],
        ["-O3"],
        ["-Os"],
        ["-fcf-protection=full"],
    ],
)
def test_accessors(flags: list[str]) -> None:
    path = program(flags)
    offsets, _ = truth(path)
    facts = facts_of(ElfFile.open(str(path)))
    assert facts.pop("g_uid") == offsets.get("g_uid", 0)
    assert facts.items() <= offsets.items()
    assert {
        "t_data",
        "t_name",
        "t_ne",
        "t_op",
        "t_op_params",
        "t_flags",
        "g_nodes",
        "t_view_src",
    } <= facts.keys()


@pytest.mark.parametrize("compiler", ["gcc", "clang-14", "aarch64-linux-gnu-gcc"])
def test_accessors_of_other_compilers(compiler: str) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    flags = ["-rdynamic", "-DUID", "-mbranch-protection=standard" if "aarch64" in compiler else "-DUID"]
    path = build("layout.c", cflags=flags, cc=compiler)
    offsets, _ = truth(program(["-DUID"]))
    facts = facts_of(ElfFile.open(str(path)))
    assert facts.pop("g_uid") == offsets["g_uid"]
    assert facts.items() <= offsets.items()
    assert {"t_data", "t_name", "t_ne", "t_nb", "t_op", "t_op_params", "t_flags", "g_nodes"} <= facts.keys()


@pytest.mark.parametrize(
    "flags", [["-DEXTRA_POINTER"], ["-DNAME_SIZE=96"], ["-DEXTRA_POINTER", "-DNAME_SIZE=128"]]
)
def test_a_fork(flags: list[str]) -> None:
    """C12: no public version: the known ones are refused; the accessors of the file correct one of them."""
    path = build("layout.c", cflags=["-rdynamic", *flags], strip=True)
    offsets, live = truth(path)
    for known in KNOWN:
        assert check_layout(known, live, OPS, TYPES) is not None, known.name
    with pytest.raises(TargetError, match="does not fit"):
        choose_layout(KNOWN, live, OPS, TYPES)
    layout = choose_layout(candidates(ElfFile.open(str(path))), live, OPS, TYPES)
    assert told(layout) == offsets


@pytest.mark.parametrize("flags", [["-DUID"], [], OLD, ["-DEXTRA_POINTER"], ["-DNAME_SIZE=128"]])
@pytest.mark.parametrize(
    ("compiler", "debug"),
    [("gcc", "-g"), ("gcc", "-gdwarf-4"), ("clang-14", "-g"), ("clang-14", "-gdwarf-4")],
)
def test_debug_information(flags: list[str], compiler: str, debug: str, tmp_path: Path) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    # clang's unit is found by the name of its source, which in ggml is this one.
    source = tmp_path / "ggml.c"
    source.write_text((Path(__file__).parents[1] / "victims" / "layout.c").read_text())
    path = tmp_path / "debug"
    subprocess.run([compiler, "-O2", debug, *flags, "-o", path, source], check=True)
    offsets, live = truth(path)
    layout = from_dwarf(ElfFile.open(str(path)))
    assert layout is not None
    assert told(layout) == offsets
    assert check_layout(layout, live, OPS, TYPES) is None


def test_no_debug_information() -> None:
    assert from_dwarf(ElfFile.open(str(program([])))) is None
    assert from_dwarf(ElfFile.open(str(build("sites.c", cflags=["-g"])))) is None


def test_damaged_debug_information(tmp_path: Path) -> None:
    """Hostile debug information: none, and no exception, whatever byte is wrong."""
    path = build("layout.c", cflags=["-g", "-rdynamic"])
    whole = path.read_bytes()
    elf = ElfFile.open(str(path))
    for name in (".debug_info", ".debug_abbrev", ".debug_aranges", ".debug_str"):
        section = elf.section(name)
        assert section is not None
        for step in range(0, section.size, max(1, section.size // 60)):
            for value in (0, 0x7F, 0xFF):
                data = bytearray(whole)
                data[section.offset + step : section.offset + step + 3] = bytes([value]) * 3
                layout = from_dwarf(ElfFile(bytes(data)))
                assert layout is None or layout.source == "dwarf"


def test_array_of_tensors() -> None:
    """Tensors need not lie in an arena."""
    offsets, live = truth(program(["-DSTATIC_ARRAY"]))
    assert told(choose_layout([k for k in KNOWN if k.g_uid is None], live, OPS, TYPES)) == offsets
    offsets, live = truth(program(["-DSTATIC_ARRAY", "-DNAME_SIZE=128"]))
    assert told(choose_layout([k for k in KNOWN if k.g_uid is None], live, OPS, TYPES)) == offsets


def test_a_file_that_tells_nothing() -> None:
    """Without accessors every known layout without a graph number is a candidate."""
    found = candidates(ElfFile.open(str(build("int main(void) { return 0; }"))))
    assert found == [k for k in KNOWN if k.g_uid is None]


def test_contradicting_accessors() -> None:
    """A file whose accessors fit no known version and do not suffice for another has no candidate."""
    text = (
        "struct t { char a[40]; void *d; };\n"
        "void *ggml_get_data(struct t *t) { return t->d; }\nint main(void) { return 0; }"
    )
    found = candidates(ElfFile.open(str(build(text, cflags=["-rdynamic"]))))
    assert found == []
    with pytest.raises(TargetError, match="no layout"):
        choose_layout(found, LiveGraph(b"", {}), None, None)


def test_sources_of_layouts_differ_only_in_source() -> None:
    for layout in KNOWN:
        assert replace(layout, source="dwarf").offsets() == layout.offsets()
