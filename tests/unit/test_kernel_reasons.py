# SPDX-License-Identifier: Apache-2.0
"""Errnos in words: who is to blame, what it says, what to do."""

from __future__ import annotations

import errno

import pytest

from profinferd.agent.errors import MachineError, ProfinferError, TargetError
from profinferd.agent.kernel import reasons
from profinferd.agent.kernel.bpfsys import ENOTSUPP, strerror

ALL = frozenset(reasons.CAPABILITIES)


@pytest.mark.parametrize(
    ("number", "method", "detail", "kind", "says"),
    [
        (ENOTSUPP, "multi", "", TargetError, "cannot single-step"),  # C41
        (errno.ESRCH, "multi", "", TargetError, "no such process"),
        (errno.ENOENT, "perf", "", TargetError, "no such file"),
        (errno.EBADF, "multi", "", TargetError, "not a regular file"),
        (errno.EIO, "perf", "", TargetError, "file system"),
        (errno.EINVAL, "multi", "offset 0x9 lies outside the file", TargetError, "outside the file"),
        (errno.EINVAL, "multi", "", MachineError, "Linux 6.6"),
        (errno.EINVAL, "session", "", MachineError, "Linux 6.13"),
        (errno.EINVAL, "perf", "", MachineError, "5.15"),
        (errno.EMFILE, "perf", "", MachineError, "ulimit -n"),
        (errno.ENOMEM, "multi", "", MachineError, "memory"),
        (errno.EXDEV, "multi", "", MachineError, "EXDEV"),
    ],
)
def test_attaching(number: int, method: str, detail: str, kind: type[ProfinferError], says: str) -> None:
    error = reasons.attaching(number, method, "offset 0x10 of libx.so", detail)
    assert type(error) is kind
    assert says in str(error)
    assert "libx.so" in error.what
    assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("method", "held", "lacking"),
    [
        ("perf", ALL - {"CAP_SYS_ADMIN"}, "lacks CAP_SYS_ADMIN"),  # C32
        ("perf", ALL - {"CAP_SYS_ADMIN", "CAP_PERFMON"}, "lacks CAP_PERFMON and CAP_SYS_ADMIN"),
        ("multi", ALL - {"CAP_SYS_ADMIN", "CAP_BPF"}, "lacks CAP_BPF"),
        ("multi", ALL - {"CAP_BPF", "CAP_PERFMON"}, "although CAP_BPF and CAP_PERFMON are held"),
        ("multi", ALL, "although"),
    ],
)
def test_missing_capabilities_are_named(
    method: str, held: frozenset[str], lacking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reasons, "effective", lambda: held)
    error = reasons.attaching(errno.EACCES, method, "x")
    assert isinstance(error, MachineError)
    assert lacking in error.what


@pytest.mark.parametrize(("user", "says"), [(0, "takes them away"), (1000, "run as root")])
def test_remedy_depends_on_who_runs_it(user: int, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: user)
    assert says in reasons.refused("x", errno.EPERM, ("CAP_BPF",), frozenset()).remedy


def test_policy_is_suspected_when_nothing_lacks() -> None:
    error = reasons.refused("x", errno.EPERM, ("CAP_BPF",), ALL)
    assert "seccomp" in error.remedy


def test_effective_capabilities() -> None:
    assert reasons.effective("Name:\tx\nCapEff:\t000001ffffffffff\n") == ALL
    assert reasons.effective("CapEff:\t0000000000200000\n") == {"CAP_SYS_ADMIN"}
    assert reasons.effective("Name:\tx\n") == frozenset()
    assert reasons.missing(("CAP_BPF", "CAP_SYS_PTRACE"), frozenset({"CAP_SYS_ADMIN"})) == ["CAP_SYS_PTRACE"]


def test_verifier_log() -> None:
    log = "0: (79) r1 = 1\nR0 invalid mem access 'map_value_or_null'\nprocessed 5 insns (limit 1000000)\n"
    assert reasons.last_words(log) == "R0 invalid mem access 'map_value_or_null'"
    assert reasons.last_words("") == ""
    error = reasons.loading(errno.EACCES, "program x of y.o", log + "stack depth 8\n")
    assert "map_value_or_null" in error.what
    assert len(reasons.last_words("long " * 1000)) <= 200


def test_errno_names() -> None:
    assert strerror(ENOTSUPP) == "ENOTSUPP (524)"
    assert strerror(errno.EPERM).startswith("EPERM (")
    assert "9999" in strerror(9999)
