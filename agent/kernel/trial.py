# SPDX-License-Identifier: Apache-2.0
"""Small things to try the kernel with: a victim function and a program that counts.

Both are machine code made here. The victim lies in a memory file that is mapped private and
executable, so no compiler and no writable-executable memory is needed on the device; the
program needs neither an object file nor libbpf.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from . import bpfsys

# A function that saves and restores its frame and returns, and where a probe belongs in it.
_CODE = {
    "x86_64": bytes.fromhex("55 5d c3"),  # push %rbp; pop %rbp; ret
    "aarch64": bytes.fromhex("1f2003d5 c0035fd6"),  # nop; ret
}
_STEPPED = {
    "x86_64": bytes.fromhex("f30f1efa c3"),  # endbr64; ret
    "aarch64": bytes.fromhex("e00300aa c0035fd6"),  # mov x0, x0; ret
}
_SANDBOX = Path(__file__).with_name("sandboxed.py")


class VictimFunction:
    """A function in a file of its own that nothing else maps; ``path`` and offset 0 are its site."""

    def __init__(self, *, stepped: bool = False) -> None:
        """``stepped``: it begins with an instruction that the kernel does not emulate, but steps over
        in a place of its own. Raises OSError when the machine forbids executable memory files."""
        code = (_STEPPED if stepped else _CODE)[platform.machine()]
        self.descriptor = os.memfd_create("profinferd-trial", os.MFD_CLOEXEC)
        try:
            os.write(self.descriptor, code.ljust(mmap.PAGESIZE, b"\x90"))
            self._memory: int | None = map_code(self.descriptor)
        except BaseException:
            os.close(self.descriptor)
            raise

    @property
    def path(self) -> str:
        """A path for this process; the kernel resolves it when attaching."""
        return f"/proc/self/fd/{self.descriptor}"

    def call(self) -> None:
        """Run the function once in this process."""
        if self._memory is None:
            raise ValueError("the victim is closed")
        ctypes.CFUNCTYPE(None)(self._memory)()

    def call_in_sandbox(self, command: Sequence[str] | None = None, timeout: float = 20) -> int:
        """Run it once in a child of ours under a seccomp filter; returns the child's status.

        0: it came back. Negative: killed by that signal. :data:`NO_SECCOMP`: this kernel has
        no filters. ``command`` replaces the child, for tests.
        """
        child = command or [sys.executable, "-I", "-S", str(_SANDBOX), str(self.descriptor)]
        return subprocess.run(
            child, pass_fds=[self.descriptor], stdin=subprocess.DEVNULL, timeout=timeout, check=False
        ).returncode

    def close(self) -> None:
        """Unmap and forget it. May be called twice."""
        if self._memory is not None:
            _libc.munmap(ctypes.c_void_p(self._memory), ctypes.c_size_t(mmap.PAGESIZE))
            os.close(self.descriptor)
            self._memory = None

    def __enter__(self) -> VictimFunction:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p


def map_code(descriptor: int) -> int:
    """Map the first page of a file private, readable and executable; returns its address.

    Python's mmap gives no address of a read-only mapping, hence the call by hand.
    """
    address = _libc.mmap(
        None, ctypes.c_size_t(mmap.PAGESIZE), mmap.PROT_READ | mmap.PROT_EXEC, mmap.MAP_PRIVATE, descriptor,
        ctypes.c_long(0),
    )  # fmt: skip
    if address is None or address == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise OSError(number, bpfsys.strerror(number))
    return int(address)


def _instruction(code: int, target: int = 0, source: int = 0, offset: int = 0, value: int = 0) -> bytes:
    return struct.pack("=BBhi", code, target | source << 4, offset, value)


def returning(value: int = 0) -> bytes:
    """A program that only returns ``value``."""
    return _instruction(0xB7, 0, value=value) + _instruction(0x95)


def counting(map_fd: int) -> bytes:
    """A program that adds 1 to the first u64 of an array map, and returns 0."""
    return b"".join(
        (
            _instruction(0x62, 10, offset=-4),  # key = 0 on the stack
            _instruction(0xBF, 2, 10),
            _instruction(0x07, 2, value=-4),  # r2 = &key
            _instruction(0x18, 1, 1, value=map_fd),
            _instruction(0),  # r1 = map (two slots)
            _instruction(0x85, value=1),  # bpf_map_lookup_elem
            _instruction(0x15, 0, offset=2),  # nothing: leave
            _instruction(0xB7, 1, value=1),
            _instruction(0xDB, 0, 1),  # atomic *(u64 *)r0 += 1
            returning(0),
        )
    )


class Counter:
    """A loaded uprobe program that counts its hits. Raises OSError from the kernel."""

    def __init__(self, attach_type: int = 0, *, flags: int = 0) -> None:
        self._map = bpfsys.map_create(bpfsys.MAP_ARRAY, 4, 8, 1)
        try:
            self.fd = bpfsys.prog_load(
                bpfsys.PROG_KPROBE, counting(self._map), attach_type=attach_type, flags=flags
            )
        except BaseException:
            os.close(self._map)
            raise

    def hits(self) -> int:
        """How often it ran since it was loaded."""
        raw = bpfsys.map_lookup(self._map, bytes(4), 8)
        return int.from_bytes(raw or b"", sys.byteorder)

    def close(self) -> None:
        """Unload."""
        os.close(self.fd)
        os.close(self._map)

    def __enter__(self) -> Counter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
