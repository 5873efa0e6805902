# SPDX-License-Identifier: Apache-2.0
"""What cannot work: the exit code, one line that says why, nothing left attached, what was seen kept."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from profinferd.agent.attach import Attachment
from profinferd.agent.errors import TargetEnded, TargetError

from .cases import Engine, Outcome, engine, links, nothing_left, plain, profinferd

DONE, USAGE, TARGET, MACHINE, ENDED, INTERRUPTED = 0, 2, 3, 4, 5, 130
METHODS = ("multi", "perf")


def refused(outcome: Outcome, code: int, *words: str) -> None:
    """It ended with this code, one line with these words, and no data."""
    assert outcome.code == code, outcome
    for word in words:
        assert word in outcome.line, outcome.line
    assert outcome.line.startswith("profinferd: ") and outcome.out == ""
    assert "Traceback" not in outcome.err


def without(*capabilities: str) -> list[str]:
    """A command prefix that takes capabilities away."""
    dropped = ",".join(f"-{name}" for name in capabilities)
    return ["setpriv", f"--bounding-set={dropped}", f"--inh-caps={dropped}"]


def in_own_mounts(script: str) -> list[str]:
    """A command prefix: the rest runs after ``script`` in a mount namespace of its own."""
    return ["unshare", "-m", "sh", "-c", f'{script} && exec "$@"', "sh"]


# ---- not a process that can be profiled ----------------------------------------------------


def test_no_such_process() -> None:
    child = subprocess.Popen(["true"])
    child.wait()  # its number is given again only after all others
    pid, before = child.pid, links()
    refused(profinferd("--pid", pid), TARGET, f"no process {pid}")
    nothing_left(before)


@pytest.mark.parametrize("pid", ["0", "-4", "x", "99999999999999999999"])
def test_no_pid_at_all(pid: str) -> None:
    outcome = profinferd("--pid", pid)
    assert outcome.code in (USAGE, TARGET) and outcome.line.startswith("profinferd: "), outcome


def test_kernel_thread() -> None:
    refused(profinferd("--pid", 2), TARGET, "kernel thread")


def test_no_engine() -> None:
    with Engine(plain()) as stub:
        before = links()
        refused(profinferd("--pid", stub.pid), TARGET, "no inference engine", str(stub.pid))
        nothing_left(before)


def test_32_bit_process(tmp_path: Path) -> None:
    source = tmp_path / "p.S"
    source.write_text(".globl _start\n_start: mov $29,%eax\nint $0x80\njmp _start\n")
    path = tmp_path / "p32"
    subprocess.run(["gcc", "-m32", "-nostdlib", "-static", "-o", path, source], check=True)
    try:
        child = subprocess.Popen([path])
    except OSError as error:
        pytest.skip(f"this kernel does not run 32-bit programs: {error.strerror}")
    try:
        refused(profinferd("--pid", child.pid), TARGET, "32-bit")
    finally:
        child.kill()
        child.wait()


def test_no_names_left() -> None:
    """C01: a stripped static build without names."""
    with Engine(engine("-static", "-DHIDE", strip=True, dynamic=False)) as stub:
        refused(profinferd("--pid", stub.pid), TARGET, "no symbols: build-id", "debug file")


def test_malformed_engine(tmp_path: Path) -> None:
    """Files of garbage that call themselves an engine: no traceback, no hang."""
    with Engine(plain()) as stub:
        good = engine(strip=True).read_bytes()
        for n in range(6):
            bad = bytearray(good[: len(good) // (1 + n % 2)])
            for at in range(16 + n, len(bad), 97 + 50 * n):
                bad[at] ^= 0x5A
            path = tmp_path / f"libggml-{n}.so"
            path.write_bytes(bytes(bad))
            assert stub.order(f"code {path}")["mapped"]
        before = links()
        outcome = profinferd("--pid", stub.pid)
        # Some of them still have a function or two in the right place: then nobody calls it.
        assert outcome.code in (DONE, TARGET) and "Traceback" not in outcome.err, outcome
        assert outcome.err.count("\n") == (outcome.code == TARGET)
        nothing_left(before)


def test_zombie() -> None:
    child = subprocess.Popen(["true"])
    try:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        refused(profinferd("--pid", child.pid), TARGET, "zombie")
    finally:
        child.wait()


# ---- a process that can, in a strange state ---------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_live_but_idle(method: str) -> None:
    """Exit 0, with a note; the figures are there and 0."""
    with Engine(engine()) as stub:
        before = links()
        outcome = profinferd("--pid", stub.pid, "--attach-method", method)
        assert outcome.code == DONE and outcome.err == ""
        assert any("idle" in note for note in outcome.json["notes"])
        assert outcome.json["calls"] == [] and outcome.json["tokens"]["decode"] == 0
        nothing_left(before)


@pytest.mark.parametrize("method", METHODS)
def test_a_thread_id(method: str) -> None:
    """The id of a thread stands for its process; calls on all its threads are seen."""
    with Engine([sys.executable, "-c", THREADED.format(stub=str(engine("-fPIC", "-shared")))]) as stub:
        threads = [int(name) for name in os.listdir(f"/proc/{stub.pid}/task")]
        other = next(tid for tid in threads if tid != stub.pid)

        def use_and_signal(profiler: subprocess.Popen[str]) -> None:
            stub.order("run pos=0-3 out=3 us=50")
            profiler.send_signal(signal.SIGINT)

        options = ("--pid", other, "--attach-method", method)
        outcome = profinferd(*options, duration=None, meanwhile=use_and_signal)
        assert outcome.code == DONE, outcome
        assert outcome.json["target"]["pid"] == stub.pid
        assert outcome.json["tokens"]["prefill"] == 4


THREADED = """
import ctypes, os, sys, threading, time
stub = ctypes.CDLL({stub!r})
threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
print('{{"ready": %d}}' % os.getpid(), flush=True)
for line in sys.stdin:
    stub.stub_order(ctypes.create_string_buffer(line.rstrip("\\n").encode()))
    ctypes.CDLL(None).fflush(None)
