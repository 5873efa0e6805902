# SPDX-License-Identifier: Apache-2.0
"""What profinferd itself depends on, for one version of Python: lines for ``pip download -r``."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement


def main() -> None:
    """Markers are decided here: pip would decide them for the Python that runs it."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    for line in project["dependencies"]:
        wanted = Requirement(line)
        if wanted.marker is None or wanted.marker.evaluate({"python_version": sys.argv[1]}):
            print(f"{wanted.name}{wanted.specifier}")


if __name__ == "__main__":
    main()
