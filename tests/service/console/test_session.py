"""Who gets into the console, for how long, and that a form was sent by a page of it."""

from __future__ import annotations

import html
import re
from pathlib import Path

import pytest

from sds.service.callers import digest_of
from sds.service.console.session import IDLE_MS, OF_KEY_MAX, TRIES_MAX, TRIES_MS, WHOLE_MS, login_csrf
from tests.service.console.office import Office, Visitor, open_office
from tests.service.testbed import NO_HOSTS

POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self';"
    " frame-ancestors 'none'; base-uri 'none'"
)
PRINTED = "sds_" + "p" * 43


PAGES = (
    "",
    "?gate=claims&sort=impact",
    "/live",
    "/cases/claims/x",
    "/decisions/claims/x",
    "/find?q=a%26b%3Dc",
    "/next?after=x",
)


def test_without_a_session_every_page_leads_to_the_log_in_and_the_log_in_to_the_page(office: Office) -> None:
    keys = dict.fromkeys(("x", "sds_" + "x" * 43), 401) | {office.key("ada"): 303}
    with Visitor(office) as nobody:
        for path in PAGES:
            answer = nobody.get(f"/console{path}")
            assert (303, "/console/login") == (answer.status_code, answer.headers["location"].partition("?")[0])
            page = nobody.get(answer.headers["location"])
            for key, status in keys.items():
                page = nobody.post("/console/login", data=carried(page.text) | {"key": key})
                assert status == page.status_code
            assert f"/console{path}" == page.headers["location"]
            nobody.cookies.clear()
        assert 303 == nobody.get("/console/live/now").status_code
        assert 200 == nobody.get("/console/help").status_code


def carried(page: str) -> dict[str, str]:
    """Return the hidden fields of the only form of a page."""
    return {name: html.unescape(text) for name, text in re.findall(r'name="(\w+)" value="([^"]*)"', page)}


def test_a_log_in_leads_to_no_other_address_than_a_page_of_the_console(office: Office) -> None:
    key = office.key("ada")
    for asked in (
        "https://evil.example/",
        "//evil.example/console",
        "/\\evil.example",
        "/console//evil.example",
        "/console@evil.example",
        "/console.evil.example/",
        "/v1/halt",
        "/console/logout",
        "/console/live/claims",
        "/console/live/now",
        "/console?q=" + "x" * 2_000,
    ):
        with Visitor(office) as visitor:
            page = visitor.get("/console/login", params={"asked": asked}).text
            answer = visitor.post("/console/login", data=carried(page) | {"key": key})
        assert (303, "/console") == (answer.status_code, answer.headers["location"]), asked


def test_a_key_opens_a_session_whose_cookie_no_script_and_no_other_site_gets(office: Office) -> None:
    with Visitor(office) as ada:
        answer = ada.log_in(office.key("ada", "review"))
        assert (303, "/console") == (answer.status_code, answer.headers["location"])
        cookie = next(each for each in answer.headers.get_list("set-cookie") if "sds_session=" in each)
        assert cookie.startswith("__Host-sds_session=")
        assert {"HttpOnly", "Secure", "SameSite=strict", "Path=/"} <= set(cookie.split("; "))
        assert 200 == ada.get("/console").status_code


def test_a_cookie_is_sent_without_tls_to_this_machine_alone(office: Office) -> None:
    for address, secure in (
        ("http://127.0.0.1:8080", False),
        ("http://localhost", False),
        ("https://127.0.0.1", True),
        ("http://x.example", True),
    ):
        with Visitor(office, address) as visitor:
            cookie = visitor.get("/console/login").headers["set-cookie"]
            assert secure == ("; Secure" in cookie) == cookie.startswith("__Host-")


@pytest.mark.parametrize("host", NO_HOSTS)
def test_a_cookie_needs_tls_where_the_request_names_no_host(office: Office, host: str) -> None:
    with Visitor(office, "http://127.0.0.1:8080") as visitor:
        cookie = visitor.get("/console/login", headers={"Host": host.encode("latin-1")}).headers["set-cookie"]
    assert cookie.startswith("__Host-")
    assert "; Secure" in cookie


@pytest.mark.parametrize(
    "said", ["X-Forwarded-Proto", "X-Forwarded-For", "X-Forwarded-Host", "X-Real-IP", "Forwarded", "Via"]
)
def test_a_cookie_needs_tls_where_a_proxy_asks_for_somebody_under_this_machines_name(office: Office, said: str) -> None:
    with Visitor(office, "http://127.0.0.1:8080") as visitor:
        cookie = visitor.get("/console/login", headers={said: "x"}).headers["set-cookie"]
    assert cookie.startswith("__Host-")
    assert "; Secure" in cookie


