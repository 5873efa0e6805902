# SPDX-License-Identifier: Apache-2.0
"""Stock builds as they come from the package index: what is found in them, and how fast."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from profinferd.agent.target.catalogue import load_catalogue
from profinferd.agent.target.elf import ElfFile
from profinferd.agent.target.facts import TargetInfo
from profinferd.agent.target.inspect import inspect_target
from tests.runtime.stub_engine import quick

from .fetch import Engines
from .processes import with_parent
from .servers import Options, Server

HOOKS = [
    h.symbol
    for e in load_catalogue().engines
    for h in (*e.hooks, *(h for s in e.sources for h in s.hooks))
    if h.symbol is not None
]


def files_of(engines: Engines) -> list[Path]:
    skulk = [
        engines.skulk_bin / f"lib{name}.so.0" for name in ("llama", "ggml-base", "ggml-cpu", "ggml-vulkan")
    ]
    pysync = [engines.pysync_libraries / f"lib{name}.so.0" for name in ("llama", "ggml-base", "ggml-cpu")]
    return [*skulk, *pysync, engines.xllamacpp_module]


def by_nm(path: Path) -> dict[str, tuple[int, int]]:
    """Exported functions and their sizes as binutils sees them."""
    text = subprocess.run(
        ["nm", "-DS", "--defined-only", path], check=True, capture_output=True, text=True
    ).stdout
    rows = [line.split() for line in text.splitlines()]
    return {
        r[3].partition("@")[0]: (int(r[0], 16), int(r[1], 16)) for r in rows if len(r) == 4 and r[2] in "Tt"
    }


def test_every_function_where_binutils_finds_it(engines: Engines) -> None:
    """All stock files: the same functions, addresses and sizes; 48,000 symbols in well under 60 ms of
    CPU time (4 ms on the machine that this was written on)."""
    for path in files_of(engines):
        truth = by_nm(path)
        taken = []
        for _ in range(3):
            start = time.thread_time()
            with ElfFile.open(str(path)) as elf:
                found = elf.functions(HOOKS, clones=True)
            taken.append(time.thread_time() - start)
        seen = {name: [(s.vaddr, s.size) for s in symbols if s.exact] for name, symbols in found.items()}
        assert seen == {name: [truth[name]] for name in HOOKS if name in truth}, path.name
        assert min(taken) < 0.06, f"{path.name}: {[round(1000 * t, 1) for t in taken]} ms"


@contextmanager
def importing(engines: Engines, module: str) -> Iterator[int]:
    """A Python process that has imported it."""
    code = f"import {module}, sys; print('ready', flush=True); sys.stdin.read()"
    child = subprocess.Popen(
        with_parent([str(engines.python), "-c", code]), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        yield child.pid
    finally:
        child.kill()
        child.communicate()


class WithoutModel(Server):
    """Up, with all its libraries and no model."""

    def command(self) -> tuple[list[str], dict[str, str]]:
        binary = self.options.model
        return [str(binary), "--host", "127.0.0.1", "--port", str(self.port)], {
            "LD_LIBRARY_PATH": str(binary.parent)
        }


def check(info: TargetInfo) -> None:
    assert info.levels == ("call", "graph", "op") and info.op_source == "dispatch" and info.complete
    assert not info.failures and not [r for f in info.files for r in f.refused]
    hooks = [h for f in info.files for h in f.hooks]
    assert all(h.site.emulated for h in hooks), "a single-stepped site costs 20 us a hit"
    assert all(h.ret for h in hooks if h.level in ("call", "graph"))
    for file in info.files:
        assert file.tables is not None and len(file.tables.ops) > 90 and file.tables.types
        assert file.layouts
        assert {"MUL_MAT", "RMS_NORM", "FLASH_ATTN_EXT"} <= set(file.tables.ops)
    quick(lambda: inspect_target(info.process))


def test_stripped_shared_server(engines: Engines) -> None:
    """C01: a server without a model has all its libraries already; only exported names are left."""
    nothing = Options(engines.skulk_bin / "llama-server")
    with WithoutModel(nothing, "skulk") as server, inspect_target(server.pid) as info:
        roles = {os.path.basename(f.path).partition(".")[0]: f.role for f in info.files}
        assert roles == {"libllama": "call", "libggml-base": "graph", "libggml-cpu": "graph+barrier+op"}
        assert {f.symbols for f in info.files} == {".dynsym"}
        check(info)


def test_static_extension_in_python(engines: Engines) -> None:
    """C17: one static module of 100 MB inside a Python process, found by what it holds."""
    with importing(engines, "xllamacpp") as pid, inspect_target(pid) as info:
        assert [f.role for f in info.files] == ["call+graph+barrier+op"]
        assert "llama_process" in {h.symbol for h in info.files[0].hooks}
        check(info)
