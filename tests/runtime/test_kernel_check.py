# SPDX-License-Identifier: Apache-2.0
"""The capability check, on machines that lack something: for real where that can be had here."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from profinferd.agent.errors import MachineError
from profinferd.agent.kernel import check, trial
from profinferd.agent.kernel.links import perf_uprobe_pmu

REPORT = """
import dataclasses, json
from profinferd.agent.errors import MachineError
from profinferd.agent.kernel.check import check_machine
machine = check_machine()
try:
    require = machine.require()
except MachineError as error:
    require = str(error)
print(json.dumps({"facts": {f.name: [f.ok, f.reason, f.remedy] for f in machine.facts},
                  "method": machine.method, "require": require}))
"""


class Report:
    """What the check says in a process with something taken away."""

    def __init__(self, *prefix: str) -> None:
        done = subprocess.run(
            [*prefix, sys.executable, "-c", REPORT], capture_output=True, text=True, check=True
        )
        answer = json.loads(done.stdout)
        self.facts: dict[str, list[str]] = answer["facts"]
        self.method: str | None = answer["method"]
        self.require: str = answer["require"]

    def lacking(self) -> set[str]:
        return {name for name, (ok, _, _) in self.facts.items() if not ok}


def in_namespace(script: str) -> list[str]:
    """Run what follows in a mount namespace of its own, after ``script``."""
    return ["unshare", "-m", "sh", "-c", f'{script} && exec "$@"', "sh"]


def test_this_machine_says_what_it_can() -> None:
    machine = check.check_machine()
    for fact in machine.facts:
        assert fact.ok or (fact.reason and "\n" not in fact.reason), fact
    assert machine.require() == machine.method
    with pytest.raises(KeyError):
        machine.fact("nonesuch")


@pytest.mark.parametrize(
    ("dropped", "lacking", "named"),
    [
        ("-sys_admin", {"perf_uprobes"}, "lacks CAP_SYS_ADMIN"),
        ("-sys_admin,-bpf", {"bpf", "ring_buffer", "uprobe_multi", "probes"}, "lacks CAP_BPF"),
        ("-sys_admin,-perfmon", {"bpf", "uprobe_multi", "probes"}, "lacks CAP_PERFMON"),
        ("-sys_admin,-bpf,-perfmon", {"bpf", "ring_buffer", "probes"}, "lacks CAP_BPF and CAP_PERFMON"),
    ],
)
def test_missing_capabilities(dropped: str, lacking: set[str], named: str) -> None:
    """C32: found by trying, named, and what works without stays."""
    report = Report("setpriv", "--bounding-set", dropped)
    assert lacking <= report.lacking()
    first = next(name for name in report.facts if not report.facts[name][0])
    assert named in report.facts[first][1]
    assert "give it CAP_" in report.facts[first][2]
    if "bpf" in lacking:
        assert report.method is None
        assert named in report.require
    else:
        assert report.require == report.method in ("session", "multi")


def test_no_perf_uprobes() -> None:
    """C31: no uprobe PMU to be seen; uprobe_multi does not need it."""
    report = Report(*in_namespace("mount -t tmpfs none /sys/bus/event_source/devices"))
    assert report.lacking() == {"perf_uprobes"}
    assert "CONFIG_UPROBE_EVENTS" in report.facts["perf_uprobes"][2]
    assert report.method in ("session", "multi")


def test_no_tracefs() -> None:
    """C55: nothing here needs tracefs."""
    assert not Report(*in_namespace("mount -t tmpfs none /sys/kernel/tracing")).lacking()


def test_no_btf() -> None:
    """C28: no kernel types: sessions are off, uprobes work."""
    report = Report(*in_namespace("mount --bind /dev/null /sys/kernel/btf/vmlinux"))
    assert report.lacking() == {"btf", "uprobe_session"}
    assert "--btf-path" in report.facts["btf"][2]
    assert report.require == report.method == "multi"


def test_too_few_descriptors() -> None:
    report = Report("sh", "-c", 'ulimit -n 14; exec "$@"', "sh")
    assert "probes" in report.lacking()
    assert "ulimit -n" in report.require


def test_no_libbpf() -> None:
    machine = check.check_machine(without={"libbpf"})
    with pytest.raises(MachineError, match="libbpf"):
        machine.require()


@pytest.mark.parametrize(
    ("without", "method"),
    [
        (set(), "session"),
        ({"uprobe_session"}, "multi"),
        ({"uprobe_session", "uprobe_multi"}, "perf"),
        ({"uprobe_session", "uprobe_multi", "perf_uprobes"}, None),
    ],
)
def test_best_method(without: set[str], method: str | None) -> None:
    """Absence forced one by one: sessions, then multi links, then perf uprobes."""
    whole = check.check_machine()
    if not all(whole.has(name) for name in ("uprobe_session", "uprobe_multi", "perf_uprobes")):
        pytest.skip(f"this kernel has no {[f.name for f in whole.facts if not f.ok]}")
    machine = check.check_machine(without=without)
    assert machine.method == method
    if method is None:
        with pytest.raises(MachineError, match="perf"):
            machine.require()


@pytest.mark.parametrize(
    ("state", "ok"),
    [("[none] integrity confidentiality", True), ("none [integrity] confidentiality", True),
     ("none integrity [confidentiality]", False), (None, True)],
)  # fmt: skip
def test_lockdown(state: str | None, ok: bool, tmp_path: Path) -> None:
    """C33: with a root of /sys made up."""
    if state is not None:
        (tmp_path / "kernel/security").mkdir(parents=True)
        (tmp_path / "kernel/security/lockdown").write_text(state + "\n")
    if ok:
        check._lockdown(tmp_path)
    else:
        with pytest.raises(MachineError, match="locked down"):
            check._lockdown(tmp_path)


def test_btf_file_given_by_hand(tmp_path: Path) -> None:
    """C28: --btf-path in place of what the kernel lacks."""
    with pytest.raises(MachineError, match="cannot be read"):
        check._btf(tmp_path, None)
    given = tmp_path / "some.btf"
    given.write_bytes(b"\x9f\xeb\x01\x00")
    check._btf(tmp_path, str(given))
    given.write_bytes(b"junk")
    with pytest.raises(MachineError, match="holds no BTF"):
        check._btf(tmp_path, str(given))


@pytest.mark.parametrize("content", [None, "", "words"])
def test_uprobe_pmu_that_cannot_be_read(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "type").write_text(content)
    with pytest.raises(MachineError, match="offers no uprobes"):
        perf_uprobe_pmu(tmp_path)


# ---- return probes and seccomp (D13) ----------------------------------------------------


def test_return_probes_in_a_sandbox() -> None:
    """On this kernel the sandboxed child comes back; and it does run under a filter."""
    check.returns_under_seccomp()
    with trial.VictimFunction() as victim:
        assert victim.call_in_sandbox() == 0


def test_the_filter_kills_at_the_call_it_forbids() -> None:
    """The trial can fail: a process under its filter that makes such a call dies of SIGSYS.

    400 stands for 335, which a fixed kernel does not show to filters.
    """
    script = (
        "import ctypes, os, sys\n"
        "from profinferd.agent.kernel import sandboxed\n"
        "libc = ctypes.CDLL(None)\n"
        "class Once:\n"
        "    def __call__(self): libc.syscall(ctypes.c_long(400))\n"
        "sandboxed.ctypes.CFUNCTYPE = lambda *a: (lambda address: Once())\n"
        "os._exit(sandboxed.main(int(sys.argv[1])))\n"
    )
    with trial.VictimFunction() as victim:
        status = victim.call_in_sandbox([sys.executable, "-c", script, str(victim.descriptor)])
    assert status == -31, "SIGSYS"


@pytest.mark.parametrize(
    ("child", "says"),
    [
        ("kill -SYS $$", "kills processes with a seccomp filter"),
        ("kill -SEGV $$", "kills processes with a seccomp filter"),
        ("exit 4", "failed with status 4"),
    ],
)
def test_a_kernel_that_kills_sandboxed_processes(child: str, says: str) -> None:
    with pytest.raises(MachineError, match=says):
        check.returns_under_seccomp(["sh", "-c", child])


def test_a_kernel_without_seccomp() -> None:
    check.returns_under_seccomp(["sh", "-c", "exit 3"])


def test_seccomp_mode() -> None:
    assert check.seccomp_mode(1 << 22) == 0
    plain = subprocess.Popen(["sleep", "20"])
    try:
        assert check.seccomp_mode(plain.pid) == check.seccomp_mode(plain.pid) in (0, 2)
    finally:
        plain.kill()
        plain.wait()


def test_code_of_the_victim_is_known_here() -> None:
    assert platform.machine() in trial._CODE