"""


@pytest.mark.parametrize("method", METHODS)
def test_ended_in_mid_trace(method: str) -> None:
    """What was seen is kept, exit 0 and a note; when nothing was seen, exit 5."""
    before = links()
    with Engine(engine()) as stub:

        def use_and_kill(profiler: subprocess.Popen[str]) -> None:
            stub.order("run pos=0-3 out=3 us=50")
            stub.kill()

        options = ("--pid", stub.pid, "--attach-method", method)
        outcome = profinferd(*options, duration=None, meanwhile=use_and_kill)
        assert outcome.code == DONE and outcome.err == "", outcome
        assert outcome.json["tokens"]["prefill"] == 4 and len(outcome.json["ops"]) > 5
        assert any("ended" in note for note in outcome.json["notes"])
    with Engine(engine()) as stub:
        options = ("--pid", stub.pid, "--attach-method", method)
        outcome = profinferd(*options, duration=None, meanwhile=lambda profiler: stub.kill())
        refused(outcome, ENDED, "ended before anything was seen")
    nothing_left(before)


@pytest.mark.parametrize("method", ["auto", "perf"])
def test_ended_while_attaching(method: str) -> None:
    """Whenever it ends: exit 5 (or 3: there is no such process), never anything else, nothing left."""
    before = links()
    descriptors = len(os.listdir("/proc/self/fd"))
    outcomes = set()
    for step in range(7):
        with Engine(engine()) as stub:
            killer = threading.Timer(0.04 * step, stub.process.kill)
            killer.start()
            try:
                with Attachment.open(stub.pid, method=method) as attachment:
                    outcomes.add("attached")
                    attachment.poll(0)
            except (TargetEnded, TargetError) as error:
                assert type(error) is TargetEnded or "no process" in error.what or "zombie" in error.what
                outcomes.add(type(error).__name__)
            killer.join()
    assert "TargetEnded" in outcomes or "TargetError" in outcomes
    assert len(os.listdir("/proc/self/fd")) == descriptors
    nothing_left(before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted(number: signal.Signals) -> None:
    """Ctrl-C and SIGTERM: with something seen exit 0 and all of it; with nothing 130."""
    before = links()
    with Engine(engine()) as stub:

        def use_and_signal(profiler: subprocess.Popen[str]) -> None:
            stub.order("run pos=0-3 out=3 us=50")
            profiler.send_signal(number)

        seen = profinferd("--pid", stub.pid, duration=None, meanwhile=use_and_signal)
        assert seen.code == DONE and seen.json["tokens"]["prefill"] == 4 and seen.err == "", seen
        only_signal = profinferd("--pid", stub.pid, duration=None, meanwhile=lambda p: p.send_signal(number))
        refused(only_signal, INTERRUPTED, "interrupted")
    nothing_left(before)


def test_a_strange_model_path(tmp_path: Path) -> None:
    """A model's name with quotes, newlines and bytes that are no UTF-8: valid JSON, one printable name."""
    folder = os.fsencode(tmp_path)
    name = b'mo\'del "Q4"\\ \xff\xfe\xc3(\x1b[31m\xe2\x80\xae.gguf'
    (tmp_path / "link").mkdir()
    with open(folder + b"/" + name, "wb") as file:
        file.write(b"GGUF" + bytes(100))
    newline = folder + b"/a\nb.gguf"
    with open(newline, "wb") as file:
        file.write(b"GGUF" + bytes(50))
    os.symlink(newline, folder + b"/link/plain")
    with Engine(engine()) as stub:
        assert stub.order(b"map " + folder + b"/" + name)["mapped"]
        assert stub.order(b"map " + folder + b"/link/plain")["mapped"]
        outcome = profinferd("--pid", stub.pid)
        assert outcome.code == DONE, outcome
        model = outcome.json["target"]["model"]
        assert model.startswith('mo\'del "Q4"') and model.endswith(".gguf")
        assert model.isprintable() and "\x1b" not in outcome.out and "\u202e" not in model
        table = subprocess.run(
            [sys.executable, "-m", "profinferd.agent", "attach", "-q", "-d", "0.2", "--pid", str(stub.pid)],
            capture_output=True, check=True,
        )  # fmt: skip
        assert b"\x1b" not in table.stdout and b"\xff" not in table.stdout
        table.stdout.decode()


