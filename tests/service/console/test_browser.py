"""The console in a real browser, against a real server: by keyboard, in light and dark, narrow, and what axe finds."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise

import pytest

from tests.kernel.durable import deny, refund
from tests.service.console.office import ATTACK, Office, busy, open_office, served

for driver in ("playwright", "axe_playwright_python"):
    pytest.importorskip(driver, reason=f"{driver} is not installed")
BROWSER = next(filter(None, map(shutil.which, ("chromium-headless-shell", "chromium"))), None)
if BROWSER is None:
    pytest.skip("no browser: install chromium-headless-shell", allow_module_level=True)

from axe_playwright_python.sync_playwright import Axe  # noqa: E402  where there is a browser
from playwright.sync_api import Browser, Page, expect, sync_playwright  # noqa: E402

WAIT_MS = 10_000

LogIn = Callable[..., Page]


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
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def log_in(office: Office, address: str, browser: Browser) -> Iterator[LogIn]:
    """Return what logs somebody in, in a browser of their own. What a page says on its console is a failure."""
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


def focused(page: Page) -> str:
    return str(page.evaluate("document.activeElement.id || document.activeElement.textContent.trim()"))


def test_a_case_is_found_and_overridden_by_keyboard_alone(office: Office, address: str, log_in: LogIn) -> None:
    dfids = [office.hand_over(f"K-{number}", refund(f"{number}0.00")) for number in (1, 2)]
    page = log_in("kay")
    page.goto("/console?gate=claims")
    page.keyboard.press("Tab")
    assert "Skip to content" == focused(page)
    page.keyboard.press("Enter")
    while focused(page) != "K-1":
        page.keyboard.press("Tab")
    page.keyboard.press("j")
    assert "K-2" == focused(page)
    page.keyboard.press("k")
    page.keyboard.press("Enter")
    page.wait_for_url(f"**/cases/claims/{dfids[0]}")
    while focused(page) != "Take this case":
        page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.get_by_text("You took this case").wait_for()
    page.keyboard.press("Tab")
    assert "Give it back" == focused(page)
    while focused(page) != "override-reason":
        page.keyboard.press("Tab")
    page.keyboard.type("looked into it")
    page.keyboard.press("Tab")
    page.keyboard.press("Space")
    page.keyboard.press("Tab")
    assert "Override: carry out the proposal" == focused(page)
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert "solid" == outline
    page.keyboard.press("Enter")
    page.get_by_text("OVERRIDE by kay").first.wait_for()
    assert page.title().startswith("K-1: OVERRIDE by kay")
    answer = office.answer(dfids[0])
    assert ("OVERRIDE", "kay", "SUCCESS") == (answer.resolution, answer.resolved_by, answer.execution)


def test_a_claim_with_a_script_and_an_injection_stays_text_and_is_marked(office: Office, log_in: LogIn) -> None:
    dfid = office.hand_over("S-1", refund(), ATTACK)
    page = log_in("sam")
    page.goto(f"/console/cases/claims/{dfid}")
    evidence = page.locator(".evidence")
    assert ATTACK.replace("\u202e", "\\u202e") == evidence.evaluate("node => node.textContent").strip()
    assert 0 == evidence.locator("script, img").count()
    assert ["Ignore all previous instructions", "you are now", "\\u202e"] == page.locator("mark").all_inner_texts()
    assert page.title().startswith("S-1")
    page.goto(f"/console/decisions/claims/{dfid}")
    assert 0 == page.locator("main script, main img").count()


def test_a_second_tab_that_looked_earlier_is_refused_and_shown_what_changed(office: Office, log_in: LogIn) -> None:
    dfid = office.hand_over("T-1", refund("40.00"))
    page = log_in("tea")
    page.goto(f"/console/cases/claims/{dfid}")
    office.tickets.put("T-T-1", refundable_minor=9_000)
    page.get_by_label("Reason, for the record").first.fill("as I saw it")
    page.locator("#override-ok").check()
    page.get_by_role("button", name="Override").click()
    page.get_by_role("alert").wait_for()
    assert "the state has moved" in page.get_by_role("alert").inner_text()
    assert "refused" == focused(page)
    row = page.get_by_role("row", name="ticket.refundable_minor")
    assert ["200.00 EUR", "200.00 EUR", "90.00 EUR changed since you looked"] == [
        " ".join(cell.split()) for cell in row.get_by_role("cell").all_inner_texts()
    ]
    assert "as I saw it" == page.locator("#override-reason").input_value()
    assert "ESCALATED" == office.answer(dfid).state


def test_what_is_of_high_impact_is_not_even_sent_without_its_box(office: Office, log_in: LogIn) -> None:
    dfid = office.hand_over("B-1", refund("40.00"))
    page = log_in("bo")
    page.goto(f"/console/cases/claims/{dfid}")
    page.locator("#override-reason").fill("too fast")
    page.get_by_role("button", name="Override").click()
    assert page.locator("#override-ok").evaluate("box => box.validity.valueMissing")
    assert "ESCALATED" == office.answer(dfid).state
    page.locator("#override-ok").check()
    page.get_by_role("button", name="Override").click()
    page.get_by_text("OVERRIDE by bo").first.wait_for()


# What is sent, which field of it is wrong, and what is said of it. The browser is kept from checking anything by itself.
MISTAKES: tuple[tuple[str, str, dict[str, str], str, str], ...] = (
    ("cases/claims/{open}", "abort", {"reason": " "}, "abort-reason", "a reason is needed"),
    ("cases/claims/{small}", "override", {"reason": "\u3164"}, "override-reason", "a reason is needed"),
    ("cases/claims/{small}", "return", {}, "return-reason", "a reason is needed"),
    ("cases/claims/{large}", "override", {"reason": "so"}, "override-ok", "this is of HIGH impact"),
    ("cases/claims/{open}", "GOODWILL", {"reason": "so", "amount": "7"}, "GOODWILL-amount", "outside its bounds"),
    ("cases/claims/{open}", "GOODWILL", {"reason": "", "amount": "15"}, "GOODWILL-reason", "a reason is needed"),
    ("cases/claims/{open}", "GOODWILL", {"reason": "so", "amount": "40"}, "GOODWILL-ok", "tick the box"),
    ("cases/holds/{unknown}", "settled", {"reason": "so", "reference": " "}, "settled-reference", "the reference"),
    ("cases/holds/{unknown}", "settled", {"reason": "so", "reference": "B-7"}, "settled-ok", "tick the box"),
    ("cases/holds/{unknown}", "rejected", {"reason": "so"}, "rejected-ok", "tick the box"),
    ("live", "claims-halt-", {"reason": " "}, "claims-halt--reason", "a reason is needed"),
    ("live", "claims-suspend-claims-agent", {}, "claims-suspend-claims-agent-reason", "a reason is needed"),
)


def test_every_mistake_is_said_first_and_leads_to_its_field_which_says_it_too(
    flows: Mapping[str, str], log_in: LogIn
) -> None:
    page = log_in("err")
    for path, form, typed, wrong, said in MISTAKES:
        page.goto(f"/console/{path.format(**flows)}")
        page.evaluate("for (const form of document.forms) form.noValidate = true")
        page.evaluate("document.querySelectorAll('details:not([name])').forEach(each => each.open = true)")
        page.locator(f"details:has(#{form}-reason)").evaluate_all("found => found.forEach(each => each.open = true)")
        for name, text in typed.items():
            page.locator(f"#{form}-{name}").fill(text)
        page.locator(f"#{form}-reason").press("Enter")
        page.get_by_role("alert").wait_for()
        assert ("refused", True) == (focused(page), page.title().startswith("Error: "))
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        expect(page.locator(":focus")).to_have_id(wrong)
        expect(page.locator(":focus")).to_have_accessible_description(re.compile(re.escape(said)))
        assert [wrong] == page.locator("[aria-invalid]").evaluate_all("found => found.map(each => each.id)")
        for name, text in typed.items():
            assert text == page.locator(f"#{form}-{name}").input_value()


def test_another_decision_is_typed_within_the_bounds_that_the_page_names(office: Office, log_in: LogIn) -> None:
    dfid = office.hand_over("M-1")
    page = log_in("mo")
    page.goto(f"/console/cases/claims/{dfid}")
    page.get_by_text("GOODWILL", exact=True).click()
    amount = page.locator("#GOODWILL-amount")
    checked = []
    for typed in ("4", "7", "55", "15"):
        amount.fill(typed)
        checked.append(amount.evaluate("field => field.validity.valid"))
    assert [False, False, False, True] == checked
    page.locator("#GOODWILL-code").select_option("APOLOGY")
    page.locator("#GOODWILL-reason").fill("two hours in the cold")
    page.get_by_role("button", name="Decide GOODWILL").click()
    page.get_by_text("MODIFY by mo").first.wait_for()
    assert ("GOODWILL", {"amount": 1_500}) == (office.answer(dfid).action, office.answer(dfid).params)


def test_logging_out_and_revoking_a_key_end_what_is_open(office: Office, log_in: LogIn) -> None:
    page = log_in("lou")
    page.get_by_role("button", name="Log out").click()
    page.wait_for_url("**/console/login")
    page.goto("/console/live")
    assert page.url.endswith("/console/login?asked=%2Fconsole%2Flive")
    other = log_in("rev")
    office.revoke("rev")
    other.goto("/console")
    assert other.url.endswith("/console/login")


def test_the_live_page_renews_itself_and_not_while_it_is_paused(
    office: Office, flows: Mapping[str, str], log_in: LogIn
) -> None:
    page = log_in("liv")
    page.clock.install()
    page.goto("/console/live")
    assert 0 == page.get_by_role("link", name="L-1").count()
    office.hand_over("L-1", deny)
    page.clock.run_for(3_500)
    page.get_by_role("link", name="L-1").wait_for()
    page.get_by_role("button", name="Pause").click()
    office.hand_over("L-2", deny)
    page.clock.run_for(10_000)
    assert 0 == page.get_by_role("link", name="L-2").count()
    page.get_by_role("button", name="Pause").click()
    page.clock.run_for(3_500)
    page.get_by_role("link", name="L-2").wait_for()


def test_a_live_page_that_gets_no_answer_says_that_its_figures_are_old(log_in: LogIn) -> None:
    page = log_in("sta")
    page.clock.install()
    page.goto("/console/live")
    status = page.get_by_role("status").filter(has_text="these figures are old")
    page.route("**/live/now", lambda route: route.abort(), times=1)
    for count in (1, 0):
        page.clock.run_for(3_000)
        expect(status).to_have_count(count)


def test_a_live_page_whose_session_ended_says_so_and_keeps_what_was_typed(office: Office, log_in: LogIn) -> None:
    page = log_in("end")
    page.clock.install()
    page.goto("/console/live")
    page.locator("summary", has_text="holds").click()
    reason = page.get_by_role("form", name="Halt holds").get_by_label("Reason")
    reason.fill("wrong fares")
    office.revoke("end")
    page.clock.run_for(3_500)
    page.get_by_text("Your session has ended.").wait_for()
    page.keyboard.type(" since noon")
    assert "wrong fares since noon" == reason.input_value()
    assert 0 == page.get_by_role("heading", name="claims", exact=True).count()


def test_a_reason_outlives_the_session_in_which_it_was_typed(office: Office, log_in: LogIn) -> None:
    dfid = office.hand_over("O-1", refund("40.00"))
    page = log_in("old")
    page.goto(f"/console/cases/claims/{dfid}")
    page.locator("#abort-reason").fill("withdrawn by phone")
    office.revoke("old")
    page.get_by_role("button", name="Abort").click()
    page.get_by_label("Key", exact=True).fill(office.key("young"))
    page.keyboard.press("Enter")
    page.get_by_role("alert").wait_for()
    assert "refused" == focused(page)
    assert "withdrawn by phone" == page.locator("#abort-reason").input_value()
    page.get_by_role("button", name="Abort").click()
    page.get_by_text("ABORT by young").first.wait_for()


def test_an_operator_halts_and_resumes_from_the_page(office: Office, flows: Mapping[str, str], log_in: LogIn) -> None:
    page = log_in("op")
    for button, shown in (("Halt holds", "by op: wrong fares"), ("Resume holds", "Halt holds")):
        page.goto("/console/live")
        page.locator("summary", has_text="holds").click()
        page.get_by_role("form", name=button).get_by_label("Reason").fill("wrong fares")
        page.get_by_role("button", name=button).click()
        page.get_by_text(shown).first.wait_for(state="attached")
    assert not office.holds.store.halted


def test_without_scripts_everything_but_the_renewal_works(office: Office, log_in: LogIn) -> None:
    dfid = office.hand_over("N-1", refund("40.00"))
    page = log_in("nos", java_script_enabled=False)
    page.get_by_role("link", name="Live").click()
    assert page.get_by_role("heading", name="claims", exact=True).is_visible()
    assert 0 == page.get_by_role("button", name="Pause").count()
    page.goto(f"/console/cases/claims/{dfid}")
    page.locator("#abort-reason").fill("withdrawn")
    page.get_by_role("button", name="Abort").click()
    page.get_by_text("ABORT by nos").first.wait_for()


ARABIC = "تأخرت رحلتي أربع ساعات (EI 433) وأريد تعويضا قدره 250.00 يورو"
AT = """([node, word]) => {
    const range = document.createRange(), text = node.firstChild;
    range.setStart(text, text.data.indexOf(word));
    range.setEnd(text, text.data.indexOf(word) + word.length);
    return range.getBoundingClientRect().left;
}"""


def test_a_text_from_right_to_left_is_shown_in_the_order_in_which_it_is_read(office: Office, log_in: LogIn) -> None:
    dfid = office.hand_over("R-1", refund(), ARABIC)
    page = log_in("rtl")
    for path in (f"/console/cases/claims/{dfid}", f"/console/decisions/claims/{dfid}"):
        page.goto(path)
        node = (
            page.locator(".evidence")
            .filter(has_text=ARABIC)
            .evaluate_handle(
                "node => ({ firstChild: [...node.childNodes].find(each => each.data?.includes('EI 433')) })"
            )
        )
        places = [page.evaluate(AT, [node, word]) for word in ("تأخرت", "EI 433", "يورو")]
        assert sorted(places, reverse=True) == places


CUT_OFF = "all => all.filter(each => each.getBoundingClientRect().right > innerWidth).map(each => each.outerHTML)"
MIDDLE = """() => {
    const { top, bottom } = document.activeElement.getBoundingClientRect();
    return scrollY + (top + bottom) / 2;
}"""


def test_on_a_small_screen_the_focus_goes_down_the_page_and_long_names_are_not_cut_off(
    office: Office, flows: Mapping[str, str], log_in: LogIn
) -> None:
    page = log_in("n" * 64, viewport={"width": 320, "height": 640})
    page.goto(f"/console/cases/claims/{flows['open']}")
    page.get_by_role("button", name="Take").click()
    other = log_in("small", viewport={"width": 320, "height": 640})
    for path in ("", "/cases/claims/{open}", "/live", "/decisions/claims/{open}"):
        other.goto(f"/console{path.format(**flows)}")
        assert [] == other.locator("main *:not(thead *)").evaluate_all(CUT_OFF)
        places = list[float]()
        while focused(other) != "Help: keyboard and words":
            other.keyboard.press("Tab")
            places.append(other.evaluate(MIDDLE))
        assert all(each < after + 8 for each, after in pairwise(places)), path


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_what_is_chosen_is_seen_where_the_system_sets_the_colours(
    flows: Mapping[str, str], log_in: LogIn, scheme: str
) -> None:
    page = log_in(f"forced-{scheme}", forced_colors="active", color_scheme=scheme)
    background = "each => getComputedStyle(each).backgroundColor"
    for chosen, other in (
        ("#by-sort + ul [aria-current]", "#by-sort + ul a:not([aria-current])"),
        ("nav [aria-current=page]", "nav a:not([aria-current])"),
    ):
        assert page.locator(chosen).first.evaluate(background) != page.locator(other).first.evaluate(background)
    assert [] == [each["id"] for each in Axe().run(page).response["violations"]]
    page.goto("/console/live")
    before = page.locator("#pause").evaluate(background)
    page.locator("#pause").press("Enter")
    assert before != page.locator("#pause").evaluate(background)
    assert [] == [each["id"] for each in Axe().run(page).response["violations"]]


PAGES = (
    "",
    "/cases/claims/{attack}",
    "/cases/holds/{unknown}",
    "/live",
    "/cases/claims/none",
    "/decisions/claims/{attack}",
    "/find?q=nothing",
    "/help",
)
# Only colours are others in the dark.
RULES: dict[str, dict[str, object]] = {"light": {}, "dark": {"runOnly": ["color-contrast", "link-in-text-block"]}}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_on_any_page_and_none_is_wider_than_a_small_screen(
    office: Office, flows: Mapping[str, str], address: str, browser: Browser, log_in: LogIn, scheme: str
) -> None:
    axe = Axe()
    page = log_in(f"axe-{scheme}", color_scheme=scheme)
    stranger = browser.new_context(base_url=address, color_scheme=scheme).new_page()  # type: ignore[arg-type]  # a scheme
    found = list[str]()
    for path in ("/login", *PAGES[: None if scheme == "light" else 5]):
        at = stranger if path == "/login" else page
        at.set_viewport_size({"width": 1280, "height": 900})
        at.goto(f"/console{path.format(**flows)}")
        at.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
        violations = axe.run(at, options=RULES[scheme]).response["violations"]
        found += [f"{path}: {each['id']} {each['nodes'][0]['html']}" for each in violations]
        assert "en" == at.evaluate("document.documentElement.lang")
        assert 1 == at.locator("h1").count()
        at.set_viewport_size({"width": 320, "height": 640})
        if (width := at.evaluate("document.documentElement.scrollWidth")) > 320:
            found.append(f"{path} is {width} wide")
    stranger.context.close()
    assert [] == found


def test_what_was_refused_is_as_accessible_as_the_rest(office: Office, log_in: LogIn) -> None:
    dfid = office.hand_over("A-1", refund("40.00"))
    page = log_in("acc", viewport={"width": 320, "height": 640})
    page.goto(f"/console/cases/claims/{dfid}")
    office.tickets.put("T-A-1", refundable_minor=3_000)
    page.locator("#override-reason").fill("as I saw it")
    page.locator("#override-ok").check()
    page.get_by_role("button", name="Override").click()
    page.get_by_role("alert").wait_for()
    assert [] == [each["id"] for each in Axe().run(page).response["violations"]]
    assert 320 == page.evaluate("document.documentElement.scrollWidth")
