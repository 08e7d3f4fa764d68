"""After a refusal the browser is at a page, which says what was refused, once, and has what was typed."""

from __future__ import annotations

from starlette.testclient import TestClient

from sds.service.console.session import page_of
from tests.service.console.office import Office, Visitor


def test_a_refused_form_leads_to_its_page_which_says_so_once(office: Office, ada: Visitor) -> None:
    case, other = (f"/console/cases/claims/{office.hand_over(name)}" for name in ("C-1", "C-2"))
    forms = {
        case: ("abort-reason", {"decision": "ABORT"}),
        "/console/live/claims": ("claims-halt--reason", {"act": "halt"}),
    }
    for form, (field, fields) in forms.items():
        page, said = page_of(form), "\u05d0\U0001f600" * 100
        fields |= {"csrf": ada.csrf(), "reason": f"{said} {'x' * 400}", "agent": ""}
        answer = TestClient.post(ada, form, data=fields)
        assert (303, page) == (answer.status_code, answer.headers["location"])
        assert said not in answer.headers["location"]
        (cookie,) = answer.headers.get_list("set-cookie")
        assert {"HttpOnly", "Secure", "SameSite=strict", "Max-Age=60"} <= set(cookie.split("; "))
        assert len(cookie) < 4_096
        assert "Not done" not in ada.get(other).text
        shown = ada.get(page).text
        assert ("the reason has 601 characters" in shown, f'id="{field}"' in shown, said in shown) == (True, True, True)
        assert "Not done" not in ada.get(page).text


def test_what_no_cookie_can_hold_is_answered_with_the_page(office: Office, ada: Visitor) -> None:
    for form in (f"/console/cases/claims/{office.hand_over('C-1')}", "/console/live/claims"):
        fields = {"csrf": ada.csrf(), "decision": "ABORT", "act": "halt", "agent": "", "reason": "x" * 4_000}
        answer = TestClient.post(ada, form, data=fields)
        assert (409, 1) == (answer.status_code, answer.text.count(f'value="{fields["reason"]}"'))
        assert "set-cookie" not in answer.headers


def test_no_page_shows_a_refusal_that_no_page_of_its_session_made(office: Office, ada: Visitor) -> None:
    case = f"/console/cases/claims/{office.hand_over('C-1')}"
    TestClient.post(ada, case, data={"csrf": ada.csrf(), "decision": "ABORT", "reason": " "})
    made = ada.cookies["__Host-sds_refused"]
    for forged in (made.replace(".", ".A", 1), "0" * 64 + made[64:], made[:64], ".", "x.y", made[:-1]):
        ada.cookies.set("__Host-sds_refused", forged, domain="console.example")
        assert "Not done" not in ada.get(case).text
    ada.log_in(office.key("new"))
    ada.cookies.set("__Host-sds_refused", made, domain="console.example")
    assert "Not done" not in ada.get(case).text
