"""A day's work at the console in a real browser, against a real server: by keyboard, in two tabs, and while sessions end."""

from __future__ import annotations

from collections.abc import Mapping

from sds.kernel.registry import registry
from tests.kernel.durable import deny, refund
from tests.service.console.browser.chromium import LogIn, Route, drawn, expect, focused
from tests.service.console.office import ATTACK, Office


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
    page.wait_for_url(f"**/cases/claims/{dfids[0]}?gate=claims")
    while focused(page) != "Take this case":
        page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    drawn(page, "You took this case")
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
    assert "[marked: Ignore all previous instructions ]" in " ".join(evidence.aria_snapshot().split())
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
    expect(page.locator(":focus")).to_have_id("refused")
    row = page.get_by_role("row", name="ticket.refundable_minor")
    assert ["200.00 EUR", "200.00 EUR", "90.00 EUR changed since you looked"] == [
        " ".join(cell.split()) for cell in row.get_by_role("cell").all_inner_texts()
    ]
    assert "as I saw it" == page.locator("#override-reason").input_value()
    assert "ESCALATED" == office.answer(dfid).state


def test_back_after_a_refusal_leads_to_the_case_and_sends_nothing_again(office: Office, log_in: LogIn) -> None:
    dfid = office.hand_over("B-2")
    page = log_in("bea")
    for path, field in ((f"/console/cases/claims/{dfid}", "#abort-reason"), ("/console/live", "#claims-halt--reason")):
        page.goto(path)
        page.locator(f"details:has({field})").evaluate_all("all => all.forEach(each => { each.open = true; })")
        page.locator(field).fill(" ")
        page.keyboard.press("Enter")
        page.get_by_role("alert").wait_for()
        page.goto("/console/help")
        page.go_back()
        assert page.url.endswith(path)
        assert 0 == page.get_by_role("alert").count()


def test_without_scripts_back_and_reload_after_a_refusal_send_nothing_again(office: Office, log_in: LogIn) -> None:
    dfid = office.hand_over("B-3")
    page, sent = log_in("bev", java_script_enabled=False), list[str]()
    page.on("request", lambda request: sent.append(request.method) if request.method == "POST" else None)
    path = f"/console/cases/claims/{dfid}?sort=impact"
    page.goto(path)
    page.locator("#abort-reason").fill("\u3164")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("a reason is needed")
    expect(page.locator(":focus")).to_have_id("refused")
    assert "\u3164" == page.locator("#abort-reason").input_value()
    assert page.url.endswith(path)
    page.reload()
    expect(page.get_by_role("alert")).to_have_count(0)
    page.goto("/console/help")
    page.go_back()
    expect(page.get_by_role("heading", name="B-3")).to_be_visible()
    assert ["POST"] == sent


def test_what_is_typed_outlives_taking_the_case_and_giving_it_back(office: Office, log_in: LogIn) -> None:
    case, other = (f"/console/cases/claims/{office.hand_over(name)}" for name in ("Y-1", "Y-2"))
    page, who = log_in("tai"), log_in("tom")
    for each in (page, who):
        each.goto(case)
    page.locator("#abort-reason").fill('withdrawn \u05d0 "by" <phone>')
    page.get_by_text("GOODWILL", exact=True).click()
    page.locator("#GOODWILL-amount").fill("15")
    page.locator("#GOODWILL-code").select_option("APOLOGY")
    for button, said in (
        ("Take this case", "You took"),
        ("Give it back", "Nobody"),
        ("Take this case", "Somebody else"),
    ):
        if said == "Somebody else":
            who.get_by_role("button", name=button).click()
            who.get_by_text("You took").wait_for()
        page.get_by_role("button", name=button).click()
        page.get_by_text(said).first.wait_for()
        expect(page.locator("#abort-reason")).to_have_value('withdrawn \u05d0 "by" <phone>')
        expect(page.locator("#GOODWILL-amount")).to_have_value("15")
        expect(page.locator("#GOODWILL-code")).to_have_value("APOLOGY")
        assert page.locator("#GOODWILL-amount").is_visible()
    for path in (other, case):
        page.goto(path)
        expect(page.locator("#abort-reason")).to_have_value("")


