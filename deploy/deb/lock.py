# SPDX-License-Identifier: Apache-2.0
"""Writes ``requirements.lock``: the exact files of other projects that the Debian packages bundle.

Run it (``make lock``) when the dependencies in pyproject.toml change, or to take newer versions.
It asks pip what it would install for each Python and architecture that we package for, and keeps
names, versions and hashes. The build then takes these files and no others.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from pathlib import Path

HERE = Path(__file__).resolve().parent
LOCK = HERE / "requirements.lock"
PROJECT = HERE.parents[1] / "pyproject.toml"

PYTHONS = {"bookworm": "3.11", "trixie": "3.13"}
"""The Python of each Debian release that is packaged for."""
PLATFORMS = {
    "amd64": ("manylinux2014_x86_64", "manylinux_2_27_x86_64", "manylinux_2_28_x86_64"),
    "arm64": ("manylinux2014_aarch64", "manylinux_2_27_aarch64", "manylinux_2_28_aarch64"),
}
"""Wheels that run on these architectures' Debian (glibc 2.36 and later)."""
EXTRAS = ("otlp", "top", "web")
"""Optional parts that the package has."""


def wanted() -> list[str]:
    """The requirements of pyproject.toml that are bundled."""
    project = tomllib.loads(PROJECT.read_text())["project"]
    extras = project["optional-dependencies"]
    return sorted({*project["dependencies"], *(r for extra in EXTRAS for r in extras[extra])})


def target_options(suite: str, architecture: str) -> list[str]:
    """pip's options for wheels of another Python and machine."""
    platforms = [option for name in PLATFORMS[architecture] for option in ("--platform", name)]
    return [*platforms, "--python-version", PYTHONS[suite], "--implementation", "cp", "--only-binary=:all:"]


def main() -> int:
    versions: dict[str, str] = {}
    hashes: defaultdict[str, set[str]] = defaultdict(set)
    for suite in PYTHONS:
        for architecture in PLATFORMS:
            command = [
                sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet",
                "--disable-pip-version-check", "--report", "-", "--target", "unused",
                *target_options(suite, architecture), *wanted(),
            ]  # fmt: skip
            report = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
            for item in report["install"]:
                name = re.sub(r"[-_.]+", "-", item["metadata"]["name"].lower())
                version = item["metadata"]["version"]
                if versions.setdefault(name, version) != version:
                    print(f"{name}: {versions[name]} and {version} for different machines", file=sys.stderr)
                    return 1
                archive = item["download_info"]["archive_info"]
                hashes[name].add("sha256:" + archive["hashes"]["sha256"])
    lines = ["# Written by deploy/deb/lock.py (make lock)."]
    for name in sorted(versions):
        files = " \\\n    ".join(f"--hash={h}" for h in sorted(hashes[name]))
        lines.append(f"{name}=={versions[name]} \\\n    {files}")
    LOCK.write_text("\n".join(lines) + "\n")
    print(f"{len(versions)} projects in {LOCK.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
