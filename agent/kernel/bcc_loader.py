# SPDX-License-Identifier: Apache-2.0
"""``--loader bcc``: the programs of ``probes/bcc``, compiled on this machine by BCC.

BCC runs in a helper process for the few seconds that it takes (``bcc_child.py``). What comes
back are descriptors of maps and programs; from there on everything is as with libbpf, the
sites, the links, the rings and the records.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import socket
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from ...probes.build import HERE as PROBES
from ..errors import MachineError, ProfinferError
from . import bpfsys, reasons
from .header import load_header
from .links import attach_multi
from .maps import Map, map_of
from .programs import Drained, GgmlPrograms, _own_text_offset
from .trial import returning

PYTHON = "/usr/bin/python3"
BCC = "/usr/lib/python3/dist-packages/bcc"
"""Where Debian's python3-bpfcc lies."""
INSTALL = "apt install python3-bpfcc (the bcc of the Python index is an unrelated package)"
NOTE = (
    "loaded by BCC: pages of the target that are not present are not read, experts of MUL_MAT_ID are not "
    "counted, graphs of more than 1920 nodes are cut, and overhead is not estimated"
)
"""What this loader cannot do, for the report."""
PAGES = {"events": 64, "ops": 1024, "nodes": 1024, "ints": 256, "raws": 64}
"""Sizes of the rings, of 4 KiB; powers of two."""
MAX_TENSOR = 504
"""Bytes of a tensor that the programs read, at most: below RAW_BYTES, and whole words."""
DEADLINE = 180.0
"""Seconds for compiling and verifying, which take five on a PC."""
TAILS = ("walk", "describe", "positions", "finish")
_PROBES = ("on_entry", "on_return", "on_op_dispatch", "on_op_fused2", *TAILS)
_MAPS = (*PAGES, "layouts", "targets", "threads", "graphs", "known", "spares", "stats", "tails")
_ABSENT = 0xFFFF
_ENVIRONMENT = ("BCC_KERNEL_SOURCE", "BCC_LINUX_VERSION_CODE", "BCC_KERNEL_MODULES_SUFFIX")
"""Of our environment, what BCC is told: where the kernel's headers are, if not where they belong."""

Records = npt.NDArray[Any]


@dataclass(frozen=True)
class _Program:
    fd: int

    def info(self) -> bpfsys.ProgramInfo:
        return bpfsys.program_info(self.fd)


class BccObject:
    """Descriptors of what the helper loaded. Close it; links keep their programs alive."""

    def __init__(self, maps: Mapping[str, int], programs: Mapping[str, int]) -> None:
        self._maps = dict(maps)
        self.programs = {name: _Program(fd) for name, fd in programs.items()}

    def program_fd(self, name: str) -> int:
        """The descriptor of a loaded program."""
        return self.programs[name].fd

    def map(self, name: str) -> Map:
        """A loaded map."""
        return map_of(name, self._maps[name])

    def close(self) -> None:
        """Unload. May be called twice."""
        for fd in (*self._maps.values(), *(program.fd for program in self.programs.values())):
            os.close(fd)
        self._maps, self.programs = {}, {}