def test_the_database_holds_neither_cookie_nor_key(office: Office, ada: Visitor) -> None:
    with office.database.reading() as connection:
        kept = repr(connection.exec_driver_sql("SELECT * FROM sessions").all())
    assert ada.cookies["__Host-sds_session"] not in kept
    assert "sds_" not in kept


def test_what_is_no_key_does_not_open_it(office: Office) -> None:
    with Visitor(office) as visitor:
        for key in ("", "sds_" + "x" * 43, "nonsense", "\u00e4" * 100):
            answer = visitor.log_in(key)
            assert 401 == answer.status_code
            assert "This key does not open the console." in answer.text
            assert re.search('id="key"[^>]* aria-invalid="true" aria-describedby="refused"', answer.text)
        assert "__Host-sds_session" not in visitor.cookies


def test_a_key_that_may_only_submit_does_not_open_it(office: Office) -> None:
    with Visitor(office) as shop:
        assert 401 == shop.log_in(office.key("shop", "submit")).status_code


def test_the_key_that_a_development_service_prints_opens_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        open_office(tmp_path, monkeypatch.setenv, dev_keys=(digest_of(PRINTED),)) as office,
        Visitor(office, "http://127.0.0.1:8080") as visitor,
    ):
        assert "/console" == visitor.log_in(PRINTED).headers["location"]
        assert 200 == visitor.get("/console").status_code


def test_who_tries_wrong_keys_too_often_waits_a_minute_and_keeps_nobody_with_a_right_one_out(office: Office) -> None:
    key = office.key("ada")
    with Visitor(office) as visitor, Visitor(office) as ada:  # of one address
        csrf = visitor.csrf("/console/login")
        tries = [visitor.post("/console/login", data={"csrf": csrf, "key": "x"}) for _ in range(TRIES_MAX)]
        assert {401} == {each.status_code for each in tries}
        answer = visitor.log_in("sds_" + "x" * 43)
        assert 429 == answer.status_code
        assert 0 < int(answer.headers["retry-after"]) <= 1 + TRIES_MS // 1000
        assert 303 == ada.log_in(key).status_code
        assert 429 == visitor.log_in("x").status_code
        later_ms = office.clock() + TRIES_MS + 1
        office.clock = lambda: later_ms
        assert 401 == visitor.log_in("x").status_code