# ---- a machine that cannot ------------------------------------------------------------------------


def test_no_btf() -> None:
    """C28: without BTF uprobes still work, without sessions and without seeing threads end."""
    with Engine(engine()) as stub:
        before = links()
        hidden = in_own_mounts("mount --bind /dev/null /sys/kernel/btf/vmlinux")
        outcome = profinferd("--pid", stub.pid, under=hidden)
        assert outcome.code == DONE, outcome
        assert outcome.json["target"]["attach"]["method"] in ("multi", "perf")
        nothing_left(before)


def test_no_uprobes() -> None:
    """C31: no uprobe PMU: forced to use it, it is the machine that cannot."""
    with Engine(engine()) as stub:
        hidden = in_own_mounts("mount -t tmpfs t /sys/bus/event_source/devices")
        outcome = profinferd("--pid", stub.pid, "--attach-method", "perf", under=hidden)
        refused(outcome, MACHINE, "uprobes", "CONFIG_UPROBE_EVENTS")


@pytest.mark.parametrize(
    ("dropped", "named"),
    [
        (("bpf", "perfmon", "sys_admin"), "CAP_BPF"),
        (("perfmon", "sys_admin"), "CAP_PERFMON"),
        (("sys_ptrace", "dac_read_search", "dac_override"), "CAP_SYS_PTRACE"),
    ],
)
def test_missing_capability(dropped: tuple[str, ...], named: str) -> None:
    """C32, C63: the capability that is missing is named; it is the machine's exit code."""
    with Engine(engine()) as stub:
        before = links()
        refused(profinferd("--pid", stub.pid, under=without(*dropped)), MACHINE, named)
        nothing_left(before)


def test_perf_uprobes_without_sys_admin() -> None:
    """C32: perf uprobes want CAP_SYS_ADMIN on this kernel, multi links do not."""
    with Engine(engine()) as stub:
        reduced = without("sys_admin")
        forced = profinferd("--pid", stub.pid, "--attach-method", "perf", under=reduced)
        if forced.code != DONE:  # kernels before July 2025 let it
            refused(forced, MACHINE, "CAP_SYS_ADMIN")
        assert profinferd("--pid", stub.pid, under=reduced).code == DONE
