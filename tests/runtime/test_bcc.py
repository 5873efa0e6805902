# SPDX-License-Identifier: Apache-2.0
"""``--loader bcc`` on the stub engine: the same numbers as with our own objects, or a clear end."""

from __future__ import annotations

import errno
import os
import platform
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from profinferd.agent.errors import MachineError
from profinferd.agent.kernel import bcc_child, bcc_loader
from profinferd.agent.kernel.bcc_loader import BCC, BccPrograms
from profinferd.agent.model.graph import structure
from profinferd.agent.model.tensors import Graph
from profinferd.probes.build import HERE

from ..tries import in_one_of, timed
from .cases import (
    Engine,
    Watch,
    check_ops,
    engine,
    kernels,
    links,
    nothing_left,
    profinferd,
    wait_for,
)
from .headers import merged_tree

needs_bcc = pytest.mark.skipif(
    not os.path.isfile(f"{BCC}/__init__.py"), reason="Debian's python3-bpfcc is not installed"
)


@pytest.fixture(scope="module")
def headers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """BCC finds headers of a kernel."""
    tree = merged_tree(tmp_path_factory.mktemp("kernel"))
    if tree is None:
        pytest.skip("no kernel headers are installed (Debian's linux-headers-amd64)")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BCC_KERNEL_SOURCE", str(tree))
        yield tree


def _described(graphs: list[Graph]) -> list[Any]:
    """Graphs without what differs from one process of the same program to the next."""
    found: list[Any] = []
    for graph in graphs:
        tensors = [*graph.nodes, *graph.leaves]
        sources = [[(s.slot, s.node, s.leaf, s.base_leaf) for s in node.sources] for node in graph.nodes]
        shapes = [(t.op, t.type, t.name, t.ne, t.nb, t.flags, t.op_params, t.view_offs) for t in tensors]
        costs = [(node.dtype, node.role, node.layer, node.kernel) for node in graph.nodes]
        found.append((graph.topology, structure(graph), graph.n_tokens, graph.kv_length))
        found.append((shapes, sources, costs))
    return found


@needs_bcc
@pytest.mark.parametrize("method", ["multi", "perf"])
def test_the_same_as_our_own(headers: Path, method: str) -> None:
    """Every call, token and kernel of dense and MoE graphs, helpers' hits told apart, and the same graphs
    as the built object gives, tensor by tensor. Nothing stays attached, no helper runs."""
    orders = (
        "pos=0-3 out=3",
        "pos=4 out=0 thread workers",
        "pos=5-104 out=99 moe fuse=0",
        "pos=105 out=0 moe fn=process workers times=3",
        "pos=500 out=0 status=1 compute",
    )
    before, others = links(), _children(os.getpid())  # a browser of other tests, say
    graphs: dict[str, list[Any]] = {}
    for loader in ("bcc", "libbpf"):
        with Engine(engine()) as stub, Watch(stub, method, loader=loader) as watch:
            replies = [watch.run(order) for order in orders]
            snapshot = watch.snapshot()
            graphs[loader] = _described(watch.attachment.graphs())
            if loader == "libbpf":
                continue
            truth = kernels([*replies, replies[3], replies[3]])
            assert dict(_kernels(snapshot.ops)) == dict(truth)
            assert snapshot.lost.total == 0 and not any(graph.uncovered for graph in snapshot.graphs)
            assert snapshot.target.attach.method == method and snapshot.target.attach.complete
            assert (snapshot.tokens.prefill, snapshot.tokens.decode) == (104, 4)
            calls = {(call.phase, call.status): call.count for call in snapshot.calls}
            assert sum(calls.values()) == 7 and sum(n for (_, s), n in calls.items() if s == 1) == 1
            counters = snapshot.counters
            assert counters is not None and counters.hits["op"] == sum(truth.values())
            assert bcc_loader.NOTE in snapshot.notes
            # What BCC took is gone with the helper; the descriptors are ours.
            assert not _children(os.getpid()) - {stub.pid} - others
    assert graphs["bcc"] == graphs["libbpf"]
    nothing_left(before)


