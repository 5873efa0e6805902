# SPDX-License-Identifier: Apache-2.0
"""Real processes with an engine's functions in every arrangement, and those without."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection

from profinferd.agent.errors import ProfinferError, TargetEnded, TargetError
from profinferd.agent.target import catalogue as catalogue_module
from profinferd.agent.target import inspect as inspect_module
from profinferd.agent.target.catalogue import load_catalogue
from profinferd.agent.target.child import Child
from profinferd.agent.target.facts import FileInfo, HookSite, TargetInfo
from profinferd.agent.target.inspect import inspect_target, start_child
from profinferd.agent.target.process import (
    MappedFile,
    engine_files_changed,
    executable_files,
    executable_ids,
    open_process,
)

from .perf_uprobe import PerfUprobe
from .stub_engine import EVERYTHING, Stub, copy, library, program, quick


def events(info: TargetInfo) -> set[str]:
    return {hook.event for file in info.files for hook in file.hooks}


def address(path: Path, name: str) -> int:
    """The function's address by pyelftools."""
    with open(path, "rb") as file:
        elf = ELFFile(file)
        for table in (".symtab", ".dynsym"):
            section = elf.get_section_by_name(table)
            found = section.get_symbol_by_name(name) if isinstance(section, SymbolTableSection) else None
            for symbol in found or ():
                if symbol["st_value"]:
                    return int(symbol["st_value"])
    raise LookupError(name)


def hook_of(file: FileInfo, symbol: str) -> HookSite:
    return next(h for h in file.hooks if h.symbol == symbol)


def hits(file: FileInfo, stub: Stub) -> int:
    """How often a probe at the site of llama_decode is passed in ten calls of it."""
    with PerfUprobe(file.open_path, hook_of(file, "llama_decode").site.offset, stub.pid) as probe:
        assert stub.tell("10") == "10"
        return probe.count()


ALL_EVENTS = {
    "LV_DECODE", "LV_ENCODE", "LV_PROCESS", "LV_SCHED", "LV_BACKEND", "LV_CPU", "OPP_DISPATCH", "OPP_FUSED2",
}  # fmt: skip


