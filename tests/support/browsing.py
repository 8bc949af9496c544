"""Pages in a headless Chromium; tests that need it are skipped where it is missing."""

from __future__ import annotations

import functools
import importlib.util
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(
    (
        path
        for name in ("chromium", "chromium-browser", "google-chrome")
        if (path := shutil.which(name))
    ),
    None,
)
MISSING = [
    word
    for word, there in (
        ("a chromium", CHROMIUM),
        ("playwright", importlib.util.find_spec("playwright")),
    )
    if not there
]
drawn = pytest.mark.skipif(
    bool(MISSING), reason=f"the page is drawn with {' and '.join(MISSING)}, not installed here"
)
FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)
SHORT = """
    const all = (what) => [...document.querySelectorAll(what)];
    const one = (what) => document.querySelector(what);
    const texts = (what) => all(what).map((node) => node.textContent);
"""


@functools.cache
def _browser() -> tuple[Any, Any]:
    """Chromium and its driver, started at first use."""
    from playwright.sync_api import sync_playwright

    driver = sync_playwright().start()
    return driver, driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS.split())


def close() -> None:
    """Ends Chromium where it was started."""
    if _browser.cache_info().currsize:
        driver, browser = _browser()
        browser.close()
        driver.stop()
        _browser.cache_clear()


@contextmanager
def browser_page(address: str, width: int = 1100, **options: Any) -> Iterator[Any]:
    """An open page; what it writes to the console as an error, or asks of another machine, fails the test."""
    faults: list[str] = []
    context = _browser()[1].new_context(viewport={"width": width, "height": 900}, **options)
    try:
        page = context.new_page()
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on(
            "console",
            lambda said: faults.append(said.text) if said.type in ("error", "warning") else None,
        )
        page.on(
            "request",
            lambda asked: faults.append(asked.url) if not asked.url.startswith(HERE) else None,
        )
        page.goto(address)
        yield page
    finally:
        context.close()
    assert faults == []


HERE = ("file://", "data:", "blob:", "http://127.0.0.1")


def browse(page: Path, code: str, *views: tuple[str, int]) -> list[Any]:
    """What a piece of JavaScript returns on the page, for each (hash, width)."""
    found = []
    with browser_page(page.as_uri()) as shown:
        for state, width in views:
            shown.set_viewport_size({"width": width, "height": 900})
            shown.goto("about:blank")
            shown.goto(f"{page.as_uri()}#{state}")
            shown.wait_for_function("document.querySelector('.plot svg') !== null")
            found.append(
                shown.evaluate(
                    f"async () => {{ await new Promise(requestAnimationFrame); {code} }}"
                )
            )
    return found
