# SPDX-License-Identifier: Apache-2.0
"""One browser and one report for all tests of the page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from profinferd.agent.model.trace import Trace
from profinferd.exporters import html

from .browser import DESKTOP, Browser, browser
from .support import trace_of_a_run


@pytest.fixture(scope="session")
def trace() -> Trace:
    return trace_of_a_run()


@pytest.fixture(scope="session")
def file(trace: Trace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(html.render(trace, "run.pfi", "profinferd test"), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as made:
        yield made


@pytest.fixture
def opened(tab: Browser, file: Path) -> Iterator[Browser]:
    tab.size(DESKTOP)
    tab.open(file)
    yield tab
    assert tab.errors() == []
