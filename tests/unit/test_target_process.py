# SPDX-License-Identifier: Apache-2.0
"""Processes of our own user, looked at without any privilege."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from profinferd.agent.errors import TargetEnded, TargetError
from profinferd.agent.target import process as p


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen([sys.executable, "-c", "print('up', flush=True); import time; time.sleep(60)"],
                             stdout=subprocess.PIPE)  # fmt: skip
    assert child.stdout is not None and child.stdout.readline() == b"up\n"
    yield child
    child.kill()
    child.wait()
    child.stdout.close()


def test_open_process(sleeper: subprocess.Popen[bytes]) -> None:
    found = p.open_process(sleeper.pid)
    assert found.pid == sleeper.pid and found.bits == 64 and found.threads == (sleeper.pid,)
    assert os.path.samefile(found.exe, sys.executable)
    ticks = os.sysconf("SC_CLK_TCK")
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    assert 0 <= uptime - found.start_time / ticks < 60
    assert p.alive(found)
    sleeper.kill()
    sleeper.wait()
    assert not p.alive(found)


def test_thread_id_is_its_process() -> None:
    ready, leave = threading.Event(), threading.Event()
    ids: list[int] = []

    def work() -> None:
        ids.append(threading.get_native_id())
        ready.set()
        leave.wait()

    thread = threading.Thread(target=work)
    thread.start()
    ready.wait()
    try:
        found = p.open_process(ids[0])
        assert found.pid == os.getpid() != ids[0] and ids[0] in found.threads
    finally:
        leave.set()
        thread.join()


def test_another_process_with_the_pid_is_not_it(sleeper: subprocess.Popen[bytes]) -> None:
    found = p.open_process(sleeper.pid)
    other = p.Process(found.pid, found.start_time - 1, found.exe, 64, found.threads)
    assert p.alive(found) and not p.alive(other)


def test_another_program_in_the_process_is_not_it() -> None:
    """exec keeps pid and start time; it is over with what was looked at all the same."""
    shell = subprocess.Popen(
        ["sh", "-c", "echo; read go; exec sleep 60"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        # Popen comes back before the kernel has placed the stack of the program.
        assert shell.stdout is not None and shell.stdout.readline()
        found = p.open_process(shell.pid)
        assert found.stack > 0 and p.alive(found)
        assert shell.stdin is not None
        shell.stdin.write(b"\n")
        shell.stdin.flush()
        until = time.monotonic() + 60
        while p.alive(found) and time.monotonic() < until:
            time.sleep(0.01)
        assert not p.alive(found) and shell.poll() is None
        assert p.open_process(shell.pid).start_time == found.start_time
        assert p.alive(p.Process(found.pid, found.start_time, found.exe, 64, found.threads)), "not known"
    finally:
        shell.kill()
        shell.communicate()


@pytest.mark.parametrize("pid", [0, -5, 1 << 22, (1 << 31) - 1, 1 << 31, 1 << 80])
def test_no_such_process(pid: int) -> None:
    with pytest.raises(TargetError, match="no process"):
        p.open_process(pid)


def test_kernel_thread() -> None:
    if not Path("/proc/2/stat").exists() or "kthreadd" not in Path("/proc/2/stat").read_text():
        pytest.skip("kernel threads are not visible in this pid namespace")
    with pytest.raises(TargetError, match="kernel thread"):
        p.open_process(2)


def test_zombie() -> None:
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    try:
        with pytest.raises(TargetError, match="zombie"):
            p.open_process(child.pid)
        assert p.read_maps(child.pid) == []
    finally:
        child.wait()
    with pytest.raises(TargetEnded):
        p.read_maps(child.pid)


def test_name_with_brackets_and_blanks(tmp_path: Path) -> None:
    """The program's name in /proc/PID/stat may hold anything, also what looks like its end."""
    path = tmp_path / "a) R 1 2 (b"
    path.symlink_to(sys.executable)
    child = subprocess.Popen([str(path), "-c", "import time; time.sleep(60)"])
    try:
        time.sleep(0.1)
        assert p.open_process(child.pid).pid == child.pid
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()


