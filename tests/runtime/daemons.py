# SPDX-License-Identifier: Apache-2.0
"""The real daemon, run as a service manager runs it, and what it says."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from profinferd.agent.daemon.client import ControlClient
from profinferd.agent.errors import ProfinferError

from .cases import wait_for

READY_SECONDS = 240.0
DEADLINE = 240.0
"""Generous: a busy machine takes its time, and only a failure waits so long."""


def free_port() -> int:
    """A port that nobody listens on at this moment, and that the kernel gives to nobody who wants any:
    for programs that cannot be told to take one and say which."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_768)
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port


class Daemon:
    """``profinferd daemon`` until the block ends. ``settings``: keys of the configuration file.

    Only programs that ``only`` matches are watched, for other engines may run on this machine;
    None: all. ``under``: a command that starts it.
    """

    def __init__(
        self,
        folder: Path,
        only: str | None,
        under: Sequence[str] = (),
        environment: dict[str, str] | None = None,
        listen: str | None = "",
        **settings: Any,
    ) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.port = 0
        """Where it answers over HTTP, once it is ready: the kernel chooses, so that nobody else has it."""
        self.socket = str(folder / "control.sock")
        self.config: dict[str, Any] = {
            "http": {"listen": "127.0.0.1:0" if listen == "" else listen},
            "control": {"socket": self.socket},
            **settings,
        }
        if only is not None:
            self.config.setdefault("targets", {})["include"] = [{"program": only}]
        self.path = folder / "profinferd.yaml"
        self.log_path = folder / "log"
        self._under, self._environment = list(under), environment or {}
        self.process: subprocess.Popen[bytes]
        self._manager: socket.socket

    def start(self) -> Self:
        """Start it; returns when it has said that it is ready."""
        self.write(self.config)
        self._manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        address = f"{tempfile.mkdtemp(dir=self.folder)}/notify"
        self._manager.bind(address)
        begun = time.monotonic()
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [*self._under, sys.executable, "-m", "profinferd.agent", "daemon", "-c", str(self.path)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "NOTIFY_SOCKET": address, **self._environment},
            )
        self.told(b"READY=1")
        for name in os.listdir(f"/proc/{self.pid}/task"):  # it gives way to others, and we wait for it
            with contextlib.suppress(PermissionError, ProcessLookupError):
                os.setpriority(os.PRIO_PROCESS, int(name), 0)
        self.ready_seconds = time.monotonic() - begun
        if found := re.findall(r"metrics and page are served url=\S*:(\d+)$", self.log(), re.MULTILINE):
            self.port = int(found[-1])
        return self

    def told(self, what: bytes) -> bytes:
        """Waits until the service manager is told this."""
        until = time.monotonic() + READY_SECONDS
        while time.monotonic() < until:
            self._manager.settimeout(0.2)
            with contextlib.suppress(TimeoutError):
                said = self._manager.recv(4096)
                if what in said:
                    return said
            assert self.process.poll() is None, f"it ended: {self.log()}"
        raise AssertionError(f"{what!r} was not said: {self.log()}")

    def write(self, config: dict[str, Any]) -> None:
        """The configuration file; JSON is YAML."""
        self.path.write_text(json.dumps(config))

    @property
    def pid(self) -> int:
        return self.process.pid

    def log(self) -> str:
        return self.log_path.read_text()

    def client(self) -> ControlClient:
        return ControlClient(self.socket, timeout=60)

    def reload(self) -> dict[str, Any]:
        """Have the configuration read again. Raises ProfinferError when it is wrong. Who asks is given an
        answer within seconds, also by a daemon that does not come to it: then it is asked again."""
        until = time.monotonic() + DEADLINE
        while True:
            try:
                with self.client() as client:
                    return client.reload()
            except ProfinferError as error:
                if "not done in time" not in error.what or time.monotonic() > until:
                    raise

    def health(self) -> dict[str, Any]:
        with self.client() as client:
            return client.health()

    def targets(self) -> list[dict[str, Any]]:
        with self.client() as client:
            found = client.snapshot()["targets"]
            assert isinstance(found, list)
            return found

    def own(self, name: str) -> list[dict[str, Any]]:
        """Targets whose names begin so: other engines may run on this machine, known as excluded."""
        return [t for t in self.targets() if t["target"].startswith(name)]

    def target(self, pid: int) -> dict[str, Any] | None:
        return next((t for t in self.targets() if t["pid"] == pid), None)

    def wait_for(
        self, pid: int, ready: Callable[[dict[str, Any]], bool] = lambda t: t["state"] == "watched"
    ) -> dict[str, Any]:
        """The process's entry, as soon as ``ready`` says so of it."""
        until = time.monotonic() + DEADLINE
        while time.monotonic() < until:
            found = self.target(pid)
            if found is not None and ready(found):
                return found
            time.sleep(0.02)
        raise AssertionError(f"not seen: {pid} {self.targets()} {self.log()}")

    def wait_for_tokens(self, pid: int, prefill: int, decode: int) -> dict[str, Any]:
        """The entry when so many tokens were counted (more fails)."""
        seen = [-1, -1]

        def there(target: dict[str, Any]) -> bool:
            tokens = (target["report"] or {}).get("tokens") or {}
            seen[:] = [tokens.get("prefill") or 0, tokens.get("decode") or 0]
            assert seen[0] <= prefill and seen[1] <= decode, f"{seen} of {prefill}, {decode}"
            return seen == [prefill, decode]

        try:
            return self.wait_for(pid, there)
        except AssertionError as error:
            raise AssertionError(f"{seen} of {prefill}, {decode}: {error}") from error

    def get(self, path: str, accept: str = "") -> str:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", headers={"Accept": accept} if accept else {}
        )
        until = time.monotonic() + DEADLINE
        while True:
            try:
                with urllib.request.urlopen(request, timeout=60) as answer:
                    text: str = answer.read().decode()
                    return text
            except (OSError, http.client.HTTPException) as error:
                # A connection ends that takes longer than some seconds, whoever was held up.
                refused = isinstance(error, urllib.error.HTTPError) or self.process.poll() is not None
                if refused or time.monotonic() > until:
                    raise

    def samples(self) -> dict[str, float]:
        """``name{labels}`` -> value, of the text format."""
        found = {}
        for line in self.get("/metrics").splitlines():
            if line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                found[name] = float(value)
        return found

    def sample(self, name: str, **labels: str) -> float:
        """The sum of the samples of a name that have these labels."""
        total, seen = 0.0, False
        for key, value in self.samples().items():
            if key.partition("{")[0] == name and all(f'{k}="{v}"' in key for k, v in labels.items()):
                total, seen = total + value, True
        return total if seen else -1.0

    def wait_for_sample(self, value: float, name: str, **labels: str) -> None:
        """Until the sample has this value: an answer may be half a second old."""
        until = time.monotonic() + DEADLINE
        while (seen := self.sample(name, **labels)) != value:
            assert time.monotonic() < until, f"{name} {labels} is {seen}, not {value}"
            time.sleep(0.1)

    def scanned(self) -> None:
        """Waits until every process that was there at the start has been looked at."""
        wait_for(lambda: self.health()["scans_total"] >= 1, "the first scan", 600)

    def stop(self) -> int:
        """SIGTERM; returns the exit status."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            return self.process.wait(60)
        finally:
            self.kill()

    def kill(self) -> None:
        """SIGKILL, if it still runs."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._manager.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def programs(self) -> set[int]:
        """Ids of the BPF programs that it holds."""
        found = set()
        for path in Path(f"/proc/{self.pid}/fdinfo").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                found |= {int(n) for n in re.findall(r"^prog_id:\s*(\d+)", path.read_text(), re.MULTILINE)}
        return found

    def status(self, field: str) -> int:
        """A number of ``/proc/PID/status``."""
        found = re.search(rf"^{field}:\s*(\d+)", Path(f"/proc/{self.pid}/status").read_text(), re.MULTILINE)
        assert found is not None
        return int(found[1])
