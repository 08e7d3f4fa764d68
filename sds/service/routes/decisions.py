"""Decisions: asking for one, and looking at those that were made."""

from __future__ import annotations

import re
import time

from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from sds.kernel.errors import SdsError
from sds.service.body import read_body
from sds.service.callers import Caller, Submitter, authorized
from sds.service.deciding.terms import terms_of
from sds.service.problems import Problem, foreseen
from sds.service.routes import described, submitting
from sds.service.state import service

router = APIRouter(tags=["decisions"])
_ASKED = re.compile(re.escape(described.DECIDE).replace(r"\{gate\}", "([^/]+)"))


@router.post(described.DECIDE, responses=described.DECIDED, openapi_extra=described.ASKING, response_class=Response)
async def decide(request: Request, gate: str, who: Submitter) -> Response:
    """Decide one event of a gate and answer with the decision, whatever it is; the same event again gives the same one.

    `Prefer: respond-async` answers 202 as soon as the event is on record.
    """
    return await _decided(request, gate, who)


class Decisions:
    """Wraps an application and answers requests for decisions itself, as its route would, which describes them: FastAPI's
    dependencies and stacks would take half of the time that HTTP adds to a decision.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asking = scope["type"] == "http" and scope["method"] == "POST"
        asked = _ASKED.fullmatch(scope["path"]) if asking else None
        if asked is None:
            await self._app(scope, receive, send)
            return
        scope["path_params"], scope["route"] = {"gate": asked[1]}, router.routes[0]
        request = Request(scope, receive, send)
        try:
            response = await _decided(request, asked[1], await authorized(request, "submit"))
        except (Problem, SdsError) as error:
            response = foreseen(request, error)
        await response(scope, receive, send)


async def _decided(request: Request, gate: str, who: Caller) -> Response:
    arrived_s, state = time.monotonic(), service(request)
    opened = state.gate(gate)
    if state.draining:
        raise Problem("DRAINING")
    terms = terms_of(request, opened.deadline_ms_max)
    body = await read_body(request)
    decided = await submitting.decide(state, submitting.DecisionRequest(opened, who.name, body, terms, arrived_s))
    headers = {"Idempotent-Replayed": "true"} if decided.replayed else {}
    if decided.status == 202:
        headers |= {"Location": f"/v1/decisions/{decided.dfid}", "Preference-Applied": "respond-async"}
    return Response(decided.body, decided.status, headers, "application/json")
