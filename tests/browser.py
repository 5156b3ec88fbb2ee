"""Headless Chromium (Debian's chromium and chromium-driver) for tests of pages."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from selenium import webdriver

MISSING = "chromium or chromedriver is not installed: make browser installs both"
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
IN_CI = os.environ.get("CI", "") not in ("", "false")
NEEDS_BROWSER = [
    pytest.mark.skipif(not ((CHROMIUM and DRIVER) or IN_CI), reason=MISSING),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # selenium leaves its driver's pipes to the collector
]


@contextmanager
def chromium(width: int = 1280, height: int = 2400) -> Iterator[webdriver.Chrome]:
    """A browser that logs its console and its requests."""
    if not (CHROMIUM and DRIVER):
        pytest.fail(f"{MISSING}. Continuous integration does not skip this test.")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM or ""
    for flag in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        f"--window-size={width},{height}",
    ):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        yield driver
    finally:
        driver.quit()


def requested(driver: webdriver.Chrome) -> set[str]:
    """The addresses that pages asked for since the last call."""
    messages = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    return {m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"}