def test_one_static_program() -> None:
    path = program(*EVERYTHING)
    with Stub(path) as stub, inspect_target(stub.pid) as info:
        assert info.engine == "ggml" and info.process.pid == stub.pid
        assert events(info) == ALL_EVENTS
        assert info.levels == ("call", "graph", "op") and info.op_source == "dispatch" and info.complete
        assert not info.failures and len(info.files) == 1
        file = info.files[0]
        assert file.role == "call+graph+op" and file.path == str(path) and file.machine == "x86_64"
        assert os.path.samestat(os.stat(file.open_path), os.stat(path))
        for hook in file.hooks:
            assert hook.exact and hook.source == ".symtab"
            start = address(path, hook.symbol)
            assert start <= hook.site.vaddr < start + 64
            code = path.read_bytes()[hook.site.offset : hook.site.offset + len(hook.site.insn) // 2]
            assert code.hex() == hook.site.insn, "the site is an offset in this very file"
        assert hook_of(file, "llama_decode").ret and not hook_of(file, "ggml_cpu_extra_compute_forward").ret
        # arguments on the stack: how far the site is from the entry's stack pointer is known
        assert hook_of(file, "llama_decode").site.moved < 256
    assert not os.path.exists(file.open_path) or not os.path.samefile(file.open_path, path), "closed"


def test_shared_libraries(tmp_path: Path) -> None:
    """Three files, one level each; the stripped program itself has nothing (C01, C03)."""
    calls = library("-DCALLS", name="libllama.so", strip=True)
    graphs = library("-DGRAPHS", name="libggml-base.so", strip=True)
    cpu = library("-DCPU", "-DDISPATCH", "-DFUSED", name="libggml-cpu.so", strip=True)
    with Stub(program("-ldl", strip=True)) as stub:
        for path in (calls, graphs, cpu):
            stub.load(path)
        with inspect_target(stub.pid) as info:
            roles = {os.path.basename(f.path): (f.role, f.symbols, f.op_source) for f in info.files}
            assert roles == {
                "libllama.so": ("call", ".dynsym", None),
                "libggml-base.so": ("graph", ".dynsym", None),
                "libggml-cpu.so": ("graph+op", ".dynsym", "dispatch"),
            }
            assert events(info) == ALL_EVENTS and info.complete and not info.notes


def test_broken_file_hides_nothing(tmp_path: Path) -> None:
    """C03: a mapped file that is no ELF file at all costs itself only."""
    junk = tmp_path / "libjunk.so"
    junk.write_bytes(b"\x7fELF\x02\x01\x01" + bytes(range(256)) * 40)
    text = tmp_path / "text"
    text.write_bytes(b"not a program" * 400)
    with Stub(program("-ldl", strip=True)) as stub:
        assert stub.tell(f"m {junk}") == "mapped" and stub.tell(f"m {text}") == "mapped"
        stub.load(library(*EVERYTHING, name="libgood.so"))
        with inspect_target(stub.pid) as info:
            assert events(info) == ALL_EVENTS
            assert {f.path for f in info.failures} == {str(junk), str(text)}
            assert any("libjunk.so was not looked into" in note for note in info.notes)


def test_what_was_unmapped_meanwhile_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that a process only tries is gone between the list of its files and a look at them; if
    it comes again, it is new. What is still there and cannot be opened is told."""

    def listed(pid: int) -> list[MappedFile]:
        files = executable_files(pid)
        nowhere = f"/proc/{pid}/map_files/1000-2000"
        assert len(files) > 1
        return [
            replace(files[0], path="/lib/driver.so", dev="00:01", inode=1, open_path=nowhere),
            *(f if "llama" in f.path else replace(f, open_path=nowhere) for f in files),
        ]

    monkeypatch.setattr(inspect_module, "executable_files", listed)
    with Stub(program("-ldl")) as stub:
        stub.load(library(*EVERYTHING, name="libllama.so"))
        with inspect_target(stub.pid) as info:
            assert events(info) == ALL_EVENTS
        told = {failure.path for failure in info.failures}
        assert told and told == {f.path for f in executable_files(stub.pid) if "llama" not in f.path}
        assert "driver" not in " ".join(info.notes)
        assert ("00:01", 1) not in info.seen and info.seen == executable_ids(stub.pid)


def test_ggml_only_under_another_name() -> None:
    """C17: only what is in the files counts: no llama_decode, and names that say nothing."""
    path = library("-DGRAPHS", "-DCPU", "-DDISPATCH", name="_speedups.so", strip=True)
    with Stub(program("-ldl", strip=True)) as stub:
        stub.load(path)
        with inspect_target(stub.pid) as info:
            assert info.levels == ("graph", "op") and info.op_source == "dispatch"
            assert any("call level is not available" in note for note in info.notes)


def test_two_copies(tmp_path: Path) -> None:
    """Two different copies of the engine in one process are two files, both seen."""
    first = library(*EVERYTHING, "-DSEED=1", name="libfirst.so")
    second = library("-DCALLS", "-DGRAPHS", "-DCPU", "-DOPERATORS", name="libsecond.so")
    with Stub(program("-ldl", strip=True)) as stub:
        stub.load(first)
        stub.load(second)
        stub.load(copy(first, tmp_path / "libthird.so"))
        with inspect_target(stub.pid) as info:
            found = {os.path.basename(f.path): (f.op_source, f.complete) for f in info.files}
            assert found == {
                "libfirst.so": ("dispatch", True),
                "libsecond.so": ("wildcard", False),
                "libthird.so": ("dispatch", True),
            }
            assert not info.complete and info.op_source == "wildcard", "the poorest speaks for the whole"
            assert len({f.file_id for f in info.files}) == 3


def test_older_builds() -> None:
    """Without the dispatch function: the old one if it survived, else every operator function."""
    with Stub(program("-DGRAPHS", "-DCPU", "-DFORWARD", "-DFUSED")) as stub, inspect_target(stub.pid) as info:
        assert info.op_source == "compute_forward" and info.complete
        assert {"OPP_DISPATCH", "OPP_FUSED2"} <= events(info)
    path = program("-DGRAPHS", "-DCPU", "-DOPERATORS", "-DFUSED")
    with Stub(path) as stub, inspect_target(stub.pid) as info:
        assert info.op_source == "wildcard" and not info.complete
        ops = {(h.symbol, h.event) for h in info.files[0].hooks if h.level == "op"}
        assert ops == {
            ("ggml_compute_forward_add", "OPP_DISPATCH"),
            ("ggml_compute_forward_mul_mat", "OPP_DISPATCH"),
            ("ggml_compute_forward_rope", "OPP_DISPATCH"),
            ("ggml_compute_forward_rms_norm_mul_fused", "OPP_FUSED2"),
        }
        assert any("incomplete" in note for note in info.notes)


def test_operators_without_their_graph_function() -> None:
    """Operators mean nothing where the function that runs them is not found: that level is off."""
    with Stub(program("-DGRAPHS", "-DDISPATCH")) as stub, inspect_target(stub.pid) as info:
        assert info.levels == ("graph",) and info.op_source is None
        assert any("ggml_graph_compute" in note for note in info.notes)


def test_clones_are_for_timing_only() -> None:
    """C42: a clone of a call is probed, marked; one of a function whose arguments we follow is not."""
    path = program("-DGRAPHS", "-DCLONES", "-fno-inline")
    names = subprocess.run(["nm", path], capture_output=True, text=True, check=True).stdout
    assert "llama_encode.constprop" in names and "ggml_graph_compute.constprop" in names
    data = load_catalogue()
    engine = data.engine("ggml")
    hooks = [_without_reads(h) if h.symbol == "llama_encode" else h for h in engine.hooks]
    changed = catalogue_module.Catalogue(engines=[_replace(engine, hooks)])
    with Stub(path) as stub, inspect_target(stub.pid, changed) as info:
        assert [h.exact for h in info.files[0].hooks if h.event == "LV_ENCODE"] == [False]
        refused = {r.event: r.reason for f in info.files for r in f.refused}
        assert "clone" in refused["LV_CPU"] and "LV_CPU" not in events(info)


def _without_reads(hook: catalogue_module.Hook) -> catalogue_module.Hook:
    return catalogue_module.Hook(
        label=hook.label, level=hook.level, event=hook.event, probe=hook.probe, symbol=hook.symbol, args=[]
    )


def _replace(engine: catalogue_module.Engine, hooks: list[catalogue_module.Hook]) -> catalogue_module.Engine:
    return catalogue_module.Engine(
        schema=1, engine=engine.engine, label=engine.label, marks=engine.marks, strings=engine.strings,
        hooks=hooks, sources=engine.sources,
    )  # fmt: skip


def test_nothing_but_a_build_id_left() -> None:
    """C01: a static build without a single name says so, with its build id and what to do."""
    path = program(*EVERYTHING, "-DHIDE", strip=True)
    identity = subprocess.run(["readelf", "-n", path], capture_output=True, text=True, check=True).stdout
    with Stub(path) as stub, pytest.raises(TargetError, match="no symbols: build-id") as caught:
        inspect_target(stub.pid)
    named = str(caught.value).split("build-id ")[1].split()[0]
    assert f"Build ID: {named}" in identity
    assert "debug file" in caught.value.remedy


def test_names_from_the_debug_file(tmp_path: Path) -> None:
    """C71: the same build with its debug file beside it is as good as one with symbols."""
    whole = program(*EVERYTHING, "-DHIDE", "-DLINKED_DEBUG=1")
    path, debug = tmp_path / "server", tmp_path / "server.debug"
    subprocess.run(["objcopy", "--only-keep-debug", whole, debug], check=True)
    subprocess.run(["objcopy", "--strip-all", f"--add-gnu-debuglink={debug}", whole, path], check=True)
    with Stub(path) as stub, inspect_target(stub.pid) as info:
        assert events(info) == ALL_EVENTS and info.files[0].symbols == "debug file"
        assert hook_of(info.files[0], "llama_decode").site.vaddr - address(whole, "llama_decode") < 64


def test_no_engine() -> None:
    child = subprocess.Popen([sys.executable, "-c", "print('up', flush=True); import sys; sys.stdin.read()"],
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
    try:
        assert child.stdout is not None
        child.stdout.readline()
        with pytest.raises(TargetError, match="no inference engine"):
            inspect_target(child.pid)
    finally:
        child.kill()
        child.communicate()


def test_loaded_after_the_start() -> None:
    """C02: an engine that is loaded later is noticed by its new mappings."""
    with Stub(program("-ldl", strip=True)) as stub:
        process = open_process(stub.pid)
        seen = executable_ids(stub.pid)
        assert not engine_files_changed(process, seen)
        stub.load(library("-DCPU", "-DDISPATCH", name="libggml-cpu-late.so", strip=True))
        assert engine_files_changed(process, seen)
        with inspect_target(process) as info:
            assert info.op_source == "dispatch" and info.complete
            assert not engine_files_changed(process, info.seen)


def test_another_mount_namespace(tmp_path: Path) -> None:
    """C04: the target's path is absent here, or another file, and the very file is found all the same."""
    if os.geteuid() != 0:
        pytest.skip("mount namespaces need root")
    path = program(*EVERYTHING)
    decoy = tmp_path / "place"
    decoy.mkdir()
    copy(Path("/bin/true"), decoy / "llm")
    script = f"mount -t tmpfs t {decoy} && cp {path} {decoy}/llm && exec {decoy}/llm"
    with Stub(["unshare", "-m", "sh", "-c", script]) as stub, inspect_target(stub.pid) as info:
        assert info.files[0].path == f"{decoy}/llm"
        assert Path(info.files[0].open_path).read_bytes() == path.read_bytes()
        assert events(info) == ALL_EVENTS
        assert hits(info.files[0], stub) == 10


def test_overlay_of_two_file_systems(tmp_path: Path) -> None:
    """C04: containers: maps and stat show different devices for one file of an overlay."""
    lower, merged = tmp_path / "lower", tmp_path / "merged"
    lower.mkdir()
    merged.mkdir()
    copy(program(*EVERYTHING), lower / "llm")
    script = (
        f"mount -t tmpfs t /mnt && mkdir /mnt/u /mnt/w && "
        f"mount -t overlay o -o lowerdir={lower},upperdir=/mnt/u,workdir=/mnt/w {merged} || exit; "
        f"exec {merged}/llm"
    )
    try:
        stub = Stub(["unshare", "-m", "sh", "-c", script])
    except AssertionError:
        pytest.skip("this kernel mounts no overlay")
    with stub, inspect_target(stub.pid) as info:
        dev = os.stat(info.files[0].open_path).st_dev
        assert info.files[0].file_id[0] != f"{os.major(dev):02x}:{os.minor(dev):02x}", "nothing special here"
        assert events(info) == ALL_EVENTS and hits(info.files[0], stub) == 10


BY_NAME = """
import sys
from profinferd.agent.target.process import executable_files
for file in executable_files(int(sys.argv[1])):
    print(file.open_path, file.path)
"""


def test_without_the_right_to_map_files(tmp_path: Path) -> None:
    """C04: without CAP_CHECKPOINT_RESTORE the same files by name; a replaced one is refused, not confused."""
    lib, other = tmp_path / "libcpu.so", tmp_path / "libother.so"
    for path in (lib, other):
        copy(library("-DCPU", "-DDISPATCH", name="libone.so"), path)
    exe = copy(program("-ldl"), tmp_path / "server")
    with Stub(exe) as stub:
        stub.load(lib)
        stub.load(other)
        exe.unlink()
        other.unlink()
        copy(library("-DCALLS", name="libother.so"), other)
        dropped = "-checkpoint_restore,-sys_admin"
        setpriv = ["setpriv", f"--bounding-set={dropped}", f"--inh-caps={dropped}"]
        # The reader may look at a process with more capabilities than its own: it keeps CAP_SYS_PTRACE.
        command = [*setpriv, sys.executable, "-c", BY_NAME, str(stub.pid)]
        done = subprocess.run(command, capture_output=True, text=True)
        rows = [line.partition(" ") for line in done.stdout.splitlines()]
        found = {path: open_path for open_path, _, path in rows}
        assert found[str(lib)] == f"/proc/{stub.pid}/root{lib}", done.stderr
        assert found[str(exe)] == f"/proc/{stub.pid}/exe"
        assert found[str(other)] == ""


def test_deleted_and_replaced_files(tmp_path: Path) -> None:
    """C04: the program was deleted, its library replaced by another build, after they were mapped."""
    exe = copy(program(*EVERYTHING), tmp_path / "server")
    lib = copy(library("-DCPU", "-DDISPATCH", name="libone.so"), tmp_path / "libcpu.so")
    original = lib.read_bytes()
    with Stub(exe) as stub:
        stub.load(lib)
        exe.unlink()
        lib.unlink()
        copy(library("-DCALLS", name="libother.so"), lib)
        with inspect_target(stub.pid) as info:
            by_name = {os.path.basename(f.path): f for f in info.files}
            assert set(by_name) == {"server", "libcpu.so"}
            assert Path(by_name["libcpu.so"].open_path).read_bytes() == original
            assert by_name["libcpu.so"].role == "graph+op"
            assert hits(by_name["server"], stub) == 10
            assert info.process.exe == str(exe)


def test_strange_paths(tmp_path: Path) -> None:
    """Line breaks, quotes and bytes that are no UTF-8 in a path are printed as escapes."""
    folder = os.fsencode(tmp_path) + b"/a b\n'\"\xff"
    os.mkdir(folder)
    target = folder + b"/lib\xfex.so"
    shutil.copy(os.fsencode(library(*EVERYTHING, name="libx.so")), target)
    link = tmp_path / "link.so"
    os.symlink(target, link)
    with Stub(program("-ldl", strip=True)) as stub:
        stub.load(link)
        with inspect_target(stub.pid) as info:
            assert info.files[0].path.endswith("/a b\\n'\"\\xff/lib\\xfex.so")
            assert events(info) == ALL_EVENTS


def test_ended_while_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    with Stub(program(*EVERYTHING)) as stub:
        process = open_process(stub.pid)

        def killing() -> catalogue_module.Catalogue:
            stub.kill()
            return load_catalogue()

        monkeypatch.setattr(inspect_module, "load_catalogue", killing)
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(TargetEnded, match="ended"):
            inspect_target(process)
        assert len(os.listdir("/proc/self/fd")) == before
        with pytest.raises(TargetEnded):
            inspect_target(process)


def test_32_bit_program(tmp_path: Path) -> None:
    source = tmp_path / "p.S"
    source.write_text(".globl _start\n_start: mov $29,%eax\nint $0x80\njmp _start\n")
    path = tmp_path / "p32"
    subprocess.run(["gcc", "-m32", "-nostdlib", "-static", "-o", path, source], check=True)
    try:
        child = subprocess.Popen([path])
    except OSError as error:
        pytest.skip(f"this kernel does not run 32-bit programs: {error.strerror}")
    try:
        with pytest.raises(TargetError, match="32-bit"):
            inspect_target(child.pid)
    finally:
        child.kill()
        child.wait()


# -- the child -------------------------------------------------------------------------

BAD_CHILD = """
import sys; sys.path[:] = [p for p in sys.path if p not in sys.argv[1:]] + sys.argv[1:]
import os, time
from profinferd.agent.target import inspect_child as child
real = child.inspect_one
def inspect_one(request, fd, engines):
    if "libbad" in request["path"]:
        {what}
    return real(request, fd, engines)
child.inspect_one = inspect_one
child.main()
"""


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("os.abort()", "ended by signal 6"),
        ("os._exit(3)", "exit status 3"),
        ("raise RuntimeError('broken\\n inside')", "inside"),
        ("time.sleep(600)", "took more than"),
        ("while True: pass", "took more than|processor time"),
        ("print('{}nonsense')", "makes no sense"),
        ("print('x' * (1 << 25))", "too long"),
        ("bytearray(2 << 30)", "more memory"),
    ],
)
def test_a_child_that_dies_costs_one_file(what: str, why: str) -> None:
    """C03, D14: whatever happens to the child, the other files are looked into."""
    command = inspect_module._command()
    command[4] = BAD_CHILD.replace("{what}", what)
    with Stub(program("-ldl", strip=True)) as stub:
        stub.load(library("-DCALLS", name="libbad.so"))
        stub.load(library("-DCPU", "-DDISPATCH", name="libcpu.so"))
        patience = 8.0 if why.startswith("took") else 120.0  # the good file takes some, too
        with inspect_target(stub.pid, timeout=patience, child=Child(command)) as info:
            assert [os.path.basename(f.path) for f in info.files] == ["libcpu.so"]
            assert [os.path.basename(f.path) for f in info.failures] == ["libbad.so"]
            assert re.search(why, info.failures[0].reason), info.failures
            assert "\n" not in info.failures[0].reason


