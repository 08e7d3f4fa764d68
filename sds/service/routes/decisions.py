"""POST /v1/gates/{gate}/decisions: ask a gate for a decision."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from functools import cache

from fastapi import APIRouter
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sds.kernel.errors import SdsError
from sds.service.body import BODY_IS_THERE, CLOSE, received_body
from sds.service.callers import Submitter
from sds.service.deciding.terms import Headers, headers_of, terms_of
from sds.service.operations.metrics import Metrics
from sds.service.problems import SAFE, Problem, failed, foreseen, response_of, with_safe_headers
from sds.service.routes import described, submitting
from sds.service.routes.submitting import DecisionReply, DecisionRequest
from sds.service.state import Service

router = APIRouter(tags=["decisions"])
_ASKED = re.compile(re.escape(described.DECIDE).replace(r"\{gate\}", "([^/]+)"))
_HEADERS = ((b"content-type", b"application/json"), *SAFE)


@router.post(described.DECIDE, responses=described.DECIDED, openapi_extra=described.ASKING, response_class=Response)
async def decide(gate: str, who: Submitter) -> Response:
    """Decide one event of a gate. The answer is the decision, whatever it is. The same event again gets the same decision.

    With `Prefer: respond-async` the answer is 202 as soon as the event is on record.
    """
    raise NotImplementedError(gate, who.name)  # never called: this route describes what `Decisions` answers


def gate_asked(path: str) -> str:
    """Return the gate that a path asks for a decision; "" for any other path."""
    asked = _ASKED.fullmatch(path)
    return "" if asked is None else asked[1]


class Decisions:
    """The ASGI application that answers and measures requests for decisions, without FastAPI's layers."""

    def __init__(self, service: Service, metrics: Metrics, token: Callable[[int], str]) -> None:
        self._service, self._metrics, self._token = service, metrics, token
        self._took = cache(lambda status: metrics.request_s.labels(described.DECIDE, "POST", str(status)))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began_s, gate = time.perf_counter(), gate_asked(scope["path"])
        try:
            reply = await self._decided(gate, scope, receive)
            status, headers, body = reply.status, _headers_of(reply), reply.body
            if reply.replayed:
                self._metrics.saved.labels(gate).inc()
        except Exception as error:  # noqa: BLE001  whatever it is, the caller gets a problem
            response = self._problem(error)
            status, headers, body = response.status_code, with_safe_headers(response.raw_headers), bytes(response.body)
        took_s = time.perf_counter() - began_s
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})
        self._took(status).observe(took_s)
        self._metrics.settle()

    async def _decided(self, gate: str, scope: Scope, receive: Receive) -> DecisionReply:
        arrived_s, service, headers = time.monotonic(), self._service, headers_of(scope)
        who = await service.callers.of(headers.get("authorization", ("",))[0])
        who.check("submit", gate)
        opened = service.gate(gate)
        if service.draining:
            raise Problem("DRAINING")
        terms = terms_of(headers, scope["query_string"], opened.deadline_ms_max)
        body = await self._body(scope, headers, receive)
        return await submitting.decide(service, DecisionRequest(opened, who.name, body, terms, arrived_s))

    async def _body(self, scope: Scope, headers: Headers, receive: Receive) -> bytes:
        limit, within_s = self._service.settings.body_bytes_max, self._service.settings.body_within_s
        # true for most requests: a timer would take as long as reading the body does
        if BODY_IS_THERE in scope.get("state", ()):
            return await received_body(headers, receive, limit)
        try:
            async with asyncio.timeout(within_s):
                return await received_body(headers, receive, limit)
        except TimeoutError:
            raise Problem("TOO_SLOW", headers=CLOSE) from None

    def _problem(self, error: Exception) -> Response:
        """Count an error and return its response. An unforeseen one says nothing; the log line has its type and place."""
        if isinstance(error, Problem | SdsError):
            problem = foreseen(error, draining=self._service.draining, again=True)
            self._metrics.refused.labels(problem.code).inc()
            return response_of(problem)
        problem, instance = failed(error, self._service.log, self._token, described.DECIDE, again=True)
        self._metrics.refused.labels(problem.code).inc()
        return response_of(problem, instance=instance)


def _headers_of(reply: DecisionReply) -> list[tuple[bytes, bytes]]:
    headers = [(b"content-length", b"%d" % len(reply.body)), *_HEADERS]
    if reply.replayed:
        headers.append((b"idempotent-replayed", b"true"))
    if reply.status == 202:
        headers += [(b"location", f"/v1/decisions/{reply.dfid}".encode()), (b"preference-applied", b"respond-async")]
    return headers
