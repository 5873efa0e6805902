# SPDX-License-Identifier: Apache-2.0
"""Gets a real PJRT plugin (XLA on the CPU) and a client for it from the package index, once.

Everything goes below ``.cache``; nothing of it is in the repository. Both are under the
Apache licence.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from .fetch import CACHE, _locked, base_python, install, say

PACKAGES = ("pypjrt>=0.1,<0.2", "lammps-jax-pjrt-cpu>=0.11,<0.12")
FOLDER = CACHE / "pjrt"


@dataclass(frozen=True)
class Pjrt:
    """Where they are; ``python`` runs the client, with ``site`` on its path."""

    python: Path
    site: Path

    @property
    def plugin(self) -> Path:
        """The stripped plugin, which exports GetPjrtApi only."""
        return self.site / "lammps_jax_pjrt_cpu" / "pjrt_c_api_cpu_plugin.so"


def fetch() -> Pjrt:
    """Both, fetched when they are not there yet, else at once.

    Raises RuntimeError when the index does not deliver.
    """
    with _locked():
        stamp = FOLDER / "stamp"
        if not stamp.exists() or stamp.read_text() != " ".join(PACKAGES):
            say("fetching a PJRT plugin and a client for it (60 MB), once")
            install(sys.executable, "--no-deps", "--upgrade", "--target", str(FOLDER), *PACKAGES)
            stamp.write_text(" ".join(PACKAGES))
    return Pjrt(Path(base_python()), FOLDER)
