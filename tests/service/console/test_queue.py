"""The queue: what waits, to whom it is shown, sorted, filtered and paged."""

from __future__ import annotations

import html
import re

import pytest

from tests.kernel.durable import escalate, refund
from tests.service.console.office import Office, Visitor, busy, text


def test_the_queue_shows_what_waits_oldest_first_with_its_reason_in_words(office: Office, ada: Visitor) -> None:
    flows = busy(office)
    page = ada.get("/console").text
    places = [page.index(f"/{dfid}") for dfid in flows.values()]
    assert sorted(places) == places
    shown = text(page)
    assert "C-1002 REFUND_TICKET 12.50 EUR The rules ask a human to approve what the agent proposed." in shown
    assert "C-1004 no proposal, likeliest: REFUND_TICKET (58.0 %) The agent handed the case to a human." in shown
    assert "H-2001 REFUND_TICKET 40.00 EUR An order was sent, and nobody knows what became of it." in shown


def test_what_the_queue_is_filtered_by_is_said_in_words(office: Office, ada: Visitor) -> None:
    busy(office)
    shown = text(ada.get("/console").text)
    said = "Why it waits all approval required 3 escalated by agent 1 result of an order not known 1"
    assert ("no impact 1" in shown, said in shown) == (True, True)


QUERIES = {
    "": ["C-1001", "C-1002", "C-1003", "C-1004", "H-2001"],
    "?sort=impact": ["C-1001", "C-1002", "C-1003", "H-2001", "C-1004"],
    "?sort=reason": ["C-1001", "C-1002", "C-1003", "C-1004", "H-2001"],
    "?gate=holds": ["H-2001"],
    "?impact=none": ["C-1004"],
    "?reason=APPROVAL_REQUIRED&sort=impact": ["C-1001", "C-1002", "C-1003"],
    "?gate=nowhere": [],
    "?sort=x&page=99": ["C-1001", "C-1002", "C-1003", "C-1004", "H-2001"],
}


def test_links_sort_and_filter_the_queue(office: Office, ada: Visitor) -> None:
    busy(office)
    shown = {
        query: re.findall(r'class="event" href="[^"]*">([^<]*)<', ada.get(f"/console{query}").text) for query in QUERIES
    }
    assert QUERIES == shown


def test_a_long_queue_has_pages(office: Office, ada: Visitor) -> None:
    for number in range(53):
        office.hand_over(f"C-{number}")
    first, second = (ada.get(f"/console{query}").text for query in ("", "?page=2"))
    assert (50, 3) == (first.count('class="event"'), second.count('class="event"'))
    assert "?page=2" in first


def test_pages_and_filters_reach_every_case(office: Office, ada: Visitor) -> None:
    """Also those of which no page has shown the texts yet."""
    for number in range(120):
        office.hand_over(f"C-{number}", escalate if number != 117 else refund("40.00"))
    assert "C-119" in ada.get("/console?page=3").text
    page = text(ada.get("/console?impact=HIGH").text)
    assert "1 of 120 cases" in page
    assert "C-117 REFUND_TICKET 40.00 EUR" in page
    assert "C-117" in ada.get("/console?sort=impact").text


