"""What the pages show, to whom, and what their forms do: without a browser."""

from __future__ import annotations

import html
import re
from typing import Any

import pytest

from sds.kernel.audit.verify import verify
from sds.kernel.errors import StoreError
from sds.kernel.executor.statement import Difference
from sds.kernel.human.statement_cases import open_cases
from sds.kernel.registry import registry
from sds.service import review
from sds.service.console import actions
from sds.service.console.taken import KEPT_MS
from sds.service.gates import OpenGates
from tests.kernel.durable import compensate, refund
from tests.service.console.office import ATTACK, Office, Visitor, text


def seen(ada: Visitor, path: str) -> str:
    """Return the state that a case's page names."""
    found = re.search(r'name="seen" value="([^"]*)"', ada.get(path).text)
    assert found is not None
    return found[1]


# --- taking ------------------------------------------------------------------------------------------------------------


def test_a_case_is_taken_for_others_to_see_and_free_again_after_a_while(office: Office, ada: Visitor) -> None:
    dfid = office.hand_over("C-1")
    ada.sends(f"/console/cases/claims/{dfid}/take", take="yes")
    assert "yours" in ada.get("/console").text
    with Visitor(office) as bob:
        bob.log_in(office.key("bob"))
        assert "taken by ada" in bob.get("/console").text
        assert "ada took this case" in text(bob.get(f"/console/cases/claims/{dfid}").text)
        later_ms = office.clock() + KEPT_MS + 1
        office.clock = lambda: later_ms
        assert "taken by" not in bob.get("/console").text


def test_a_case_is_given_back(office: Office, ada: Visitor) -> None:
    path = f"/console/cases/claims/{office.hand_over('C-1')}"
    for take in ("yes", "no"):
        ada.sends(f"{path}/take", take=take)
    assert "Nobody has taken this case." in ada.get(path).text


def test_what_somebody_else_took_after_one_looked_is_neither_taken_nor_given_back(office: Office, ada: Visitor) -> None:
    path = f"/console/cases/claims/{office.hand_over('C-1')}"
    with Visitor(office) as bob:
        bob.log_in(office.key("bob"))
        assert 303 == bob.sends(f"{path}/take", take="yes", holder="").status_code
        refused = ada.sends(f"{path}/take", take="yes", holder="")
        assert 409 == refused.status_code
        assert "Somebody else took this case after you looked." in text(refused.text)
        assert "bob took this case" in text(refused.text)
        assert 303 == ada.sends(f"{path}/take", take="yes", holder="bob").status_code
        bob.sends(f"{path}/take", take="no")
    assert "You took this case" in text(ada.get(path).text)


def test_what_somebody_else_has_taken_may_be_decided_all_the_same(office: Office, ada: Visitor) -> None:
    dfid = office.hand_over("C-1")
    with Visitor(office) as bob:
        bob.log_in(office.key("bob"))
        bob.sends(f"/console/cases/claims/{dfid}/take", take="yes")
    assert 303 == ada.sends(f"/console/cases/claims/{dfid}", decision="ABORT", reason="withdrawn").status_code
    assert "ABORT" == office.answer(dfid).resolution


# --- a case ------------------------------------------------------------------------------------------------------------


def test_a_claim_stays_text_and_what_looks_like_an_order_is_marked(office: Office, ada: Visitor) -> None:
    page = ada.get(f"/console/cases/claims/{office.hand_over('C-1', refund(), ATTACK)}").text
    assert "&lt;script&gt;document.title" in page
    assert "<script>" not in page
    assert ["Ignore all previous instructions", "you are now", "\\u202e"] == re.findall(
        r"<mark [^>]*>([^<]*)</mark>", page
    )
    assert "\u202e" not in page
    assert "{{ 7 * 7 }}" in page
    assert "an order to ignore the rules; an attempt to change the agent&#39;s role" in page


