"""The console's POST routes: log in and out, take a case, decide it, halt a gate or suspend an agent. Every form carries its
session's CSRF token. The ledger names the owner of the key.
"""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Annotated

from fastapi import Depends, Request, Response
from starlette.responses import RedirectResponse

from sds.gate import Gate
from sds.kernel.canonical import one_line
from sds.kernel.errors import SdsError, StoreError, UsageError
from sds.service import review
from sds.service.console import forms, live, taken
from sds.service.console.forms import form
from sds.service.console.queue import Wanted
from sds.service.console.rendering import Refusal, Refused, refusal, render
from sds.service.console.routes import (
    SESSION,
    Me,
    allowed,
    logged_in,
    router,
    sessions,
    show_case,
    show_live,
)
from sds.service.console.session import (
    PATH,
    ConsoleSession,
    LoggedOutError,
    Tries,
    cookie_of,
    is_ours,
    is_page,
    login_csrf,
    page_of,
    set_cookie,
)
from sds.service.console.taken import Taken
from sds.service.problems import Problem
from sds.service.review import Move
from sds.service.state import service

LOGIN = "sds_login"
_NOT_OURS = "the form was not sent by a page of this session: nothing was done"
_STILL_IN = "you have logged in anew since that page was made, and are still logged in"

_TAKEN = Refusal("Somebody else took this case after you looked.", "You can take it over, or look at another case.")
_ENDED = Refusal("Your session has ended: what you sent was not done.", "Log in, then send it again from its page.")
_TYPED = Refusal("Your session had ended: what you sent was not done.", "What you typed is still here: send it again.")
_OLD = Refusal("You have logged in anew since this page was made.", "What you typed is still here: send it again.")
_WRONG = Refusal(
    "This key does not open the console.", "Is it complete, still valid, and for one of the roles?", field="key"
)
_BELOW = "Somebody may have done it after you looked. Below is how it stands now."
_NOT_TAKEN = Refusal("You have logged in anew since you looked.", "Below is who has taken this case now.")
_OF_FORMS = re.compile(rf"{PATH}/(?:cases/(?P<case_gate>[^/?]+)/(?P<dfid>[^/?]+)|live(?:/(?P<gate>[^/?]+))?)(?:\?.*)?")

