"""Render the console's pages from templates, with their security headers; errors are answered with a page, too."""

from __future__ import annotations

import hmac
import json
import zlib
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from hashlib import sha256
from importlib.resources import files
from typing import Any
from urllib.parse import quote, urlencode

from fastapi import Request, Response
from fastapi.routing import APIRoute
from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.concurrency import run_in_threadpool
from starlette.responses import HTMLResponse, RedirectResponse

from sds.kernel.errors import SdsError, StoreError
from sds.service.console import words
from sds.service.console.session import (
    COOKIE_CHARS_MAX,
    PATH,
    ConsoleSession,
    LoggedOutError,
    cookie_of,
    is_page,
    page_of,
    set_cookie,
)
from sds.service.problems import COMMAND, Problem, failed, foreseen
from sds.service.reasons import REASONS
from sds.service.state import Service, service

POLICY = "; ".join(
    (
        "default-src 'none'",
        *(f"{what}-src 'self'" for what in ("style", "script", "img", "connect")),
        "form-action 'self'",
        "frame-ancestors 'none'",
        "base-uri 'none'",
    )
)
REFUSED, REFUSED_S = "sds_refused", 60  # a cookie, and how long a browser keeps it at most, in seconds
STATIC = {"console.css": "text/css", "console.js": "text/javascript", "icon.svg": "image/svg+xml"}
_LINKS = (("queue", PATH, "Waiting", {"review"}), ("live", f"{PATH}/live", "Live", {"read", "operate"}))
# Hints for programs and terminals mean nothing to a case worker. These replace them on a page, by reason code.
_OPERATOR = "An operator of this service can help: "
_MENDS = {
    "ACKNOWLEDGEMENT_REQUIRED": "If you want this decision, tick the box that confirms it, then send the form again.",
    "STATE_DRIFT_DETECTED": "Look at the changes below. What you typed is still here: send it again if it is still right.",
    "FLOW_CLOSED": "The result is below.",
    **dict.fromkeys(("ROLE_MISSING", "GATE_FORBIDDEN"), "Ask an operator of this service for a key that may do this."),
    "NOT_FOUND": "Load the page again, and look what is there now.",
    "METHOD_NOT_ALLOWED": "Open the page from the console.",
    "DFID_UNKNOWN": "Check the address of the page, or look for the case with Find.",
    "CONFLICT": "Load the page again, and look what is there now.",
    "BODY_TOO_LARGE": "Go back to the page, shorten what you typed, and send it again.",
    "DRAINING": "Load the page again in a minute.",
    **dict.fromkeys(
        ("LEDGER_ALTERED", "KEY_LOST"),
        "Nothing was sent. Tell an operator of this service. You can still return or end the case.",
    ),
    **dict.fromkeys(
        ("RATE_LIMITED", "TOO_SLOW", "STATE_UNAVAILABLE", "EXECUTOR_REFUSED", "UNAVAILABLE"),
        "Wait a moment, then load the page again.",
    ),
}
# What happened, in words for people, where a problem of the service speaks of requests.
_HAPPENED = {
    "METHOD_NOT_ALLOWED": "This address can be opened, but nothing can be done with it in this way.",
    "BODY_TOO_LARGE": "What was sent is too long.",
    "TOO_SLOW": "What was sent did not arrive in time.",
    "RATE_LIMITED": "This key has asked for more pages than it may in this time.",
    "DRAINING": "The service is being stopped or restarted.",
    "INTERNAL": "A fault in the console stopped it from answering.",
}
_TITLES = {
    "USAGE": "This cannot be done",
    "METHOD_NOT_ALLOWED": "This cannot be done here",
    "BODY_TOO_LARGE": "Too long",
    "TOO_SLOW": "Too slow",
    "MEDIA_TYPE": "This is not a form of the console",
    "RATE_LIMITED": "Too many pages at once",
    "INTERNAL": "A fault in the console",
}
_UNSURE = frozenset({StoreError.reason_code, "INTERNAL"})  # what was sent may have been done before that
_LOOK = "The case below is as it is now. Correct your decision, or end the case."


