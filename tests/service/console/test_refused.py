"""After a refusal the browser is at a page, which says what was refused, once, and has what was typed."""

from __future__ import annotations

import hmac
import json
import zlib
from base64 import urlsafe_b64encode
from secrets import token_hex

import pytest
from starlette.testclient import TestClient

from sds.service.console.session import page_of
from tests.service.console.office import Office, Visitor, text


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
        fields = {"csrf": ada.csrf(), "decision": "ABORT", "act": "halt", "agent": "", "reason": token_hex(4_000)}
        answer = TestClient.post(ada, form, data=fields)
        assert (409, 1) == (answer.status_code, answer.text.count(f'value="{fields["reason"]}"'))
        assert "set-cookie" not in answer.headers


def test_a_long_reason_in_words_stays_on_its_page_and_is_not_sent_again_by_reload(office: Office, ada: Visitor) -> None:
    case = f"/console/cases/claims/{office.hand_over('C-1')}"
    said = " ".join(f"On day {day} the customer called again about claim {day * 7919}." for day in range(90))
    assert 4_500 < len(said)
    answer = TestClient.post(ada, case, data={"csrf": ada.csrf(), "decision": "ABORT", "reason": said})
    assert (303, case) == (answer.status_code, answer.headers["location"])
    assert len(answer.headers["set-cookie"]) < 4_096
    assert f'value="{said}"' in ada.get(case).text


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


def test_a_refusal_that_another_version_of_the_service_wrote_hides_no_page(office: Office, ada: Visitor) -> None:
    case = f"/console/cases/claims/{office.hand_over('C-1')}"
    whole = {"page": case, "status": 409, "refusal": {"message": "no"}}
    others = [json.dumps(each).encode() for each in ({"page": case}, whole | {"refusal": {"what": "no"}})]
    for written in (*map(zlib.compress, others), json.dumps(whole).encode(), zlib.compress(b"no JSON"), b""):
        data = urlsafe_b64encode(written)
        seal = hmac.new(ada.csrf().encode(), data, "sha256").hexdigest()
        ada.cookies.set("__Host-sds_refused", f"{seal}.{data.decode()}", domain="console.example")
        assert (200, False) == ((shown := ada.get(case)).status_code, "Not done" in shown.text)


@pytest.mark.parametrize("path", ["/console/cases/claims/{dfid}", "/console/live/claims"])
def test_a_form_of_an_earlier_session_does_nothing_and_keeps_what_was_typed(
    office: Office, ada: Visitor, path: str
) -> None:
    dfid = office.hand_over("C-1")
    fields = {"csrf": ada.csrf(), "decision": "ABORT", "act": "halt", "agent": "", "reason": "withdrawn"}
    ada.log_in(office.key("new"))
    answer = ada.post(path.format(dfid=dfid), data=fields)
    assert (403, 1) == (answer.status_code, answer.text.count('value="withdrawn"'))
    assert "ESCALATED" == office.answer(dfid).state
    assert not office.claims.store.halted


def test_a_reason_is_kept_whole_or_refused_and_no_field_cuts_what_is_pasted(office: Office, ada: Visitor) -> None:
    dfid = office.hand_over("C-1")
    path, fields = f"/console/cases/claims/{dfid}", {"decision": "ABORT", "reason": "x" * 501}
    refused = ada.sends(path, **fields)
    assert (409, True) == (refused.status_code, f'value="{fields["reason"]}"' in refused.text)
    assert "the reason has 501 characters, and the record keeps 500" in text(refused.text)
    assert "ESCALATED" == office.answer(dfid).state
    assert "maxlength" not in refused.text + ada.get("/console/live").text
    kept = "  ".join(["y" * 249] * 2) + " "
    assert 303 == ada.sends(path, **fields | {"reason": kept}).status_code
    assert " ".join(kept.split()) in ada.get(path).text
    reference = "B" * 300
    unknown = office.unknown("H-1")
    fields |= {"decision": "SETTLED", "reference": reference, "reason": "seen", "acknowledge": "yes"}
    refused = ada.sends(f"/console/cases/holds/{unknown}", **fields)
    assert (409, True) == (refused.status_code, f'value="{reference}"' in refused.text)
    assert "the reference has 300 characters, and the record keeps 200" in text(refused.text)
    assert "UNKNOWN" == office.answer(unknown, office.holds).execution
