"""Decisions: asking for one, and looking at those that were made."""

from __future__ import annotations

import time

from fastapi import APIRouter, Request
from starlette.responses import Response

from sds.service.body import read_body
from sds.service.callers import Submitter
from sds.service.deciding.terms import terms_of
from sds.service.problems import Problem
from sds.service.routes import described, submitting
from sds.service.state import service

router = APIRouter(tags=["decisions"])


@router.post(described.DECIDE, responses=described.DECIDED, openapi_extra=described.ASKING, response_class=Response)
async def decide(request: Request, gate: str, who: Submitter) -> Response:
    """Decide one event of a gate and answer with the decision, whatever it is; the same event again gives the same one.

    `Prefer: respond-async` answers 202 as soon as the event is on record.
    """
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
