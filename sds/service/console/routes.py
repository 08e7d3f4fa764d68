"""The console's GET routes: pages that change nothing. `actions` has the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response
from starlette.datastructures import QueryParams
from starlette.responses import RedirectResponse

from sds.kernel.canonical import one_line
from sds.kernel.errors import SdsError
from sds.kernel.human.review import HumanReview
from sds.kernel.storage.store import Reader
from sds.service import review
from sds.service.console import live, taken
from sds.service.console.case import case_page
from sds.service.console.decision import decision_page
from sds.service.console.queue import QueueRow, Waiting, Wanted, at, following, queue, row, waiting
from sds.service.console.rendering import REFUSED, STATIC, ConsoleRoute, Refused, render, static
from sds.service.console.session import PATH, ConsoleSession, LoggedOutError, Sessions, cookie_of, set_cookie
from sds.service.gates import OpenGate
from sds.service.problems import Problem
from sds.service.state import Service, service

SESSION = "sds_session"

router = APIRouter(prefix=PATH, include_in_schema=False, route_class=ConsoleRoute)


def sessions(request: Request) -> Sessions:
    state = service(request)
    return Sessions(state.database, state.callers, now_ms=state.now_ms, token=request.app.state.token)


def logged_in(request: Request) -> ConsoleSession:
    """Return the session of a request. Raises LoggedOutError, and Problem (429) where its key has asked too often."""
    return _session(request, used=True)


def _session(request: Request, *, used: bool) -> ConsoleSession:
    cookie = cookie_of(request, SESSION)
    session = sessions(request).find(cookie, used=used) if cookie else None
    if session is None:
        raise LoggedOutError
    service(request).callers.take_turn(session.key_digest)
    request.state.session = session
    return session


Me = Annotated[ConsoleSession, Depends(logged_in)]


def allowed(request: Request, me: ConsoleSession, gate: str, role: str, dfid: str = "") -> OpenGate:
    """Return a gate at which the session has a role. Raises Problem: it has not, or there is no such gate or flow."""
    me.caller.check(role, gate)
    state = service(request)
    if not state.gates_closed and state.gates.get(gate) is None:
        detail = f"This service does not serve the gate `{one_line(gate, 80)}`, or does so no longer."
        hint = "Its cases stay in its record, and wait there. Ask an operator of this service where the gate is served."
        raise Problem("GATE_UNKNOWN", detail, hint=hint)
    opened = state.gate(gate)
    if dfid and review.gate_of([opened.gate], dfid) is None:
        raise Problem("DFID_UNKNOWN", f"There is no decision `{one_line(dfid, 80)}` at gate `{gate}`.", retryable=False)
    return opened


@router.get("")
def waiting_page(request: Request, me: Me) -> Response:
    """Show the cases that wait for a human, sorted and filtered by the query."""
    if "review" not in me.roles:
        return RedirectResponse(f"{PATH}/live", 303)
    wanted, gates = Wanted.read(request.query_params), service(request).gates_of(me.caller)
    found, failures = _waiting(gates)
    page = queue(found, wanted)
    rows = _rows(service(request), gates, page.cases, failures)
    return render(request, "queue.html", here="queue", queue=page, rows=rows, wanted=wanted, failures=failures)


def _waiting(gates: Mapping[str, OpenGate]) -> tuple[list[Waiting], list[str]]:
    """Return the cases that wait at these gates, and why a gate could not be read: the others are shown all the same."""
    found, failures = list[Waiting](), list[str]()
    for name, opened in gates.items():
        try:
            found += waiting(name, opened.gate)
        except SdsError as error:
            failures.append(f"{name}: {error}")
    return found, failures


@router.get("/next")
def next_case(request: Request, me: Me) -> Response:
    """Lead to the next case of a queue that nobody else has taken; to the queue where there is none.

    `after`: the gate and the dfid of the case before.
    """
    me.caller.check("review")
    state, wanted = service(request), Wanted.read(request.query_params)
    gates = state.gates_of(me.caller)
    name, _, dfid = request.query_params.get("after", "").partition("/")
    before: Waiting | None = None
    if name in gates and review.can_be_held(dfid):
        with suppress(SdsError):  # then the first one comes next
            gate = gates[name].gate
            before = at(name, gate, HumanReview(gate.kernel, now_ms=state.now_ms).case(dfid))
    holders = {
        (each, of)
        for each in gates
        for of, by in taken.of_gate(state.database, each, state.now_ms()).items()
        if by.key_digest != me.key_digest
    }
    found = following(_waiting(gates)[0], wanted, before, holders | {(name, dfid)})
    page = f"{PATH}/cases/{found.gate}/{found.head.dfid}" if found else PATH
    return RedirectResponse(page + wanted.query, 303)


def _rows(
    state: Service, gates: Mapping[str, OpenGate], listed: Sequence[Waiting], failures: list[str]
) -> list[QueueRow]:
    """Return the rows of a page. A gate that cannot be read is named in `failures` and has none."""
    rows = dict[tuple[str, str], QueueRow]()
    for name in dict.fromkeys(each.gate for each in listed):
        opened, currency = gates[name].gate, gates[name].definition.demo.currency
        try:
            holders = taken.of_gate(state.database, name, state.now_ms())
            made = [row(each, opened, currency, holders) for each in listed if each.gate == name]
            rows |= {(name, each.dfid): each for each in made if each is not None}
        except SdsError as error:
            failures.append(f"{name}: {error}")
    places = ((each.gate, each.head.dfid) for each in listed)
    return [rows[place] for place in places if place in rows]


@router.get("/cases/{gate}/{dfid}")
def case(request: Request, me: Me, gate: str, dfid: str) -> Response:
    """Show one case, and what may be decided about it."""
    opened = allowed(request, me, gate, "review", dfid)
    return _once(request, me, lambda refused: show_case(request, opened, dfid, refused))


def _once(request: Request, me: ConsoleSession, show: Callable[[Refused | None], Response]) -> Response:
    """Show a page, with the form that was refused there just now, if any. The next time the page shows none."""
    refused = Refused.read(request, me)
    response = show(refused)
    if refused:
        set_cookie(request, response, REFUSED, "")
    return response


def show_case(request: Request, opened: OpenGate, dfid: str, refused: Refused | None = None) -> Response:
    """Show a case, with the form that was refused, if any."""
    state = service(request)
    looked = refused.looked if refused else {}
    reading = HumanReview(opened.gate.kernel, now_ms=state.now_ms)
    page = case_page(opened.gate, dfid, reading, currency=opened.definition.demo.currency, looked=looked)
    holder = taken.of_gate(state.database, opened.name, state.now_ms()).get(dfid)
    fields = dict.fromkeys(("decision", "action", "code", "reason", "reference"), "")
    fields |= {f"number.{number.name}": "" for kind in page.kinds for number in kind.numbers}
    fields |= refused.typed if refused else {}
    query = QueryParams(refused.page.partition("?")[2]) if refused else request.query_params
    values = {"page": page, "taken": holder, "sent": fields, "wanted": Wanted.read(query)}
    status, why = (refused.status, refused.refusal) if refused else (200, None)
    return render(request, "case.html", status, here="queue", refusal=why, **values)


@router.get("/live")
def live_page(request: Request, me: Me) -> Response:
    """Show the live figures, with the forms that halt and resume for operators."""
    return _once(request, me, lambda refused: show_live(request, me, refused))


@router.get("/live/now")
def now(request: Request) -> Response:
    """Show the parts of the live page that are refreshed, which the page asks for by itself: nobody uses the session."""
    return render(request, "renewed.html", **_now(request, _session(request, used=False)))


def show_live(request: Request, me: ConsoleSession, refused: Refused | None = None) -> Response:
    """Show the live page, with the form that was refused, if any."""
    operates = set(service(request).gates_of(me.caller)) if "operate" in me.roles else set[str]()
    sent = dict.fromkeys(("gate", "act", "agent", "reason"), "") | (dict(refused.typed) if refused else {})
    status, why = (refused.status, refused.refusal) if refused else (200, None)
    values = {"may_operate": operates, "sent": sent, "refusal": why}
    return render(request, "live.html", status, here="live", **values, **_now(request, me))


def _now(request: Request, me: ConsoleSession) -> dict[str, Any]:
    """Return the live page's values. Raises Problem where the key has neither `read` nor `operate`."""
    if not me.roles & {"read", "operate"}:
        me.caller.check("read")
    state, gates, failures = service(request), list[live.GateNow](), list[str]()
    for name, opened in state.gates_of(me.caller).items():
        try:
            gates.append(live.gate_now(name, opened.gate, state.now_ms()))
        except SdsError as error:
            failures.append(f"{name}: {error}")
    return {"gates": gates, "failures": failures, "may_review": "review" in me.roles}