def test_what_has_not_the_form_of_a_key_is_refused_without_the_database(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(office.app.state.service.callers, "look_up", asked.append)
    with Visitor(office) as visitor:
        for key in ("", "x", "sds_short", "sds_" + "x" * 44):
            assert 401 == visitor.log_in(key).status_code
        assert [] == asked
        visitor.log_in("sds_" + "x" * 43)
    assert 1 == len(asked)


def test_the_log_in_form_is_refused_without_its_cookie(office: Office) -> None:
    key = office.key("ada")
    with Visitor(office) as visitor:
        for token in (login_csrf(""), visitor.csrf("/console/login")):
            visitor.cookies.clear()
            answer = visitor.post("/console/login", data={"csrf": token, "key": key})
            assert 403 == answer.status_code
            assert "__Host-sds_session" not in visitor.cookies


def test_logging_out_ends_the_session_for_whoever_has_the_cookie(ada: Visitor) -> None:
    cookie = ada.cookies["__Host-sds_session"]
    assert 303 == ada.sends("/console/logout").status_code
    ada.cookies.set("__Host-sds_session", cookie)
    assert 303 == ada.get("/console").status_code


def test_a_revoked_key_ends_its_session_at_once(office: Office, ada: Visitor) -> None:
    office.revoke("ada")
    assert "/console/login" == ada.get("/console").headers["location"]


def test_who_sends_a_form_after_the_session_ended_is_told_that_nothing_was_done(office: Office, ada: Visitor) -> None:
    path = f"/console/cases/claims/{office.hand_over('C-1')}"
    csrf = ada.csrf(path)
    office.revoke("ada")
    for form in (path, f"{path}/take", "/console/live/claims"):
        fields = {"csrf": csrf, "decision": "ABORT", "reason": "withdrawn", "act": "halt"}
        answer = ada.post(form, data=fields)
        assert 307 == answer.status_code
        assert "what you sent was not done" in ada.post(answer.headers["location"], data=fields).text
    assert "ESCALATED" == office.answer(path.rpartition("/")[2]).state
    assert "what you sent was not done" not in ada.get("/console/login").text


@pytest.mark.parametrize("path", ["/console/cases/claims/{dfid}", "/console/live/claims"])
def test_what_was_typed_before_the_session_ended_is_there_after_the_next_log_in(office: Office, path: str) -> None:
    dfid, reason = office.hand_over("C-1"), 'said "no" & left'
    path = path.format(dfid=dfid)
    with Visitor(office) as bob:
        bob.log_in(office.key("bob"))
        fields = {"csrf": bob.csrf(), "decision": "ABORT", "act": "halt", "agent": "", "reason": reason}
        bob.cookies.delete("__Host-sds_session")
        page = bob.post(bob.post(path, data=fields).headers["location"], data=fields).text
        for key in ("sds_" + "x" * 43, office.key("new")):
            page = bob.post("/console/login", data=carried(page) | {"key": key}).text
        assert "what you sent was not done" in page
        assert html.escape(reason).replace("&quot;", "&#34;") in page
        assert 200 == bob.get("/console").status_code
    assert "ESCALATED" == office.answer(dfid).state
    assert not office.claims.store.halted


def test_a_case_is_not_taken_by_an_old_page_which_leads_on_to_the_case(office: Office, ada: Visitor) -> None:
    case = f"/console/cases/claims/{office.hand_over('C-1')}"
    fields = {"csrf": ada.csrf(), "take": "yes", "holder": ""}
    ada.log_in(office.key("new"))
    answer = ada.post(f"{case}/take", data=fields)
    assert 403 == answer.status_code
    assert "You have logged in anew since you looked." in answer.text
    assert "Nobody has taken this case." in answer.text
    ada.cookies.delete("__Host-sds_session")
    page = ada.post(ada.post(f"{case}/take", data=fields).headers["location"], data=fields).text
    assert case == ada.post("/console/login", data=carried(page) | {"key": office.key("newer")}).headers["location"]
    assert "Nobody has taken this case." in ada.get(case).text


def test_an_old_page_logs_out_nobody_else_and_is_answered_with_where_one_stands(office: Office, ada: Visitor) -> None:
    old = ada.csrf()
    ada.log_in(office.key("new"))
    answer = ada.post("/console/logout", data={"csrf": old})
    assert (403, True) == (answer.status_code, "and are still logged in" in answer.text)
    found = re.search(r'action="/console/logout"><input type="hidden" name="csrf" value="([0-9a-f]{64})"', answer.text)
    assert found is not None
    for csrf in (found[1], found[1], old):
        answer = ada.post("/console/logout", data={"csrf": csrf})
        assert (303, "/console/login") == (answer.status_code, answer.headers["location"])
    assert 303 == ada.get("/console").status_code


def test_an_address_without_a_page_is_answered_with_one_and_that_of_a_form_leads_to_its_page(
    office: Office, ada: Visitor
) -> None:
    case = f"/console/cases/claims/{office.hand_over('C-1')}"
    with Visitor(office) as nobody:
        for visitor, path in ((ada, "nosuch"), (nobody, "nosuch"), (ada, "a/b/c/d"), (ada, "take/x")):
            for answer in (visitor.get(f"/console/{path}"), visitor.post(f"/console/{path}", data={"q": "x"})):
                assert (404, "text/html; charset=utf-8") == (answer.status_code, answer.headers["content-type"])
                assert (visitor is ada) == ("Log out" in answer.text)
    forms = {f"{case}/take": case, f"{case}/": case, "/console/live/claims": "/console/live", "/console/": "/console"}
    for path, page in (forms | {"/console/logout": "/console"}).items():
        answer = ada.get(path)
        assert (303, page) == (answer.status_code, answer.headers["location"]), path


def test_a_session_asks_as_often_as_its_key_may_and_no_more(office: Office, ada: Visitor) -> None:
    begun_ms = office.clock()
    office.clock = lambda: begun_ms
    key, burst = office.key("bob"), office.settings.rate_burst
    for _ in range(burst - 2):
        office.app.state.service.callers.take_turn(digest_of(key))
    with Visitor(office) as bob:
        assert [303, 200] == [bob.log_in(key).status_code, bob.get("/console").status_code]
        for refused in (bob.get("/console"), bob.get("/console/live"), bob.log_in(key)):
            assert 429 == refused.status_code
        assert 429 == bob.get("/v1/gates", headers={"Authorization": f"Bearer {key}"}).status_code
    assert 200 == ada.get("/console").status_code


def test_a_key_has_so_many_sessions_at_most_and_the_oldest_ends(office: Office, ada: Visitor) -> None:
    key, begun_ms = office.key("bob"), office.clock()
    visitors = [Visitor(office) for _ in range(OF_KEY_MAX + 1)]
    for turn, visitor in enumerate(visitors):
        office.clock = lambda turn=turn: begun_ms + turn
        assert 303 == visitor.log_in(key).status_code
    assert [303, 200, 200] == [each.get("/console").status_code for each in (visitors[0], visitors[1], visitors[-1])]
    assert 200 == ada.get("/console").status_code


@pytest.mark.parametrize(("step_ms", "times"), [(IDLE_MS, 1), (IDLE_MS // 2, WHOLE_MS // (IDLE_MS // 2))])
def test_a_session_ends_when_nothing_is_done_and_after_half_a_day(
    office: Office, ada: Visitor, step_ms: int, times: int
) -> None:
    begun_ms = office.clock()
    seen = []
    for turn in range(1, times + 1):
        office.clock = lambda turn=turn: begun_ms + turn * step_ms + 1_000
        seen.append(ada.get("/console").status_code)
    assert [200] * (times - 1) + [303] == seen


def test_what_a_live_page_asks_by_itself_does_not_prolong_its_session(office: Office, ada: Visitor) -> None:
    begun_ms, seen = office.clock(), []
    for turn in range(1, 5):
        office.clock = lambda turn=turn: begun_ms + turn * IDLE_MS // 3
        seen.append(ada.get("/console/live/now").status_code)
    assert [200, 200, 303, 303] == seen


@pytest.mark.parametrize("path", ["logout", "cases/claims/{dfid}", "cases/claims/{dfid}/take", "live/claims", "login"])
def test_a_form_without_the_token_of_its_session_does_nothing(office: Office, ada: Visitor, path: str) -> None:
    dfid = office.hand_over("C-1")
    fields = {"decision": "ABORT", "act": "halt", "reason": "forged", "take": "yes", "key": "x"}
    for forged in ({}, {"csrf": ""}, {"csrf": "0" * 64}, {"csrf": "\u00e4"}):
        assert 403 == ada.post(f"/console/{path.format(dfid=dfid)}", data=fields | forged).status_code
    assert "ESCALATED" == office.answer(dfid).state
    assert not office.claims.store.halted
    assert 200 == ada.get("/console").status_code


def test_a_form_that_another_site_sent_does_nothing_even_with_the_token(office: Office, ada: Visitor) -> None:
    dfid = office.hand_over("C-1")
    fields = {"csrf": ada.csrf(), "decision": "ABORT", "reason": "forged"}
    for site in ("cross-site", "same-site"):
        answer = ada.post(f"/console/cases/claims/{dfid}", data=fields, headers={"Sec-Fetch-Site": site})
        assert 403 == answer.status_code
    assert "ESCALATED" == office.answer(dfid).state


def test_the_token_of_another_session_is_none(office: Office, ada: Visitor) -> None:
    with Visitor(office) as bob:
        bob.log_in(office.key("bob"))
        assert 403 == ada.post("/console/logout", data={"csrf": bob.csrf()}).status_code


def test_every_page_has_its_headers_and_nothing_inline(office: Office, ada: Visitor) -> None:
    dfid = office.hand_over("C-1")
    paths = [
        "",
        "/live",
        "/live/now",
        f"/cases/claims/{dfid}",
        f"/decisions/claims/{dfid}",
        "/find?q=x",
        "/help",
        "/login",
    ]
    paths += ["/cases/claims/none", "/cases/none/none"]
    for path in paths:
        answer = ada.get(f"/console{path}")
        assert POLICY == answer.headers["content-security-policy"]
        assert "no-store" == answer.headers["cache-control"]
        assert ("nosniff", "DENY", "no-referrer") == tuple(
            answer.headers[name] for name in ("x-content-type-options", "x-frame-options", "referrer-policy")
        )
        for inline in (" style=", "<style", "onclick", "javascript:", "<script>"):
            assert inline not in answer.text


def test_a_file_is_sent_once_and_then_asked_for(office: Office) -> None:
    with Visitor(office) as nobody:
        for name in ("console.css", "console.js", "icon.svg"):
            first = nobody.get(f"/console/static/{name}")
            assert 200 == first.status_code
            again = nobody.get(f"/console/static/{name}", headers={"If-None-Match": first.headers["etag"]})
            assert (304, b"") == (again.status_code, again.content)
        assert 404 == nobody.get("/console/static/..%2Froutes.py").status_code


FORM = "application/x-www-form-urlencoded"


def test_what_is_no_form_is_refused_with_a_page(ada: Visitor) -> None:
    for body, kind, status in (
        (b"{}", "application/json", 415),
        (b"csrf=%ff", FORM, 400),
        (b"csrf=a&csrf=b", FORM, 400),
        (b"&".join(b"a%d=1" % n for n in range(100)), FORM, 400),
        (b"a=" + b"b" * 70_000, FORM, 413),
    ):
        answer = ada.post("/console/logout", content=body, headers={"Content-Type": kind})
        assert status == answer.status_code
        assert answer.headers["content-type"].startswith("text/html")