def test_maps_agree_with_the_kernels_text() -> None:
    found = p.read_maps(os.getpid())
    text = Path("/proc/self/maps").read_text().splitlines()
    stack = next(m for m in found if m.path == "[stack]")  # which grows at its beginning
    assert any(f"-{stack.end:x} " in line and line.endswith("[stack]") for line in text)
    code = [m for m in found if "x" in m.perms and m.inode]
    assert code and all(m.path.startswith("/") and not m.deleted for m in code)
    assert {(m.dev, m.inode) for m in code} == p.executable_ids(os.getpid())
    for file in p.executable_files(os.getpid()):
        assert file.open_path and os.stat(file.open_path).st_ino == file.inode


def test_maps_line_forms() -> None:
    parse = p._parse
    line = b"7f0000000000-7f0000001000 r-xp 00002000 fe:01 77                 /tmp/a b\\012c (deleted)"
    mapping = parse(line)
    assert mapping == p.Mapping(
        0x7F0000000000, 0x7F0000001000, "r-xp", 0x2000, "fe:01", 77, "/tmp/a b\nc", True
    )
    anonymous = parse(b"00400000-00401000 rw-p 00000000 00:00 0 ")
    assert anonymous is not None and anonymous.path == "" and anonymous.inode == 0
    for bad in (b"", b"x", b"zz-yy r-xp 0 0:0 0 /a", b"1-2 r-xp 0 0:0 many /a", b"\xff\xfe 1 2 3 4 5"):
        assert parse(bad) is None


def test_new_code_is_noticed(sleeper: subprocess.Popen[bytes]) -> None:
    process = p.open_process(sleeper.pid)
    seen = p.executable_ids(sleeper.pid)
    assert not p.engine_files_changed(process, seen)
    assert p.engine_files_changed(process, seen - {next(iter(seen))})
    sleeper.kill()
    sleeper.wait()
    assert not p.engine_files_changed(process, frozenset())


MODELS = """
import mmap, os, sys
keep = []
for path in sys.argv[1:]:
    fd = os.open(path.encode('utf-8', 'surrogateescape'), os.O_RDONLY)
    if path.endswith('mapped'):
        keep.append(mmap.mmap(fd, 0, prot=mmap.PROT_READ)); os.close(fd)
print('up', flush=True)
sys.stdin.read()
"""


def test_models_by_their_first_bytes(tmp_path: Path) -> None:
    """Quotes, line breaks and bad UTF-8 in names; names lie, the magic does not; never a path."""
    wanted = {
        b"plain.gguf": 100,
        b"quo\"ted 'm'.bin": 300,
        b"line\nbreak.gguf": 200,
        b"bad\xff\xfe.gguf": 400,
        b"deleted.gguf.mapped": 500,
        b"only.mapped": 600,
    }
    paths = []
    for name, size in wanted.items():
        path = os.fsencode(tmp_path) + b"/" + name
        with open(path, "wb") as file:
            file.write(b"GGUF" + bytes(size))
        paths.append(os.fsdecode(path))
    for other, contents in (("fake.gguf", b"NOPE" + bytes(1000)), ("short.gguf", b"GGUF")):
        (tmp_path / other).write_bytes(contents)
        paths.append(str(tmp_path / other))
    os.mkfifo(tmp_path / "pipe")
    keep_open = os.open(tmp_path / "pipe", os.O_RDWR)
    child = subprocess.Popen(
        [sys.executable, "-c", MODELS, *paths],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=[keep_open],
    )
    try:
        assert child.stdout is not None and child.stdout.readline() == b"up\n"
        os.unlink(tmp_path / "deleted.gguf.mapped")
        assert p.model_files(child.pid) == [
            "only.mapped", "deleted.gguf.mapped", "bad\\xff\\xfe.gguf", 'quo"ted \'m\'.bin',
            "line\\nbreak.gguf", "plain.gguf",
        ]  # fmt: skip
    finally:
        os.close(keep_open)
        child.communicate()
