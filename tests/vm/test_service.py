# SPDX-License-Identifier: Apache-2.0
"""The Debian package under a real systemd: installed, run, scraped, restarted, upgraded, purged.

One machine for each Debian release; its steps come in the order of this file. What the engine did is
known from the stub's own answers; what the service may do is asked of systemd and of the kernel.
Emulated: this is about correctness, never about cost.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.runtime.cases import engine

from .image import image
from .machine import GuestError, Machine, tools_missing

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "deploy/deb/build.py"
ARCHITECTURE = os.environ.get("VM_ARCH", "amd64")
RELEASES = {"bookworm": "deb12", "trixie": "deb13"}
PREVIOUS = "0.0.9"
DECODED = 20
METRICS = "http://127.0.0.1:9847/metrics"
SCRAPE = (
    f"python3 -c 'import urllib.request as u; print(u.urlopen(\"{METRICS}\", timeout=60).read().decode())'"
)

pytestmark = pytest.mark.skipif(
    tools_missing(ARCHITECTURE) is not None, reason=str(tools_missing(ARCHITECTURE))
)


@cache
def _builds() -> tuple[tempfile.TemporaryDirectory[str], Path]:
    """Our wheel, built from this tree, once for all packages: it takes longest."""
    spec = importlib.util.spec_from_file_location("build_of_deploy", BUILD)
    assert spec is not None and spec.loader is not None
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    folder = tempfile.TemporaryDirectory(prefix="vm-wheel-")
    return folder, build.own_wheel(Path(folder.name))


def package(suite: str, folder: Path, version: str | None = None) -> Path:
    """Made here, from this tree."""
    command = [sys.executable, str(BUILD), "--suite", suite, "--arch", ARCHITECTURE, "--fast"]
    command += ["-o", str(folder), "--wheel", str(_builds()[1])]
    command += ["--set-version", version] if version else []
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return Path(done.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="module", params=sorted(RELEASES))
def guest(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    suite = str(request.param)
    folder = tmp_path_factory.mktemp(suite)
    compiler = "gcc" if ARCHITECTURE == "amd64" else "aarch64-linux-gnu-gcc"
    files = {
        "old.deb": package(suite, folder, PREVIOUS),
        "new.deb": package(suite, folder),
        "engine": engine() if ARCHITECTURE == "amd64" else _engine_for(compiler),
    }
    with Machine(image(suite, ARCHITECTURE), files) as machine:
        machine.say(
            f"{suite} {ARCHITECTURE}: booted in {machine.boot_seconds:.0f} s ({machine.accelerator}), "
            f"Linux {machine.sure('uname -r').strip()}"
        )
        yield machine


def _engine_for(compiler: str) -> Path:
    from tests.victims.build import build

    flags = ("-DMAIN", "-Wl,--build-id=sha1", "-rdynamic")
    return build("stub_ggml.c", cflags=flags, cc=compiler)


def release(guest: Machine) -> tuple[int, int]:
    """The kernel's version."""
    major, minor = (int(n) for n in re.findall(r"\d+", guest.sure("uname -r"))[:2])
    return major, minor


def active(guest: Machine) -> bool:
    return guest.run("systemctl is-active profinferd").out.strip() == "active"


def journal(guest: Machine) -> str:
    return guest.run("journalctl -u profinferd --no-pager -o cat | tail -20").out


def until(guest: Machine, command: str, timeout: float) -> str:
    """Again and again until it succeeds; where it does not, the service's own words say why."""
    try:
        return guest.until(command, timeout)
    except GuestError as error:
        told = guest.run(
            "profinferd status; profinferd status --format json | cut -c1-2000; "
            "ps -eo pid,user,rss,pcpu,etimes,args | grep -v '\\[' | tail -25; dmesg | tail -5"
        )
        raise GuestError(f"{error}\n{told}\n{journal(guest)}\n{guest.run(SCRAPE).out[:6000]}") from error


def samples(guest: Machine) -> dict[str, float]:
    """The scrape, by series."""
    found = {}
    for line in guest.sure(SCRAPE).splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            found[name] = float(value)
    return found


def total(found: dict[str, float], metric: str, **labels: str) -> float:
    wanted = [f'{name}="{value}"' for name, value in labels.items()]
    return sum(v for k, v in found.items()
               if k.partition("{")[0] == metric and all(w in k for w in wanted))  # fmt: skip


def test_installs_and_starts(guest: Machine) -> None:
    """Nothing but the package: no network in this machine, no compiler."""
    guest.sure("dpkg -i /run/files/old.deb", 900)
    assert guest.sure("profinferd --version").split() == ["profinferd", PREVIOUS]
    guest.until("systemctl is-active profinferd", 300)
    assert guest.sure("stat -c '%U %a' /var/lib/profinferd").split() == ["profinferd", "750"]
    assert guest.sure("systemctl is-enabled profinferd").strip() == "enabled"


