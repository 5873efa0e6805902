# SPDX-License-Identifier: Apache-2.0
"""The HTML report on a phone, in the dark, with hostile names, damaged, and with nothing in it."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from selenium.webdriver.common.keys import Keys

from profinferd.exporters import html
from tests.unit import traces
from tests.unit.graphs import decoder
from tests.unit.streams import Step, decode

from .browser import DESKTOP, PHONE, Browser
from .support import CONTRAST, click, press, text


@pytest.mark.parametrize("dark", [False, True])
def test_a_phone(tab: Browser, file: Path, dark: bool) -> None:
    """At 390 px nothing is wider than the screen but what scrolls by itself."""
    tab.size(PHONE, dark=dark)
    tab.open(file)
    assert tab.js("document.documentElement.scrollWidth") <= PHONE[0]
    assert tab.js("document.documentElement.dataset.theme") == ("dark" if dark else "light")
    too_small = tab.js(
        "[...document.querySelectorAll('main *')].filter(e => e.childElementCount === 0"
        " && e.textContent.trim() && parseFloat(getComputedStyle(e).fontSize) < 11).length"
    )
    assert too_small == 0
    assert tab.errors() == []


def test_the_colours_can_be_chosen(opened: Browser) -> None:
    seen = []
    for _ in range(3):
        click(opened, "#theme")
        seen.append(opened.js("document.documentElement.dataset.theme"))
    assert seen == ["light", "dark", "light"]


def test_tables_are_as_high_as_their_rows(tab: Browser, tmp_path: Path) -> None:
    """A table scrolls sideways at most; what is left out of a long one has a button."""
    b = decoder(1, layers=30)
    made = traces.of_steps([[Step([0], [0], graph=b, hash=5)], [decode(1, graph=b, hash=5)]])
    path = tmp_path / "layers.html"
    path.write_text(html.render(made, "layers.pfi", "test"), encoding="utf-8")
    layers = "document.querySelectorAll('#memory-layers tbody tr').length"
    for size in (DESKTOP, PHONE):
        tab.size(size)
        tab.open(path)
        assert tab.js(layers) < 30
        tab.js("[...document.querySelectorAll('#memory .more')].forEach(b => b.click())")
        tab.until(f"{layers} === 31")  # and what is in no layer
        boxes = tab.js("[...document.querySelectorAll('.scroll')].map(e => [e.scrollHeight, e.clientHeight])")
        assert boxes and all(whole <= shown for whole, shown in boxes)
    assert tab.errors() == []


def test_titles_stand_over_their_numbers(opened: Browser) -> None:
    edges = opened.js("""[...document.querySelectorAll('th.num')].flatMap(th => {
      const right = e => { const r = document.createRange(); r.selectNodeContents(e);
                           return r.getBoundingClientRect().right; };
      const words = th.querySelector('button')?.firstChild;
      const cell = th.closest('table').querySelector(`tbody tr td:nth-child(${th.cellIndex + 1})`);
      return words && cell && cell.textContent ? [[th.textContent, right(words), right(cell)]] : [];
    })""")
    assert len(edges) > 10
    assert [edge for edge in edges if abs(edge[1] - edge[2]) > 2] == []


@pytest.mark.parametrize("dark", [False, True])
def test_text_can_be_read(tab: Browser, file: Path, dark: bool) -> None:
    """Contrast of text on what lies behind it: 4.5 to 1 as WCAG asks, 3 to 1 where it is big."""
    tab.size(DESKTOP, dark=dark)
    tab.open(file)
    poor = tab.js(CONTRAST)
    assert poor == [], poor[:5]


def test_hostile_names_run_nothing(tab: Browser, tmp_path: Path) -> None:
    hostile = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
    b = decoder(1, layers=1)
    for number, node in enumerate(b.nodes):
        node.name = hostile[:50] + str(number)
    made = traces.of_steps([[Step([0], [0], graph=b, hash=5)], [decode(1, graph=b, hash=5)]])
    target = dataclasses.replace(made.snapshot.target, model=hostile, exe="/x/" + hostile)
    made.snapshot = dataclasses.replace(made.snapshot, target=target, notes=(hostile,))
    path = tmp_path / "hostile.html"
    path.write_text(html.render(made, hostile, "test"), encoding="utf-8")
    tab.size(DESKTOP)
    tab.open(path)
    assert tab.errors() == []
    assert "</script><script>" in tab.js("document.querySelector('h1').textContent")
    for group in tab.js("[...document.querySelectorAll('[data-group]')].map(g => g.dataset.group)"):
        press(tab, f"[data-group='{group}']", Keys.ENTER)
    tab.js("document.querySelector('[data-node]').focus()")
    tab.frames()
    assert tab.js("document.title") != "owned"
    assert tab.js("document.images.length") == 0
    assert tab.js("document.scripts.length") == 3
    assert tab.errors() == []


def test_a_damaged_page_says_so(tab: Browser, file: Path, tmp_path: Path) -> None:
    broken = re.sub(r'(id="recording">).*?(</script>)', r"\1{broken\2", file.read_text(), count=1, flags=re.S)
    path = tmp_path / "broken.html"
    path.write_text(broken)
    tab.open(path)
    assert "holds no recording that it can read" in text(tab, "#app")
    assert tab.errors() == []


def test_an_empty_recording_opens(tab: Browser, tmp_path: Path) -> None:
    path = tmp_path / "empty.html"
    path.write_text(html.render(traces.of_steps([]), "empty.pfi", "test"))
    tab.size(DESKTOP)
    tab.open(path)
    assert "No call was recorded" in text(tab, "#tokens")
    assert tab.errors() == []
