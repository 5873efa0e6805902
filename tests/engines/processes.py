# SPDX-License-Identifier: Apache-2.0
"""Child processes that cannot outlive the tests that started them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path


def with_parent(command: list[str]) -> list[str]:
    """The command under ``setpriv --pdeathsig``: the kernel kills it when we are killed.

    ``setpriv`` executes the command in its own place, so the pid is the command's.
    """
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", "KILL", *command] if setpriv else command


def end(process: subprocess.Popen[bytes], polite_seconds: float = 30.0) -> int:
    """Ends this very process: its input is closed, then SIGTERM, then SIGKILL."""
    if process.stdin is not None and not process.stdin.closed:
        process.stdin.close()
    if process.poll() is None:
        process.terminate()
    try:
        return process.wait(polite_seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait(60)


def executable_of(pid: int) -> Path:
    """What this pid runs now."""
    return Path(f"/proc/{pid}/exe").resolve()
