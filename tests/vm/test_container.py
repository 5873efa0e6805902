# SPDX-License-Identifier: Apache-2.0
"""The image of deploy/container, built and run as its file says, watching an engine in another container.

The base image is a Debian made here, for registries are not asked; podman works in a folder of its
own. The engine's file is in its container's mounts alone. What it did is known from its answers.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import shlex
import shutil
import subprocess
import tarfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.runtime.cases import Engine, engine, links, nothing_left
from tests.runtime.daemons import free_port

from . import kubernetes
from .image import CACHE, MIRROR
from .test_service import ARCHITECTURE, package

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "deploy/container/Containerfile"
IMAGE = "profinferd"
BASE = "docker.io/library/debian:bookworm-slim"
POD = "3f1c9a52-7d1e-4b8e-9a40-6f2d8c1b7e05"
DECODED = 10
PATIENCE = 180.0


def _missing() -> str | None:
    for tool in ("podman", "runc", "debootstrap"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed (make vm installs it)"
    return "containers of another architecture are not run" if ARCHITECTURE != "amd64" else None


pytestmark = pytest.mark.skipif(_missing() is not None, reason=str(_missing()))


class Podman:
    """podman with its storage in one folder."""

    def __init__(self, folder: Path) -> None:
        self._options = ["podman", "--root", str(folder / "root"), "--runroot", str(folder / "run"),
                         "--storage-driver", "vfs", "--runtime", str(shutil.which("runc")),
                         "--cgroup-manager", "cgroupfs"]  # fmt: skip
        self.volume = f"profinferd-{os.getpid()}"

    def command(self, *words: str) -> list[str]:
        return [*self._options, *words]

    def __call__(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(self.command(*words), capture_output=True, text=True)
        assert not check or done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done

    def inspect(self, name: str, what: str) -> str:
        return self("inspect", "--format", f"{{{{.{what}}}}}", name).stdout.strip()


def base() -> Path:
    """A minimal Debian 12 as an archive."""
    found = CACHE / "base-bookworm.tar"
    if not found.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        scratch = CACHE / f"base-{os.getpid()}"
        try:
            mirror = os.environ.get("DEBIAN_MIRROR", MIRROR)
            subprocess.run(["debootstrap", "--variant=minbase", "bookworm", str(scratch), mirror],
                           check=True, stdout=subprocess.DEVNULL)  # fmt: skip
            shutil.rmtree(scratch / "var/cache/apt/archives")
            with tarfile.open(f"{scratch}.tar", "w") as tar:
                tar.add(scratch, ".")
            os.rename(f"{scratch}.tar", found)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return found


def documented(word: str) -> list[str]:
    """The words of a command in the comments of the Containerfile, ``word`` and what follows it."""
    text = "\n".join(line.lstrip("# ") for line in FILE.read_text().splitlines() if line.startswith("#"))
    found = re.search(rf"^podman ({word} (?:.*\\\n)*.*)$", text, re.MULTILINE)
    assert found is not None
    return shlex.split(found[1].replace("\\\n", " "))


@pytest.fixture(scope="module")
def podman(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Podman]:
    """With the image, built as it is written there."""
    folder = tmp_path_factory.mktemp("podman")
    made = Podman(folder)
    dist = folder / "dist"
    dist.mkdir()
    package("bookworm", dist)
    try:
        made("import", str(base()), BASE)
        words = documented("build")
        assert words[-1] == "dist"
        made(
            *words[:-1],
            "--isolation=chroot",
            "--pull-never",
            "--layers=false",
            "--file",
            str(FILE),
            str(dist),
        )
        yield made
    finally:
        made("rm", "--all", "--force", "--time", "0", check=False)
        made("volume", "rm", "--all", check=False)
        subprocess.run(["umount", "-R", str(folder / "root")], capture_output=True)
        shutil.rmtree(folder, ignore_errors=True)
        forget_groups()


def forget_groups(root: Path = Path("/sys/fs/cgroup")) -> None:
    """Groups that podman leaves behind, those that are empty: of the pod, and its own."""
    for place in [root, *root.iterdir()]:
        for name in (f"kubepods/burstable/pod{POD}", "libpod_parent"):
            folders = [place / name, *(p for p in (place / name).rglob("*") if p.is_dir())]
            if name.startswith("kubepods"):
                folders = [place / "kubepods", place / "kubepods/burstable", *folders]
            for folder in reversed(folders):
                with contextlib.suppress(OSError):
                    folder.rmdir()


def limits() -> list[str]:
    """podman asks for more descriptors and processes than it may have where root is not all-powerful.
    Timers for health checks are systemd's, which need not be there."""
    options = ["--health-interval=disable"]
    for name, which in (("nofile", resource.RLIMIT_NOFILE), ("nproc", resource.RLIMIT_NPROC)):
        hard = resource.getrlimit(which)[1]
        few = 4096 if hard == resource.RLIM_INFINITY else min(4096, hard)
        options += ["--ulimit", f"{name}={few}:{few}"]
    return options


def as_documented(folder: Path, settings: dict[str, Any]) -> list[str]:
    """Options and words for ``podman run`` as the Containerfile has them, without --rm: its exit code is
    asked for."""
    words = documented("run")
    assert words[-1] == "profinferd" and "--read-only" in words and "--cap-drop=ALL" in words
    config = folder / "profinferd.yaml"
    config.write_text(json.dumps(settings))
    return [
        "--volume",
        f"{config}:/etc/profinferd/profinferd.yaml:ro",
        *(word for word in words[1:] if word != "--rm"),
    ]


