"""Render the console's pages from templates, with their security headers; errors are answered with a page, too."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from http import HTTPStatus
from importlib.resources import files
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.concurrency import run_in_threadpool
from starlette.responses import HTMLResponse, RedirectResponse

from sds.kernel.errors import SdsError
from sds.service.console import words
from sds.service.console.session import PATH, ConsoleSession, LoggedOutError
from sds.service.problems import Problem, of_error
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
STATIC = {"console.css": "text/css", "console.js": "text/javascript", "icon.svg": "image/svg+xml"}
_LINKS = (("queue", PATH, "Waiting", {"review"}), ("live", f"{PATH}/live", "Live", {"read", "operate"}))
# The kernel's hints are for a terminal. These replace them on a page, by reason code.
_MENDS = {
    "ACKNOWLEDGEMENT_REQUIRED": "If that is what you want, tick the box that says so, then send it again.",
    "STATE_DRIFT_DETECTED": "Look at what has changed below. What you typed is still here; send it again if it still holds.",
    "FLOW_CLOSED": "What became of it is below.",
}


@dataclass(frozen=True, slots=True)
class Refusal:
    """A refusal as a page shows it: the kernel's message, and a hint (`mend`)."""

    message: str
    mend: str = ""


def refusal(error: SdsError) -> Refusal:
    return Refusal(str(error), _MENDS.get(error.reason_code, error.hint))


def _environment() -> Environment:
    made = Environment(
        loader=PackageLoader("sds.service.console"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"when": words.when, "iso": words.iso, "ago": words.ago, "why": words.why}
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
        "halted": _halted(state, session) if session else (),
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
    """A route that answers with a page and its security headers, also where an error is raised."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the route's handler, wrapped."""
        handle = super().get_route_handler()

        async def page(request: Request) -> Response:
            try:
                response = await handle(request)
            except LoggedOutError:
                response = RedirectResponse(f"{PATH}/login", 303)
            except (Problem, SdsError) as error:
                problem = error if isinstance(error, Problem) else of_error(error)
                response = await run_in_threadpool(_refused, request, problem)
            response.headers["content-security-policy"] = POLICY
            response.headers.setdefault("cache-control", "no-store")
            return response

        return page


def _refused(request: Request, problem: Problem) -> Response:
    reason = REASONS[problem.code]
    said = Refusal(problem.detail or reason.meaning, problem.hint or reason.hint)
    response = render(request, "refused.html", reason.status, refusal=said, phrase=HTTPStatus(reason.status).phrase)
    response.headers.update(problem.headers)
    return response


@cache
def static(name: str) -> tuple[bytes, str]:
    """Return a static file of `STATIC`, and its ETag. Raises KeyError for any other name."""
    if name not in STATIC:
        raise KeyError(name)
    data = files("sds.service.console").joinpath("static", name).read_bytes()
    return data, f'"{sha256(data).hexdigest()[:32]}"'
