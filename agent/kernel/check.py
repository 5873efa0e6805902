# SPDX-License-Identifier: Apache-2.0
"""What this machine can do, found out by doing it.

Versions say little: distributions switch features off, port fixes and restrictions back, and
a container or a systemd unit takes away what the kernel has. So every feature is tried on a
function of our own, and what is missing comes with its reason and what to do about it.
"""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from ..errors import MachineError, ProfinferError
from . import bpfsys, libbpf, links, reasons
from .programs import GgmlPrograms
from .sandboxed import NO_SECCOMP
from .trial import Counter, VictimFunction, returning

_RAW_TRACEPOINT_PROGRAM = 17  # BPF_PROG_TYPE_RAW_TRACEPOINT
_BTF_MAGIC = b"\x9f\xeb"


@dataclass(frozen=True, slots=True)
class Fact:
    """One thing that was tried. ``reason`` and ``remedy`` are empty when it works."""

    name: str
    what: str  # for people
    ok: bool
    reason: str = ""
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Machine:
    """Everything that was tried, in the order in which one thing stands on another."""

    facts: tuple[Fact, ...]

    def fact(self, name: str) -> Fact:
        """The fact of that name; KeyError when it was not tried."""
        for fact in self.facts:
            if fact.name == name:
                return fact
        raise KeyError(name)

    def has(self, name: str) -> bool:
        """Whether it works."""
        return self.fact(name).ok

    @property
    def method(self) -> str | None:
        """The best way of attaching: session, multi, perf; None when there is none."""
        ways = (("session", "uprobe_session"), ("multi", "uprobe_multi"), ("perf", "perf_uprobes"))
        return next((method for method, name in ways if self.has(name)), None)

    def require(self) -> str:
        """The best method, or MachineError with the first thing that is missing."""
        for name in ("libbpf", "lockdown", "bpf", "ring_buffer"):
            if not (fact := self.fact(name)).ok:
                raise MachineError(fact.reason, fact.remedy)
        if self.method is None:
            fact = self.fact("perf_uprobes")
            raise MachineError(fact.reason, fact.remedy)
        if not (fact := self.fact("probes")).ok:
            raise MachineError(fact.reason, fact.remedy)
        return self.method


def check_machine(
    *, btf_path: str | None = None, sysfs: Path = Path("/sys"), without: Collection[str] = ()
) -> Machine:
    """Try everything; takes about 0.2 s, more where closing perf uprobes is slow.

    ``sysfs`` is where /sys lies and ``without`` names what is to be taken for absent:
    both for tests.
    """
    trials: tuple[tuple[str, str, Callable[[], None]], ...] = (
        ("libbpf", "libbpf 1.0 or later", libbpf.require),
        ("lockdown", "reading user memory from BPF", lambda: _lockdown(sysfs)),
        ("bpf", "loading BPF programs", _bpf),
        ("ring_buffer", "ring buffers", _ring_buffer),
        ("btf", "kernel type information", lambda: _btf(sysfs, btf_path)),
        ("perf_uprobes", "uprobes through perf events", lambda: _perf(sysfs)),
        ("uprobe_multi", "many uprobes in one link", _multi),
        ("uprobe_session", "entry and return in one link", lambda: _session(sysfs)),
        ("sleepable", "uprobe programs that may page memory in", _sleepable),
        ("thread_exits", "seeing threads end", _thread_exits),
        ("returns_under_seccomp", "return probes in sandboxed processes", returns_under_seccomp),
        ("probes", "the programs of profinferd", lambda: GgmlPrograms.load(btf_path=btf_path).close()),
    )
    facts = []
    for name, what, trial in trials:
        if name in without:
            facts.append(Fact(name, what, False, f"{what}: switched off for this run"))
            continue
        try:
            trial()
        except ProfinferError as error:
            facts.append(Fact(name, what, False, error.what, error.remedy))
        except FileNotFoundError as error:  # an object that was not built
            facts.append(Fact(name, what, False, str(error)))
        else:
            facts.append(Fact(name, what, True))
    return Machine(tuple(facts))


# ---- the trials: each returns, or raises ProfinferError ---------------------------------


def _lockdown(sysfs: Path) -> None:
    try:
        state = (sysfs / "kernel/security/lockdown").read_text()
    except OSError:
        return  # no such feature, or not to be seen: the trials below tell
    if "[confidentiality]" in state:
        raise MachineError(
            "the kernel is locked down for confidentiality: BPF programs cannot read memory",
            "boot with lockdown=integrity (secure boot allows that), or without lockdown",
        )


def _failed(what: str, error: OSError, needed: Sequence[str], lacks: str) -> MachineError:
    """The error of a plain BPF call; ``lacks`` says what EINVAL means here."""
    number = error.errno or 0
    if number in (errno.EPERM, errno.EACCES):
        return reasons.refused(what, number, needed)
    if number == errno.ENOSYS:
        return MachineError(
            f"{what}: {bpfsys.strerror(number)}",
            "the kernel is built without CONFIG_BPF_SYSCALL, or a seccomp filter hides the call",
        )
    if (lack := reasons.resources(what, number)) is not None:
        return lack
    return MachineError(f"{what}: {bpfsys.strerror(number)}, {lacks}", "a newer kernel is needed")


def _bpf() -> None:
    try:
        os.close(bpfsys.prog_load(bpfsys.PROG_KPROBE, returning()))
    except OSError as error:
        lacks = "this kernel has no probe programs (CONFIG_BPF_EVENTS)"
        raise _failed("cannot load BPF programs", error, reasons.FOR_LOADING, lacks) from error


