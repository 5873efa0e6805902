# SPDX-License-Identifier: Apache-2.0
"""``profinferd check``: machines that lack something, and processes of every kind.

What a machine has is known otherwise: it was taken away by the test, in a made-up /sys, with
a mount namespace, or by dropping capabilities.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .cases import Engine, engine, plain

MAIN = (sys.executable, "-c", "import sys; from profinferd.agent.cli import main; sys.exit(main())", "check")


def check(*arguments: str, prefix: tuple[str, ...] = ()) -> tuple[int, dict[str, Any]]:
    """(exit code, the JSON object)."""
    done = subprocess.run(
        [*prefix, *MAIN, "--format", "json", *arguments], capture_output=True, text=True, timeout=120
    )
    assert done.stderr == ""
    answer: dict[str, Any] = json.loads(done.stdout)
    return done.returncode, answer


def lacking(answer: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {f["name"]: f for f in answer["features"] if not f["ok"]}


@functools.cache
def lacking_here() -> frozenset[str]:
    return frozenset(lacking(check()[1]))


def machine_lacks(*names: str) -> frozenset[str]:
    """These, and what this very machine lacks already, so that the tests hold on any."""
    return lacking_here() | frozenset(names)


def fake_sys(root: Path, *, btf: bool = True, pmu: bool = True, lockdown: str | None = None) -> str:
    """A /sys of our own in which things are missing."""
    (root / "kernel/btf").mkdir(parents=True)
    (root / "bus/event_source/devices").mkdir(parents=True)
    if btf:
        (root / "kernel/btf/vmlinux").symlink_to("/sys/kernel/btf/vmlinux")
    if pmu:
        (root / "bus/event_source/devices/uprobe").symlink_to("/sys/bus/event_source/devices/uprobe")
    if lockdown is not None:
        (root / "kernel/security").mkdir()
        (root / "kernel/security/lockdown").write_text(lockdown)
    return str(root)


def test_this_machine() -> None:
    code, answer = check()
    assert (code, answer["usable"], answer["process"]) == (0, True, None)
    assert answer["kernel"] == os.uname().release
    assert answer["method"] in ("session", "multi", "perf")
    for feature in answer["features"]:
        assert feature["ok"] == (feature["reason"] is None), feature


def test_no_kernel_types(tmp_path: Path) -> None:
    """C28: sessions need them, nothing else does; the remedy names the option."""
    code, answer = check("--sysfs", fake_sys(tmp_path, btf=False))
    assert code == 0
    assert answer["usable"]
    assert answer["method"] in ("multi", "perf")
    assert set(lacking(answer)) == machine_lacks("btf", "uprobe_session")
    assert "--btf-path" in lacking(answer)["btf"]["remedy"]


def test_no_ring_buffers() -> None:
    """C29: one reason, exit code of a machine that cannot."""
    code, answer = check("--without", "ring_buffer")
    assert (code, answer["usable"]) == (4, False)
    assert "ring buffers" in answer["blocked"]["reason"]


def test_the_programs_are_refused() -> None:
    """C30: what a kernel would not load is named."""
    code, answer = check("--without", "probes")
    assert code == 4
    assert "programs of profinferd" in answer["blocked"]["reason"]


@pytest.mark.parametrize("optional", ["sleepable", "thread_exits", "returns_under_seccomp"])
def test_a_missing_optional_feature_is_a_loss_and_no_failure(optional: str) -> None:
    """C30: one refused program disables one feature."""
    code, answer = check("--without", optional)
    assert code == 0
    assert lacking(answer)[optional]["lost"]


def test_no_perf_uprobes(tmp_path: Path) -> None:
    """C31: named with the kernel option; alone it hurts only where there is no other way."""
    root = fake_sys(tmp_path, pmu=False)
    code, answer = check("--sysfs", root)
    assert "CONFIG_UPROBE_EVENTS" in lacking(answer)["perf_uprobes"]["remedy"]
    assert code == (0 if {"uprobe_multi", "uprobe_session"} - set(lacking(answer)) else 4)
    code, answer = check("--sysfs", root, "--without", "uprobe_multi", "--without", "uprobe_session")
    assert code == 4
    assert answer["method"] is None
    assert "CONFIG_UPROBE_EVENTS" in answer["blocked"]["remedy"]


@pytest.mark.parametrize(
    ("dropped", "named"),
    [("-sys_admin,-bpf", "CAP_BPF"), ("-sys_admin,-perfmon", "CAP_PERFMON")],
)
def test_missing_capabilities(dropped: str, named: str) -> None:
    """C32: by name, with what gives them."""
    code, answer = check(prefix=("setpriv", "--bounding-set", dropped))
    assert code == 4
    assert f"lacks {named}" in answer["blocked"]["reason"]
    assert "CAP_BPF and CAP_PERFMON" in answer["blocked"]["remedy"]


def test_processes_of_others_are_out_of_reach() -> None:
    """C63: said beforehand, and what it costs."""
    code, answer = check(prefix=("setpriv", "--bounding-set", "-sys_ptrace,-dac_read_search"))
    lost = lacking(answer)["other_users"]
    assert code == 0
    assert lost["reason"] == "this process lacks CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH"
    assert lost["lost"]


def test_locked_down(tmp_path: Path) -> None:
    """C33: a state of its own, with the way out of it."""
    root = fake_sys(tmp_path, lockdown="none integrity [confidentiality]\n")
    code, answer = check("--sysfs", root)
    assert code == 4
    assert "locked down" in answer["blocked"]["reason"]
    assert "lockdown=integrity" in answer["blocked"]["remedy"]


def test_a_hardened_unit_without_tracefs() -> None:
    """C55: a read-only /sys and no tracefs take nothing away."""
    script = (
        "mount -t tmpfs none /sys/kernel/tracing; mount -t tmpfs none /sys/kernel/debug; "
        'mount -o remount,bind,ro /sys; exec "$@"'
    )
    code, answer = check(prefix=("unshare", "-m", "sh", "-c", script, "sh"))
    assert code == 0
    assert set(lacking(answer)) == machine_lacks()


# ---- processes ------------------------------------------------------------------------


def test_a_process_with_an_engine() -> None:
    """Levels and model are what the stub was built with; nothing is attached to it."""
    with Engine(engine()) as stub:
        code, answer = check("--pid", str(stub.pid))
    assert code == 0
    process = answer["process"]
    assert process["usable"]
    assert process["program"] == Path(engine()).name
    assert [(lv["name"], lv["ok"]) for lv in process["levels"]] == [
        ("call", True), ("graph", True), ("op", True)
    ]  # fmt: skip


def test_a_process_without_an_engine() -> None:
    with Engine(plain()) as process:
        code, answer = check("--pid", str(process.pid))
    assert (code, answer["usable"]) == (3, True)
    assert "no inference engine" in answer["process"]["blocked"]["reason"]
    assert answer["process"]["blocked"]["remedy"]


def test_a_stripped_engine_says_what_is_missing() -> None:
    """C01."""
    with Engine(engine(strip=True, dynamic=False)) as stub:
        code, answer = check("--pid", str(stub.pid))
    assert code == 3
    assert answer["process"]["blocked"]["reason"]


def test_no_such_process() -> None:
    code, answer = check("--pid", str(1 << 22))
    assert code in (3, 5)
    assert answer["process"]["engine"] is None


def test_the_machine_comes_before_the_process() -> None:
    code, answer = check("--pid", str(os.getpid()), "--without", "ring_buffer")
    assert code == 4
    assert not answer["process"]["usable"]


def test_the_table_explains_each_missing_thing(tmp_path: Path) -> None:
    root = fake_sys(tmp_path, btf=False)
    done = subprocess.run([*MAIN, "--sysfs", root], capture_output=True, text=True, timeout=120)
    lines = done.stdout.splitlines()
    at = lines.index("  NO   kernel type information")
    assert lines[at + 1].startswith("       why: no kernel type information")
    assert lines[at + 2].startswith("       do: give a BTF file")
    assert lines[at + 3].startswith("       without it: ")
    assert any(line.startswith("This machine can profile.") for line in lines)


@pytest.mark.parametrize("pid", ["0", "-1", "x", "99999999999"])
def test_what_is_no_process_id(pid: str) -> None:
    done = subprocess.run([*MAIN, "--pid", pid], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
