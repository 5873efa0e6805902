# SPDX-License-Identifier: Apache-2.0
"""The ``bpf()`` and ``perf_event_open()`` system calls, called directly.

libbpf 1.1 (Debian 12) knows neither uprobe_multi links nor sessions, and nothing here needs
more than the plain calls. Every function raises :class:`OSError` with the kernel's errno;
:mod:`.reasons` turns that into words where it is known what was tried.

Layouts are those of ``union bpf_attr``, ``struct bpf_prog_info``, ``struct bpf_link_info``
and ``struct perf_event_attr`` in the kernel's public headers (UAPI, never reordered).
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import platform
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

# enum bpf_cmd
MAP_CREATE, MAP_LOOKUP, MAP_UPDATE, MAP_DELETE, MAP_NEXT_KEY, PROG_LOAD = range(6)
OBJ_INFO = 15
RAW_TRACEPOINT_OPEN = 17
MAP_LOOKUP_BATCH = 24
LINK_CREATE = 28
ENABLE_STATS = 32
LINK_BY_ID, LINK_NEXT_ID = 30, 31

# enum bpf_map_type, enum bpf_prog_type, enum bpf_attach_type: the members that are used
MAP_ARRAY, MAP_RINGBUF = 2, 27
PROG_KPROBE = 2  # also the type of every uprobe program
ATTACH_PERF_EVENT, ATTACH_UPROBE_MULTI, ATTACH_UPROBE_SESSION = 41, 48, 57

# enum bpf_link_type
LINK_RAW_TRACEPOINT, LINK_PERF_EVENT, LINK_UPROBE_MULTI = 1, 7, 12

PROG_SLEEPABLE = 1 << 4  # BPF_F_SLEEPABLE
MULTI_RETURN = 1 << 0  # BPF_F_UPROBE_MULTI_RETURN

ENOTSUPP = 524  # the kernel's own; not in errno.h, yet it reaches user space

_PERF_CLOEXEC = 1 << 3
_SYSCALLS = {"x86_64": (321, 298), "aarch64": (280, 241)}  # bpf, perf_event_open

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def _numbers() -> tuple[int, int]:
    """The numbers of the two system calls on this architecture."""
    try:
        return _SYSCALLS[platform.machine()]
    except KeyError:
        raise OSError(errno.ENOSYS, f"no BPF system call number for {platform.machine()}") from None


@functools.cache
def strerror(number: int) -> str:
    """``EPERM (Operation not permitted)``; knows 524 too.

    Kept: the C library looks for a translation in files each time, and a walk over a map ends with
    an error.
    """
    if number == ENOTSUPP:
        return "ENOTSUPP (524)"
    return f"{errno.errorcode.get(number, f'errno {number}')} ({os.strerror(number)})"


def bpf(command: int, attr: ctypes.Array[ctypes.c_char]) -> int:
    """``bpf(command, attr, sizeof attr)``; the kernel may write its answer into ``attr``."""
    result = int(
        _libc.syscall(
            ctypes.c_long(_numbers()[0]), ctypes.c_long(command), ctypes.byref(attr), ctypes.c_long(len(attr))
        )
    )
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, strerror(number))
    return result


def _attr(layout: str, *values: int | bytes) -> ctypes.Array[ctypes.c_char]:
    packed = struct.pack("=" + layout, *values)
    return ctypes.create_string_buffer(packed, len(packed))


def _address(buffer: ctypes.Array[ctypes.c_char] | None) -> int:
    return ctypes.addressof(buffer) if buffer is not None else 0


# ---- maps -------------------------------------------------------------------------------


def map_create(kind: int, key_size: int, value_size: int, entries: int, flags: int = 0) -> int:
    """Create a map without a name or BTF; returns its descriptor. For trials."""
    return bpf(MAP_CREATE, _attr("5I12x16x", kind, key_size, value_size, entries, flags))


def map_lookup(fd: int, key: bytes, value_size: int) -> bytes | None:
    """The value of ``key``, None when there is none.

    ``value_size`` is that of the map; for a per-CPU map, 8-aligned and times the possible CPUs.
    """
    k = ctypes.create_string_buffer(key, len(key))
    v = ctypes.create_string_buffer(value_size)
    try:
        bpf(MAP_LOOKUP, _attr("I4xQQQ", fd, _address(k), _address(v), 0))
    except OSError as error:
        if error.errno == errno.ENOENT:
            return None
        raise
    return v.raw


def map_update(fd: int, key: bytes, value: bytes, flags: int = 0) -> None:
    """Set ``key`` to ``value``; E2BIG means that the map is full."""
    k = ctypes.create_string_buffer(key, len(key))
    v = ctypes.create_string_buffer(value, len(value))
    bpf(MAP_UPDATE, _attr("I4xQQQ", fd, _address(k), _address(v), flags))


def map_delete(fd: int, key: bytes) -> bool:
    """Delete ``key``; False when it was not there."""
    k = ctypes.create_string_buffer(key, len(key))
    try:
        bpf(MAP_DELETE, _attr("I4xQQQ", fd, _address(k), 0, 0))
    except OSError as error:
        if error.errno == errno.ENOENT:
            return False
        raise
    return True


def map_keys(fd: int, key_size: int, limit: int = 1 << 20) -> Iterator[bytes]:
    """The keys of a map, at most ``limit``.

    A key that is deleted meanwhile makes the kernel start over: keys can come twice, and
    ``limit`` is what bounds the walk then.
    """
    following = ctypes.create_string_buffer(key_size)
    current: ctypes.Array[ctypes.c_char] | None = None
    for _ in range(limit):
        try:
            bpf(MAP_NEXT_KEY, _attr("I4xQQQ", fd, _address(current), _address(following), 0))
        except OSError as error:
            if error.errno == errno.ENOENT:
                return
            raise
        yield following.raw
        current = ctypes.create_string_buffer(following.raw, key_size)


def map_lookup_batch(
    fd: int, keys: ctypes.Array[ctypes.c_char], values: ctypes.Array[ctypes.c_char], n: int
) -> int:
    """Read up to ``n`` entries from the start of a map; returns how many came.

    ``keys`` and ``values`` hold ``n`` times the key and value size. Linux 5.6 and later
    (arrays, hashes); EINVAL before.
    """
    token = ctypes.create_string_buffer(8)
    attr = _attr("QQQQIIQQ", 0, _address(token), _address(keys), _address(values), n, fd, 0, 0)
    try:
        bpf(MAP_LOOKUP_BATCH, attr)
    except OSError as error:
        if error.errno != errno.ENOENT:  # ENOENT: the end was reached; the count is valid
            raise
    return int(struct.unpack_from("=I", attr, 32)[0])


# ---- programs ---------------------------------------------------------------------------


def prog_load(
    kind: int, instructions: bytes, *, attach_type: int = 0, flags: int = 0, name: str = "trial"
) -> int:
    """Load raw instructions (8 bytes each) as a GPL program; returns its descriptor."""
    code = ctypes.create_string_buffer(instructions, len(instructions))
    licence = ctypes.create_string_buffer(b"GPL")
    return bpf(
        PROG_LOAD,
        _attr(
            "IIQQIIQII16sII",
            kind, len(instructions) // 8, _address(code), _address(licence),
            0, 0, 0, 0, flags, name.encode()[:15], 0, attach_type,
        ),
    )  # fmt: skip


@dataclass(frozen=True)
class ProgramInfo:
    """What the kernel counts per program. ``run_*`` stay 0 unless BPF statistics are on."""

    id: int
    name: str
    run_time_ns: int
    run_count: int
    recursion_misses: int | None  # None: this kernel (before 5.12) does not count them
    instructions: int | None  # looked at by the verifier; None before 5.16


def _object_info(fd: int, size: int) -> tuple[bytes, int]:
    """The info structure of a BPF descriptor, and how much of it the kernel knows."""
    info = ctypes.create_string_buffer(size)
    attr = _attr("IIQ", fd, size, _address(info))
    bpf(OBJ_INFO, attr)
    return info.raw, int(struct.unpack_from("=I", attr, 4)[0])


def map_info(fd: int) -> tuple[int, int, int, int, int]:
    """(type, bytes of a key, bytes of a value, entries, flags) of a map."""
    raw, _ = _object_info(fd, 88)
    kind, _, key, value, entries, flags = struct.unpack_from("=6I", raw)
    return kind, key, value, entries, flags


def program_info(fd: int) -> ProgramInfo:
    """Statistics of a loaded program."""
    raw, known = _object_info(fd, 232)
    (number,) = struct.unpack_from("=I", raw, 4)
    run_time, run_count, misses = struct.unpack_from("=QQQ", raw, 192)
    (instructions,) = struct.unpack_from("=I", raw, 216)
    return ProgramInfo(
        number,
        raw[64:80].split(b"\0")[0].decode("ascii", "replace"),
        run_time,
        run_count,
        misses if known >= 216 else None,
        instructions if known >= 220 else None,
    )


# ---- links ------------------------------------------------------------------------------


@dataclass(frozen=True)
class LinkInfo:
    """A BPF link of anybody: ``kind`` is one of the LINK_ constants."""

    id: int
    kind: int
    program_id: int


def enable_stats() -> int:
    """Have the kernel time every program; returns a descriptor, which ends it when closed. Linux 5.8,
    CAP_SYS_ADMIN."""
    return bpf(ENABLE_STATS, _attr("I", 0))  # BPF_STATS_RUN_TIME


def link_info(fd: int) -> LinkInfo:
    """What the kernel says about a link's descriptor."""
    raw, _ = _object_info(fd, 64)
    kind, number, program = struct.unpack_from("=III", raw, 0)
    return LinkInfo(number, kind, program)