def _ring_buffer() -> None:
    try:
        os.close(bpfsys.map_create(bpfsys.MAP_RINGBUF, 0, 0, os.sysconf("SC_PAGE_SIZE")))
    except OSError as error:
        lacks = "this kernel has none (Linux 5.8 has them)"
        raise _failed("cannot create a ring buffer", error, ("CAP_BPF",), lacks) from error


def _btf(sysfs: Path, btf_path: str | None) -> None:
    path = Path(btf_path) if btf_path is not None else sysfs / "kernel/btf/vmlinux"
    try:
        with path.open("rb") as file:
            head = file.read(2)
    except OSError as error:
        why = f"{path} cannot be read ({error.strerror})"
    else:
        if head == _BTF_MAGIC or (btf_path is not None and head == b"\x7fE"):
            return
        why = f"{path} holds no BTF"
    raise MachineError(
        f"no kernel type information: {why}",
        "give a BTF file made for this kernel with --btf-path; without it uprobes work, but not sessions",
    )


def _try(method: str, expected: int, attach: Callable[[Counter, VictimFunction], links.Link]) -> None:
    """Attach to a function of ours, call it once, and see whether the program ran."""
    attach_type = {"session": bpfsys.ATTACH_UPROBE_SESSION, "multi": bpfsys.ATTACH_UPROBE_MULTI}.get(
        method, 0
    )
    with ExitStack() as stack:
        try:
            victim = stack.enter_context(VictimFunction())
        except OSError as error:
            what = f"cannot make a function to try probes on: {error.strerror or error}"
            raise MachineError(what, "look at vm.memfd_noexec and at security policies") from error
        try:
            counter = stack.enter_context(Counter(attach_type))
        except OSError as error:
            lacks = f"this kernel has no {method} programs"
            raise _failed(f"cannot load a {method} program", error, reasons.FOR_LOADING, lacks) from error
        stack.enter_context(attach(counter, victim))
        victim.call()
        if counter.hits() != expected:
            raise MachineError(
                f"a uprobe ({method}) was attached and ran {counter.hits()} times instead of {expected}",
                "this kernel's uprobes do not work; use another --attach-method",
            )


def _perf(sysfs: Path) -> None:
    links.perf_uprobe_pmu(sysfs / "bus/event_source/devices/uprobe")
    _try("perf", 1, lambda counter, victim: links.attach_perf(counter.fd, victim.path, 0, 0, os.getpid()))


def _multi() -> None:
    def attach(counter: Counter, victim: VictimFunction) -> links.Link:
        return links.attach_multi(counter.fd, victim.path, [0], [0], pid=os.getpid())

    _try("multi", 1, attach)


def _session(sysfs: Path) -> None:
    def attach(counter: Counter, victim: VictimFunction) -> links.Link:
        return links.attach_multi(counter.fd, victim.path, [0], [0], pid=os.getpid(), session=True)

    _btf(sysfs, None)  # session programs call kernel functions, which only the kernel's own BTF names
    _try("session", 2, attach)


def _sleepable() -> None:
    try:
        Counter(flags=bpfsys.PROG_SLEEPABLE).close()
    except OSError as error:
        lacks = "this kernel has none (Linux 6.0 has them)"
        raise _failed("cannot load a sleepable uprobe program", error, reasons.FOR_LOADING, lacks) from error


def _thread_exits() -> None:
    try:
        program = bpfsys.prog_load(_RAW_TRACEPOINT_PROGRAM, returning())
    except OSError as error:
        lacks = "this kernel has no raw tracepoints"
        raise _failed("cannot load a tracepoint program", error, reasons.FOR_LOADING, lacks) from error
    try:
        links.attach_raw_tracepoint(program, "sched_process_exit").close()
    finally:
        os.close(program)


def returns_under_seccomp(command: Sequence[str] | None = None) -> None:
    """Raise MachineError when a return probe would kill a process with a seccomp filter.

    Tried on a sandboxed child of ours (about 50 ms), with the method that exists here.
    ``command`` replaces the child, for tests.
    """
    with ExitStack() as stack:
        try:
            victim = stack.enter_context(VictimFunction())
            try:
                counter = stack.enter_context(Counter(bpfsys.ATTACH_UPROBE_MULTI))
                stack.enter_context(links.attach_multi(counter.fd, victim.path, [0], [0], ret=True))
            except (OSError, ProfinferError):
                counter = stack.enter_context(Counter())
                stack.enter_context(links.attach_perf(counter.fd, victim.path, 0, 0, ret=True))
            status = victim.call_in_sandbox(command)
        except OSError as error:
            what = "cannot try a return probe on a sandboxed process"
            raise _failed(what, error, reasons.FOR_LOADING, "this kernel has no uprobes") from error
        except subprocess.TimeoutExpired as error:
            raise MachineError("a sandboxed process with a return probe never came back", "") from error
    if status < 0:
        raise MachineError(
            "this kernel kills processes with a seccomp filter at return probes (6.11 to early 2025)",
            "update the kernel; without return probes, calls of such a process cannot be timed",
        )
    if status not in (0, NO_SECCOMP):
        raise MachineError(f"the sandboxed trial process failed with status {status}", "")


def seccomp_mode(pid: int) -> int:
    """0: no sandbox, 1: strict, 2: filter; 0 when the kernel does not say."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except OSError:
        return 0
    for line in text.splitlines():
        if line.startswith("Seccomp:"):
            return int(line.split()[1])
    return 0
