# SPDX-License-Identifier: Apache-2.0
"""Processes as ``/proc`` shows them: identity, mappings, and the very files behind them.

A path is only what the target calls a file. Another mount namespace may have another
file there, and a deleted one is nowhere, so files are opened through
``/proc/PID/map_files`` (the mapping itself), ``/proc/PID/exe`` or ``/proc/PID/root``,
and what was opened is compared with the device and inode of the mapping.
A process is its pid *and* its start time: pids are used again.
"""

from __future__ import annotations

import os
import stat
import time
from dataclasses import dataclass

from ..errors import MachineError, TargetEnded, TargetError
from .text import printable

MAX_PROC_FILE = 64 << 20
MAX_FDS = 65536
GGUF_MAGIC = b"GGUF"
_PF_KTHREAD = 0x00200000
_CPU_CLOCK = 2
"""The scheduler's clock of a process (CPUCLOCK_SCHED)."""
_DELETED = " (deleted)"
FileId = tuple[str, int]
"""Device ("major:minor", hexadecimal as in maps) and inode of a file."""


@dataclass(frozen=True, slots=True)
class Mapping:
    """One line of ``/proc/PID/maps``; ``offset`` is in the file, in bytes."""

    start: int
    end: int
    perms: str
    offset: int
    dev: str
    inode: int
    path: str
    deleted: bool

    @property
    def file_id(self) -> FileId:
        """What identifies the mapped file in this mount of the world."""
        return (self.dev, self.inode)


@dataclass(frozen=True, slots=True)
class MappedFile:
    """A file that is mapped executable; ``open_path`` opens this very file for us."""

    path: str
    dev: str
    inode: int
    deleted: bool
    mappings: tuple[Mapping, ...]
    open_path: str


@dataclass(frozen=True, slots=True)
class Process:
    """A live user process: (pid, start_time) identify it; start_time in clock ticks after boot.

    ``stack`` is where its stack begins, which exec places anew; 0 when the kernel does not say
    (it does to whoever may trace the process).
    """

    pid: int
    start_time: int
    exe: str
    bits: int
    threads: tuple[int, ...]
    stack: int = 0


