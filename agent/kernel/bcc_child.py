# SPDX-License-Identifier: Apache-2.0
"""The helper process of ``--loader bcc``: has BCC compile and load, hands over what came of it.

Run as a file, under the system's Python without site packages: BCC belongs to that Python and
is loaded by its path, for a package of the same name in the Python index is another one. It
imports nothing of ours. One request comes over the socket that is standard input, one answer
goes back, with the descriptors of all maps and programs: the process ends then, and its memory
with it, and nothing is lost.
"""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import resource
import socket
import sys
from typing import Any

ATTEMPTS = 5
MAX_MESSAGE = 1 << 16
CPU_SECONDS = 300
MEMORY = 4 << 30
LOG_BYTES = 16 << 20  # of standard error, a file: verifiers have much to say


class Failure(Exception):
    """(what is missing or wrong: "bcc", "compile" or the name of a program; why)."""


def load_bcc(folder: str) -> Any:
    """The module of the package in ``folder``."""
    spec = importlib.util.spec_from_file_location(
        "bcc", os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
    )
    if spec is None or spec.loader is None:
        raise Failure("bcc", f"{folder} is no package")
    module = importlib.util.module_from_spec(spec)
    sys.modules["bcc"] = module
    try:
        spec.loader.exec_module(module)
    except (ImportError, OSError, AttributeError) as error:  # the latter: a library of another version
        raise Failure("bcc", str(error)) from error
    return module


def load(request: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
    """Compile and load; returns the answer and the descriptors that go with it."""
    bcc = load_bcc(request["bcc"])
    with open(request["source"], encoding="utf-8") as file:
        text = file.read()
    try:
        module = bcc.BPF(text=text, cflags=request["flags"])
    except Exception as error:  # BCC raises nothing more special
        raise Failure("compile", str(error)) from error
    programs: dict[str, int] = {}
    left_out: dict[str, str] = {}
    for name, kind in request["programs"].items():
        tracepoint = kind == "raw_tracepoint"
        program_type = bcc.BPF.RAW_TRACEPOINT if tracepoint else bcc.BPF.KPROBE
        try:
            loaded = load_one(module, name, program_type, -1 if tracepoint else int(kind))
        except Exception as error:
            if name not in request["optional"]:
                raise Failure(name, str(error)) from error
            left_out[name] = str(error)
        else:
            programs[name] = loaded.fd
    for number, name in enumerate(request["tails"]):
        module["tails"][number] = module.funcs[name.encode()]
    maps = {name: int(bcc.libbcc.lib.bpf_table_fd(module.module, name.encode())) for name in request["maps"]}
    if missing := [name for name, fd in maps.items() if fd < 0]:
        raise Failure("compile", f"there is no map {missing[0]}")
    answer = {"maps": list(maps), "programs": list(programs), "left_out": left_out}
    return answer, [*maps.values(), *programs.values()]


def load_one(module: Any, name: str, program_type: int, attach_type: int) -> Any:
    """Have the kernel verify a program, which it gives up when a signal comes (SIGCONT, say): again then,
    as libbpf does by itself."""
    for left in reversed(range(ATTEMPTS)):
        try:
            return module.load_func(name, program_type, attach_type=attach_type)
        except Exception as error:
            if not left or os.strerror(errno.EAGAIN) not in str(error):
                raise
    return None


def main() -> int:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (LOG_BYTES, LOG_BYTES))
    with socket.socket(fileno=0) as peer:
        request = json.loads(peer.recv(MAX_MESSAGE))
        try:
            answer, descriptors = load(request)
        except Failure as failure:
            answer, descriptors = {"failed": failure.args}, []
        socket.send_fds(peer, [json.dumps(answer).encode()[:MAX_MESSAGE]], descriptors)
        # Descriptors in flight are safe, yet a program array forgets its programs when the last
        # process closes it: wait until the other side has them, or is gone.
        peer.recv(1)
    return 0


if __name__ == "__main__":
    # BCC's own clean-up at exit would take seconds, and there is nothing that it must do.
    status = main()
    sys.stderr.flush()
    os._exit(status)
