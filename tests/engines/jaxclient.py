# SPDX-License-Identifier: Apache-2.0
"""Gets jax from the package index, once, below ``.cache``: a real client of PJRT plugins.

It is under the Apache licence, and nothing of it is in the repository.
"""

from __future__ import annotations

import sys
from pathlib import Path

from .fetch import CACHE, _locked, install, say

PACKAGE = "jax>=0.10,<0.11"
FOLDER = CACHE / "jax"


def fetch() -> Path:
    """The folder to import from. Raises RuntimeError when the index does not deliver."""
    with _locked():
        stamp = FOLDER / "stamp"
        if not stamp.exists() or stamp.read_text() != PACKAGE:
            say("fetching jax (150 MB), once")
            install(sys.executable, "--upgrade", "--target", str(FOLDER), PACKAGE)
            stamp.write_text(PACKAGE)
    return FOLDER