def as_in_a_pod(folder: Path, settings: dict[str, Any]) -> list[str]:
    """The same with what the Kubernetes manifest gives the container, and its configuration."""
    config = yaml.safe_load(kubernetes.configuration())
    listen = settings["http"]["listen"].rpartition(":")[2]
    assert config["http"]["listen"] == f"0.0.0.0:{kubernetes.pod(folder / 'port', '').port}"
    config["http"]["listen"] = f"0.0.0.0:{listen}"
    pod = kubernetes.pod(folder, json.dumps({**settings, **config}))
    return [*pod.options, IMAGE, *pod.arguments]


WAYS = {"containerfile": as_documented, "kubernetes": as_in_a_pod}


@contextlib.contextmanager
def daemon(podman: Podman, folder: Path, port: int, program: str, way: str) -> Iterator[str]:
    """The container, run as it is written there; yields its name."""
    name = f"pfi-daemon-{way}-{os.getpid()}"
    settings: dict[str, Any] = {
        "http": {"listen": f"127.0.0.1:{port}"}, "targets": {"include": [{"program": program}]},
        "profile": {"ops": "off"},
    }  # fmt: skip
    podman("run", "--detach", "--name", name, *limits(), *WAYS[way](folder, settings))
    try:
        yield name
    finally:
        podman("rm", "--force", "--time", "20", name, check=False)


def _release() -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", os.uname().release)[:2])


def scrape(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
        text = answer.read().decode()
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


def wait_for(port: int, series: str, value: float, why: Sequence[str]) -> None:
    until, seen = time.monotonic() + PATIENCE, {}
    while True:
        with contextlib.suppress(OSError):
            seen = scrape(port)
            if seen.get(series) == value:
                return
        if time.monotonic() > until:
            said = subprocess.run(why, capture_output=True, text=True)
            raise AssertionError(f"{series} is {seen.get(series)}, not {value}: {said.stdout}{said.stderr}")
        time.sleep(0.2)


def test_check_says_that_it_can(podman: Podman) -> None:
    """With the privileges that are written there and no others."""
    done = podman("run", *limits(), *documented("run")[1:], "check", check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_check_says_that_a_pod_can(podman: Podman, tmp_path: Path) -> None:
    pod = kubernetes.pod(tmp_path, kubernetes.configuration())
    done = podman("run", "--rm", *limits(), *pod.options, IMAGE, "check", check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("way", WAYS)
def test_watches_an_engine_in_another_container(podman: Podman, tmp_path: Path, way: str) -> None:
    """Found, named by its container and pod, counted; the health check; nothing is left at the end."""
    port, program = free_port(), f"pfi-boxed-{os.getpid()}"
    before = links()
    boxed = f"pfi-engine-{way}-{os.getpid()}"
    with daemon(podman, tmp_path, port, program, way) as name:
        why = podman.command("logs", name)
        wait_for(port, 'profinfer_daemon_targets{state="watched"}', 0, why)
        assert podman("healthcheck", "run", name, check=False).returncode == 0
        for path in kubernetes.pod(tmp_path / "probes", "").probes:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=20) as answer:
                assert answer.status == 200
        status = Path(f"/proc/{podman.inspect(name, 'State.Pid')}/status").read_text()
        held = int(re.search(r"CapEff:\s*(\w+)", status)[1], 16)  # type: ignore[index]
        assert re.search(r"NoNewPrivs:\s*1\n", status)
        named = sum(1 << bit for bit in (2, 19, 38, 39, 40))
        assert held & ~(1 << 21) == named, "as --cap-add says"
        # Given up at the start, where uprobes and performance events do without.
        paranoid = int(Path("/proc/sys/kernel/perf_event_paranoid").read_text())
        assert (held == named) == (_release() >= (6, 6) and paranoid < 3)

        podman("create", "--interactive", "--name", boxed, *limits(), "--network=none",
               f"--cgroup-parent=/kubepods/burstable/pod{POD}", BASE, f"/opt/{program}")  # fmt: skip
        podman("cp", str(engine()), f"{boxed}:/opt/{program}")
        identity = podman.inspect(boxed, "Id")
        with Engine(podman.command("start", "--attach", "--interactive", boxed)) as stub:
            assert not Path(f"/opt/{program}").exists()
            label = f'target="{identity[:12]}"'
            wait_for(port, 'profinfer_daemon_targets{state="watched"}', 1, why)
            stub.order("run pos=0-4 out=4 us=20")
            for position in range(5, 5 + DECODED):
                stub.order(f"run pos={position} out=0 us=20")
            wait_for(port, f"profinfer_generation_tokens_total{{{label}}}", DECODED + 1, why)
            wait_for(port, f"profinfer_prompt_tokens_total{{{label}}}", 5, why)
            told = podman("exec", name, "profinferd", "status", "--format", "json").stdout
            (target,) = [t for t in json.loads(told)["targets"] if t["state"] == "watched"]
            assert (target["container"], target["pod"], target["unit"]) == (identity, POD, None)
            assert target["report"]["lost"]["total"] == 0
            podman("kill", boxed)
        podman("stop", "--time", "20", name)
        assert podman.inspect(name, "State.ExitCode") == "0"
    nothing_left(before)
