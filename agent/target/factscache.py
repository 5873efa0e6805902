# SPDX-License-Identifier: Apache-2.0
"""What was found in files, kept: a machine has many processes and few files.

A file is known by device and inode together with its size and change times, so that one
which was overwritten in place, or came to a number that was used before, is looked into again.
"""

from __future__ import annotations

import os
import resource
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from .catalogue import Catalogue
from .conclusion import Found
from .engine_file import FileFacts
from .inspect import Asked, ask_files, open_mapped, start_child
from .process import FileId, MappedFile

MAX_FILES = 8192
MAX_ENGINE_FILES = 32
"""Files with facts that are kept; the operator names and sites of one are some 100 KiB."""
AT_ONCE = 128
"""Files that one child process is asked about."""
AGAIN_S = (10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
"""When a file is looked into again, that could not be for reasons which are not its own: after the
first time, the second, and so on."""
MAX_COSTLY = 3
"""How often a file may use up its CPU time. On a virtual machine that is starved, the time that others
had counts, too; a file that is made to be costly shall not cost for ever."""
_Version = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class _Known:
    version: _Version
    facts: list[FileFacts] | None = None
    failed: str | None = None
    nameless: tuple[str, str] | None = None
    times: int = 0
    """How often it could not be looked into, through no fault of its own."""
    again_s: float | None = None

    @property
    def matters(self) -> bool:
        """Whether a process that has mapped it is worth a look."""
        return self.facts is not None or self.nameless is not None


class FactsCache:
    """Thread-safe. What takes long holds nobody up who only asks."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._known: OrderedDict[FileId, _Known] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def verdict(self, file: FileId) -> bool | None:
        """True: an engine's code; False: not; None: not looked into yet, or not known any more."""
        with self._lock:
            known = self._known.get(file)
            return None if known is None or known.again_s is not None else known.matters

    def again_s(self, files: Iterable[FileId]) -> float | None:
        """When the first of these is to be looked into again that could not be; None: all could."""
        with self._lock:
            times = [one.again_s for file in files if (one := self._known.get(file)) is not None]
        return min((at for at in times if at is not None), default=None)

    def unknown(self, mapped: Sequence[MappedFile]) -> list[MappedFile]:
        """Those that have to be looked into: new ones, and old names of a new content."""
        return [file for file in mapped if not self._current(file)]

    def _current(self, file: MappedFile) -> bool:
        with self._lock:
            known = self._known.get((file.dev, file.inode))
        if known is None or (known.again_s is not None and self._clock() >= known.again_s):
            return False
        try:
            return not file.open_path or known.version == _version(os.stat(file.open_path))
        except OSError:
            return True  # gone since: whoever opens it says so

    def learn(
        self, files: Sequence[tuple[MappedFile, str]], catalogue: Catalogue, timeout: float
    ) -> dict[FileId, str]:
        """Look into files ((file, root of its process)); returns why some cannot be opened."""
        refused: dict[FileId, str] = {}
        at_once = _at_once()
        for at in range(0, len(files), at_once):
            asked: dict[int, Asked] = {}
            try:
                for number, (file, root) in enumerate(files[at : at + at_once]):
                    try:
                        asked[number] = Asked(file.path, root, open_mapped(file))
                    except OSError as error:
                        refused[(file.dev, file.inode)] = error.strerror or "cannot be opened"
                if asked:
                    self._ask(files[at : at + at_once], asked, catalogue, timeout)
            finally:
                for one in asked.values():
                    os.close(one.fd)
        return refused

    def _ask(
        self,
        files: Sequence[tuple[MappedFile, str]],
        asked: Mapping[int, Asked],
        catalogue: Catalogue,
        timeout: float,
    ) -> None:
        versions = {n: _version(os.fstat(one.fd)) for n, one in asked.items()}
        child = start_child()
        try:
            found = ask_files(child, asked, catalogue, timeout, each=True)
        finally:
            child.close()
        for number, version in versions.items():
            evidence = found.all_nameless.get(number)
            file = (files[number][0].dev, files[number][0].inode)
            times, again_s = 0, None
            if number in found.again or number in found.costly:
                times, again_s = self._again(file, version)
                if number in found.costly and times >= MAX_COSTLY:
                    again_s = None
            known = _Known(
                version,
                found.facts.get(number),
                found.failed.get(number),
                evidence[1:] if evidence is not None else None,
                times,
                again_s,
            )
            self._put(file, known)

    def _again(self, file: FileId, version: _Version) -> tuple[int, float | None]:
        """(how often it has failed, when it is tried again)."""
        with self._lock:
            known = self._known.get(file)
        times = 1 + (known.times if known is not None and known.version == version else 0)
        return times, self._clock() + AGAIN_S[min(times, len(AGAIN_S)) - 1]

    def _put(self, file: FileId, known: _Known) -> None:
        with self._lock:
            self._known[file] = known
            self._known.move_to_end(file)
            while len(self._known) > MAX_FILES:
                self._known.popitem(last=False)
            having = [name for name, one in self._known.items() if one.facts is not None]
            for name in having[: max(0, len(having) - MAX_ENGINE_FILES)]:
                del self._known[name]

    def look(
        self, mapped: Sequence[MappedFile], root: str, catalogue: Catalogue, timeout: float
    ) -> list[int]:
        """Numbers of the files of one process that are worth opening, after learning what is new."""
        self.learn([(file, root) for file in self.unknown(mapped)], catalogue, timeout)
        return [n for n, file in enumerate(mapped) if self.verdict((file.dev, file.inode)) is not False]

    def found(self, mapped: Sequence[MappedFile], descriptors: Mapping[int, int]) -> Found:
        """What is known of the files of a process, by number, as a child would have said it."""
        out = Found({}, {})
        for number, file in enumerate(mapped):
            with self._lock:
                known = self._known.get((file.dev, file.inode))
                if known is not None and known.facts is not None:
                    self._known.move_to_end((file.dev, file.inode))
            if known is None:
                continue
            fd = descriptors.get(number)
            if known.failed is not None:
                out.failed[number] = known.failed
            elif fd is not None and known.version != _version(os.fstat(fd)):
                out.failed[number] = "it changed while it was looked at"
            elif known.facts is not None and fd is not None:
                out.facts[number] = list(known.facts)
            elif known.nameless is not None:
                out.nameless = out.nameless or (number, *known.nameless)
        return out


def _at_once() -> int:
    """Files that may be opened at once beside what is open already."""
    free = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - len(os.listdir("/proc/self/fd"))
    return max(2, min(AT_ONCE, free // 2))


def _version(status: os.stat_result) -> _Version:
    return (status.st_size, status.st_mtime_ns, status.st_ctime_ns)