@dataclass(frozen=True, slots=True)
class Refusal:
    """A refusal as a page shows it: the kernel's message, and a hint (`mend`). `unsure`: the store failed meanwhile, perhaps
    after what was sent had been done. `field`: the field that it is about, as the end of its id; "": of the whole form.
    """

    message: str
    mend: str = ""
    unsure: bool = False
    field: str = ""


@dataclass(frozen=True, slots=True)
class Refused:
    """A form that was refused, as its page shows it next. `typed`: by name of the fields; `looked`: the state on the page that
    the form was sent from.

    A cookie of the browser carries it from the answer to the form to its page: Back and Reload then ask for a page, and send
    no form again. Nothing is kept on the server, and nothing typed stands in an address.
    """

    page: str
    status: int
    refusal: Refusal
    typed: Mapping[str, str] = field(default_factory=dict)
    looked: Mapping[str, str] = field(default_factory=dict)

    def sent_on(self, request: Request, session: ConsoleSession) -> Response | None:
        """Return a redirect to the page; None where the page has to be the answer: a cookie cannot hold it, or it is not sure
        that nothing was done, and the next request may fail, too.
        """
        data = urlsafe_b64encode(zlib.compress(json.dumps(asdict(self), ensure_ascii=False).encode(), 9)).decode()
        if self.refusal.unsure or len(data) > COOKIE_CHARS_MAX - 65:
            return None
        response = RedirectResponse(self.page, 303)
        set_cookie(request, response, REFUSED, f"{_seal(session, data)}.{data}", max_age_s=REFUSED_S)
        return response

    @classmethod
    def read(cls, request: Request, session: ConsoleSession) -> Refused | None:
        """Return what `sent_on` sent on to the page that is asked for, if anything."""
        seal, _, data = cookie_of(request, REFUSED).partition(".")
        if not data or not hmac.compare_digest(seal.encode(), _seal(session, data).encode()):
            return None
        try:
            read = json.loads(zlib.decompress(urlsafe_b64decode(data)))
            made = cls(**read | {"refusal": Refusal(**read["refusal"])})
        except (KeyError, TypeError, ValueError, zlib.error):  # another version of the service has written it
            return None
        return made if made.page.partition("?")[0] == request.url.path else None


def _seal(session: ConsoleSession, data: str) -> str:
    """Return what only a page of this session can write: other programs of a machine can set cookies for its name."""
    return hmac.new(session.csrf.encode(), data.encode(), sha256).hexdigest()


def refusal(error: SdsError, field: str) -> Refusal:
    """Return a refusal of the kernel. A hint that is a command or JSON is replaced by what can be done on a page, and the id of the
    page's own case by words.
    """
    mend = _MENDS.get(error.reason_code, error.hint)
    if COMMAND.search(mend) or "{" in mend:
        mend = _OPERATOR + mend if isinstance(error, StoreError) else _LOOK
    message = str(error).replace(f"flow `{error.dfid}`", "this case") if error.dfid else str(error)
    return Refusal(message, mend, unsure=isinstance(error, StoreError) and error.retryable, field=field)


def _visible(value: object) -> object:
    """Spell out what cannot be seen in every text that a page prints, whoever wrote it. What `| e` has escaped stays as it is:
    in the fields of a form, what a person typed.
    """
    return words.visible(value) if isinstance(value, str) and not hasattr(value, "__html__") else value


