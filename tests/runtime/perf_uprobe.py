# SPDX-License-Identifier: Apache-2.0
"""Uprobes counted by perf alone: no BPF program and none of our own code takes part."""

from __future__ import annotations

import ctypes
import os
import struct
from pathlib import Path
from types import TracebackType

_PERF_EVENT_OPEN = 298
_ATTR_SIZE = 128
_CLOEXEC = 8
_PMU = Path("/sys/bus/event_source/devices/uprobe")
_libc = ctypes.CDLL(None, use_errno=True)


class PerfUprobe:
    """Counts how often one process passes (or, with ``ret``, returns from) a file offset.

    Raises OSError with the kernel's errno when the probe is refused.
    """

    def __init__(self, path: str | os.PathLike[str], offset: int, pid: int, ret: bool = False) -> None:
        kind = int((_PMU / "type").read_text())
        bit = int((_PMU / "format" / "retprobe").read_text().split(":")[1])
        name = ctypes.create_string_buffer(os.fsencode(path))
        attr = ctypes.create_string_buffer(_ATTR_SIZE)
        config = 1 << bit if ret else 0
        head = (kind, _ATTR_SIZE, config, 0, 0, 0, 0, 0, 0, ctypes.addressof(name), offset)
        struct.pack_into("IIQQQQQIIQQ", attr, 0, *head)
        self.fd = _libc.syscall(_PERF_EVENT_OPEN, attr, pid, -1, -1, _CLOEXEC)
        if self.fd < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))

    def count(self) -> int:
        return int(struct.unpack("Q", os.read(self.fd, 8))[0])

    def __enter__(self) -> PerfUprobe:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self.fd)