def links() -> list[LinkInfo]:
    """Every BPF link on this machine (needs CAP_SYS_ADMIN).

    A link that ends during the walk is left out.
    """
    found: list[LinkInfo] = []
    number = 0
    while True:
        attr = _attr("III", number, 0, 0)
        try:
            bpf(LINK_NEXT_ID, attr)
        except OSError as error:
            if error.errno == errno.ENOENT:
                return found
            raise
        number = struct.unpack_from("=I", attr, 4)[0]
        try:
            fd = bpf(LINK_BY_ID, _attr("III", number, 0, 0))
        except OSError as error:
            if error.errno == errno.ENOENT:
                continue
            raise
        try:
            found.append(link_info(fd))
        finally:
            os.close(fd)


def link_uprobe_multi(
    program: int,
    path: str,
    offsets: Sequence[int],
    cookies: Sequence[int] | None,
    *,
    pid: int,
    flags: int,
    attach_type: int,
) -> int:
    """One link with many uprobes in one file; returns its descriptor."""
    count = len(offsets)
    where = (ctypes.c_uint64 * count)(*offsets)
    what = (ctypes.c_uint64 * count)(*cookies) if cookies is not None else None
    name = ctypes.create_string_buffer(os.fsencode(path))
    attr = _attr(
        "IIIIQQQQIII4x",
        program, 0, attach_type, 0,
        ctypes.addressof(name), ctypes.addressof(where), 0,
        ctypes.addressof(what) if what is not None else 0, count, flags, pid,
    )  # fmt: skip
    return bpf(LINK_CREATE, attr)


