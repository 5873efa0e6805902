# SPDX-License-Identifier: Apache-2.0
"""Whatever files the engine is in, attached for real and held against the stub's log."""

from __future__ import annotations

import os
import random
import re
import subprocess
from pathlib import Path

import pytest

from profinferd.agent.attach import Attachment
from profinferd.agent.errors import TargetError

from .cases import (
    METHODS,
    Engine,
    Watch,
    check_ops,
    copied,
    engine,
    kernels,
    kernels_seen,
    library,
    links,
    nothing_left,
    plain,
    wait_for,
)


def works(stub: Engine, method: str = "auto") -> Watch:
    """Two calls are seen as they were."""
    with Watch(stub, method) as watch:
        replies = [watch.run("pos=0-3 out=3 us=50"), watch.run("pos=4 out=0 us=50")]
        snapshot = watch.snapshot()
        check_ops(snapshot, replies)
        assert (snapshot.tokens.prefill, snapshot.tokens.decode) == (4, 1)
        return watch


def settles(stub: Engine) -> Watch:
    """The layout is chosen by a first graph; what follows is seen as it is."""
    with Watch(stub) as watch:
        watch.run("context=1 pos=0-3 out=3 us=50")
        for _ in range(20):
            watch.drain()
        assert watch.attachment._layout is not None
        before = watch.snapshot()
        replies = [watch.run("moe pos=0-3 out=3 us=50"), watch.run("moe pos=4 out=0 us=50")]
        after = watch.snapshot()
        assert kernels_seen(after) - kernels_seen(before) == kernels(replies)
        roles = {op.role for op in after.ops}
        assert {"attn_q", "ffn_up_exps", "output", "output_norm", "token_embd"} <= roles, roles
        assert {op.dtype for op in after.ops if op.role == "attn_q" and op.op == "MUL_MAT"} == {"q4_0"}
        assert all(not graph.uncovered for graph in after.graphs)
        assert after.tokens.decode == 1 and after.latency_seconds.inter_token.count == 1
        return watch


@pytest.mark.parametrize("names", ["symtab", "dynsym", "none"])
def test_where_names_are(names: str) -> None:
    """C01: names in .symtab, in .dynsym alone, in neither: the last one says which build it is."""
    before = links()
    exported = names == "dynsym"
    path = engine(*([] if exported else ["-DHIDE"]), strip=names != "symtab", dynamic=exported)
    with Engine(path) as stub:
        if names != "none":
            watch = works(stub)
            assert watch.attachment.info.files[0].symbols == f".{names}"
            return
        notes = subprocess.run(["readelf", "-n", path], capture_output=True, text=True, check=True).stdout
        identity = re.search(r"Build ID: ([0-9a-f]+)", notes)
        assert identity is not None
        with pytest.raises(TargetError, match=f"no symbols: build-id {identity[1]}"):
            Attachment.open(stub.pid)
    nothing_left(before)


@pytest.mark.parametrize("method", METHODS)
def test_backend_loaded_after_attaching(method: str, tmp_path: Path) -> None:
    """C02: what computes is loaded after we attached: it is found, and seen from then on."""
    calls = engine("-DWITHOUT_CPU", "-DWITHOUT_DISPATCH", "-DWITHOUT_FUSED", strip=True)
    cpu = copied(library(name="libggml-cpu.so", strip=True), tmp_path)
    with Engine(calls) as stub, Watch(stub, method) as watch:
        watch.run("pos=0-3 out=3 us=50")
        before = watch.snapshot()
        assert before.ops == () and before.target.attach.op_source is None
        assert before.tokens.prefill == 4
        assert watch.order(f"load {cpu}")["loaded"]

        def found() -> bool:
            watch.drain()
            return watch.attachment.attached.op_source is not None

        wait_for(found, "the library to be looked into")
        assert watch.attachment.attached.op_source == "dispatch"
        replies = [watch.run("context=1 pos=0-3 out=3 us=50"), watch.run("context=1 pos=4 out=0 us=50")]
        snapshot = watch.snapshot()
        check_ops(snapshot, replies)
        assert snapshot.target.attach.op_source == "dispatch" and snapshot.target.attach.complete
        assert {os.path.basename(lib.path) for lib in snapshot.target.libraries} == {calls.name, cpu.name}
        assert (snapshot.tokens.prefill, snapshot.tokens.decode) == (8, 1)