def test_of_more_cases_than_are_read_the_oldest_are_listed_and_it_says_so(
    office: Office, ada: Visitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sds.service.console.queue.WAITING_MAX", 3)
    for number in range(3):
        office.hand_over(f"C-{number}")
    assert "only the oldest" not in ada.get("/console").text
    office.hand_over("C-3")
    page = ada.get("/console").text
    assert (3, True) == (page.count('class="event"'), "3 cases; only the oldest" in page)
    assert "C-3" not in page


def test_only_cases_of_gates_that_the_key_is_for_are_shown(office: Office) -> None:
    flows = busy(office)
    with Visitor(office) as bob:
        bob.log_in(office.key("bob", "review", gates=("holds",)))
        page = bob.get("/console").text
        assert "H-2001" in page
        assert "C-1001" not in page
        assert 403 == bob.get(f"/console/cases/claims/{flows['open']}").status_code


def test_nothing_waits_is_said(ada: Visitor) -> None:
    assert "No case waits for a human." in ada.get("/console").text


def test_who_may_not_review_sees_what_is_decided_instead(office: Office) -> None:
    dfid = office.hand_over("C-1")
    with Visitor(office) as reader:
        reader.log_in(office.key("reader", "read"))
        assert "/console/live" == reader.get("/console").headers["location"]
        assert 403 == reader.get(f"/console/cases/claims/{dfid}").status_code
        assert (
            403
            == reader.sends(f"/console/cases/claims/{dfid}", "/console/live", decision="ABORT", reason="x").status_code
        )
        assert 403 == reader.sends("/console/live/claims", "/console/live", act="halt", reason="x").status_code
        assert "Stop and start" not in reader.get("/console/live").text


# --- from case to case -------------------------------------------------------------------------------------------------


def hrefs(page: str, words: str) -> list[str]:
    """Return where the links of a page with these words lead."""
    return [html.unescape(href) for href in re.findall(rf'<a [^>]*?href="([^"]*)"[^>]*>{words}</a>', page)]


def test_how_the_queue_is_sorted_and_filtered_outlives_cases_that_are_opened_taken_refused_and_decided(
    office: Office, ada: Visitor
) -> None:
    dfids = [office.hand_over(f"C-{number}", refund("40.00")) for number in range(60)]
    query = "?sort=impact&gate=claims&impact=HIGH&page=2"
    (case,) = hrefs(ada.get(f"/console{query}").text, "C-51")
    assert f"/console/cases/claims/{dfids[51]}{query}" == case
    page = ada.get(case).text
    (take,) = re.findall(r'action="([^"]*/take[^"]*)"', page)
    assert f"{case}#decide" == ada.sends(html.unescape(take), take="yes").headers["location"]
    (decide,) = {html.unescape(each) for each in re.findall(r'method="post" action="(/console/cases/[^"]*)"', page)} - {
        html.unescape(take)
    }
    refused = ada.sends(decide, decision="ABORT", reason=" ")
    assert (409, case) == (refused.status_code, str(refused.url).removeprefix("https://console.example"))
    for shown in (page, refused.text):
        assert [f"/console{query}"] == hrefs(shown, "Waiting")[1:]
    answer = ada.sends(decide, decision="ABORT", reason="withdrawn")
    assert case == answer.headers["location"]
    decided = ada.get(case).text
    assert [f"/console{query}"] == hrefs(decided, "Back to the waiting cases")
    following = ada.get(hrefs(decided, "Next case")[0]).headers["location"]
    assert f"/console/cases/claims/{dfids[52]}{query}" == following


def test_how_the_queue_is_sorted_outlives_the_session(office: Office) -> None:
    path = f"/console/cases/claims/{office.hand_over('C-1')}?sort=impact"
    with Visitor(office) as bob:
        bob.log_in(office.key("bob"))
        fields = {"csrf": bob.csrf(), "decision": "ABORT", "reason": "withdrawn"}
        bob.cookies.delete("__Host-sds_session")
        page = bob.post(bob.post(path, data=fields).headers["location"], data=fields).text
        hidden = {name: html.unescape(said) for name, said in re.findall(r'name="(\w+)" value="([^"]*)"', page)}
        page = bob.post("/console/login", data=hidden | {"key": office.key("new")}).text
        assert 'value="withdrawn"' in page
        assert ["/console?sort=impact"] == hrefs(page, "Waiting")[1:]


def test_the_next_case_is_the_one_after_which_nobody_else_has_taken_and_then_the_first(
    office: Office, ada: Visitor
) -> None:
    flows = busy(office)
    places = {dfid: name for name, dfid in flows.items()}

    def following(name: str, query: str = "") -> str:
        gate = "holds" if name == "unknown" else "claims"
        answer = ada.get(f"/console/next?after={gate}/{flows.get(name, name)}{query}")
        assert 303 == answer.status_code
        leads, _, asked = answer.headers["location"].partition("?")
        assert query.removeprefix("&") == asked
        return places.get(leads.rpartition("/")[2], leads)

    assert ["small", "large", "open", "unknown", "attack"] == [following(name) for name in flows]
    assert ["unknown", "attack"] == [following(name, "&sort=impact") for name in ("large", "open")]
    assert "small" == following("attack", "&reason=APPROVAL_REQUIRED")
    assert "attack" == following("large", "&reason=APPROVAL_REQUIRED")
    assert "/console" == following("unknown", "&gate=holds")
    assert "attack" == following("none")
    assert "attack" == following("%00")
    with Visitor(office) as bob:
        bob.log_in(office.key("bob"))
        bob.sends(f"/console/cases/claims/{flows['small']}/take", take="yes")
    ada.sends(f"/console/cases/claims/{flows['large']}/take", take="yes")
    ada.sends(f"/console/cases/claims/{flows['attack']}", decision="ABORT", reason="withdrawn")
    assert "large" == following("attack")


def test_the_next_case_is_one_of_the_gates_and_the_role_of_the_key(office: Office) -> None:
    flows = busy(office)
    with Visitor(office) as bob, Visitor(office) as reader:
        bob.log_in(office.key("bob", "review", gates=("holds",)))
        answer = bob.get(f"/console/next?after=claims/{flows['attack']}")
        assert f"/console/cases/holds/{flows['unknown']}" == answer.headers["location"]
        reader.log_in(office.key("reader", "read"))
        assert 403 == reader.get("/console/next").status_code
