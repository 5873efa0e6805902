# SPDX-License-Identifier: Apache-2.0
"""From an errno of the kernel to words: what failed, why, and what to do.

One place, because the kernel uses the same few numbers for very different things and the
difference is known only where the call was made.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from pathlib import Path

from ..errors import MachineError, ProfinferError, TargetError
from .bpfsys import ENOTSUPP, strerror

# Bits of CapEff that matter here (include/uapi/linux/capability.h).
CAPABILITIES = {
    "CAP_DAC_READ_SEARCH": 2,
    "CAP_SYS_PTRACE": 19,
    "CAP_SYS_ADMIN": 21,
    "CAP_SYS_RESOURCE": 24,
    "CAP_PERFMON": 38,
    "CAP_BPF": 39,
    "CAP_CHECKPOINT_RESTORE": 40,
}
FOR_LOADING = ("CAP_BPF", "CAP_PERFMON")
FOR_PERF_UPROBES = ("CAP_PERFMON", "CAP_SYS_ADMIN")


def effective(status: str | None = None) -> frozenset[str]:
    """Names of the capabilities that this process can use now (of those in CAPABILITIES).

    ``status`` is the text of ``/proc/self/status``, for tests.
    """
    text = Path("/proc/self/status").read_text() if status is None else status
    for line in text.splitlines():
        if line.startswith("CapEff:"):
            mask = int(line.split()[1], 16)
            return frozenset(name for name, bit in CAPABILITIES.items() if mask >> bit & 1)
    return frozenset()


def missing(needed: Iterable[str], held: frozenset[str] | None = None) -> list[str]:
    """Which of ``needed`` this process lacks; CAP_SYS_ADMIN stands in for BPF and PERFMON."""
    have = effective() if held is None else held
    implied = {"CAP_BPF", "CAP_PERFMON", "CAP_CHECKPOINT_RESTORE"} if "CAP_SYS_ADMIN" in have else set()
    return [name for name in needed if name not in have and name not in implied]


def refused(
    what: str, number: int, needed: Iterable[str], held: frozenset[str] | None = None
) -> MachineError:
    """The error of EPERM and EACCES: names the capability that is missing, or says that none is."""
    needed = tuple(needed)
    lacking = missing(needed, held)
    if lacking:
        remedy = f"give it {' and '.join(needed)}"
        if os.geteuid():
            remedy = f"run as root, or {remedy}"
        else:
            remedy += " (the container, unit or shell that started it takes them away)"
        return MachineError(f"{what}: {strerror(number)}, this process lacks {' and '.join(lacking)}", remedy)
    return MachineError(
        f"{what}: {strerror(number)} although {' and '.join(needed)} are held",
        "a security policy forbids it: look at seccomp (container runtime, systemd SystemCallFilter), "
        "the LSM (dmesg) and /sys/kernel/security/lockdown",
    )


def resources(what: str, number: int) -> MachineError | None:
    """The error of the errnos that mean 'not enough of something'; None for others."""
    if number in (errno.EMFILE, errno.ENFILE):
        return MachineError(f"{what}: {strerror(number)}", "raise the limit of open files (ulimit -n)")
    if number in (errno.ENOMEM, errno.ENOSPC):
        return MachineError(
            f"{what}: {strerror(number)}", "free memory, or raise the limit of locked memory (ulimit -l)"
        )
    return None


def attaching(number: int, method: str, where: str, detail: str = "") -> ProfinferError:
    """Why a uprobe could not be attached.

    ``method`` is ``multi``, ``session`` or ``perf``; ``where`` names file and offset;
    ``detail`` is what the caller found out about it.
    """
    what = f"cannot attach a probe ({method}) to {where}"
    if number in (errno.EPERM, errno.EACCES):
        return refused(what, number, FOR_PERF_UPROBES if method == "perf" else FOR_LOADING)
    if (lack := resources(what, number)) is not None:
        return lack
    why = f": {detail}" if detail else ""
    if number == ENOTSUPP:
        return TargetError(
            f"{what}: the kernel cannot single-step the instruction there{why}", "another site is needed"
        )
    if number == errno.ESRCH:
        return TargetError(
            f"{what}: no such process{why}", "it ended, or a thread id was given: give the process id"
        )
    if number in (errno.ENOENT, errno.ENOTDIR):
        if method == "perf" and detail:
            return MachineError(f"{what}: {detail}", "")
        return TargetError(
            f"{what}: no such file{why}", "give the file as /proc/PID/map_files or /proc/PID/root"
        )
    if number == errno.EBADF:
        return TargetError(f"{what}: not a regular file{why}", "only code in a file can be probed")
    if number == errno.EIO:
        return TargetError(
            f"{what}: its file system cannot hold probes{why}", "run the target from another file system"
        )
    if number == errno.EINVAL:
        if detail:
            return TargetError(f"{what}: {detail}", "the offset does not belong to this file")
        needs = {"multi": "6.6", "session": "6.13", "perf": "5.15 with CONFIG_UPROBE_EVENTS"}[method]
        remedy = "" if method == "perf" else "use --attach-method perf"
        return MachineError(
            f"{what}: {strerror(number)}, this kernel lacks it (Linux {needs} has it)", remedy
        )
    return MachineError(f"{what}: {strerror(number)}{why}", "")


def loading(number: int, what: str, log: str) -> MachineError:
    """Why a BPF object could not be loaded; ``log`` is the verifier's or libbpf's text."""
    what = f"cannot load {what}"
    if number in (errno.EPERM, errno.EACCES) and missing(FOR_LOADING):
        return refused(what, number, FOR_LOADING)
    # A program that the verifier refuses fails with EACCES, EINVAL, E2BIG, ...: the log says why.
    line = last_words(log)
    if number == errno.EPERM and not line:
        return refused(what, number, FOR_LOADING)
    if (lack := resources(what, number)) is not None:
        return lack
    return MachineError(
        f"{what}: {strerror(number)}{': ' + line if line else ''}",
        "this kernel may be too old or lack a BPF feature: try --attach-method perf or --loader bcc",
    )


def last_words(log: str, limit: int = 200) -> str:
    """The line of a verifier log that says what is wrong: the last one that is no statistics."""
    statistics = ("processed ", "verification time", "stack depth", "max_states", "peak_states", "mark_read")
    for line in reversed(log.splitlines()):
        if line.strip() and not line.startswith(statistics):
            return line.strip()[:limit]
    return ""