def test_a_case_shows_what_was_proposed_how_likely_and_what_may_be_decided(office: Office, ada: Visitor) -> None:
    shown = text(ada.get(f"/console/cases/claims/{office.hand_over('C-1', refund('40.00'))}").text)
    assert "APPROVAL_REQUIRED: `REFUND_TICKET` always needs a human" in shown
    assert "REFUND_TICKET · amount 40.00 EUR" in shown
    assert "REFUND_TICKET chosen 58.0 % DENY 31.0 % COMPENSATE 9.0 % ESCALATE 2.0 %" in shown
    assert "5.00 to 50.00 EUR, in steps of 5.00" in shown
    assert "amount 250.00 EUR, fixed by the rules." in shown
    assert "The agent's part ended DECIDED ESCALATED, APPROVAL_REQUIRED" in shown


def test_an_override_is_carried_out_under_the_name_of_the_key(office: Office, ada: Visitor) -> None:
    dfid = office.hand_over("C-1", refund("40.00"))
    path = f"/console/cases/claims/{dfid}"
    answer = ada.sends(path, decision="OVERRIDE", reason="checked", seen=seen(ada, path), acknowledge="yes")
    assert (303, path) == (answer.status_code, answer.headers["location"])
    answered = office.answer(dfid)
    assert ("CLOSED", "OVERRIDE", "ada", "SUCCESS") == (
        answered.state,
        answered.resolution,
        answered.resolved_by,
        answered.execution,
    )
    assert [(dfid, "T-C-1", "REFUND_TICKET", 4_000)] == office.rail.paid()
    assert "OVERRIDE by ada" in ada.get(path).text
    assert () == verify(office.claims.store).faults


def test_a_change_is_typed_as_people_write_numbers(office: Office, ada: Visitor) -> None:
    for typed in ("15", "15.0", "15.00", " 15 "):
        path = f"/console/cases/claims/{office.hand_over(f'C-{typed}'.strip())}"
        fields = {
            "decision": "MODIFY",
            "action": "GOODWILL",
            "code": "APOLOGY",
            "number.amount": typed,
            "reason": "sorry",
        }
        assert 303 == ada.sends(path, **fields, seen=seen(ada, path)).status_code
    assert [("GOODWILL", 1_500)] * 4 == [payout[2:] for payout in office.rail.paid()]


REFUSED: list[tuple[dict[str, str], str]] = [
    ({"number.amount": "55"}, "`amount` is outside its bounds"),
    ({"number.amount": "7"}, "`amount` is outside its bounds"),
    ({"number.amount": "15.001"}, "`amount` is not a number with 2 decimals"),
    ({"number.amount": "fifteen"}, "every parameter must be a number"),
    ({"number.amount": "1e1"}, "every parameter must be a number"),
    ({}, "`GOODWILL` does not take these parameters"),
    ({"number.amount": "15", "code": "WHIM"}, "`WHIM` is not a reason of `GOODWILL`"),
    ({"number.amount": "15", "action": "GIVE"}, "`GIVE` is not permitted now"),
    *(
        ({"number.amount": "15", "reason": blank}, "a reason is needed, for the record")
        for blank in (" ", "\u3164\u200b")
    ),
    ({"number.amount": "15", "decision": "PLEASE"}, "there is no decision `PLEASE`"),
    ({"number.amount": "15", "seen": "nothing"}, "`nothing` is not the id of a state"),
]


def test_what_is_refused_is_said_in_the_kernels_line_and_what_was_typed_stays(office: Office, ada: Visitor) -> None:
    path = f"/console/cases/claims/{office.hand_over('C-1')}"
    for fields, said in REFUSED:
        answer = ada.sends(
            path, **{"decision": "MODIFY", "action": "GOODWILL", "code": "APOLOGY", "reason": "so sorry", **fields}
        )
        assert 409 == answer.status_code
        assert said in html.unescape(answer.text)
        assert not any(each in html.unescape(answer.text) for each in ("sds escalations", '"params"'))
        if {*fields} == {"number.amount"}:
            assert 'value="so sorry"' in answer.text
            assert f'value="{fields["number.amount"]}"' in answer.text
    assert [] == office.rail.paid()


