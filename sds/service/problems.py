"""Answer errors as `application/problem+json` (RFC 9457). A problem never holds evidence, a key, a password or a traceback.

Routes raise `Problem`, or let an SdsError pass; `reasons` lists the reason codes of both.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence

import orjson
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from sds.kernel.canonical import one_line
from sds.kernel.errors import SdsError, place_of
from sds.kernel.flow.dispatch import Log
from sds.kernel.storage.vault import mask
from sds.service.reasons import REASONS, code_of

MEDIA_TYPE = "application/problem+json"
SAFE_HEADERS = {  # security headers for browsers, on every response
    "cache-control": "no-store",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}
DETAIL_CHARS_MAX = 300
SAFE = tuple((name.encode(), value.encode()) for name, value in SAFE_HEADERS.items())
RETRY_AFTER_S = 1.0
RETRIED = frozenset({404, 409, 429, 503, 504})  # statuses whose problems have `Retry-After` where they are retryable
_BY_STATUS = {404: "NOT_FOUND", 405: "METHOD_NOT_ALLOWED", 413: "BODY_TOO_LARGE", 415: "MEDIA_TYPE", 400: "USAGE"}
# Codes that reading raises because the gate has just been closed
_WHILE_CLOSING = frozenset({"USAGE", "STORE_UNAVAILABLE", "INTERNAL"})
_NO_THREAD = "can't start new thread"  # the message of Python's RuntimeError
_BEFORE_AN_ACT = frozenset({"USAGE"})  # the same before an act; a store's error may come after part of the act was done
COMMAND = re.compile(r"\bsds [a-z]|--[a-z]")
_AS_REQUESTS = (
    (re.compile(r"sds escalations show (\S+)"), r"GET /v1/escalations/\1"),
    (re.compile(r"--(abort|modify|override)"), lambda option: option[1].upper()),
    (re.compile(r"--acknowledge"), "`acknowledge`: true"),
)


class Problem(Exception):  # noqa: N818  what RFC 9457 calls it
    """An error that is answered with a code of `REASONS`. `retryable`: False where this request can never succeed although
    most with its code can. `retry_after_s`: None for the default, `RETRY_AFTER_S`.
    """

    def __init__(
        self,
        code: str,
        detail: str = "",
        *,
        hint: str = "",
        dfid: str = "",
        retryable: bool = True,
        retry_after_s: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(code)
        self.code, self.detail, self.hint, self.dfid = code, detail, hint, dfid
        self.retryable = retryable and REASONS[code].retryable
        self.retry_after_s, self.headers = retry_after_s, dict(headers or {})

    @property
    def status(self) -> int:
        return REASONS[self.code].status


def unknown_parameter(name: str, known: Collection[str]) -> Problem:
    hint = f"parameters: {', '.join(known)}" if known else "this request takes no parameters"
    return Problem("USAGE", f"there is no parameter `{one_line(name, 40)}`", hint=hint)


def of_error(error: SdsError) -> Problem:
    """Return an SdsError as a problem. An INTERNAL one carries no detail."""
    code = code_of(error)
    if code == "INTERNAL":
        return Problem(code)
    hint = _over_http(error.hint)
    if REASONS[code].status < 500 and COMMAND.search(hint):
        hint = ""  # a command means nothing over HTTP: the hint of `REASONS` is sent
    return Problem(code, str(error), hint=hint, dfid=error.dfid, retryable=error.retryable)


def _over_http(hint: str) -> str:
    """Return a hint with its commands and options replaced by the requests and fields that do the same."""
    for command, request in _AS_REQUESTS:
        hint = command.sub(request, hint)
    return hint


def response_of(problem: Problem, *, instance: str = "") -> Response:
    """Return the HTTP response of a problem. `instance`: the URN of a log line."""
    reason = REASONS[problem.code]
    data: dict[str, object] = {
        "type": f"/errors#{problem.code}",
        "title": reason.title,
        "status": reason.status,
        "detail": one_line(mask(problem.detail) or reason.meaning, DETAIL_CHARS_MAX),
        "reason_code": problem.code,
        "retryable": problem.retryable,
        "hint": one_line(problem.hint or reason.hint, DETAIL_CHARS_MAX),
    }
    if problem.dfid:
        data["dfid"] = problem.dfid
    if instance:
        data["instance"] = instance
    headers = dict(problem.headers)
    if reason.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if problem.retryable and reason.status in RETRIED:
        wait_s = RETRY_AFTER_S if problem.retry_after_s is None else problem.retry_after_s
        headers["Retry-After"] = str(max(1, math.ceil(wait_s)))
    return Response(orjson.dumps(data), reason.status, headers, MEDIA_TYPE)


def with_safe_headers(headers: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return the headers of a response, with those of `SAFE_HEADERS` that it lacks added."""
    there = {name.lower() for name, _ in headers}
    return [*headers, *(each for each in SAFE if each[0] not in there)]


def foreseen(error: Exception, *, draining: bool, again: bool) -> Problem:
    """Return the problem that answers a Problem or an SdsError. `again`: the request can safely be repeated, since it only
    reads, or asks for a decision, which is made once for each event.
    """
    if not isinstance(error, SdsError):
        return error if isinstance(error, Problem) else Problem("INTERNAL")
    if draining and code_of(error) in (_WHILE_CLOSING if again else _BEFORE_AN_ACT):
        return Problem("DRAINING")
    return of_error(error)


def add_to(app: FastAPI) -> None:
    """Have an application answer every foreseen exception with a problem; `app.Outermost` answers the others."""

    def http(_: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
        if status == 413:
            headers["Connection"] = "close"  # else the unread rest of the body would be read as the next request
        return response_of(Problem(_BY_STATUS.get(status, "INTERNAL"), headers=headers))

    def invalid(_: Request, error: Exception) -> Response:
        first = error.errors()[0] if isinstance(error, RequestValidationError) and error.errors() else {}
        where = ".".join(str(part) for part in first.get("loc", ()))
        return response_of(Problem("USAGE", f"`{where}`: {first.get('msg', 'is invalid')}"))

    def raised(request: Request, error: Exception) -> Response:
        draining, again = app.state.service.draining, request.method in ("GET", "HEAD")
        return response_of(foreseen(error, draining=draining, again=again))

    app.add_exception_handler(Problem, raised)
    app.add_exception_handler(SdsError, raised)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(RequestValidationError, invalid)


def failed(
    error: Exception, log: Log, token: Callable[[int], str], route: str, *, again: bool = False
) -> tuple[Problem, str]:
    """Log an unforeseen exception: its type and place, not its message. Return its problem, and the URN of the log line.

    `again`: as for `foreseen`. Then a request for which the machine has no memory or no thread may be sent again.
    """
    instance = f"urn:sds:{token(16)}"
    log(
        "service.failed", {"instance": instance, "kind": type(error).__name__, "place": place_of(error), "route": route}
    )
    if again and (isinstance(error, MemoryError) or str(error) == _NO_THREAD):
        return Problem("UNAVAILABLE", "the machine gives the service no more memory, or no more threads"), instance
    detail = (
        "a fault of the service itself ended this request, which may have taken effect; its log names this `instance`"
    )
    return Problem("INTERNAL", detail), instance
