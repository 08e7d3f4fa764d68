"""No page prints a character that cannot be seen, or that turns a line round, whoever wrote the text: it is spelled out."""

from __future__ import annotations

import html
import json

from sds.kernel.canonical import is_seen
from tests.kernel.durable import escalate, refund
from tests.service.console.office import Office, Visitor

ODD = "x\x1b[2J\u202egpj\x00\u200b\u3164\x9b\ufe0f\r"
SPELLED = "x\\x1b[2J\\u202egpj\\x00\\u200b\\u3164\\x9b\\ufe0f\\r"


def unseen(page: str) -> set[str]:
    return {char for char in html.unescape(page) if not (is_seen(char) or char in "\n\t")}


def test_what_is_refused_is_repeated_with_what_cannot_be_seen_spelled_out(office: Office, ada: Visitor) -> None:
    case = f"/console/cases/claims/{office.hand_over('C-1')}"
    good = {"act": "suspend", "agent": "claims-agent", "reason": "x"}
    modify = {"decision": "MODIFY", "action": "GOODWILL", "code": "APOLOGY", "reason": "x", "number.amount": "15"}
    for path, fields in (
        ("/console/live/claims", {**good, "act": ODD}),
        ("/console/live/claims", {**good, "agent": ODD}),
        (case, {**modify, "decision": ODD}),
        (case, {**modify, "code": ODD}),
        (case, {**modify, "action": ODD}),
        (case, {**modify, "seen": ODD}),
        (f"/console/cases/claims/{'%1b%E2%80%AE%E3%85%A4'}", modify),
        ("/console/live/%1b%E2%80%AE%E3%85%A4", good),
    ):
        answer = ada.sends(path, **fields)
        assert 400 <= answer.status_code < 500
        assert set() == unseen(answer.text), path
    assert SPELLED in html.unescape(ada.get("/console/find", params={"q": f"{ODD}."}).text)


def test_the_state_that_a_form_says_it_showed_is_spelled_out_and_what_was_typed_stays_as_it_was(
    office: Office, ada: Visitor
) -> None:
    path, typed = (
        f"/console/cases/claims/{office.hand_over('C-1')}",
        "na\u200cme",
    )  # a joiner that Persian is written with
    field = next(iter(office.claims.contract.snapshot))
    answer = ada.sends(
        path, decision="MODIFY", action="GOODWILL", code="x", reason=typed, shown=json.dumps({field: ODD})
    )
    assert 409 == answer.status_code
    page = html.unescape(answer.text)
    assert f">{SPELLED}<" in page
    assert f'value="{typed}"' in page
    assert {"\u200c"} == unseen(answer.text)


def test_pages_of_a_record_print_nothing_that_cannot_be_seen(office: Office, ada: Visitor) -> None:
    dfids = [
        office.hand_over("C-1", escalate, ODD.replace("\x00", "")),
        office.hand_over("C-2", refund("40.00"), "\u202eabc"),
    ]
    said = ada.sends(f"/console/cases/claims/{dfids[0]}", decision="ABORT", reason=f"why {ODD}")
    assert 303 == said.status_code
    with office.claims.store.transaction():  # a record that was altered is shown all the same
        office.claims.store.run(
            "UPDATE policy_proposals SET policy_kind = ?, justification = ?", ("A\u202eB", "C\x1b:d")
        )
    for dfid in dfids:
        for path in (f"/console/cases/claims/{dfid}", f"/console/decisions/claims/{dfid}"):
            assert set() == unseen(ada.get(path).text), path
    for path in ("/console", "/console/live", "/console?gate=%E2%80%AE&reason=%1b&sort=%00"):
        assert set() == unseen(ada.get(path).text), path


def test_a_problem_repeats_no_control_character(office: Office) -> None:
    key = {"Authorization": f"Bearer {office.key('shop')}"}
    with Visitor(office) as client:
        for answer in (
            client.put("/v1/halt", headers=key, json={ODD: 1}),
            client.put("/v1/halt", headers=key, json={"halted": True, "reason": "x", "gate": ODD}),
            client.get("/v1/halt", headers=key, params={ODD: "1"}),
            client.post("/v1/agents/%1b%E2%80%AE/suspend", headers=key, json={"reason": "x"}),
            client.post("/v1/agents/claims-agent/%1b%E2%80%AE", headers=key, json={"reason": "x"}),
            client.get("/v1/decisions/%1b%E2%80%AE", headers=key),
            client.get("/v1/decisions?cursor=%1b%E2%80%AE", headers=key),
            client.post("/v1/gates/claims/decisions", headers=key, json={ODD: "x"}),
            client.post("/v1/gates/%1b%E2%80%AE/decisions", headers=key, json={}),
        ):
            assert 400 <= answer.status_code < 500
            problem = answer.json()
            assert problem["detail"].isprintable(), problem
            assert problem["hint"].isprintable(), problem