def test_everything_but_calls_is_loaded_after_attaching(tmp_path: Path) -> None:
    """C02: of a program that is being linked the library of calls may be there first. What was opened
    for calls alone learns the names of operators and types with the library that has them."""
    without = ("CPU", "GRAPHS", "DISPATCH", "FUSED", "NAMES", "ACCESSORS")
    calls = engine(*(f"-DWITHOUT_{part}" for part in without), strip=True)
    rest = copied(library(name="libggml-all.so", strip=True), tmp_path)
    with Engine(calls) as stub, Watch(stub) as watch:
        assert watch.attachment.info.levels == ("call",) and watch.attachment.info.tables is None
        watch.run("pos=0-3 out=3 us=50")
        watch.drain()
        assert watch.order(f"load {rest}")["loaded"]

        def found() -> bool:
            watch.drain()
            return watch.attachment.attached.op_source is not None

        wait_for(found, "the library to be looked into")
        replies = [watch.run("context=1 pos=0-3 out=3 us=50"), watch.run("context=1 pos=4 out=0 us=50")]
        snapshot = watch.snapshot()
        check_ops(snapshot, replies)
        assert {"attn_q", "ffn_down"} <= {op.role for op in snapshot.ops}
        assert {op.dtype for op in snapshot.ops} <= {"f32", "f16", "q4_0", "q4_K", "i32"}
        assert (snapshot.tokens.prefill, snapshot.tokens.decode) == (8, 1)


def test_a_model_that_is_mapped_after_attaching_is_named(tmp_path: Path) -> None:
    """Of a program that is watched from its first instruction on, and of every server that a daemon sees
    come: when the probes are on, its model is not there yet."""
    model = tmp_path / "late.gguf"
    model.write_bytes(b"GGUF\x03\0\0\0" + bytes(8184))
    with Engine(engine()) as stub, Watch(stub) as watch:
        assert watch.attachment.info.models == ()
        assert watch.order(f"map {model}")["mapped"]
        watch.run("pos=0-3 out=3")
        assert watch.snapshot().target.model == model.name


def test_one_bad_file_hides_no_other(tmp_path: Path) -> None:
    """C03: a stripped program, a mapped file of garbage and a broken ELF; the library is traced."""
    garbage = tmp_path / "libggml-garbage.so"
    garbage.write_bytes(b"\x7fELF\x02\x01\x01" + bytes(9) + random.Random(3).randbytes(6000))
    lib = copied(library(name="libggml-good.so", strip=True), tmp_path)
    torn = tmp_path / "libggml-torn.so"
    torn.write_bytes(lib.read_bytes()[:5000])
    with Engine(plain(strip=True)) as stub:
        for path in (garbage, torn):
            assert stub.order(f"code {path}")["mapped"]
        assert stub.order(f"load {lib}")["loaded"]
        watch = works(stub)
        assert [os.path.basename(f.path) for f in watch.attachment.info.files] == [lib.name]
        notes = " ".join(watch.attachment.snapshot().notes)
        assert garbage.name in notes, notes


@pytest.mark.parametrize("method", ["session", "perf"])
def test_another_mount_namespace(method: str, tmp_path: Path) -> None:
    """C04: the path is another file here."""
    decoy = tmp_path / "place"
    decoy.mkdir()
    copied(Path("/bin/true"), decoy, "llm")
    script = f"mount -t tmpfs t {decoy} && cp {engine()} {decoy}/llm && exec {decoy}/llm"
    with Engine(["unshare", "-m", "sh", "-c", script]) as stub:
        assert works(stub, method).attachment.info.files[0].path == f"{decoy}/llm"


@pytest.mark.parametrize(("method", "replaced"), [("session", False), ("multi", True), ("perf", True)])
def test_deleted_file(method: str, replaced: bool, tmp_path: Path) -> None:
    """C04: the program was deleted, or replaced by another build, since it was started."""
    path = copied(engine(strip=True), tmp_path, "server")
    with Engine(path) as stub:
        path.unlink()
        if replaced:
            copied(engine("-DINSERTED_OP"), tmp_path, "server")
        works(stub, method)


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("-DNAME_SIZE=128",),
        ("-DEXTRA_POINTER",),
        ("-DWITHOUT_UID",),
        ("-DWITHOUT_ACCESSORS",),
        ("-DWITHOUT_ACCESSORS", "-DNAME_SIZE=128"),
        ("-DEXTRA_POINTER", "-DNAME_SIZE=128"),
        ("-DNAME_SIZE=96",),
    ],
    ids=lambda flags: " ".join(flags) or "today's",
)
def test_layouts_that_are_recognised(flags: tuple[str, ...]) -> None:
    """C12: names of 64, 128 and 96 bytes, a pointer more before `data`, with and without accessors."""
    with Engine(engine(*flags, strip=True)) as stub:
        watch = settles(stub)
        layout = watch.attachment.snapshot().target.layout
        assert layout.name is not None
        assert layout.source == ("known" if "-DWITHOUT_ACCESSORS" in flags else "accessors")
        long = next((flag[-3:].strip("=") for flag in flags if "NAME_SIZE" in flag), "64")
        chosen = watch.attachment._layout
        assert chosen is not None and chosen.name_size == int(long)


