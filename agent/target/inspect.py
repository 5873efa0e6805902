# SPDX-License-Identifier: Apache-2.0
"""Look into a process before attaching: which engine, which functions, where to probe.

The files are opened here, by the kernel's own links to what is mapped, and handed as
descriptors to a short-lived child (:mod:`.inspect_child`), which does the parsing and the
disassembling under limits. What comes back is checked against types and a size. A child
that crashes or hangs costs the file that it was looking at, nothing else.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import sys

import msgspec

from ..errors import MachineError, TargetEnded
from .catalogue import Catalogue, Engine, Hook, load_catalogue
from .child import Child
from .conclusion import Found, conclude
from .engine_file import FileFacts
from .facts import FileFailure, FileInfo, HookRefusal, HookSite, TargetInfo
from .process import MappedFile, Process, alive, executable_files, model_files, open_process

__all__ = [
    "FileFailure",
    "FileInfo",
    "HookRefusal",
    "HookSite",
    "TargetInfo",
    "inspect_target",
    "start_child",
]

TIMEOUT = 20.0
SPARE_FDS = 64
MAX_CRASHES = 3
_MACHINES = ("x86_64", "aarch64")


class _Answer(msgspec.Struct, forbid_unknown_fields=True):
    """One line of the child; exactly one of the kinds is set."""

    start: int | None = None
    file: int | None = None
    failed: str | None = None
    facts: FileFacts | None = None
    nameless: int | None = None
    engine: str | None = None
    build_id: str | None = None
    done: bool = False


def inspect_target(
    target: int | Process,
    catalogue: Catalogue | None = None,
    timeout: float = TIMEOUT,
    child: Child | None = None,
) -> TargetInfo:
    """Everything needed to attach to a process; close the result (it holds open files).

    Raises TargetError (no such process, no engine, no symbols, ...), TargetEnded,
    MachineError (not permitted). ``timeout`` in seconds bounds each of at most four children.
    ``child``: one from :func:`start_child`, to save its start-up time; it is used up.
    """
    try:
        process = target if isinstance(target, Process) else open_process(target)
        child = child or start_child()
        return _look(process, child, catalogue, timeout)
    finally:
        if child is not None:
            child.close()


def _look(process: Process, child: Child, catalogue: Catalogue | None, timeout: float) -> TargetInfo:
    mapped = executable_files(process.pid)
    if not mapped and not alive(process):
        raise TargetEnded(f"process {process.pid} ended while it was looked at")
    descriptors: dict[int, int] = {}
    unreadable: dict[int, str] = {}
    kept: set[int] = set()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - SPARE_FDS
    try:
        for number, file in enumerate(mapped):
            try:
                if len(descriptors) >= most:
                    raise OSError(errno.EMFILE, "more files than may be open at once (ulimit -n)")
                descriptors[number] = _open(file)
            except OSError as error:
                unreadable[number] = error.strerror or "cannot be opened"
        catalogue = catalogue or load_catalogue()
        models = tuple(model_files(process.pid))
        found = _ask(child, process, mapped, descriptors, catalogue, timeout)
        found.failed.update(unreadable)
        if not alive(process):
            raise TargetEnded(f"process {process.pid} ended while it was looked at")
        info = conclude(process, mapped, descriptors, catalogue, found, models)
        kept = {file.fd for file in info.files}
        return info
    finally:
        for fd in descriptors.values():
            if fd not in kept:
                os.close(fd)


def start_child() -> Child:
    """Start the child before it is needed: its interpreter takes 0.1 s to be ready.

    Hand it to :func:`inspect_target`, which ends it, or call its ``close``.
    """
    return Child(_command())


def _open(file: MappedFile) -> int:
    if not file.open_path:
        raise OSError(0, "no path leads to the very file that is mapped (CAP_CHECKPOINT_RESTORE opens it)")
    fd = os.open(file.open_path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    # The mapping may have been replaced since it was listed.
    if os.fstat(fd).st_ino != file.inode:
        os.close(fd)
        raise OSError(0, "the mapped file changed while it was looked at")
    return fd


def _command() -> list[str]:
    """An interpreter without site packages' start-up files: half the time, nothing of the environment."""
    here = os.path.dirname(os.path.abspath(__file__))
    root = os.path.dirname(os.path.dirname(os.path.dirname(here)))
    paths = [root, *(p for p in sys.path if os.path.isabs(p) and p != root)]
    code = (
        "import sys; sys.path[:] = [p for p in sys.path if p not in sys.argv[1:]] + sys.argv[1:]; "
        "from profinferd.agent.target.inspect_child import main; main()"
    )
    if not sys.executable:
        raise MachineError("the Python interpreter does not know its own path", "start it by its full path")
    return [sys.executable, "-I", "-S", "-c", code, *paths]


def _engine_data(engine: Engine) -> dict[str, object]:
    """The engine as JSON, with what the child would have to work out from the arguments."""
    data: dict[str, object] = msgspec.to_builtins(engine)
    data["hooks"] = [_hook_data(h) for h in engine.hooks]
    data["sources"] = [
        {"name": s.name, "level": s.level, "complete": s.complete, "hooks": [_hook_data(h) for h in s.hooks]}
        for s in engine.sources
    ]
    return data


def _hook_data(hook: Hook) -> dict[str, object]:
    data: dict[str, object] = msgspec.to_builtins(hook)
    data["arg_regs"] = {m: hook.arg_regs(m) for m in _MACHINES}
    data["stack_args"] = {m: hook.stack_args(m) for m in _MACHINES}
    return data


def _ask(
    child: Child, process: Process, mapped: list[MappedFile], descriptors: dict[int, int],
    catalogue: Catalogue, timeout: float,
) -> Found:  # fmt: skip
    """Put the request to a child; after a crash, to another one for the files that are left."""
    found = Found({}, {})
    engines = [_engine_data(e) for e in catalogue.engines]
    pending, crashes = list(descriptors), 0
    decoder = msgspec.json.Decoder(_Answer)
    while True:
        files = [{"file": n, "path": mapped[n].path, "root": f"/proc/{process.pid}/root"} for n in pending]
        request = json.dumps({"engines": engines, "files": files}).encode()
        child.send(request, [descriptors[n] for n in pending], timeout)
        current: int | None = None
        for line in child.lines(timeout):
            try:
                answer = decoder.decode(line)
            except msgspec.MsgspecError as error:
                child.fail(f"its answer makes no sense ({error})")
                break
            if answer.start is not None:
                current = answer.start
            elif answer.file is not None:
                pending.remove(answer.file)
                if answer.facts is not None:
                    found.facts[answer.file] = answer.facts
                elif answer.failed is not None:
                    found.failed[answer.file] = answer.failed
            elif answer.nameless is not None:
                found.nameless = (answer.nameless, answer.engine or "", answer.build_id or "")
            elif answer.done:
                return found
        crashes += 1
        reason = child.reason()
        if current is None or current not in pending or crashes > MAX_CRASHES:
            for number in pending:
                found.failed[number] = f"looking into it failed: {reason}"
            return found
        found.failed[current] = f"looking into it failed: {reason}"
        pending.remove(current)
        if not pending:
            return found
        child.restart()
