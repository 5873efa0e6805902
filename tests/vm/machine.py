# SPDX-License-Identifier: Apache-2.0
"""One emulated machine: booted from an image, given files, told what to run."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from .accel import CONSOLE, EMULATORS, accelerator
from .image import Image, host

BOOT_SECONDS = 600.0
"""Without KVM emulation is 10 to 30 times slower than the machine, and the machine may be busy."""
FOREIGN_PATIENCE = 3.0
"""All waiting is so many times longer where the processor is another one than this machine's."""
SLOW_SECONDS = 5.0
"""Orders that took longer are told when they are done: a suite takes a quarter of an hour and more."""
MEMORY_MB = 1024
AGENT = Path(__file__).resolve().parent / "agent.py"


@dataclass(frozen=True, slots=True)
class Done:
    """What a command in the guest did; ``seconds`` by the guest's clock."""

    code: int
    out: str
    err: str
    seconds: float

    def __str__(self) -> str:
        return f"exit code {self.code}\n{self.out}{self.err}"


class GuestError(AssertionError):
    """The guest did not do what was asked of it."""


class Machine:
    """A running guest; ``with`` ends it. ``files`` (name -> file here) lie in /run/files there."""

    def __init__(self, image: Image, files: Mapping[str, Path], log: Path | None = None) -> None:
        self._image = image
        self._scratch = tempfile.TemporaryDirectory(prefix="vm-")
        folder = Path(self._scratch.name)
        payload = folder / "payload.tar"
        with tarfile.open(payload, "w", format=tarfile.GNU_FORMAT) as tar:
            for name, path in {**files, "agent.py": AGENT}.items():
                tar.add(path, name)
        with payload.open("ab") as file:
            file.truncate((payload.stat().st_size + 511) // 512 * 512 + (1 << 16))
        self.console = log or folder / "console.log"
        channel = folder / "channel"
        cpu, self.accelerator = accelerator(image)
        self.patience = 1.0 if image.architecture == host() else FOREIGN_PATIENCE
        self._begun = time.monotonic()
        self._process = subprocess.Popen(
            [
                *EMULATORS[image.architecture], *cpu, "-smp", "1", "-m", str(MEMORY_MB),
                "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
                "-kernel", str(image.kernel), "-initrd", str(image.initrd),
                "-append", f"console={CONSOLE[image.architecture]} quiet panic=-1 systemd.log_color=0",
                "-drive", f"file={image.disk},format=raw,if=virtio,snapshot=on",
                "-drive", f"file={payload},format=raw,if=virtio,readonly=on",
                "-serial", f"file:{self.console}",
                "-device", "virtio-serial-pci",
                "-chardev", f"socket,id=agent,path={channel},server=on,wait=off",
                "-device", "virtserialport,chardev=agent,name=agent",
            ],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )  # fmt: skip
        self._unread = b""
        try:
            self._channel = self._connect(channel)
            self._line(BOOT_SECONDS * self.patience)
        except BaseException:
            self.close()
            raise
        self.boot_seconds = time.monotonic() - self._begun

    def _connect(self, path: Path) -> socket.socket:
        until = time.monotonic() + 30
        while True:
            try:
                found = socket.socket(socket.AF_UNIX)
                found.connect(str(path))
                return found
            except OSError:
                found.close()
                if self._process.poll() is not None or time.monotonic() > until:
                    raise GuestError(f"the emulator did not start: {self._words()}") from None
                time.sleep(0.05)

    def _words(self) -> str:
        if self._process.poll() is None or self._process.stderr is None:
            return ""
        return self._process.stderr.read().decode(errors="replace")[-400:]

    def _line(self, timeout: float) -> bytes:
        until = time.monotonic() + timeout
        while b"\n" not in self._unread:
            self._channel.settimeout(max(0.01, until - time.monotonic()))
            try:
                piece = self._channel.recv(1 << 20)
            except TimeoutError:
                raise GuestError(f"no answer in {timeout:.0f} s; console:\n{self.tail()}") from None
            if not piece:
                raise GuestError(f"the guest is gone {self._words()}; console:\n{self.tail()}")
            self._unread += piece
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def tail(self, characters: int = 3000) -> str:
        """The end of what the guest's console showed."""
        with contextlib.suppress(OSError):
            return self.console.read_text(errors="replace")[-characters:]
        return ""

    def run(self, command: str, timeout: float = 300.0) -> Done:
        """Run a shell command in the guest as root; ``timeout`` seconds of its clock, times the patience."""
        timeout *= self.patience
        self._channel.settimeout(60)
        self._channel.sendall((json.dumps({"run": command, "timeout": timeout}) + "\n").encode())
        found = json.loads(self._line(timeout * 2 + 60))
        if found["seconds"] > SLOW_SECONDS:
            self.say(f"{found['seconds']:4.0f} s  {' '.join(command.split())[:90]}")
        return Done(found["code"], found["out"], found["err"], found["seconds"])

    def say(self, text: str) -> None:
        """A line of progress, after how long this machine has been there; pytest -s shows it."""
        print(f"\n  [{time.monotonic() - self._begun:5.0f} s] {text}", end="", flush=True)

    def sure(self, command: str, timeout: float = 300.0) -> str:
        """The same; raises GuestError unless it succeeds. Returns its output."""
        done = self.run(command, timeout)
        if done.code:
            raise GuestError(f"{command!r} in the guest: {done}")
        return done.out

    def until(self, command: str, timeout: float = 120.0) -> str:
        """Run it again and again until it succeeds; returns the output."""
        end = time.monotonic() + timeout * self.patience
        while True:
            done = self.run(command, timeout)
            if done.code == 0:
                return done.out
            if time.monotonic() > end:
                raise GuestError(f"{command!r} still fails after {timeout * self.patience:.0f} s: {done}")
            time.sleep(0.5)

    def close(self) -> None:
        """End it; nothing that it wrote is kept."""
        if hasattr(self, "_channel"):
            self._channel.close()
        self._process.kill()
        self._process.wait()
        if self._process.stderr is not None:
            self._process.stderr.close()
        self._scratch.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def tools_missing(architecture: str = "amd64") -> str | None:
    """What is not installed here, of all that these tests need; None when nothing is missing."""
    for tool in (EMULATORS[architecture][0], "debootstrap", "mke2fs", "cpio"):
        if not any(os.access(os.path.join(d, tool), os.X_OK) for d in os.get_exec_path()):
            return f"{tool} is not installed (make vm installs it)"
    return None
