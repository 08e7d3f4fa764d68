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

__all__ = ["BROWSER", "Browser", "LogIn", "Page", "Route", "axe_finds", "expect", "focused"]

LogIn = Callable[..., Page]


def axe_finds(page: Page, **options: object) -> list[str]:
    """Return what axe finds on a page: the rule, and the first element that breaks it."""
    violations = Axe().run(page, options=options).response["violations"]
    return [f"{each['id']} {each['nodes'][0]['html']}" for each in violations]


def focused(page: Page) -> str:
    return str(page.evaluate("document.activeElement.id || document.activeElement.textContent.trim()"))