def _environment() -> Environment:
    made = Environment(
        loader=PackageLoader("sds.service.console"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_visible,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"when": words.when, "iso": words.iso, "ago": words.ago, "why": words.why, "short": words.short}
    made.filters |= {"order": words.order, "percent": words.percent}
    return made


_PAGES = _environment()


def render(request: Request, template: str, status: int = 200, **values: Any) -> HTMLResponse:
    """Return a page. Its head shows who is logged in, and which gates are halted; `values` are the template's own."""
    state: Service = service(request)
    session: ConsoleSession | None = getattr(request.state, "session", None)
    whole = {
        "me": session,
        "csrf": session.csrf if session else "",
        "links": [link[:3] for link in _LINKS if session and session.roles & link[3]],
        "here": "",
        "halted": _halted(state, session) if session and "halted" not in values else (),
        "now_ms": state.now_ms(),
        "refusal": None,
        **values,
    }
    return HTMLResponse(_PAGES.get_template(template).render(whole), status)


def _halted(state: Service, session: ConsoleSession) -> tuple[str, ...]:
    try:
        return tuple(name for name, each in state.gates_of(session.caller).items() if each.gate.store.halted)
    except (Problem, SdsError):  # the page's own content shows the error
        return ()


class ConsoleRoute(APIRoute):
    """A route that answers with a page and its security headers, whatever is raised. The page of an unforeseen exception says
    nothing about it; the log line has the exception's type and place.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the route's handler, wrapped."""
        handle = super().get_route_handler()

        async def page(request: Request) -> Response:
            try:
                response = await handle(request)
            except LoggedOutError:
                response = _to_login(request)
            except (Problem, SdsError) as error:
                draining, again = service(request).draining, request.method != "POST"
                response = await run_in_threadpool(_refused, request, foreseen(error, draining=draining, again=again))
            except Exception as error:  # noqa: BLE001  whatever it is, a person gets a page
                problem, instance = failed(error, service(request).log, request.app.state.token, self.path)
                response = await run_in_threadpool(_refused, request, problem, instance)
            response.headers["content-security-policy"] = POLICY
            response.headers.setdefault("cache-control", "no-store")
            return response

        return page


def _to_login(request: Request) -> Response:
    """Send a form on to the log-in, which keeps what was typed. From a page lead to the log-in, and from there to the page."""
    if request.method == "POST":
        return RedirectResponse(f"{PATH}/login?{urlencode({'ended': _address(request)})}", 307)
    asked = _address(request)
    return RedirectResponse(f"{PATH}/login?{urlencode({'asked': asked})}" if asked != PATH else f"{PATH}/login", 303)


def _address(request: Request) -> str:
    return quote(request.scope["path"]) + (f"?{request.url.query}" if request.url.query else "")


def _refused(request: Request, problem: Problem, instance: str = "") -> Response:
    """Return the page of a problem, and count it. `instance`: the URN of a log line."""
    reason, code, sent = REASONS[problem.code], problem.code, request.method == "POST"
    happened = _HAPPENED.get(code, "") or problem.detail or reason.meaning
    mend = problem.hint or _MENDS.get(code, reason.hint)
    mend = _OPERATOR + mend if COMMAND.search(mend) else mend
    unsure = sent and code in _UNSURE and (problem.retryable or code == "INTERNAL")
    page = page_of(_address(request))
    if instance:
        mend = f"Tell an operator of this service, who finds it in the log as {instance}."
    response = render(
        request,
        "refused.html",
        reason.status,
        refusal=Refusal(happened, mend, unsure),
        title=_TITLES.get(code, reason.title),
        page=page if sent and is_page(page) else "",
        sent=sent,
        **({"halted": ()} if instance else {}),  # to read it may be what failed
    )
    response.headers.update(problem.headers)
    request.app.state.operations.metrics.refused.labels(code).inc()
    return response


@cache
def static(name: str) -> tuple[bytes, str]:
    """Return a static file of `STATIC`, and its ETag. Raises KeyError for any other name."""
    if name not in STATIC:
        raise KeyError(name)
    data = files("sds.service.console").joinpath("static", name).read_bytes()
    return data, f'"{sha256(data).hexdigest()[:32]}"'
