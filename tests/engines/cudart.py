# SPDX-License-Identifier: Apache-2.0
"""Gets NVIDIA's real CUDA runtime library from the package index, once, below ``.cache``.

It is under NVIDIA's own licence: fetched for tests, never distributed by us.
"""

from __future__ import annotations

import sys
from pathlib import Path

from .fetch import CACHE, _locked, install, say

PACKAGE = "nvidia-cuda-runtime-cu12>=12.4,<13"
FOLDER = CACHE / "cudart"


def fetch() -> Path:
    """The path of ``libcudart.so.12``. Raises RuntimeError when the index does not deliver."""
    with _locked():
        stamp = FOLDER / "stamp"
        if not stamp.exists() or stamp.read_text() != PACKAGE:
            say("fetching NVIDIA's CUDA runtime (4 MB), once")
            install(sys.executable, "--no-deps", "--upgrade", "--target", str(FOLDER), PACKAGE)
            stamp.write_text(PACKAGE)
    return FOLDER / "nvidia" / "cuda_runtime" / "lib" / "libcudart.so.12"