def _kernels(ops: Any) -> dict[tuple[str, bool], int]:
    seen: dict[tuple[str, bool], int] = {}
    for op in ops:
        key = (op.op, op.kernel.startswith("fused_"))
        seen[key] = seen.get(key, 0) + op.calls
    return seen


def _children(pid: int) -> set[int]:
    found = set()
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            try:
                stat = Path(f"/proc/{entry}/stat").read_text()
            except OSError:
                continue
            if int(stat.rpartition(")")[2].split()[1]) == pid:
                found.add(int(entry))
    return found


@needs_bcc
def test_times(headers: Path) -> None:
    """Op times against the stub's own clock."""
    with Engine(engine()) as stub, Watch(stub, loader="bcc") as watch:
        check_ops(watch.snapshot(), [])
        replies = [watch.run("pos=0-9 out=9 us=1500"), watch.run("pos=10 out=0 us=1500")]
        check_ops(watch.snapshot(), replies)


@needs_bcc
def test_endings_that_are_not_returns(headers: Path) -> None:
    """longjmp and the end of a thread inside a call: what was open is given up, the next call is right."""
    with Engine(engine()) as stub, Watch(stub, loader="bcc") as watch:
        watch.run("pos=0-3 out=3 end=jump at=5")
        watch.run("pos=0-3 out=3 end=exit at=5")
        watch.run("pos=4 out=0")
        snapshot = watch.snapshot()
        assert snapshot.lost.by_kind["map_full"] == 0
        assert {call.status: call.count for call in snapshot.calls if call.status == 0} == {0: 1}
        assert not watch.keys("threads")


@needs_bcc
def test_absent_pages_are_faults(headers: Path) -> None:
    """What cannot be read is counted, and nothing is made up."""
    with Engine(engine()) as stub, Watch(stub, loader="bcc") as watch:
        watch.run("pos=0-3 out=3")
        watch.run("pos=4 out=0 hole")
        snapshot = watch.snapshot()
        assert snapshot.lost.by_kind["fault_graph"] > 0


@needs_bcc
def test_command_line(headers: Path) -> None:
    """As a person calls it: all operators without saying so; sampling is refused."""
    in_one_of(3, command_line)


def command_line() -> None:
    with Engine(engine()) as stub:

        def work(process: subprocess.Popen[str]) -> None:
            stub.order("run pos=0-3 out=3")
            process.send_signal(signal.SIGINT)

        seen = profinferd("-p", stub.pid, "--loader", "bcc", duration=None, meanwhile=work)
        timed(seen.code != 130, "it was interrupted between its words that it is attached and the first look")
        assert seen.code == 0, seen.err
        assert seen.json["tokens"]["prefill"] == 4 and seen.json["ops"]
        refused = profinferd("-p", stub.pid, "--loader", "bcc", "--ops", "sampled")
        assert refused.code == 2 and "cannot sample" in refused.line


def test_nobody_has_installed_it(tmp_path: Path) -> None:
    """No BCC, or what lies there is something else: what to install, nothing else."""
    with pytest.raises(MachineError, match="apt install python3-bpfcc"):
        BccPrograms.load("perf", bcc=str(tmp_path / "bcc"))


class Module:
    """Of BCC, what loads a program: the kernel says so often that it was disturbed."""

    def __init__(self, disturbed: int, number: int = errno.EAGAIN) -> None:
        self.left, self.number = disturbed, number

    def load_func(self, name: str, program_type: int, attach_type: int) -> tuple[str, int, int]:
        self.left -= 1
        if self.left >= 0:
            raise Exception(f"Failed to load BPF program {name}: {os.strerror(self.number)}")
        return name, program_type, attach_type


def test_a_signal_while_the_kernel_verifies() -> None:
    """It gives up a program then, and asks to try again; whatever else it says is final."""
    assert bcc_child.load_one(Module(4), "describe", 2, -1) == ("describe", 2, -1)
    with pytest.raises(Exception, match="Resource temporarily"):
        bcc_child.load_one(Module(5), "describe", 2, -1)
    refusing = Module(1, errno.EACCES)
    with pytest.raises(Exception, match="Permission denied"):
        bcc_child.load_one(refusing, "describe", 2, -1)
    assert refusing.left == 0