def test_what_is_of_high_impact_is_refused_until_it_is_acknowledged(office: Office, ada: Visitor) -> None:
    path = f"/console/cases/claims/{office.hand_over('C-1')}"
    fields = {"decision": "MODIFY", "action": "GOODWILL", "code": "APOLOGY", "number.amount": "40", "reason": "sorry"}
    answer = ada.sends(path, **fields)
    assert 409 == answer.status_code
    assert (
        "this is of HIGH impact: `GOODWILL amount 40.00` will be carried out on `T-C-1` and cannot be undone"
        in answer.text
    )
    assert "tick the box" in answer.text
    assert [] == office.rail.paid()
    assert 303 == ada.sends(path, **fields, acknowledge="yes").status_code
    assert 1 == len(office.rail.paid())


def test_a_case_that_changed_since_it_was_looked_at_is_refused_with_what_changed(office: Office, ada: Visitor) -> None:
    dfid = office.hand_over("C-1", refund("40.00"))
    path = f"/console/cases/claims/{dfid}"
    page = ada.get(path).text
    looked, shown = (re.search(f'name="{name}" value="([^"]*)"', page) for name in ("seen", "shown"))
    assert looked is not None
    assert shown is not None
    office.tickets.put("T-C-1", refundable_minor=9_000)
    fields = {"decision": "OVERRIDE", "reason": "checked", "acknowledge": "yes", "seen": looked[1]}
    answer = ada.sends(path, **fields, shown=html.unescape(shown[1]))
    assert 409 == answer.status_code
    said = text(answer.text)
    assert "the state has moved" in said
    assert "ticket.refundable_minor 200.00 EUR 200.00 EUR 90.00 EUR changed since you looked" in said
    assert "ESCALATED" == office.answer(dfid).state
    assert 303 == ada.sends(path, **(fields | {"seen": seen(ada, path)})).status_code


@pytest.mark.parametrize(
    "shown", [r'{"%s": "\ud800"}', r'{"%s\udfff": "1"}', r'{"\ud800": "1", "%s": "2"}', "[" * 9_000]
)
def test_a_page_that_shows_what_it_cannot_hold_is_refused_all_the_same(
    office: Office, ada: Visitor, shown: str
) -> None:
    path = f"/console/cases/claims/{office.hand_over('C-1', refund('40.00'))}"
    looked = seen(ada, path)
    office.tickets.put("T-C-1", refundable_minor=9_000)
    fields = {"decision": "OVERRIDE", "reason": "checked", "acknowledge": "yes", "seen": looked}
    answer = ada.sends(path, **fields, shown=shown.replace("%s", "ticket.refundable_minor"))
    assert 409 == answer.status_code
    assert "the state has moved" in text(answer.text)


def test_of_two_who_decide_a_case_the_second_learns_who_was_first(office: Office, ada: Visitor) -> None:
    dfid = office.hand_over("C-1", refund("40.00"))
    path = f"/console/cases/claims/{dfid}"
    with Visitor(office) as bob:
        bob.log_in(office.key("bob"))
        bob.sends(path, decision="ABORT", reason="withdrawn")
    answer = ada.sends(path, decision="OVERRIDE", reason="checked", acknowledge="yes")
    assert 409 == answer.status_code
    assert "this case is resolved already: ABORT by bob" in answer.text
    assert [] == office.rail.paid()


def test_an_order_that_nobody_knows_the_end_of_is_settled_or_rejected(office: Office, ada: Visitor) -> None:
    paid, lost = office.unknown("H-1"), office.unknown("H-2")
    fields = {"reason": "looked it up", "acknowledge": "yes"}
    answer = ada.sends(f"/console/cases/holds/{paid}", **fields, decision="SETTLED", reference=" B-77 ")
    assert 303 == answer.status_code
    assert 303 == ada.sends(f"/console/cases/holds/{lost}", **fields, decision="REJECTED").status_code
    ends = [office.answer(dfid, office.holds) for dfid in (paid, lost)]
    assert [("SUCCESS", "B-77"), ("FAILED", None)] == [(each.execution, each.reference) for each in ends]


