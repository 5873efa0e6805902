# SPDX-License-Identifier: Apache-2.0
"""BLAKE2b by itself: ``hashlib`` loads all of OpenSSL besides, 3.4 MiB of a small daemon."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hashlib import blake2b
else:
    try:
        from _blake2 import blake2b
    except ImportError:  # a Python that keeps it elsewhere
        from hashlib import blake2b

__all__ = ["blake2b"]
