"""The console for everybody: what is said of a mistake, small screens, other directions and colours, and what axe finds."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

import pytest

from sds.service.gates import OpenGate, OpenGates
from tests.kernel.durable import refund
from tests.service.console.browser.chromium import Browser, LogIn, Page, axe_finds, expect, focused
from tests.service.console.office import Office

# What is sent, which field of it is wrong, and what is said of it. The browser is kept from checking anything by itself.
MISTAKES: tuple[tuple[str, str, dict[str, str], str, str], ...] = (
    ("cases/claims/{open}", "abort", {"reason": " "}, "abort-reason", "a reason is needed"),
    ("cases/claims/{open}", "abort", {"reason": "x" * 501}, "abort-reason", "501 characters, and the record keeps 500"),
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
    ("live", "claims-halt-", {"reason": "é" * 600}, "claims-halt--reason", "the reason has 600 characters"),
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
        expect(page.locator(":focus")).to_have_id("refused")
        assert page.title().startswith("Error: ")
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        expect(page.locator(":focus")).to_have_id(wrong)
        expect(page.locator(":focus")).to_have_accessible_description(re.compile(re.escape(said)))
        assert [wrong] == page.locator("[aria-invalid]").evaluate_all("found => found.map(each => each.id)")
        assert "none" != page.locator(":focus").evaluate("field => getComputedStyle(field).boxShadow")
        for name, text in typed.items():
            assert text == page.locator(f"#{form}-{name}").input_value()


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


def test_on_a_small_screen_the_focus_goes_down_the_page_and_nothing_long_is_cut_off(
    office: Office, log_in: LogIn
) -> None:
    dfid = office.hand_over("L" * 126, refund(), f"{'W' * 400} see https://long.example/{'x' * 400}")
    case, record = f"/console/cases/claims/{dfid}", f"/console/decisions/claims/{dfid}"
    who = log_in("n" * 64, viewport={"width": 320, "height": 640})
    who.goto(case)
    who.get_by_role("button", name="Take").click()
    who.get_by_text("You took this case").wait_for()
    page = log_in("small", viewport={"width": 320, "height": 640})
    for path in ("/console", case, "/console/live", record):
        assert_in_order_and_whole(page, path)
    page.goto(case)
    page.locator("#abort-reason").fill("r" * 500)
    page.keyboard.press("Enter")
    page.get_by_text("ABORT by small").first.wait_for()
    for path in (case, record, "/console/live"):
        assert_in_order_and_whole(page, path)


def assert_in_order_and_whole(page: Page, path: str) -> None:
    page.goto(path)
    assert [] == page.locator("main *:not(thead *)").evaluate_all(CUT_OFF)
    places = list[float]()
    while focused(page) != "Help: keyboard and words":
        page.keyboard.press("Tab")
        places.append(page.evaluate(MIDDLE))
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
    assert [] == axe_finds(page)
    page.goto("/console/live")
    before = page.locator("#pause").evaluate(background)
    page.locator("#pause").press("Enter")
    assert before != page.locator("#pause").evaluate(background)
    assert [] == axe_finds(page)


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
    page = log_in(f"axe-{scheme}", color_scheme=scheme)
    stranger = browser.new_context(base_url=address, color_scheme=scheme).new_page()  # type: ignore[arg-type]  # a scheme
    found = list[str]()
    for path in ("/login", *PAGES[: None if scheme == "light" else 5]):
        at = stranger if path == "/login" else page
        at.set_viewport_size({"width": 1280, "height": 900})
        at.goto(f"/console{path.format(**flows)}")
        at.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
        found += [f"{path}: {each}" for each in axe_finds(at, **RULES[scheme])]
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
    assert [] == axe_finds(page)
    assert 320 == page.evaluate("document.documentElement.scrollWidth")


def test_many_gates_with_long_names_fit_on_a_small_screen(
    office: Office, log_in: LogIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = [f"gate_{number}_{'x' * 55}" for number in range(20)]
    page = log_in("z" * 64)
    office.hand_over("M-1", refund("40.00"))
    gate = office.app.state.service.gate("claims")
    opened = {name: OpenGate(replace(gate.definition, name=name), gate.gate) for name in served}
    monkeypatch.setattr(office.app.state.service, "gates", OpenGates(opened))
    for path in ("/console", "/console/live"):
        page.set_viewport_size({"width": 1280, "height": 900})
        page.goto(path)
        page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
        assert [] == axe_finds(page)
        page.set_viewport_size({"width": 320, "height": 640})
        assert 320 == page.evaluate("document.documentElement.scrollWidth")