@needs_bcc
def test_another_package_of_that_name(headers: Path, tmp_path: Path) -> None:
    """One that cannot be imported."""
    (tmp_path / "__init__.py").write_text("import nothing_that_there_is\n")
    with pytest.raises(MachineError, match=r"nothing_that_there_is.*apt install python3-bpfcc"):
        BccPrograms.load("perf", bcc=str(tmp_path))


@needs_bcc
def test_no_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without kernel headers is told which to install, in one line and with exit code 4."""
    monkeypatch.setenv("BCC_KERNEL_SOURCE", str(tmp_path))
    with Engine(engine()) as stub:
        outcome = profinferd("-p", stub.pid, "--loader", "bcc")
    assert outcome.code == 4
    assert f"linux-headers-{platform.release()}" in outcome.line and str(tmp_path) in outcome.line


@needs_bcc
def test_headers_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tree without what BCC includes: the compiler's first error, not its pages of them."""
    (tmp_path / "include" / "linux").mkdir(parents=True)
    monkeypatch.setenv("BCC_KERNEL_SOURCE", str(tmp_path))
    with pytest.raises(MachineError, match="BCC cannot compile the programs") as raised:
        BccPrograms.load("perf")
    assert len(str(raised.value)) < 500


@needs_bcc
def test_helper_is_killed(headers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed while it compiles: a clear error at once, nothing loaded, nothing left."""
    tree = merged_tree(tmp_path)
    assert tree is not None
    # It does not get to the end of what it reads first, however late we are.
    (tree / "include" / "linux" / "kconfig.h").unlink()
    os.mkfifo(tree / "include" / "linux" / "kconfig.h")
    monkeypatch.setenv("BCC_KERNEL_SOURCE", str(tree))
    started: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen

    def start(*arguments: Any, **options: Any) -> Any:
        started.append(real(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    before = links()
    descriptors = set(os.listdir("/proc/self/fd"))

    def kill() -> None:
        wait_for(lambda: bool(started), "the helper to start")
        maps = Path(f"/proc/{started[0].pid}/maps")
        wait_for(lambda: "libbcc" in maps.read_text(), "the helper to load BCC")
        os.kill(started[0].pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(MachineError, match="ended by SIGKILL"):
        BccPrograms.load("perf")
    killer.join()
    assert started[0].poll() == -signal.SIGKILL
    assert set(os.listdir("/proc/self/fd")) == descriptors
    nothing_left(before)


def test_tensors_are_taken_apart() -> None:
    """What the programs leave to user space: fields at the layout's offsets, absent ones zero, bytes that
    could not be read a fault, and no source beyond those of the layout."""
    import numpy as np

    from profinferd.agent.kernel.header import load_header

    types = load_header(HERE / "events.h")
    raws = np.zeros(3, types.dtype("raw_chunk"))
    raws["bytes"] = np.arange(512, dtype=np.uint8)
    raws["what"], raws["index"], raws["size"] = [2, 2 | 3 << 8, 2], [7, 7, 8], [400, 400, 0]
    layout = dict.fromkeys((f"t_{name}" for name in types.dtype("node_desc").names or ()), 0xFFFF)
    layout |= {"t_type": 0, "t_op": 4, "t_ne": 16, "t_src": 64, "t_name": 128, "n_src": 2}
    found = bcc_loader.node_descs(raws, layout, types.dtype("node_desc"))
    assert found["role"].tolist() == [0, 1, 0] and found["slot"].tolist() == [0, 2, 0]
    assert found["index"].tolist() == [7, 7, 8] and found["fault"].tolist() == [0, 0, 1]
    assert found["op"][0] == int.from_bytes(bytes(range(4, 8)), "little")
    assert found["ne"][0].tolist() == [
        int.from_bytes(bytes(range(a, a + 8)), "little") for a in (16, 24, 32, 40)
    ]
    assert found["src"][0].nonzero()[0].tolist() == [0, 1]
    assert found["name"][0] == bytes(range(128, 192)) and not found["data"].any()
    assert not len(bcc_loader.node_descs(raws[:0], layout, types.dtype("node_desc")))