def _read(pid: int, name: str) -> bytes:
    """A file of ``/proc/PID``, bounded; errors say what they mean for this process."""
    try:
        fd = os.open(f"/proc/{pid}/{name}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            pieces, total = [], 0
            while total < MAX_PROC_FILE:
                piece = os.read(fd, 1 << 18)
                if not piece:
                    break
                pieces.append(piece)
                total += len(piece)
            return b"".join(pieces)
        finally:
            os.close(fd)
    except (FileNotFoundError, ProcessLookupError) as error:
        raise TargetEnded(f"process {pid} ended while it was looked at") from error
    except PermissionError as error:
        raise not_permitted(pid, f"/proc/{pid}/{name}") from error


def not_permitted(pid: int, what: str) -> MachineError:
    """The error for a refused look into another process."""
    return MachineError(
        f"{what} of process {pid} may not be read" if not what.startswith("/") else f"{what} may not be read",
        "run as root, or with the capabilities CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH",
    )


def _status(pid: int) -> dict[str, str]:
    text = _read(pid, "status").decode("utf-8", "replace")
    return {key: value.strip() for key, _, value in (line.partition(":") for line in text.splitlines())}


def _stat_fields(pid: int) -> list[bytes]:
    """Fields of ``/proc/PID/stat`` from the third on: the name may hold spaces and brackets."""
    fields = _read(pid, "stat").rpartition(b")")[2].split()
    if len(fields) < 20:
        raise TargetEnded(f"process {pid} ended while it was looked at")
    return fields


def open_process(pid: int) -> Process:
    """The process of ``pid``; a thread id stands for its process.

    Raises TargetError (none such, kernel thread, zombie, 32-bit), MachineError (not
    permitted) or TargetEnded (it went while we looked).
    """
    if not 0 < pid < 1 << 31 or not os.path.exists(f"/proc/{pid}/stat"):
        raise TargetError(f"there is no process {pid}", "give the pid of a running process (see ps -e)")
    status = _status(pid)
    tgid = int(status.get("Tgid", pid))
    if tgid != pid:
        status = _status(tgid)
    fields = _stat_fields(tgid)
    if int(fields[6]) & _PF_KTHREAD:
        name = printable(status.get("Name", "?"), 32)
        raise TargetError(f"{tgid} ({name}) is a kernel thread", "give the pid of the inference process")
    if fields[0] in (b"Z", b"X", b"x"):
        raise TargetError(f"process {tgid} has ended and waits for its parent (zombie)", "start it again")
    exe, bits = _executable(tgid)
    if bits == 32:
        raise TargetError(f"process {tgid} is a 32-bit program", "only 64-bit programs can be profiled")
    try:
        threads = tuple(sorted(int(t) for t in os.listdir(f"/proc/{tgid}/task")))
    except (FileNotFoundError, ProcessLookupError) as error:
        raise TargetEnded(f"process {tgid} ended while it was looked at") from error
    return Process(tgid, int(fields[19]), exe, bits, threads, int(fields[25]))


def _executable(pid: int) -> tuple[str, int]:
    """(path as the target has it, printable; 32 or 64)."""
    link = f"/proc/{pid}/exe"
    try:
        path = os.readlink(link)
        fd = os.open(link, os.O_RDONLY | os.O_CLOEXEC)
        try:
            head = os.pread(fd, 5, 0)
        finally:
            os.close(fd)
    except (FileNotFoundError, ProcessLookupError) as error:
        raise TargetEnded(f"process {pid} ended while it was looked at") from error
    except PermissionError as error:
        raise not_permitted(pid, link) from error
    return printable(path.removesuffix(_DELETED), 4096), 32 if head[:5] == b"\x7fELF\x01" else 64


def end_descriptor(process: Process) -> int | None:
    """A descriptor that can be read once the process has ended; None where there is no such thing
    (no descriptors left, Linux before 5.3) or it has ended already. The caller closes it."""
    try:
        fd = os.pidfd_open(process.pid)
    except OSError:
        return None
    if alive(process):  # else the pid may be another's by now
        return fd
    os.close(fd)
    return None


def alive(process: Process) -> bool:
    """Whether this very process still runs the same program.

    Not a zombie, not another process with its pid, and not one that has replaced its program
    by exec: of that, nothing is left but the pid.
    """
    try:
        fields = _stat_fields(process.pid)
    except TargetEnded:
        return False
    if int(fields[19]) != process.start_time or fields[0] in (b"Z", b"X", b"x"):
        return False
    stack = int(fields[25])
    return stack == process.stack or 0 in (stack, process.stack)


# -- mappings -------------------------------------------------------------------------


def _parse(line: bytes) -> Mapping | None:
    parts = line.split(None, 5)
    if len(parts) < 5:
        return None
    start, _, end = parts[0].partition(b"-")
    # Only line breaks are escaped in this file (as \012); blanks and the rest are not.
    raw = parts[5].replace(b"\\012", b"\n") if len(parts) > 5 else b""
    path = os.fsdecode(raw)
    deleted = path.endswith(_DELETED) and path.startswith("/")
    try:
        return Mapping(
            int(start, 16), int(end, 16), parts[1].decode("ascii", "replace"), int(parts[2], 16),
            parts[3].decode("ascii", "replace"), int(parts[4]),
            path.removesuffix(_DELETED) if deleted else path, deleted,
        )  # fmt: skip
    except ValueError:
        return None


def read_maps(pid: int) -> list[Mapping]:
    """All mappings in address order; empty for a process that has no memory any more."""
    return [m for line in _read(pid, "maps").split(b"\n") if (m := _parse(line)) is not None]


def executable_ids(pid: int) -> frozenset[FileId]:
    """Files that are mapped executable now: a quick look (well under a millisecond)."""
    out = set()
    for line in _read(pid, "maps").split(b"\n"):
        fields = line.split(None, 5)
        if len(fields) > 5 and fields[1][2:3] == b"x" and fields[4] != b"0":
            out.add((fields[3].decode("ascii", "replace"), int(fields[4])))
    return frozenset(out)


def engine_files_changed(process: Process, seen: frozenset[FileId]) -> bool:
    """Whether code is mapped now that was not in ``seen``: an engine may have been dlopened.

    ``seen`` is what :func:`executable_ids` gave earlier. A process that ended has no new
    files. Cheap enough to be asked every second.
    """
    try:
        return not executable_ids(process.pid) <= seen
    except TargetEnded:
        return False


def executable_files(pid: int) -> list[MappedFile]:
    """Files with an executable mapping, in address order, each once per (device, inode).

    ``open_path`` is empty where no path leads to the very file (and we may not use
    map_files): such a file cannot be looked into, which is that file's own failure.
    """
    groups: dict[FileId, list[Mapping]] = {}
    for mapping in read_maps(pid):
        if mapping.inode:
            groups.setdefault(mapping.file_id, []).append(mapping)
    out = []
    for mappings in groups.values():
        code = [m for m in mappings if "x" in m.perms]
        if code:
            first = code[0]
            path = find_open_path(pid, first)
            out.append(MappedFile(first.path, first.dev, first.inode, first.deleted, tuple(mappings), path))
    return out


def find_open_path(pid: int, mapping: Mapping) -> str:
    """A path that opens the very file of ``mapping``, or an empty string.

    The kernel's own links (to the mapped file, to the program) are trusted when the inode
    agrees: some file systems (overlays, btrfs) show another device number in maps than in
    stat. By name, device and inode must both agree.
    """
    by_mapping = f"/proc/{pid}/map_files/{mapping.start:x}-{mapping.end:x}"
    if (found := _identity(by_mapping)) and found[1] == mapping.inode:
        return by_mapping
    exe = f"/proc/{pid}/exe"
    if (found := _identity(exe)) and found[1] == mapping.inode and _link(exe) == mapping.path:
        return exe
    by_name = f"/proc/{pid}/root{mapping.path}"
    return by_name if _identity(by_name) == mapping.file_id else ""


def _link(path: str) -> str:
    try:
        return os.readlink(path).removesuffix(_DELETED)
    except OSError:
        return ""


def _identity(path: str) -> FileId | None:
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None  # not there, not allowed or not a possible name: not the file
    if not stat.S_ISREG(status.st_mode):
        return None
    return (f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}", status.st_ino)


# -- models ---------------------------------------------------------------------------


def model_files(pid: int) -> list[str]:
    """Names (never paths) of GGUF files that the process has mapped or open, largest first.

    Recognised by their first bytes, not by their name; printable. A model that was read
    into memory and closed is not seen.
    """
    found: dict[tuple[int, int], tuple[int, str]] = {}
    looked: set[FileId] = set()
    maps = read_maps(pid)
    code = {m.file_id for m in maps if "x" in m.perms}
    for mapping in maps:
        if not mapping.inode or mapping.file_id in looked or mapping.file_id in code:
            continue
        looked.add(mapping.file_id)
        path = find_open_path(pid, mapping)
        if path:
            _look_for_model(path, mapping.path, found)
    try:
        numbers = os.listdir(f"/proc/{pid}/fd")[:MAX_FDS]
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        numbers = []  # what is mapped is known all the same
    for number in numbers:
        link = f"/proc/{pid}/fd/{number}"
        try:
            name = os.readlink(link)
        except OSError:
            continue  # closed since
        if name.startswith("/"):
            _look_for_model(link, name.removesuffix(_DELETED), found)
    ordered = sorted(found.values(), key=lambda item: (-item[0], item[1]))
    return [name for _, name in ordered]


def _look_for_model(path: str, name: str, found: dict[tuple[int, int], tuple[int, str]]) -> None:
    try:
        status = os.stat(path)
        key = (status.st_dev, status.st_ino)
        # Devices and fifos are never opened: that could have an effect on the target.
        if not stat.S_ISREG(status.st_mode) or key in found or status.st_size < 24:
            return
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        try:
            if os.pread(fd, 4, 0) == GGUF_MAGIC:
                found[key] = (status.st_size, printable(os.path.basename(name)))
        finally:
            os.close(fd)
    except (OSError, ValueError):
        return  # unreadable or gone: then it is not named


def cpu_seconds(pid: int) -> float:
    """CPU time that all threads of the process have used, ended ones too; 0.0 when it is gone.

    Of its clock (clock_getcpuclockid(3) says how its number is made), which knows more than the
    10 ms of ``/proc``.
    """
    try:
        return time.clock_gettime(~pid << 3 | _CPU_CLOCK)
    except OSError:
        return 0.0
