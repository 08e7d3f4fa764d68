"""The browser that these tests need: without it, whoever imports this module is skipped."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest

for driver in ("playwright", "axe_playwright_python"):
    pytest.importorskip(driver, reason=f"{driver} is not installed")
BROWSER = next(filter(None, map(shutil.which, ("chromium-headless-shell", "chromium"))), None)
if BROWSER is None:
    pytest.skip("no browser: install chromium-headless-shell", allow_module_level=True)

from axe_playwright_python.sync_playwright import Axe  # noqa: E402  where there is a browser
from playwright.sync_api import Browser, Page, Route, expect  # noqa: E402

__all__ = ["BROWSER", "WAIT_MS", "Browser", "LogIn", "Page", "Route", "axe_finds", "drawn", "expect", "focused"]

LogIn = Callable[..., Page]
WAIT_MS = 10_000
expect.set_options(timeout=WAIT_MS)


def axe_finds(page: Page, **options: object) -> list[str]:
    """Return what axe finds on a page: the rule, and the first element that breaks it."""
    violations = Axe().run(page, options=options).response["violations"]
    return [f"{each['id']} {each['nodes'][0]['html']}" for each in violations]


TWO_FRAMES = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"


def drawn(page: Page, words: str) -> None:
    """Wait for a page that says this and is drawn: a browser moves the focus to where a page begins as it draws it."""
    page.get_by_text(words).first.wait_for()
    page.wait_for_load_state()
    page.evaluate(TWO_FRAMES)


def focused(page: Page) -> str:
    return str(page.evaluate("document.activeElement.id || document.activeElement.textContent.trim()"))
