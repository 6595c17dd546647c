"""A real browser for tests of the live page: Debian's chromium, driven by selenium. Tests are skipped without one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.chrome.webdriver import WebDriver
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

from integration_tests.patience import eventually

NARROW: Final = 360
WIDE: Final = 1280
CHROMIUM: Final = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER: Final = shutil.which("chromedriver")

with_browser: Final = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None,
    reason="no browser: apt-get install chromium chromium-driver (.ci/run does)",
)


@contextmanager
def browser(profile: Path, width: int = WIDE, *, dark: bool = False, height: int = 900) -> Iterator[WebDriver]:
    """A browser with a window of so many pixels, and a profile of its own."""
    options = Options()
    options.binary_location = CHROMIUM or ""
    for argument in (
        "--headless=new",
        "--no-sandbox",  # it sees nothing but our page, and may be run by root
        "--disable-dev-shm-usage",
        "--disable-gpu",
        f"--user-data-dir={profile}",
        f"--window-size={max(width, 500)},{height}",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    try:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        still = {"name": "prefers-reduced-motion", "value": "reduce"}
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme, still]})
        yield driver
    finally:
        driver.quit()


def text_of(driver: WebDriver, selector: str) -> str:
    """All text that matches a selector; empty while there is none."""
    try:
        return "\n".join(item.text for item in driver.find_elements(By.CSS_SELECTOR, selector))
    except StaleElementReferenceException:  # it was drawn anew meanwhile
        return ""


def shown(driver: WebDriver, selector: str) -> list[WebElement]:
    """Elements that match a selector and can be seen."""
    try:
        return [item for item in driver.find_elements(By.CSS_SELECTOR, selector) if item.is_displayed()]
    except StaleElementReferenceException:
        return []


def await_text(driver: WebDriver, selector: str, text: str) -> None:
    """Wait until a text stands somewhere; nothing is loaded anew for it."""
    eventually(lambda: text in text_of(driver, selector), f"{text!r} in {selector}, which has {selector!r}")


def click(driver: WebDriver, selector: str) -> None:
    """Click the first element that matches and can be seen, once there is one."""
    eventually(lambda: shown(driver, selector), f"{selector} is there")
    driver.execute_script(
        "arguments[0].scrollIntoView({block: 'center', inline: 'center'})", shown(driver, selector)[0]
    )
    shown(driver, selector)[0].click()


def type_into(driver: WebDriver, selector: str, text: str) -> None:
    """Replace what stands in a field."""
    eventually(lambda: shown(driver, selector), f"{selector} is there")
    field = shown(driver, selector)[0]
    field.clear()
    field.send_keys(text)


def complaints(driver: WebDriver) -> list[str]:
    """What the browser's console says against the page: errors of scripts, and what its policy has stopped."""
    entries: list[dict[str, Any]] = driver.get_log("browser")  # type: ignore[no-untyped-call]
    return [
        str(entry["message"])
        for entry in entries
        if entry["level"] in ("SEVERE", "WARNING") and "favicon.ico" not in str(entry["message"])
    ]