@router.get("/decisions/{gate}/{dfid}")
def decision(request: Request, me: Me, gate: str, dfid: str) -> Response:
    """Show the whole causal record of one decision, with its texts for reviewers alone."""
    opened = allowed(request, me, gate, "read", dfid)
    texts = "review" in me.roles and me.caller.may_see(gate)
    page = decision_page(opened.gate, dfid, currency=opened.definition.demo.currency, texts=texts)
    return render(request, "decision.html", here="live", page=page)


@router.get("/find")
def find(request: Request, me: Me) -> Response:
    """Find flows by their dfid or event id; redirect to the flow where it is the only one."""
    asked = request.query_params.get("q", "").strip()
    role = "decisions" if "read" in me.roles else "cases" if "review" in me.roles else ""
    gates = service(request).gates_of(me.caller).items() if asked and role and review.can_be_held(asked) else ()
    found = [(name, dfid) for name, opened in gates for dfid in _flows(opened.gate.store, name, asked)]
    if len(found) == 1:
        return RedirectResponse(f"{PATH}/{role}/{found[0][0]}/{found[0][1]}", 303)
    return render(request, "find.html", asked=asked if not found else "", found=found, room=role)


def _flows(store: Reader, gate: str, asked: str) -> list[str]:
    rows = store.rows(
        "SELECT dfid FROM decision_flows WHERE dfid = ? UNION SELECT dfid FROM events WHERE gate = ? AND event_id = ?",
        (asked, gate, asked),
    )
    return [str(row[0]) for row in rows]


@router.get("/help")
def help_page(request: Request) -> Response:
    """Show the help page, also to those who are not logged in."""
    with suppress(LoggedOutError):
        logged_in(request)
    return render(request, "help.html")


@router.get("/static/{name}")
def file(request: Request, name: str) -> Response:
    """Send a style sheet, a script or an icon; 304 where the browser's copy is current."""
    if name not in STATIC:
        raise Problem("NOT_FOUND")
    data, tag = static(name)
    headers = {"ETag": tag, "Cache-Control": "no-cache"}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(data, media_type=STATIC[name], headers=headers)
