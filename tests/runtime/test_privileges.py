# SPDX-License-Identifier: Apache-2.0
"""What the daemon gives up, as the kernel says it in /proc. Each trial is a process of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from profinferd.agent.kernel.reasons import CAPABILITIES, effective

from .cases import Engine, copied, engine, links, nothing_left
from .daemons import Daemon

NAME = f"pfi-priv-{os.getpid()}"
ADMIN = 1 << CAPABILITIES["CAP_SYS_ADMIN"]
UNIT = ("bpf", "perfmon", "sys_ptrace", "dac_read_search", "checkpoint_restore", "sys_admin")

pytestmark = pytest.mark.skipif(
    "CAP_SYS_ADMIN" not in effective(), reason="these tests run without CAP_SYS_ADMIN"
)


def sets(status: Path) -> dict[str, int]:
    """CapInh, CapPrm, CapEff, CapBnd, CapAmb."""
    return {name: int(bits, 16) for name, bits in re.findall(r"(Cap\w+):\s*(\w+)", status.read_text())}


def run(code: str) -> list[dict[str, int]]:
    """What ``show()`` printed in a new process with the unit's capabilities, ambient as there."""
    program = (
        "import json, re\n"
        "from profinferd.agent.kernel import privileges\n"
        "def show(path='/proc/self/status'):\n"
        "    text = open(path).read()\n"
        "    print(json.dumps({n: int(b, 16) for n, b in re.findall(r'(Cap\\w+):\\s*(\\w+)', text)}))\n"
        + code
    )
    caps = ",".join(f"+{name}" for name in UNIT)
    under = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", f"--inh-caps={caps}",
             f"--ambient-caps={caps}"]  # fmt: skip
    done = subprocess.run([*under, sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_what_is_dropped_is_gone_for_programs_started_later_too() -> None:
    before, after, child = run(
        "show(); privileges.drop(['CAP_SYS_ADMIN']); show()\n"
        "import subprocess, sys; sys.stdout.flush()\n"
        "code = 'import re, json; print(json.dumps({n: int(b, 16) for n, b in '\n"
        "code += '''re.findall(r\"(Cap\\\\w+):\\\\s*(\\\\w+)\", open(\"/proc/self/status\").read())}))'''\n"
        "subprocess.run([sys.executable, '-c', code], check=True)\n"
    )
    for name in ("CapInh", "CapPrm", "CapEff", "CapAmb"):
        assert before[name] & ADMIN
        assert after[name] == before[name] & ~ADMIN
        assert child[name] == after[name]


def test_a_trial_takes_nothing_away() -> None:
    before, inside, after = run("show()\nwith privileges.without(['CAP_SYS_ADMIN']): show()\nshow()")
    assert inside["CapEff"] == before["CapEff"] & ~ADMIN and inside["CapPrm"] == before["CapPrm"]
    assert after == before


@pytest.mark.parametrize(
    ("refuse", "method", "kept"),
    [
        ("pass", "auto", False),
        ("pass", "perf", True),  # asked for: needs it for every new process
        ("privileges.links.attach_multi = fails", "auto", True),  # a kernel without these links
        ("privileges.MmapWatch = fails", "auto", True),  # a kernel that wants it for every event
        ("privileges._call = fails", "auto", True),
    ],
)
def test_it_is_kept_where_it_is_needed(refuse: str, method: str, kept: bool) -> None:
    before, after = run(
        "from profinferd.agent.errors import MachineError\n"
        "def fails(*words, **named): raise MachineError('not here', '')\n"
        f"show(); {refuse}\nassert privileges.drop_admin({method!r}) is not {kept}\nshow()"
    )
    assert bool(after["CapEff"] & ADMIN) == bool(after["CapPrm"] & ADMIN) == kept
    assert after["CapEff"] | ADMIN == before["CapEff"]


def test_the_daemon_runs_without_it(tmp_path: Path) -> None:
    """All its threads; and what it does is what it did with it."""
    before = links()
    program = copied(engine(), tmp_path, f"{NAME}-one")
    with Daemon(tmp_path / "daemon", f"{NAME}*") as daemon:
        daemon.scanned()
        with Engine(program) as stub:
            daemon.wait_for(stub.pid)
            stub.order("run pos=0-3 out=3 us=20")
            daemon.wait_for_tokens(stub.pid, 4, 0)
            tasks = sorted(Path(f"/proc/{daemon.pid}/task").iterdir())
            assert len(tasks) > 3
            for task in tasks:
                try:
                    found = sets(task / "status")
                except (FileNotFoundError, ProcessLookupError):
                    continue  # some threads live for a moment
                assert not (found["CapEff"] | found["CapPrm"]) & ADMIN, task
        assert daemon.stop() == 0
    nothing_left(before)
