# SPDX-License-Identifier: Apache-2.0
"""The short-lived process that looks into files of the target.

Reads one request from the socket that is its standard input: a header, open descriptors
of files, and JSON that names them and describes the engines. Writes one JSON object a
line: ``{"start": i}`` before a file and an answer after it, so that a file that kills us
is known by name and hides no other. It works under limits on memory, CPU time and files
that it could not lift again.
"""

from __future__ import annotations

import _socket  # the C half: the other one costs 5 ms of start-up
import json
import resource
import signal
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from ..errors import TargetError
from .debugfile import add_debug_file
from .elf import ElfFile
from .engine_file import FileFacts, inspect_engine, mentions, preload, speaks_of

MEMORY_LIMIT = 1 << 30
CPU_SECONDS, ALL_CPU_SECONDS = 60, 240
"""Of one file, which on a fast machine takes one; of all that one child is asked about."""
MAX_REQUEST = 16 << 20


def limit_ourselves() -> None:
    """No core, no written files, bounded memory and CPU time; killed by an alarm if all else fails."""
    for what, limit in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_AS, MEMORY_LIMIT),
        (resource.RLIMIT_CPU, ALL_CPU_SECONDS),
    ):
        _, hard = resource.getrlimit(what)
        new = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(what, (new, new))
    signal.alarm(ALL_CPU_SECONDS)


def allow_a_file() -> None:
    """So much CPU time from now on: what earlier files took is not this one's fault."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    until = int(used.ru_utime + used.ru_stime) + 1 + CPU_SECONDS
    resource.setrlimit(
        resource.RLIMIT_CPU, (until if hard == resource.RLIM_INFINITY else min(until, hard), hard)
    )


def receive() -> tuple[dict[str, Any], list[int]]:
    """The request and the descriptors that came with it, as :meth:`.child.Child.send` sent them."""
    sock = _socket.socket(fileno=0)
    size, count = struct.unpack("<II", _exactly(sock, 8))
    descriptors: list[int] = []
    while len(descriptors) < count:
        data, messages, _, _ = sock.recvmsg(1, _socket.CMSG_SPACE(4 * 256))
        if not data:
            raise SystemExit("the request was cut off")
        for _, _, raw in messages:
            descriptors += struct.unpack(f"{len(raw) // 4}i", raw[: len(raw) // 4 * 4])
    request: dict[str, Any] = json.loads(_exactly(sock, size))
    return request, descriptors


def _exactly(sock: _socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < min(count, MAX_REQUEST):
        piece = sock.recv(min(count - len(data), 1 << 16))
        if not piece:
            raise SystemExit("the request was cut off")
        data += piece
    return bytes(data)


def _answer(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message, ensure_ascii=True) + "\n")
    sys.stdout.flush()


def inspect_one(request: dict[str, Any], fd: int, engines: list[dict[str, Any]]) -> list[FileFacts]:
    """Facts of one file for each engine that it holds functions of.

    Raises TargetError when the file cannot be read.
    """
    with _opened(request, fd) as elf:
        several: list[FileFacts] = []
        for engine in engines:
            slots = request.get("slots") or {}
            # A function that was only given by address may be in a file without the engine's names.
            asked = any(hook.get("slot") in slots or hook["symbol"] in slots for hook in engine["hooks"])
            if asked or mentions(elf, engine["marks"]):
                facts = inspect_engine(elf, engine, slots)
                if facts is not None:
                    several.append(facts)
        return several


def names_of_places(request: dict[str, Any], fd: int) -> dict[int, str]:
    """Of functions at the places in a file that were asked for. Raises TargetError."""
    from .function_names import names_in

    with _opened(request, fd) as elf:
        return names_in(elf, request["places"])


@contextmanager
def _opened(request: dict[str, Any], fd: int) -> Iterator[ElfFile]:
    """The file, with the names of its debug file: one without .symtab may have had one, and its names
    are where debuggers look."""
    path = str(request["path"])
    elf = ElfFile(fd, path)
    debug = None
    try:
        if not any(t.source == ".symtab" for t in elf.tables()):
            debug = add_debug_file(elf, path, str(request["root"]))
        yield elf
    finally:
        if debug is not None:
            debug.close()


def nameless(request: dict[str, Any], fd: int, engines: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Which engine a file without any of its names seems to be a build of."""
    try:
        elf = ElfFile(fd, str(request["path"]))
        for engine in engines:
            if speaks_of(elf, engine["strings"]):
                return {"nameless": request["file"], "engine": engine["engine"], "build_id": elf.build_id()}
    except TargetError:
        return None  # already reported as unreadable
    return None


def main() -> None:
    """Answer the request, file by file."""
    preload()  # while nobody waits yet
    limit_ourselves()
    request, descriptors = receive()
    files = list(zip(request["files"], descriptors, strict=True))
    engines, found = request["engines"], False
    for file, fd in files:
        number = file["file"]
        allow_a_file()
        _answer({"start": number})
        try:
            if file.get("places"):
                _answer({"file": number, "names": names_of_places(file, fd)})
                found = True
                continue
            facts = inspect_one(file, fd, engines)
        except TargetError as error:
            _answer({"file": number, "failed": error.what})
        except MemoryError:
            _answer({"file": number, "failed": "it needs more memory than a file is given"})
        else:
            found = found or bool(facts)
            if not facts and request.get("each") and (evidence := nameless(file, fd, engines)):
                _answer(evidence)
            _answer({"file": number, "facts": [asdict(one) for one in facts]})
    if not found and not request.get("each"):
        for file, fd in files:
            evidence = nameless(file, fd, engines)
            if evidence is not None:
                _answer(evidence)
                break
    _answer({"done": True})


if __name__ == "__main__":
    main()
