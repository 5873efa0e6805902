# SPDX-License-Identifier: Apache-2.0
"""Which profinferd this is."""

from __future__ import annotations

import importlib.metadata


def version() -> str:
    """The installed version; ``0+unknown`` when run from files that were never installed."""
    try:
        return importlib.metadata.version("profinferd")
    except importlib.metadata.PackageNotFoundError:
        return "0+unknown"
