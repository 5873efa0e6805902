# SPDX-License-Identifier: Apache-2.0
"""Which profinferd this is."""

from __future__ import annotations

import functools


@functools.cache
def version() -> str:
    """The installed version; ``0+unknown`` when run from files that were never installed."""
    # Loads the modules of mail and archives, which nothing else here needs.
    import importlib.metadata

    try:
        return importlib.metadata.version("profinferd")
    except importlib.metadata.PackageNotFoundError:
        return "0+unknown"