def test_the_kernel_is_checked(guest: Machine) -> None:
    """C31: this kernel's own features decide, 6.1 has only perf uprobes; that is enough."""
    done = guest.run("profinferd check --format json", 300)
    answer = json.loads(done.out)
    assert done.code == 0, done
    here = release(guest)
    expected = "session" if here >= (6, 13) else "multi" if here >= (6, 6) else "perf"
    assert answer["method"] == expected


def test_attach_counts_what_the_engine_did(guest: Machine) -> None:
    """On this kernel, with its way of attaching: tokens, calls and operators, none lost."""
    guest.sure("useradd -m alice; install -o alice -m 700 /run/files/engine /home/alice/engine")
    guest.sure("mkdir -p /run/e && mkfifo /run/e/in && chown -R alice /run/e")
    guest.sure("systemd-run -q --unit=holder sh -c 'exec sleep infinity > /run/e/in'")
    guest.sure(
        "systemd-run -q --unit=engine --uid=alice sh -c 'exec /home/alice/engine < /run/e/in > /run/e/out'"
    )
    guest.until("test -s /run/e/out", 120)
    guest.sure(
        "systemd-run -q --unit=attach sh -c 'exec profinferd attach -p $(pgrep -u alice engine) --ops all "
        "--format json -o /root/seen.json > /root/out 2> /root/progress'"
    )
    guest.until("grep -q 'attached to' /root/progress", 300)
    generate(guest)
    guest.sure("systemctl kill -s INT attach")
    guest.until("test -s /root/seen.json", 300)
    seen = json.loads(guest.sure("cat /root/seen.json"))
    assert seen["tokens"]["prefill"] == 5
    assert seen["tokens"]["decode"] == DECODED
    assert seen["tokens"]["output_rows"] == DECODED + 1
    assert seen["lost"]["total"] == 0, seen["lost"]
    # The scheduler and page faults as well: their programs load on this kernel, too.
    assert not [note for note in seen["notes"] if "cannot be watched" in note], seen["notes"]
    assert any(t["leader"] and t["run_seconds"] > 0 for t in seen["threads"]["threads"])
    answers = [json.loads(line) for line in guest.sure("cat /run/e/out").splitlines()]
    ran = sum(len(one["kernels"]) for one in answers if "kernels" in one)
    assert sum(op["calls"] + op["untimed"] for op in seen["ops"]) == ran > 0


def generate(guest: Machine) -> None:
    """A prompt of five tokens and twenty generated ones; waits for the engine's own answers."""
    before = int(guest.sure("wc -l < /run/e/out"))
    orders = ["run pos=0-4 out=4 us=100", *(f"run pos={5 + n} out=0 us=100" for n in range(DECODED))]
    guest.sure("cat > /run/e/in <<'X'\n" + "\n".join(orders) + "\nX")
    guest.until(f"test $(wc -l < /run/e/out) = {before + 1 + DECODED}", 300)


def test_is_scraped(guest: Machine) -> None:
    """Attached under the unit's sandbox, to a process of another user whose home nobody else may enter."""
    until(guest, f"{SCRAPE} | grep -E 'profinfer_target_state.*(ok|idle)'", 600)
    before = samples(guest)
    generate(guest)
    until(
        guest, f"{SCRAPE} | awk '/^profinfer_generation_tokens_total/ {{ n += $NF }} END {{ exit n < "
        f"{total(before, 'profinfer_generation_tokens_total') + DECODED + 1} }}'", 300,
    )  # fmt: skip
    after = samples(guest)
    assert total(after, "profinfer_prompt_tokens_total") - total(before, "profinfer_prompt_tokens_total") == 5
    assert total(after, "profinfer_lost_records_total") == 0
    assert f'version="{PREVIOUS}"' in next(k for k in after if k.startswith("profinfer_build_info"))


def test_the_sandbox_is_in_force(guest: Machine) -> None:
    """Asked of the kernel: another user, no new privileges, a filter, no capability but those named."""
    pid = guest.sure("systemctl show -P MainPID profinferd").strip()
    status = dict(line.split(":", 1) for line in guest.sure(f"cat /proc/{pid}/status").splitlines())
    assert status["Uid"].split()[0] != "0"
    assert status["NoNewPrivs"].strip() == "1"
    assert status["Seccomp"].strip() == "2"
    named = sum(1 << bit for bit in (2, 19, 38, 39, 40))
    admin = 1 << 21
    assert int(status["CapBnd"], 16) == named | admin
    # Debian wants CAP_SYS_ADMIN for every performance event (kernel.perf_event_paranoid is 3), and
    # Linux 6.1 for perf uprobes: it is kept.
    assert held(guest, pid) == {named | admin}
    score = guest.run("systemd-analyze security profinferd --no-pager | tail -1").out
    print(score.strip())
    assert float(re.search(r"(\d+\.\d+)", score)[1]) < 5  # type: ignore[index]


