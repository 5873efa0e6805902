# SPDX-License-Identifier: Apache-2.0
"""Builds the page of the HTML report from ``page/`` with npm; nothing where it is up to date.

Used by ``make`` and by ``setup.py``, which loads this file before anything is installed: it
imports nothing of ours. Only building needs Node.js; a wheel holds the built page.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
PAGE = HERE / "page"
BUILT = HERE / "page.html"
_ADVICE = "apt install npm, or use a wheel"


class BuildError(Exception):
    """The page cannot be built; one line, except for what npm said."""


def sources() -> list[Path]:
    """What the page is made from."""
    names = ("package.json", "package-lock.json", "build.mjs")
    return [PAGE / name for name in names] + sorted(p for p in (PAGE / "src").rglob("*") if p.is_file())


def up_to_date() -> bool:
    """Whether the built page is there and younger than its sources."""
    if not BUILT.exists():
        return False
    built = BUILT.stat().st_mtime_ns
    return all(path.stat().st_mtime_ns <= built for path in sources())


def build() -> Path:
    """The built page. Raises BuildError without npm, unless a page is there already."""
    if up_to_date():
        return BUILT
    npm, node = shutil.which("npm"), shutil.which("node")
    if npm is None or node is None:
        if BUILT.exists():
            return BUILT
        raise BuildError(f"npm is needed to build the page of the HTML report: {_ADVICE}")
    installed = PAGE / "node_modules" / ".package-lock.json"
    lock = PAGE / "package-lock.json"
    if not installed.exists() or installed.stat().st_mtime_ns < lock.stat().st_mtime_ns:
        # No package's own scripts are run.
        _run([npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"])
        os.utime(installed)
    _run([node, "build.mjs"])
    return BUILT


def _run(command: list[str]) -> None:
    done = subprocess.run(command, cwd=PAGE, capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr or done.stdout).strip()
        raise BuildError(f"{Path(command[0]).name} {command[1]} failed in {PAGE}:\n{said[-4000:]}")


if __name__ == "__main__":
    try:
        build()
    except BuildError as error:
        sys.exit(str(error))