def link_perf_event(program: int, event: int, cookie: int) -> int:
    """Attach a program with a cookie to a perf event; returns the link's descriptor."""
    return bpf(LINK_CREATE, _attr("IIIIQ24x", program, event, ATTACH_PERF_EVENT, 0, cookie))


def raw_tracepoint_open(program: int, name: str | None) -> int:
    """Attach a program to a raw tracepoint by name; needs no tracefs. None: to the one that it
    was loaded for (a BTF tracepoint)."""
    text = None if name is None else ctypes.create_string_buffer(name.encode())
    return bpf(RAW_TRACEPOINT_OPEN, _attr("QI4x", _address(text), program))


def software_event_open(config: int, pid: int, cpu: int, period: int) -> int:
    """Open (enabled) one of the kernel's software events, overflowing every ``period`` counts.

    ``config`` is of enum perf_sw_ids; ``pid`` -1: every process, on processor ``cpu``. Reading it gives
    its count and how long it was enabled (ns).
    """
    size = 112  # PERF_ATTR_SIZE_VER5: Linux 4.1 and later
    attr = ctypes.create_string_buffer(struct.pack("=IIQQQQ", 1, size, config, period, 0, 1), size)
    result = int(
        _libc.syscall(
            ctypes.c_long(_numbers()[1]), ctypes.byref(attr), ctypes.c_long(pid), ctypes.c_long(cpu),
            ctypes.c_long(-1), ctypes.c_long(_PERF_CLOEXEC),
        )
    )  # fmt: skip
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, strerror(number))
    return result


def perf_uprobe_open(kind: int, config: int, path: str, offset: int, pid: int, cpu: int) -> int:
    """Open (enabled) the perf event of one uprobe; returns its descriptor.

    ``kind`` is the number of the uprobe PMU, ``config`` its configuration (return bit).
    """
    name = ctypes.create_string_buffer(os.fsencode(path))
    size = 112  # PERF_ATTR_SIZE_VER5: Linux 4.1 and later
    packed = struct.pack("=IIQ24xQIIQQ", kind, size, config, 0, 0, 0, ctypes.addressof(name), offset)
    return perf_event_open(packed.ljust(size, b"\0"), pid, cpu)


def perf_event_open(attributes: bytes, pid: int, cpu: int) -> int:
    """Open a perf event described by a packed ``struct perf_event_attr``; returns its descriptor."""
    if struct.unpack_from("=I", attributes, 4)[0] != len(attributes):
        raise ValueError("the attributes are not as long as they say")
    attr = ctypes.create_string_buffer(attributes, len(attributes))
    result = int(
        _libc.syscall(
            ctypes.c_long(_numbers()[1]), ctypes.byref(attr), ctypes.c_long(pid), ctypes.c_long(cpu),
            ctypes.c_long(-1), ctypes.c_long(_PERF_CLOEXEC),
        )
    )  # fmt: skip
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, strerror(number))
    return result
