# SPDX-License-Identifier: Apache-2.0
"""Measuring what probes cost, in a process of its own: it takes seconds and memory."""

from __future__ import annotations

import subprocess
import sys

TIMEOUT = 300.0
"""It takes 5 s; emulated on a busy host, two minutes were not enough."""


def calibrate_here(method: str, state: str, btf_path: str | None) -> str | None:
    """Run ``profinferd calibrate``; None when the figures are kept in ``state``, else why not."""
    # The child finds the packages where this process did, installed or not (the Debian package's
    # launcher adds its own folder).
    code = (
        "import sys; sys.path[:] = sys.argv[1].split('\\n'); del sys.argv[1]; "
        "from profinferd.agent.cli import main; sys.exit(main())"
    )
    command = [sys.executable, "-I", "-c", code, "\n".join(p for p in sys.path if p)]
    command += [
        "calibrate",
        "-q",
        "--attach-method",
        method,
        "--state",
        state,
        *(["--btf-path", btf_path] if btf_path else []),
    ]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            timeout=TIMEOUT, cwd="/", check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)[:300]
    if done.returncode:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()
        return said[-1][:300] if said else f"exit status {done.returncode}"
    return None