class BccPrograms(GgmlPrograms):
    """:class:`.GgmlPrograms` from BCC. There are no sums: ops are traced, or not looked at."""

    notes: ClassVar[tuple[str, ...]] = (NOTE,)

    # Tensors come as they are: the programs have no room for taking them apart. Hits come singly.
    records: ClassVar[Mapping[str, str]] = {**GgmlPrograms.records, "nodes": "raw_chunk", "ops": "op_hit"}

    def __init__(self, obj: BccObject, method: str, left_out: Mapping[str, str]) -> None:
        super().__init__(obj, method, load_header(PROBES / "events.h"), left_out)
        self._fields: dict[str, int] = {}

    @classmethod
    def load(
        cls,
        method: str = "auto",
        *,
        btf_path: str | None = None,
        ring_bytes: Mapping[str, int] = MappingProxyType({}),
        targets: int = 0,
        bcc: str = BCC,
    ) -> GgmlPrograms:
        """As :meth:`.GgmlPrograms.load`, in about five seconds. ``bcc``: the folder of its package.

        ``method``: auto, multi or perf. BCC needs no BTF.
        """
        if method == "session":
            raise MachineError("BCC loads no session programs", "use --attach-method multi or perf")
        if method == "auto":
            method = "multi" if _has_multi() else "perf"
        pages = {name: ring_bytes.get(name, 4096 * n) // 4096 for name, n in PAGES.items()}
        obj, left_out = load_object(bcc, method, pages)
        return cls(obj, method, left_out)

    def set_layout(self, index: int, fields: Mapping[str, int]) -> None:
        """As in the base class. One layout at a time: what is in ring "nodes" was read by it."""
        self._fields = {**fields, "t_size": min(fields["t_size"], MAX_TENSOR)}
        super().set_layout(index, self._fields)

    def drain(self) -> Drained:
        """As in the base class."""
        found = super().drain()
        return Drained(
            found.events,
            found.ops,
            node_descs(found.nodes, self._fields, self.types.dtype("node_desc")),
            found.ints,
            found.raws,
        )


def node_descs(raws: Records, layout: Mapping[str, int], dtype: np.dtype[Any]) -> Records:
    """struct node_desc for each raw tensor; ``layout``: the fields of struct layout."""
    out = np.zeros(len(raws), dtype)
    if not len(raws):
        return out
    slot = raws["what"] >> 8
    out["addr"], out["seq"], out["index"] = raws["addr"], raws["seq"], raws["index"]
    out["role"], out["slot"] = slot > 0, np.where(slot > 0, slot - 1, 0)
    out["fault"] = raws["size"] == 0
    table = np.ascontiguousarray(raws["bytes"])
    for name in dtype.names or ():
        at = layout.get(f"t_{name}", _ABSENT)
        field = dtype[name]
        if at == _ABSENT or at + field.itemsize > table.shape[1]:
            continue
        values = np.ascontiguousarray(table[:, at : at + field.itemsize]).view(field.base)
        out[name] = values if field.shape else values[:, 0]
    out["src"][:, layout["n_src"] :] = 0
    return out


# ---- the helper process -------------------------------------------------------------------


def load_object(bcc: str, method: str, pages: Mapping[str, int]) -> tuple[BccObject, dict[str, str]]:
    """Have everything compiled and loaded for links of ``method``; (object, what was left out)."""
    if not os.access(PYTHON, os.X_OK) or not os.path.isfile(f"{bcc}/__init__.py"):
        lacking = PYTHON if not os.access(PYTHON, os.X_OK) else bcc
        raise MachineError(f"BCC for Python is not installed: there is no {lacking}", INSTALL)
    _require_headers()
    attach_type = str(bpfsys.ATTACH_UPROBE_MULTI if method == "multi" else -1)
    request = {
        "bcc": bcc,
        "source": str(PROBES / "bcc" / "ggml_bcc.c"),
        "flags": [f"-I{PROBES}", *(f"-D{name.upper()}_PAGES={n}" for name, n in pages.items())],
        "programs": {**dict.fromkeys(_PROBES, attach_type), "on_thread_exit": "raw_tracepoint"},
        "optional": ["on_thread_exit"],
        "tails": TAILS,
        "maps": _MAPS,
    }
    answer, descriptors = _ask(request)
    names = [*answer["maps"], *answer["programs"]]
    if len(names) != len(descriptors):
        for descriptor in descriptors:
            os.close(descriptor)
        raise MachineError("descriptors from the BCC helper were lost", "raise the limit of open files")
    count = len(answer["maps"])
    maps = dict(zip(names[:count], descriptors[:count], strict=True))
    return BccObject(maps, dict(zip(names[count:], descriptors[count:], strict=True))), answer["left_out"]


def _ask(request: Mapping[str, Any]) -> tuple[dict[str, Any], list[int]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    with ours, tempfile.TemporaryFile() as said:
        with theirs:
            child = subprocess.Popen(
                [PYTHON, "-I", "-S", str(Path(__file__).with_name("bcc_child.py"))],
                stdin=theirs.fileno(),
                stdout=said,
                stderr=said,
                cwd="/",
                env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", **environment},
            )
        try:
            ours.settimeout(DEADLINE)
            ours.sendall(json.dumps(request).encode())
            message, descriptors, _, _ = socket.recv_fds(ours, 1 << 16, 64)
        except (TimeoutError, BrokenPipeError, ConnectionResetError) as error:
            message, descriptors = b"", []
            if isinstance(error, TimeoutError):
                raise MachineError(f"BCC takes longer than {DEADLINE:g} s on this machine") from error
        finally:
            ours.close()  # it waits for that; without an answer it is not waited for
            if not _ended(child):
                child.kill()
            child.wait()
        said.seek(max(0, said.seek(0, os.SEEK_END) - (1 << 16)))
        log = said.read().decode("utf-8", "replace")
    if not message:
        raise _died(child.returncode, log)
    answer: dict[str, Any] = json.loads(message)
    if failed := answer.get("failed"):
        raise _failed(str(failed[0]), str(failed[1]), log)
    return answer, list(descriptors)


def _ended(child: subprocess.Popen[bytes]) -> bool:
    try:
        child.wait(1.0)
    except subprocess.TimeoutExpired:
        return False
    return True


def _died(code: int, log: str) -> MachineError:
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        return MachineError(f"the BCC helper was ended by {name} before the programs were loaded")
    return MachineError(f"the BCC helper failed: {reasons.last_words(log) or f'exit status {code}'}")


def _failed(part: str, why: str, log: str) -> MachineError:
    if part == "bcc":
        return MachineError(f"BCC cannot be loaded: {why}", INSTALL)
    if part == "compile":
        errors = [line for line in log.splitlines() if "error:" in line]
        return MachineError(
            f"BCC cannot compile the programs: {errors[0].strip() if errors else reasons.last_words(log)}",
            "BCC needs headers that fit this kernel",
        )
    if missing := reasons.missing(reasons.FOR_LOADING):
        return MachineError(f"BCC cannot load {part}: {', '.join(missing)} is missing", "run as root")
    return MachineError(f"BCC cannot load {part}: {why}: {reasons.last_words(log)}")


def _require_headers() -> None:
    """BCC compiles against the kernel's headers; without them it prints pages of errors."""
    release = platform.release()
    named = os.environ.get("BCC_KERNEL_SOURCE")
    folders = [named] if named else [f"/lib/modules/{release}/{name}" for name in ("build", "source")]
    if any(os.path.isdir(f"{folder}/include/linux") for folder in folders):
        return
    # BCC could also unpack /sys/kernel/kheaders.tar.xz, but would take a folder of that name in
    # /tmp for the result of doing so, whoever made it (CVE-2024-2314).
    raise MachineError(
        f"BCC needs the headers of the kernel, and {folders[0]} holds none",
        f"apt install linux-headers-{release}, or name a tree of headers in BCC_KERNEL_SOURCE",
    )


def _has_multi() -> bool:
    """Whether the kernel attaches many probes with one link: only trying tells."""
    try:
        program = bpfsys.prog_load(bpfsys.PROG_KPROBE, returning(), attach_type=bpfsys.ATTACH_UPROBE_MULTI)
    except OSError:
        return False
    try:
        attach_multi(program, "/proc/self/exe", [_own_text_offset()], [0], pid=os.getpid()).close()
    except ProfinferError:
        return False
    finally:
        os.close(program)
    return True
