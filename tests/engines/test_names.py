# SPDX-License-Identifier: Apache-2.0
"""Names and layouts out of stock binaries, against their own functions and the gguf package."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import gguf
import pytest

from profinferd.agent.target.elf import ElfFile
from profinferd.agent.target.layout import candidates
from profinferd.agent.target.names import read_tables

from . import oldlibc, pysync
from .fetch import Engines

# The test may load the library; the profiler never does. Bad numbers read beyond the tables:
# only numbers that the tables have are asked for.
_ASK = """
import ctypes, json, sys
substitutes = ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL)
lib = ctypes.CDLL(sys.argv[2])
counts = json.loads(sys.argv[3])
def names(function, count):
    function = getattr(lib, function); function.restype = ctypes.c_char_p
    return [(function(i) or b"").decode() for i in range(count)]
def numbers(function, count):
    function = getattr(lib, function); function.restype = ctypes.c_size_t
    return [function(i) & 0xffffffff for i in range(count)]
print(json.dumps([names("ggml_op_name", counts[0]), names("ggml_type_name", counts[1]),
    numbers("ggml_blck_size", counts[1]), numbers("ggml_type_size", counts[1]),
    names("ggml_unary_op_name", counts[2]), names("ggml_glu_op_name", counts[3])]))
"""


@dataclass
class Work:
    """How many functions were called and left, which is the same on every machine."""

    calls: int = 0

    def note(self, frame: FrameType, event: str, argument: object) -> None:
        self.calls += 1


@contextmanager
def working() -> Iterator[Work]:
    importlib.import_module("capstone")  # the first use would import the disassembler
    work = Work()
    sys.setprofile(work.note)
    try:
        yield work
    finally:
        sys.setprofile(None)


BUILDS = ["skulk", "pysync", "pysync stripped", "xllamacpp"]


def library(engines: Engines, which: str) -> Path:
    if which == "xllamacpp":
        return engines.xllamacpp_module
    if which == "skulk":
        return engines.skulk_bin / "libggml-base.so.0"
    return pysync.libraries(engines, stripped=which != "pysync") / "libggml-base.so.0"


@pytest.mark.parametrize("which", BUILDS)
def test_names_of_stock_builds(engines: Engines, which: str) -> None:
    """C13: every name and size, as the library's own functions give them, with little work (20 ms for the
    largest, on the machine that this was written on)."""
    path = library(engines, which)
    elf = ElfFile.open(str(path))
    with working() as work:
        tables = read_tables(elf)
    assert work.calls < 500_000
    assert tables is not None
    assert tables.types is not None
    counts = [len(tables.ops), len(tables.types), len(tables.unary), len(tables.glu)]
    command = [str(engines.python), "-c", _ASK, str(oldlibc.substitutes()), str(path), json.dumps(counts)]
    truth = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert truth[0] == list(tables.ops)
    assert truth[1] == [t.name for t in tables.types]
    assert truth[2] == [t.block_size for t in tables.types]
    assert truth[3] == [t.type_size for t in tables.types]
    assert truth[4:] == [list(tables.unary), list(tables.glu)]


@pytest.mark.parametrize("which", BUILDS)
def test_types_are_those_of_the_file_format(engines: Engines, which: str) -> None:
    """The numbers of types are those of the GGUF format (Q8_1, which no file has, apart)."""
    tables = read_tables(ElfFile.open(str(library(engines, which))))
    assert tables is not None
    for quant, sizes in gguf.GGML_QUANT_SIZES.items():
        if quant.name == "Q8_1":
            continue
        traits = tables.traits(int(quant))
        assert traits is not None, quant
        assert (traits.name.lower(), traits.block_size, traits.type_size) == (quant.name.lower(), *sizes)


def test_number_of_operators(engines: Engines) -> None:
    """Where the symbol of the table exists its size says how many operators there are."""
    path = library(engines, "pysync")
    listed = subprocess.run(["nm", "-S", str(path)], capture_output=True, text=True, check=True).stdout
    [size] = [int(line.split()[1], 16) for line in listed.splitlines() if line.endswith(" GGML_OP_NAME")]
    tables = read_tables(ElfFile.open(str(path)))
    assert tables is not None
    assert len(tables.ops) == size // 8


# Offsets are asked of the library too: it is given memory of ours and says where in it a field is.
_ASK_LAYOUT = """
import ctypes, json, sys
substitutes = ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL)
lib = ctypes.CDLL(sys.argv[2])
memory = (ctypes.c_uint64 * 128)(*[(8 * n) | (1 << 40) for n in range(128)])
lib.ggml_get_data.restype = lib.ggml_graph_nodes.restype = lib.ggml_get_name.restype = ctypes.c_void_p
lib.ggml_graph_n_nodes.restype = ctypes.c_uint32
print(json.dumps({
    "t_data": lib.ggml_get_data(memory) & 0xffff,
    "g_nodes": lib.ggml_graph_nodes(memory) & 0xffff,
    "t_name": lib.ggml_get_name(memory) - ctypes.addressof(memory),
    "t_size": lib.ggml_tensor_overhead() - 32,
}))
"""


@pytest.mark.parametrize("which", BUILDS)
def test_layout_of_stock_builds(engines: Engines, which: str) -> None:
    """C12: the accessors leave one layout (with and without the graph's number), and the library agrees."""
    path = library(engines, which)
    elf = ElfFile.open(str(path))
    with working() as work:
        found = candidates(elf)
    assert work.calls < 50_000
    command = [str(engines.python), "-c", _ASK_LAYOUT, str(oldlibc.substitutes()), str(path)]
    truth = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert found
    assert {layout.source for layout in found} == {"accessors"}
    for layout in found:
        assert {name: layout.offsets()[name] for name in truth} == truth
    assert found[0].g_uid is not None