def test_a_layout_that_is_refused() -> None:
    """C12: a pointer more, without accessors could only be guessed: no figure at all, and the reason."""
    before = links()
    with Engine(engine("-DEXTRA_POINTER", "-DWITHOUT_ACCESSORS", strip=True)) as stub, Watch(stub) as watch:
        stub.order("run pos=0-3 out=3 us=50")
        watch.drain()
        early = watch.snapshot()
        assert early.ops == () and early.graphs == ()
        assert any("graphs: none could be read yet" in note for note in early.notes), early.notes
        assert [(call.status, call.count) for call in early.calls] == [(0, 1)]  # calls need no layout
        with pytest.raises(TargetError, match="does not fit"):
            for n in range(4, 20):
                watch.run(f"pos={n} out=0 us=50")
    nothing_left(before)


@pytest.mark.parametrize("method", METHODS)
def test_an_instruction_that_cannot_be_probed(method: str) -> None:
    """C41: llama_encode begins with int3: it is named as not probed, everything else is seen."""
    with Engine(engine("-DTRAP_ENCODE")) as stub:
        watch = works(stub, method)
        snapshot = watch.attachment.snapshot()
        assert any("llama_encode" in note and "not probed" in note for note in snapshot.notes), snapshot.notes
        assert snapshot.target.attach.complete


@pytest.mark.parametrize("method", ["auto", "perf"])
def test_a_clone_of_the_compiler(method: str) -> None:
    """C42: only llama_decode.isra.0 is there: its arguments are not believed; graphs and ops are right."""
    with Engine(engine("-DCLONED_DECODE")) as stub:
        watch = works(stub, method)
        snapshot = watch.attachment.snapshot()
        note = next(note for note in snapshot.notes if "llama_decode" in note)
        assert "clone" in note


def test_functions_that_nobody_calls() -> None:
    """C42: a function that is there and never entered while its neighbours are: a warning, no zeros."""
    with Engine(engine()) as stub, Watch(stub) as watch:
        watch.run("pos=0-3 out=3 us=50 fn=graph")
        snapshot = watch.snapshot()
        assert any("calls: none of the probed functions was entered" in note for note in snapshot.notes)
        watch.run("pos=4 out=0 us=50")
        assert not any("was entered" in note for note in watch.snapshot().notes)
    with Engine(engine("-DUNUSED_DISPATCH")) as stub, Watch(stub) as watch:
        watch.run("pos=0-3 out=3 us=50 fuse=0")
        snapshot = watch.snapshot()
        assert any("ops: none of the probed functions was entered" in note for note in snapshot.notes)
        assert snapshot.ops == () and [graph.uncovered for graph in snapshot.graphs] == [34]
        # Half of it inlined: what is seen is right, the rest is uncovered and nobody's time.
        reply = watch.run("pos=4 out=0 us=50")
        snapshot = watch.snapshot()
        assert {op.op for op in snapshot.ops} <= {"RMS_NORM"}
        fused = sum(fused for _, fused, *_ in reply["kernels"])
        assert sum(op.calls + op.untimed for op in snapshot.ops) == fused == 5
        assert any(graph.uncovered == len(reply["kernels"]) - fused for graph in snapshot.graphs)


@pytest.mark.parametrize("way", ["debug link", "mini-debuginfo"])
def test_names_beside_the_file(way: str, tmp_path: Path) -> None:
    """C71: names in a debug file, or compressed in the file; places from the running binary."""
    whole = engine("-DHIDE", "-g", dynamic=False)
    path, debug = tmp_path / "server", tmp_path / "server.debug"
    subprocess.run(["objcopy", "--only-keep-debug", whole, debug], check=True)
    if way == "debug link":
        command = ["objcopy", "--strip-all", f"--add-gnu-debuglink={debug}", str(whole), str(path)]
        subprocess.run(command, check=True)
    else:
        subprocess.run(["objcopy", "--strip-debug", "--remove-section=.comment", debug], check=True)
        subprocess.run(["xz", "-k", "-f", debug], check=True)
        section = f"--add-section=.gnu_debugdata={debug}.xz"
        subprocess.run(["objcopy", "--strip-all", section, whole, path], check=True)
    path.chmod(0o755)
    with Engine(path) as stub:
        symbols = works(stub).attachment.info.files[0].symbols
        assert symbols == {"debug link": "debug file", "mini-debuginfo": ".gnu_debugdata"}[way]


def test_a_debug_file_of_another_build(tmp_path: Path) -> None:
    """C71: a debug file whose build-id is another's is not believed."""
    path, debug = tmp_path / "server", tmp_path / "server.debug"
    other = engine("-DHIDE", "-DINSERTED_OP", "-g", dynamic=False)
    subprocess.run(["objcopy", "--only-keep-debug", other, debug], check=True)
    whole = engine("-DHIDE", "-g", dynamic=False)
    subprocess.run(["objcopy", "--strip-all", f"--add-gnu-debuglink={debug}", whole, path], check=True)
    path.chmod(0o755)
    with Engine(path) as stub, pytest.raises(TargetError, match="no symbols"):
        Attachment.open(stub.pid)


def test_static_program() -> None:
    """C01: a static program with names: tables at fixed addresses."""
    with Engine(engine("-static", "-DHIDE", dynamic=False)) as stub:
        works(stub)