def test_an_unknown_order_is_final_only_with_the_box(office: Office, ada: Visitor) -> None:
    dfid = office.unknown("H-1")
    answer = ada.sends(f"/console/cases/holds/{dfid}", decision="REJECTED", reason="not there")
    assert 409 == answer.status_code
    assert "that cannot be undone" in answer.text
    assert "UNKNOWN" == office.answer(dfid, office.holds).execution


def test_where_the_state_cannot_be_read_a_case_can_still_be_ended(office: Office, ada: Visitor) -> None:
    dfid = office.hand_over("C-1", refund("40.00"))
    office.tickets.down = True
    path = f"/console/cases/claims/{dfid}"
    page = ada.get(path).text
    assert "Override" not in page
    assert 303 == ada.sends(path, decision="ABORT", reason="withdrawn").status_code


def test_while_everything_is_halted_a_case_can_only_be_returned_or_ended(office: Office, ada: Visitor) -> None:
    path = f"/console/cases/claims/{office.hand_over('C-1', refund('40.00'))}"
    registry.set_halted(office.claims.store, True, by="ops", reason="wrong fares", now_ms=office.clock())
    page = text(ada.get(path).text)
    assert "Halted: claims." in page
    assert "Now: an operator has halted the system" in page
    assert "You can only return the case to the agent or end it." in page
    answer = ada.sends(path, decision="OVERRIDE", reason="checked", acknowledge="yes")
    assert 409 == answer.status_code
    assert 303 == ada.sends(path, decision="ABORT", reason="withdrawn").status_code


def test_what_there_is_not_is_answered_with_a_page(ada: Visitor) -> None:
    for path in ("cases/claims/none", "cases/nowhere/none", "decisions/claims/none", "cases/claims/%3Cscript%3E"):
        answer = ada.get(f"/console/{path}")
        assert 404 == answer.status_code
        assert answer.headers["content-type"].startswith("text/html")
        assert "<script>" not in answer.text


