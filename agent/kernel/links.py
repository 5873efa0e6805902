# SPDX-License-Identifier: Apache-2.0
"""Attaching programs: uprobe_multi links, sessions, perf uprobes, raw tracepoints.

Everything hangs on file descriptors of this process: when it ends, however it ends, the
kernel takes the probes away. Nothing is pinned.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from ..errors import MachineError, ProfinferError
from . import bpfsys, reasons

_PMU = Path("/sys/bus/event_source/devices/uprobe")
_ENABLE = 0x2400  # PERF_EVENT_IOC_ENABLE
HELPERS = 3
"""Threads that help to close the links of one group."""
MAX_HELPERS = 8
"""The same in the whole process, however many targets are let go of at once."""
_helpers = threading.BoundedSemaphore(MAX_HELPERS)


class Link:
    """Attached probes; ends with :meth:`close` or with the process."""

    def __init__(self, method: str, descriptors: Sequence[int], sites: int) -> None:
        self.method = method  # multi, session, perf or raw_tracepoint
        self.sites = sites
        self._descriptors = list(descriptors)

    @property
    def id(self) -> int:
        """The kernel's number of the link (the first descriptor is the link)."""
        return bpfsys.link_info(self._descriptors[0]).id

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return not self._descriptors

    def close(self) -> None:
        """Detach. Takes about 40 ms for a multi link and 70-120 ms for a perf uprobe. May be called twice."""
        while self._descriptors:
            os.close(self._descriptors.pop(0))

    def __enter__(self) -> Link:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def close_together(links: Sequence[Link]) -> None:
    """Close all of them. Each waits 40 ms and more for the kernel, which lets several wait together."""
    left = deque(links)
    failures: list[OSError] = []

    def work() -> None:
        while left:
            try:
                link = left.popleft()
            except IndexError:
                return  # another one took the last
            try:
                link.close()
            except OSError as error:
                failures.append(error)

    def help_out() -> None:
        try:
            work()
        finally:
            _helpers.release()

    helpers: list[threading.Thread] = []
    while len(helpers) < min(len(links) - 1, HELPERS) and _helpers.acquire(blocking=False):
        helper = threading.Thread(target=help_out, name="detach", daemon=True)
        try:
            helper.start()
        except RuntimeError:  # no thread to be had: then one after the other
            _helpers.release()
            break
        helpers.append(helper)
    work()
    for helper in helpers:
        helper.join()
    if failures:
        raise failures[0]


def attach_multi(
    prog_fd: int,
    path: str,
    offsets: Sequence[int],
    cookies: Sequence[int] | None = None,
    pid: int = 0,
    ret: bool = False,
    session: bool = False,
) -> Link:
    """Attach one program to many file offsets of one file with one link.

    ``path`` may be a magic link (``/proc/self/fd/N``, ``/proc/PID/map_files/A-B``).
    ``cookies`` has one number per offset. ``pid`` 0 means every process; before Linux 6.10 a
    pid means its main thread only, so programs should filter by process themselves.
    ``ret`` attaches to the return, ``session`` to entry and return of a program loaded as a
    session program.

    Attaching succeeds for a file that nobody has mapped even when an instruction cannot be
    probed; the kernel then skips that site when it is mapped. Raises TargetError (the
    offset, file or process is at fault, the message says which) or MachineError.
    """
    if not offsets or (cookies is not None and len(cookies) != len(offsets)):
        raise ValueError("one cookie per offset, and at least one offset")
    if ret and session:
        raise ValueError("a session covers the return already")
    method = "session" if session else "multi"

    def attach(some: slice) -> int:
        return bpfsys.link_uprobe_multi(
            prog_fd, path, offsets[some], cookies[some] if cookies is not None else None,
            pid=pid,
            flags=bpfsys.MULTI_RETURN if ret else 0,
            attach_type=bpfsys.ATTACH_UPROBE_SESSION if session else bpfsys.ATTACH_UPROBE_MULTI,
        )  # fmt: skip

    try:
        return Link(method, [attach(slice(None))], len(offsets))
    except OSError as error:
        raise _explain(error, method, path, offsets, attach) from error


