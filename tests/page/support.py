# SPDX-License-Identifier: Apache-2.0
"""A small run with known values, and what tests ask of the page that shows it."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
from selenium.common.exceptions import TimeoutException
from selenium.webdriver import ActionChains
from selenium.webdriver.support.ui import WebDriverWait

from profinferd.agent.model.causes import (
    FaultCount,
    Faults,
    ModelMemory,
    PhaseWaits,
    Quota,
    Taker,
    TensorFaults,
    Thread,
    Threads,
)
from profinferd.agent.model.eventdata import CpuPart, CpuTime, Events, EventTotal
from profinferd.agent.model.peaks import Peak, Peaks
from profinferd.agent.model.trace import Trace
from profinferd.agent.model.verdictdata import Verdict
from tests.unit import traces
from tests.unit.graphs import decoder
from tests.unit.streams import START, Step, decode, prompt

from .browser import PATIENCE, Browser

CONTRAST = (Path(__file__).parent / "contrast.js").read_text()
"""An expression: the texts of a page that can hardly be read."""
SLOW = 7
"""The token that takes longest."""


NO_PMU = "this processor or virtual machine has no such counter: ENOENT (No such file or directory)"
THREADS = Threads(
    work_seconds=0.4,
    threads=(
        Thread(100, True, True, 0.35, 0.3, {"preempted": 0.08, "futex": 0.01},
               {"preempted": 7, "futex": 3}, 2, 0, 0.001, policy="other"),
        Thread(101, False, True, 0.33, 0.29, {"futex": 0.05}, {"futex": 40}, 0, 0, 0.001),
    ),
    takers=(Taker("stress", 4411, 7, 0.08),),
    phases=(PhaseWaits("decode", 12, 12, 0.35, {"preempted": 0.08}, {}, 0.02),),
    ops=(), cores=(), quota=Quota(1.5, 0.25), online_cpus=2, records=50,
)  # fmt: skip
FAULTS = Faults(
    (FaultCount("major", "model", 12, 0.004), FaultCount("minor", "anon", 345)),
    (TensorFaults("blk.1.ffn_down.weight", 1, "model", 9, 30, 0.003, "graph"),),
    ModelMemory("toy.gguf", 2 << 20, 2 << 20, 1 << 20, 0, "mmap"),
    0,
    65536,
)
PEAKS = Peaks((Peak(1, 9.9e9, None, 49.5e9, 79e9), Peak(2, 10e9, None, 50e9, 80e9)))
CPU = CpuTime(99, 400, 2, 4.1, 4.0, (CpuPart("kernels", 360, 3.6, 0.9), CpuPart("tokenizer", 40, 0.4, 0.1)))
EVENTS = Events(
    (EventTotal("instructions", 5_000_000, 0.5), EventTotal("cycles", None, None, NO_PMU)),
    (), {}, 2, ipc=1.25,
)  # fmt: skip
SPAN = np.dtype([("ts", "<u8"), ("begin", "<u8"), ("woken", "<u8"), ("end", "<u8"), ("tid", "<u4"),
                 ("by_comm", "S16"), ("cause", "<u2")])  # fmt: skip
FAULT = np.dtype([("ts", "<u8"), ("wait_ns", "<u8"), ("tid", "<u4"), ("node", "<u4"), ("kind", "<u2")])


def trace_of_a_run() -> Trace:
    """A prompt of 5 and 12 tokens on three layers, one token slower, one with a lost record.

    In the slow one its thread is preempted for 100 us, and waits for a page.
    """
    steps = []
    first, rest = decoder(5, 1, 256, layers=3), decoder(1, 1, 256, layers=3)
    for n in range(13):
        more: dict[str, Any] = {
            "op_ns": 9_000 if n == SLOW else 1_000 + 10 * n,
            "lose": [4] if n == 9 else (),
        }
        step: Step = (
            prompt(0, 5, graph=first, hash=11, **more)
            if n == 0
            else decode(4 + n, graph=rest, hash=12, **more)
        )
        steps.append([step])
    gaps = [(START + 60_000_000_000, START + 60_001_000_000, 3, "lost_ops")]
    call = traces.of_steps(steps).calls[SLOW]
    at, tid = int(call["begin"]), int(call["tid"])
    spans = np.array([(at + 150_000, at + 50_000, at + 50_000, at + 150_000, tid, b"stress", 0)], SPAN)
    faults = np.array([(at + 200_000, 4000, tid, 3, 1)], FAULT)
    trace = traces.of_steps(steps, gaps=gaps, records={"sched_spans": spans, "page_faults": faults})
    verdict = Verdict(
        "memory_bandwidth_bound_decode", "high", 0.0123, ("Evidence with <b>no</b> markup.",), "Try less."
    )
    trace.snapshot = dataclasses.replace(
        trace.snapshot, verdicts=(verdict,), peaks=PEAKS,
        threads=THREADS, faults=FAULTS, cpu_time=CPU, hardware=EVENTS,
    )  # fmt: skip
    return trace


def text(page: Browser, selector: str) -> str:
    """What a person reads there, nothing where it is not; read in one step, for it may be drawn anew."""
    return str(page.js("document.querySelector(arguments[0])?.innerText ?? ''", selector)).strip()


def cells(page: Browser, table: str, column: str) -> list[str]:
    return [
        str(value)
        for value in page.js(
            "[...document.querySelectorAll(`#${arguments[0]} td[data-column=${arguments[1]}]`)]"
            ".map(c => c.textContent)",
            table, column,
        )
    ]  # fmt: skip


def ns_of(said: str) -> float:
    """A time as the page writes it."""
    number, unit = re.fullmatch(r"([\d.,]+) (ns|µs|ms|s)", said.strip()).groups()  # type: ignore[union-attr]
    return float(number.replace(",", "")) * {"ns": 1, "µs": 1e3, "ms": 1e6, "s": 1e9}[unit]


def wait_for(page: Browser, selector: str, pattern: str) -> str:
    """Waits for a text that has a pattern; the text that had it."""
    said = ""

    def says(_: Any) -> bool:
        nonlocal said
        said = text(page, selector)
        return re.search(pattern, said) is not None

    try:
        WebDriverWait(page.driver, PATIENCE, 0.05).until(says)
    except TimeoutException:
        raise AssertionError(f"{selector} says {said!r}, not {pattern!r}") from None
    return said


# ---- what a hand does: found and aimed at in one step, and done when the page has drawn what came of it ----


def point(page: Browser, selector: str, x: float = 0, y: float = 0) -> tuple[float, float]:
    """Where in the window a point ``x``, ``y`` from the middle of an element is, once the window shows it."""
    page.js("document.querySelector(arguments[0]).scrollIntoView({block: 'center'})", selector)
    page.frames()
    at = page.js(
        "(e => { const b = e.getBoundingClientRect();"
        " const [x, y] = [b.left + b.width / 2 + arguments[1], b.top + b.height / 2 + arguments[2]];"
        " const hit = document.elementFromPoint(x, y);"
        " return e.contains(hit) ? [x, y] : `covered by ${hit?.outerHTML.slice(0, 200)}`;"
        " })(document.querySelector(arguments[0]))",
        selector, x, y,
    )  # fmt: skip
    assert isinstance(at, list), f"{selector} {at}"
    return float(at[0]), float(at[1])


def mouse(page: Browser, *events: tuple[str, tuple[float, float], int]) -> None:
    """Events of the mouse: (moved, pressed or released, where, the how many'th click)."""
    for what, (x, y), clicks in events:
        held = what == "released" or (what == "moved" and clicks > 0)
        page.driver.execute_cdp_cmd(
            "Input.dispatchMouseEvent",
            {"type": f"mouse{what.capitalize()}", "x": x, "y": y, "clickCount": clicks,
             "button": "left" if clicks else "none", "buttons": int(what == "pressed" or held)},
        )  # fmt: skip
    page.frames()


def click(page: Browser, selector: str, x: float = 0, y: float = 0, *, times: int = 1) -> None:
    """``times``: 2 is a double-click, however slow the machine is."""
    at = point(page, selector, x, y)
    mouse(page, ("moved", at, 0))
    for n in range(1, times + 1):
        mouse(page, ("pressed", at, n), ("released", at, n))


def drag(page: Browser, selector: str) -> None:
    """From the middle of an element to the right."""
    x, y = point(page, selector)
    mouse(page, ("moved", (x, y), 0), ("pressed", (x, y), 1))
    for by in (40, 80, 120):
        mouse(page, ("moved", (x + by, y), 1))
    mouse(page, ("released", (x + 120, y), 1))


def press(page: Browser, selector: str, *keys: str) -> None:
    """Keys on the element that has the focus, which may be a part of a drawing."""
    page.js("document.querySelector(arguments[0]).focus()", selector)
    for key in keys:
        ActionChains(page.driver).send_keys(key).perform()
        page.frames()


def choose(page: Browser, selector: str, label: str) -> None:
    """Of a list that unfolds."""
    page.js(
        "((list, label) => { list.value = [...list.options].find(o => o.text === label).value;"
        " list.dispatchEvent(new Event('change', {bubbles: true})); })"
        "(document.querySelector(arguments[0]), arguments[1])",
        selector, label,
    )  # fmt: skip
    page.frames()
