"""An office for every module, served, and a browser for whoever logs in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import pytest

from tests.kernel.durable import deny
from tests.service.console.office import Office, busy, open_office, served

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

    from tests.service.console.browser.chromium import LogIn


@pytest.fixture(scope="module")
def office(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Office]:
    home = tmp_path_factory.mktemp("office")
    with pytest.MonkeyPatch.context() as patch, open_office(home, patch.setenv) as made:
        yield made


@pytest.fixture(scope="module")
def flows(office: Office) -> Mapping[str, str]:
    found = busy(office)
    office.hand_over("D-1", deny)
    return found


@pytest.fixture(scope="module")
def address(office: Office) -> Iterator[str]:
    with served(office) as found:
        yield found


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright  # where there is a browser

    from tests.service.console.browser.chromium import BROWSER

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def log_in(office: Office, address: str, browser: Browser) -> Iterator[LogIn]:
    """Return what logs somebody in, in a browser of their own. What a page says on its console is a failure."""
    from tests.service.console.browser.chromium import WAIT_MS  # where there is a browser

    contexts, said = [], list[str]()

    def opened(name: str, *roles: str, **how: object) -> Page:
        context = browser.new_context(base_url=address, **how)  # type: ignore[arg-type]  # by name
        contexts.append(context)
        context.set_default_timeout(WAIT_MS)
        page = context.new_page()
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("console", lambda message: said.append(message.text) if message.type == "error" else None)
        page.goto("/console")
        page.get_by_label("Key", exact=True).fill(office.key(name, *roles))
        page.keyboard.press("Enter")
        page.wait_for_selector("h1:not(:has-text('Log in'))")
        return page

    yield opened
    for context in contexts:
        context.close()
    assert [] == [line for line in said if not line.startswith("Failed to load resource")]  # a page with 404, 409
