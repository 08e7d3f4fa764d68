"""/v1/agents: show, suspend, reactivate and retire agents. Nothing an agent does lifts its suspension."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.concurrency import run_in_threadpool

from sds.gate import Gate
from sds.service import review
from sds.service.callers import Caller, Operator, Viewer
from sds.service.fields import TEXT, body_schema, read_fields
from sds.service.problems import Problem
from sds.service.review import Move
from sds.service.routes.described import ok
from sds.service.schemas.agents import AgentList, AgentRecord
from sds.service.state import service

_REQUIRED = {"reason": TEXT}

router = APIRouter(prefix="/v1/agents", tags=["agents"])


@router.get("", responses=ok(AgentList))
def list_agents(request: Request, who: Viewer) -> dict[str, list[dict[str, Any]]]:
    """List the agents of the gates that the key may see, each with its state and its contract."""
    gates = service(request).gates_of(who).values()
    return {"agents": [agent for each in gates for agent in review.agents(each.gate)]}


@router.get("/{agent_id}", responses=ok(AgentRecord))
def get_agent(request: Request, agent_id: str, who: Viewer) -> dict[str, Any]:
    """Show one agent: its owner, its state (since when, by whom and why), its contracts and its history."""
    return review.agent(_gate_of(request, who, agent_id), agent_id, now_ms=service(request).now_ms())


@router.post("/{agent_id}/{move}", responses=ok(AgentRecord), openapi_extra=body_schema(_REQUIRED, {}))
async def move_agent(request: Request, agent_id: str, move: Move, who: Operator) -> dict[str, Any]:
    """Suspend, reactivate or retire an agent. The record keeps the `reason`."""
    given = await read_fields(request, _REQUIRED, {})
    state = service(request)

    def moved() -> dict[str, Any]:
        gate = _gate_of(request, who, agent_id)
        return review.move_agent(gate, agent_id, move, who=who.name, reason=given["reason"], now_ms=state.now_ms())

    return await run_in_threadpool(moved)


def _gate_of(request: Request, who: Caller, agent_id: str) -> Gate:
    """Return the gate that the caller may see whose record has an agent. Raises Problem (404)."""
    gates = [each.gate for each in service(request).gates_of(who).values()]
    found = next((gate for gate in gates if review.has_agent(gate, agent_id)), None)
    if found is None:
        raise Problem("NOT_FOUND", "there is no such agent", hint="GET /v1/agents lists them")
    return found