def attach_perf(prog_fd: int, path: str, offset: int, cookie: int, pid: int = -1, ret: bool = False) -> Link:
    """Attach one program to one file offset through a perf event, for kernels without multi.

    ``pid`` -1 means every process. Closing is slow (70-120 ms on Debian 12's 6.1) and there
    is no disarming. Needs no tracefs. Raises like :func:`attach_multi`.
    """
    kind, return_bit = perf_uprobe_pmu()
    descriptors: list[int] = []
    try:
        cpu = -1 if pid >= 0 else online_cpu()
        event = bpfsys.perf_uprobe_open(kind, 1 << return_bit if ret else 0, path, offset, pid, cpu)
        descriptors.append(event)
        descriptors.insert(0, bpfsys.link_perf_event(prog_fd, event, cookie))
        fcntl.ioctl(event, _ENABLE, 0)
    except OSError as error:
        for descriptor in descriptors:
            os.close(descriptor)
        raise _explain(error, "perf", path, [offset], None) from error
    return Link("perf", descriptors, 1)


def attach_raw_tracepoint(prog_fd: int, name: str, *, typed: bool = False) -> Link:
    """Attach to a raw tracepoint such as ``sched_process_exit``; needs no tracefs.

    ``typed``: the program was loaded for this very tracepoint (section ``tp_btf/NAME``).
    """
    try:
        return Link("raw_tracepoint", [bpfsys.raw_tracepoint_open(prog_fd, None if typed else name)], 1)
    except OSError as error:
        number = error.errno or 0
        what = f"cannot attach to the tracepoint {name}"
        if number in (errno.EPERM, errno.EACCES):
            raise reasons.refused(what, number, reasons.FOR_LOADING) from error
        why = "this kernel has no such tracepoint" if number == errno.ENOENT else bpfsys.strerror(number)
        raise reasons.resources(what, number) or MachineError(f"{what}: {why}") from error


def perf_uprobe_pmu(pmu: Path = _PMU) -> tuple[int, int]:
    """(number of the uprobe PMU, bit of its configuration that means return).

    Raises MachineError when the kernel has no uprobes (or sysfs does not show them).
    """
    try:
        kind = int((pmu / "type").read_text())
        form = (pmu / "format" / "retprobe").read_text().strip()
        return kind, int(form.removeprefix("config:"))
    except (OSError, ValueError) as error:
        raise MachineError(
            f"this kernel offers no uprobes: {pmu} cannot be read",
            "it needs CONFIG_UPROBE_EVENTS=y, and /sys mounted",
        ) from error


def online_cpu(path: Path = Path("/sys/devices/system/cpu/online")) -> int:
    """A processor that is online; an event of all processes must be opened on one of them."""
    try:
        return int(path.read_text().replace("-", ",").split(",")[0])
    except (OSError, ValueError):
        return min(os.sched_getaffinity(0))


def _explain(
    error: OSError, method: str, path: str, offsets: Sequence[int], attach: Callable[[slice], int] | None
) -> ProfinferError:
    """The error of a failed attach, with the offset that is to blame where one is."""
    number = error.errno or 0
    shown = os.path.realpath(path) if path.startswith("/proc/") else path
    if number == bpfsys.ENOTSUPP and attach is not None:
        return reasons.attaching(number, method, f"offset {_culprit(offsets, attach):#x} of {shown}")
    where = (
        f"offset {offsets[0]:#x} of {shown}" if len(offsets) == 1 else f"{len(offsets)} offsets of {shown}"
    )
    if number == errno.EINVAL:
        # The kernel says the same for a wrong place as for a feature that it lacks.
        try:
            found = os.stat(path)
        except OSError:
            return reasons.attaching(number, method, where)
        if not stat.S_ISREG(found.st_mode):
            return reasons.attaching(errno.EBADF, method, where)
        if outside := [offset for offset in offsets if not 0 <= offset < found.st_size]:
            return reasons.attaching(number, method, where, f"offset {outside[0]:#x} lies outside the file")
    return reasons.attaching(number, method, where)


def _culprit(offsets: Sequence[int], attach: Callable[[slice], int]) -> int:
    """The first offset that cannot be probed, found by halving: one fails the whole link."""
    low, high = 0, len(offsets)  # the first bad one is in [low, high)
    while high - low > 1:
        middle = (low + high) // 2
        try:
            os.close(attach(slice(low, middle)))
        except OSError:
            high = middle
        else:
            low = middle
    return offsets[low]
