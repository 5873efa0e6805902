# SPDX-License-Identifier: Apache-2.0
"""The daemon's live page in Chromium: what it shows, hostile names, both colour schemes, a phone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver.support.ui import WebDriverWait

from profinferd.exporters import httpd
from profinferd.exporters.httpd import HttpServer, Request, Response
from profinferd.exporters.livepage import SECURITY_HEADERS, page, summary

from .browser import DESKTOP, PATIENCE, PHONE, Browser, browser

MODEL = "gemma-3-270m-Q4_K_M.gguf"
EVIL = '<img src=x onerror="document.title=`owned`"><script>document.title="owned"</script>'


def target(name: str, pid: int, **more: Any) -> dict[str, Any]:
    """As the control socket has it (docs/control.md)."""
    ops = [
        ("MUL_MAT", "q4_K", "ffn_up", 3.2), ("MUL_MAT", "q4_K", "ffn_down", 2.9),
        ("MUL_MAT", "q6_K", "output", 2.1), ("MUL_MAT", "q4_K", "attn_q", 1.4),
        ("FLASH_ATTN_EXT", "f16", "kv_k", 0.9), ("RMS_NORM", "f32", "attn_norm", 0.3),
        ("ROPE", "f32", "", 0.2), ("GLU", "f32", "", 0.2), ("ADD", "f32", "", 0.1), ("CPY", "f16", "", 0.05),
    ]  # fmt: skip
    report = {
        "target": {"pid": pid, "exe": "/usr/bin/llama-server", "engine": "ggml", "model": MODEL},
        "tokens": {"prefill": 1204, "decode": 5120, "output_rows": 5133},
        "latency_seconds": {
            "time_to_first_token": {"count": 12, "mean": 0.214, "p50": 0.2, "p90": 0.3, "p99": 0.412},
            "inter_token": {"count": 5120, "mean": 0.0182, "p50": 0.018, "p90": 0.02, "p99": 0.0313},
        },
        "ops": [
            {"op": o, "dtype": d, "role": r, "phase": "decode", "seconds": s} for o, d, r, s in ops
        ],
        "overhead": {"budget_ratio": 0.01, "estimated_ratio": 0.0042, "measured_ratio": 0.001},
        "lost": {"total": 0},
        "verdicts": [
            {"rule": "memory_bound", "evidence": ["10.1 GB/s of 11.9 GB/s"], "try": "Try a smaller type"}
        ],
        "notes": [],
    }  # fmt: skip
    return {
        "target": name, "pid": pid, "state": "watched", "reason": "", "unit": None, "container": None,
        "tokens_per_second": 54.7, "report": report, **more,
    }  # fmt: skip


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, list[dict[str, Any]], list[str]]]:
    """(address, targets that are shown, paths that were asked for)."""
    targets: list[dict[str, Any]] = []
    asked: list[str] = []

    def route(request: Request) -> Response:
        asked.append(request.path)
        if request.path == "/":
            return Response(HTTPStatus.OK, "text/html; charset=utf-8", page(), SECURITY_HEADERS)
        now = list(targets)  # a test may change them meanwhile
        health = {
            "state": "ok", "reason": "", "watched": len(now), "attach_method": "session",
            "found_total": 3, "ended_total": 1,
        }  # fmt: skip
        data = {"version": "0.1.0", "health": health, "targets": summary(now)}
        return Response(HTTPStatus.OK, "application/json", json.dumps(data).encode(), SECURITY_HEADERS)

    monkeypatch.setattr(httpd, "DEADLINE_SECONDS", 60.0)  # a browser may have to wait for a core
    server = HttpServer("127.0.0.1", 0, route, print)
    server.start()
    yield server.url, targets, asked
    server.close()


def text(tab: Browser) -> str:
    """What a person reads."""
    return str(tab.js("document.body.innerText"))


def test_what_it_shows(served: tuple[str, list[dict[str, Any]], list[str]], tmp_path: Path) -> None:
    """Figures, hostile names as text, nothing from elsewhere, both schemes, no sideways scrolling."""
    address, targets, asked = served
    with browser(tmp_path / "profile") as tab:
        tab.size(DESKTOP)
        tab.driver.get(address)
        tab.until("document.body.innerText.includes('No engine runs')")
        targets += [
            target("llama.service", 4711, unit="llama.service"),
            target(EVIL, 4712, tokens_per_second=None),
            target(
                "old-build", 4713, state="unprofiled", reason=f"no symbols: build-id 1234 {EVIL}", report=None
            ),
        ]
        tab.until("document.querySelectorAll('article').length === 3")
        seen = text(tab)
        for words in (
            "54.7", "214 ms", "412 ms", "18.2 ms", "31.3 ms", "5,133", "1,204", "MUL_MAT q4_K ffn_up",
            "28.2 %", "0.42 % of a budget of 1.00 %", "Memory bound", "idle", "no symbols", "3 targets",
        ):  # fmt: skip
            assert words in seen, words
        assert EVIL in seen and tab.js("document.title") == "profinferd"
        assert tab.js("document.querySelectorAll('article img, article script').length") == 0
        for size, dark in ((DESKTOP, False), (DESKTOP, True), (PHONE, False)):
            tab.size(size, dark=dark)
            name = f"{'dark' if dark else 'light'}-{size[0]}"
            tab.picture(tmp_path / f"{name}.png")
            assert tab.js("document.documentElement.scrollWidth") <= size[0], name
        back = tab.js("getComputedStyle(document.body).backgroundColor")
        tab.size(DESKTOP, dark=True)
        assert tab.js("getComputedStyle(document.body).backgroundColor") != back
        targets.clear()
        tab.until("document.querySelectorAll('article').length === 0")
        assert not tab.errors()
        assert set(asked) <= {"/", "/api/live"}, asked


def test_an_injected_script_does_not_run(
    served: tuple[str, list[dict[str, Any]], list[str]], tmp_path: Path
) -> None:
    """The policy names this very script; another one, wherever it comes from, is refused."""
    with browser(tmp_path / "profile") as tab:
        tab.driver.get(served[0])
        tab.js(
            "(() => { const s = document.createElement('script'); s.textContent = 'window.owned = 1';"
            " document.body.append(s); return true; })()"
        )
        assert not tab.js("window.owned")
        # The console hears of it when it likes.
        WebDriverWait(tab.driver, PATIENCE).until(
            lambda _: any("Content Security Policy" in line for line in tab.errors())
        )
        assert not tab.js("window.owned")


def test_who_is_watched_is_shown_however_many_are_not() -> None:
    """Excluded processes that were found first take no places from those that are watched."""
    many = [target(f"no{n}", n, state="excluded", report=None) for n in range(100)]
    shown = summary([*many, target("bare", 200, state="unprofiled", report=None), target("engine", 300)])
    assert [one["target"] for one in shown[:3]] == ["engine", "bare", "no0"] and len(shown) == 64


def test_advice_is_a_sentence() -> None:
    one = target("engine", 1)
    one["report"]["verdicts"] = [
        {"rule": "preempted", "evidence": ["python took the core."], "try": "move it to other cores"},
        {"rule": "x", "evidence": [], "try": ""},
    ]
    (shown,) = summary([one])
    assert shown["verdicts"] == ["Preempted: python took the core. Move it to other cores", "X"]


def of_programs(name: str, pid: int) -> dict[str, Any]:
    """An engine that has compiled programs and calls, and no tokens."""
    report = {
        "target": {"pid": pid, "exe": "/usr/bin/python3", "engine": "pjrt", "model": None},
        "tokens": {"prefill": None, "decode": None, "output_rows": None},
        "programs": [
            {"name": name, "executions": runs, "completions": done, "completion_seconds": until_done,
             "dispatch_seconds": handed_over}
            for name, runs, done, until_done, handed_over in (
                ("step", 40, 40, 0.5, 0.1), ("fill", 10, 0, None, 0.02), (EVIL, 2, 1, 0.75, 0.0),
                (None, 0, 0, None, 0.0),
            )
        ],
        "engine_calls": [{"call": "execute", "count": 52, "seconds": 0.1, "state": "outermost"}],
        "overhead": {"budget_ratio": 0.01, "estimated_ratio": None},
    }  # fmt: skip
    return target(name, pid, tokens_per_second=None, report=report)


def test_what_an_engine_without_tokens_runs() -> None:
    """Its programs by the time that they take, with the mean of those that were seen to be done; without
    programs its calls, added up by name."""
    one = of_programs("jax", 1)
    (shown,) = summary([one])
    assert shown["runs"] == [
        {"name": EVIL[:80], "count": 2.0, "mean": 0.75},
        {"name": "step", "count": 40.0, "mean": pytest.approx(0.0125)},
        {"name": "fill", "count": 10.0, "mean": pytest.approx(0.002)},
    ]
    one["report"]["programs"] = []
    one["report"]["engine_calls"] += [
        {"call": "execute", "count": 8, "seconds": 0.02, "state": "outermost"},
        {"call": "execute", "count": 99, "seconds": 9.0, "state": "inner"},
        {"call": "count_only", "count": 5, "seconds": None, "state": "outermost"},
    ]
    (shown,) = summary([one])
    assert shown["runs"] == [
        {"name": "execute", "count": 60.0, "mean": pytest.approx(0.002)},
        {"name": "count_only", "count": 5.0, "mean": None},
    ]


def test_an_engine_without_tokens_is_not_called_idle(
    served: tuple[str, list[dict[str, Any]], list[str]], tmp_path: Path
) -> None:
    address, targets, _ = served
    with browser(tmp_path / "profile") as tab:
        tab.size(DESKTOP)
        targets += [of_programs("jax", 4711)]
        tab.driver.get(address)
        tab.until("document.querySelectorAll('article').length === 1")
        seen = text(tab)
        for words in ("step", "40 × 12.5 ms", "10 × 2.00 ms", EVIL[:80], "its tokens cannot be told"):
            assert words in seen, words
        assert "idle" not in seen and "operators" not in seen
        assert tab.js("document.title") == "profinferd"
        for size in (DESKTOP, PHONE):
            tab.size(size)
            tab.picture(tmp_path / f"programs-{size[0]}.png")
            assert tab.js("document.documentElement.scrollWidth") <= size[0], size