def held(guest: Machine, pid: str) -> set[int]:
    """The capability sets of all its threads."""
    lines = guest.sure(f"grep -h -E 'Cap(Inh|Prm|Eff|Amb)' /proc/{pid}/task/*/status").splitlines()
    return {int(line.split()[1], 16) for line in lines}


def test_what_is_not_needed_is_given_up(guest: Machine) -> None:
    """Where a trial of the daemon's shows that uprobes and events do without CAP_SYS_ADMIN: 6.6 and later,
    once the administrator lets CAP_PERFMON be enough for events. The engine is seen as before."""
    named = sum(1 << bit for bit in (2, 19, 38, 39, 40))
    guest.sure("sysctl -w kernel.perf_event_paranoid=2 && systemctl restart profinferd", 600)
    pid = guest.sure("systemctl show -P MainPID profinferd").strip()
    multi = release(guest) >= (6, 6)
    assert held(guest, pid) == ({named} if multi else {named | 1 << 21})
    until(guest, f"{SCRAPE} | grep -E 'profinfer_target_state.*(ok|idle)'", 600)
    generate(guest)
    until(guest, f"{SCRAPE} | grep -E '^profinfer_generation_tokens_total.* {DECODED + 1}(.0)?$'", 300)
    guest.sure("sysctl -w kernel.perf_event_paranoid=3 && systemctl restart profinferd", 600)


def test_is_reloaded_and_a_wrong_configuration_changes_nothing(guest: Machine) -> None:
    guest.sure("cp /etc/profinferd/profinferd.yaml /root/before.yaml")
    guest.sure("echo 'nonsense: 1' >> /etc/profinferd/profinferd.yaml")
    guest.run("systemctl reload profinferd")
    guest.until("journalctl -u profinferd -o cat --no-pager | grep -q nonsense", 120)
    assert active(guest)
    guest.sure("cp /root/before.yaml /etc/profinferd/profinferd.yaml && systemctl reload profinferd")


def test_is_started_again_after_it_was_killed(guest: Machine) -> None:
    pid = guest.sure("systemctl show -P MainPID profinferd").strip()
    guest.sure("systemctl kill -s KILL profinferd")
    until(guest, f"p=$(systemctl show -P MainPID profinferd); test $p != 0 && test $p != {pid} && "
                "systemctl is-active profinferd", 300)  # fmt: skip
    assert guest.sure("pgrep -u alice engine").strip(), "the engine did not notice"


def test_a_configuration_that_is_wrong_from_the_start_is_no_crash_loop(guest: Machine) -> None:
    """C33: exit code 2 is not tried again."""
    guest.sure("echo 'nonsense: 1' >> /etc/profinferd/profinferd.yaml")
    guest.run("systemctl restart profinferd")
    guest.until("test $(systemctl show -P ExecMainStatus profinferd) = 2", 120)
    assert guest.sure("systemctl show -P ActiveState profinferd").strip() == "failed"
    assert "nonsense" in journal(guest)
    guest.sure("cp /root/before.yaml /etc/profinferd/profinferd.yaml && systemctl reset-failed profinferd")
    guest.sure("systemctl start profinferd", 600)


def test_is_upgraded(guest: Machine) -> None:
    """The configuration that was changed stays; the new version runs."""
    guest.sure("echo '# mine' >> /etc/profinferd/profinferd.yaml")
    guest.sure("dpkg --force-confold -i /run/files/new.deb", 900)
    guest.until("systemctl is-active profinferd", 300)
    version = guest.sure("profinferd --version").split()[1]
    assert version != PREVIOUS
    guest.until(f"{SCRAPE} | grep -q 'profinfer_build_info{{version=\"{version}\"}}'", 300)
    assert guest.sure("tail -1 /etc/profinferd/profinferd.yaml").strip() == "# mine"
    assert guest.run("test -e /usr/lib/profinferd/profinferd-0.0.9.dist-info").code == 1


def test_is_removed_and_purged(guest: Machine) -> None:
    """Nothing is left: no file, no user, no unit, no probe."""
    guest.sure("dpkg -r profinferd", 300)
    assert not active(guest)
    assert guest.run("test -e /etc/profinferd/profinferd.yaml").code == 0, "configuration stays until purged"
    guest.sure("dpkg -P profinferd", 300)
    left = guest.run(
        "find / -xdev -name '*profinfer*' -not -path '/proc/*' -not -path '/run/files/*' "
        "-not -path '/var/log/*' -not -path '/root/*' 2>/dev/null"
    ).out
    assert left.strip() == ""
    assert guest.run("getent passwd profinferd").code == 2
    assert guest.run("systemctl cat profinferd").code != 0
    generate(guest)
