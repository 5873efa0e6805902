# SPDX-License-Identifier: Apache-2.0
"""Memory of other processes: read, absent, refused and gone are four different things."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from profinferd.agent.errors import TargetEnded
from profinferd.agent.target import memory
from profinferd.agent.target.memory import AbsentMemory, read_memory

TARGET = """
import ctypes, mmap, sys
page = mmap.mmap(-1, 3 * mmap.PAGESIZE)
page[:] = bytes(range(256)) * (3 * mmap.PAGESIZE // 256)
address = ctypes.addressof(ctypes.c_char.from_buffer(page))
libc = ctypes.CDLL(None, use_errno=True)
libc.munmap(ctypes.c_void_p(address + 2 * mmap.PAGESIZE), ctypes.c_size_t(mmap.PAGESIZE))
print(address, flush=True)
sys.stdin.read()
"""
EXPECTED = bytes(range(256))
READER = """
import sys
from profinferd.agent.errors import ProfinferError
from profinferd.agent.target.memory import read_memory
{before}
try:
    print(read_memory(int(sys.argv[1]), int(sys.argv[2]), 256) == bytes(range(256)))
except ProfinferError as error:
    print(type(error).__name__, error)
"""


@pytest.fixture
def target() -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    child = subprocess.Popen([sys.executable, "-c", TARGET], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    yield child, int(child.stdout.readline())
    child.kill()
    child.communicate()


def test_read(target: tuple[subprocess.Popen[bytes], int]) -> None:
    child, address = target
    assert read_memory(child.pid, address, 256) == EXPECTED
    assert read_memory(child.pid, address + 4000, 1000) == (EXPECTED * 20)[4000:5000]
    assert read_memory(child.pid, address, 0) == b""
    page = os.sysconf("SC_PAGESIZE")
    assert len(read_memory(child.pid, address, 2 * page)) == 2 * page


@pytest.mark.parametrize("by_file", [False, True], ids=["process_vm_readv", "/proc/PID/mem"])
def test_absent(
    target: tuple[subprocess.Popen[bytes], int], by_file: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C63: nothing there is not the same as not allowed; half of it is nothing, too."""
    child, address = target
    if by_file:
        monkeypatch.setattr(memory, "_by_readv", lambda *_: (b"", 38))
    page = os.sysconf("SC_PAGESIZE")
    assert read_memory(child.pid, address, 256) == EXPECTED
    for start, count in ((0, 8), (address + 2 * page, 8), (address + 2 * page - 4, 8), ((1 << 64) - 8, 8),
                         ((1 << 64) - 4, 8), (1 << 63, 8), (1 << 70, 8), (-8, 8)):  # fmt: skip
        with pytest.raises(AbsentMemory, match="no 8 readable bytes"):
            read_memory(child.pid, start, count)
    child.kill()
    child.wait()
    with pytest.raises(TargetEnded):
        read_memory(child.pid, address, 256)


def test_unreasonable_counts() -> None:
    for count in (-1, (64 << 20) + 1):
        with pytest.raises(ValueError, match="cannot be read at once"):
            read_memory(os.getpid(), 0, count)


def reader(before: str, target: tuple[subprocess.Popen[bytes], int], *prefix: str) -> str:
    child, address = target
    command = [
        *prefix,
        sys.executable,
        "-c",
        READER.replace("{before}", before),
        str(child.pid),
        str(address),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return done.stdout + done.stderr


def test_refused_without_the_capability(target: tuple[subprocess.Popen[bytes], int]) -> None:
    """C63: without CAP_SYS_PTRACE a more privileged process may not be read; the capability is named."""
    if os.geteuid() != 0:
        pytest.skip("dropping a capability needs root")
    said = reader("", target, "setpriv", "--bounding-set=-sys_ptrace", "--inh-caps=-sys_ptrace")
    assert said.startswith("MachineError") and "CAP_SYS_PTRACE" in said and said.count("\n") == 1
    assert reader("", target) == "True\n"


# A filter as container runtimes install it: this one system call fails, all others pass.
SECCOMP = """
import ctypes, struct
code = [(0x20, 0, 0, 0), (0x15, 0, 1, {number}), (0x06, 0, 0, 0x00050000 | {error}), (0x06, 0, 0, 0x7fff0000)]
raw = b"".join(struct.pack("HBBI", *row) for row in code)
program = ctypes.create_string_buffer(raw, len(raw))
class Prog(ctypes.Structure):
    _fields_ = [("len", ctypes.c_ushort), ("filter", ctypes.c_void_p)]
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, ctypes.byref(Prog(len(code), ctypes.addressof(program))), 0, 0) == 0
"""
NUMBERS = {"x86_64": 310, "aarch64": 270}


@pytest.mark.parametrize("error", [1, 38], ids=["EPERM", "ENOSYS"])
def test_filtered_system_call(target: tuple[subprocess.Popen[bytes], int], error: int) -> None:
    """C63: a system call filter refuses process_vm_readv; /proc/PID/mem is read instead."""
    number = NUMBERS[os.uname().machine]
    before = SECCOMP.replace("{number}", str(number)).replace("{error}", str(error))
    check = "\nlibc.process_vm_readv(1, None, 0, None, 0, 0); print(ctypes.get_errno())\n"
    said = reader(before + check, target)
    assert said == f"{error}\nTrue\n", "the filter was in force, and the memory was read all the same"


def test_kernel_types() -> None:
    """The structure handed to the kernel has the kernel's size."""
    assert ctypes.sizeof(memory._Iovec) == 2 * ctypes.sizeof(ctypes.c_void_p)
    assert Path("/proc/self/mem").exists()