def test_who_decides_a_case_second_learns_of_the_first_and_sees_what_was_typed(office: Office, log_in: LogIn) -> None:
    case = f"/console/cases/claims/{office.hand_over('Y-3')}"
    page, who = log_in("two"), log_in("one")
    for each in (page, who):
        each.goto(case)
    page.locator("#return-reason").fill("the <b>other</b> way")
    who.locator("#abort-reason").fill("withdrawn")
    who.get_by_role("button", name="Abort").click()
    who.get_by_text("ABORT by one").first.wait_for()
    page.get_by_role("button", name="Return to the agent").click()
    said = page.get_by_role("alert")
    expect(said).to_contain_text("this case is resolved already: ABORT by one")
    expect(page.locator("q")).to_have_text("the <b>other</b> way")


def test_one_case_after_another_is_decided_without_setting_the_filter_again(office: Office, log_in: LogIn) -> None:
    dfids = [office.hand_over(f"Q-{number}", refund(f"{number}1.00")) for number in (1, 2, 3)]
    page = log_in("que")
    page.goto("/console?gate=claims&sort=impact&impact=HIGH")
    page.get_by_role("link", name="Q-1").click()
    for number, dfid in enumerate(dfids, 1):
        drawn(page, f"Q-{number}")
        page.locator("#abort-reason").fill("withdrawn")
        page.get_by_role("button", name="Abort").click()
        page.get_by_text("ABORT by que").first.wait_for()
        assert "ABORT" == office.answer(dfid).resolution
        page.get_by_role("status").get_by_role("link", name="Next case").press("Enter")
    page.get_by_role("navigation", name="Console").wait_for()
    assert "gate=claims" in page.url


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


def test_a_live_page_says_once_that_a_gate_was_halted_and_no_longer_than_it_is(office: Office, log_in: LogIn) -> None:
    page, who = log_in("ban"), {"by": "ops", "reason": "wrong fares", "now_ms": office.clock()}
    page.clock.install()
    page.goto("/console/live")
    said = page.get_by_role("status").filter(has_text="Halted: holds")
    for halted in (True, False):
        registry.set_halted(office.holds.store, halted, **who)
        page.clock.run_for(3_000)
        expect(said).to_have_count(int(halted))
        page.evaluate("document.querySelectorAll('#halted > *, #now > *').forEach(each => { each.dataset.old = 1; })")
        page.clock.run_for(3_000)
        expect(page.locator("#now > [data-old]")).to_have_count(0)
        assert halted == page.locator("#halted > [data-old]").count()


def test_a_live_page_that_gets_no_answer_says_that_its_figures_are_old(log_in: LogIn) -> None:
    page = log_in("sta")
    page.clock.install()
    page.goto("/console/live")
    status = page.get_by_role("status").filter(has_text="these figures are old")
    page.route("**/live/now", lambda route: route.abort(), times=1)
    for count in (1, 0):
        page.clock.run_for(3_000)
        expect(status).to_have_count(count)


def test_a_live_page_that_waits_for_an_answer_asks_no_second_time_and_says_that_it_waits(log_in: LogIn) -> None:
    page, asked = log_in("wai"), list[Route]()
    page.clock.install()
    page.goto("/console/live")
    page.route("**/live/now", lambda route: asked.append(route))  # noqa: PLW0108  playwright marks it
    status = page.get_by_role("status").filter(has_text="these figures are old")
    page.clock.run_for(9_100)
    expect(status).to_have_count(0)
    page.clock.run_for(3_000)
    expect(status).to_have_count(1)
    assert 1 == len(asked)
    asked[0].continue_()
    expect(status).to_have_count(0)


STOPPED = """window.sent = [], document.addEventListener("submit", (event) => {
    window.sent.push(!event.defaultPrevented);
    event.preventDefault();
})"""


def test_a_form_is_sent_once_and_again_where_its_answer_was_stopped(office: Office, log_in: LogIn) -> None:
    dfid = office.hand_over("E-1")
    page = log_in("esc")
    page.clock.install()
    page.goto(f"/console/cases/claims/{dfid}")
    page.evaluate(STOPPED)
    page.locator("#abort-reason").fill("withdrawn")
    for _ in range(3):
        page.keyboard.press("Enter")
    page.clock.run_for(10_000)
    page.keyboard.press("Enter")
    assert [True, False, False, True] == page.evaluate("window.sent")


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
    expect(page.locator(":focus")).to_have_id("refused")
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
