# SPDX-License-Identifier: Apache-2.0
"""Addresses of a running process into function and file names, with BCC's symbol cache.

BCC is heavy and reads files that others made: it runs in a short-lived process of its own
(design D14). Without it, files alone are told.
"""

from __future__ import annotations

import bisect
import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ..model.cpuparts import Frame

BCC = "/usr/lib/python3/dist-packages/bcc"
PYTHON = "/usr/bin/python3"
DEADLINE = 60.0
MAX_ANSWER = 32 << 20
_CHILD = Path(__file__).with_name("symbol_child.py")
INSTALL = "apt install python3-bpfcc"


class Mappings:
    """Executable mappings of a process, as they were when looked at."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._found: list[tuple[int, int, str]] = []

    def look(self, pid: int) -> None:
        """Read them anew; what is known stays when the process is gone."""
        try:
            with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as file:
                found = self._read(file.read(16 << 20))
        except OSError:
            return
        if found:
            self._found = sorted(found)
            self._starts = [start for start, _, _ in self._found]

    @staticmethod
    def _read(text: str) -> list[tuple[int, int, str]]:
        found = []
        for line in text.splitlines():
            fields = line.split(maxsplit=5)
            if len(fields) >= 5 and "x" in fields[1]:
                start, _, end = fields[0].partition("-")
                path = fields[5] if len(fields) > 5 else ""
                found.append((int(start, 16), int(end, 16), os.path.basename(path) or "[anonymous]"))
        return found

    def file(self, address: int) -> str | None:
        """The name of the file that is mapped there."""
        at = bisect.bisect_right(self._starts, address) - 1
        if at < 0:
            return None
        _, end, name = self._found[at]
        return name if address < end else None


def symbolize(
    pid: int, addresses: Sequence[int], mappings: Mappings, *, bcc: str = BCC
) -> tuple[dict[int, Frame], str | None]:
    """Frames by address, and why names are missing (None: they were looked up)."""
    frames = {address: Frame(None, mappings.file(address)) for address in addresses}
    # Only code: what a frame pointer that is none points to would be anything.
    wanted = [address for address, frame in frames.items() if frame.file is not None]
    if not wanted:
        return frames, None
    if not os.path.isdir(bcc):
        return frames, f"functions have no names here: BCC is not installed ({INSTALL})"
    try:
        done = subprocess.run(
            [PYTHON, "-I", "-S", str(_CHILD), bcc, str(pid)],
            input=json.dumps(wanted).encode(), capture_output=True, timeout=DEADLINE, check=False,
            env={"PATH": "/usr/bin:/bin"}, cwd="/",
        )  # fmt: skip
        names = msgspec.json.decode(done.stdout[:MAX_ANSWER], type=list[tuple[str | None, str | None]])
    except (OSError, subprocess.TimeoutExpired) as error:
        return frames, f"functions have no names: BCC's helper failed ({type(error).__name__})"
    except msgspec.DecodeError:
        last = done.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2][:120]
        return frames, f"functions have no names: BCC's helper failed ({last or done.returncode})"
    for address, (name, _) in zip(wanted, names, strict=False):
        frames[address] = Frame(_printable(name), frames[address].file)
    return frames, None


def _printable(name: str | None) -> str | None:
    return None if name is None else "".join(c for c in name[:500] if c.isprintable()) or None