def test_nothing_is_left_behind() -> None:
    """Neither descriptors nor children, with and without an engine, early child or not."""
    with Stub(program(*EVERYTHING)) as stub:
        inspect_target(stub.pid).close()
        before = len(os.listdir("/proc/self/fd"))
        child = start_child()
        time.sleep(0.2)
        inspect_target(stub.pid, child=child).close()
        with pytest.raises(ProfinferError):
            inspect_target(1 << 22)
        start_child().close()
        assert len(os.listdir("/proc/self/fd")) == before
    text = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    assert all("inspect_child" not in Path(f"/proc/{pid}/cmdline").read_text() for pid in text)


def test_fast_enough_to_attach() -> None:
    """The whole look, interpreter included, stays well below the 300 ms that an attach may take."""
    path = library(*EVERYTHING, name="libfast.so", strip=True)
    with Stub(program("-ldl", strip=True)) as stub:
        stub.load(path)
        quick(lambda: inspect_target(stub.pid))


def test_stopped_target() -> None:
    """A process that is stopped answers nothing and is looked at all the same."""
    with Stub(program(*EVERYTHING)) as stub:
        os.kill(stub.pid, signal.SIGSTOP)
        with inspect_target(stub.pid) as info:
            assert events(info) == ALL_EVENTS
        os.kill(stub.pid, signal.SIGCONT)
        assert stub.tell("3") == "3"


def test_without_permission() -> None:
    """Another user's process without any capability: not "no engine" but what is missing."""
    code = (
        "import sys\n"
        "from profinferd.agent.errors import ProfinferError\n"
        "from profinferd.agent.target.inspect import inspect_target\n"
        "try: inspect_target(int(sys.argv[1]))\n"
        "except ProfinferError as error: print(int(error.exit_code), error)\n"
    )
    with Stub(program(*EVERYTHING)) as stub:
        dropped = ["setpriv", "--bounding-set=-sys_ptrace,-dac_read_search,-dac_override", "--inh-caps=-all"]
        command = [*dropped, sys.executable, "-c", code, str(stub.pid)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.stdout.startswith("4 ") and "CAP_SYS_PTRACE" in done.stdout, done.stdout + done.stderr
        assert done.stdout.count("\n") == 1
