"""Whatever goes wrong, a person gets a page of the console: what happened, whether anything was done, and what to do next."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest
from httpx2 import Response

from sds.kernel.errors import StoreError
from sds.service import review
from sds.service.console import live, rendering, routes, taken
from tests.service.console.office import Office, Visitor, text

FAULT = "a secret of the fault"


def fails(*_given: object, **_how: object) -> object:
    raise RuntimeError(FAULT)


def away(*_given: object, **_how: object) -> object:
    raise StoreError("the store does not answer")


def page_of(answer: Response, status: int) -> str:
    """Return the words of a page that answers with this status. It has the layout and the headers of every page."""
    assert (status, "text/html; charset=utf-8") == (answer.status_code, answer.headers["content-type"])
    assert answer.headers["content-security-policy"] == rendering.POLICY
    assert "<title>Error: " in answer.text
    assert ("Decision console</title>" in answer.text, 1) == (True, answer.text.count("<h1>"))
    assert "Back to the console" in answer.text
    return text(answer.text)


PLACES = {  # what fails, on which page
    "/console": (routes, "waiting"),
    "/console/cases/claims/{dfid}": (routes, "case_page"),
    "/console/live": (live, "gate_now"),
    "/console/live/now": (live, "gate_now"),
    "/console/decisions/claims/{dfid}": (routes, "decision_page"),
    "/console/find?q=x": (review, "can_be_held"),
}


@pytest.mark.parametrize("path", PLACES)
def test_a_fault_on_a_page_is_answered_with_a_page_that_says_nothing_of_it_and_names_the_line_of_the_log(
    office: Office, ada: Visitor, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    logged: list[tuple[str, Mapping[str, object]]] = []
    monkeypatch.setattr(office.app.state.service, "log", lambda event, facts: logged.append((event, facts)))
    dfid = office.hand_over("C-1")
    monkeypatch.setattr(*PLACES[path], fails)
    shown = page_of(ada.get(path.format(dfid=dfid)), 500)
    for said in ("A fault in the console", "Nothing was changed", "Tell an operator", "Log out"):
        assert said in shown
    assert FAULT not in shown
    found = re.search(r"urn:sds:[0-9a-f]{32}", shown)
    assert found is not None
    assert [("service.failed", found[0], "RuntimeError")] == [
        (event, facts["instance"], facts["kind"]) for event, facts in logged
    ]
    assert 'sds_refusals_total{code="INTERNAL"} 1.0' in office.app.state.operations.metrics.render().decode()


def test_a_fault_while_a_form_is_done_says_that_it_may_have_been_done_and_where_to_look(
    office: Office, ada: Visitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = f"/console/cases/claims/{office.hand_over('C-1')}"
    forms = {page: page, f"{page}/take": page, "/console/live/claims": "/console/live"}
    csrf = ada.csrf()
    monkeypatch.setattr(review, "decide", fails)
    monkeypatch.setattr(taken, "take", fails)
    monkeypatch.setattr(review, "set_halted", fails)
    for form, leads in forms.items():
        fields = {"csrf": csrf, "decision": "ABORT", "act": "halt", "take": "yes", "reason": "withdrawn"}
        answer = ada.post(form, data=fields)
        shown = page_of(answer, 500)
        assert "Not known whether it was done" in shown
        assert f'<a href="{leads}">Look whether it was done</a>' in answer.text


def test_a_fault_where_it_is_read_what_every_page_shows_is_answered_with_a_page(
    office: Office, ada: Visitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendering, "_halted", fails)
    assert "A fault in the console" in page_of(ada.get("/console"), 500)


@pytest.mark.parametrize("method", ["HEAD", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_a_method_that_no_page_has_is_answered_with_a_page(ada: Visitor, method: str) -> None:
    for path in ("/console", "/console/live", "/console/cases/claims/x", "/console/login", "/console/nosuch"):
        answer = ada.request(method, path)
        assert (405, "GET, POST") == (answer.status_code, answer.headers["allow"])
        assert method == "HEAD" or "Nothing was changed" in page_of(answer, 405)


def test_too_many_pages_too_long_a_form_and_a_service_that_stops_are_said_with_what_to_do(
    office: Office, ada: Visitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {"csrf": ada.csrf(), "reason": "x" * 70_000}
    shown = page_of(ada.post("/console/live/claims", data=fields), 413)
    assert "Not done What was sent is too long. Go back to the page, shorten what you typed" in shown
    monkeypatch.setattr(office.app.state.service, "gates_closed", True)
    assert "being stopped or restarted. Load the page again in a minute." in page_of(ada.get("/console"), 503)
    begun_ms = office.clock()
    office.clock = lambda: begun_ms
    answers = [ada.get("/console/help") for _ in range(office.settings.rate_burst + 1)]
    assert "Wait a moment, then load the page again." in page_of(answers[-1], 429)


@pytest.mark.parametrize("path", ["/console", "/console/live", "/console/help", "/console/login", "/console/find?q=x"])
def test_a_store_that_is_down_is_said_on_every_page(
    office: Office, ada: Visitor, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(office.database, "reading", away)
    answer = ada.get(path)
    if path != "/console/login":  # it reads nothing
        assert "the store does not answer" in page_of(answer, 503)


def test_api_paths_answer_with_problems_as_before(
    office: Office, ada: Visitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = {"Authorization": f"Bearer {office.key('bob')}"}
    monkeypatch.setattr(type(office.app.state.service), "gates_of", fails)
    for answer in (
        ada.get("/v1/gates", headers=key),
        ada.get("/v1/nosuch"),
        ada.put("/v1/gates"),
        ada.get("/consoles"),
    ):
        assert "application/problem+json" == answer.headers["content-type"]
