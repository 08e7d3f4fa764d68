"""Decisions: asking for one, and looking at those that were made."""

from __future__ import annotations

import orjson
from fastapi import APIRouter, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from sds.service.body import read_body
from sds.service.callers import Submitter
from sds.service.problems import Problem
from sds.service.state import service

router = APIRouter(tags=["decisions"])


@router.post("/v1/gates/{gate}/decisions")
async def decide(request: Request, gate: str, _: Submitter) -> Response:
    """Decide one event of a gate; the same event again gives the stored answer."""
    state = service(request)
    opened = state.gate(gate)
    if state.draining:
        raise Problem("DRAINING")
    body = await read_body(request)
    answer = await run_in_threadpool(opened.gate.decide, body)
    return Response(orjson.dumps(answer.as_data()), media_type="application/json")