def test_a_case_of_a_gate_that_is_served_no_longer_is_refused_and_nothing_else_is(
    office: Office, ada: Visitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, other = f"/console/cases/claims/{office.hand_over('C-1')}", office.unknown("H-1")
    csrf, state = ada.csrf(), office.app.state.service
    served = {name: gate for name, gate in state.gates.items() if name != "claims"}
    monkeypatch.setattr(state, "gates", OpenGates(served))
    for answer in (ada.get(path), ada.post(path, data={"csrf": csrf, "decision": "ABORT", "reason": "withdrawn"})):
        assert 404 == answer.status_code
        assert "Its cases stay in its record, and wait there." in text(answer.text)
    assert f"/console/cases/holds/{other}" == ada.get(f"/console/next?after={path[15:]}").headers["location"]
    assert [200, 200] == [ada.get(page).status_code for page in ("/console?gate=claims", "/console/live")]


def test_a_case_is_returned_to_the_agent(office: Office, ada: Visitor) -> None:
    dfid = office.hand_over("C-1")
    path = f"/console/cases/claims/{dfid}"
    assert "Return to the agent" in ada.get(path).text
    assert 303 == ada.sends(path, decision="RETURN", reason="the model is back").status_code
    assert ("RETURN", "ada", True) == (
        office.answer(dfid).resolution,
        office.answer(dfid).resolved_by,
        office.answer(dfid).retryable,
    )
    assert dfid != office.hand_over("C-1")


def test_a_case_that_cannot_be_read_is_listed_and_hides_no_other(office: Office, ada: Visitor) -> None:
    damaged, whole = office.hand_over("C-1", refund()), office.hand_over("C-2", refund())
    with office.claims.store.transaction():
        office.claims.store.run("UPDATE context_snapshots SET body = 'x' WHERE dfid = ?", (damaged,))
    page = ada.get("/console").text
    assert f"/{whole}" in page
    assert f"/{damaged}" not in page
    assert "C-1 no proposal The record of this case is damaged. Tell an operator, who runs: sds ledger verify." in text(
        page
    )
    for path in (f"cases/claims/{damaged}", f"decisions/claims/{damaged}"):
        answer = ada.get(f"/console/{path}")
        assert 503 == answer.status_code
        assert "cannot be read" in answer.text


@pytest.mark.parametrize("readable", [True, False])
def test_where_the_store_fails_once_a_decision_is_committed_nobody_is_told_that_it_was_not_made(
    office: Office, ada: Visitor, monkeypatch: pytest.MonkeyPatch, readable: bool
) -> None:
    dfid = office.hand_over("C-1")
    path = f"/console/cases/claims/{dfid}"
    decide = review.decide

    def away(*_given: object, **_how: object) -> object:
        raise StoreError("the store does not answer")

    def lost(*given: Any) -> object:
        decide(*given)
        if not readable:
            monkeypatch.setattr(actions, "show_case", away)
        return away()

    monkeypatch.setattr(review, "decide", lost)
    answer = ada.sends(path, decision="ABORT", reason="settled by hand")
    assert (503, True, False) == (
        answer.status_code,
        "Not known whether it was done" in answer.text,
        "Not done" in answer.text,
    )
    assert "ABORT" == office.answer(dfid).resolution


def test_a_difference_to_the_outside_can_only_be_ended(office: Office, ada: Visitor) -> None:
    office.tickets.put("T-1")
    differs = Difference("AMOUNT_DIFFERS", "k" * 64, "", "T-1", "paid 40.00", "paid 50.00 <b>")
    (dfid,) = open_cases(office.claims.store, office.claims.contract, [differs], now_ms=office.clock())
    path = f"/console/cases/claims/{dfid}"
    shown = text(ada.get(path).text)
    assert "The record and the external system do not agree." in shown
    assert "outside: paid 50.00 <b>" in shown
    assert "Return to the agent" not in shown
    assert "You can only end the case." in shown
    assert 303 == ada.sends(path, decision="ABORT", reason="settled by hand").status_code


# --- the record --------------------------------------------------------------------------------------------------------


def test_a_decision_is_shown_from_trigger_to_receipt(office: Office, ada: Visitor) -> None:
    dfid = office.hand_over("C-1", refund("40.00"), ATTACK)
    path = f"/console/cases/claims/{dfid}"
    ada.sends(path, decision="OVERRIDE", reason="checked", seen=seen(ada, path), acknowledge="yes")
    page = ada.get(f"/console/decisions/claims/{dfid}").text
    shown = text(page)
    for part in (
        "Event",
        "State, as the agent read it",
        "What the model read",
        "Proposal",
        "Verdict",
        "Order",
        "Ledger",
    ):
        assert f">{part}</h2>" in page
    assert "A human's decision decision OVERRIDE who ada reason checked" in shown
    assert "DECIDED" in shown
    assert "SETTLED" in shown
    assert "<script>" not in page


def test_an_event_and_a_flow_are_found_by_their_ids(office: Office, ada: Visitor) -> None:
    dfid = office.hand_over("C-1", compensate)
    for asked in ("C-1", dfid):
        assert f"/console/decisions/claims/{dfid}" == ada.get("/console/find", params={"q": asked}).headers["location"]
    page = ada.get("/console/find?q=C-2").text
    assert "No event and no decision that you may read" in text(page)
    assert "<title>Nothing found" in page
    with Visitor(office) as bob:
        bob.log_in(office.key("bob", "read", gates=("holds",)))
        assert "No event and no decision that you may read" in text(bob.get("/console/find?q=C-1").text)