_OTHERS = ["HEAD", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"]  # methods of no page

_HALTS = {"halt": True, "resume": False}
_MOVES: dict[str, Move] = {"suspend": "suspend", "reactivate": "reactivate"}

Form = Annotated[dict[str, str], Depends(form)]


def _is_old(request: Request, me: ConsoleSession, sent: dict[str, str]) -> bool:
    """Tell whether a form's page is of an earlier session. Raises Problem (403) where it is of another site."""
    if not is_ours(request, me.csrf, me.csrf):
        raise Problem("ROLE_MISSING", _NOT_OURS, hint="Load the page again, then send the form from there.")
    return not is_ours(request, sent.get("csrf", ""), me.csrf)


@router.get("/login")
def login_page(request: Request) -> Response:
    """Ask for a key. `asked`: the page to which it leads."""
    return _login(request, {"asked": request.query_params.get("asked", "")})


def _login(request: Request, kept: dict[str, str], status: int = 200, refused: Refusal | None = None) -> Response:
    """Show the log-in. Its form carries the fields `kept` and `asked` of the one that was sent."""
    cookie = cookie_of(request, LOGIN) or request.app.state.token(32)
    carried = {name: text for name, text in kept.items() if name in ("kept", "asked") and text}
    response = render(request, "login.html", status, csrf=login_csrf(cookie), refusal=refused, carried=carried)
    set_cookie(request, response, LOGIN, cookie)
    return response


def _tries(request: Request) -> Tries:
    state = request.app.state
    if not hasattr(state, "console_tries"):
        state.console_tries = Tries(service(request).now_ms)
    tries: Tries = state.console_tries
    return tries


@router.post("/login")
def log_in(request: Request, sent: Form) -> Response:
    """Open a session for a key. A right key is always accepted, however many wrong ones were tried.

    A form that was sent after its session ended comes here with `ended`, its path. The log-in keeps what was typed.
    """
    cookie, asked = cookie_of(request, LOGIN), sent.get("asked", "")
    if ended := request.query_params.get("ended"):
        kept = {"kept": forms.kept(sent, ended), "asked": page_of(ended)} if is_ours(request, "", "") else {}
        return _login(request, kept, 401, _ENDED)
    if not cookie or not is_ours(request, sent.get("csrf", ""), login_csrf(cookie)):
        return _login(request, sent, 403, Refusal("The log-in form was out of date.", "This is a new one: try again."))
    made = sessions(request).open(sent.get("key", "").strip())
    if made is None:
        return _wrong_key(request, sent)
    request.state.session = made
    page, typed = asked if is_page(asked) else PATH, forms.texts_in(sent.get("kept", ""))
    response: Response = RedirectResponse(page, 303)
    if (form := _OF_FORMS.fullmatch(typed.pop("page", ""))) and is_page(page_of(form[0])):
        typed |= {"gate": form["gate"] or ""}
        with suppress(Problem, SdsError):  # the key may not see the page
            response = _refused(request, made, Refused(page_of(form[0]), 200, _TYPED, typed))
    set_cookie(request, response, SESSION, made.cookie)
    set_cookie(request, response, LOGIN, "")
    return response


def _refused(request: Request, me: ConsoleSession, refused: Refused) -> Response:
    """Lead to the page of a form that was refused, which says so and has what was typed; or answer with it."""
    if on := refused.sent_on(request, me):
        return on
    page = _OF_FORMS.fullmatch(refused.page)
    if page and page["dfid"]:
        opened = allowed(request, me, page["case_gate"], "review", page["dfid"])
        return show_case(request, opened, page["dfid"], refused)
    return show_live(request, me, refused)


def _wrong_key(request: Request, sent: dict[str, str]) -> Response:
    """Refuse a wrong key: 401, or 429 where too many have come from its address."""
    tries, address = _tries(request), request.client.host if request.client else ""
    if wait_s := tries.wait_s(address):
        response = _login(request, sent, 429, Refusal("Too many tries.", f"Try again in {wait_s} seconds."))
        response.headers["Retry-After"] = str(wait_s)
        return response
    tries.failed(address)
    return _login(request, sent, 401, _WRONG)


@router.post("/logout")
def log_out(request: Request, sent: Form) -> Response:
    """End the session; one that has ended already stays so."""
    response = RedirectResponse(f"{PATH}/login", 303)
    try:
        me = logged_in(request)
    except LoggedOutError:
        return response
    if _is_old(request, me, sent):
        raise Problem("ROLE_MISSING", _STILL_IN, hint="Log out from this page.")
    sessions(request).end(me)
    set_cookie(request, response, SESSION, "")
    return response


@router.post("/cases/{gate}/{dfid}/take")
def take(request: Request, me: Me, gate: str, dfid: str, sent: Form) -> Response:
    """Take a case, which others can see, or give it back."""
    allowed(request, me, gate, "review", dfid)
    page = _case(request, gate, dfid)
    if _is_old(request, me, sent):
        return _refused(request, me, Refused(page, 403, _NOT_TAKEN))
    state = service(request)
    by = Taken(me.name, me.key_digest, state.now_ms())
    if sent.get("take") != "yes":
        taken.give_back(state.database, gate, dfid, me.key_digest)
    elif not taken.take(state.database, gate, dfid, by, sent.get("holder", "")):
        return _refused(request, me, Refused(page, 409, _TAKEN))
    return RedirectResponse(f"{page}#decide", 303)


def _case(request: Request, gate: str, dfid: str) -> str:
    """Return the address of a case's page, which keeps how the queue was sorted and filtered."""
    return f"{PATH}/cases/{gate}/{dfid}{Wanted.read(request.query_params).query}"


@router.post("/cases/{gate}/{dfid}")
def decide(request: Request, me: Me, gate: str, dfid: str, sent: Form) -> Response:
    """Decide a case as its form says. Where that is refused, show the case as it is now, and why."""
    opened, page = allowed(request, me, gate, "review", dfid), _case(request, gate, dfid)
    typed, looked = forms.typed_in(sent), forms.looked_at(sent)
    if _is_old(request, me, sent):
        return _refused(request, me, Refused(page, 403, _OLD, typed, looked))
    state = service(request)
    try:
        wanted = forms.decided(sent, me.name, _decimals(opened.gate, sent.get("action", "")))
        review.decide(opened.gate, dfid, wanted)
    except SdsError as error:
        status, why = 503 if isinstance(error, StoreError) else 409, refusal(error, forms.field_of(error, sent))
        return _refused(request, me, Refused(page, status, why, typed, looked))
    with suppress(StoreError):  # the case is decided all the same
        taken.free(state.database, gate, dfid)
    return RedirectResponse(page, 303)


def _decimals(gate: Gate, action: str) -> dict[str, int]:
    """Return the number of decimals of each parameter of a kind, by the contract's terms for humans."""
    spec = gate.contract.human.kinds.get(action) or gate.contract.kinds.get(action)
    return {name: spec.scale(name) for name in spec.params} if spec else {}


@router.post("/live/{gate}")
def operate(request: Request, me: Me, gate: str, sent: Form) -> Response:
    """Halt or resume a gate, or suspend or reactivate its agent, with a reason."""
    opened, page = allowed(request, me, gate, "operate"), f"{PATH}/live"
    typed = forms.typed_in(sent) | {"gate": gate}
    if _is_old(request, me, sent):
        return _refused(request, me, Refused(page, 403, _OLD, typed))
    try:
        _operate(opened.gate, me.name, sent, service(request).now_ms())
    except SdsError as error:
        return _refused(request, me, Refused(page, 409, refusal(error, forms.field_of(error, sent)), typed))
    return RedirectResponse(page, 303)


def _operate(gate: Gate, who: str, sent: dict[str, str], now_ms: int) -> None:
    act, agent, reason = sent.get("act", ""), sent.get("agent", ""), forms.whole(sent, "reason")
    if act in _HALTS:
        if act == "resume":
            _refuse_unseen(live.halted_ms(gate), sent)
        if not review.set_halted(gate, _HALTS[act], who=who, reason=reason, now_ms=now_ms)["changed"]:
            raise UsageError(f"the gate is {'halted' if _HALTS[act] else 'running'} already", hint=_BELOW)
    elif act in _MOVES:
        if act == "reactivate":
            _refuse_unseen(live.stopped_ms(gate, agent), sent)
        try:
            review.move_agent(gate, agent, _MOVES[act], who=who, reason=reason, now_ms=now_ms)
        except review.SameStatusError as error:
            raise UsageError(str(error), hint=_BELOW) from error
    else:
        raise UsageError(f"there is no action `{one_line(act, 80)}` on this page")


def _refuse_unseen(stopped_ms: int | None, sent: dict[str, str]) -> None:
    """Raise UsageError where a gate or an agent was stopped for another reason than the one on the form's page."""
    if stopped_ms is not None and sent.get("since") != str(stopped_ms):
        hint = "Read below who stopped it and why. If it is still right, send it again."
        raise UsageError("it was stopped anew after you looked", hint=hint)


@router.api_route("", methods=_OTHERS)
@router.api_route("/{path:path}", methods=["GET", "POST", *_OTHERS])
def no_page(request: Request, path: str = "") -> Response:
    """Lead from the address of a form to the page that has it; say of any other address that there is no page."""
    if request.method in _OTHERS:
        raise Problem("METHOD_NOT_ALLOWED", headers={"Allow": "GET, POST"})
    whole = f"{PATH}/{path}"
    if request.method == "GET" and is_page(page := page_of(whole)):
        return RedirectResponse(page, 303)
    with suppress(LoggedOutError):
        logged_in(request)
    raise Problem("NOT_FOUND", "no page has this address", hint="Check the address, or go back to the console.")
