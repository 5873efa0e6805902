# SPDX-License-Identifier: Apache-2.0
"""Debian's Chromium, driven by its own chromedriver; nothing is downloaded."""

from __future__ import annotations

import base64
import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.ui import WebDriverWait

DESKTOP, PHONE = (1280, 900), (390, 844)
PATIENCE = 180
"""Seconds until a condition is given up: only a page that is wrong ever takes them."""
# Everything that has a size of its own has been drawn in it, and what is unpacked later has come: from
# here on nothing moves by itself. A page that cannot be read has nothing to draw.
_DRAWN = """(() => {
  const ready = document.getElementById("app")?.dataset.ready;
  if (ready !== "true") return ready !== undefined;
  const plots = [...document.querySelectorAll("#app .plot")].map(p => p.querySelector("canvas, svg"));
  const canvas = document.getElementById("timeline-canvas");
  const timeline = document.querySelector("#timeline .card");
  return plots.every(Boolean) && (!canvas || canvas.style.height !== "")
    && (!timeline || timeline.childElementCount > 1);
})()"""


class Browser:
    """One tab. Sizes are CSS pixels."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def size(self, size: tuple[int, int], *, dark: bool = False) -> None:
        """What the page believes its window and the system's colours to be."""
        width, height = size
        self.driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "screenWidth": width, "screenHeight": height,
             "deviceScaleFactor": 1, "mobile": size == PHONE},
        )  # fmt: skip
        features = {"prefers-color-scheme": "dark" if dark else "light", "prefers-reduced-motion": "reduce"}
        self.driver.execute_cdp_cmd(
            "Emulation.setEmulatedMedia",
            {"features": [{"name": name, "value": value} for name, value in features.items()]},
        )
        is_dark = "matchMedia('(prefers-color-scheme: dark)').matches"
        self.until(f"screen.width === arguments[0] && {is_dark} === arguments[1]", width, dark)
        self.frames()

    def open(self, file: Path) -> None:
        """Opens a file and waits until everything in it is drawn."""
        self.driver.get(file.as_uri())
        self.until(_DRAWN)
        self.frames()

    def until(self, code: str, *arguments: Any) -> Any:
        """Waits for an expression in the page to become true; its value."""
        return WebDriverWait(self.driver, PATIENCE, 0.05).until(lambda _: self.js(code, *arguments), code)

    def frames(self) -> None:
        """Waits until what was asked for is drawn, and events of it (as of scrolling) have been heard."""
        self.driver.execute_async_script(
            "const done = arguments[0];"
            "requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done)))"
        )

    def js(self, code: str, *arguments: Any) -> Any:
        """The value of an expression in the page."""
        return self.driver.execute_script(f"return ({code})", *arguments)

    def errors(self) -> list[str]:
        """What the console has said since the last time, warnings too."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def picture(self, to: Path) -> None:
        """A screenshot of what the window shows."""
        shot = self.driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})
        to.write_bytes(base64.b64decode(shot["data"]))


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """A browser with its profile in ``folder``. Skips where there is no Chromium."""
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("no chromium and chromedriver here (Debian: chromium, chromium-driver)")
    options = Options()
    options.binary_location = chromium
    for argument in ("--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
                     "--disable-background-networking", f"--user-data-dir={folder}"):  # fmt: skip
        options.add_argument(argument)
    if os.geteuid() == 0:
        options.add_argument("--no-sandbox")  # Chromium's sandbox refuses root
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    tab = webdriver.Chrome(options=options, service=Service(driver))
    tab.set_script_timeout(PATIENCE)
    try:
        yield Browser(tab)
    finally:
        tab.quit()
