"""Headless Chromium, and pictures of whole pages at two widths in light and dark; a module without it is skipped."""

import base64
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.support.wait import WebDriverWait

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
if CHROMIUM is None or DRIVER is None:
    pytest.skip("Debian's chromium and chromium-driver are not here", allow_module_level=True)
ARGUMENTS = (
    *("headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking"),
    *("disable-component-update", "disable-sync", "window-size=1400,1000", "disable-dev-shm-usage", "hide-scrollbars"),
)
WIDTHS, SCHEMES = (1400, 400), ("light", "dark")
WAIT_S = 60
"""Timeout, long enough for a busy machine."""

_CUT = """
const width = document.documentElement.clientWidth, cut = [];
const isShown = (one) => one.checkVisibility({ visibilityProperty: true });
const inScroll = (one) => { const box = one.closest(".scroll"); return box && box.scrollWidth > box.clientWidth; };
if (document.documentElement.scrollWidth > width) cut.push(`the page is ${document.documentElement.scrollWidth} wide`);
const texts = "p, caption, figcaption, dd, li, h1, h2, h3, td";
for (const one of document.querySelector("main").querySelectorAll(texts)) {
  const isCut = isShown(one) && !inScroll(one) && one.getBoundingClientRect().right > width + 1;
  if (isCut) cut.push(`${one.tagName}: ${one.textContent.slice(0, 40)}`);
}
for (const svg of document.querySelectorAll(".chart svg.main-svg")) {
  const frame = svg.getBoundingClientRect();
  for (const text of svg.querySelectorAll("text")) {
    const box = text.getBoundingClientRect();
    const isCut = box.width && isShown(text) && (box.left < frame.left - 1 || box.right > frame.right + 1);
    if (isCut) cut.push(`chart: ${text.textContent}`);
  }
}
return cut;
"""
"""Lists what is not within the page: text at the right of it, and labels outside of their chart."""


@contextmanager
def browser(folder: Path) -> Iterator[Any]:
    """Start Chromium with its profile in a folder."""
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in (*ARGUMENTS, f"user-data-dir={folder}"):
        options.add_argument(f"--{argument}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        yield driver
    finally:
        driver.quit()


def show(driver: Any, url: str, *, width: int, scheme: str) -> list[str]:
    """Open a page, draw all of its charts, and return what is cut."""
    metrics = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    media = [{"name": "prefers-color-scheme", "value": scheme}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})
    driver.get(url)
    is_ready = "return !!window.runstop && (!document.querySelector('.chart') || !!window.Plotly)"
    WebDriverWait(driver, WAIT_S).until(lambda _: driver.execute_script(is_ready))
    driver.execute_script("document.querySelectorAll('.chart').forEach((one) => one.draw?.())")
    are_drawn = """return [...document.querySelectorAll('.chart')].every((one) =>
        !one.update || !one.checkVisibility() || one.querySelector('.plot .main-svg'))"""
    WebDriverWait(driver, WAIT_S).until(lambda _: driver.execute_script(are_drawn))
    return list(driver.execute_script(_CUT))


def picture(driver: Any, path: Path) -> None:
    """Write the whole page as a PNG."""
    size = driver.execute_cdp_cmd("Page.getLayoutMetrics", {})["cssContentSize"]
    clip = {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], 9000), "scale": 1}
    shot = driver.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True, "clip": clip})
    path.write_bytes(base64.b64decode(shot["data"]))
